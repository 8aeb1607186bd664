//! The end of a source that is to be stopped: it is to have stood still since the dump.

use std::io;
use std::time::Duration;

use kybernate_packager::pack::Packed;
use kybernate_packager::store::Store;
use tokio::time::Instant;

use super::{Captured, END_LIMIT, Taking};
use crate::cgroup::is_gone;
use crate::checkpoint::error::CheckpointError;
use crate::patience::Patience;
use crate::process;
use crate::revive::Revived;
use crate::undo::DUMP_PATIENCE;

/// The guardian lets a source run before it says so.
const TOLD_LATE: Duration = Duration::from_secs(1);

/// How often it is looked meanwhile whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

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

    /// Makes sure that nobody has let the source run, as far as a look can tell: what it has done since the
    /// dump would be lost, or its files would be of another moment than its memory. One that has ended
    /// meanwhile is no failure: its checkpoint is all that is left of it.
    pub(super) async fn stands_still(&self) -> Result<(), CheckpointError> {
        if self.is_held().await? {
            return Ok(());
        }
        // Whoever ends a paused container lets it run into its end.
        let over = async {
            let mut looks = Patience::new(TOLD_LATE, LOOK_EVERY);
            while looks.once_more().await {
                if self.has_ended() {
                    return Ok(());
                }
            }
            Err(CheckpointError::LetRun)
        };
        tokio::select! {
            over = over => over,
            error = self.expired() => Err(error),
        }
    }

    async fn is_held(&self) -> Result<bool, CheckpointError> {
        let freezer = self.source.freezer.clone();
        let held = tokio::task::spawn_blocking(move || freezer.is_held()).await;
        match held.map_err(io::Error::other).and_then(|held| held) {
            // The cgroup is gone, or goes just now.
            Err(error) if is_gone(&error) => Ok(true),
            held => held.map_err(CheckpointError::Freezer),
        }
    }

    fn has_ended(&self) -> bool {
        !process::is_there(self.source.pid, self.source.born)
            || process::has_ended(self.source.pid).unwrap_or(false)
    }

    /// Kills the source. It is frozen, so nothing of it runs between the dump and its end.
    async fn end_source(&mut self) -> Result<(), CheckpointError> {
        let (namespace, container) = (&self.source.namespace, &self.order.container);
        self.stands_still().await?;
        self.silence_connections().await;
        // Somebody else may have ended it, and another one may have its name by now. While a shim does not
        // answer, containerd knows no process id: it is ours as long as our process is there.
        let task = namespace.task(container).await?;
        let is_ours = task.is_some_and(|task| match task.pid {
            0 => !self.has_ended(),
            pid => pid == self.source.pid,
        });
        if is_ours {
            match namespace.kill(container).await {
                Err(error) if error.is_not_found() => {}
                killed => killed?,
            }
            self.kill_all().await?;
        }
        // Nothing of it runs from now on, however late it is seen to end.
        self.driver.update(|record| record.conclusion = record.stored.clone()).await?;
        if is_ours {
            let revived = self.paused().revive(Instant::now() + DUMP_PATIENCE).await?;
            if revived != Revived::Gone {
                namespace.wait(container, END_LIMIT).await?;
            }
        }
        self.running().await?;
        if let Some(guardian) = self.guardian.take() {
            guardian.dismiss().await?;
        }
        Ok(())
    }

    /// Kills what is in its cgroup, however the runtime has looked for it: runc asks the cgroup of devices
    /// (version 1), which systemd may have taken the processes out of, and then finds none.
    async fn kill_all(&self) -> Result<(), CheckpointError> {
        let freezer = self.source.freezer.clone();
        let killed = tokio::task::spawn_blocking(move || freezer.kill()).await;
        match killed.map_err(io::Error::other).and_then(|killed| killed) {
            Err(error) if !is_gone(&error) => Err(CheckpointError::Freezer(error)),
            _ => Ok(()),
        }
    }
}
