//! An artifact becomes a dump directory that CRIU can read.
//!
//! Every byte is proven before it is visible under its final name: the small files by their blob's
//! digest, the pages chunk by chunk with the page index, which the manifest covers.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use futures::stream::{self, TryStreamExt as _};
use kybernate_spec::page_index::{PageIndexError, index_bytes_max};
use kybernate_spec::{Descriptor, Digest, Reason};

pub mod deep;
pub mod on_demand;
pub(crate) mod pages;
mod place;
mod plan;
mod tar;

use self::place::Place;
use self::plan::Plan;
pub(crate) use self::tar::{BLOCK_BYTES, TarTarget, padded, tar_header, unpack_to_tar};
use crate::artifact::Checkpoint;
use crate::criu::{NameClass, classify};
use crate::images_pack::{self, ImagesPackError};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::{Store, StoreError};
use crate::wanted;

/// Most bytes of images that are too large for the pack, where they are only looked at: all
/// mappings and open files of thousands of large processes.
const LOOKED_AT_BYTES_MAX: u64 = 1 << 30;

/// What a reader accepts.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of all files of the dump together, holes counted.
    pub dump_bytes_max: u64,
}

impl Default for Limits {
    /// 4 TiB: more memory than the machines of this time have.
    fn default() -> Self {
        Self { dump_bytes_max: 4 << 40 }
    }
}

/// Why an artifact could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// Something could not be read from where it is stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A chunk is not what the page index says. The bytes were changed, there or on the way.
    #[error("chunk {chunk} of shard {shard} does not match its hash in the page index")]
    Chunk {
        /// The shard's digest.
        shard: Digest,
        /// The chunk within the shard, from 0.
        chunk: usize,
    },
    /// The page index breaks a rule.
    #[error(transparent)]
    PageIndex(#[from] PageIndexError),
    /// The pack of small files breaks a rule.
    #[error("failed to read the pack of images")]
    Images(#[source] ImagesPackError),
    /// The parts contradict each other.
    #[error("the checkpoint contradicts itself: {1}")]
    Contradiction(Reason, String),
    /// More than is accepted.
    #[error("the dump has {bytes} bytes, at most {limit} are accepted")]
    TooLarge {
        /// Bytes it has.
        bytes: u64,
        /// Bytes accepted.
        limit: u64,
    },
    /// The page index has more than is moved for a look.
    #[error("the page index has {bytes} bytes, at most {limit} are fetched for a look")]
    IndexTooLarge {
        /// Bytes it has.
        bytes: u64,
        /// Bytes fetched.
        limit: u64,
    },
    /// The directory holds something already.
    #[error("{0:?} exists and is not empty")]
    NotEmpty(PathBuf),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

impl UnpackError {
    /// Whether the content is to blame, and not the way to it: such an artifact is refused.
    pub const fn is_integrity(&self) -> bool {
        use crate::store::StoreErrorKind;
        match self {
            Self::Store(error) => matches!(error.kind, StoreErrorKind::Mismatch(_)),
            Self::Io(..) | Self::NotEmpty(_) | Self::IndexTooLarge { .. } => false,
            Self::Chunk { .. }
            | Self::PageIndex(_)
            | Self::Images(_)
            | Self::Contradiction(..)
            | Self::TooLarge { .. } => true,
        }
    }

    /// Returns the rule that is broken; `None` when reading or writing failed.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Store(error) => error.reason(),
            Self::Chunk { .. } => Some(Reason::ChunkHash),
            Self::PageIndex(error) => error.kind.reason(),
            Self::Images(error) => error.reason(),
            Self::Contradiction(reason, _) => Some(*reason),
            Self::TooLarge { .. } => Some(Reason::TooLarge),
            Self::NotEmpty(_) | Self::Io(..) | Self::IndexTooLarge { .. } => None,
        }
    }
}

