//! Content on disk: blobs by digest, and records that say which repository may show them.
//!
//! Every function here blocks and belongs on the blocking pool, except [`BlobReader`], which knows
//! when it would block. Nothing is written in place: a file is written under a temporary name,
//! synced, renamed, and its directory synced, before the function returns. The directories are the
//! lists; [`crate::index`] knows them too, and may be deleted at any time.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName, Tag, chain};

use self::buffer::BufferPool;
use self::durable::Directories;
use self::house::House;
use self::indexed::Seal;
use self::layout::Layout;
use self::open::Lock;
use self::record::Record;
use crate::config::Tags;
use crate::index::Index;
use crate::metrics::StoreMetrics;
use crate::quota::Quotas;

mod blob;
mod buffer;
mod census;
mod checksum;
mod clean;
mod commit;
mod condemned;
mod durable;
mod glance;
mod house;
mod indexed;
mod layout;
mod listing;
mod manifest;
mod notes;
mod open;
mod parts;
mod pins;
mod prove;
mod reader;
mod record;
mod referrer;
mod retained;
mod scan;
mod seen;
mod sink;
mod tag;
mod upload_file;
mod vouch;

pub use self::listing::{Page, Window};
pub use self::manifest::{NewManifest, StoredManifest};
pub use self::open::OpenError;
pub use self::reader::{BlobReader, ReadError};
pub use self::scan::ScanError;
pub use self::upload_file::{UploadId, UploadIdError};

pub(crate) use self::blob::OpenBlob;
pub(crate) use self::buffer::Buffer;
pub(crate) use self::checksum::{CHUNK_BYTES, CHUNK_LENGTH, ChunkSums, SumRun, sum as line_sum};
pub(crate) use self::commit::Commit;
pub(crate) use self::condemned::Condemned;
pub(crate) use self::glance::glance;
pub(crate) use self::house::Barrier;
pub(crate) use self::layout::file_name;
pub(crate) use self::open::looks;
pub(crate) use self::prove::Proof;
pub(crate) use self::sink::Sink;
pub(crate) use self::upload_file::UploadFile;

/// Locks for names and digests; two names that share one merely wait for each other.
const STRIPES: usize = 64;

/// A registry's content in a directory, locked for as long as the value lives.
#[derive(Debug)]
pub struct Store {
    layout: Layout,
    directories: Directories,
    pool: Arc<BufferPool>,
    metrics: StoreMetrics,
    temporary: AtomicU64,
    /// Held while content is put in place or moved away, so that healing never meets moving.
    shelves: [Mutex<()>; STRIPES],
    /// Read by whoever writes a repository's manifests and tags, written by whoever deletes.
    repositories: [RwLock<()>; STRIPES],
    /// What garbage collection has to know.
    house: House,
    /// Held while a link is made or removed and the index is told of it.
    links: [Mutex<()>; STRIPES],
    index: Index,
    seal: Option<Seal>,
    rules: Rules,
    /// Held while a manifest is put under immutable tags.
    settling: [Mutex<()>; STRIPES],
    /// How often that was done.
    settled: AtomicU64,
    seal_broken: AtomicBool,
    /// Whether the process before may have ended before it could sync.
    was_killed: bool,
    lock: Lock,
}

/// What may be stored, beside what the specification says.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    /// Tags that do not move.
    pub(crate) tags: Tags,
    /// How much repositories may hold.
    pub(crate) quotas: Quotas,
}

/// Why the store could not do something.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation}")]
pub struct StoreError {
    /// What it was doing.
    pub operation: &'static str,
    /// What happened.
    #[source]
    pub kind: StoreErrorKind,
}

/// What happened to a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreErrorKind {
    /// The device is full or the quota used up. Retrying helps once there is room.
    #[error("no space left")]
    NoSpace,
    /// The repository would hold more than it may. Retrying helps once something is deleted.
    #[error("the repository holds {used} bytes of the {limit} it may")]
    Quota {
        /// What it may hold.
        limit: u64,
        /// What it holds.
        used: u64,
    },
    /// The tag stays where it is.
    #[error("the tag {tag} is immutable and names {digest}")]
    Immutable {
        /// The tag.
        tag: Tag,
        /// What it names.
        digest: Digest,
    },
    /// The manifest is here as something else, and stays that.
    #[error("the manifest is here as {there:?} and was pushed as {pushed:?}")]
    MediaType {
        /// The media type it was pushed with first.
        there: String,
        /// The one it is pushed with now.
        pushed: String,
    },
    /// Storage failed otherwise.
    #[error("storage input or output failed")]
    Io(#[source] io::Error),
}

impl StoreError {
    /// Says what was being done when `error` came.
    pub(crate) fn during(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| {
            let kind = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    StoreErrorKind::NoSpace
                }
                _ => StoreErrorKind::Io(error),
            };
            Self { operation, kind }
        }
    }
}

