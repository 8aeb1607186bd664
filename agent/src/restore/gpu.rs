//! The GPU memory of a restored container: CRIU brings it back with the memory of the processes, and
//! the driver from there, or from files of its own, to the GPUs.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::{Offer, Subject, Target, examine};
use kybernate_spec::checkpoint::{DeviceStorage, DeviceStream};
use kybernate_spec::gpu::STORAGE_DRIVER;

use crate::app::App;
use crate::cgroup::Freezer;
use crate::gpu::{GpuError, Held, Pair, Use, plugin};
use crate::operations::RefusedBy;
use crate::process;

/// Why GPU memory does not come back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GpuRestoreError {
    #[error(transparent)]
    Driver(#[from] GpuError),
    #[error("the restored processes cannot be looked at")]
    Processes(#[source] io::Error),
    #[error("the checkpoint holds GPU memory, and none of the restored processes has any")]
    Nobody,
    #[error(
        "the checkpoint holds GPU memory of process {0}, which none of the restored processes is"
    )]
    Missing(u32),
    #[error(
        "the checkpoint holds GPU memory, and nothing here can bring it back: see [gpu] method"
    )]
    NoMethod,
    #[error(
        "{to} takes the place of {from}, which CRIU's plugin cannot do: set [gpu] method = \"driver\""
    )]
    Plugin {
        /// The GPU that was used.
        from: String,
        /// The one here.
        to: String,
    },
    #[error(
        "the checkpoint holds GPU memory, and there is no {}.so in {} to bring it back: install it, or \
         set [gpu] method = \"driver\"",
        plugin::CUDA,
        plugin::PLACES.join(", ")
    )]
    NoPlugin,
    #[error(
        "the checkpoint holds GPU memory in files of its own, which takes driver {} and [gpu] method = \
         \"driver\": neither CRIU's plugin nor an older driver brings it back",
        STORAGE_DRIVER
    )]
    NoStorage,
    #[error(
        "the checkpoint holds GPU memory in files of its own, and whoever restores it here asks no \
         driver: take it with [gpu] storage = \"pages\", or restore it with kyb restore"
    )]
    Aside,
    #[error(
        "the GPU memory of a pod's container is brought back by CRIU's plugin only: set [gpu] method = \"plugin\""
    )]
    Pod,
}

/// What is to be done when CRIU has restored the processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuPlan {
    /// Nothing.
    Nothing,
    /// Nothing: CRIU's plugin has done it.
    Plugin,
    /// The driver is asked.
    Ask(Asked),
}

/// What the driver is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// With these GPUs for those.
    pairs: Vec<Pair>,
    /// What there is in files of its own, when it is there.
    aside: Option<Aside>,
}

/// GPU memory in files of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Aside {
    /// How much there is for each GPU that was used.
    uses: Vec<Use>,
    /// Whose it is, by their ids in their innermost namespace.
    pids: BTreeSet<u32>,
}

impl GpuRestoreError {
    /// Returns the rule that refused, when it was one.
    pub(crate) const fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::NoMethod
            | Self::Plugin { .. }
            | Self::NoPlugin
            | Self::Pod
            | Self::NoStorage
            | Self::Aside => Some(RefusedBy::Compatibility),
            Self::Driver(_) | Self::Processes(_) | Self::Nobody | Self::Missing(_) => None,
        }
    }
}

/// Decides, before anything large moves, how GPU memory comes back.
pub(crate) async fn plan(app: &App, checkpoint: &Checkpoint) -> Result<GpuPlan, GpuRestoreError> {
    let device = &checkpoint.config.device;
    if device.storage == DeviceStorage::None {
        return Ok(GpuPlan::Nothing);
    }
    let is_aside = device.storage == DeviceStorage::Device;
    if is_aside && !(app.gpus.is_asked() && app.gpus.has_storage().await?) {
        return Err(GpuRestoreError::NoStorage);
    }
    let report = app.report().await;
    let target = Target { node: &report.facts, image: None, offer: Offer::default() };
    let pairs = examine(&Subject::of(checkpoint), &target).gpu_pairs;
    let pair = |pair: kybernate_packager::compat::Pair| Pair { from: pair.from, to: pair.to };
    let pairs: Vec<Pair> = pairs.into_iter().map(pair).collect();
    if app.gpus.is_asked() {
        let aside = is_aside.then(|| Aside::of(&device.streams));
        return Ok(GpuPlan::Ask(Asked { pairs, aside }));
    }
    if !app.gpus.is_plugin() {
        return Err(GpuRestoreError::NoMethod);
    }
    match pairs.into_iter().find(|pair| pair.from != pair.to) {
        Some(Pair { from, to }) => Err(GpuRestoreError::Plugin { from, to }),
        None => by_plugin(plugin::is_here(plugin::CUDA)),
    }
}

impl GpuPlan {
    /// Returns CRIU's plugins that bring something back.
    pub(super) fn plugins(&self) -> BTreeSet<String> {
        match self {
            Self::Plugin => [plugin::CUDA.to_owned()].into(),
            Self::Nothing | Self::Ask(_) => BTreeSet::new(),
        }
    }
}

/// Leaves it to CRIU's plugin. CRIU without a directory for plugins misses none, and would restore the
/// processes without their GPU memory.
const fn by_plugin(is_here: bool) -> Result<GpuPlan, GpuRestoreError> {
    if is_here { Ok(GpuPlan::Plugin) } else { Err(GpuRestoreError::NoPlugin) }
}

impl Aside {
    fn of(streams: &[DeviceStream]) -> Self {
        Self { uses: uses(streams), pids: streams.iter().map(|stream| stream.pid).collect() }
    }

