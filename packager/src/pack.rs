//! A dump directory becomes an artifact.
//!
//! Nothing is named by a tag here: what a failed pack leaves behind are blobs that nothing refers
//! to. The caller signs the index and tags it last. Until then it can be found only as a referrer of
//! its source image, and on the list of a layout.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use kybernate_spec::checkpoint::{CheckpointConfig, FORMAT_VERSION, Lineage, Sizes};
use kybernate_spec::page_index::{ChunkHash, SHARD_BYTES_MAX};
use kybernate_spec::{
    Annotations, Descriptor, Index, MANIFEST_BYTES_MAX, Manifest, Platform, annotation, media_type,
};

pub(crate) mod base;
mod check;
mod dump;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod local;
mod memory_keys;
pub(crate) mod pagemap;
mod pages;
mod parents;
mod pieces;
mod place;
mod runnable;
mod seen;
mod shards;
pub(crate) mod upload;
mod volumes;

pub use self::base::Base;
use self::base::OpenBase;
use self::dump::{Dump, Listing};
pub use self::dump::{DumpError, DumpErrorKind};
use self::pages::{Pages, Pushed};
pub use self::pieces::{Pieces, PiecesReader};
pub use self::runnable::SourceImage;
use self::upload::{BytesSource, FileSource, HashingWriter, Target, blocking};
use crate::artifact::{self, ArtifactError};
use crate::images_pack;
use crate::leftovers::Scratch;
use crate::progress::Progress;
use crate::store::{Store, StoreError};
use crate::unpack::UnpackError;
use crate::wanted;

/// Dumps below this size are cut into smaller shards, so that more than one is in flight.
const SMALL_DUMP_BYTES: u64 = 4 << 30;
const SMALL_SHARD_BYTES: u64 = 64 << 20;

/// What hashes chunks.
const CHUNK_HASH: ChunkHash = ChunkHash::Blake3;

/// After this many increments everything is stored anew.
const GENERATIONS_MAX: u32 = 8;

/// How often a base is tried of which shards turn out to be lost: once while pages are compared, once
/// while what is left is copied.
const BASE_ATTEMPTS: usize = 3;

/// What to pack.
#[derive(Clone, Debug)]
pub struct PackRequest {
    /// The directory CRIU wrote.
    pub dump: PathBuf,
    /// The facts. Sizes are filled in.
    pub config: CheckpointConfig,
    /// The container image the process was started from.
    pub image: Option<SourceImage>,
    /// What the container wrote to its root file system: an uncompressed tar with whiteouts.
    pub rootfs_diff: Option<Pieces>,
    /// Captured mounts.
    pub volumes: Vec<VolumeCapture>,
    /// Whether the runnable image is part of the artifact.
    pub runnable: Runnable,
    /// Whether the index names the source image as its subject, where that can be.
    pub subject: bool,
    /// An earlier checkpoint of the same container: pages it has are not stored again.
    pub base: Option<Base>,
    /// Whether a hash of each page is stored too, so that a later checkpoint can be compared with
    /// this one without having it.
    pub page_hashes: bool,
    /// Whether what the dump has is sent also where the store says that it is there. Whatever it has
    /// of that may be damaged unnoticed, and a registry of ours takes what is sent in its place.
    pub resend: bool,
    /// A directory for temporary files; the system's when absent.
    pub scratch: Option<PathBuf>,
}

/// The content of one mount.
#[derive(Clone, Debug)]
pub struct VolumeCapture {
    /// Where it was mounted in the container.
    pub destination: String,
    /// An uncompressed tar of its content.
    pub tar: PathBuf,
}

/// Whether the runnable image is part of an artifact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Runnable {
    /// When the source image's layers can be had.
    #[default]
    Auto,
    /// It must be; packing fails without the layers.
    Always,
    /// It is not.
    Never,
}

