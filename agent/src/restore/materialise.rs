//! Puts a dump where CRIU can read it: the one way its bytes come onto this node, for a restore and
//! for what is staged for one.

use std::path::Path;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::unpack::{Limits, UnpackError, unpack_images, unpack_pages};

use super::admission::Admitted;
use super::rules::Refusal;
use crate::gate::{self, Expected, GateError, Summary};
use crate::operations::{Driver, RefusedBy};

/// Why a dump is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MaterialiseError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error(transparent)]
    Gate(#[from] GateError),
}

impl MaterialiseError {
    /// Returns the rule that refused, when it was one.
    pub(crate) fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Refused(refusal) => Some(refusal.by),
            Self::Unpack(error) => error.is_integrity().then_some(RefusedBy::Integrity),
            Self::Gate(GateError::Refused(_)) => Some(RefusedBy::Identity),
            Self::Gate(_) => None,
        }
    }
}

/// Returns about how many bytes a dump takes here: holes take none.
pub(crate) fn bytes(checkpoint: &Checkpoint) -> u64 {
    let shards = checkpoint.shards.iter().map(|shard| shard.size);
    shards.fold(checkpoint.images.size, u64::saturating_add)
}

/// Unpacks the dump into `images`. The gate looks twice: before the pages come, since it is cheap,
/// and when everything is there, since any file may come with the pages. Without `expected` it only
/// decodes: who the processes may be is known when a container is made of them.
pub(crate) async fn materialise(
    admitted: &Admitted,
    images: &Path,
    driver: &Driver,
    expected: Option<&Expected>,
) -> Result<Summary, MaterialiseError> {
    let Admitted { store, checkpoint } = admitted;
    let progress = &driver.progress;
    driver.step("gate");
    unpack_images(store, checkpoint, images, progress).await?;
    match gate::inspect(images).await {
        Ok(summary) => judge(&summary, expected)?,
        // A file it needs may be so large that it comes with the pages.
        Err(GateError::Refused(_)) if checkpoint.config.sizes.bulk_bytes > 0 => {}
        Err(error) => return Err(error.into()),
    }
    driver.step("materialise");
    unpack_pages(store, checkpoint, images, Limits::default(), progress).await?;
    inspect(images, expected).await
}

/// Decodes and judges a dump that is there whole.
pub(crate) async fn inspect(
    images: &Path,
    expected: Option<&Expected>,
) -> Result<Summary, MaterialiseError> {
    let summary = gate::inspect(images).await?;
    judge(&summary, expected)?;
    Ok(summary)
}

fn judge(summary: &Summary, expected: Option<&Expected>) -> Result<(), Refusal> {
    let reasons = expected.map(|expected| gate::judge(summary, expected)).unwrap_or_default();
    if reasons.is_empty() { Ok(()) } else { Err(Refusal { by: RefusedBy::Identity, reasons }) }
}
