//! Chunks that are fetched before anybody reads them, and lie beside the dump until then.
//!
//! Before CRIU reads memory, a container has to be made and CRIU has to start: meanwhile come more
//! chunks than are kept in memory. While somebody reads what is stored, chunks go right to the reader,
//! and none come here: they would be written and read once more. It is an advantage only: what does
//! not come this way is fetched by whoever reads it, who also says why it cannot be.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use kybernate_spec::page_index::{CHUNK_BYTES, SEGMENT_BYTES};
use rustix::buffer::spare_capacity;
use tokio::sync::{OnceCell, mpsc};
use tokio::task::JoinSet;

use super::kept::{Buffers, ChunkKey};
use super::place::{chunks_of, u64_of};
use super::{LOOK_AHEAD, PagesFile, Shared, lock};
use crate::pack::upload::blocking;
use crate::unpack::pages::{ChunkHasher, Incoming};
use crate::unpack::{UnpackError, contradiction};

/// Most bytes that lie there.
pub const SPOOL_BYTES_MAX: u64 = 64 * (4 << 20);

/// Most chunks that lie there, of 4 MiB.
const SPOOLED: u16 = if cfg!(test) { 4 } else { 64 };

/// How many are fetched at once.
const AT_ONCE: usize = 2;

/// How much of a chunk is written at once.
const WRITE_BYTES: u32 = 512 << 10;

/// Whose the chunks are; one that is not here is nobody's yet.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<HashMap<ChunkKey, Claim>>);

#[derive(Debug)]
enum Claim {
    /// Somebody reads it, or did: it is not fetched before that any more.
    Reader,
    /// It is in the spool, or comes there.
    Spool(Arc<Spooled>),
}

/// A chunk in the spool.
#[derive(Debug)]
pub(super) struct Spooled {
    slot: Slot,
    /// How many bytes it has, when they are there; `None` when they do not come.
    length: OnceCell<Option<usize>>,
}

/// Room for chunks.
struct Room {
    file: Arc<File>,
    free: mpsc::Receiver<u16>,
    again: mpsc::Sender<u16>,
}

/// Room for one chunk; dropped, it is another one's.
#[derive(Debug)]
struct Slot {
    file: Arc<File>,
    number: u16,
    again: mpsc::Sender<u16>,
}

impl Claims {
    /// Notes that a chunk is read. Returns it when it is in the spool, where it is not any more.
    pub(super) fn read(&self, key: ChunkKey) -> Option<Arc<Spooled>> {
        match lock(&self.0).insert(key, Claim::Reader) {
            Some(Claim::Spool(spooled)) => Some(spooled),
            Some(Claim::Reader) | None => None,
        }
    }

    /// Whether somebody reads a chunk, or did.
    fn is_read(&self, key: ChunkKey) -> bool {
        matches!(lock(&self.0).get(&key), Some(Claim::Reader))
    }

    /// Whether a chunk is somebody's.
    fn is_taken(&self, key: ChunkKey) -> bool {
        lock(&self.0).contains_key(&key)
    }

    /// Gives a chunk this room, unless it is somebody's.
    fn spool(&self, key: ChunkKey, slot: Slot) -> Option<Arc<Spooled>> {
        let mut claims = lock(&self.0);
        let Entry::Vacant(vacant) = claims.entry(key) else { return None };
        let spooled = Arc::new(Spooled { slot, length: OnceCell::new() });
        vacant.insert(Claim::Spool(Arc::clone(&spooled)));
        Some(spooled)
    }
}

impl Room {
    /// Makes room in a directory. It has no name there, and goes with this process.
    fn make(directory: &Path) -> io::Result<Self> {
        let file = Arc::new(tempfile::tempfile_in(directory)?);
        let (again, free) = mpsc::channel(SPOOLED.into());
        for number in 0..SPOOLED {
            again.try_send(number).map_err(io::Error::other)?;
        }
        Ok(Self { file, free, again })
    }

    /// Waits for room.
    async fn next(&mut self) -> Option<Slot> {
        let number = self.free.recv().await?;
        Some(Slot { file: Arc::clone(&self.file), number, again: self.again.clone() })
    }
}

impl Slot {
    fn offset(&self) -> u64 {
        u64::from(self.number) * u64::from(CHUNK_BYTES)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // It came from there, so there is a place for it; or nobody waits for room any more.
        self.again.try_send(self.number).unwrap_or_default();
    }
}

