//! GPU memory that does not come back when its source runs again, though the dump has all of it.

use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::CheckpointError;
use crate::gpu::{Failure, GpuError, Gpus, Held};
use crate::operations::Driver;
use crate::patience::Pauses;
use crate::undo::gpu_is_lost;

/// Why a checkpoint is not given up for a wish any more.
const LAST: &str = "its source has lost its GPU memory, which nothing else has";

/// Whose it is, while it is tried again. The journal has it, too, for the time after the artifact is
/// stored, and for the next agent.
#[derive(Debug)]
pub(super) struct Away {
    held: Held,
    /// When the pause began.
    since: Option<Instant>,
}

impl Away {
    /// Tells in the operation why it did not come back.
    pub(super) async fn note(
        driver: &Driver,
        held: &Held,
        since: Option<Instant>,
        error: &GpuError,
    ) -> Result<Self, CheckpointError> {
        if matches!(error, GpuError::Failed(Failure::Lost(_) | Failure::Cut { .. })) {
            driver.commit(LAST)?;
        }
        let error = chain(error).to_string();
        tracing::error!(operation.id = driver.id(), error, "the source lacks its GPU memory");
        let told = format!(
            "the source ran again without its GPU memory, which this checkpoint has: {error}; it is tried \
             again as long as that may succeed, and the operation does not end before"
        );
        driver.update(|record| record.warnings.push(told)).await?;
        Ok(Self { held: held.clone(), since })
    }

    /// Tries again until it is back, is lost, or the artifact is `published`: then it is for whoever
    /// undoes what the operation made. An attempt is not given up half-way. Returns whether nobody
    /// needs to try any more.
    pub(super) async fn regain(
        &self,
        gpus: &Gpus,
        driver: &Driver,
        published: &CancellationToken,
    ) -> bool {
        let mut pauses = Pauses::default();
        loop {
            tokio::select! {
                () = pauses.pause() => {}
                () = published.cancelled() => return false,
            }
            let settled = match gpus.bring_back(&self.held).await {
                Ok(()) => {
                    self.is_back(driver);
                    Ok(())
                }
                Err(error) if error.is_lost() => {
                    // One that is being cancelled ends so.
                    driver.commit(LAST).unwrap_or_default();
                    gpu_is_lost(driver, &error).await
                }
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "the source still lacks its GPU memory");
                    continue;
                }
            };
            // What the journal still has is looked at once more at the end.
            return settled.is_ok();
        }
    }

    fn is_back(&self, driver: &Driver) {
        tracing::info!(operation.id = driver.id(), "the source has its GPU memory back");
        if let Some(began) = self.since {
            driver.paused(began.elapsed());
        }
    }
}
