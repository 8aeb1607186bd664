//! Suspends containers in place and resumes them: nothing of them runs in between.
//!
//! containerd pauses them; what makes such a pause a suspension is that it is written down
//! (`ledger`) before it is asked for, so that the next agent knows it and brings it to its end
//! (`finish`), nobody takes it for a pause that a dump left behind, and a pause of somebody else's is
//! never ended here.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kybernate_packager::agent_api as api;
use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod finish;
mod ledger;

use self::finish::Effort;
pub use self::ledger::LedgerError;
use self::ledger::Phase;
pub(crate) use self::ledger::{Ledger, Suspended};
use crate::app::{App, Busy, Rejection};
use crate::cgroup::Freezer;
use crate::checkpoint::gpu;
use crate::container::{named, namespace_or_default};
use crate::gpu::{GpuError, Held};
use crate::patience::Patience;
use crate::revive::ReviveError;
use crate::runtime::{Namespace, RuntimeError, TaskState, TaskStatus};
use crate::{dumper, network, process};

/// How long containerd may take to thaw a container.
const RESUME_LIMIT: Duration = Duration::from_secs(10);

/// How long a dump that was cut short may take to end after it was killed.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// How long a new agent waits for a GPU's driver before it serves.
const RECOVER_LIMIT: Duration = Duration::from_secs(30);

/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a new agent finishes what an earlier one had begun before it serves.
const FINISH_LIMIT: Duration = Duration::from_secs(10);

/// A container to suspend or resume.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) container: String,
    pub(crate) namespace: String,
}

/// What is to be done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Suspend,
    Resume,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    /// Since when it is suspended, or was.
    pub(crate) since: Option<jiff::Timestamp>,
    /// Whether there was nothing to do.
    pub(crate) already: bool,
    /// Whether its GPU memory was moved, too.
    gpu: bool,
}

