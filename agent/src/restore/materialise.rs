//! Puts a dump where CRIU can read it: the one way its bytes come onto this node, for a restore and
//! for what is staged for one.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::unpack::on_demand::OnDemand;
use kybernate_packager::unpack::{Limits, UnpackError, unpack_images, unpack_pages};
use kybernate_spec::chain;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::admission::Admitted;
use super::bring::IMAGES;
use super::memory::Memory;
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
    look_first(admitted, images, driver, expected).await?;
    driver.step("materialise");
    unpack_pages(store, checkpoint, images, Limits::default(), progress).await?;
    let summary = look(images, expected).await?;
    whole(&summary, images, BTreeMap::new()).await?;
    Ok(summary)
}

/// Does the same, but leaves the memory where it is, if that can be: CRIU then reads it as it comes.
/// `operation` is the directory that `images` is in. `judged` is told when the gate has let it pass.
pub(super) async fn on_demand(
    admitted: &Admitted,
    operation: &Path,
    driver: &Driver,
    expected: &Expected,
    judged: &CancellationToken,
) -> Result<(Summary, Option<Memory>), MaterialiseError> {
    let Admitted { store, checkpoint } = admitted;
    let (progress, images) = (&driver.progress, operation.join(IMAGES));
    let summary = look_first(admitted, &images, driver, Some(expected)).await?;
    // The image's bytes count here too.
    driver.step("pull");
    if summary.is_some() {
        judged.cancel();
    }
    let pages = OnDemand::open(store, checkpoint, &images, Limits::default(), progress).await?;
    let pages = Arc::new(pages);
    let summary = match summary {
        Some(summary) if pages.is_all() => summary,
        // Files that CRIU understands have come with the pages.
        _ => look(&images, Some(expected)).await?,
    };
    let later = pages.files().iter().map(|file| (file.name.clone(), file.length));
    whole(&summary, &images, later.collect()).await?;
    judged.cancel();
    if pages.files().is_empty() {
        return Ok((summary, None));
    }
    let memory = mount(driver, Arc::clone(&pages), operation, &images).await;
    if memory.is_none() {
        pages.write(checkpoint, &images).await?;
    }
    Ok((summary, memory))
}

async fn mount(
    driver: &Driver,
    pages: Arc<OnDemand>,
    operation: &Path,
    images: &Path,
) -> Option<Memory> {
    let (operation, images) = (operation.to_owned(), images.to_owned());
    let runtime = Handle::current();
    let mounted = move || Memory::mount(pages, &operation, &images, runtime);
    let mounted = driver.spawn_blocking(mounted).await;
    match mounted.map_err(io::Error::other).and_then(|mounted| mounted) {
        Ok(memory) => Some(memory),
        Err(error) => {
            tracing::warn!(error = %chain(&error), "the memory is written before it is restored");
            None
        }
    }
}

/// Unpacks the small files and has the gate look at them. Returns what it saw; `None` when it needs
/// files that come with the pages.
async fn look_first(
    admitted: &Admitted,
    images: &Path,
    driver: &Driver,
    expected: Option<&Expected>,
) -> Result<Option<Summary>, MaterialiseError> {
    let Admitted { store, checkpoint } = admitted;
    driver.step("gate");
    unpack_images(store, checkpoint, images, &driver.progress).await?;
    match gate::readied(images).await {
        Ok(summary) => {
            judge(&summary, expected)?;
            Ok(Some(summary))
        }
        // A file it needs may be so large that it comes with the pages.
        Err(GateError::Refused(_)) if checkpoint.config.sizes.bulk_bytes > 0 => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Decodes and judges a dump that was there before.
pub(super) async fn inspect(
    images: &Path,
    expected: &Expected,
) -> Result<Summary, MaterialiseError> {
    let summary = gate::inspect(images).await?;
    judge(&summary, Some(expected))?;
    whole(&summary, images, BTreeMap::new()).await?;
    Ok(summary)
}

/// Decodes and judges a dump of which all is there but, maybe, its memory.
async fn look(images: &Path, expected: Option<&Expected>) -> Result<Summary, MaterialiseError> {
    let summary = gate::readied(images).await?;
    judge(&summary, expected)?;
    Ok(summary)
}

/// Makes sure that the memory is all there, in `images` or in `others`, which CRIU reads elsewhere.
async fn whole(
    summary: &Summary,
    images: &Path,
    others: BTreeMap<String, u64>,
) -> Result<(), MaterialiseError> {
    let reasons = gate::lacking(summary, images, others).await?;
    if reasons.is_empty() {
        return Ok(());
    }
    Err(Refusal { by: RefusedBy::Integrity, reasons }.into())
}

pub(super) fn judge(summary: &Summary, expected: Option<&Expected>) -> Result<(), Refusal> {
    let reasons = expected.map(|expected| gate::judge(summary, expected)).unwrap_or_default();
    if reasons.is_empty() { Ok(()) } else { Err(Refusal { by: RefusedBy::Identity, reasons }) }
}
