//! Where in the page index somebody reads, and what is stored where.

use std::collections::VecDeque;

use bytes::Bytes;
use kybernate_spec::page_index::{
    CHUNK_BYTES, Cursor, PAGE_BYTES, PAGES_PER_SEGMENT, Place as Stored, Run, SEGMENT_BYTES,
};

use super::AHEAD;
use super::kept::ChunkKey;

/// Where in the page index a reader is.
#[derive(Debug)]
pub(super) struct Place {
    /// The stretches of the file that are known, from number `first` on.
    pub(super) segments: VecDeque<Vec<Run>>,
    pub(super) first: u64,
    /// Where the index goes on with the next.
    pub(super) cursor: Cursor,
}

/// Bytes of a file that somebody reads; at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// A part of what is read, and the chunk it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) key: ChunkKey,
    /// First byte within the chunk.
    from: usize,
    /// First byte within what is read.
    pub(super) to: usize,
    length: usize,
}

impl Place {
    /// Returns the number of the first segment that is not known.
    pub(super) fn known(&self) -> u64 {
        self.first + u64_of(self.segments.len())
    }
}

impl Stretch {
    pub(super) const fn end(self) -> u64 {
        self.offset + self.length
    }

    pub(super) fn first_segment(self) -> u64 {
        self.offset / u64::from(SEGMENT_BYTES)
    }
}

/// Returns what of which chunk is in these bytes of a file.
pub(super) fn pieces(place: &Place, stretch: Stretch) -> Vec<Piece> {
    let (offset, end) = (stretch.offset, stretch.end());
    let mut pieces = Vec::new();
    for (segment, run) in runs(place) {
        let first = segment * u64::from(SEGMENT_BYTES) + bytes_of(run.first);
        if first >= end {
            break;
        }
        let (from, to) = (first.max(offset), (first + bytes_of(run.pages)).min(end));
        // Where in the shard the run's first byte is, less where in the file it is.
        let stored = bytes_of(run.place.page);
        let mut at = from;
        while at < to {
            let in_shard = stored + (at - first);
            let chunk = in_shard / u64::from(CHUNK_BYTES);
            let within = in_shard % u64::from(CHUNK_BYTES);
            let length = (u64::from(CHUNK_BYTES) - within).min(to - at);
            pieces.push(Piece {
                key: (run.place.shard, u16::try_from(chunk).unwrap_or(u16::MAX)),
                from: usize_of_u64(within),
                to: usize_of_u64(at - offset),
                length: usize_of_u64(length),
            });
            at += length;
        }
    }
    pieces
}

/// Returns the next chunks after these bytes of a file, in the order in which they are needed.
pub(super) fn chunks_after(place: &Place, stretch: Stretch) -> Vec<ChunkKey> {
    let mut chunks: Vec<ChunkKey> = Vec::new();
    for (segment, run) in runs(place) {
        let first = segment * u64::from(SEGMENT_BYTES) + bytes_of(run.first);
        let read = stretch.end().saturating_sub(first).div_ceil(PAGE_BYTES.into());
        let read = u16::try_from(read).unwrap_or(u16::MAX).min(run.pages);
        let page = run.place.page.saturating_add(read);
        let rest = Run { pages: run.pages - read, place: Stored { page, ..run.place }, ..*run };
        for key in chunks_of(rest) {
            if !chunks.contains(&key) {
                chunks.push(key);
            }
        }
        if chunks.len() >= AHEAD {
            break;
        }
    }
    chunks
}

/// Returns the chunks in which a run's pages are stored; none for a run of none.
pub(super) fn chunks_of(run: Run) -> impl Iterator<Item = ChunkKey> + use<> {
    let pages_per_chunk = u16::try_from(CHUNK_BYTES / PAGE_BYTES).unwrap_or(PAGES_PER_SEGMENT);
    let shard = run.place.shard;
    let first = run.place.page / pages_per_chunk;
    let last = run.pages.checked_sub(1).map(|more| (run.place.page + more) / pages_per_chunk);
    last.into_iter().flat_map(move |last| first..=last).map(move |chunk| (shard, chunk))
}

fn runs(place: &Place) -> impl Iterator<Item = (u64, &Run)> {
    let numbered = (place.first..).zip(&place.segments);
    numbered.flat_map(|(number, runs)| runs.iter().map(move |run| (number, run)))
}

pub(super) fn part(content: &Bytes, piece: Piece) -> Option<Bytes> {
    let end = piece.from.checked_add(piece.length)?;
    (end <= content.len()).then(|| content.slice(piece.from..end))
}

fn bytes_of(pages: u16) -> u64 {
    u64::from(pages) * u64::from(PAGE_BYTES)
}

fn usize_of_u64(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

pub(super) fn u64_of(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
