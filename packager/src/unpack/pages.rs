//! Fetching shards, proving their chunks and writing their pages where they belong.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use fs_err as fs;
use futures::StreamExt as _;
use kybernate_spec::Descriptor;
use kybernate_spec::page_index::{CHUNK_BYTES, Chunk, ChunkHash, PAGE_BYTES};
use sha2::Digest as _;

use super::plan::{Extent, Plan, PlannedFile};
use super::{UnpackError, create};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::{BlobStream, Store, StoreErrorKind};
use crate::wanted;

/// How often a shard's transfer may break off and go on at the chunk it had reached, without one
/// chunk of progress in between.
pub(super) const ATTEMPTS: u32 = 3;

/// How much of a chunk is hashed at once while it comes: enough for all lanes of the processor.
const HASH_BYTES: usize = 128 << 10;

/// A file that pages are written to, or a stretch of a larger one.
#[derive(Debug)]
pub(super) struct OutputFile {
    pub(super) file: Arc<fs::File>,
    /// Where in it the first byte goes.
    pub(super) base: u64,
    pub(super) length: u64,
}

/// Makes the files that are asked for, all holes.
pub(super) fn create_files(
    directory: &Path,
    files: &[PlannedFile],
) -> io::Result<Arc<[Option<OutputFile>]>> {
    let make = |planned: &PlannedFile| {
        if !planned.wanted {
            return Ok(None);
        }
        let file = create(&directory.join(&planned.name))?;
        file.set_len(planned.length)?;
        Ok(Some(OutputFile { file: Arc::new(file), base: 0, length: planned.length }))
    };
    files.iter().map(make).collect()
}

/// Fetches the chunks of one shard that hold pages of the dump, and writes them.
pub(super) async fn fetch_shard(
    store: &Store,
    shard: &Descriptor,
    number: u16,
    plan: &Arc<Plan>,
    files: &Arc<[Option<OutputFile>]>,
    progress: &Progress,
) -> Result<(), UnpackError> {
    let Some(table) = plan.shards.get(usize::from(number)) else { return Ok(()) };
    let reading = Arc::clone(plan);
    let extents = wanted::spawn(move |_| reading.extents(number)).end().await;
    let extents: Arc<[Extent]> = extents.map_err(|error| UnpackError::Io("unpack", error))??.into();
    let wanted: Vec<bool> = (0_u32..)
        .zip(&table.chunks)
        .map(|(chunk, _)| !extents_of(&extents, chunk).is_empty())
        .collect();
    let mut next = 0;
    let mut failures = 0;
    while let Some(first) = (next..wanted.len()).find(|at| wanted.get(*at) == Some(&true)) {
        let last = (first..wanted.len()).find(|at| wanted.get(*at) != Some(&true));
        let chunks = table.chunks.get(first..last.unwrap_or(wanted.len())).unwrap_or_default();
        let job = Job { shard, hash: plan.hash(), extents: &extents, files, progress };
        let (done, outcome) = job.fetch(store, first, chunks).await;
        next = first + done;
        failures = if done > 0 { 0 } else { failures + 1 };
        match outcome {
            Err(UnpackError::Store(error)) if failures < ATTEMPTS && may_pass(&error.kind) => {
                tracing::warn!(shard = %shard.digest, chunk = next, "transfer broke off, going on");
            }
            outcome => outcome?,
        }
    }
    Ok(())
}

/// What the chunks of one shard are checked and written with.
struct Job<'a> {
    shard: &'a Descriptor,
    hash: ChunkHash,
    extents: &'a Arc<[Extent]>,
    files: &'a Arc<[Option<OutputFile>]>,
    progress: &'a Progress,
}

impl Job<'_> {
    /// Fetches consecutive chunks in one request; returns how many were written.
    async fn fetch(
        &self,
        store: &Store,
        first: usize,
        chunks: &[Chunk],
    ) -> (usize, Result<(), UnpackError>) {
        let length = chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum();
        let offset = chunks.first().map_or(0, |chunk| chunk.stored_offset);
        let mut stream = match store.blob_range(self.shard, offset, length).await {
            Ok(stream) => Incoming::new(stream),
            Err(error) => return (0, Err(error.into())),
        };
        for (done, chunk) in chunks.iter().enumerate() {
            if let Err(error) = self.chunk(&mut stream, first + done, chunk).await {
                return (done, Err(error));
            }
        }
        (chunks.len(), Ok(()))
    }

    async fn chunk(
        &self,
        stream: &mut Incoming,
        number: usize,
        chunk: &Chunk,
    ) -> Result<(), UnpackError> {
        let content = stream.take(self.shard, chunk.stored_bytes).await?;
        let bytes = u64::from(chunk.stored_bytes);
        self.progress.transfer(bytes);
        let (hash, expected) = (self.hash, chunk.hash);
        let (extents, files) = (Arc::clone(self.extents), Arc::clone(self.files));
        let place = u32::try_from(number).unwrap_or(u32::MAX);
        let written = blocking(move || {
            if hash_of(hash, &content) != expected {
                return Ok(false);
            }
            write_pages(&content, place, &extents, &files)?;
            Ok(true)
        });
        match written.await {
            Ok(true) => {
                self.progress.advance(bytes);
                Ok(())
            }
            Ok(false) => {
                let shard = self.shard.digest.clone();
                Err(UnpackError::Chunk { shard, chunk: number })
            }
            Err(error) => Err(UnpackError::Io("write the dump's pages", error)),
        }
    }
}

/// A stream whose pieces do not end where chunks do.
pub(crate) struct Incoming {
    stream: BlobStream,
    rest: bytes::Bytes,
}