    /// Makes sure that all are there whose memory it is: those that are not found would be left away.
    fn has_all(&self, found: &BTreeSet<u32>) -> Result<(), GpuRestoreError> {
        let missing = self.pids.difference(found).next();
        missing.map_or(Ok(()), |pid| Err(GpuRestoreError::Missing(*pid)))
    }
}

/// Returns how much comes to each GPU that was used.
fn uses(streams: &[DeviceStream]) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::new();
    for stream in streams {
        match uses.iter_mut().find(|one| one.uuid == stream.gpu) {
            Some(one) => one.bytes = one.bytes.saturating_add(stream.bytes),
            None => uses.push(Use { uuid: stream.gpu.clone(), bytes: stream.bytes }),
        }
    }
    uses
}

/// Decides how GPU memory comes back where nobody asks a driver: by CRIU's plugin, if that is what this
/// node uses, or as whoever restores the checkpoint sees to it.
pub(crate) fn unasked(app: &App, checkpoint: &Checkpoint) -> Result<GpuPlan, GpuRestoreError> {
    let is_here = || plugin::is_here(plugin::CUDA);
    unasked_plan(checkpoint.config.device.storage, app.gpus.is_plugin(), is_here)
}

fn unasked_plan(
    storage: DeviceStorage,
    is_plugin: bool,
    is_here: impl FnOnce() -> bool,
) -> Result<GpuPlan, GpuRestoreError> {
    match storage {
        DeviceStorage::Device => Err(GpuRestoreError::Aside),
        DeviceStorage::Pages if is_plugin => by_plugin(is_here()),
        DeviceStorage::Pages | DeviceStorage::None => Ok(GpuPlan::Nothing),
    }
}

/// Decides it for a pod's container, which needs nobody when CRIU has restored it: kybernate-runc says
/// that it runs before anyone could ask the driver.
pub(crate) fn pod(app: &App, checkpoint: &Checkpoint) -> Result<GpuPlan, GpuRestoreError> {
    for_pod(checkpoint.config.device.storage, unasked(app, checkpoint)?)
}

fn for_pod(storage: DeviceStorage, plan: GpuPlan) -> Result<GpuPlan, GpuRestoreError> {
    match (storage, plan) {
        (DeviceStorage::Pages, GpuPlan::Nothing) => Err(GpuRestoreError::Pod),
        (_, plan) => Ok(plan),
    }
}

/// Has the driver bring back what the processes of a cgroup had on their GPUs. `images` is where the
/// dump is.
pub(crate) async fn bring(
    app: &App,
    plan: &GpuPlan,
    cgroup: &str,
    images: &Path,
) -> Result<(), GpuRestoreError> {
    let GpuPlan::Ask(Asked { pairs, aside }) = plan else { return Ok(()) };
    let cgroup = cgroup.to_owned();
    let pids = tokio::task::spawn_blocking(move || Freezer::at(&cgroup)?.processes()).await;
    let pids = pids.map_err(io::Error::other).and_then(|pids| pids);
    let held = app.gpus.find_restored(&pids.map_err(GpuRestoreError::Processes)?).await?;
    if held.is_empty() {
        return Err(GpuRestoreError::Nobody);
    }
    let held = match aside {
        None => held,
        Some(aside) => {
            let inner = held.processes.iter().filter_map(|one| process::inner(one.pid));
            aside.has_all(&inner.collect())?;
            Held { uses: aside.uses.clone(), storage: Some(images.to_owned()), ..held }
        }
    };
    Ok(app.gpus.bring_restored(&held, pairs).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_gpu_memory_comes_back_by_the_plugin_alone() {
        let pod = |storage, is_plugin, is_here| {
            for_pod(storage, unasked_plan(storage, is_plugin, || is_here)?)
        };
        let none = pod(DeviceStorage::None, true, true).unwrap();
        assert_eq!((&none, none.plugins()), (&GpuPlan::Nothing, BTreeSet::new()));
        let plan = pod(DeviceStorage::Pages, true, true).unwrap();
        assert_eq!(plan.plugins(), BTreeSet::from(["cuda_plugin".to_owned()]));
        let missing = pod(DeviceStorage::Pages, true, false).unwrap_err();
        assert!(missing.to_string().contains("no cuda_plugin.so in /usr/lib/criu"), "{missing}");
        let asked = pod(DeviceStorage::Pages, false, true).unwrap_err();
        assert!(matches!(asked, GpuRestoreError::Pod), "{asked}");
        let aside = pod(DeviceStorage::Device, true, true).unwrap_err();
        assert!(matches!(aside, GpuRestoreError::Aside), "{aside}");
        let asked = GpuPlan::Ask(Asked { pairs: Vec::new(), aside: None });
        assert_eq!(asked.plugins(), BTreeSet::new(), "the driver is asked, and nobody else");
    }

    #[test]
    fn everybody_has_to_be_there_whose_memory_comes_back() {
        let stream =
            |pid: u32| DeviceStream { file: String::new(), pid, gpu: "GPU-a".to_owned(), bytes: 4 };
        let aside = Aside::of(&[stream(1), stream(7), stream(7)]);
        assert_eq!(aside.uses, [Use { uuid: "GPU-a".to_owned(), bytes: 12 }]);
        aside.has_all(&BTreeSet::from([1, 2, 7])).unwrap();
        let missing = aside.has_all(&BTreeSet::from([1, 2])).unwrap_err();
        assert!(matches!(missing, GpuRestoreError::Missing(7)), "{missing}");
    }
}