/// Unpacks a whole checkpoint into `directory`, which must not exist or be empty. A new directory
/// appears whole or not at all; one that is there gets its files at the end, the one that CRIU reads
/// first as the last. That holds when the process is killed; after a power failure the files may
/// lack their content.
pub async fn unpack(
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    limits: Limits,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let target = directory.to_owned();
    let place = blocking(move || Place::prepare(&target)).await;
    // Dropped, and what is in it removed, on every way out but the last.
    let place = place.map_err(|error| match error.kind() {
        io::ErrorKind::DirectoryNotEmpty => UnpackError::NotEmpty(directory.to_owned()),
        _ => UnpackError::Io("make the directory", error),
    })?;
    let fill = async {
        unpack_images(store, checkpoint, place.staging(), progress).await?;
        unpack_pages(store, checkpoint, place.staging(), limits, progress).await
    };
    wanted::keeping(place.kept(), Box::pin(fill)).await?;
    blocking(move || place.publish())
        .await
        .map_err(|error| UnpackError::Io("move the dump into place", error))
}

/// Unpacks the small files into an existing directory: everything the identity gate decodes.
pub async fn unpack_images(
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &Progress,
) -> Result<(), UnpackError> {
    unpack_images_where(|_| true, store, checkpoint, directory, progress).await
}

async fn unpack_images_where(
    keep: fn(&str) -> bool,
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &Progress,
) -> Result<(), UnpackError> {
    progress.expect(checkpoint.images.size);
    let directory = directory.to_owned();
    read_images(
        store,
        checkpoint,
        progress,
        (keep, directory),
        |(keep, directory), name, content| {
            if !keep(name) {
                return Ok(());
            }
            let mut file = create(&directory.join(name))?;
            io::Write::write_all(&mut file, content)
        },
    )
    .await?;
    Ok(())
}

/// Reads the pack to its end and hands each file to `each`, which keeps what it needs in `state`.
async fn read_images<T: Send + 'static>(
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
    mut state: T,
    each: fn(&mut T, &str, &[u8]) -> io::Result<()>,
) -> Result<T, UnpackError> {
    let stream = store.blob(&checkpoint.images).await?;
    let read = wanted::spawn(move |wanted| {
        let read = images_pack::read(wanted.stream(stream), |name, content| {
            each(&mut state, name, content)
        });
        read.map(|bytes| (state, bytes))
    });
    let read = read.end().await.map_err(|error| UnpackError::Io("unpack", error))?;
    let (state, image_bytes) = read.map_err(images_error)?;
    let sizes = &checkpoint.config.sizes;
    if image_bytes.checked_add(sizes.bulk_bytes) != Some(sizes.dump_bytes) {
        let text = "the files of its pack and its bulk files do not add up to its dump";
        return Err(UnpackError::Contradiction(Reason::Sizes, text.to_owned()));
    }
    progress.advance(checkpoint.images.size);
    progress.transfer(checkpoint.images.size);
    Ok(state)
}

/// Unpacks only the images that say which memory is where, however large they are.
pub(crate) async fn unpack_memory_images(
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let keep = |name: &str| {
        name.starts_with("pagemap-")
            || name.starts_with("mm-")
            || matches!(name, "files.img" | "memfd.img")
    };
    unpack_images_where(keep, store, checkpoint, directory, progress).await?;
    unpack_pages_where(keep, store, checkpoint, directory, Limits::default(), progress).await
}

/// Unpacks everything but the pages, and returns the page index, found right. For those who look
/// and do not restore: more than [`LOOKED_AT_BYTES_MAX`] is refused.
pub(crate) async fn unpack_for_a_look(
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &Progress,
) -> Result<Arc<File>, UnpackError> {
    // Before it is moved: it goes to a temporary file, which many machines have in memory.
    let (bytes, limit) = (checkpoint.page_index.size, LOOKED_AT_BYTES_MAX);
    if bytes > limit {
        return Err(UnpackError::IndexTooLarge { bytes, limit });
    }
    unpack_images_where(|_| true, store, checkpoint, directory, progress).await?;
    let keep = |name: &str| !matches!(classify(name), NameClass::Pages | NameClass::Device);
    let plan = plan(keep, store, checkpoint, directory, Limits::default(), progress).await?;
    let bytes = plan.wanted_bytes();
    if bytes > LOOKED_AT_BYTES_MAX {
        return Err(UnpackError::TooLarge { bytes, limit: LOOKED_AT_BYTES_MAX });
    }
    let index = plan.index();
    fetch(plan, store, checkpoint, directory, progress).await?;
    Ok(index)
}

