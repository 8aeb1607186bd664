//! What the page index says, checked against the manifest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use kybernate_spec::page_index::{
    Chunk, ChunkHash, Cursor, Header, PAGE_BYTES, PAGES_PER_SEGMENT, Reader, Record, Run,
};
use kybernate_spec::{Reason, media_type};

use super::UnpackError;
use crate::artifact::Checkpoint;
use crate::criu::{NameClass, classify};
use crate::wanted::Wanted;

/// Bytes of the hash of one page.
const PAGE_HASH_BYTES: u64 = 16;

/// The page index, read once and kept on disk. In memory stay the chunk tables, the files' names
/// and, per shard, where in the index its pages are named.
#[derive(Debug)]
pub(super) struct Plan {
    index: Arc<File>,
    header: Header,
    pub(super) shards: Vec<ShardTable>,
    pub(super) files: Vec<PlannedFile>,
    shard_pages: Vec<u32>,
}

/// One shard: its chunks, and the part of the index that names its pages.
#[derive(Debug)]
pub(super) struct ShardTable {
    pub(super) chunks: Vec<Chunk>,
    window: Option<Window>,
}

/// A file to be made.
#[derive(Clone, Debug)]
pub(super) struct PlannedFile {
    pub(super) name: String,
    pub(super) length: u64,
    /// Whether it is asked for.
    pub(super) wanted: bool,
    /// Where in the index its first segment is.
    pub(super) start: Cursor,
}

/// Pages of a shard that belong together in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extent {
    /// First page in the shard.
    pub(super) shard_page: u32,
    /// Number of pages.
    pub(super) pages: u32,
    /// Which file.
    pub(super) file: u32,
    /// First page in the file.
    pub(super) file_page: u64,
    /// How many pages the index names before.
    pub(super) ordinal: u64,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    from: Place,
    to: u64,
}

/// Where in the index, and in which segment of which file, a record is.
#[derive(Clone, Copy, Debug)]
struct Place {
    cursor: Cursor,
    file: u32,
    segment: u64,
    /// How many pages are named before.
    page: u64,
}

impl Plan {
    /// Reads the whole index and checks it against the layers of the manifest and the sizes the
    /// facts announce. Only files that `keep` names are asked for.
    pub(super) fn read(
        index: File,
        checkpoint: &Checkpoint,
        keep: impl Fn(&str) -> bool,
        wanted: &Wanted,
    ) -> Result<Self, UnpackError> {
        let index = Arc::new(index);
        let mut reader = Reader::new(from(&index, 0))?;
        let header = *reader.header();
        let mut plan =
            Self { index, header, shards: Vec::new(), files: Vec::new(), shard_pages: Vec::new() };
        let mut names = BTreeSet::new();
        let (mut segment, mut pages) = (0, 0_u64);
        let mut cursor = reader.cursor();
        while let Some(record) = reader.next_record()? {
            wanted.check().map_err(|error| UnpackError::Io("unpack", error))?;
            match record {
                Record::Shard(chunks) => plan.shards.push(ShardTable { chunks, window: None }),
                Record::File { name, length } => {
                    check_name(&name, &mut names)?;
                    let wanted = keep(&name);
                    let start = reader.cursor();
                    plan.files.push(PlannedFile { name, length, wanted, start });
                    segment = 0;
                }
                Record::Segment(runs) => {
                    let file = u32::try_from(plan.files.len()).unwrap_or(u32::MAX) - 1;
                    let place = Place { cursor, file, segment, page: pages };
                    plan.check_kind(&runs, checkpoint)?;
                    pages += runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
                    let wanted = plan.files.last().is_some_and(|file| file.wanted);
                    for run in runs.iter().filter(|_| wanted) {
                        plan.widen(run.place.shard, place, reader.position());
                    }
                    segment += 1;
                }
            }
            cursor = reader.cursor();
        }
        plan.shard_pages = reader.shard_pages().to_vec();
        plan.check(checkpoint, pages)?;
        Ok(plan)
    }

