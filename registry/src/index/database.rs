//! sled, held at arm's length: whatever it does, error or panic, comes out as an [`IndexError`].

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read as _};
use std::ops::Bound;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crc_fast::CrcAlgorithm;
use fs_err as fs;
use kybernate_spec::{Descriptor, Digest, RepositoryName};

use super::ReferrersWanted;
use super::change::{self, Change, List};
use crate::store::{Page, Window};

/// Changes after which the database is synced, so that it can let go of them: ~100 bytes each.
pub(super) const SYNC_AFTER: u64 = 4_096;
/// What sled keeps of the lists in memory, beside what is not yet synced. Its own default is
/// 512 MiB.
const CACHE_BYTES: usize = 2 << 20;
/// Entries in one of sled's leaves: small ones cost less to change, large ones less to keep.
const LEAF_ENTRIES: usize = 128;
/// How often sled's own thread flushes: it would end the process when the disk is full. With none
/// of its own, each list that has been read would be flushed when its iterator is dropped, and wait
/// for ever after a flush that failed.
const NEVER_MS: usize = usize::MAX;
/// What must be free before a database is made.
const ROOM_BYTES: u64 = 16 << 20;
/// How long a call may take. sled can spin for ever on a list it finds inconsistent.
const CALL_MAX: Duration = Duration::from_mins(1);

type Tree = sled::Tree<LEAF_ENTRIES>;

/// Why the index could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// There is no room for it.
    #[error("less than {} MiB are free for the index database", ROOM_BYTES >> 20)]
    NoRoom,
    /// Input or output failed.
    #[error("the index database failed")]
    Io(#[source] io::Error),
    /// sled found itself in a state it did not think possible.
    #[error("the index database panicked")]
    Panicked,
    /// An entry cannot be read.
    #[error("the index holds an entry that is none")]
    Malformed,
    /// The directory is not there any more.
    #[error("the index's directory is gone or another one")]
    Gone,
    /// A call does not come back.
    #[error("the index database does not answer")]
    Stuck,
    /// It was lost so often that none is made any more.
    #[error("the index was lost too often; find out why, and start the server again")]
    Hopeless,
    /// The objects may have changed since it was closed.
    #[error("the index does not carry the seal it was closed with")]
    Unsealed,
}

/// An open database.
#[derive(Debug)]
pub(crate) struct Database {
    path: PathBuf,
    name: String,
    identity: (u64, u64),
    // Changes of two lists at once; a std mutex, since sled does not wait for the disk in between.
    sums: Mutex<()>,
    sound: AtomicBool,
    // Held for a sync. Never cloned: each clone that is dropped would sync.
    whole: Mutex<Option<sled::Db<LEAF_ENTRIES>>>,
    // Held for a push or pop only.
    handles: Mutex<Handles>,
}

#[derive(Debug)]
struct Handles {
    /// Those nobody uses, and always one to make more of.
    free: Vec<Lists>,
    busy: HashMap<u64, Instant>,
    calls: u64,
}

/// Handles to the lists. sled wants one per thread at a time.
#[derive(Clone)]
struct Lists {
    repositories: Tree,
    tags: Tree,
    referrers: Tree,
    links: Tree,
}

impl fmt::Debug for Lists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // sled's own would print every entry.
        f.write_str("Lists")
    }
}

