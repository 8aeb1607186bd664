//! Suspends containers in place and resumes them: nothing of them runs in between.
//!
//! containerd pauses them; what makes such a pause a suspension is that it is written down
//! (`ledger`) before it is asked for, so that the next agent knows it and brings it to its end
//! (`finish`), nobody takes it for a pause that a dump left behind, and a pause of somebody else's is
//! never ended here.

use std::io;
use std::path::Path;
use std::time::Duration;

use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod finish;
mod ledger;
mod recover;

use self::finish::Effort;
pub use self::ledger::LedgerError;
use self::ledger::Phase;
pub(crate) use self::ledger::{Ledger, Suspended};
pub(crate) use self::recover::recover;
use crate::app::{App, Rejection};
use crate::cgroup::Freezer;
use crate::checkpoint::{gpu, time_out};
use crate::container::{cgroup_of, named, namespace_or_default};
use crate::gpu::{GpuError, Held};
use crate::operations::{Conclusion, Driver, Kind, Sizes, Stopped, Subject, Suspension};
use crate::patience::Patience;
use crate::revive::ReviveError;
use crate::runtime::{Namespace, RuntimeError, TaskState, TaskStatus};
use crate::{connections, dumper, links, process};

/// How long containerd may take to thaw a container.
const RESUME_LIMIT: Duration = Duration::from_secs(10);

/// How long a dump that was cut short may take to end after it was killed.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A container to suspend or resume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wanted {
    pub(crate) container: String,
    pub(crate) namespace: String,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    Suspend {
        wanted: Wanted,
        time_out: Option<Duration>,
    },
    /// Once begun, it goes to its end.
    Resume {
        wanted: Wanted,
    },
}

/// What an operation has to do.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    Suspend {
        known: Suspended,
        /// It was written down before.
        already: bool,
    },
    Resume(Suspended),
    /// It runs already; somebody else may have seen to that.
    LetRun {
        wanted: Wanted,
        known: Option<Suspended>,
    },
}

