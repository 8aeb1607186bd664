//! Ending an operation early: who may still ask for it, and what it comes to.

use std::sync::Arc;

use kybernate_packager::agent_api as api;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{Conclusion, Driver, Operations, OperationsError, State};

/// Why an operation whose end is being written down is not cancelled any more.
pub(super) const ENDS: &str = "it has come to its end";

/// Why an operation ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CancelCause {
    /// Somebody asked for it.
    Asked,
    /// Its time is over.
    TimeOut,
}

/// Why an operation is not cancelled.
#[derive(Debug, thiserror::Error)]
pub enum CancelError {
    /// There is none.
    #[error("there is no operation {0:?}")]
    NoOperation(String),
    /// It has ended otherwise.
    #[error("operation {0} has ended already: {1}")]
    Ended(String, &'static str),
    /// It failed, and what it made is being taken away.
    #[error("operation {0} failed already, and what it made is being taken away")]
    Undoing(String),
    /// It cannot be undone any more.
    #[error("operation {0} cannot be cancelled any more: {1}")]
    TooLate(String, &'static str),
    /// That could not be written down.
    #[error(transparent)]
    Operations(#[from] OperationsError),
}

/// Why whoever drives an operation gives it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// Somebody asked for that, or its time is over.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// The agent shuts down.
    #[error("the agent is shutting down")]
    AgentEnds,
}

/// It was cancelled before its point of no return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operation was cancelled")]
pub struct Cancelled;

impl CancelCause {
    /// Returns what is told as the operation's error.
    const fn words(self) -> &'static str {
        match self {
            Self::Asked => "it was cancelled",
            Self::TimeOut => "it was cancelled because its time was over",
        }
    }

    /// Does the same, with where it was when its time was over: that is what took it.
    fn told(self, step: &str) -> String {
        match self {
            Self::TimeOut if !step.is_empty() => format!("{} in the step {step:?}", self.words()),
            Self::TimeOut | Self::Asked => self.words().to_owned(),
        }
    }
}

impl Operations {
    /// Asks an operation to end. Safe to repeat.
    pub(crate) async fn cancel(
        self: &Arc<Self>,
        id: &str,
        cause: CancelCause,
    ) -> Result<api::Operation, CancelError> {
        let token = {
            let mut entries = self.entries();
            let unknown = || CancelError::NoOperation(id.to_owned());
            let entry = entries.get_mut(id).ok_or_else(unknown)?;
            let record = &mut entry.record;
            let ends_so = record.conclusion.as_ref().map_or(record.state, |ends| ends.state);
            match ends_so {
                State::Running => {}
                State::Cancelled => return Ok(entry.to_api()),
                _ if record.is_finished() => {
                    return Err(CancelError::Ended(id.to_owned(), record.state.name()));
                }
                State::Done => {
                    let why = entry.committed.unwrap_or(ENDS);
                    return Err(CancelError::TooLate(id.to_owned(), why));
                }
                _ => return Err(CancelError::Undoing(id.to_owned())),
            }
            if record.cancelled.is_some() {
                return Ok(entry.to_api());
            }
            if let Some(why) = entry.committed {
                return Err(CancelError::TooLate(id.to_owned(), why));
            }
            record.cancelled = Some(cause);
            entry.cancel.clone()
        };
        tracing::info!(operation.id = id, ?cause, "cancelling an operation");
        // It ends whether or not that can be written down.
        token.cancel();
        self.tell(id);
        self.write(id, Vec::new()).await?;
        self.present(id).ok_or_else(|| CancelError::NoOperation(id.to_owned()))
    }

    /// Returns why an operation was ended early, if it was.
    pub(crate) fn cancelled(&self, id: &str) -> Option<&'static str> {
        let entries = self.entries();
        entries.get(id).and_then(|entry| entry.record.cancelled).map(CancelCause::words)
    }
}

