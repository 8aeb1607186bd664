//! Pages of a base that is on this machine, read from its shards.
//!
//! They are taken from chunks that have the hash the base's page index gives them: what is compared
//! is then what a restore gets, whoever wrote the layout and whatever became of its disk.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fs_err as fs;
use kybernate_spec::Descriptor;
use kybernate_spec::page_index::{Chunk, PAGES_PER_SEGMENT, Place};

use super::base::OpenBase;

/// Shard files kept open while pages are compared.
const OPEN_SHARDS_MAX: usize = 64;

/// Chunks kept while pages are compared: neighbours in memory are neighbours in a chunk, but come
/// from one shard for each of the base's generations, and from those that several mappings share.
/// They have 4 MiB each, half of what packing may have resident.
const CHUNKS_KEPT: usize = 8;

/// Chunks of a segment that are read before its pages are compared: those of a base whose pages lie
/// as they do in memory.
const CHUNKS_AHEAD: usize = 2;

/// Bytes read at once: few enough that they are hashed where the kernel has just put them, in a
/// core's own cache.
const PIECE_BYTES: usize = 128 << 10;

/// Reads pages of local shards, for several threads.
#[derive(Debug)]
pub(super) struct LocalPages<'a> {
    base: &'a OpenBase,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    open: BTreeMap<u16, Arc<fs::File>>,
    /// The chunks looked at last, the latest at the end.
    chunks: Vec<Arc<Proven>>,
}

/// A chunk of a shard. The first that looks at it reads it; others wait for that.
#[derive(Debug)]
pub(super) struct Proven {
    /// The shard's number and its own.
    chunk: (u16, u16),
    /// Nothing when the shard or the chunk is not there, or is something else.
    content: OnceLock<io::Result<Option<Vec<u8>>>>,
}

impl Proven {
    /// Returns its bytes, when they are what the base's page index says.
    pub(super) fn content(&self) -> Option<&[u8]> {
        self.content.get()?.as_ref().ok()?.as_deref()
    }
}

impl<'a> LocalPages<'a> {
    /// Returns nothing when the base's pages are elsewhere.
    pub(super) fn of(base: &'a OpenBase) -> Option<Self> {
        (!base.is_remote()).then(|| Self { base, kept: Mutex::default() })
    }

    /// Puts the chunk of a page into `chunk`, unless it is there already, and returns the page's
    /// place in it.
    pub(super) fn find(
        &self,
        place: Place,
        chunk: &mut Option<Arc<Proven>>,
    ) -> io::Result<Range<usize>> {
        let wanted = chunk_of(place);
        if chunk.as_ref().is_none_or(|chunk| chunk.chunk != wanted) {
            // Let go first: its place may be the one that is taken next.
            *chunk = None;
            *chunk = Some(self.proven(wanted)?);
        }
        let start = usize::from(place.page % PAGES_PER_SEGMENT) * 4096;
        Ok(start..start + 4096)
    }

    /// Reads the chunks of these pages that nobody has begun to read: whoever looks at a segment
    /// then waits less for who looks at the one before, with which it shares a chunk. Few, so that
    /// they are still kept when they are looked at.
    pub(super) fn ahead(&self, places: impl Iterator<Item = Place>) -> io::Result<()> {
        let mut last = None;
        let mut seen = 0;
        for place in places {
            let chunk = chunk_of(place);
            if last.replace(chunk) == Some(chunk) {
                continue;
            }
            seen += 1;
            if seen > CHUNKS_AHEAD {
                break;
            }
            if !self.kept().has(chunk) {
                self.proven(chunk)?;
            }
        }
        Ok(())
    }

    fn proven(&self, chunk: (u16, u16)) -> io::Result<Arc<Proven>> {
        let (proven, room) = self.kept().chunk(chunk);
        match proven.content.get_or_init(|| self.read(chunk, room)) {
            Ok(_) => Ok(proven),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        }
    }

    /// Reads a chunk into `content`, whatever was in it.
    fn read(
        &self,
        (shard, number): (u16, u16),
        mut content: Vec<u8>,
    ) -> io::Result<Option<Vec<u8>>> {
        let Some((descriptor, expected)) = self.listed(shard, number) else { return Ok(None) };
        let Some(file) = self.shard(shard, descriptor)? else { return Ok(None) };
        content.resize(usize::try_from(expected.stored_bytes).map_err(io::Error::other)?, 0);
        let whole = match read_hashed(&file, &mut content, expected.stored_offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
            Ok(hash) => hash == expected.hash,
        };
        if whole {
            return Ok(Some(content));
        }
        self.base.give_up(shard);
        Ok(None)
    }

    fn listed(&self, shard: u16, chunk: u16) -> Option<(&'a Descriptor, &'a Chunk)> {
        let descriptor = self.base.shards.get(usize::from(shard))?;
        let table = self.base.tables.get(usize::from(shard))?;
        Some((descriptor, table.get(usize::from(chunk))?))
    }

    /// Opens a shard; one that is not there as a whole is given up.
    fn shard(&self, number: u16, shard: &Descriptor) -> io::Result<Option<Arc<fs::File>>> {
        let mut kept = self.kept();
        if kept.open.len() >= OPEN_SHARDS_MAX && !kept.open.contains_key(&number) {
            kept.open.clear();
        }
        let place = match kept.open.entry(number) {
            Entry::Occupied(file) => return Ok(Some(Arc::clone(file.get()))),
            Entry::Vacant(place) => place,
        };
        match self.base.store.local_blob(&shard.digest).transpose() {
            Ok(Some(file)) if file.metadata()?.len() == shard.size => {
                Ok(Some(Arc::clone(place.insert(Arc::new(file)))))
            }
            Ok(_) => {
                self.base.give_up(number);
                Ok(None)
            }
            Err(error) => {
                tracing::debug!(%error, "a shard of the base cannot be opened");
                self.base.give_up(number);
                Ok(None)
            }
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Each change to it is whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn chunk_of(place: Place) -> (u16, u16) {
    (place.shard, place.page / PAGES_PER_SEGMENT)
}

impl Kept {
    fn has(&self, chunk: (u16, u16)) -> bool {
        self.chunks.iter().any(|proven| proven.chunk == chunk)
    }

    /// Returns a chunk, and room for it that one that is gone has left: making room for each costs
    /// a tenth of the time.
    fn chunk(&mut self, chunk: (u16, u16)) -> (Arc<Proven>, Vec<u8>) {
        if let Some(at) = self.chunks.iter().rposition(|proven| proven.chunk == chunk) {
            let known = self.chunks.remove(at);
            self.chunks.push(Arc::clone(&known));
            return (known, Vec::new());
        }
        let full = self.chunks.len() >= CHUNKS_KEPT;
        let gone = full.then(|| self.chunks.remove(0)).and_then(Arc::into_inner);
        let room = gone.and_then(|gone| gone.content.into_inner()?.ok()?).unwrap_or_default();
        let proven = Arc::new(Proven { chunk, content: OnceLock::new() });
        self.chunks.push(Arc::clone(&proven));
        (proven, room)
    }
}

/// Fills `content` from `offset`, and returns its hash: BLAKE3, as of all chunks of a base that can
/// be used.
fn read_hashed(file: &fs::File, content: &mut [u8], mut offset: u64) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    for piece in content.chunks_mut(PIECE_BYTES) {
        file.file().read_exact_at(piece, offset)?;
        hasher.update(piece);
        offset += u64::try_from(piece.len()).map_err(io::Error::other)?;
    }
    Ok(hasher.finalize().into())
}
