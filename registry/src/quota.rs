//! Byte quotas: what a repository may hold, and what pushes under way will add to it.
//!
//! A push is given room before its bytes are taken, for as much as it says it will send, or a
//! mebibyte at a time when it does not say. An upload keeps room for what it has received until it
//! has ended: then what it added is part of what the repository holds, or is gone. Uploads of an
//! earlier process count by their files. So neither what a repository shows nor what lies in its
//! uploads passes the limit together, however many push at once. A push that fits may be refused
//! while others hold room they end up not using; uploads that nobody goes on with make room for it
//! (`Uploads::cover`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kybernate_spec::{Digest, RepositoryName};

use crate::app::blocking;
use crate::config::Quota;
use crate::store::{NewManifest, Store, StoreError, StoreErrorKind, UploadFile};

/// Room is taken in steps of this when the length of a push is not known, …
const STEP: u64 = 1 << 20;
/// … and of this where it takes long to find out what the repository holds, without the index.
const LONG_STEP: u64 = 64 << 20;

/// How often what a repository holds is looked up before nobody else may end meanwhile.
const LOOKS_MAX: u32 = 3;

/// The limits of a store's repositories.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    limits: Quota,
    // Held for a look-up, and while it is looked up what a repository holds only after that was
    // tried without.
    promised: Mutex<Promised>,
}

/// What repositories will hold if all that was begun is ended.
#[derive(Debug, Default)]
struct Promised {
    rooms: HashMap<RepositoryName, u64>,
    /// Bytes of uploads from before the start that nobody has gone on with yet.
    dormant: HashMap<UploadFile, u64>,
    /// Repositories somebody looks at.
    looks: HashMap<RepositoryName, Looks>,
}

/// What happens while it is looked up what a repository holds.
#[derive(Debug, Default)]
struct Looks {
    lookers: u32,
    /// Bytes of rooms that were given back since the first began to look. They may be in the
    /// repository by now, and were not when it was looked at.
    given_back: u64,
}

/// A look at what a repository holds, until the value is dropped.
#[derive(Debug)]
struct Look<'a> {
    quotas: &'a Quotas,
    repository: &'a RepositoryName,
    before: u64,
}

/// Room for a push, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    store: Arc<Store>,
    repository: RepositoryName,
    limit: u64,
    bytes: u64,
}

/// What an upload may use: room, or anything when there is no limit.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    room: Option<Room>,
    /// What takes no room: the length of a blob that the repository has already.
    free: u64,
}

impl Quotas {
    pub(crate) fn new(limits: Quota) -> Self {
        Self { limits, promised: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Promised> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any repository has a limit.
    pub(crate) fn are_set(&self) -> bool {
        !self.limits.rule.is_empty()
    }

    /// How long an upload may be left alone before it makes room for another.
    pub(crate) fn idle(&self) -> Duration {
        self.limits.upload_idle.0
    }

    /// Counts uploads from before the start.
    pub(crate) fn remember(&self, uploads: HashMap<UploadFile, u64>) {
        self.lock().dormant = uploads;
    }

    /// Counts those uploads from before the start no longer that `keep` does not speak for.
    pub(crate) fn retain_dormant(&self, mut keep: impl FnMut(&UploadFile) -> bool) {
        self.lock().dormant.retain(|upload, _| keep(upload));
    }

    /// Returns the uploads from before the start that are of a repository.
    pub(crate) fn dormant(&self, repository: &RepositoryName) -> Vec<UploadFile> {
        let mark = UploadFile::mark(repository);
        let promised = self.lock();
        promised.dormant.keys().filter(|upload| upload.has_mark(&mark)).cloned().collect()
    }

    pub(crate) fn limit(&self, repository: &RepositoryName) -> Option<u64> {
        self.limits.limit(repository.as_str())
    }

    /// Begins to look what a repository holds, without the lock: without the index that takes a
    /// look at each of its links, and others have nothing to do with it.
    fn look<'a>(&'a self, repository: &'a RepositoryName) -> Look<'a> {
        let mut promised = self.lock();
        let looks = promised.looks.entry(repository.clone()).or_default();
        looks.lookers += 1;
        Look { quotas: self, repository, before: looks.given_back }
    }
}

impl Look<'_> {
    /// Returns how much was given back since.
    fn given_back(&self, promised: &Promised) -> u64 {
        let looks = promised.looks.get(self.repository);
        looks.map_or(0, |looks| looks.given_back.saturating_sub(self.before))
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        let mut promised = self.quotas.lock();
        if let Some(looks) = promised.looks.get_mut(self.repository) {
            looks.lookers = looks.lookers.saturating_sub(1);
            if looks.lookers == 0 {
                promised.looks.remove(self.repository);
            }
        }
    }
}

impl Room {
    /// Returns room for `bytes` more in a repository, or nothing when it has no limit. Blocks.
    pub(crate) fn take(
        store: &Arc<Store>,
        repository: &RepositoryName,
        bytes: u64,
    ) -> Result<Option<Self>, StoreError> {
        let Some(limit) = store.quotas().limit(repository) else { return Ok(None) };
        let (store, repository) = (Arc::clone(store), repository.clone());
        let mut room = Self { store, repository, limit, bytes: 0 };
        let grown = room.grow(bytes);
        room.counted(grown)?;
        Ok(Some(room))
    }