/// What was packed.
#[derive(Clone, Debug)]
pub struct Packed {
    /// The checkpoint index: its digest is the checkpoint's.
    pub index: Descriptor,
    /// What is inside.
    pub sizes: Sizes,
    /// Whether the runnable image is part of it.
    pub runnable: bool,
    /// Where it stands among the increments it belongs to.
    pub lineage: Lineage,
    /// Bytes of pages that no earlier checkpoint has.
    pub added_bytes: u64,
}

/// Why a dump could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The directory is no dump, or not whole.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// Something could not be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] std::io::Error),
    /// The source image is none we can build upon.
    #[error("failed to build the runnable image: {0}")]
    Image(String),
    /// A document does not become JSON, or is larger than registries accept.
    #[error("the {0} has more than 4 MiB: the dump has too many shards or mounts")]
    DocumentTooLarge(&'static str),
    /// A fact that should be a time is none.
    #[error("{0:?} among the facts is no time: RFC 3339 is wanted, as 2026-11-21T14:00:00Z")]
    Time(String, #[source] jiff::Error),
    /// It would be written into the dump, or be read from there.
    #[error(
        "{what} {place:?} lies inside the dump, which is packed as a whole: name a place outside"
    )]
    InDump {
        /// What it is for.
        what: &'static str,
        /// The directory.
        place: PathBuf,
    },
    /// What would become of it breaks a rule of the format.
    #[error("no reader would take what would become of it")]
    Unreadable(#[source] Box<ArtifactError>),
    /// The base says nothing of its pages, and they are not on this machine.
    #[error(
        "the base has no page hashes and is not on this machine: pack it with page hashes, or copy it here"
    )]
    NoPageHashes,
    /// The base cannot be read.
    #[error("failed to read the base")]
    Base(#[source] Box<UnpackError>),
    /// What should be a tar is none.
    #[error("{path:?} is no uncompressed tar")]
    Tar {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: std::io::Error,
    },
    /// Packing was cut short.
    #[error("packing stopped before its end")]
    Interrupted,
}

/// Packs a dump into `store` and returns what the index is. Safe to repeat: what is there already
/// is not sent again, unless the request says so.
pub fn pack<'a>(
    request: PackRequest,
    store: &'a Store,
    progress: &'a Progress,
) -> BoxFuture<'a, Result<Packed, PackError>> {
    let target = Target { store, progress, resend: request.resend };
    // Large, and held by callers that hold much else.
    Box::pin(pack_all(request, target))
}

async fn pack_all(request: PackRequest, target: Target<'_>) -> Result<Packed, PackError> {
    target.progress.step("pack");
    let (directory, places) = (request.dump.clone(), place::places(&request, target.store));
    run(move || place::check(&directory, &places)).await?;
    let tars = request.volumes.iter().map(|volume| volume.tar.clone().into());
    for tar in tars.chain(request.rootfs_diff.clone()) {
        volumes::check_tar(tar).await?;
    }
    let scratch = scratch(request.scratch.clone()).await?;
    wanted::keeping(scratch.clone(), Box::pin(pack_in(request, scratch.path(), target))).await
}

