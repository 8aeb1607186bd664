//! Byte quotas: what a repository may hold, and what pushes under way will add to it.
//!
//! A push is given room before its bytes are taken, for as much as it says it will send, or a
//! mebibyte at a time when it does not say. It gives the room back when it has ended: then what it
//! added is part of what the repository holds. So what repositories show never passes their limit,
//! however many push at once; what is received and not yet shown (uploads that were begun) can pass
//! it by what is in flight. A push that fits may be refused while others hold room they end up not
//! using.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kybernate_spec::{Digest, RepositoryName};

use crate::app::blocking;
use crate::config::Quota;
use crate::store::{NewManifest, Store, StoreError, StoreErrorKind};

/// Room is taken in steps of this when the length of a push is not known.
const STEP: u64 = 1 << 20;

/// The limits of a store's repositories.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    limits: Quota,
    // Held while it is looked up what the repository holds: in the index, or in its objects.
    reserved: Mutex<HashMap<RepositoryName, u64>>,
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
        Self { limits, reserved: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RepositoryName, u64>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn limit(&self, repository: &RepositoryName) -> Option<u64> {
        self.limits.limit(repository.as_str())
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
        if store.quotas().limit(repository).is_none()
            || store.manifest(repository, &new.digest)?.is_some()
        {
            return Ok(None);
        }
        Self::take(store, repository, u64::try_from(new.content.len()).unwrap_or(u64::MAX))
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
        // The last step may be all there is.
        let grown = self.grow(missing.next_multiple_of(STEP)).or_else(|_| self.grow(missing));
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
        let store = Arc::clone(&self.store);
        let mut reserved = store.quotas().lock();
        let used = store.bytes(&self.repository)?;
        let promised = reserved.get(&self.repository).copied().unwrap_or(0);
        if used.saturating_add(promised).saturating_add(more) > self.limit {
            let kind = StoreErrorKind::Quota { limit: self.limit, used };
            return Err(StoreError { operation: "make room in the repository", kind });
        }
        reserved.insert(self.repository.clone(), promised + more);
        self.bytes += more;
        Ok(())
    }
}

impl Allowance {
    /// Returns what an upload of `bytes` so far, or in all, may use. A blob that the repository has
    /// already, as `known` says, takes no room; more than its length does.
    pub(crate) async fn take(
        store: &Arc<Store>,
        repository: &RepositoryName,
        known: Option<&Digest>,
        bytes: u64,
    ) -> Result<Self, StoreError> {
        if store.quotas().limit(repository).is_none() {
            return Ok(Self::default());
        }
        let (repository, known) = (repository.clone(), known.cloned());
        blocking(store, move |store| {
            let free = match known {
                Some(digest) if store.blob(&repository, &digest)?.is_some() => {
                    store.length(&digest)?
                }
                _ => 0,
            };
            let room = Room::take(store, &repository, bytes.saturating_sub(free))?;
            Ok(Self { room, free })
        })
        .await
    }

    /// Makes sure that `bytes` in all are allowed.
    pub(crate) async fn cover(&mut self, bytes: u64) -> Result<(), StoreError> {
        let bytes = bytes.saturating_sub(self.free);
        let Some(mut room) = self.room.take_if(|room| bytes > room.bytes) else { return Ok(()) };
        let store = Arc::clone(&room.store);
        let covered = blocking(&store, move |_| room.cover(bytes).map(|()| room)).await?;
        self.room = Some(covered);
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut reserved = self.store.quotas().lock();
        let left = reserved.get(&self.repository).copied().unwrap_or(0).saturating_sub(self.bytes);
        if left == 0 {
            reserved.remove(&self.repository);
        } else {
            reserved.insert(self.repository.clone(), left);
        }
    }
}