impl Database {
    /// Makes an empty database called `name` in `dir`, whose parent must be there. Blocks.
    pub(crate) fn create(dir: &Path, name: &str) -> Result<Self, IndexError> {
        match fs::create_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
            _ => {}
        }
        // A database that fails later keeps its memory and its descriptors for ever.
        let room = rustix::fs::statvfs(dir).map_err(|error| IndexError::Io(error.into()))?;
        if room.f_bavail.saturating_mul(room.f_frsize) < ROOM_BYTES {
            return Err(IndexError::NoRoom);
        }
        Self::open(dir, name)
    }

    /// Opens the database called `name` when its files are those of which [`Self::close`] returned
    /// `seal`: sled is never shown others, since it may panic on them or spin for ever. Blocks.
    pub(crate) fn unseal(dir: &Path, name: &str, seal: &str) -> Result<Self, IndexError> {
        let path = dir.join(name);
        if !path.is_dir() {
            return Err(IndexError::Gone);
        }
        if fingerprint(&path)? == seal { Self::open(dir, name) } else { Err(IndexError::Unsealed) }
    }

    fn open(dir: &Path, name: &str) -> Result<Self, IndexError> {
        contain_rayon();
        let path = dir.join(name);
        let opened = guarded(|| {
            let config = sled::Config::new()
                .path(&path)
                .cache_capacity_bytes(CACHE_BYTES)
                .flush_every_ms(Some(NEVER_MS))
                .zstd_compression_level(1);
            let whole: sled::Db<LEAF_ENTRIES> = config.open()?;
            let tree = |name: &str| whole.open_tree(name);
            let lists = Lists {
                repositories: tree("repositories")?,
                tags: tree("tags")?,
                referrers: tree("referrers")?,
                links: tree("links")?,
            };
            Ok((whole, lists))
        });
        let (whole, lists) = opened?;
        Ok(Self {
            identity: identity(&path)?,
            path,
            name: name.to_owned(),
            sums: Mutex::default(),
            sound: AtomicBool::new(true),
            whole: Mutex::new(Some(whole)),
            handles: Mutex::new(Handles { free: vec![lists], busy: HashMap::new(), calls: 0 }),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Enters or removes an entry, and keeps the sums.
    pub(crate) fn apply(&self, change: &Change) -> Result<(), IndexError> {
        let Change { list, key, value } = change;
        match (list, value) {
            (List::Links, value) => return self.apply_link(change, value.as_deref()),
            (List::Repositories, _) => return self.add(change.repository_key(), 0, 0),
            (list, Some(value)) => {
                self.call(|lists| Ok(lists.of(*list).insert(key, value.as_slice())?))?
            }
            (list, None) => self.call(|lists| Ok(lists.of(*list).remove(key)?))?,
        };
        Ok(())
    }

    fn apply_link(&self, change: &Change, value: Option<&[u8]>) -> Result<(), IndexError> {
        let before = self.call(|lists| {
            Ok(match value {
                Some(value) => lists.links.insert(&change.key, value)?,
                None => lists.links.remove(&change.key)?,
            })
        })?;
        let before = before.as_deref().map(number).transpose()?.unwrap_or(0);
        let after = value.map(number).transpose()?.unwrap_or(0);
        self.add(change.repository_key(), after, before)
    }

    fn add(&self, repository: &[u8], more: u64, less: u64) -> Result<(), IndexError> {
        let _held = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = self.call(|lists| Ok(lists.repositories.get(repository)?))?;
        let sum = match sum {
            Some(_) if more == less => return Ok(()),
            sum => sum.as_deref().map(number).transpose()?.unwrap_or(0),
        };
        let sum = sum.saturating_add(more).checked_sub(less).ok_or(IndexError::Malformed)?;
        self.call(|lists| {
            Ok(lists.repositories.insert(repository, sum.to_le_bytes().as_slice())?)
        })?;
        Ok(())
    }

    /// Returns the bytes a repository shows, or nothing when there is no such repository.
    pub(super) fn bytes(&self, repository: &RepositoryName) -> Result<Option<u64>, IndexError> {
        let sum = self.call(|lists| Ok(lists.repositories.get(repository.as_str())?))?;
        sum.as_deref().map(number).transpose()
    }

    /// Lists what keys that begin with `prefix` end with.
    pub(super) fn names(
        &self,
        list: List,
        prefix: &[u8],
        window: &Window,
    ) -> Result<Page<String>, IndexError> {
        let mut page = Page { items: Vec::new(), next: None };
        self.each(list, prefix, window.after.as_deref(), |name, _| {
            if page.items.len() >= window.limit {
                page.next = page.items.last().cloned();
                return Ok(false);
            }
            page.items.push(name.to_owned());
            Ok(true)
        })?;
        Ok(page)
    }

    pub(super) fn referrers(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        wanted: &ReferrersWanted<'_>,
    ) -> Result<Page<Descriptor>, IndexError> {
        let ReferrersWanted { artifact_type, window, bytes_max } = wanted;
        let mut page = Page { items: Vec::new(), next: None };
        let (mut bytes, mut last) = (0, None);
        let prefix = change::subject_prefix(repository, subject);
        self.each(List::Referrers, &prefix, window.after.as_deref(), |name, value| {
            if page.items.len() >= window.limit || bytes >= *bytes_max {
                page.next = last.take();
                return Ok(false);
            }
            let Ok(referrer) = serde_json::from_slice::<Descriptor>(value) else {
                return Err(IndexError::Malformed);
            };
            if artifact_type.is_none_or(|wanted| referrer.artifact_type.as_deref() == Some(wanted))
            {
                bytes += value.len();
                page.items.push(referrer);
                last = Some(name.to_owned());
            }
            Ok(true)
        })?;
        Ok(page)
    }

    /// Shows `each` the ends of keys that begin with `prefix` and their values, in order, until it
    /// has enough.
    fn each(
        &self,
        list: List,
        prefix: &[u8],
        after: Option<&str>,
        mut each: impl FnMut(&str, &[u8]) -> Result<bool, IndexError>,
    ) -> Result<(), IndexError> {
        let first = match after {
            Some(after) => Bound::Excluded([prefix, after.as_bytes()].concat()),
            None => Bound::Included(prefix.to_vec()),
        };
        self.call(|lists| {
            for entry in lists.of(list).range((first, Bound::Unbounded)) {
                let (key, value) = entry?;
                let Some(name) = key.strip_prefix(prefix) else { break };
                let Ok(name) = std::str::from_utf8(name) else { return Err(IndexError::Malformed) };
                if !each(name, &value)? {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Reads what a repository has. sled lets go of what it has written only when it is read again.
    pub(crate) fn sweep(&self, repository: &RepositoryName) -> Result<(), IndexError> {
        let prefix = change::prefix(repository);
        for list in [List::Links, List::Tags, List::Referrers] {
            self.each(list, &prefix, None, |_, _| Ok(true))?;
        }
        Ok(())
    }

    /// Writes what has changed to disk, so that it need not be in memory. Blocks.
    pub(crate) fn sync(&self) -> Result<(), IndexError> {
        self.call(|_| {
            let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
            let failed = match guarded(|| Ok(whole.as_ref().ok_or(IndexError::Gone)?.flush()?)) {
                Ok(_stats) => return Ok(()),
                Err(error) => error,
            };
            // The next one would wait for ever for this one to be done.
            std::mem::forget(whole.take());
            Err(failed)
        })
    }

    /// Whether the directory is still the one that was opened.
    pub(super) fn is_there(&self) -> Result<(), IndexError> {
        for below in ["", "metadata", "slabs"] {
            if !self.path.join(below).is_dir() {
                return Err(IndexError::Gone);
            }
        }
        if identity(&self.path)? != self.identity {
            return Err(IndexError::Gone);
        }
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let stuck = handles.busy.values().any(|since| since.elapsed() > CALL_MAX);
        if stuck { Err(IndexError::Stuck) } else { Ok(()) }
    }

    /// Closes the database, and returns its seal: a checksum of all its files. Blocks.
    pub(super) fn close(self) -> Result<String, IndexError> {
        self.is_there()?;
        self.sync()?;
        let path = self.path.clone();
        drop(self);
        fingerprint(&path)
    }

    /// Says that the database has failed: it is not touched again, not even to close it.
    pub(super) fn abandon(&self) {
        self.sound.store(false, Ordering::Relaxed);
    }

    fn call<T>(&self, work: impl FnOnce(&Lists) -> Result<T, IndexError>) -> Result<T, IndexError> {
        if !self.sound.load(Ordering::Relaxed) {
            return Err(IndexError::Gone);
        }
        let (lists, call) = self.lists().ok_or(IndexError::Gone)?;
        let outcome = guarded(|| work(&lists));
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.busy.remove(&call);
        if outcome.is_ok() {
            handles.free.push(lists);
        } else {
            self.abandon();
            std::mem::forget(lists);
        }
        outcome
    }

    fn lists(&self) -> Option<(Lists, u64)> {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.calls += 1;
        let call = handles.calls;
        handles.busy.insert(call, Instant::now());
        let lists = match handles.free.len() {
            0 | 1 => handles.free.first().cloned(),
            _ => handles.free.pop(),
        };
        Some((lists?, call))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let whole = self.whole.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let handles = self.handles.get_mut().unwrap_or_else(PoisonError::into_inner);
        let handles = std::mem::take(&mut handles.free);
        if self.sound.load(Ordering::Relaxed) {
            let closed = guarded(|| {
                // sled's thread syncs once more when it is told to end, and must find nothing to do.
                let flushed = whole.as_ref().map(|whole| whole.flush()).transpose();
                if let Err(error) = flushed {
                    std::mem::forget((whole, handles));
                    return Err(error.into());
                }
                drop(handles);
                drop(whole);
                Ok(())
            });
            if let Err(error) = closed {
                tracing::debug!(%error, "the index database failed while it was closed");
            }
        } else {
            // Closing it would write to what has failed already.
            std::mem::forget((whole, handles));
        }
    }
}

impl Lists {
    fn of(&self, list: List) -> &Tree {
        match list {
            List::Repositories => &self.repositories,
            List::Tags => &self.tags,
            List::Referrers => &self.referrers,
            List::Links => &self.links,
        }
    }
}

impl From<io::Error> for IndexError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn guarded<T>(work: impl FnOnce() -> Result<T, IndexError>) -> Result<T, IndexError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(_told_by_the_hook) => Err(IndexError::Panicked),
    }
}

fn identity(path: &Path) -> Result<(u64, u64), IndexError> {
    let found = fs::metadata(path).map_err(IndexError::Io)?;
    Ok((found.dev(), found.ino()))
}

fn number(bytes: &[u8]) -> Result<u64, IndexError> {
    let Ok(bytes) = bytes.try_into() else { return Err(IndexError::Malformed) };
    Ok(u64::from_le_bytes(bytes))
}

/// Returns a checksum of every file of a closed database, its name and its length.
fn fingerprint(path: &Path) -> Result<String, IndexError> {
    let mut sum = crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut dirs = vec![path.to_owned()];
    let mut files = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let kind = if entry.file_type()?.is_dir() { &mut dirs } else { &mut files };
            kind.push(entry.path());
        }
    }
    files.sort();
    let mut buffer = vec![0; 64 << 10];
    for file in files {
        let name = file.strip_prefix(path).unwrap_or(&file).as_os_str();
        sum.update(name.as_encoded_bytes());
        let mut file = fs::File::open(&file)?;
        sum.update(&file.metadata()?.len().to_le_bytes());
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                read => sum.update(buffer.get(..read).unwrap_or_default()),
            }
        }
    }
    Ok(format!("{:016x}", sum.finalize()))
}

/// sled works on rayon's threads too, where a panic ends the process unless somebody takes it.
fn contain_rayon() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(2)
            .thread_name(|number| format!("index-{number}"))
            .panic_handler(|_told_by_the_hook| {});
        if let Err(error) = pool.build_global() {
            tracing::debug!(%error, "there are rayon threads already");
        }
    });
}