/// Packs with a directory for what is made on the way.
async fn pack_in(
    request: PackRequest,
    scratch: &Path,
    target: Target<'_>,
) -> Result<Packed, PackError> {
    let (directory, place) = (request.dump.clone(), scratch.to_owned());
    let (dump, shard_bytes) = run(move || {
        let listing = Listing::of(&directory, &place)?;
        let is_small = listing.bulk_bytes() < SMALL_DUMP_BYTES;
        let shard_bytes = if is_small { SMALL_SHARD_BYTES } else { SHARD_BYTES_MAX };
        Ok::<_, PackError>((Dump::scan(listing, shard_bytes)?, shard_bytes))
    })
    .await?;
    check::check(&request, &dump)?;
    let dump = Arc::new(dump);
    target.progress.expect(dump.bytes());

    let base = match &request.base {
        Some(base) => Some(OpenBase::open(base, scratch, target.progress).await?),
        None => None,
    };
    let pages = Pages { dump: &dump, shard_bytes, hashes: request.page_hashes, scratch };
    let stored = async {
        let pages = push_pages(&pages, base, target).await?;
        Ok::<_, PackError>((pages, push_images(&dump, scratch, target).await?))
    };
    let stored = stored.await;
    // That is the cause, when something else failed.
    let looked_at = Arc::clone(&dump);
    run(move || Ok(looked_at.check_unchanged()?)).await?;
    let ((pushed, lineage), images) = stored?;
    let sizes = Sizes {
        processes: dump.processes,
        threads: dump.threads,
        dump_bytes: dump.bytes(),
        bulk_bytes: dump.bulk_bytes(),
        page_bytes: pushed.live_bytes,
    };
    let mut layers = vec![pushed.index, images];
    layers.extend((0..).zip(pushed.shards).map(|(number, shard): (u32, _)| {
        let kind = if shard.media_type == media_type::DEVICE { "device" } else { "pages" };
        shard.with_annotation(annotation::TITLE, format!("{kind}-{number:05}"))
    }));
    layers.extend(pushed.hashes);
    layers.extend(volumes::push(&request.volumes, target).await?);

    let config = CheckpointConfig {
        version: FORMAT_VERSION.to_owned(),
        sizes: sizes.clone(),
        lineage: lineage.clone(),
        ..request.config.clone()
    };
    let checkpoint = push_checkpoint(&config, layers, target).await?;
    let image = runnable::push(&request, scratch, target).await?;
    let runnable = image.is_some();
    let index = push_index(&request, image, checkpoint, target.store).await?;
    Ok(Packed { index, sizes, runnable, lineage, added_bytes: pushed.added_bytes })
}

/// Stores what the base does not have, or everything when little of the base is still in use, or
/// when there have been many increments.
async fn push_pages(
    pages: &Pages<'_>,
    base: Option<OpenBase>,
    target: Target<'_>,
) -> Result<(Pushed, Lineage), PackError> {
    let Some(base) = base.map(Arc::new) else {
        return Ok((push_anew(pages, target).await?, Lineage::default()));
    };
    let generation = base.generation.saturating_add(1);
    let mut lineage = Lineage { generation, base: Some(base.digest.clone()) };
    let attempts = if generation <= GENERATIONS_MAX { BASE_ATTEMPTS } else { 0 };
    for _ in 0..attempts {
        let pushed = pages.push(Some(Arc::clone(&base)), target).await?;
        // Some of the base is lost: once more, without it.
        let Some(pushed) = pushed else { continue };
        let listed: u64 = pushed.shards.iter().map(|shard| shard.size).sum();
        if pushed.live_bytes.saturating_mul(2) >= listed {
            return Ok((pushed, lineage));
        }
        tracing::info!(live = pushed.live_bytes, listed, "less than half is live: packing in full");
        break;
    }
    lineage.generation = 0;
    Ok((push_anew(pages, target).await?, lineage))
}

/// Stores everything.
async fn push_anew(pages: &Pages<'_>, target: Target<'_>) -> Result<Pushed, PackError> {
    // Without a base none of it can be lost.
    pages.push(None, target).await?.ok_or(PackError::Interrupted)
}

/// Packs and pushes the small files.
async fn push_images(
    dump: &Arc<Dump>,
    scratch: &Path,
    target: Target<'_>,
) -> Result<Descriptor, PackError> {
    let path = scratch.join("images");
    let written = {
        let (dump, path) = (Arc::clone(dump), path.clone());
        wanted::blocking(move |wanted| {
            let file = std::io::BufWriter::new(fs_err::File::create(&path)?);
            let mut out = HashingWriter::new(file);
            let files = u32::try_from(dump.small.len()).map_err(std::io::Error::other)?;
            images_pack::write_header(&mut out, files)?;
            for (name, _) in &dump.small {
                wanted.check()?;
                let content = fs_err::read(dump.path(name))?;
                images_pack::write_file(&mut out, name, &content)?;
            }
            out.flush()?;
            Ok(out.describe(media_type::IMAGES_PACK))
        })
    };
    let images = written.await.map_err(|kind| PackError::Io("pack the dump's images", kind))?;
    target.store(&images, &FileSource { path, offset: 0 }).await?;
    Ok(images.with_annotation(annotation::TITLE, "images"))
}