impl StoreError {
    /// Whether a glance did not suffice.
    pub(crate) fn would_block(&self) -> bool {
        matches!(&self.kind, StoreErrorKind::Io(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Store {
    fn new(layout: Layout, lock: Lock, house: House, seal: Option<Seal>) -> Self {
        let metrics = StoreMetrics::default();
        Self {
            layout,
            directories: Directories::new(metrics.sync.clone()),
            pool: Arc::default(),
            metrics,
            temporary: AtomicU64::new(0),
            shelves: std::array::from_fn(|_| Mutex::new(())),
            repositories: std::array::from_fn(|_| RwLock::new(())),
            house,
            links: std::array::from_fn(|_| Mutex::new(())),
            index: Index::new(seal.is_some()),
            // Whoever ends in an orderly way leaves a seal, and has synced all by then.
            was_killed: seal.is_none(),
            seal,
            rules: Rules::default(),
            settling: std::array::from_fn(|_| Mutex::new(())),
            settled: AtomicU64::new(0),
            seal_broken: AtomicBool::new(false),
            lock,
        }
    }

    /// Returns the directory that holds everything.
    pub fn root(&self) -> &Path {
        self.layout.root()
    }

    /// Returns the directory that every start empties.
    pub(crate) fn temporary(&self) -> PathBuf {
        self.layout.temporary()
    }

    /// Returns the directory of events that are to be told.
    pub(crate) fn notices(&self) -> PathBuf {
        self.layout.notices()
    }

    /// Returns what is counted here.
    pub fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    /// Looks whether the directory that was opened can be reached: it may be on a device that has
    /// gone, and something else in its place. What is not found then may be there all the same.
    pub(crate) fn probe(&self) -> Result<(), StoreError> {
        let look = || -> io::Result<()> {
            let there = glance::metadata(self.layout.root())?;
            if !self.lock.is_of(&there)? {
                return Err(io::Error::other("another directory is in its place"));
            }
            glance::metadata(&self.layout.version_file()).map(drop)
        };
        look().map_err(StoreError::during("reach the store"))
    }

    /// Says what may be stored from now on.
    pub(crate) fn govern(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Returns an empty buffer; [`CHUNK_BYTES`] of capacity come from a pool.
    pub(crate) fn buffer(&self, capacity: usize) -> Buffer {
        self.pool.take(capacity)
    }

    /// Writes a file whole or not at all. Its entry is durable once its directory is synced.
    fn place(&self, bytes: &[u8], path: &Path) -> io::Result<()> {
        self.place_with(path, |file| file.write_all_at(bytes, 0))
    }

    fn place_with(
        &self,
        path: &Path,
        write: impl FnOnce(&std::fs::File) -> io::Result<()>,
    ) -> io::Result<()> {
        let number = self.temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = self.layout.temporary().join(number.to_string());
        let placed = write_synced(&temporary, write).and_then(|()| fs::rename(&temporary, path));
        if placed.is_err() {
            remove_quietly(&temporary);
        }
        placed
    }

    /// Writes a record whole or not at all; durable once its directory is synced.
    fn place_record<R: Record>(&self, record: &R, path: &Path) -> io::Result<()> {
        let bytes = record::encode(record).map_err(io::Error::other)?;
        self.place(&bytes, path)
    }

    fn shelf_lock(&self, digest: &Digest) -> &Mutex<()> {
        pick(&self.shelves, digest.hex().as_bytes())
    }

    fn link_lock(&self, repository: &RepositoryName, digest: &Digest) -> &Mutex<()> {
        pick(&self.links, format!("{repository} {digest}").as_bytes())
    }

    pub(crate) fn repository_lock(&self, name: &RepositoryName) -> &RwLock<()> {
        pick(&self.repositories, name.as_str().as_bytes())
    }
}

fn write_synced(
    path: &Path,
    write: impl FnOnce(&std::fs::File) -> io::Result<()>,
) -> io::Result<()> {
    let file = fs::File::create_new(path)?;
    write(file.file())?;
    file.sync_data()
}

/// Reads a record. One that is damaged is told and absent.
fn read_record<R: Record>(path: &Path) -> io::Result<Option<R>> {
    let Some(bytes) = absent(glance::read(path))? else { return Ok(None) };
    match record::decode(&bytes) {
        Ok(record) => Ok(Some(record)),
        Err(error) => {
            tracing::error!(?path, error = %chain(&error), "a record is damaged and counts as absent");
            Ok(None)
        }
    }
}

/// Removes what is of no use any more. What stays is removed by the next start or clean-up.
fn remove_quietly(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, "a temporary file stays behind");
    }
}

/// Opens a file that may be missing.
fn open_if_there(path: &Path) -> io::Result<Option<fs::File>> {
    absent(glance::open(path))
}

/// Whether a file is there. That it cannot be told is an error: what could not be looked at is not
/// what is not there.
fn is_there(path: &Path) -> io::Result<bool> {
    Ok(absent(fs::metadata(path))?.is_some())
}

/// Turns "no such file" into nothing, also when a directory above is missing or is a file.
fn absent<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn pick<'a, T>(stripes: &'a [T; STRIPES], key: &[u8]) -> &'a T {
    let sum = checksum::sum(key) % 64;
    let [first, ..] = stripes;
    usize::try_from(sum).ok().and_then(|at| stripes.get(at)).unwrap_or(first)
}
