//! The private memory of a dump as it is asked for: chunks are fetched and proven when somebody reads
//! their pages, and some before: those lie in a file for a while (`spool`). What is not left for that
//! (`left`) is written.
//!
//! CRIU reads each file of pages from its beginning to its end, several of them at once. So chunks
//! are kept for a while, whoever asked for them, and each reader has the next ones of its file
//! fetched.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use kybernate_spec::page_index::{Chunk, SEGMENT_BYTES};
use kybernate_spec::{Descriptor, chain};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore, watch};
use tokio::task::JoinSet;

mod kept;
mod left;
mod place;
mod spool;

use self::kept::{Buffers, ChunkKey, Kept, Lent};
use self::place::{Piece, Place, Stretch, chunks_after, part, pieces, u64_of};
use self::spool::Claims;
pub use self::spool::SPOOL_BYTES_MAX;
use super::pages::{ATTEMPTS, ChunkHasher, Incoming, may_pass};
use super::plan::Plan;
use super::{Limits, UnpackError, contradiction, fetch, plan};
use crate::artifact::Checkpoint;
use crate::criu::{NameClass, classify};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::Store;
use crate::wanted;

/// How many chunks a reader has fetched before it gets there.
const AHEAD: usize = 3;

/// How many stretches of a file are looked through for those: holes have no chunks.
const LOOK_AHEAD: usize = 64;

/// How many reads wait for chunks at once.
const READS: usize = 4;

/// Most bytes of one read.
pub const READ_BYTES_MAX: u32 = 1 << 20;

/// The files of a dump's pages that are left to be read on demand.
#[derive(Debug)]
pub struct OnDemand {
    shared: Arc<Shared>,
    files: Vec<PagesFile>,
    is_all: bool,
}

/// A file of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagesFile {
    /// Its name in the dump.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    number: usize,
}

/// Somebody who reads one of the files, from its beginning to its end at best.
#[derive(Debug)]
pub struct PagesReader {
    shared: Arc<Shared>,
    number: u64,
    file: PagesFile,
    place: tokio::sync::Mutex<Place>,
}

/// What was asked for cannot be had; [`OnDemand::failure`] says why.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the pages cannot be read")]
pub struct Unreadable;

#[derive(Debug)]
struct Shared {
    store: Store,
    plan: Arc<Plan>,
    shards: Vec<Descriptor>,
    progress: Progress,
    /// Holes are read from it.
    zeros: Bytes,
    /// Whoever reads holds one of these, so that chunks nobody keeps any more are few.
    reads: Semaphore,
    buffers: Arc<Buffers>,
    claims: Claims,
    /// Whether what was read last is stored, and not a hole.
    reading: watch::Sender<bool>,
    // These are held for a look only, never across an `.await`.
    kept: Mutex<Kept>,
    ahead: Mutex<JoinSet<()>>,
    runtime: Handle,
    failure: Mutex<Option<UnpackError>>,
}

impl OnDemand {
    /// Reads and proves the page index, and unpacks into `directory`, where the images of the pack are,
    /// what is not left to be read on demand. `directory` then has everything but [`Self::files`].
    pub async fn open(
        store: &Store,
        checkpoint: &Checkpoint,
        directory: &Path,
        limits: Limits,
        progress: &Progress,
    ) -> Result<Self, UnpackError> {
        let plan = plan(|_| true, store, checkpoint, directory, limits, progress).await?;
        let others = |name: &str| classify(name) != NameClass::Pages;
        let is_all = !plan.files.iter().any(|file| others(&file.name));
        if !is_all {
            let others = only(&plan, others, checkpoint).await?;
            fetch(others, store, checkpoint, directory, progress).await?;
        }
        let (all, images) = (Arc::clone(&plan), directory.to_owned());
        let files = wanted::spawn(move |wanted| left::choose(&all, &images, wanted));
        let mut files = files.end().await.map_err(|error| UnpackError::Io("unpack", error))??;
        if let Some(shard) = checkpoint.shards.first()
            && !files.is_empty()
            && !store.gives_parts(shard).await?
        {
            // Each chunk would come with all that is before it.
            tracing::warn!("the registry gives no parts of blobs: the memory is written first");
            files.clear();
        }
        let shared = Shared {
            store: store.clone(),
            plan,
            shards: checkpoint.shards.clone(),
            progress: progress.clone(),
            zeros: BytesMut::zeroed(usize_of(READ_BYTES_MAX)).freeze(),
            reads: Semaphore::new(READS),
            buffers: Arc::default(),
            claims: Claims::default(),
            reading: watch::Sender::default(),
            kept: Mutex::default(),
            ahead: Mutex::default(),
            failure: Mutex::default(),
            runtime: Handle::current(),
        };
        let names: BTreeSet<String> = files.iter().map(|file| file.name.clone()).collect();
        let opened = Self { shared: Arc::new(shared), files, is_all };
        let written = move |name: &str| classify(name) == NameClass::Pages && !names.contains(name);
        opened.write_those(written, checkpoint, directory).await?;
        Ok(opened)
    }