impl Driver {
    /// Returns when the operation was cancelled.
    pub(crate) fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        let token = self.operations.entries().get(&*self.id).map(|entry| entry.cancel.clone());
        async move {
            match token {
                Some(token) => token.cancelled_owned().await,
                None => std::future::pending().await,
            }
        }
    }

    /// Returns when the operation is to be given up: it was cancelled, or the agent `ends`. After its
    /// point of no return it is not: it would be called a failure, and be in the registry.
    pub(crate) fn stopped(
        &self,
        ends: CancellationToken,
    ) -> impl Future<Output = Stopped> + Send + use<> {
        let (cancelled, driver) = (self.cancelled(), self.clone());
        async move {
            tokio::select! {
                () = cancelled => return Cancelled.into(),
                () = ends.cancelled() => {}
            }
            if driver.is_committed() {
                std::future::pending::<()>().await;
            }
            Stopped::AgentEnds
        }
    }

    /// Does `work`, unless the operation is to be given up before it is done.
    pub(crate) async fn unless_stopped<T, E: From<Stopped>>(
        &self,
        ends: &CancellationToken,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        tokio::select! {
            done = work => done,
            why = self.stopped(ends.clone()) => Err(why.into()),
        }
    }

    /// Whether it was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        let entries = self.operations.entries();
        entries.get(&*self.id).is_some_and(|entry| entry.record.cancelled.is_some())
    }

    /// Whether nobody can cancel it any more.
    pub(crate) fn is_committed(&self) -> bool {
        let entries = self.operations.entries();
        entries.get(&*self.id).is_some_and(|entry| entry.committed.is_some())
    }

    /// Whether its checkpoint is known to be in the registry.
    pub(crate) fn is_stored(&self) -> bool {
        let entries = self.operations.entries();
        entries.get(&*self.id).is_some_and(|entry| entry.record.stored.is_some())
    }

    /// Passes the point of no return: from now on nobody can cancel it, for the reason `why`. An
    /// error when somebody was quicker.
    pub(crate) fn commit(&self, why: &'static str) -> Result<(), Cancelled> {
        let mut entries = self.operations.entries();
        let Some(entry) = entries.get_mut(&*self.id) else { return Ok(()) };
        if entry.record.cancelled.is_some() {
            return Err(Cancelled);
        }
        entry.committed = Some(why);
        Ok(())
    }

    /// Does `work`, and cancels the operation when that takes longer than the operation may.
    pub(crate) async fn bounded<T>(&self, work: impl Future<Output = T>) -> T {
        let deadline = {
            let entries = self.operations.entries();
            entries.get(&*self.id).and_then(|entry| entry.record.deadline)
        };
        let Some(deadline) = deadline else { return work.await };
        let left = deadline.duration_since(jiff::Timestamp::now()).try_into().unwrap_or_default();
        let mut work = std::pin::pin!(work);
        if let Ok(done) = tokio::time::timeout(left, &mut work).await {
            return done;
        }
        if let Err(error) = self.operations.cancel(&self.id, CancelCause::TimeOut).await {
            tracing::info!(%error, operation.id = self.id(), "its time is over");
        }
        work.await
    }

    /// Returns how an operation ends that did not do what it was to: cancelled, if it was.
    pub(crate) fn ends(&self, otherwise: Conclusion) -> Conclusion {
        let entries = self.operations.entries();
        match entries.get(&*self.id).and_then(|entry| entry.record.cancelled) {
            Some(cause) if otherwise.state != State::Done => Conclusion {
                state: State::Cancelled,
                error: cause.told(self.progress.snapshot().step),
                refused_by: None,
                ..otherwise
            },
            _ => otherwise,
        }
    }

    /// Notes what was taken away again.
    pub(crate) fn undone(&self, what: String) {
        let mut entries = self.operations.entries();
        if let Some(entry) = entries.get_mut(&*self.id) {
            entry.record.undone.push(what);
        }
    }
}
