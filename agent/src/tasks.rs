//! Background work that shutdown waits for.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

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

    /// Whether tasks were asked to stop.
    pub fn is_stopping(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Asks every task to stop.
    pub fn stop(&self) {
        self.cancel.cancel();
    }

    /// Returns when every task has ended after [`Tasks::stop`].
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + use<> {
        let (cancel, tracker) = (self.cancel.clone(), self.tracker.clone());
        async move {
            cancel.cancelled().await;
            tracker.wait().await;
        }
    }

    /// Asks every task to stop and waits up to `grace`. Returns whether all stopped in time.
    pub async fn shut_down(&self, grace: Duration) -> bool {
        self.cancel.cancel();
        self.tracker.close();
        tokio::time::timeout(grace, self.tracker.wait()).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ignores_the_token_does_not_hold_up_shutdown() {
        let tasks = Tasks::default();
        tasks.spawn(|_cancel| std::future::pending());
        assert!(!tasks.shut_down(Duration::from_secs(30)).await);
    }
}