/// Why a container is neither suspended nor resumed.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    /// There is nothing that runs.
    #[error("container {container:?} is {status}: only what runs can be suspended")]
    NotRunning {
        /// The container.
        container: String,
        /// What it is.
        status: &'static str,
    },
    /// Somebody else's pause is somebody else's to end.
    #[error("container {0:?} was paused by somebody else, and not by this agent")]
    Foreign(String),
    /// Its GPU memory stays where it is.
    #[error("the container's GPU memory cannot be moved")]
    Gpu(#[source] GpuError),
    /// There is something about its GPU memory that can be known beforehand.
    #[error("container {container:?} cannot be suspended: {reason}")]
    Unfit {
        /// The container.
        container: String,
        /// Why.
        reason: String,
    },
    /// It takes longer than whoever asked waits.
    #[error(
        "containerd does not answer: what was asked for container {0:?} is done when it does, and \
         until then the container is busy"
    )]
    Unfinished(String),
    /// The kernel's freezer cannot be used.
    #[error("failed to freeze the container")]
    Freezer(#[source] io::Error),
    /// It does not run again.
    #[error(transparent)]
    Revive(#[from] ReviveError),
    /// It cannot be written down.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// containerd did not do it.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// How a container is, as far as suspending goes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    Runs(TaskState),
    /// By us.
    Suspended(Suspended),
    /// By somebody else.
    Paused,
    Other(&'static str),
}

impl Wanted {
    /// Understands a request.
    pub(crate) fn parse(container: String, namespace: String) -> Result<Self, Rejection> {
        let (container, namespace) = (named(container)?, namespace_or_default(namespace)?);
        Ok(Self { container, namespace })
    }
}

impl Done {
    fn of(known: Option<&Suspended>, already: bool) -> Self {
        let gpu = known.is_some_and(|known| !known.gpu.is_empty());
        Self { since: known.map(|known| known.since), already, gpu }
    }

    /// Returns what of the container is suspended, or was.
    pub(crate) fn parts(&self) -> Vec<i32> {
        let gpu = self.gpu.then(|| api::SuspendedPart::Gpu.into());
        std::iter::once(api::SuspendedPart::Cpu.into()).chain(gpu).collect()
    }

    pub(crate) fn since(&self) -> String {
        self.since.as_ref().map(ToString::to_string).unwrap_or_default()
    }
}

/// Does it, safe to repeat. What was written down when containerd went away goes on without whoever
/// asked; until it is done, the container is `busy`.
pub(crate) async fn change(
    app: &Arc<App>,
    wanted: &Wanted,
    what: Change,
    busy: Busy,
    cancel: CancellationToken,
) -> Result<Done, SuspendError> {
    let done = match what {
        Change::Suspend => suspend(app, wanted, &cancel).await,
        Change::Resume => resume(app, wanted, &cancel).await,
    };
    if let Err(SuspendError::Unfinished(_)) = done
        && let Some(known) = app.suspended.get(wanted)
    {
        go_on(app, known, busy);
    }
    done
}

async fn suspend(
    app: &App,
    wanted: &Wanted,
    cancel: &CancellationToken,
) -> Result<Done, SuspendError> {
    let namespace = app.containerd.namespace(&wanted.namespace);
    let (known, already) = match find(app, &namespace, wanted).await? {
        Found::Suspended(known) => (known, true),
        Found::Paused => return Err(SuspendError::Foreign(wanted.container.clone())),
        Found::Other(status) => return Err(not_running(wanted, status)),
        Found::Runs(task) => {
            let since = jiff::Timestamp::now();
            let started = process::started(task.pid);
            let gpu = gpu_of(app, wanted, task.pid).await?;
            let known = Suspended::new(wanted, task.pid, started, since).with(gpu);
            app.suspended.add(known.clone()).await?;
            (known, false)
        }
    };
    hold(app, &known, Effort::first(cancel)).await?;
    Ok(Done::of(Some(&known), already))
}

/// Brings a suspension to its end.
async fn hold(app: &App, known: &Suspended, effort: Effort<'_>) -> Result<(), SuspendError> {
    finish::suspend(app, known, effort).await?;
    if known.phase != Phase::Suspended {
        app.suspended.note(known.clone().at(Phase::Suspended)).await;
        tracing::info!(container = known.container, "suspended");
    }
    Ok(())
}

/// Finds whose GPU memory is to be moved.
async fn gpu_of(app: &App, wanted: &Wanted, pid: u32) -> Result<Held, SuspendError> {
    if !app.gpus.is_asked() {
        return Ok(Held::default());
    }
    let container = wanted.container.clone();
    gpu::find(app, pid).await.map_err(|reason| SuspendError::Unfit { container, reason })
}

async fn resume(
    app: &App,
    wanted: &Wanted,
    cancel: &CancellationToken,
) -> Result<Done, SuspendError> {
    let namespace = app.containerd.namespace(&wanted.namespace);
    let known = match find(app, &namespace, wanted).await? {
        Found::Paused => return Err(SuspendError::Foreign(wanted.container.clone())),
        Found::Other(status) => {
            app.suspended.forget(wanted).await?;
            return Err(not_running(wanted, status));
        }
        Found::Runs(_) => {
            // Somebody resumed it.
            let known = app.suspended.get(wanted);
            let held = known.as_ref().map(|known| known.gpu.clone()).unwrap_or_default();
            app.gpus.bring_back(&held).await.map_err(SuspendError::Gpu)?;
            app.suspended.forget(wanted).await?;
            return Ok(Done::of(known.as_ref(), true));
        }
        Found::Suspended(known) => known,
    };
    app.suspended.note(known.clone().at(Phase::Resuming)).await;
    let_run(app, &known, Effort::first(cancel)).await?;
    Ok(Done::of(Some(&known), false))
}

/// Brings the end of a suspension to its end.
async fn let_run(app: &App, known: &Suspended, effort: Effort<'_>) -> Result<(), SuspendError> {
    finish::resume(app, known, effort).await?;
    if let Err(error) = app.gpus.bring_back(&known.gpu).await {
        // As it was: it would only run up to its next work on a GPU.
        app.suspended.note(known.clone().at(Phase::Suspended)).await;
        let namespace = app.containerd.namespace(&known.namespace);
        if let Err(error) = namespace.pause(&known.container).await {
            tracing::warn!(error = %chain(&error), "a container without its GPU memory runs");
        }
        return Err(SuspendError::Gpu(error));
    }
    app.suspended.forget(&known.wanted()).await?;
    tracing::info!(container = known.container, "resumed");
    Ok(())
}

/// Goes on with what was begun until it is done, or the agent ends. `until` is dropped then.
fn go_on(app: &Arc<App>, known: Suspended, until: impl Send + 'static) {
    let work = Arc::clone(app);
    app.tasks.spawn(move |cancel| async move {
        let effort = Effort::later(&cancel);
        let done = match known.phase {
            Phase::Suspending | Phase::Suspended => hold(&work, &known, effort).await,
            Phase::Resuming => let_run(&work, &known, effort).await,
        };
        match done {
            Ok(()) => {}
            Err(SuspendError::Unfinished(container)) => {
                tracing::warn!(container, "what was begun with it is left to the next agent");
            }
            Err(error) => {
                let container = known.container;
                tracing::error!(error = %chain(&error), container, "not suspended, or not resumed");
            }
        }
        drop(until);
    });
}

/// Looks at what an earlier agent suspended, and forgets what is not paused any more. What it had
/// begun is brought to its end; what takes longer, in the background.
pub(crate) async fn recover(app: &Arc<App>) {
    let begun = TaskTracker::new();
    for known in app.suspended.all() {
        if known.phase == Phase::Suspended {
            recover_one(app, known).await;
            continue;
        }
        tracing::warn!(
            container = known.container,
            phase = ?known.phase,
            "an earlier agent ended in the middle of this"
        );
        let busy = app.reserve(&known.namespace, &known.container).ok();
        go_on(app, known, (busy, begun.token()));
    }
    begun.close();
    if tokio::time::timeout(FINISH_LIMIT, begun.wait()).await.is_err() {
        tracing::warn!("what an earlier agent had begun is finished in the background");
    }
}

async fn recover_one(app: &App, known: Suspended) {
    let wanted = known.wanted();
    let namespace = app.containerd.namespace(&wanted.namespace);
    let kept = match find(app, &namespace, &wanted).await {
        Ok(Found::Suspended(_)) => {
            tracing::info!(container = wanted.container, "still suspended");
            return;
        }
        Ok(Found::Runs(_)) => {
            let back = app.gpus.bring_back(&known.gpu);
            match tokio::time::timeout(RECOVER_LIMIT, back).await {
                Ok(Ok(())) => app.suspended.forget(&wanted).await,
                // It stays written down, for a resume to try again.
                tried => {
                    let container = &wanted.container;
                    tracing::error!(?tried, container, "its GPU memory is still away");
                    return;
                }
            }
        }
        Ok(Found::Paused | Found::Other(_)) => app.suspended.forget(&wanted).await,
        Err(SuspendError::Runtime(error)) if error.is_not_found() => {
            app.suspended.forget(&wanted).await
        }
        // Asked again when somebody wants something of it.
        Err(error) => {
            tracing::warn!(error = %chain(&error), container = wanted.container, "not known");
            return;
        }
    };
    if let Err(error) = kept {
        tracing::error!(error = %chain(&error), "failed to forget a suspension");
    }
}

/// Makes sure that a suspended container is as it was before a dump: nobody works on it, nothing of
/// it runs. A dump under way may go on until `patience` ends. False when that is not known.
pub(crate) async fn settle(
    namespace: &Namespace,
    container: &str,
    pid: u32,
    directory: &Path,
    patience: Instant,
) -> io::Result<bool> {
    let limit = patience.saturating_duration_since(Instant::now()) + SETTLE_LIMIT;
    let mut looks = Patience::new(limit, LOOK_EVERY);
    while looks.once_more().await {
        let place = directory.to_owned();
        let criu = tokio::task::spawn_blocking(move || process::dumper(pid, &place)).await;
        let freezer = match Freezer::of(pid) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            found => found?,
        };
        if let Some(criu) = criu.unwrap_or_default() {
            if Instant::now() >= patience {
                dumper::cut(criu, &freezer).await?;
            }
            continue;
        }
        match namespace.task(container).await {
            // While a shim is at its dump, containerd knows neither state nor process.
            Ok(Some(task)) if task.pid == pid && task.status == TaskStatus::Paused => {
                if !freezer.is_frozen()? {
                    // A CRIU that was killed had it thawed.
                    freezer.freeze()?;
                }
                network::unlock(pid).await?;
                return Ok(true);
            }
            // It has ended, or somebody resumed it meanwhile.
            Ok(None) => return Ok(true),
            Ok(Some(task)) if task.status == TaskStatus::Stopped => return Ok(true),
            Ok(Some(task)) if task.status == TaskStatus::Running => return Ok(true),
            Ok(Some(_)) => {}
            Err(error) => {
                tracing::debug!(error = %chain(&error), container, "containerd does not answer");
                freezer.freeze()?;
            }
        }
    }
    Ok(false)
}

async fn find(app: &App, namespace: &Namespace, wanted: &Wanted) -> Result<Found, SuspendError> {
    namespace.container(&wanted.container).await?;
    let Some(task) = namespace.task(&wanted.container).await? else {
        return Ok(Found::Other("not started"));
    };
    let ours = app.suspended.get(wanted).filter(|known| known.is(task.pid));
    // containerd does not know when it, or its runc, was killed after that had frozen the container.
    let frozen = || Freezer::of(task.pid).and_then(|freezer| freezer.is_frozen()).unwrap_or(false);
    Ok(match (task.status, ours) {
        (TaskStatus::Paused, Some(known)) => Found::Suspended(known),
        (TaskStatus::Running, Some(known)) if frozen() => Found::Suspended(known),
        (TaskStatus::Paused, None) => Found::Paused,
        (TaskStatus::Running, None) if frozen() => Found::Paused,
        (TaskStatus::Running, _) => Found::Runs(task),
        (other, _) => Found::Other(other.name()),
    })
}

fn not_running(wanted: &Wanted, status: &'static str) -> SuspendError {
    SuspendError::NotRunning { container: wanted.container.clone(), status }
}