impl Incoming {
    pub(crate) const fn new(stream: BlobStream) -> Self {
        Self { stream, rest: bytes::Bytes::new() }
    }

    /// Returns the next bytes of `shard`, so many of them.
    pub(crate) async fn take(
        &mut self,
        shard: &Descriptor,
        length: u32,
    ) -> Result<Vec<u8>, UnpackError> {
        self.take_into(Vec::new(), shard, length, |_| ()).await
    }

    /// The same in a buffer that is there and empty. What comes is hashed while it is still in the
    /// processor's cache.
    pub(super) async fn take_hashed(
        &mut self,
        content: Vec<u8>,
        shard: &Descriptor,
        length: u32,
        hasher: &mut ChunkHasher,
    ) -> Result<Vec<u8>, UnpackError> {
        let mut done = 0;
        let content = self.take_into(content, shard, length, |content| {
            let whole = content.len() - content.len() % HASH_BYTES;
            hasher.update(content.get(done..whole).unwrap_or_default());
            done = done.max(whole);
        });
        let content = content.await?;
        hasher.update(content.get(done..).unwrap_or_default());
        Ok(content)
    }

    /// The same, for somebody who looks at what is there after every piece.
    async fn take_into(
        &mut self,
        mut content: Vec<u8>,
        shard: &Descriptor,
        length: u32,
        mut look: impl FnMut(&[u8]),
    ) -> Result<Vec<u8>, UnpackError> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        content.reserve_exact(length);
        while content.len() < length {
            if self.rest.is_empty() {
                match self.stream.next().await {
                    Some(piece) => self.rest = piece?,
                    None => return Err(ended_early(shard)),
                }
            }
            let piece = self.rest.split_to(self.rest.len().min(length - content.len()));
            content.extend_from_slice(&piece);
            look(&content);
        }
        Ok(content)
    }

    /// Reads on to the end, where nothing more may come; a stream that checks itself does so there.
    pub(crate) async fn end(mut self) -> Result<(), UnpackError> {
        while let Some(piece) = self.stream.next().await {
            piece?;
        }
        Ok(())
    }
}

fn ended_early(shard: &Descriptor) -> UnpackError {
    UnpackError::Store(crate::store::StoreError {
        operation: "pull blob",
        subject: shard.digest.to_string(),
        kind: StoreErrorKind::Io(io::ErrorKind::UnexpectedEof.into()),
    })
}

pub(super) const fn may_pass(kind: &StoreErrorKind) -> bool {
    matches!(kind, StoreErrorKind::Io(_) | StoreErrorKind::Registry(_))
}

/// Returns the hash of a chunk.
pub(crate) fn hash_of(hash: ChunkHash, content: &[u8]) -> [u8; 32] {
    let mut hasher = ChunkHasher::new(hash);
    hasher.update(content);
    hasher.finish()
}

/// The hash of a chunk that comes in pieces.
pub(super) enum ChunkHasher {
    Blake3(Box<blake3::Hasher>),
    Sha256(Box<sha2::Sha256>),
}

impl ChunkHasher {
    pub(super) fn new(hash: ChunkHash) -> Self {
        match hash {
            ChunkHash::Blake3 => Self::Blake3(Box::default()),
            ChunkHash::Sha256 => Self::Sha256(Box::default()),
        }
    }

    pub(super) fn update(&mut self, content: &[u8]) {
        match self {
            Self::Blake3(hasher) => drop(hasher.update(content)),
            Self::Sha256(hasher) => hasher.update(content),
        }
    }

    pub(super) fn finish(self) -> [u8; 32] {
        match self {
            Self::Blake3(hasher) => hasher.finalize().into(),
            Self::Sha256(hasher) => hasher.finalize().into(),
        }
    }
}

/// Returns the extents that touch a chunk.
pub(super) fn extents_of(extents: &[Extent], chunk: u32) -> &[Extent] {
    let pages = CHUNK_BYTES / PAGE_BYTES;
    let (first, end) = (chunk * pages, (chunk + 1) * pages);
    let from = extents.partition_point(|extent| extent.shard_page + extent.pages <= first);
    let to = extents.partition_point(|extent| extent.shard_page < end);
    extents.get(from..to).unwrap_or_default()
}

fn write_pages(
    content: &[u8],
    chunk: u32,
    extents: &[Extent],
    files: &[Option<OutputFile>],
) -> io::Result<()> {
    let pages = CHUNK_BYTES / PAGE_BYTES;
    let (first, end) = (chunk * pages, (chunk + 1) * pages);
    for extent in extents_of(extents, chunk) {
        let from = extent.shard_page.max(first);
        let to = (extent.shard_page + extent.pages).min(end);
        let file_page = extent.file_page + u64::from(from - extent.shard_page);
        let offset = file_page * u64::from(PAGE_BYTES);
        let file = usize::try_from(extent.file).ok().and_then(|file| files.get(file)?.as_ref());
        let file = file.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let range = byte(from - first)..byte(to - first);
        let part = content.get(range).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        // The last page of a file is padded in its shard and cut here.
        let room = usize::try_from(file.length.saturating_sub(offset)).unwrap_or(usize::MAX);
        let part = part.get(..part.len().min(room)).unwrap_or_default();
        let written = file.file.file().write_all_at(part, file.base.saturating_add(offset));
        written.map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", file.file.path().display()))
        })?;
    }
    Ok(())
}

fn byte(page: u32) -> usize {
    usize::try_from(u64::from(page) * u64::from(PAGE_BYTES)).unwrap_or(usize::MAX)
}