    /// Returns room for a manifest that is to be pushed. Blocks.
    pub(crate) fn for_manifest(
        store: &Arc<Store>,
        repository: &RepositoryName,
        new: &NewManifest,
    ) -> Result<Option<Self>, StoreError> {
        if store.quotas().limit(repository).is_none() {
            return Ok(None);
        }
        let own = match store.manifest(repository, &new.digest)? {
            Some(_) => 0,
            None => u64::try_from(new.content.len()).unwrap_or(u64::MAX),
        };
        // What comes back with it is held from then on.
        let back = store.revivable_bytes(repository, &new.digest, &new.references)?;
        Self::take(store, repository, own.saturating_add(back))
    }

    /// Returns room for a blob that is to be mounted. Blocks.
    pub(crate) fn for_mount(
        store: &Arc<Store>,
        from: &RepositoryName,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<Option<Self>, StoreError> {
        if store.quotas().limit(repository).is_none() || store.blob(repository, digest)?.is_some() {
            return Ok(None);
        }
        // Nothing is told of what is elsewhere only.
        if store.blob(from, digest)?.is_none() && !store.is_condemned(from, digest)? {
            return Ok(None);
        }
        Self::take(store, repository, store.length(digest)?)
    }

    /// Makes room for `bytes`, in steps. Blocks.
    fn cover(&mut self, bytes: u64) -> Result<(), StoreError> {
        let missing = bytes.saturating_sub(self.bytes);
        let step = if self.store.is_indexed() { STEP } else { LONG_STEP };
        // The last step may be all there is.
        let grown = self.grow(missing.next_multiple_of(step)).or_else(|_| self.grow(missing));
        self.counted(grown)
    }

    /// Counts what is refused.
    fn counted(&self, grown: Result<(), StoreError>) -> Result<(), StoreError> {
        if grown.as_ref().is_err_and(|error| matches!(error.kind, StoreErrorKind::Quota { .. })) {
            self.store.metrics().quota_refused.inc();
        }
        grown
    }

    fn grow(&mut self, more: u64) -> Result<(), StoreError> {
        if more == 0 {
            return Ok(());
        }
        let store = Arc::clone(&self.store);
        let repository = self.repository.clone();
        for _ in 0..LOOKS_MAX {
            let look = store.quotas().look(&repository);
            let used = store.bytes(&repository)?;
            let mut promised = store.quotas().lock();
            let unseen = look.given_back(&promised);
            match self.promise(&mut promised, (used, unseen), more) {
                // It may fit: what was given back may be gone, or be counted twice.
                Err(_) if unseen > 0 => {}
                outcome => return outcome,
            }
        }
        let mut promised = store.quotas().lock();
        let used = store.bytes(&repository)?;
        self.promise(&mut promised, (used, 0), more)
    }

    /// Promises `more` bytes when they fit beside what is `used`, what may be and was not `unseen`,
    /// and what others were promised.
    fn promise(
        &mut self,
        promised: &mut Promised,
        (used, unseen): (u64, u64),
        more: u64,
    ) -> Result<(), StoreError> {
        let mark = UploadFile::mark(&self.repository);
        let dormant = promised.dormant.iter().filter(|(upload, _)| upload.has_mark(&mark));
        let dormant = dormant.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let rooms = promised.rooms.get(&self.repository).copied().unwrap_or(0);
        let all = [unseen, rooms, dormant, more].into_iter().fold(used, u64::saturating_add);
        if all > self.limit {
            let kind = StoreErrorKind::Quota { limit: self.limit, used };
            return Err(StoreError { operation: "make room in the repository", kind });
        }
        promised.rooms.insert(self.repository.clone(), rooms.saturating_add(more));
        self.bytes = self.bytes.saturating_add(more);
        Ok(())
    }

    /// Gives back what is beyond `bytes`.
    fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        if less == 0 {
            return;
        }
        self.bytes = bytes;
        let mut promised = self.store.quotas().lock();
        if let Some(looks) = promised.looks.get_mut(&self.repository) {
            looks.given_back = looks.given_back.saturating_add(less);
        }
        let left = promised.rooms.get(&self.repository).copied().unwrap_or(0).saturating_sub(less);
        if left == 0 {
            promised.rooms.remove(&self.repository);
        } else {
            promised.rooms.insert(self.repository.clone(), left);
        }
    }
}

impl Allowance {
    /// Returns the room of an upload from before the start, which counts by it from now on. Blocks.
    pub(crate) fn wake(
        store: &Arc<Store>,
        repository: &RepositoryName,
        upload: &UploadFile,
        received: u64,
    ) -> Self {
        let Some(limit) = store.quotas().limit(repository) else { return Self::default() };
        let mut promised = store.quotas().lock();
        promised.dormant.remove(upload);
        // It was taken before, so no limit is asked about.
        let room = promised.rooms.entry(repository.clone()).or_default();
        *room = room.saturating_add(received);
        drop(promised);
        let (store, repository) = (Arc::clone(store), repository.clone());
        Self { room: Some(Room { store, repository, limit, bytes: received }), free: 0 }
    }