/// Why a container is neither suspended nor resumed.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    /// There is nothing that runs.
    #[error("container {container:?} is {status}: only what runs can be suspended or resumed")]
    NotRunning {
        /// The container.
        container: String,
        /// What it is.
        status: &'static str,
    },
    /// Somebody else's pause is somebody else's to end.
    #[error(
        "container {0:?} was paused by somebody else, as far as this agent's records tell: `ctr task resume` lets it run"
    )]
    Foreign(String),
    /// Its GPU memory stays where it is.
    #[error("the container's GPU memory cannot be moved")]
    Gpu(#[source] GpuError),
    /// Nor does what was moved of it come back.
    #[error("{error}; its GPU memory has not come back either, and `kyb resume` tries that again")]
    Away {
        /// Why it is not suspended.
        error: String,
        /// Why its memory is still away.
        #[source]
        source: GpuError,
    },
    /// There is something about its GPU memory that can be known beforehand.
    #[error("container {container:?} cannot be suspended: {reason}")]
    Unfit {
        /// The container.
        container: String,
        /// Why.
        reason: String,
    },
    /// It was cancelled, or the agent ends: the next one goes on.
    #[error(transparent)]
    Stopped(#[from] Stopped),
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
    Runs {
        task: TaskState,
        /// The one that the runtime has made.
        cgroup: Option<String>,
    },
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

    /// Returns what an operation on it is about.
    fn subject(&self, kind: Kind) -> Subject {
        Subject {
            kind,
            container: self.container.clone(),
            namespace: self.namespace.clone(),
            reference: String::new(),
            time_out: None,
        }
    }
}

impl Order {
    /// One to suspend; `seconds` bound it, if they are any.
    pub(crate) fn suspend(wanted: Wanted, seconds: u32) -> Self {
        Self::Suspend { wanted, time_out: time_out(seconds) }
    }

    pub(crate) const fn wanted(&self) -> &Wanted {
        match self {
            Self::Suspend { wanted, .. } | Self::Resume { wanted } => wanted,
        }
    }

    pub(crate) fn subject(&self) -> Subject {
        match self {
            Self::Suspend { wanted, time_out } => {
                Subject { time_out: *time_out, ..wanted.subject(Kind::Suspend) }
            }
            Self::Resume { wanted } => wanted.subject(Kind::Resume),
        }
    }

    /// Finds what there is to do, or why that cannot be done.
    pub(crate) async fn plan(self, app: &App) -> Result<Plan, SuspendError> {
        let namespace = app.containerd.namespace(&self.wanted().namespace);
        let found = find(app, &namespace, self.wanted()).await?;
        match (self, found) {
            (order, Found::Paused) => Err(SuspendError::Foreign(order.wanted().container.clone())),
            (Self::Suspend { wanted, .. }, Found::Other(status)) => {
                Err(not_running(&wanted, status))
            }
            (Self::Resume { wanted }, Found::Other(status)) => {
                app.suspended.forget(&wanted).await?;
                Err(not_running(&wanted, status))
            }
            (Self::Suspend { .. }, Found::Suspended(known)) => {
                Ok(Plan::Suspend { known, already: true })
            }
            (Self::Suspend { wanted, .. }, Found::Runs { task, cgroup }) => {
                let since = jiff::Timestamp::now();
                let started = process::started(task.pid).map_err(SuspendError::Freezer)?;
                let gpu = gpu_of(app, &wanted, task.pid, cgroup.clone()).await?;
                let known = Suspended::new(&wanted, task.pid, started, since);
                let known = known.within(cgroup).with(gpu);
                Ok(Plan::Suspend { known, already: false })
            }
            (Self::Resume { .. }, Found::Suspended(known)) => Ok(Plan::Resume(known)),
            (Self::Resume { wanted }, Found::Runs { .. }) => {
                let known = app.suspended.get(&wanted);
                Ok(Plan::LetRun { wanted, known })
            }
        }
    }
}

impl Suspension {
    fn of(known: Option<&Suspended>, already: bool) -> Self {
        let gpu = known.is_some_and(|known| !known.gpu.is_empty());
        Self { since: known.map(|known| known.since), already, gpu }
    }
}

/// Does what was planned, to its end. Without a conclusion it is left to the next agent.
pub(crate) async fn run(
    app: &App,
    driver: &Driver,
    plan: Plan,
    ends: &CancellationToken,
) -> Option<Conclusion> {
    let done = match plan {
        Plan::Suspend { known, already: true } => again(app, driver, known, ends).await,
        Plan::Suspend { known, already: false } => suspend(app, driver, known, ends).await,
        Plan::Resume(known) => resume(app, driver, known, ends).await,
        Plan::LetRun { wanted, known } => let_alone(app, &wanted, known.as_ref()).await,
    };
    conclude(driver, done)
}

/// Ends an operation as what it did went.
fn conclude(driver: &Driver, done: Result<Suspension, SuspendError>) -> Option<Conclusion> {
    match done {
        Ok(done) => {
            driver.note(|record| record.suspension = Some(done));
            Some(Conclusion::done(Sizes::default()))
        }
        Err(SuspendError::Stopped(Stopped::AgentEnds)) => None,
        Err(error @ SuspendError::Stopped(Stopped::Cancelled(_))) => {
            Some(driver.ends(Conclusion::failed(chain(&error).to_string(), None)))
        }
        // Also one that was cancelled: it is not as it was.
        Err(error) => Some(Conclusion::failed(chain(&error).to_string(), None)),
    }
}

/// Makes sure of what was suspended before.
async fn again(
    app: &App,
    driver: &Driver,
    known: Suspended,
    ends: &CancellationToken,
) -> Result<Suspension, SuspendError> {
    driver.commit("its container was suspended before").map_err(Stopped::from)?;
    finish::suspend(app, &known, Effort::first(driver, ends)).await?;
    Ok(Suspension::of(Some(&known), true))
}

async fn suspend(
    app: &App,
    driver: &Driver,
    known: Suspended,
    ends: &CancellationToken,
) -> Result<Suspension, SuspendError> {
    app.suspended.add(known.clone()).await?;
    hold(app, driver, known, Effort::first(driver, ends)).await
}

/// Brings a suspension to its end; one that is cancelled before, to where it began.
async fn hold(
    app: &App,
    driver: &Driver,
    known: Suspended,
    effort: Effort<'_>,
) -> Result<Suspension, SuspendError> {
    let ends = effort.ends();
    let held = finish::suspend(app, &known, effort).await;
    let held = held.and_then(|()| {
        let committed = driver.commit("its container is suspended");
        committed.map_err(|cancelled| Stopped::from(cancelled).into())
    });
    match held {
        Ok(()) => {
            app.suspended.note(known.clone().at(Phase::Suspended)).await;
            tracing::info!(container = known.container, "suspended");
            Ok(Suspension::of(Some(&known), false))
        }
        // One that was suspended before stays so; another would be frozen for good, though it has failed.
        Err(error @ SuspendError::Freezer(_)) if known.phase == Phase::Suspended => Err(error),
        Err(error @ (SuspendError::Stopped(Stopped::Cancelled(_)) | SuspendError::Freezer(_))) => {
            put_back(app, driver, &known, ends).await?;
            Err(error)
        }
        Err(error) => Err(error),
    }
}

/// Lets a container run whose suspension was cancelled.
async fn put_back(
    app: &App,
    driver: &Driver,
    known: &Suspended,
    ends: &CancellationToken,
) -> Result<(), SuspendError> {
    driver.step("undo");
    app.suspended.note(known.clone().at(Phase::Resuming)).await;
    match let_run(app, known, Effort::last(driver, ends)).await {
        Ok(()) => driver.undone("the container runs".to_owned()),
        // There is nothing to be put back any more.
        Err(SuspendError::NotRunning { .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

async fn resume(
    app: &App,
    driver: &Driver,
    known: Suspended,
    ends: &CancellationToken,
) -> Result<Suspension, SuspendError> {
    driver.commit("what is resumed runs as soon as it can").map_err(Stopped::from)?;
    app.suspended.note(known.clone().at(Phase::Resuming)).await;
    let_run(app, &known, Effort::first(driver, ends)).await?;
    Ok(Suspension::of(Some(&known), false))
}

/// Forgets what runs, which somebody else may have resumed.
async fn let_alone(
    app: &App,
    wanted: &Wanted,
    known: Option<&Suspended>,
) -> Result<Suspension, SuspendError> {
    let held = known.map(|known| known.gpu.clone()).unwrap_or_default();
    app.gpus.bring_back(&held).await.map_err(SuspendError::Gpu)?;
    app.suspended.forget(wanted).await?;
    Ok(Suspension::of(known, true))
}

/// Finds whose GPU memory is to be moved.
async fn gpu_of(
    app: &App,
    wanted: &Wanted,
    pid: u32,
    cgroup: Option<String>,
) -> Result<Held, SuspendError> {
    if !app.gpus.is_asked() {
        return Ok(Held::default());
    }
    let container = wanted.container.clone();
    gpu::find(app, pid, cgroup).await.map_err(|reason| SuspendError::Unfit { container, reason })
}

/// Brings the end of a suspension to its end.
async fn let_run(app: &App, known: &Suspended, effort: Effort<'_>) -> Result<(), SuspendError> {
    let driver = effort.driver();
    finish::resume(app, known, effort).await?;
    if !known.gpu.is_empty() {
        driver.step("gpu");
    }
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

/// How a suspended container is after a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// As it was before.
    Suspended,
    /// Somebody resumed it meanwhile.
    Runs,
    Ended,
    /// It was not found out in time.
    Unknown,
}

/// Makes sure that a suspended container is as it was before a dump: nobody works on it, nothing of
/// it runs. A dump under way may go on until `patience` ends.
pub(crate) async fn settle(
    namespace: &Namespace,
    container: &str,
    (pid, cgroup): (u32, Option<&str>),
    directory: &Path,
    patience: Instant,
) -> io::Result<Settled> {
    let limit = patience.saturating_duration_since(Instant::now()) + SETTLE_LIMIT;
    let mut looks = Patience::new(limit, LOOK_EVERY);
    while looks.once_more().await {
        let place = directory.to_owned();
        let criu = tokio::task::spawn_blocking(move || process::dumper(pid, &place)).await;
        let freezer = match Freezer::of(pid, cgroup) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Settled::Ended),
            found => found?,
        };
        if let Some(criu) = criu.unwrap_or_default() {
            if Instant::now() >= patience {
                dumper::cut(criu, &freezer, true).await?;
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
                connections::free(pid, &freezer, directory).await?;
                links::clear(&freezer).await;
                return Ok(Settled::Suspended);
            }
            Ok(None) => return Ok(Settled::Ended),
            Ok(Some(task)) if task.status == TaskStatus::Stopped => return Ok(Settled::Ended),
            Ok(Some(task)) if task.status == TaskStatus::Running => {
                // Somebody resumed it; its connections may be held.
                connections::free(pid, &freezer, directory).await?;
                links::clear(&freezer).await;
                return Ok(Settled::Runs);
            }
            Ok(Some(_)) => {}
            Err(error) => {
                tracing::debug!(error = %chain(&error), container, "containerd does not answer");
                freezer.freeze()?;
            }
        }
    }
    Ok(Settled::Unknown)
}

async fn find(app: &App, namespace: &Namespace, wanted: &Wanted) -> Result<Found, SuspendError> {
    let cgroup = cgroup_of(&namespace.container(&wanted.container).await?);
    let Some(task) = namespace.task(&wanted.container).await? else {
        return Ok(Found::Other("not started"));
    };
    // A shim that does not answer, as while somebody else has it dump, says nothing of the process either.
    let is_silent = task.status == TaskStatus::Unknown;
    let ours = app.suspended.get(wanted).filter(|known| is_silent || known.is(task.pid));
    // containerd does not know when it, or its runc, was killed after that had frozen the container.
    let freezer = || Freezer::of(task.pid, cgroup.as_deref());
    let frozen = || freezer().and_then(|freezer| freezer.is_frozen()).unwrap_or(false);
    Ok(match (task.status, ours) {
        (TaskStatus::Paused | TaskStatus::Unknown, Some(known)) => Found::Suspended(known),
        (TaskStatus::Running, Some(known)) if frozen() => Found::Suspended(known),
        (TaskStatus::Paused, None) => Found::Paused,
        (TaskStatus::Running, None) if frozen() => Found::Paused,
        (TaskStatus::Running, _) => Found::Runs { task, cgroup },
        (other, _) => Found::Other(other.name()),
    })
}

fn not_running(wanted: &Wanted, status: &'static str) -> SuspendError {
    SuspendError::NotRunning { container: wanted.container.clone(), status }
}
