//! Background work that shutdown waits for.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::trace;

/// Starts tasks and, at the end, waits for them.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    cancel: CancellationToken,
}

impl Tasks {
    /// Runs `work` until it ends; `work` gets the token that asks it to end early.
    pub fn spawn<F>(&self, work: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.tracker.spawn(work(self.cancel.clone()));
    }

    /// Runs `work` to its end, also when whoever awaits the handle is dropped.
    pub fn run<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tracker.spawn(trace::carry(work).in_current_span())
    }

    /// Whether the end has begun.
    pub fn is_ending(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Asks every task to stop and waits up to `grace`. Returns whether all stopped in time.
    pub async fn shut_down(self, grace: Duration) -> bool {
        self.cancel.cancel();
        self.tracker.close();
        tokio::time::timeout(grace, self.tracker.wait()).await.is_ok()
    }
}

#[cfg(test)]
mod tests;