    /// Gives the room of an upload up that is forgotten until somebody goes on with it: it counts by
    /// its file from now on, as one from before the start.
    pub(crate) fn put_to_sleep(self, upload: UploadFile, received: u64) {
        if let Some(room) = &self.room {
            // First this: for a moment it counts twice, and never not at all.
            room.store.quotas().lock().dormant.insert(upload, received);
        }
    }

    /// Makes sure that `bytes` in all are allowed to an upload of a repository. A blob that the
    /// repository has already, as `known` says, takes no room; more than its length does.
    pub(crate) async fn widen(
        &mut self,
        store: &Arc<Store>,
        repository: &RepositoryName,
        known: Option<&Digest>,
        bytes: u64,
    ) -> Result<(), StoreError> {
        if store.quotas().limit(repository).is_none() {
            return Ok(());
        }
        let (repository, known, room) = (repository.clone(), known.cloned(), self.room.take());
        let (room, free) = blocking(store, move |store| {
            let mut room = match room {
                Some(room) => Some(room),
                None => Room::take(store, &repository, 0)?,
            };
            let widen = || {
                let free = match known {
                    Some(digest) if store.blob(&repository, &digest)?.is_some() => {
                        store.length(&digest)?
                    }
                    _ => 0,
                };
                if let Some(room) = &mut room {
                    let missing = bytes.saturating_sub(free).saturating_sub(room.bytes);
                    let grown = room.grow(missing);
                    room.counted(grown)?;
                }
                Ok(free)
            };
            let free = widen();
            Ok((room, free))
        })
        .await?;
        // Also when it is not widened: what was received before still counts.
        self.room = room;
        self.free = free?;
        Ok(())
    }

    /// Whether it takes less room than it has bytes, since the repository had the blob when that was
    /// looked at.
    pub(crate) fn is_of_known(&self) -> bool {
        self.free > 0
    }

    /// Makes sure that `bytes` in all are allowed.
    pub(crate) async fn cover(&mut self, bytes: u64) -> Result<(), StoreError> {
        let bytes = bytes.saturating_sub(self.free);
        let Some(mut room) = self.room.take_if(|room| bytes > room.bytes) else { return Ok(()) };
        let store = Arc::clone(&room.store);
        let covering = blocking(&store, move |_| {
            let covered = room.cover(bytes);
            Ok((room, covered))
        });
        let (room, covered) = covering.await?;
        self.room = Some(room);
        covered
    }

    /// Keeps room for what was received, and no more.
    pub(crate) fn settle(&mut self, received: u64) {
        self.free = 0;
        if let Some(room) = &mut self.room {
            room.shrink(received);
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests;
