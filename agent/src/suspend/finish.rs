//! Brings what was begun to its end, whoever has died on the way: an agent that had asked
//! containerd, or containerd, and with it the runc that its shim had started.
//!
//! A runc that is killed may have frozen the container before: the shim goes on to call that
//! running, and would not resume it. A shim that was asked does what it was asked for also when
//! nobody is left who did, and maybe late. So what is written down is looked at and asked for until
//! it is so. The shim does one thing after the other: whatever comes late finds it done.

use std::io;
use std::time::Duration;

use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Phase, RESUME_LIMIT, SuspendError, Suspended, not_running};
use crate::app::App;
use crate::cgroup::Freezer;
use crate::operations::{Cancelled, Driver, Stopped};
use crate::patience::Pauses;
use crate::revive::{Paused, Revived};
use crate::runtime::{Namespace, TaskStatus};
use crate::vfork;

/// How long containerd may take to say how a container is. While a shim does not answer, it takes
/// two seconds to say that it does not know.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// What is waited for while nobody says how a container is.
const UNKNOWN: &str = "containerd (it does not say how the container is)";

/// How often in a row the runtime may refuse to freeze what runs. The first time, it may have been
/// somebody else's death that was told.
const REFUSALS_MAX: u32 = 2;

/// How something is gone on with.
#[derive(Debug)]
pub(super) struct Effort<'a> {
    driver: &'a Driver,
    /// The agent ends: the next one goes on.
    ends: &'a CancellationToken,
    /// Whether somebody has tried before.
    is_later: bool,
    /// Whether a cancellation ends it.
    can_be_cancelled: bool,
    /// Whether nobody knew how the container is.
    is_unknown: bool,
    pauses: Pauses,
}

/// How a container is that is written down.
#[derive(Debug)]
enum Look {
    Runs,
    Paused(Freezer),
    /// It is frozen, and containerd takes it for running.
    Stuck(Freezer),
    Ended(&'static str),
    /// Nobody knows, or somebody is still at it.
    Unknown,
}

impl<'a> Effort<'a> {
    /// For what is begun.
    pub(super) fn first(driver: &'a Driver, ends: &'a CancellationToken) -> Self {
        let pauses = Pauses::default();
        Self { driver, ends, is_later: false, can_be_cancelled: true, is_unknown: false, pauses }
    }

    /// For what an earlier agent has begun.
    pub(super) fn later(driver: &'a Driver, ends: &'a CancellationToken) -> Self {
        Self { is_later: true, ..Self::first(driver, ends) }
    }

    /// For what puts back something that was cancelled.
    pub(super) fn last(driver: &'a Driver, ends: &'a CancellationToken) -> Self {
        Self { can_be_cancelled: false, ..Self::later(driver, ends) }
    }

    /// Returns the operation that it is for.
    pub(super) const fn driver(&self) -> &'a Driver {
        self.driver
    }

