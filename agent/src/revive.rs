//! Brings a paused source back to life: the one thing that must work whatever else is broken.
//!
//! What can be found: containerd has it paused (the usual case); a dump is still under way, and
//! containerd holds every answer back until it ends; CRIU was killed while it had the cgroup
//! thawed, so that the container runs and containerd believes that it is paused; containerd does
//! not answer at all.

use std::io;
use std::time::Duration;

use tokio::time::Instant;

use crate::cgroup::Freezer;
use crate::patience::Patience;
use crate::process;
use crate::runtime::{Namespace, RuntimeError, TaskStatus};

/// How long containerd may take to thaw a container before another way is tried.
const RESUME_LIMIT: Duration = Duration::from_secs(2);

/// How often the state is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// After the deadline, how long reviving may take in all. CRIU needs a moment to die and the
/// shim to notice.
const REVIVE_LIMIT: Duration = Duration::from_secs(20);

/// A container that was paused.
#[derive(Clone, Debug)]
pub(crate) struct Paused {
    pub(crate) namespace: Namespace,
    pub(crate) container: String,
    pub(crate) pid: u32,
    pub(crate) freezer: Freezer,
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

/// Why a container could not be brought back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReviveError {
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
    /// killed: its parasite code puts the processes right by itself when its socket closes.
    pub(crate) async fn revive(&self, patience: Instant) -> Result<Revived, ReviveError> {
        let limit = patience.saturating_duration_since(Instant::now()) + REVIVE_LIMIT;
        let mut looks = Patience::new(limit, LOOK_EVERY);
        while looks.once_more().await {
            match self.step(patience).await {
                Ok(Some(revived)) => return Ok(revived),
                Ok(None) => {}
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

    /// Looks once and does the next thing. Returns how it ended, when it has.
    async fn step(&self, patience: Instant) -> io::Result<Option<Revived>> {
        if let Some(tracer) = process::tracer(self.pid) {
            if Instant::now() >= patience {
                tracing::warn!(pid = tracer, "ending a dump that outlives its deadline");
                process::kill(tracer)?;
            }
            return Ok(None);
        }
        let Ok(task) = self.namespace.task(&self.container).await else {
            // Nobody to ask: the kernel does as it is told.
            self.freezer.thaw()?;
            return Ok((Instant::now() >= patience).then_some(Revived::Thawed));
        };
        match task.map(|task| task.status) {
            None | Some(TaskStatus::Stopped) => Ok(Some(Revived::Gone)),
            Some(TaskStatus::Running) => {
                if self.freezer.is_frozen()? {
                    self.freezer.thaw()?;
                }
                Ok(Some(Revived::Running))
            }
            Some(TaskStatus::Paused) => self.resume().await,
            Some(TaskStatus::Created | TaskStatus::Unknown) => {
                self.freezer.thaw()?;
                Ok(None)
            }
        }
    }

    async fn resume(&self) -> io::Result<Option<Revived>> {
        match self.namespace.resume(&self.container, RESUME_LIMIT).await {
            Ok(()) => Ok(Some(Revived::Running)),
            // runc refuses to resume what is not frozen, and containerd would call it paused for
            // ever: frozen for a moment, it can be resumed.
            Err(error) => {
                tracing::warn!(error = %error.kind, "containerd does not resume the container");
                if process::tracer(self.pid).is_none() && !self.freezer.is_frozen()? {
                    self.freezer.freeze()?;
                }
                Ok(None)
            }
        }
    }
}
