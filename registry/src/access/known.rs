//! What has been proven before, so that it need not be proven at each request.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use aws_lc_rs::hmac::{self, HMAC_SHA256, Key};
use lru::LruCache;

use super::subject::Identity;

/// How many are remembered; each costs about 200 bytes and what its identity holds.
const ENTRIES_MAX: NonZeroUsize = NonZeroUsize::new(10_000).expect("it is not zero");

/// Identities by the credentials that proved them.
///
/// Credentials are never kept: only a keyed hash of them is, under a key that lives and dies with
/// this value. It belongs to the keys or passwords that it was proven with, so that a change of
/// those forgets everything.
pub(super) struct Known {
    key: Key,
    // Held for a look-up only, never across an `.await`, hence not a tokio mutex.
    entries: Mutex<LruCache<Mark, Entry>>,
}

/// Stands for credentials.
pub(super) type Mark = [u8; 32];

struct Entry {
    identity: Arc<Identity>,
    until: Option<SystemTime>,
}

impl Known {
    pub(super) fn new(key: &[u8; 32]) -> Self {
        let entries = Mutex::new(LruCache::new(ENTRIES_MAX));
        Self { key: Key::new(HMAC_SHA256, key), entries }
    }

    /// Returns what stands for credentials made of `parts`.
    pub(super) fn mark(&self, parts: &[&str]) -> Mark {
        let mut hash = hmac::Context::with_key(&self.key);
        for part in parts {
            hash.update(&part.len().to_le_bytes());
            hash.update(part.as_bytes());
        }
        let mut mark = Mark::default();
        mark.iter_mut().zip(hash.sign().as_ref()).for_each(|(to, from)| *to = *from);
        mark
    }

    pub(super) fn find(&self, mark: &Mark, now: SystemTime) -> Option<Arc<Identity>> {
        let mut entries = self.lock();
        let entry = entries.get(mark)?;
        if entry.until.is_some_and(|until| now >= until) {
            entries.pop(mark);
            return None;
        }
        Some(Arc::clone(&entry.identity))
    }

    pub(super) fn remember(&self, mark: Mark, identity: &Arc<Identity>, until: Option<SystemTime>) {
        let entry = Entry { identity: Arc::clone(identity), until };
        self.lock().put(mark, entry);
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<Mark, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Known")
    }
}

#[cfg(test)]
mod tests;