    /// Returns the files that are read on demand.
    pub fn files(&self) -> &[PagesFile] {
        &self.files
    }

    /// Whether the page index names nothing but pages.
    pub const fn is_all(&self) -> bool {
        self.is_all
    }

    /// Writes the files that were left after all: into `directory`, where everything else is.
    pub async fn write(
        &self,
        checkpoint: &Checkpoint,
        directory: &Path,
    ) -> Result<(), UnpackError> {
        let names: BTreeSet<String> = self.files.iter().map(|file| file.name.clone()).collect();
        self.write_those(move |name| names.contains(name), checkpoint, directory).await
    }

    async fn write_those(
        &self,
        which: impl Fn(&str) -> bool + Send + 'static,
        checkpoint: &Checkpoint,
        directory: &Path,
    ) -> Result<(), UnpackError> {
        let Shared { store, progress, plan, .. } = &*self.shared;
        if !plan.files.iter().any(|file| which(&file.name)) {
            return Ok(());
        }
        progress.expect(self.bytes());
        let plan = only(plan, which, checkpoint).await?;
        fetch(plan, store, checkpoint, directory, progress).await
    }

    /// Returns how many bytes all shards have together.
    pub fn bytes(&self) -> u64 {
        self.shared.shards.iter().fold(0, |sum, shard| sum.saturating_add(shard.size))
    }

    /// Begins to fetch the largest file before it is read, every second chunk first. What comes lies in
    /// `directory` until then.
    pub fn begin(&self, directory: &Path) {
        let Some(file) = self.files.iter().max_by_key(|file| file.length).cloned() else { return };
        let (shared, directory) = (Arc::clone(&self.shared), directory.to_owned());
        let spooling = async move {
            if let Err(error) = shared.spool(file, &directory).await {
                // What fails here may also fail for whoever reads, and is told there.
                tracing::warn!(error = %chain(&error), "memory is not fetched before it is read");
            }
        };
        lock(&self.shared.ahead).spawn_on(spooling, &self.shared.runtime);
    }

    /// Begins to read a file.
    pub fn read(&self, file: &PagesFile) -> Result<PagesReader, Unreadable> {
        let start = self.shared.plan.files.get(file.number).ok_or(Unreadable)?.start;
        let place = Place { segments: VecDeque::new(), first: 0, cursor: start };
        Ok(PagesReader {
            shared: Arc::clone(&self.shared),
            number: lock(&self.shared.kept).reader(),
            file: file.clone(),
            place: tokio::sync::Mutex::new(place),
        })
    }

    /// Returns why something could not be read, once.
    pub fn failure(&self) -> Option<UnpackError> {
        lock(&self.shared.failure).take()
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        lock(&self.shared.ahead).abort_all();
    }
}

impl Drop for PagesReader {
    fn drop(&mut self) {
        lock(&self.shared.kept).leave(self.number);
        self.shared.is_reading(false);
    }
}