async fn push_checkpoint(
    config: &CheckpointConfig,
    layers: Vec<Descriptor>,
    target: Target<'_>,
) -> Result<Descriptor, PackError> {
    let unreadable = |error| PackError::Unreadable(Box::new(error));
    let content = to_json("config", config)?;
    artifact::check_config(&content).map_err(unreadable)?;
    let descriptor = Descriptor::of(media_type::CHECKPOINT_CONFIG, &content);
    target.store(&descriptor, &BytesSource(content)).await?;
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        config: descriptor,
        layers,
        subject: None,
        annotations: Annotations::from([(
            annotation::FORMAT_VERSION.to_owned(),
            FORMAT_VERSION.to_owned(),
        )]),
    };
    let content = to_json("checkpoint manifest", &manifest)?;
    artifact::check_manifest(&content, config.device.storage).map_err(unreadable)?;
    let mut descriptor = Descriptor::of(media_type::OCI_MANIFEST, &content);
    target.store.put_manifest(&descriptor, content).await?;
    descriptor.artifact_type = Some(media_type::CHECKPOINT.to_owned());
    descriptor.platform = Some(Platform {
        architecture: "unknown".to_owned(),
        os: "unknown".to_owned(),
        os_version: None,
        os_features: Vec::new(),
        variant: None,
    });
    Ok(descriptor.with_annotation(annotation::ROLE, "checkpoint"))
}

async fn push_index(
    request: &PackRequest,
    image: Option<runnable::Pushed>,
    checkpoint: Descriptor,
    store: &Store,
) -> Result<Descriptor, PackError> {
    let source = &request.config.source;
    let facts = [
        (annotation::FORMAT_VERSION, Some(FORMAT_VERSION)),
        (annotation::CREATED, request.config.created.as_deref()),
        (annotation::CONTAINER, source.container.as_deref()),
        (annotation::NAMESPACE, source.namespace.as_deref()),
        (annotation::BASE_NAME, source.image.as_deref()),
    ];
    let mut annotations: Annotations = facts
        .into_iter()
        .filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())))
        .collect();
    if let Some(digest) = &source.image_digest {
        annotations.insert(annotation::BASE_DIGEST.to_owned(), digest.to_string());
    }
    let (runnable, subject) = match image {
        Some(image) => (Some(image.runnable), image.source.filter(|_| request.subject)),
        None => (None, None),
    };
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        manifests: runnable.into_iter().chain([checkpoint]).collect(),
        subject,
        annotations,
    };
    let content = to_json("index", &index)?;
    let mut descriptor = Descriptor::of(media_type::OCI_INDEX, &content);
    store.put_manifest(&descriptor, content).await?;
    descriptor.artifact_type = Some(media_type::CHECKPOINT.to_owned());
    Ok(descriptor)
}

fn to_json(what: &'static str, document: &impl serde::Serialize) -> Result<Bytes, PackError> {
    let content = serde_json::to_vec(document)
        .map_err(|error| PackError::Io("write JSON", std::io::Error::other(error)))?;
    if u64::try_from(content.len()).is_ok_and(|length| length <= MANIFEST_BYTES_MAX) {
        Ok(content.into())
    } else {
        Err(PackError::DocumentTooLarge(what))
    }
}

async fn scratch(directory: Option<PathBuf>) -> Result<Scratch, PackError> {
    let directory = directory.unwrap_or_else(std::env::temp_dir);
    // It may have gigabytes to remove that a killed run has left.
    blocking(move || Scratch::begin(&directory, "kybernate-pack-"))
        .await
        .map_err(|kind| PackError::Io("make a directory for temporary files", kind))
}

async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PackError> + Send + 'static,
) -> Result<T, PackError> {
    wanted::spawn(|_| work()).end().await.map_err(|_cancelled| PackError::Interrupted)?
}

#[cfg(test)]
mod tests;
