//! The GPU memory of a container that is to be dumped: who has some, and whether there is room for it.

use std::io;

use kybernate_spec::chain;
use kybernate_spec::checkpoint::{DeviceFacts, DeviceStorage};

use crate::app::App;
use crate::cgroup::Freezer;
use crate::gpu::Held;

/// Finds the processes of a running container that have memory on a GPU. The error says, for people,
/// why they cannot be dumped.
pub(crate) async fn find(app: &App, pid: u32) -> Result<Held, String> {
    if !app.gpus.is_asked() && !app.gpus.is_plugin() {
        return Ok(Held::default());
    }
    if app.gpus.is_too_old() {
        // What has a GPU open is refused by the look before the pause; the rest is as without one.
        return Ok(Held::default());
    }
    let looked = tokio::task::spawn_blocking(move || {
        let freezer = Freezer::of(pid)?;
        Ok((freezer.processes()?, freezer.memory_left()))
    });
    let looked: io::Result<_> = looked.await.map_err(io::Error::other).and_then(|found| found);
    let (pids, left) = looked.map_err(|error| format!("its processes: {error}"))?;
    let held = app.gpus.find(&pids).await.map_err(|error| chain(&error).to_string())?;
    let bytes = bytes(&held);
    match left {
        // The driver moves it into the memory of the processes themselves.
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

/// Returns what a checkpoint says of its GPU memory.
pub(super) fn facts(held: &Held) -> DeviceFacts {
    if held.is_empty() {
        return DeviceFacts::default();
    }
    DeviceFacts { storage: DeviceStorage::Pages, gpus: held.gpus(), ..DeviceFacts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Process, Use};

    #[test]
    fn gpu_memory_is_in_the_pages_of_who_has_some() {
        assert_eq!(facts(&Held::default()), DeviceFacts::default());
        let uses = ["GPU-a", "GPU-b"].map(|uuid| Use { uuid: uuid.to_owned(), bytes: 7 });
        let held = Held { processes: vec![Process { pid: 1, born: 2 }], uses: uses.to_vec() };
        let gpus = vec!["GPU-a".to_owned(), "GPU-b".to_owned()];
        let expected = DeviceFacts { storage: DeviceStorage::Pages, gpus, streams: Vec::new() };
        assert_eq!(facts(&held), expected);
        assert_eq!(bytes(&held), 14);
    }
}