impl PagesReader {
    /// Reads at most `length` bytes from `offset` on: fewer than that and [`READ_BYTES_MAX`] only at
    /// the end.
    pub async fn at(&self, offset: u64, length: u32) -> Result<Bytes, Unreadable> {
        let Some(stretch) = self.stretch(offset, length) else { return Ok(Bytes::new()) };
        let shared = &self.shared;
        let (pieces, next) = {
            let mut place = self.place.lock().await;
            self.go_to(&mut place, stretch).await.map_err(|error| shared.fail(error))?;
            (pieces(&place, stretch), chunks_after(&place, stretch))
        };
        let _reading = shared.reads.acquire().await.map_err(|_closed| Unreadable)?;
        // A chunk that this read needs again must not be let go of meanwhile.
        let mut chunks = HashMap::new();
        for piece in &pieces {
            let kept = || lock(&shared.kept).take(self.number, piece.key);
            chunks.entry(piece.key).or_insert_with(kept);
        }
        shared.fetch_ahead(&next);
        shared.is_reading(!pieces.is_empty());
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let content = chunks.get(&piece.key).ok_or(Unreadable)?;
            let content = shared.chunk(piece.key, content).await?;
            parts.push((piece, part(&content, piece).ok_or(Unreadable)?));
        }
        shared.join(&parts, stretch).ok_or(Unreadable)
    }

    /// Does the same when nothing has to be waited for, from any thread; else `None`.
    pub fn at_once(&self, offset: u64, length: u32) -> Option<Bytes> {
        let Some(stretch) = self.stretch(offset, length) else { return Some(Bytes::new()) };
        let shared = &self.shared;
        let (pieces, next) = {
            let mut place = self.place.try_lock().ok()?;
            if stretch.first_segment() < place.first || !self.advance(&mut place, stretch) {
                return None;
            }
            (pieces(&place, stretch), chunks_after(&place, stretch))
        };
        let is_stored = !pieces.is_empty();
        let mut parts = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let content = lock(&shared.kept).ready(self.number, piece.key)?;
            parts.push((piece, part(&content, piece)?));
        }
        shared.fetch_ahead(&next);
        shared.is_reading(is_stored);
        shared.join(&parts, stretch)
    }

    /// Returns what of the file is meant; `None` when there is nothing.
    fn stretch(&self, offset: u64, length: u32) -> Option<Stretch> {
        let left = self.file.length.saturating_sub(offset);
        let length = u64::from(length.min(READ_BYTES_MAX)).min(left);
        (length > 0).then_some(Stretch { offset, length })
    }

    /// Reads the page index as far as it is needed for these bytes and those after.
    async fn go_to(&self, place: &mut Place, stretch: Stretch) -> Result<(), UnpackError> {
        if stretch.first_segment() < place.first {
            // Read again from the beginning: that costs little, and happens seldom.
            let file = self.shared.plan.files.get(self.file.number).ok_or_else(contradiction)?;
            *place = Place { segments: VecDeque::new(), first: 0, cursor: file.start };
        }
        while !self.advance(place, stretch) {
            let left = self.segments().saturating_sub(place.known());
            let count = LOOK_AHEAD.min(usize::try_from(left).unwrap_or(LOOK_AHEAD));
            let (plan, cursor) = (Arc::clone(&self.shared.plan), place.cursor);
            let read = blocking(move || Ok(plan.segments(cursor, count))).await;
            let (segments, cursor) = read.map_err(|error| UnpackError::Io("unpack", error))??;
            if segments.is_empty() {
                return Err(contradiction());
            }
            place.segments.extend(segments);
            place.cursor = cursor;
        }
        Ok(())
    }

    /// Lets go of what is before these bytes. Returns whether enough of the index is known: the next
    /// part of it is read when half of what was known ahead is used.
    fn advance(&self, place: &mut Place, stretch: Stretch) -> bool {
        while place.first < stretch.first_segment() && place.segments.pop_front().is_some() {
            place.first += 1;
        }
        let last = (stretch.end() - 1) / u64::from(SEGMENT_BYTES);
        let enough = last.saturating_add(u64_of(LOOK_AHEAD) / 2).min(self.segments() - 1);
        place.known() > enough
    }

    fn segments(&self) -> u64 {
        self.file.length.div_ceil(u64::from(SEGMENT_BYTES))
    }
}

impl Shared {
    /// Returns a chunk that was asked for, and fetches it unless somebody else does.
    async fn chunk(&self, key: ChunkKey, content: &OnceCell<Bytes>) -> Result<Bytes, Unreadable> {
        if lock(&self.failure).is_some() {
            return Err(Unreadable);
        }
        let fetched = content.get_or_try_init(|| self.bring(key)).await;
        fetched.cloned().map_err(|error| self.fail(error))
    }

    /// Notes whether what is read is stored. In a hole there is time for the spool.
    fn is_reading(&self, is_stored: bool) {
        self.reading.send_if_modified(|reading| std::mem::replace(reading, is_stored) != is_stored);
    }

