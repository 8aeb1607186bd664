//! Brings a paused source back to life: the one thing that must work whatever else is broken.
//!
//! What can be found: containerd has it paused (the usual case); a dump is still under way, and
//! containerd holds every answer back until it ends; CRIU was killed while it had the cgroup
//! thawed, so that the container runs and containerd believes that it is paused; containerd does
//! not answer at all.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::cgroup::Freezer;
use crate::connections;
use crate::dumper;
use crate::links;
use crate::patience::Patience;
use crate::process;
use crate::runtime::{Namespace, RuntimeError, TaskStatus};

/// How long containerd may take to thaw a container before another way is tried.
const RESUME_LIMIT: Duration = Duration::from_secs(2);

/// How long containerd may take to say how a container is. While a shim does not answer, it takes
/// two seconds to say that it does not know.
const LOOK_LIMIT: Duration = Duration::from_secs(3);

/// The same when the deadline has passed. One that is well takes milliseconds.
const LATE_LOOK_LIMIT: Duration = Duration::from_millis(500);

/// How often the state is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// After the deadline, how long reviving may take in all. CRIU needs a moment to die and the
/// shim to notice.
const REVIVE_LIMIT: Duration = Duration::from_secs(20);

/// How long it is tried to free the network of one that runs: others wait for that.
const FREE_LIMIT: Duration = Duration::from_secs(3);

/// A container that was paused.
#[derive(Clone, Debug)]
pub(crate) struct Paused {
    pub(crate) namespace: Namespace,
    pub(crate) container: String,
    pub(crate) pid: u32,
    pub(crate) freezer: Freezer,
    /// Where its dump and CRIU's log go.
    pub(crate) directory: PathBuf,
    /// Whether a CRIU that has something open there may be dumping it.
    pub(crate) is_looked_for: bool,
    /// Whether the dump may have been cut short, so that CRIU left something behind.
    pub(crate) cut_short: bool,
}

/// How it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Revived {
    /// It runs, and containerd knows.
    Running,
    /// It runs, but containerd did not answer and may still think it paused.
    Thawed,
    /// It had ended.
    Gone,
}

/// What one look found.
enum Step {
    /// Nothing is left to be done.
    Ended(Revived),
    /// It runs, as far as one look can tell.
    Runs,
    /// Look again.
    Pending,
}

/// Why a container could not be brought back.
#[derive(Debug, thiserror::Error)]
pub enum ReviveError {
    /// containerd would not, and the freezer could not be used.
    #[error("failed to thaw container {container:?}")]
    Freezer {
        /// The container.
        container: String,
        /// What happened.
        #[source]
        source: io::Error,
    },
    /// It still does not run, and this is the last that containerd said.
    #[error("container {container:?} still does not run")]
    Stuck {
        /// The container.
        container: String,
        /// What happened.
        #[source]
        source: Option<RuntimeError>,
    },
}

impl Paused {
    /// Brings the container back. A dump under way may go on until `patience` ends; then CRIU is
    /// ended, at a moment when its code puts the processes right by itself.
    pub(crate) async fn revive(&self, patience: Instant) -> Result<Revived, ReviveError> {
        let limit = patience.saturating_duration_since(Instant::now()) + REVIVE_LIMIT;
        let mut looks = Patience::new(limit, LOOK_EVERY);
        let mut locked = self.cut_short;
        let (mut unfreed, mut free_until) = (None, None);
        // A pause that was asked for just now may still be on its way, and so may a CRIU.
        let mut ran_before = false;
        while looks.once_more().await {
            if self.is_dumped(patience).await {
                (locked, ran_before) = (self.cut_short, false);
                continue;
            }
            // Before it runs: it must not see that nothing can be sent. What does not work is tried again,
            // and keeps nobody from running.
            if locked {
                unfreed = self.free(unfreed.is_none()).await.err();
                locked = unfreed.is_some();
            }
            match self.step(patience).await {
                Ok(Step::Ended(revived)) => return Ok(revived),
                Ok(Step::Runs) if ran_before || !self.cut_short => {
                    let Some(error) = &unfreed else { return Ok(Revived::Running) };
                    let until = *free_until.get_or_insert_with(|| Instant::now() + FREE_LIMIT);
                    if Instant::now() >= until {
                        let container = &self.container;
                        tracing::error!(%error, container, "its network may still be locked");
                        return Ok(Revived::Running);
                    }
                }
                Ok(Step::Runs) => ran_before = true,
                Ok(Step::Pending) => ran_before = false,
                Err(error) => {
                    tracing::debug!(%error, container = self.container, "not revived yet");
                }
            }
        }
        let container = self.container.clone();
        match self.freezer.is_frozen() {
            Ok(false) => Ok(Revived::Thawed),
            Ok(true) => {
                let source = self.namespace.task(&container).await.err();
                Err(ReviveError::Stuck { container, source })
            }
            Err(source) => Err(ReviveError::Freezer { container, source }),
        }
    }

