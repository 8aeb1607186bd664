//! The end of a source that is to be stopped: nothing of it may have run since the dump.

use std::io;
use std::time::Duration;

use kybernate_packager::pack::Packed;
use kybernate_packager::store::Store;
use tokio::time::{Instant, timeout};

use super::{Captured, END_LIMIT, Taking};
use crate::checkpoint::error::CheckpointError;
use crate::revive::Revived;
use crate::undo::DUMP_PATIENCE;

/// The guardian lets a source run before it says so.
const TOLD_LATE: Duration = Duration::from_secs(1);

impl Taking<'_> {
    pub(super) async fn publish_and_stop(
        &mut self,
        store: &Store,
        captured: Captured,
    ) -> Result<Packed, CheckpointError> {
        let packed = self.publish(store, captured).await?;
        self.driver.step("stop");
        self.end_source().await?;
        self.order.hooks.after(self.driver).await;
        Ok(packed)
    }

    /// Makes sure that nobody has let the source run: what it has done since the dump would be lost, or
    /// its files would be of another moment than its memory. One that has ended has not run.
    pub(super) async fn stands_still(&self) -> Result<(), CheckpointError> {
        let freezer = self.source.freezer.clone();
        let frozen = tokio::task::spawn_blocking(move || freezer.is_frozen()).await;
        match frozen.map_err(io::Error::other).and_then(|frozen| frozen) {
            Ok(true) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(CheckpointError::Freezer(error)),
            Ok(false) => match timeout(TOLD_LATE, self.expired()).await {
                Ok(error) => Err(error),
                Err(_elapsed) => Err(CheckpointError::LetRun),
            },
        }
    }

    /// Kills the source. It is frozen, so nothing of it runs between the dump and its end.
    async fn end_source(&mut self) -> Result<(), CheckpointError> {
        let (namespace, container) = (&self.source.namespace, &self.order.container);
        self.stands_still().await?;
        self.silence_connections().await;
        // Somebody else may have ended it, and another one may have its name by now.
        if namespace.task(container).await?.is_some_and(|task| task.pid == self.source.pid) {
            match namespace.kill(container).await {
                Err(error) if error.is_not_found() => {}
                killed => killed?,
            }
        }
        let revived = self.paused().revive(Instant::now() + DUMP_PATIENCE).await?;
        if revived != Revived::Gone {
            namespace.wait(container, END_LIMIT).await?;
        }
        self.running().await?;
        if let Some(guardian) = self.guardian.take() {
            guardian.dismiss().await?;
        }
        Ok(())
    }
}
