//! An index over the objects, in sled: lists and sums without reading directories.
//!
//! It is never the truth. Whatever changes an object tells the index while it still holds the lock
//! that orders such changes, before the change is acknowledged; a list answered from the index so
//! holds every acknowledged write. After any error or panic of sled, and until it is open, the
//! objects answer, and the index is made again from them, beside the running service:
//!
//! ```text
//!            opened, seal right              a change or a read fails, the directory is gone
//! Opening ───────────────────────▶ Ready ─────────────────────────────────▶ Absent
//!    │ changes wait in a queue       ▲                                         │
//!    │ no or wrong seal              │ scanned                                 │ after a pause
//!    └──────────────────────────▶ Building ◀───────────────────────────────────┘
//!                                    changes are entered, reads go to the objects
//! ```
//!
//! On disk it is one directory below `index/`. When the store is closed in an orderly way a checksum
//! of all its files goes into `index.seal`, which is removed before the next change. A seal that is
//! missing or does not match means that the objects may have changed since, or the files, and the
//! index is made again. So nothing of sled need survive a crash, it is synced only to keep its
//! memory small, and it never opens a file that it has not closed.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use kybernate_spec::{Descriptor, Digest, RepositoryName, chain};
use tokio::sync::Notify;

use self::change::List;
use self::database::Database;
use crate::store::{Page, Window};

mod change;
mod database;
mod keeper;

pub(crate) use self::change::Change;
pub(crate) use self::database::Database as IndexDatabase;
pub use self::database::IndexError;
pub use self::keeper::Reindexed;
pub(crate) use self::keeper::{keep, reindex};

/// Version of what is in the database. Another one is made again.
pub(crate) const LAYOUT: u32 = 1;
/// Changes that wait while the database is opened, ~150 bytes each. More of them make it cheaper to
/// read the objects again.
const WAITING_MAX: usize = 10_000;
/// So many of them are entered while all others wait.
const WAITING_FEW: usize = 16;

/// Databases that may be lost before the index is given up until the next start. A lost one cannot be
/// closed: it keeps a few MiB and ~100 descriptors.
const LOST_MAX: u32 = 32;

/// Answers lists where it can.
#[derive(Debug)]
pub(crate) struct Index {
    // Held to look which phase it is, never across an `.await`, hence not a tokio lock.
    phase: RwLock<Phase>,
    unsynced: AtomicU64,
    // Held while the objects are scanned, on a blocking thread.
    building: Mutex<()>,
    lost: AtomicU32,
    wake: Notify,
}

#[derive(Debug)]
enum Phase {
    /// The objects answer and changes are not noted: whoever builds reads the objects later.
    Absent,
    /// The database may be right as it is, but for the changes that wait here.
    Opening(Mutex<Vec<Change>>),
    /// The objects answer; changes are entered beside what the scan enters.
    Building(Arc<Database>),
    /// The database answers.
    Ready(Arc<Database>),
}

impl Index {
    /// Returns an index that is not open. With `sealed`, changes wait for the database to be
    /// opened.
    pub(crate) fn new(sealed: bool) -> Self {
        let phase = if sealed { Phase::Opening(Mutex::default()) } else { Phase::Absent };
        Self {
            phase: RwLock::new(phase),
            unsynced: AtomicU64::new(0),
            building: Mutex::default(),
            lost: AtomicU32::new(0),
            wake: Notify::new(),
        }
    }

    /// Notes a change of the objects, which is already visible in them. The caller still holds
    /// whatever orders changes of the same object.
    pub(crate) fn note(&self, change: Change) {
        let phase = self.phase.read().unwrap_or_else(PoisonError::into_inner);
        let database = match &*phase {
            Phase::Absent => return,
            Phase::Opening(waiting) => {
                let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                if waiting.len() < WAITING_MAX {
                    waiting.push(change);
                    return;
                }
                drop(waiting);
                drop(phase);
                return self.forget_waiting();
            }
            Phase::Building(database) | Phase::Ready(database) => Arc::clone(database),
        };
        // Whoever replaces the database from here on reads the objects, where the change is.
        drop(phase);
        self.unsynced.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = database.apply(&change) {
            self.lose(&database, &error);
        }
    }

    /// Lists the tags of a repository that the index knows.
    pub(crate) fn tags(
        &self,
        repository: &RepositoryName,
        window: &Window,
    ) -> Option<Page<String>> {
        let known = self.read(|database| {
            if database.bytes(repository)?.is_none() {
                return Ok(None);
            }
            database.names(List::Tags, &change::prefix(repository), window).map(Some)
        });
        known.flatten()
    }

    /// Lists the repositories.
    pub(crate) fn repositories(&self, window: &Window) -> Option<Page<String>> {
        self.read(|database| database.names(List::Repositories, &[], window))
    }

    /// Lists what refers to `subject`; a page ends after `bytes_max` of descriptors.
    pub(crate) fn referrers(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        wanted: &ReferrersWanted<'_>,
    ) -> Option<Page<Descriptor>> {
        self.read(|database| database.referrers(repository, subject, wanted))
    }

    /// Returns how many bytes a repository shows: of its blobs and manifests, each counted once.
    /// Nothing when the index cannot say.
    pub(crate) fn bytes(&self, repository: &RepositoryName) -> Option<u64> {
        self.read(|database| database.bytes(repository)).flatten()
    }

