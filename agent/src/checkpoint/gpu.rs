//! The GPU memory of a container that is to be dumped: who has some, and whether there is room for it.

use std::io;
use std::path::Path;

use fs_err as fs;
use kybernate_packager::criu::device_of;
use kybernate_spec::chain;
use kybernate_spec::checkpoint::{DeviceFacts, DeviceStorage, DeviceStream};
use kybernate_spec::gpu::STORAGE_DRIVER;

use crate::app::App;
use crate::cgroup::Freezer;
use crate::config::GpuStorage;
use crate::gpu::{Held, plugin};

/// What a look at a container that is to be dumped has found.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) held: Held,
    /// Whether GPU memory goes into files of its own.
    pub(super) aside: bool,
    /// Why it cannot, where it has to.
    pub(super) lack: Option<String>,
}

/// Finds the processes of a running container that have memory on a GPU, which goes into their own. The
/// error says, for people, why it cannot.
pub(crate) async fn find(app: &App, pid: u32, cgroup: Option<String>) -> Result<Held, String> {
    let (held, left) = look(app, pid, cgroup).await?;
    has_room(held, left)
}

/// The same before a dump, where GPU memory may go into files: these need no room in the cgroup.
pub(super) async fn find_for_dump(
    app: &App,
    pid: u32,
    cgroup: Option<String>,
) -> Result<Found, String> {
    let (held, left) = look(app, pid, cgroup).await?;
    let wanted = app.config.gpu.storage;
    if held.is_empty() || !app.gpus.is_asked() || wanted == GpuStorage::Pages {
        return Ok(Found { held: has_room(held, left)?, ..Found::default() });
    }
    if app.gpus.has_storage().await.map_err(|error| chain(&error).to_string())? {
        return Ok(Found { held, aside: true, lack: None });
    }
    let held = has_room(held, left)?;
    let lack = (wanted == GpuStorage::Device).then(|| {
        let loaded = app.gpus.loaded().unwrap_or_else(|| "without custom storage".to_owned());
        let needed = STORAGE_DRIVER;
        format!("driver {loaded} is loaded, {needed} is needed for [gpu] storage = \"device\"")
    });
    Ok(Found { held, aside: false, lack })
}

/// Returns who has memory on a GPU, and how many bytes the cgroup may still have.
async fn look(app: &App, pid: u32, cgroup: Option<String>) -> Result<(Held, Option<u64>), String> {
    let nobody = (Held::default(), None);
    if !app.gpus.is_asked() && !app.gpus.is_plugin() {
        return Ok(nobody);
    }
    if app.gpus.is_too_old() {
        // What has a GPU open is refused by the look before the pause; the rest is as without one.
        return Ok(nobody);
    }
    let looked = tokio::task::spawn_blocking(move || {
        let freezer = Freezer::of(pid, cgroup.as_deref())?;
        Ok((freezer.processes()?, freezer.memory_left()))
    });
    let looked: io::Result<_> = looked.await.map_err(io::Error::other).and_then(|found| found);
    let (pids, left) = looked.map_err(|error| format!("its processes: {error}"))?;
    let held = app.gpus.find(&pids).await.map_err(|error| chain(&error).to_string())?;
    Ok((held, left))
}

/// The driver moves GPU memory into the memory of the processes themselves.
fn has_room(held: Held, left: Option<u64>) -> Result<Held, String> {
    let bytes = bytes(&held);
    match left {
        Some(left) if left < bytes => Err(format!(
            "{bytes} bytes come from its GPUs into its memory, and its cgroup may have {left} more"
        )),
        _ => Ok(held),
    }
}

/// Returns how many bytes come from GPUs.
pub(crate) fn bytes(held: &Held) -> u64 {
    held.uses.iter().fold(0, |sum, one| sum.saturating_add(one.bytes))
}

/// Returns what people should know of CRIU's plugins that a dump needs: only NVIDIA's by now.
pub(super) fn warning(needed: &[String], is_plugin: bool) -> Option<String> {
    // It does so for whatever process has been on a GPU, also when the driver was asked before.
    (!needed.is_empty() && !is_plugin).then(|| {
        format!(
            "CRIU's {0} took part in the dump although the agent asks the driver: it is restored with \
             [gpu] method = \"plugin\" only, so remove {0}.so from {1}",
            plugin::CUDA,
            plugin::PLACES.join(", ")
        )
    })
}

