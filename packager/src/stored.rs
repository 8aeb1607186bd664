//! Which pages of which memory have content, and where that is stored: the pagemaps, which know
//! addresses, beside the page index, which knows places.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kybernate_spec::page_index::{
    Chunk, ChunkHash, Cursor, Header, PAGES_PER_SEGMENT, PageIndexError, Place, Reader, Record, Run,
};

use crate::criu::ImageError;
use crate::pack::pagemap::{PagemapWalk, Stretch};

/// A page's bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The stored pages of a checkpoint whose images, but not pages, are in a directory.
pub(crate) struct StoredPages {
    directory: PathBuf,
    index: Arc<File>,
    header: Header,
    shard_pages: Vec<u32>,
    tables: Vec<Vec<Chunk>>,
    files: BTreeMap<String, Known>,
}

/// A pages file.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// Where its segments begin in the page index.
    cursor: Cursor,
    /// Pages stored before its first: where its hashes begin.
    stored_before: u64,
}

/// Pages that follow one another in memory, of at most one segment of the page index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Address of the first page.
    pub(crate) address: u64,
    /// Number of pages.
    pub(crate) pages: u64,
    /// Where they are; nowhere when they are zero.
    pub(crate) stored: Option<StoredAt>,
}

/// Where consecutive pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredAt {
    /// The first page's place.
    pub(crate) place: Place,
    /// The first page's number among all that the page index names: where its hash is.
    pub(crate) ordinal: u64,
}