    /// Frees what a dump that was cut short has left locked.
    async fn free(&self, tells: bool) -> io::Result<()> {
        let freed = connections::free(self.pid, &self.freezer, &self.directory).await;
        if let Err(error) = &freed
            && tells
        {
            tracing::warn!(%error, container = self.container, "failed to free its network");
        }
        links::clear(&self.freezer).await;
        freed
    }

    /// Whether a CRIU is at work on the container: whatever is done to the freezer before it has
    /// ended, it may undo. One that has run out of patience is killed.
    async fn is_dumped(&self, patience: Instant) -> bool {
        let Some(criu) = self.dumper().await else { return false };
        if Instant::now() >= patience {
            tracing::warn!(pid = criu, "ending a dump that outlives its deadline");
            if let Err(error) = dumper::cut(criu, &self.freezer, true).await {
                tracing::warn!(%error, pid = criu, "failed to end a dump");
            }
        }
        true
    }

    async fn dumper(&self) -> Option<u32> {
        let (pid, directory, is_looked_for) =
            (self.pid, self.directory.clone(), self.is_looked_for);
        let look = tokio::task::spawn_blocking(move || {
            if is_looked_for { process::dumper(pid, &directory) } else { process::dumping(pid) }
        });
        look.await.unwrap_or_default()
    }

    /// Looks once and does the next thing. Returns what it found.
    async fn step(&self, patience: Instant) -> io::Result<Step> {
        let late = Instant::now() >= patience;
        let limit = if late { LATE_LOOK_LIMIT } else { LOOK_LIMIT };
        let look = tokio::time::timeout(limit, self.namespace.task(&self.container)).await;
        let Ok(Ok(task)) = look else {
            // Nobody to ask: the kernel does as it is told. A containerd that comes back believes
            // in the pause, so the looking goes on.
            self.freezer.thaw()?;
            return Ok(Step::Pending);
        };
        match task.map(|task| task.status) {
            None | Some(TaskStatus::Stopped) => Ok(Step::Ended(Revived::Gone)),
            Some(TaskStatus::Running) => {
                if self.freezer.is_frozen()? {
                    self.freezer.thaw()?;
                }
                Ok(Step::Runs)
            }
            // One under way is waited for: the shim does one thing after the other.
            Some(TaskStatus::Pausing | TaskStatus::Paused) => self.resume().await,
            // containerd says so, too, when the shim does not answer: it does when CRIU has ended.
            Some(TaskStatus::Created | TaskStatus::Unknown) => {
                if late {
                    self.freezer.thaw()?;
                }
                Ok(Step::Pending)
            }
        }
    }

    async fn resume(&self) -> io::Result<Step> {
        match self.namespace.resume(&self.container, RESUME_LIMIT).await {
            Ok(()) => Ok(Step::Runs),
            // runc refuses to resume what is not frozen, and containerd would call it paused for
            // ever: frozen for a moment, it can be resumed.
            Err(error) => {
                tracing::warn!(error = %error.kind, "containerd does not resume the container");
                // Not when another one, a guardian or an agent, has just resumed it.
                let task = self.namespace.task(&self.container).await.ok().flatten();
                if task.is_some_and(|task| task.status == TaskStatus::Paused)
                    && self.dumper().await.is_none()
                    && !self.freezer.is_frozen()?
                {
                    self.freezer.freeze()?;
                }
                Ok(Step::Pending)
            }
        }
    }
}
