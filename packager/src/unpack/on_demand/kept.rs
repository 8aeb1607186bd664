//! What is kept of the chunks that were fetched, whoever reads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::sync::OnceCell;

use super::{AHEAD, lock};

/// Most chunks in memory: 16 MiB.
pub(super) const KEPT: usize = 4;

/// Which chunk of which shard.
pub(super) type ChunkKey = (u16, u16);

#[derive(Debug, Default)]
pub(super) struct Kept {
    chunks: HashMap<ChunkKey, KeptChunk>,
    clock: u64,
    /// What each reader read last, and will most likely read on.
    readers: HashMap<u64, ChunkKey>,
}

#[derive(Debug)]
struct KeptChunk {
    content: Arc<OnceCell<Bytes>>,
    /// When it was read the last time; `None` before the first.
    read: Option<u64>,
}

/// Buffers of chunks that nobody reads any more: memory that is used again need not be found and
/// cleared again, and does not add up.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
}

/// A chunk, whose buffer is used again when the last who reads it is done.
pub(super) struct Lent {
    pub(super) content: Vec<u8>,
    pub(super) buffers: Arc<Buffers>,
}

impl Kept {
    /// Returns a number for a new reader.
    pub(super) fn reader(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Forgets a reader.
    pub(super) fn leave(&mut self, reader: u64) {
        self.readers.remove(&reader);
    }

    /// Returns the place of a chunk that a reader reads now.
    pub(super) fn take(&mut self, reader: u64, key: ChunkKey) -> Arc<OnceCell<Bytes>> {
        self.readers.insert(reader, key);
        self.clock += 1;
        let now = Some(self.clock);
        if let Some(chunk) = self.chunks.get_mut(&key) {
            chunk.read = now;
            return Arc::clone(&chunk.content);
        }
        if self.chunks.len() >= KEPT {
            self.forget(|_, _| true);
        }
        self.insert(key, now)
    }

    /// Returns a chunk that a reader reads now, if it is there.
    pub(super) fn ready(&mut self, reader: u64, key: ChunkKey) -> Option<Bytes> {
        let chunk = self.chunks.get_mut(&key)?;
        let content = chunk.content.get().cloned()?;
        self.clock += 1;
        chunk.read = Some(self.clock);
        self.readers.insert(reader, key);
        Some(content)
    }

    /// Returns a place for a chunk that will be read, unless it has one or only chunks are kept that
    /// nobody has read, or somebody still reads.
    pub(super) fn make_room_for(&mut self, key: ChunkKey) -> Option<Arc<OnceCell<Bytes>>> {
        if self.chunks.contains_key(&key) {
            return None;
        }
        let is_done = |chunk: &KeptChunk, used: bool| chunk.read.is_some() && !used;
        if self.chunks.len() >= KEPT && !self.forget(is_done) {
            return None;
        }
        Some(self.insert(key, None))
    }

    fn insert(&mut self, key: ChunkKey, read: Option<u64>) -> Arc<OnceCell<Bytes>> {
        let content = Arc::new(OnceCell::new());
        self.chunks.insert(key, KeptChunk { content: Arc::clone(&content), read });
        content
    }

    /// Lets go of one chunk among some, by what is known of each and whether somebody still reads it:
    /// best of one that nobody does, that was read at all, and that was read longest ago.
    fn forget(&mut self, among: impl Fn(&KeptChunk, bool) -> bool) -> bool {
        let used = |key: &ChunkKey| self.readers.values().any(|used| used == key);
        let chunks = self.chunks.iter().map(|(key, chunk)| (used(key), chunk, *key));
        let candidates = chunks.filter(|(used, chunk, _)| among(chunk, *used));
        let oldest =
            candidates.min_by_key(|(used, chunk, _)| (*used, chunk.read.is_none(), chunk.read));
        let oldest = oldest.map(|(_, _, key)| key);
        oldest.is_some_and(|key| self.chunks.remove(&key).is_some())
    }
}

impl Buffers {
    pub(super) fn take(&self) -> Vec<u8> {
        lock(&self.free).pop().unwrap_or_default()
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.content
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.content);
        buffer.clear();
        let mut free = lock(&self.buffers.free);
        if free.len() < AHEAD {
            free.push(buffer);
        }
    }
}
