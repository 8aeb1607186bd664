//! Reused buffers of one chunk, so that bulk traffic allocates nothing.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::checksum::CHUNK_BYTES;

/// Free buffers kept for reuse: what eight pulls with two chunks each use, 16 MiB.
const KEPT_MAX: usize = 16;

/// Hands out [`Buffer`]s and takes them back when they are dropped.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    // Held for a push or pop only, never across an `.await`, hence not a tokio mutex.
    free: Mutex<Vec<Box<[u8]>>>,
}

/// A buffer of one chunk, or less where less was asked for.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    filled: usize,
    pool: Arc<BufferPool>,
}

impl BufferPool {
    /// Returns an empty buffer of exactly `capacity` bytes; a whole chunk comes from the pool.
    pub(crate) fn take(self: &Arc<Self>, capacity: usize) -> Buffer {
        let reused = if capacity == CHUNK_BYTES {
            self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
        } else {
            None
        };
        let bytes = reused.unwrap_or_else(|| vec![0; capacity].into_boxed_slice());
        Buffer { bytes, filled: 0, pool: Arc::clone(self) }
    }

    fn give_back(&self, bytes: Box<[u8]>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() == CHUNK_BYTES && free.len() < KEPT_MAX {
            free.push(bytes);
        }
    }
}

impl Buffer {
    /// Returns the part that holds data.
    pub(crate) fn filled(&self) -> &[u8] {
        self.bytes.get(..self.filled).unwrap_or_default()
    }

    /// Returns the part that is free.
    pub(crate) fn spare(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.filled..).unwrap_or_default()
    }

    /// Counts `more` bytes of the spare part as data.
    pub(crate) fn advance(&mut self, more: usize) {
        self.filled = self.filled.saturating_add(more).min(self.bytes.len());
    }

    /// Whether nothing fits any more.
    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.bytes.len()
    }

    /// Copies as much of `from` as fits and returns how much that was.
    pub(crate) fn fill_from(&mut self, from: &[u8]) -> usize {
        let spare = self.spare();
        let length = spare.len().min(from.len());
        if let (Some(to), Some(from)) = (spare.get_mut(..length), from.get(..length)) {
            to.copy_from_slice(from);
        }
        self.advance(length);
        length
    }

    /// Forgets the data.
    pub(crate) fn clear(&mut self) {
        self.filled = 0;
    }

    /// Shares the data without a copy; the buffer goes back to the pool with the last handle.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.filled()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}