/// Unpacks the bulk files into an existing directory.
pub async fn unpack_pages(
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    limits: Limits,
    progress: &Progress,
) -> Result<(), UnpackError> {
    progress.expect(checkpoint.shards.iter().map(|shard| shard.size).sum());
    unpack_pages_where(|_| true, store, checkpoint, directory, limits, progress).await
}

async fn unpack_pages_where(
    keep: fn(&str) -> bool,
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    limits: Limits,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let plan = plan(keep, store, checkpoint, directory, limits, progress).await?;
    fetch(plan, store, checkpoint, directory, progress).await
}

/// Fetches the page index and plans what of the bulk files is to be fetched.
async fn plan(
    keep: fn(&str) -> bool,
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    limits: Limits,
    progress: &Progress,
) -> Result<Arc<Plan>, UnpackError> {
    let sizes = &checkpoint.config.sizes;
    if sizes.bulk_bytes > limits.dump_bytes_max {
        let (bytes, limit) = (sizes.bulk_bytes, limits.dump_bytes_max);
        return Err(UnpackError::TooLarge { bytes, limit });
    }
    if checkpoint.page_index.size > index_bytes_max(sizes.bulk_bytes) {
        let text = "its page index is larger than its files allow";
        return Err(UnpackError::Contradiction(Reason::IndexTooLarge, text.to_owned()));
    }
    let index = download(store, &checkpoint.page_index, directory).await?;
    progress.transfer(checkpoint.page_index.size);
    let plan = {
        let checkpoint = checkpoint.clone();
        wanted::spawn(move |wanted| Plan::read(index, &checkpoint, keep, wanted))
    };
    let plan = plan.end().await.map_err(|error| UnpackError::Io("unpack", error))??;
    Ok(Arc::new(plan))
}

/// Fetches what is planned.
async fn fetch(
    plan: Arc<Plan>,
    store: &Store,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let target = directory.to_owned();
    let files = plan.files.clone();
    let files =
        blocking(move || pages::create_files(&target, &files)).await.map_err(
            |error| match error.kind() {
                // The directory was empty before: the pack of images has a file of this name.
                io::ErrorKind::AlreadyExists => contradiction(),
                _ => UnpackError::Io("create the dump's files", error),
            },
        )?;
    fetch_into(&plan, &files, store, checkpoint, progress).await
}

/// Fetches what is planned into files that were made for it.
async fn fetch_into(
    plan: &Arc<Plan>,
    files: &Arc<[Option<pages::OutputFile>]>,
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let parallel = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
    let shards = (0..).zip(&checkpoint.shards);
    stream::iter(shards.map(Ok::<_, UnpackError>))
        .try_for_each_concurrent(parallel, |(number, shard)| {
            pages::fetch_shard(store, shard, number, plan, files, progress)
        })
        .await
}

/// The pack and the page index name one file.
fn contradiction() -> UnpackError {
    let text = "the pack of images and the page index have a file of one name";
    UnpackError::Contradiction(Reason::FileTwice, text.to_owned())
}

/// Creates a file that only we can read, and that was not there.
fn create(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// Reads a blob into a file without a name beside the dump's files.
async fn download(store: &Store, blob: &Descriptor, directory: &Path) -> Result<File, UnpackError> {
    let stream = store.blob(blob).await?;
    // Beside the directory, not in it: CRIU's directory holds CRIU's files only.
    let parent = directory.parent().unwrap_or(directory).to_owned();
    let copied = wanted::blocking(move |wanted| {
        let mut file = tempfile::tempfile_in(parent)?;
        io::copy(&mut wanted.stream(stream), &mut file)?;
        Ok(file)
    });
    copied.await.map_err(|error| match as_store_error(error) {
        Ok(error) => UnpackError::Store(error),
        Err(error) => UnpackError::Io("store the page index", error),
    })
}

fn images_error(error: ImagesPackError) -> UnpackError {
    match error {
        ImagesPackError::Io(error) => match as_store_error(error) {
            Ok(error) => UnpackError::Store(error),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                UnpackError::Images(error.into())
            }
            Err(error) => UnpackError::Io("unpack the images", error),
        },
        other => UnpackError::Images(other),
    }
}

/// Gets a store's error back out of the stream it ended.
fn as_store_error(error: io::Error) -> Result<StoreError, io::Error> {
    error.downcast::<StoreError>()
}
