//! Fetching the hashes of pages, or the pages to hash them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use kybernate_spec::Descriptor;
use kybernate_spec::page_index::{CHUNK_BYTES, Chunk, ChunkHash, PAGE_BYTES};

use super::DifferenceError;
use super::side::{Hashes, Side, keep};
use crate::pack::base::{PAGE_HASH_BYTES, page_hash};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::unpack::UnpackError;
use crate::unpack::pages::{Incoming, hash_of};
use crate::wanted;

/// Transfers under way at once.
const PARALLEL: usize = 4;

/// Chunks of shards, by their numbers.
pub(super) type Chunks = BTreeMap<u16, BTreeSet<usize>>;

/// Pages of a chunk.
const CHUNK_PAGES: u64 = 1024;
const _: () = assert!(CHUNK_BYTES / PAGE_BYTES == 1024, "a chunk is what the format says");

impl Side {
    /// Returns how many bytes [`Self::fetch_hashes`] moves.
    pub(super) fn bytes_to_fetch(&self, needed: &Chunks) -> u64 {
        if let Some(layer) = &self.checkpoint.page_hashes {
            return layer.size;
        }
        let chunks = needed.iter().flat_map(|(shard, chunks)| {
            let table = self.stored.chunks(*shard);
            chunks.iter().filter_map(|chunk| table.get(*chunk))
        });
        chunks.map(|chunk| u64::from(chunk.stored_bytes)).sum()
    }

    /// Gets the hashes of the pages in `needed` chunks; returns the bytes moved.
    pub(super) async fn fetch_hashes(
        &mut self,
        needed: &Chunks,
        progress: &Progress,
    ) -> Result<u64, DifferenceError> {
        let bytes = self.bytes_to_fetch(needed);
        if let Some(layer) = &self.checkpoint.page_hashes {
            let stream = self.store.blob(layer).await.map_err(UnpackError::Store)?;
            let kept = wanted::blocking(move |wanted| keep(wanted.stream(stream)));
            let file = kept.await.map_err(as_error)?;
            self.hashes = Hashes::Listed(file);
            progress.advance(bytes);
            return Ok(bytes);
        }
        let mut before = Vec::new();
        let mut pages = 0_u64;
        for shard in self.stored.shard_pages() {
            before.push(pages);
            pages += u64::from(*shard);
        }
        let file = blocking(tempfile::tempfile).await.map_err(as_error)?;
        let file = Arc::new(file);
        let runs = self.runs(needed, &before);
        let side = &*self;
        stream::iter(runs.into_iter().map(Ok::<_, DifferenceError>))
            .try_for_each_concurrent(PARALLEL, |run| {
                let file = Arc::clone(&file);
                async move { side.fetch_run(run, file, progress).await }
            })
            .await?;
        let file = Arc::into_inner(file)
            .ok_or_else(|| as_error(io::Error::other("the hashes are in use")))?;
        self.hashes = Hashes::Placed(file, before);
        Ok(bytes)
    }

    /// Puts chunks that follow one another together.
    fn runs(&self, needed: &Chunks, before: &[u64]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (number, chunks) in needed {
            let place = usize::from(*number);
            let (Some(shard), Some(before)) =
                (self.checkpoint.shards.get(place), before.get(place))
            else {
                continue;
            };
            let mut last = None;
            for at in chunks {
                let Some(chunk) = self.stored.chunks(*number).get(*at) else { continue };
                match runs.last_mut().filter(|_| last.is_some_and(|last| last + 1 == *at)) {
                    Some(run) => run.chunks.push(*chunk),
                    None => runs.push(Run {
                        shard: shard.clone(),
                        first: *at,
                        before: *before,
                        chunks: vec![*chunk],
                    }),
                }
                last = Some(*at);
            }
        }
        runs
    }

    /// Fetches consecutive chunks, proves each and notes the hashes of its pages.
    async fn fetch_run(
        &self,
        run: Run,
        file: Arc<File>,
        progress: &Progress,
    ) -> Result<(), DifferenceError> {
        let hash = self.stored.chunk_hash();
        let offset = run.chunks.first().map_or(0, |chunk| chunk.stored_offset);
        let length = run.chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum();
        let stream = self.store.blob_range(&run.shard, offset, length).await;
        let mut incoming = Incoming::new(stream.map_err(UnpackError::Store)?.boxed());
        for (number, chunk) in (run.first..).zip(&run.chunks) {
            let content = incoming.take(&run.shard, chunk.stored_bytes).await?;
            progress.transfer(u64::from(chunk.stored_bytes));
            let (file, expected, before) = (Arc::clone(&file), chunk.hash, run.before);
            let noted = blocking(move || note(&content, hash, expected, before, number, &file));
            if !noted.await.map_err(as_error)? {
                let shard = run.shard.digest.clone();
                return Err(UnpackError::Chunk { shard, chunk: number }.into());
            }
            progress.advance(u64::from(chunk.stored_bytes));
        }
        Ok(())
    }
}

/// Chunks of one shard that follow one another.
struct Run {
    shard: Descriptor,
    first: usize,
    /// Pages of the shards before this one.
    before: u64,
    chunks: Vec<Chunk>,
}

/// Writes the hashes of a chunk's pages where they belong; `false` when it is not that chunk.
fn note(
    content: &[u8],
    hash: ChunkHash,
    expected: [u8; 32],
    before: u64,
    number: usize,
    file: &File,
) -> io::Result<bool> {
    if hash_of(hash, content) != expected {
        return Ok(false);
    }
    let page = usize::try_from(PAGE_BYTES).map_err(io::Error::other)?;
    let hashes: Vec<u8> = content.chunks(page).flat_map(page_hash).collect();
    let first = before + u64::try_from(number).map_err(io::Error::other)? * CHUNK_PAGES;
    let width = u64::try_from(PAGE_HASH_BYTES).map_err(io::Error::other)?;
    file.write_all_at(&hashes, first * width)?;
    Ok(true)
}

/// Gets a store's error back out of the stream it ended.
fn as_error(error: io::Error) -> DifferenceError {
    match error.downcast() {
        Ok(error) => UnpackError::Store(error).into(),
        Err(error) => DifferenceError::Io("keep the hashes of pages", error),
    }
}