    /// Returns when the agent ends.
    pub(super) const fn ends(&self) -> &'a CancellationToken {
        self.ends
    }

    /// Looks how a container is, and tells when nobody has been able to say twice in a row.
    async fn look(&mut self, namespace: &Namespace, known: &Suspended) -> Look {
        let found = look(namespace, known).await;
        let is_unknown = matches!(found, Look::Unknown);
        let was_unknown = std::mem::replace(&mut self.is_unknown, is_unknown);
        if !is_unknown {
            self.driver.waits_for("");
        } else if was_unknown {
            self.driver.waits_for(UNKNOWN);
        }
        found
    }

    /// Ends it when it was cancelled.
    fn may_go_on(&self) -> Result<(), SuspendError> {
        let is_over = self.can_be_cancelled && self.driver.is_cancelled();
        if is_over { Err(Stopped::from(Cancelled).into()) } else { Ok(()) }
    }

    /// Returns when it was cancelled.
    fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        let cancelled = self.can_be_cancelled.then(|| self.driver.cancelled());
        async move {
            match cancelled {
                Some(cancelled) => cancelled.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Waits until it is time to try again; an error when that is left to others.
    async fn once_more(&mut self) -> Result<(), SuspendError> {
        let cancelled = self.cancelled();
        tokio::select! {
            biased;
            () = self.ends.cancelled() => Err(Stopped::AgentEnds.into()),
            () = cancelled => Err(Stopped::from(Cancelled).into()),
            () = self.pauses.pause() => Ok(()),
        }
    }
}

/// Freezes a container that is written down.
pub(super) async fn suspend(
    app: &App,
    known: &Suspended,
    mut effort: Effort<'_>,
) -> Result<(), SuspendError> {
    let namespace = app.containerd.namespace(&known.namespace);
    let (mut taken, mut refusals) = (false, 0);
    loop {
        effort.may_go_on()?;
        match effort.look(&namespace, known).await {
            Look::Paused(freezer) => {
                if !freezer.is_frozen().unwrap_or(true) {
                    freezer.freeze().map_err(SuspendError::Freezer)?;
                }
                return Ok(());
            }
            Look::Ended(status) => {
                app.suspended.forget(&known.wanted()).await?;
                return Err(not_running(&known.wanted(), status));
            }
            Look::Stuck(freezer) => thaw(known, &freezer),
            Look::Unknown => {}
            Look::Runs => {
                if !std::mem::replace(&mut taken, true) {
                    take_gpu(app, known, &effort).await?;
                    effort.may_go_on()?;
                }
                effort.driver.step("suspend");
                // Who is asked may go on with it: that is seen when it is put back.
                let paused = tokio::select! {
                    paused = namespace.pause(&known.container) => paused,
                    () = effort.cancelled() => return Err(Stopped::from(Cancelled).into()),
                };
                let Err(error) = paused else {
                    // It may be dumped later.
                    let Look::Paused(freezer) = effort.look(&namespace, known).await else {
                        continue;
                    };
                    if let Some(pid) =
                        vfork::settle(&freezer).await.map_err(SuspendError::Freezer)?
                    {
                        tracing::warn!(
                            pid,
                            "it waits in vfork(2), and cannot be dumped while it is suspended"
                        );
                    }
                    return Ok(());
                };
                tracing::warn!(error = %chain(&error), container = known.container, "not frozen");
                refusals += u32::from(!error.is_away());
                if refusals >= REFUSALS_MAX && matches!(look(&namespace, known).await, Look::Runs) {
                    return Err(give_up(app, known, error.into()).await);
                }
            }
        }
        effort.once_more().await?;
    }
}

/// Lets a container run that is written down.
pub(super) async fn resume(
    app: &App,
    known: &Suspended,
    mut effort: Effort<'_>,
) -> Result<(), SuspendError> {
    let namespace = app.containerd.namespace(&known.namespace);
    effort.driver.step("resume");
    let ended = loop {
        match effort.look(&namespace, known).await {
            Look::Ended(status) => break Some(status),
            Look::Runs => break None,
            Look::Stuck(freezer) => thaw(known, &freezer),
            Look::Paused(freezer) => {
                let paused = Paused {
                    namespace: namespace.clone(),
                    container: known.container.clone(),
                    pid: known.pid,
                    freezer,
                    // No dump is under way: whoever looks like one by what it has open is none.
                    is_looked_for: false,
                    directory: app.config.suspended(),
                    cut_short: false,
                };
                match paused.revive(Instant::now() + RESUME_LIMIT).await? {
                    Revived::Running => break None,
                    Revived::Gone => break Some("stopped"),
                    // containerd goes on to believe in the pause.
                    Revived::Thawed => {}
                }
            }
            Look::Unknown => {}
        }
        effort.once_more().await?;
    };
    if let Some(status) = ended {
        app.suspended.forget(&known.wanted()).await?;
        return Err(not_running(&known.wanted(), status));
    }
    Ok(())
}

async fn look(namespace: &Namespace, known: &Suspended) -> Look {
    let looked = tokio::time::timeout(LOOK_LIMIT, namespace.task(&known.container)).await;
    let task = match looked {
        Ok(Ok(Some(task))) => task,
        Ok(Ok(None)) => return Look::Ended("not started"),
        Ok(Err(error)) => {
            tracing::debug!(error = %chain(&error), "a container is not known to be suspended");
            return Look::Unknown;
        }
        Err(_elapsed) => return Look::Unknown,
    };
    match task.status {
        // containerd says so, too, when the shim does not answer.
        TaskStatus::Created | TaskStatus::Pausing | TaskStatus::Unknown => Look::Unknown,
        TaskStatus::Stopped => Look::Ended("stopped"),
        TaskStatus::Running | TaskStatus::Paused if !known.is(task.pid) => {
            Look::Ended("another one by now")
        }
        TaskStatus::Running => match known.freezer() {
            Ok(freezer) if freezer.is_frozen().unwrap_or(false) => Look::Stuck(freezer),
            _ => Look::Runs,
        },
        TaskStatus::Paused => match known.freezer() {
            Ok(freezer) => Look::Paused(freezer),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Look::Ended("stopped"),
            Err(error) => {
                tracing::warn!(%error, container = known.container, "its freezer is not found");
                Look::Unknown
            }
        },
    }
}

/// Thaws what containerd takes for running: only then can it be frozen by containerd, or run.
fn thaw(known: &Suspended, freezer: &Freezer) {
    let container = &known.container;
    tracing::warn!(container, "it is frozen, and containerd does not know: thawing it");
    if let Err(error) = freezer.thaw() {
        tracing::warn!(%error, container, "failed to thaw it");
    }
}

/// Moves its GPU memory away, which has to be done before it is paused: the driver works in its
/// threads.
async fn take_gpu(app: &App, known: &Suspended, effort: &Effort<'_>) -> Result<(), SuspendError> {
    if known.gpu.is_empty() {
        return Ok(());
    }
    effort.driver.step("gpu");
    let taken = async {
        if effort.is_later {
            // Whoever tried before may have got half-way.
            app.gpus.bring_back(&known.gpu).await?;
        }
        app.gpus.take(&known.gpu).await
    };
    if let Err(error) = taken.await {
        return Err(give_up(app, known, SuspendError::Gpu(error)).await);
    }
    Ok(())
}

/// Puts back what was begun, and returns what is told of it. GPU memory that does not come back stays
/// written down: a resume tries again.
async fn give_up(app: &App, known: &Suspended, error: SuspendError) -> SuspendError {
    match app.gpus.bring_back(&known.gpu).await {
        Ok(()) => match app.suspended.forget(&known.wanted()).await {
            Ok(()) => error,
            Err(kept) => kept.into(),
        },
        Err(source) => {
            let container = &known.container;
            tracing::error!(error = %chain(&source), container, "its GPU memory is still away");
            app.suspended.note(known.clone().at(Phase::Resuming)).await;
            SuspendError::Away { error: chain(&error).to_string(), source }
        }
    }
}
