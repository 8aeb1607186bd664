//! The GPU memory of a restored container: CRIU brings it back with the memory of the processes, and
//! the driver from there to the GPUs.

use std::io;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::{Offer, Subject, Target, examine};
use kybernate_spec::checkpoint::DeviceStorage;

use crate::app::App;
use crate::cgroup::Freezer;
use crate::gpu::{GpuError, Pair};
use crate::operations::RefusedBy;

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
        "the GPU memory of a pod's container is brought back by CRIU's plugin only: set [gpu] method = \"plugin\""
    )]
    Pod,
}

/// What is to be done when CRIU has restored the processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuPlan {
    /// Nothing.
    Nothing,
    /// The driver is asked, with these GPUs for those.
    Ask(Vec<Pair>),
}

impl GpuRestoreError {
    /// Returns the rule that refused, when it was one.
    pub(crate) const fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::NoMethod | Self::Plugin { .. } | Self::Pod => Some(RefusedBy::Compatibility),
            Self::Driver(_) | Self::Processes(_) | Self::Nobody => None,
        }
    }
}

/// Decides, before anything large moves, how GPU memory comes back.
pub(crate) async fn plan(app: &App, checkpoint: &Checkpoint) -> Result<GpuPlan, GpuRestoreError> {
    if checkpoint.config.device.storage == DeviceStorage::None {
        return Ok(GpuPlan::Nothing);
    }
    let report = app.report().await;
    let target = Target { node: &report.facts, image: None, offer: Offer::default() };
    let pairs = examine(&Subject::of(checkpoint), &target).gpu_pairs;
    let pair = |pair: kybernate_packager::compat::Pair| Pair { from: pair.from, to: pair.to };
    let pairs: Vec<Pair> = pairs.into_iter().map(pair).collect();
    if app.gpus.is_asked() {
        return Ok(GpuPlan::Ask(pairs));
    }
    if !app.gpus.is_plugin() {
        return Err(GpuRestoreError::NoMethod);
    }
    match pairs.into_iter().find(|pair| pair.from != pair.to) {
        Some(Pair { from, to }) => Err(GpuRestoreError::Plugin { from, to }),
        None => Ok(GpuPlan::Nothing),
    }
}

/// Makes sure that a pod's container needs nobody when CRIU has restored it: kybernate-runc says that
/// it runs before anyone could ask the driver.
pub(crate) fn pod(app: &App, checkpoint: &Checkpoint) -> Result<(), GpuRestoreError> {
    let has_memory = checkpoint.config.device.storage != DeviceStorage::None;
    if has_memory && !app.gpus.is_plugin() { Err(GpuRestoreError::Pod) } else { Ok(()) }
}

/// Has the driver bring back what the processes of a cgroup had on their GPUs.
pub(crate) async fn bring(app: &App, plan: &GpuPlan, cgroup: &str) -> Result<(), GpuRestoreError> {
    let GpuPlan::Ask(pairs) = plan else { return Ok(()) };
    let cgroup = cgroup.to_owned();
    let pids = tokio::task::spawn_blocking(move || Freezer::at(&cgroup)?.processes()).await;
    let pids = pids.map_err(io::Error::other).and_then(|pids| pids);
    let held = app.gpus.find_restored(&pids.map_err(GpuRestoreError::Processes)?).await?;
    if held.is_empty() {
        return Err(GpuRestoreError::Nobody);
    }
    Ok(app.gpus.bring_to(&held, pairs).await?)
}
