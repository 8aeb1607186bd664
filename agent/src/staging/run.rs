//! The steps of `Stage`: the same admission and the same way of the bytes as a restore has.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::shelf::{IMAGES, VOLUMES};
use super::{Granted, Order, Reservation, StagingError, Tier, Wish};
use crate::app::App;
use crate::operations::{Conclusion, Driver, RefusedBy, Sizes};
use crate::process::memory_available;
use crate::restore::admission::admit;
use crate::restore::bring::{BringError, Refusing, make, see_through};
use crate::restore::materialise::{self, materialise};
use crate::restore::volume::{self, VolumeError};

/// Why a staging cannot be cancelled any more.
const COMMITTED: &str = "it is being given its place: evict it instead";

/// Memory that stays free for everybody else when something is staged there.
const MEMORY_MARGIN: u64 = 64 << 20;

/// Why a checkpoint was not staged.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Bring(BringError),
    #[error(transparent)]
    Staging(#[from] StagingError),
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl<E> From<E> for RunError
where
    BringError: From<E>,
{
    fn from(error: E) -> Self {
        Self::Bring(error.into())
    }
}

impl Refusing for RunError {
    fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Bring(error) => error.refused_by(),
            Self::Staging(StagingError::Budget { .. } | StagingError::NoTier(_)) => {
                Some(RefusedBy::Policy)
            }
            Self::Staging(_) => None,
            Self::Volume(error) => error.is_integrity().then_some(RefusedBy::Integrity),
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
    // Its reservation goes with it: until the files are gone, their room is taken.
    let mut staging = Staged { app, driver, order: &order, reservation: None };
    see_through(app, driver, &cancel, Box::pin(staging.steps())).await
}

struct Staged<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    order: &'a Order,
    reservation: Option<Reservation>,
}

impl Staged<'_> {
    async fn steps(&mut self) -> Result<Conclusion, RunError> {
        let (app, driver, tier) = (self.app, self.driver, self.order.tier);
        driver.note(|record| record.tier = Some(tier));
        let admitted = admit(app, driver, &self.order.admission).await?;
        let checkpoint = &admitted.checkpoint;
        volume::check(checkpoint)?;
        let done = Conclusion::done(Sizes::of(&checkpoint.config.sizes));
        let wish = Wish {
            tier,
            digest: checkpoint.stored.descriptor.digest.clone(),
            bytes: materialise::bytes(checkpoint).saturating_add(volume::bytes(checkpoint)),
            operation: driver.id().to_owned(),
            reference: self.order.admission.reference(),
        };
        driver.step("reserve");
        match app.staging.reserve(&wish).await? {
            Granted::Present => return Ok(done),
            Granted::Room(reservation) => self.reservation = Some(reservation),
        }
        let directory = self.place(&wish).await?;
        materialise(&admitted, &directory.join(IMAGES), driver, None).await?;
        // A pod's container is given seconds: what is copied into it must be here by then.
        volume::fetch(&admitted, &directory.join(VOLUMES), driver).await?;
        driver.step("publish");
        let Some(reservation) = &self.reservation else { return Ok(done) };
        let record = reservation.describe(&directory, &wish, &driver.progress).await?;
        driver.commit(COMMITTED)?;
        reservation.publish(&directory, &wish, record).await?;
        Ok(done)
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
        Ok(make(self.driver, directory, &[IMAGES]).await?)
    }
}