    /// Returns the page index, which has been read once and found right.
    pub(super) fn index(&self) -> Arc<File> {
        Arc::clone(&self.index)
    }

    /// Returns the page index to be read once more.
    pub(super) fn copy_index(&self) -> Result<File, UnpackError> {
        self.index.try_clone().map_err(|error| UnpackError::Io("unpack", error))
    }

    /// Returns the runs of so many segments of one file, or of those that are left, and where the
    /// next begins.
    pub(super) fn segments(
        &self,
        cursor: Cursor,
        count: usize,
    ) -> Result<(Vec<Vec<Run>>, Cursor), UnpackError> {
        let input = from(&self.index, cursor.position());
        let mut reader = Reader::resume(input, self.header, cursor, self.shard_pages.clone());
        let mut segments = Vec::with_capacity(count);
        let mut end = cursor;
        while segments.len() < count
            && let Some(Record::Segment(runs)) = reader.next_record()?
        {
            segments.push(runs);
            end = reader.cursor();
        }
        Ok((segments, end))
    }

    /// Returns the bytes of all files that are asked for.
    pub(super) fn wanted_bytes(&self) -> u64 {
        let wanted = self.files.iter().filter(|file| file.wanted);
        wanted.fold(0, |sum, file| sum.saturating_add(file.length))
    }

    /// Returns what hashes the chunks.
    pub(super) const fn hash(&self) -> ChunkHash {
        self.header.hash
    }

    /// Returns the pages of one shard in the shard's order; each at most once.
    pub(super) fn extents(&self, number: u16) -> Result<Vec<Extent>, UnpackError> {
        let table = self.shards.get(usize::from(number));
        let Some(window) = table.and_then(|table| table.window) else {
            return Ok(Vec::new());
        };
        let cursor = window.from.cursor;
        let input = from(&self.index, cursor.position());
        let mut reader = Reader::resume(input, self.header, cursor, self.shard_pages.clone());
        let Place { mut file, mut segment, page: mut ordinal, .. } = window.from;
        let mut extents = Vec::new();
        let twice = || contradiction(Reason::PageTwice, "a page of a shard is used twice");
        let mut left = self.shard_pages.get(usize::from(number)).copied().unwrap_or_default();
        while reader.position() < window.to {
            match reader.next_record()? {
                Some(Record::Segment(runs)) => {
                    let wanted = usize::try_from(file).ok().and_then(|file| self.files.get(file));
                    let wanted = wanted.is_some_and(|file| file.wanted);
                    for run in runs {
                        let base = segment * u64::from(PAGES_PER_SEGMENT);
                        if wanted && run.place.shard == number {
                            // At once, and not when an index full of them is in memory.
                            left = left.checked_sub(u32::from(run.pages)).ok_or_else(twice)?;
                            extents.push(Extent {
                                shard_page: u32::from(run.place.page),
                                pages: u32::from(run.pages),
                                file,
                                file_page: base + u64::from(run.first),
                                ordinal,
                            });
                        }
                        ordinal += u64::from(run.pages);
                    }
                    segment += 1;
                }
                Some(Record::File { .. }) => {
                    file += 1;
                    segment = 0;
                }
                Some(Record::Shard(_)) | None => break,
            }
        }
        extents.sort_unstable();
        let overlap = extents.windows(2).any(|pair| match pair {
            [a, b] => a.shard_page + a.pages > b.shard_page,
            _ => false,
        });
        if overlap {
            return Err(twice());
        }
        Ok(extents)
    }

    fn widen(&mut self, shard: u16, place: Place, to: u64) {
        if let Some(table) = self.shards.get_mut(usize::from(shard)) {
            table.window.get_or_insert(Window { from: place, to }).to = to;
        }
    }