    /// Whether lists are answered from here.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(*self.phase.read().unwrap_or_else(PoisonError::into_inner), Phase::Ready(_))
    }

    /// Whether nobody makes one, either.
    fn is_absent(&self) -> bool {
        matches!(*self.phase.read().unwrap_or_else(PoisonError::into_inner), Phase::Absent)
    }

    /// Closes the database in an orderly way. Returns its name and its seal, or nothing when it
    /// cannot be trusted.
    pub(crate) fn close(&self) -> Option<(String, String)> {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *phase, Phase::Absent);
        drop(phase);
        let Phase::Ready(database) = before else { return None };
        // Nobody else has it: the store is being dropped.
        let database = Arc::into_inner(database)?;
        let name = database.name().to_owned();
        match database.close() {
            Ok(seal) => Some((name, seal)),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the index cannot be closed and will be made again");
                None
            }
        }
    }

    fn read<T>(&self, read: impl FnOnce(&Database) -> Result<T, IndexError>) -> Option<T> {
        let database = match &*self.phase.read().unwrap_or_else(PoisonError::into_inner) {
            Phase::Ready(database) => Arc::clone(database),
            _ => return None,
        };
        read(&database).map_err(|error| self.lose(&database, &error)).ok()
    }

    /// Gives a database up that has failed.
    fn lose(&self, database: &Arc<Database>, error: &IndexError) {
        database.abandon();
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if let Phase::Building(current) | Phase::Ready(current) = &*phase
            && Arc::ptr_eq(current, database)
        {
            tracing::warn!(error = %chain(error), "the index is lost and will be made again; the objects answer");
            *phase = Phase::Absent;
            self.lost.fetch_add(1, Ordering::Relaxed);
            self.wake.notify_one();
        }
    }

    /// Whether so many databases were lost that another one would cost more than it gives.
    fn is_hopeless(&self) -> bool {
        self.lost.load(Ordering::Relaxed) >= LOST_MAX
    }

    fn forget_waiting(&self) {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*phase, Phase::Opening(_)) {
            *phase = Phase::Absent;
        }
    }

    /// Enters the changes that waited and lets the database answer. Returns whether it does.
    fn opened(&self, database: &Arc<Database>) -> Result<bool, IndexError> {
        // Most of them beside those who note more: a database that does not come back then hangs
        // nobody else.
        while let Some(waiting) = self.take_waiting() {
            for change in &waiting {
                database.apply(change)?;
            }
        }
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        let Phase::Opening(waiting) = &*phase else { return Ok(false) };
        for change in waiting.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            database.apply(change)?;
        }
        *phase = Phase::Ready(Arc::clone(database));
        Ok(true)
    }

    /// Returns the changes that wait, when they are more than a few.
    fn take_waiting(&self) -> Option<Vec<Change>> {
        let phase = self.phase.read().unwrap_or_else(PoisonError::into_inner);
        let Phase::Opening(waiting) = &*phase else { return None };
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        (waiting.len() > WAITING_FEW).then(|| std::mem::take(&mut *waiting))
    }

    fn building(&self) -> MutexGuard<'_, ()> {
        self.building.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on changes are entered into `database`, which a scan of the objects fills.
    fn begin(&self, database: &Arc<Database>) {
        let next = Phase::Building(Arc::clone(database));
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *phase, next);
        drop(phase);
        // Closing the one before waits for the disk.
        drop(before);
    }

    /// Gives up a database that was being built.
    fn abort(&self, database: &Arc<Database>) {
        database.abandon();
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(&*phase, Phase::Building(current) if Arc::ptr_eq(current, database)) {
            *phase = Phase::Absent;
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lets a database that was being built answer. Returns whether it does.
    fn complete(&self, database: &Arc<Database>) -> bool {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        let ours = matches!(&*phase, Phase::Building(current) if Arc::ptr_eq(current, database));
        if ours {
            *phase = Phase::Ready(Arc::clone(database));
        }
        ours
    }

    /// Syncs what has changed when that is much, or `all` of it, and looks whether the directory is
    /// still there.
    fn look_after(&self, all: bool) {
        let database = match &*self.phase.read().unwrap_or_else(PoisonError::into_inner) {
            Phase::Ready(database) => Arc::clone(database),
            _ => return,
        };
        let many = self.unsynced.load(Ordering::Relaxed) >= database::SYNC_AFTER;
        let looked = database.is_there().and_then(|()| {
            let some = self.unsynced.load(Ordering::Relaxed) > 0;
            if !(many || all && some) {
                return Ok(());
            }
            self.unsynced.store(0, Ordering::Relaxed);
            database.sync()
        });
        if let Err(error) = looked {
            self.lose(&database, &error);
        }
    }

    async fn woken(&self) {
        self.wake.notified().await;
    }
}

/// Which referrers are wanted.
#[derive(Debug)]
pub(crate) struct ReferrersWanted<'a> {
    pub(crate) artifact_type: Option<&'a str>,
    pub(crate) window: &'a Window,
    pub(crate) bytes_max: usize,
}

/// Removes databases that nobody uses; `kept` is the one in use.
fn remove_others(dir: &Path, kept: &str) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name() != *kept) {
        if let Err(error) = fs_err::remove_dir_all(entry.path()) {
            tracing::debug!(error = %chain(&error), "an old index stays behind");
        }
    }
}

#[cfg(test)]
mod tests;
