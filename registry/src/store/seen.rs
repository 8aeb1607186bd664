//! What clients have looked at lately, in a fixed amount of memory.
//!
//! A client that skips what exists looks first and names later, so what it was shown must not go
//! in between. Two Bloom filters, the younger one filled while the older one is still asked: what
//! was seen within the last period is always known, what was seen before the last two never. A
//! false "seen" keeps garbage a little longer, nothing else.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use kybernate_spec::{Digest, RepositoryName};

use super::checksum::sum;

/// Words of one filter: 1 MiB, 2 % false answers with a million blobs seen in a period. The
/// memory is touched only where bits are set.
const WORDS: usize = 1 << 17;
/// Bits set for each.
const PROBES: u32 = 4;

/// What was seen, by repository and digest.
#[derive(Debug)]
pub(crate) struct Seen {
    filters: [Box<[AtomicU64]>; 2],
    younger: AtomicUsize,
    // Held while the filters change places.
    turned: Mutex<Option<SystemTime>>,
}

impl Default for Seen {
    fn default() -> Self {
        let filter = || std::iter::repeat_with(AtomicU64::default).take(WORDS).collect();
        Self {
            filters: [filter(), filter()],
            younger: AtomicUsize::new(0),
            turned: Mutex::default(),
        }
    }
}

impl Seen {
    /// Notes that a client was shown something.
    pub(crate) fn note(&self, repository: &RepositoryName, digest: &Digest) {
        let Some(filter) = self.filters.get(self.younger.load(Ordering::Relaxed)) else { return };
        for (word, bit) in places(repository, digest) {
            if let Some(word) = filter.get(word)
                // Most are seen again and again: a read does not take the line from other cores.
                && word.load(Ordering::Relaxed) & bit == 0
            {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// Whether a client may have been shown it in this period or the one before.
    pub(crate) fn contains(&self, repository: &RepositoryName, digest: &Digest) -> bool {
        self.filters.iter().any(|filter| {
            places(repository, digest).all(|(word, bit)| {
                filter.get(word).is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0)
            })
        })
    }

    /// Begins a new period when the current one is over, and forgets the one before.
    pub(crate) fn turn(&self, now: SystemTime, period: Duration) {
        let mut turned = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        let over = turned.is_none_or(|at| now.duration_since(at).is_ok_and(|age| age >= period));
        if !over {
            return;
        }
        *turned = Some(now);
        let older = 1 - self.younger.load(Ordering::Relaxed).min(1);
        for word in self.filters.get(older).into_iter().flatten() {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.younger.store(older, Ordering::Relaxed);
    }
}

/// Returns the bits of one thing: the words' numbers and masks.
fn places(repository: &RepositoryName, digest: &Digest) -> impl Iterator<Item = (usize, u64)> {
    let name = sum(repository.as_str().as_bytes());
    // The digest is as good as random: its own digits are the hash.
    let half = |part: std::ops::Range<usize>| {
        let digits = digest.hex().get(part).unwrap_or_default();
        u64::from_str_radix(digits, 16).unwrap_or_default()
    };
    let (first, step) = (half(0..16) ^ name, (half(16..32) ^ name.rotate_left(32)) | 1);
    (0..PROBES).map(move |probe| {
        let hash = first.wrapping_add(step.wrapping_mul(u64::from(probe)));
        // The low bits choose the bit, the high ones the word.
        let word = usize::try_from(hash >> (64 - WORDS.ilog2())).unwrap_or(0);
        (word, 1 << (hash & 63))
    })
}

#[cfg(test)]
mod tests;