impl Spooled {
    /// Waits for it and reads it into one of the buffers. `None`: it has to be fetched.
    pub(super) async fn take(self: Arc<Self>, buffers: &Buffers) -> Option<Vec<u8>> {
        let length = (*self.length.get_or_init(async || None).await)?;
        let mut content = buffers.take();
        let read = blocking(move || {
            content.reserve_exact(length);
            while content.len() < length {
                let at = self.slot.offset() + u64_of(content.len());
                if rustix::io::pread(&self.slot.file, spare_capacity(&mut content), at)? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            // Another chunk may lie behind it.
            content.truncate(length);
            Ok(content)
        });
        read.await.ok()
    }
}

impl Shared {
    /// Spools a file's chunks in `directory`, in the order in which they will be read: every second one,
    /// beginning with the first, then the others. Whoever reads finds one there while the next one
    /// comes, so that neither waits for the other.
    pub(super) async fn spool(
        self: Arc<Self>,
        file: PagesFile,
        directory: &Path,
    ) -> Result<(), UnpackError> {
        let failed = |error| UnpackError::Io("fetch memory before it is read", error);
        let directory = directory.to_owned();
        let mut room = blocking(move || Room::make(&directory)).await.map_err(failed)?;
        let (mut spooling, mut readers) = (JoinSet::new(), self.reading.subscribe());
        let start = self.plan.files.get(file.number).ok_or_else(contradiction)?.start;
        let mut first = None;
        'file: for turn in [0, 1] {
            let (mut cursor, mut left) = (start, file.length.div_ceil(SEGMENT_BYTES.into()));
            let mut last = None;
            while left > 0 {
                let count = usize::try_from(left).unwrap_or(LOOK_AHEAD).min(LOOK_AHEAD);
                let plan = Arc::clone(&self.plan);
                let next = blocking(move || Ok(plan.segments(cursor, count))).await;
                let (segments, end) = next.map_err(failed)??;
                if segments.is_empty() {
                    return Err(contradiction());
                }
                (left, cursor) = (left.saturating_sub(u64_of(segments.len())), end);
                for key in segments.into_iter().flatten().flat_map(chunks_of) {
                    let is_next = (key.1 ^ *first.get_or_insert(key.1)) & 1 == turn;
                    // One chunk may have many runs.
                    if last.replace(key) == Some(key) || !is_next || self.claims.is_taken(key) {
                        continue;
                    }
                    let Some(slot) = room.next().await else { break 'file };
                    // Whoever reads comes first, and is not waited for in a hole.
                    let ended = readers.wait_for(|reading| !*reading).await.is_err();
                    if ended || lock(&self.failure).is_some() {
                        break 'file;
                    }
                    let Some(spooled) = self.claims.spool(key, slot) else { continue };
                    let shared = Arc::clone(&self);
                    spooling.spawn(async move { shared.fetch_into(&spooled, key).await });
                    while spooling.len() >= AT_ONCE {
                        if !matches!(spooling.join_next().await, Some(Ok(true))) {
                            break 'file;
                        }
                    }
                }
            }
        }
        while spooling.join_next().await.is_some() {}
        Ok(())
    }

    /// Fetches a chunk into the spool. Returns whether it is there.
    async fn fetch_into(&self, spooled: &Arc<Spooled>, key: ChunkKey) -> bool {
        let length = spooled.length.get_or_init(|| self.write_into(spooled, key));
        // A reader that was quicker fetches it, which is no failure.
        length.await.is_some() || self.claims.is_read(key)
    }

    async fn write_into(&self, spooled: &Arc<Spooled>, key: ChunkKey) -> Option<usize> {
        let (shard, chunk) = self.stored(key).ok()?;
        let bytes = u64::from(chunk.stored_bytes);
        let stream = self.store.blob_range(shard, chunk.stored_offset, bytes).await.ok()?;
        let mut incoming = Incoming::new(stream);
        let mut hasher = ChunkHasher::new(self.plan.hash());
        let (mut part, mut done) = (Vec::new(), 0);
        while done < chunk.stored_bytes {
            let next = WRITE_BYTES.min(chunk.stored_bytes - done);
            part = incoming.take_hashed(part, shard, next, &mut hasher).await.ok()?;
            let (spooled, at) = (Arc::clone(spooled), u64::from(done));
            let write = move || {
                spooled.slot.file.write_all_at(&part, spooled.slot.offset() + at)?;
                part.clear();
                Ok(part)
            };
            part = blocking(write).await.ok()?;
            done += next;
        }
        if hasher.finish() != chunk.hash {
            return None;
        }
        self.progress.transfer(bytes);
        usize::try_from(bytes).ok()
    }
}