/// Returns what a checkpoint says of its GPU memory, when that is where it goes. `needed` are CRIU's
/// plugins that the dump needs.
pub(super) async fn facts(held: &Held, needed: &[String]) -> io::Result<DeviceFacts> {
    if held.is_empty() {
        // The plugin knows drivers that cannot be asked who has memory.
        let is_pages = needed.iter().any(|name| name == plugin::CUDA);
        let storage = if is_pages { DeviceStorage::Pages } else { DeviceStorage::None };
        return Ok(DeviceFacts { storage, ..DeviceFacts::default() });
    }
    let (storage, streams) = match held.storage.clone() {
        None => (DeviceStorage::Pages, Vec::new()),
        Some(directory) => {
            let listed = tokio::task::spawn_blocking(move || streams(&directory)).await;
            (DeviceStorage::Device, listed.map_err(io::Error::other)??)
        }
    };
    let mut gpus = held.gpus();
    for stream in &streams {
        if !gpus.contains(&stream.gpu) {
            gpus.push(stream.gpu.clone());
        }
    }
    Ok(DeviceFacts { storage, gpus, streams })
}

/// Lists the files with GPU memory among a dump's.
fn streams(directory: &Path) -> io::Result<Vec<DeviceStream>> {
    let mut streams = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(file) = entry.file_name().into_string() else { continue };
        if let Some((pid, gpu)) = device_of(&file) {
            streams.push(DeviceStream { file, pid, gpu, bytes: entry.metadata()?.len() });
        }
    }
    streams.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Process, Use};

    fn held() -> Held {
        let uses = ["GPU-a", "GPU-b"].map(|uuid| Use { uuid: uuid.to_owned(), bytes: 7 });
        Held { processes: vec![Process { pid: 1, born: 2 }], uses: uses.to_vec(), storage: None }
    }

    #[tokio::test]
    async fn gpu_memory_is_in_the_pages_of_who_has_some() {
        assert_eq!(facts(&Held::default(), &[]).await.unwrap(), DeviceFacts::default());
        let by_plugin = facts(&Held::default(), &[plugin::CUDA.to_owned()]).await.unwrap();
        assert_eq!((by_plugin.storage, by_plugin.gpus), (DeviceStorage::Pages, Vec::new()));
        let gpus = vec!["GPU-a".to_owned(), "GPU-b".to_owned()];
        let expected = DeviceFacts { storage: DeviceStorage::Pages, gpus, streams: Vec::new() };
        assert_eq!(facts(&held(), &[]).await.unwrap(), expected);
        assert_eq!(bytes(&held()), 14);
        assert!(has_room(held(), Some(13)).unwrap_err().contains("14 bytes come"));
        assert_eq!(has_room(held(), Some(14)), has_room(held(), None));
    }

    #[test]
    fn who_asks_the_driver_is_told_of_the_plugin() {
        let cuda = [plugin::CUDA.to_owned()];
        assert_eq!(warning(&[], false), None);
        assert_eq!(warning(&cuda, true), None);
        let told = warning(&cuda, false).unwrap();
        assert!(told.contains("method = \"plugin\" only"), "{told}");
    }

    #[tokio::test]
    async fn gpu_memory_in_files_is_listed_with_what_it_is_of() {
        let directory = tempfile::tempdir().unwrap();
        let gpu = "GPU-00000000-0000-0000-0000-00000000000a".to_owned();
        let file = "device-1f-0000000000000000000000000000000a.img".to_owned();
        fs::write(directory.path().join(&file), [7; 5]).unwrap();
        fs::write(directory.path().join("core-1.img"), "").unwrap();
        let storage = Some(directory.path().to_owned());
        let uses = Vec::new();
        let facts = facts(&Held { uses, storage, ..held() }, &[]).await.unwrap();
        let streams = vec![DeviceStream { file, pid: 0x1f, gpu: gpu.clone(), bytes: 5 }];
        let storage = DeviceStorage::Device;
        assert_eq!(facts, DeviceFacts { storage, gpus: vec![gpu], streams });
    }
}