/// Why stored pages cannot be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoredError {
    /// The pagemap cannot be read.
    #[error("failed to read the pagemap")]
    Pagemap(#[from] ImageError),
    /// The page index cannot be read.
    #[error("failed to read the page index")]
    Index(#[from] PageIndexError),
}

/// Walks the pages of one pagemap in the order of their addresses.
pub(crate) struct Pieces {
    pagemap: PagemapWalk,
    segments: Option<Segments>,
    /// What is left of the stretch at hand.
    stretch: Option<Stretch>,
    ready: VecDeque<Piece>,
}

/// The segments of one pages file, in order.
struct Segments {
    reader: Reader<BufReader<At>>,
    /// Segments read; the last of them is at hand.
    read: u64,
    runs: Vec<Run>,
    /// Pages stored before the segment at hand.
    stored_before: u64,
}

impl StoredPages {
    /// Reads a page index, which has been checked against its manifest, and remembers where each
    /// file's segments begin. Blocks.
    pub(crate) fn scan(directory: &Path, index: Arc<File>) -> Result<Self, PageIndexError> {
        let mut reader = Reader::new(BufReader::new(At { file: Arc::clone(&index), position: 0 }))?;
        let header = *reader.header();
        let (mut files, mut tables) = (BTreeMap::new(), Vec::new());
        let mut stored = 0_u64;
        while let Some(record) = reader.next_record()? {
            match record {
                Record::Shard(chunks) => tables.push(chunks),
                Record::File { name, .. } => {
                    files.insert(name, Known { cursor: reader.cursor(), stored_before: stored });
                }
                Record::Segment(runs) => stored += pages_of(&runs),
            }
        }
        let shard_pages = reader.shard_pages().to_vec();
        Ok(Self { directory: directory.to_owned(), index, header, shard_pages, tables, files })
    }

    /// Returns what hashes the chunks.
    pub(crate) const fn chunk_hash(&self) -> ChunkHash {
        self.header.hash
    }

    /// Returns a shard's chunks.
    pub(crate) fn chunks(&self, shard: u16) -> &[Chunk] {
        self.tables.get(usize::from(shard)).map_or(&[], Vec::as_slice)
    }

    /// Returns how many pages each shard has.
    pub(crate) fn shard_pages(&self) -> &[u32] {
        &self.shard_pages
    }

    /// Walks memory as [`Self::walk`] does; `None` when there is no such pagemap.
    pub(crate) fn walk_if_there(&self, pagemap: &str) -> Result<Option<Pieces>, StoredError> {
        match self.walk(pagemap) {
            Err(StoredError::Pagemap(ImageError::Io(error)))
                if error.kind() == io::ErrorKind::NotFound =>
            {
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// Walks the memory that `pagemap`, a file of the directory, describes.
    pub(crate) fn walk(&self, pagemap: &str) -> Result<Pieces, StoredError> {
        let walk = PagemapWalk::open(&self.directory, pagemap)?;
        let pages = walk.pages_id().map(|id| format!("pages-{id}.img"));
        let known = pages.and_then(|pages| self.files.get(&pages));
        let segments = known.map(|known| {
            let at = At { file: Arc::clone(&self.index), position: known.cursor.position() };
            let shard_pages = self.shard_pages.clone();
            let reader = Reader::resume(BufReader::new(at), self.header, known.cursor, shard_pages);
            Segments { reader, read: 0, runs: Vec::new(), stored_before: known.stored_before }
        });
        Ok(Pieces { pagemap: walk, segments, stretch: None, ready: VecDeque::new() })
    }
}

impl Piece {
    /// Returns the first address after it.
    pub(crate) const fn end(&self) -> u64 {
        self.address.saturating_add(self.pages.saturating_mul(PAGE_BYTES))
    }
}

impl Pieces {
    /// Returns the next pages, or `None` at the end of the pagemap or of the pages file.
    pub(crate) fn next_piece(&mut self) -> Result<Option<Piece>, StoredError> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            let Some(stretch) = self.stretch.take().filter(|stretch| stretch.pages > 0) else {
                self.stretch = self.pagemap.next_stretch()?;
                if self.stretch.is_none() {
                    return Ok(None);
                }
                continue;
            };
            let Some(segments) = &mut self.segments else { return Ok(None) };
            if !segments.advance_to(stretch.first_page / SEGMENT)? {
                return Ok(None);
            }
            let within = stretch.first_page % SEGMENT;
            let pages = stretch.pages.min(SEGMENT - within);
            segments.cut(within, pages, stretch.address, &mut self.ready);
            self.stretch = Some(Stretch {
                address: stretch.address.saturating_add(pages * PAGE_BYTES),
                first_page: stretch.first_page + pages,
                pages: stretch.pages - pages,
            });
        }
    }
}

/// Pages of a segment.
const SEGMENT: u64 = 1024;
const _: () = assert!(PAGES_PER_SEGMENT == 1024, "a segment is what the format says");

impl Segments {
    /// Reads on to a segment; `false` when the file has no such.
    fn advance_to(&mut self, segment: u64) -> Result<bool, PageIndexError> {
        while self.read <= segment {
            let Some(Record::Segment(runs)) = self.reader.next_record()? else {
                return Ok(false);
            };
            self.stored_before += pages_of(&self.runs);
            self.runs = runs;
            self.read += 1;
        }
        Ok(self.read == segment + 1)
    }

    /// Cuts pages of the segment at hand where runs begin and end.
    fn cut(&self, first: u64, pages: u64, address: u64, out: &mut VecDeque<Piece>) {
        let end = first + pages;
        let piece = |from: u64, to: u64, stored| Piece {
            address: address.saturating_add((from - first) * PAGE_BYTES),
            pages: to - from,
            stored,
        };
        let (mut at, mut ordinal) = (first, self.stored_before);
        for run in &self.runs {
            let (begin, stop) = (u64::from(run.first), u64::from(run.first) + u64::from(run.pages));
            let (from, to) = (begin.max(at), stop.min(end));
            if from < to {
                if at < from {
                    out.push_back(piece(at, from, None));
                }
                let skipped = from - begin;
                let page = run.place.page.saturating_add(u16::try_from(skipped).unwrap_or(0));
                let place = Place { shard: run.place.shard, page };
                let stored = StoredAt { place, ordinal: ordinal + skipped };
                out.push_back(piece(from, to, Some(stored)));
                at = to;
            }
            ordinal += u64::from(run.pages);
        }
        if at < end {
            out.push_back(piece(at, end, None));
        }
    }
}

fn pages_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

/// Reads a file from a position on, whoever else reads it.
struct At {
    file: Arc<File>,
    position: u64,
}

impl Read for At {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.position)?;
        self.position += u64::try_from(read).map_err(io::Error::other)?;
        Ok(read)
    }
}

impl fmt::Debug for StoredPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredPages").field("files", &self.files).finish_non_exhaustive()
    }
}