    /// Device memory lies in shards of its own.
    fn check_kind(&self, runs: &[Run], checkpoint: &Checkpoint) -> Result<(), UnpackError> {
        let is_device = self.files.last().is_some_and(|file| is_device(&file.name));
        let fits = |run: &Run| {
            // A shard that the manifest does not have is told of when all are known.
            let shard = checkpoint.shards.get(usize::from(run.place.shard));
            shard.is_none_or(|shard| (shard.media_type == media_type::DEVICE) == is_device)
        };
        if runs.iter().all(fits) {
            return Ok(());
        }
        let text = "device memory and other pages lie in one shard";
        Err(contradiction(Reason::Shards, text))
    }

    /// Compares the files with device memory with what the facts say of them.
    fn check_device(&self, checkpoint: &Checkpoint) -> Result<(), UnpackError> {
        let files = self.files.iter().filter(|file| is_device(&file.name));
        let files: BTreeSet<(&str, u64)> = files.map(|file| (&*file.name, file.length)).collect();
        let streams = &checkpoint.config.device.streams;
        let named = streams.iter().map(|stream| (&*stream.file, stream.bytes)).collect();
        match files.symmetric_difference(&named).next() {
            None => Ok(()),
            Some((name, bytes)) => {
                let text = format!("facts or files have {name:?} with {bytes} bytes, not both");
                Err(contradiction(Reason::Device, &text))
            }
        }
    }

    /// Compares the index, which names `pages` pages, with everything else that says how much
    /// there is.
    fn check(&self, checkpoint: &Checkpoint, pages: u64) -> Result<(), UnpackError> {
        let (shards, sizes) = (&checkpoint.shards, &checkpoint.config.sizes);
        let stored = |table: &ShardTable| {
            table.chunks.iter().map(|chunk| u64::from(chunk.stored_bytes)).sum::<u64>()
        };
        let same = self.shards.len() == shards.len()
            && self.shards.iter().zip(shards).all(|(table, layer)| stored(table) == layer.size);
        if !same {
            let text = "its page index and its manifest list different shards";
            return Err(contradiction(Reason::Shards, text));
        }
        let total = self
            .files
            .iter()
            .try_fold(0_u64, |total, file| total.checked_add(file.length))
            .unwrap_or(u64::MAX);
        if total != sizes.bulk_bytes || pages * u64::from(PAGE_BYTES) != sizes.page_bytes {
            let text = "its files do not add up to what its facts announce";
            return Err(contradiction(Reason::Sizes, text));
        }
        self.check_device(checkpoint)?;
        let hashes = checkpoint.page_hashes.as_ref();
        if hashes.is_some_and(|layer| layer.size != pages * PAGE_HASH_BYTES) {
            return Err(contradiction(Reason::Sizes, "its page hashes are not one for each page"));
        }
        Ok(())
    }
}

fn is_device(name: &str) -> bool {
    classify(name) == NameClass::Device
}

fn check_name(name: &str, names: &mut BTreeSet<String>) -> Result<(), UnpackError> {
    match classify(name) {
        NameClass::Pages | NameClass::Device | NameClass::Image
            if names.insert(name.to_owned()) =>
        {
            Ok(())
        }
        NameClass::Pages | NameClass::Device | NameClass::Image => {
            Err(contradiction(Reason::FileTwice, &format!("file {name:?} comes twice")))
        }
        NameClass::Leftover | NameClass::Foreign => {
            Err(contradiction(Reason::FileName, &format!("{name:?} is none of CRIU's images")))
        }
    }
}

fn contradiction(reason: Reason, text: &str) -> UnpackError {
    UnpackError::Contradiction(reason, text.to_owned())
}

/// Reads a file from `position` on, whoever else reads it.
fn from(file: &Arc<File>, position: u64) -> BufReader<From> {
    BufReader::new(From { file: Arc::clone(file), position })
}

struct From {
    file: Arc<File>,
    position: u64,
}

impl Read for From {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.position)?;
        self.position += u64::try_from(read).map_err(io::Error::other)?;
        Ok(read)
    }
}