    /// Begins to fetch chunks that will be asked for, as long as there is room.
    fn fetch_ahead(self: &Arc<Self>, keys: &[ChunkKey]) {
        for key in keys {
            let Some(content) = lock(&self.kept).make_room_for(*key) else { continue };
            let (shared, key) = (Arc::clone(self), *key);
            let mut ahead = lock(&self.ahead);
            while ahead.try_join_next().is_some() {}
            let fetch = async move {
                // What fails here is told to whoever reads.
                shared.chunk(key, &content).await.ok();
            };
            ahead.spawn_on(fetch, &self.runtime);
        }
    }

    /// Brings a chunk that is read now, or soon.
    async fn bring(&self, key: ChunkKey) -> Result<Bytes, UnpackError> {
        let spooled = self.claims.read(key);
        let content = match spooled {
            Some(spooled) => spooled.take(&self.buffers).await,
            None => None,
        };
        let content = match content {
            Some(content) => content,
            None => self.fetch(key).await?,
        };
        self.progress.advance(u64_of(content.len()));
        let buffers = Arc::clone(&self.buffers);
        Ok(Bytes::from_owner(Lent { content, buffers }))
    }

    /// Returns where a chunk is stored.
    fn stored(&self, (shard, chunk): ChunkKey) -> Result<(&Descriptor, &Chunk), UnpackError> {
        let table = self.plan.shards.get(usize::from(shard)).ok_or_else(contradiction)?;
        let descriptor = self.shards.get(usize::from(shard)).ok_or_else(contradiction)?;
        let chunk = table.chunks.get(usize::from(chunk)).ok_or_else(contradiction)?;
        Ok((descriptor, chunk))
    }

    async fn fetch(&self, key: ChunkKey) -> Result<Vec<u8>, UnpackError> {
        let number = usize::from(key.1);
        let (descriptor, chunk) = self.stored(key)?;
        let (offset, bytes) = (chunk.stored_offset, u64::from(chunk.stored_bytes));
        let fetched = async || {
            let stream = self.store.blob_range(descriptor, offset, bytes).await?;
            let (buffer, mut hasher) = (self.buffers.take(), ChunkHasher::new(self.plan.hash()));
            let mut incoming = Incoming::new(stream);
            let taken = incoming.take_hashed(buffer, descriptor, chunk.stored_bytes, &mut hasher);
            Ok((taken.await?, hasher.finish()))
        };
        let mut failures = 0;
        let (content, hash) = loop {
            match fetched().await {
                Err(UnpackError::Store(error)) if failures < ATTEMPTS && may_pass(&error.kind) => {
                    tracing::warn!(shard = %descriptor.digest, chunk = number, "a transfer broke off");
                    failures += 1;
                }
                fetched => break fetched?,
            }
        };
        self.progress.transfer(bytes);
        if hash != chunk.hash {
            return Err(UnpackError::Chunk { shard: descriptor.digest.clone(), chunk: number });
        }
        Ok(content)
    }

    /// Puts together what is read, of the parts that are not holes.
    fn join(&self, parts: &[(Piece, Bytes)], stretch: Stretch) -> Option<Bytes> {
        let length = usize::try_from(stretch.length).ok()?;
        match parts {
            [] => Some(self.zeros.slice(..length)),
            [(_, part)] if part.len() == length => Some(part.clone()),
            parts => {
                let mut read = BytesMut::zeroed(length);
                for (piece, part) in parts {
                    read.get_mut(piece.to..piece.to + part.len())?.copy_from_slice(part);
                }
                Some(read.freeze())
            }
        }
    }

    /// Keeps the first reason for which something could not be read.
    fn fail(&self, error: UnpackError) -> Unreadable {
        lock(&self.failure).get_or_insert(error);
        Unreadable
    }
}

/// Returns the same plan for those of the files that `keep` names.
async fn only(
    all: &Arc<Plan>,
    keep: impl Fn(&str) -> bool + Send + 'static,
    checkpoint: &Checkpoint,
) -> Result<Arc<Plan>, UnpackError> {
    let (all, checkpoint) = (Arc::clone(all), checkpoint.clone());
    let plan =
        wanted::spawn(move |wanted| Plan::read(all.copy_index()?, &checkpoint, keep, wanted));
    let plan = plan.end().await.map_err(|error| UnpackError::Io("unpack", error))??;
    Ok(Arc::new(plan))
}

fn usize_of(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
