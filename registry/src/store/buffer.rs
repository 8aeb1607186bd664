//! Reused buffers of one chunk, so that bulk traffic allocates nothing.
//!
//! A chunk's buffer begins at a multiple of [`ALIGNMENT`], as writes past the page cache want it.
//!
//! Large ones are mapped, each by itself: what was in use while very many transfers were under way
//! goes back to the system with the last of them. The allocator would keep it for ever, 0.9 GiB where
//! it was measured.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use memmap2::MmapMut;

use super::checksum::CHUNK_BYTES;

/// Free buffers kept for reuse: what eight pulls with two chunks each use, 16 MiB.
const KEPT_MAX: usize = 16;

/// From this length on a buffer is mapped; what is shorter is soon used again.
const MAPPED_MIN: usize = 128 << 10;

/// Room for a chunk wherever the allocation begins.
const POOLED_BYTES: usize = CHUNK_BYTES + ALIGNMENT;
/// What `O_DIRECT` wants of memory, offset and length: the largest sector there is.
pub(crate) const ALIGNMENT: usize = 4096;

/// Hands out [`Buffer`]s and takes them back when they are dropped.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    // Held for a push or pop only, never across an `.await`, hence not a tokio mutex.
    free: Mutex<Vec<Memory>>,
}

/// Where a buffer's bytes are.
#[derive(Debug)]
enum Memory {
    Allocated(Box<[u8]>),
    Mapped(MmapMut),
}

/// A buffer of one chunk, or less where less was asked for.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Memory,
    /// Where the usable part begins and ends.
    start: usize,
    end: usize,
    /// Where the data ends.
    filled: usize,
    pool: Arc<BufferPool>,
}

impl BufferPool {
    /// Returns an empty buffer of exactly `capacity` bytes; a whole chunk comes from the pool.
    pub(crate) fn take(self: &Arc<Self>, capacity: usize) -> Buffer {
        let pool = Arc::clone(self);
        if capacity != CHUNK_BYTES {
            let bytes = Memory::new(capacity);
            return Buffer { bytes, start: 0, end: capacity, filled: 0, pool };
        }
        let reused = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let bytes = reused.unwrap_or_else(|| Memory::new(POOLED_BYTES));
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Buffer { bytes, start, end: start + CHUNK_BYTES, filled: start, pool }
    }

    fn give_back(&self, bytes: Memory) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() == POOLED_BYTES && free.len() < KEPT_MAX {
            free.push(bytes);
        }
    }
}

impl Memory {
    fn new(length: usize) -> Self {
        let mapped = if length < MAPPED_MIN { None } else { MmapMut::map_anon(length).ok() };
        mapped.map_or_else(|| Self::Allocated(vec![0; length].into_boxed_slice()), Self::Mapped)
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::Allocated(Box::default())
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Allocated(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl Buffer {
    /// Returns the part that holds data.
    pub(crate) fn filled(&self) -> &[u8] {
        self.bytes.get(self.start..self.filled).unwrap_or_default()
    }

    /// Returns the part that is free.
    pub(crate) fn spare(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.filled..self.end).unwrap_or_default()
    }

    /// Counts `more` bytes of the spare part as data.
    pub(crate) fn advance(&mut self, more: usize) {
        self.filled = self.filled.saturating_add(more).min(self.end);
    }

    /// Whether nothing fits any more.
    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.end
    }

    /// Whether it holds a whole chunk when it is full.
    pub(crate) fn is_chunk(&self) -> bool {
        self.end - self.start == CHUNK_BYTES
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
        self.filled = self.start;
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
