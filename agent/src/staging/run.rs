//! The steps of `Stage`: the same admission and the same way of the bytes as a restore has.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use super::shelf::IMAGES;
use super::{Granted, Order, Reservation, StagingError, Tier, Wish};
use crate::app::App;
use crate::operations::{
    Cancelled, Conclusion, Driver, Made, OperationsError, RefusedBy, Sizes, Stopped,
};
use crate::process::memory_available;
use crate::restore::admission::{AdmissionError, admit};
use crate::restore::materialise::{self, MaterialiseError, materialise};
use crate::stage;
use crate::undo::{Undoing, undo};

/// Why a staging cannot be cancelled any more.
const COMMITTED: &str = "it is being given its place: evict it instead";

/// Memory that stays free for everybody else when something is staged there.
const MEMORY_MARGIN: u64 = 64 << 20;

/// Why a checkpoint was not staged.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Materialise(#[from] MaterialiseError),
    #[error(transparent)]
    Staging(#[from] StagingError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error("failed to make a place for the dump")]
    Place(#[source] io::Error),
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl RunError {
    /// Returns the rule that refused, when it was one.
    fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Admission(error) => error.refused_by(),
            Self::Materialise(error) => error.refused_by(),
            Self::Staging(StagingError::Budget { .. } | StagingError::NoTier(_)) => {
                Some(RefusedBy::Policy)
            }
            _ => None,
        }
    }
}

/// Stages a checkpoint. After a failure nothing is left of it. Returns how it went; `None` when the
/// next agent has to see to its end.
pub(crate) async fn run(
    app: &Arc<App>,
    driver: &Driver,
    order: Order,
    cancel: CancellationToken,
) -> Option<Conclusion> {
    let mut staging = Staged { app, driver, order: &order, reservation: None };
    let steps = driver.unless_stopped(&cancel, staging.steps());
    let staged = driver.tell_while(Box::pin(steps)).await;
    let conclusion = driver.ends(match staged {
        Ok(sizes) => Conclusion::done(sizes),
        Err(error) => Conclusion::failed(chain(&error).to_string(), error.refused_by()),
    });
    let undoing = Undoing { namespace: "", container: "", conclusion: &conclusion };
    let undone = undo(app, driver, undoing, &cancel).await;
    // Only now: until its files are gone, their room is taken.
    drop(staging.reservation.take());
    undone.then_some(conclusion)
}

struct Staged<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    order: &'a Order,
    reservation: Option<Reservation>,
}

impl Staged<'_> {
    async fn steps(&mut self) -> Result<Sizes, RunError> {
        let (app, driver, tier) = (self.app, self.driver, self.order.tier);
        driver.update(|record| record.tier = Some(tier)).await?;
        let admitted = admit(app, driver, &self.order.admission).await?;
        let sizes = Sizes::of(&admitted.checkpoint.config.sizes);
        let wish = Wish {
            tier,
            digest: admitted.checkpoint.stored.descriptor.digest.clone(),
            bytes: materialise::bytes(&admitted.checkpoint),
            operation: driver.id().to_owned(),
            reference: self.order.admission.reference(),
        };
        driver.step("reserve");
        match app.staging.reserve(&wish).await? {
            Granted::Present => return Ok(sizes),
            Granted::Room(reservation) => self.reservation = Some(reservation),
        }
        let directory = self.place(&wish).await?;
        materialise(&admitted, &directory.join(IMAGES), driver, None).await?;
        driver.step("publish");
        driver.commit(COMMITTED)?;
        if let Some(reservation) = &self.reservation {
            reservation.publish(&directory, &wish).await?;
        }
        Ok(sizes)
    }

    /// Makes the directory that becomes the staged checkpoint when it is whole.
    async fn place(&self, wish: &Wish) -> Result<PathBuf, RunError> {
        if wish.tier == Tier::Ram {
            let (needed, available) = (wish.bytes, memory_available().unwrap_or(u64::MAX));
            if available < needed.saturating_add(MEMORY_MARGIN) {
                return Err(StagingError::Memory { needed, available }.into());
            }
        }
        let directory = self.app.staging.temporary(wish.tier, self.driver.id())?;
        self.driver.will_make(Made::Directory(directory.clone())).await?;
        let images = directory.join(IMAGES);
        let made = tokio::task::spawn_blocking(move || stage::make(&images)).await;
        made.map_err(io::Error::other).and_then(|made| made).map_err(RunError::Place)?;
        Ok(directory)
    }
}
