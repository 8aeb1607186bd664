//! Reading a page index that somebody else wrote.

use std::io::{self, Read};

use super::{
    CHUNK_BYTES, CHUNK_RECORD_BYTES, Chunk, ChunkHash, Encoding, FILES_MAX, Header, MAGIC,
    PAGE_BYTES, PAGES_PER_SEGMENT, Place, Run, SHARD_BYTES_MAX, SHARDS_MAX, VERSION, segments,
};
use crate::Reason;

/// Largest record: a file name, 64 chunks, or 1,024 runs all fit.
const RECORD_BYTES_MAX: u32 = 16 << 10;
const NAME_BYTES_MAX: usize = 255;

/// Reads a page index in order, and refuses what a later reader could trip over: a place outside
/// its shard, pages out of order or twice, a chunk table with gaps, too few or too many records.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    /// Pages of each shard met so far.
    shard_pages: Vec<u32>,
    files: u32,
    /// Segments of the current file still to come, and pages of its last one.
    segments_left: u64,
    last_pages: u16,
    ended: bool,
    position: u64,
    buffer: Vec<u8>,
}

/// A place between two records, from which reading can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    position: u64,
    files: u32,
    segments_left: u64,
    last_pages: u16,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The chunk table of the next shard.
    Shard(Vec<Chunk>),
    /// A file begins; its segments follow.
    File {
        /// Its name, without any directory.
        name: String,
        /// Its length in bytes.
        length: u64,
    },
    /// The stored pages of the next 4 MiB of the file, in order; empty for a hole.
    Segment(Vec<Run>),
}

/// Why a page index was refused.
#[derive(Debug, thiserror::Error)]
#[error("failed to read the page index at byte {position}")]
pub struct PageIndexError {
    /// Where the refused record begins.
    pub position: u64,
    /// What is wrong.
    #[source]
    pub kind: PageIndexErrorKind,
}

/// What is wrong with a page index.
#[derive(Debug, thiserror::Error)]
pub enum PageIndexErrorKind {
    /// The bytes end too early, or reading them failed.
    #[error("input failed or ended early")]
    Io(#[from] io::Error),
    /// It does not begin as a page index does.
    #[error("it is no page index")]
    Magic,
    /// A newer format, hash, encoding or record.
    #[error("{0} {1} is not known to this version")]
    Unknown(&'static str, u32),
    /// A number that no legal index has.
    #[error("{1}")]
    Illegal(Reason, &'static str),
}

type Kind = PageIndexErrorKind;

impl PageIndexErrorKind {
    /// Returns the rule that is broken; `None` when reading failed.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Some(Reason::Truncated)
            }
            Self::Io(_) => None,
            Self::Magic => Some(Reason::Header),
            Self::Unknown(..) => Some(Reason::Unsupported),
            Self::Illegal(reason, _) => Some(*reason),
        }
    }
}

impl Cursor {
    /// Returns the byte at which the next record begins.
    pub const fn position(&self) -> u64 {
        self.position
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    pub fn new(mut input: R) -> Result<Self, PageIndexError> {
        let header =
            read_header(&mut input).map_err(|kind| PageIndexError { position: 0, kind })?;
        Ok(Self {
            input,
            header,
            shard_pages: Vec::new(),
            files: 0,
            segments_left: 0,
            last_pages: PAGES_PER_SEGMENT,
            ended: false,
            position: 32,
            buffer: Vec::new(),
        })
    }

    /// Returns the header.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Returns how many bytes were read: where the next record begins.
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// Returns the number of pages of each shard met so far.
    pub fn shard_pages(&self) -> &[u32] {
        &self.shard_pages
    }

    /// Returns the place between the last record and the next.
    pub const fn cursor(&self) -> Cursor {
        let Self { position, files, segments_left, last_pages, .. } = self;
        Cursor {
            position: *position,
            files: *files,
            segments_left: *segments_left,
            last_pages: *last_pages,
        }
    }

    /// Goes on at `cursor`, which a reader of the same bytes returned after it had read all shards.
    /// `input` stands at the cursor's position.
    pub fn resume(input: R, header: Header, cursor: Cursor, shard_pages: Vec<u32>) -> Self {
        let Cursor { position, files, segments_left, last_pages } = cursor;
        Self {
            input,
            header,
            shard_pages,
            files,
            segments_left,
            last_pages,
            ended: false,
            position,
            buffer: Vec::new(),
        }
    }

    /// Returns the next record, or `None` after the last.
    pub fn next_record(&mut self) -> Result<Option<Record>, PageIndexError> {
        let position = self.position;
        self.read_record().map_err(|kind| PageIndexError { position, kind })
    }

    fn read_record(&mut self) -> Result<Option<Record>, Kind> {
        if self.ended {
            return Ok(None);
        }
        let mut length = [0; 4];
        self.input.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length == 0 || length > RECORD_BYTES_MAX {
            return Err(Kind::Illegal(Reason::Record, "a record has no bytes or more than 16 KiB"));
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        let read = (&mut self.input).take(u64::from(length)).read_to_end(&mut buffer)?;
        if read < usize::try_from(length).unwrap_or(usize::MAX) {
            return Err(Kind::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        self.position += 4 + u64::from(length);
        let record = match buffer.split_first() {
            Some((kind, payload)) => self.decode(*kind, payload)?,
            None => None,
        };
        self.buffer = buffer;
        Ok(record)
    }

    fn decode(&mut self, kind: u8, payload: &[u8]) -> Result<Option<Record>, Kind> {
        match kind {
            0 if payload.is_empty() => self.end().map(|()| None),
            0 => Err(Kind::Illegal(Reason::Record, "the end record has a payload")),
            1 => self.shard(payload).map(Some),
            2 => self.file(payload).map(Some),
            3..=6 => self.segment(kind, payload).map(Some),
            other => Err(Kind::Unknown("record kind", other.into())),
        }
    }

    fn end(&mut self) -> Result<(), Kind> {
        let whole = self.segments_left == 0
            && self.files == self.header.files
            && self.shards_met() == self.header.shards;
        if !whole {
            return Err(Kind::Illegal(Reason::Records, "it ends before everything it announced"));
        }
        if self.input.read(&mut [0])? != 0 {
            return Err(Kind::Illegal(Reason::Trailing, "bytes follow its end"));
        }
        self.ended = true;
        Ok(())
    }

    fn shards_met(&self) -> u32 {
        u32::try_from(self.shard_pages.len()).unwrap_or(u32::MAX)
    }

    fn shard(&mut self, payload: &[u8]) -> Result<Record, Kind> {
        if self.files > 0 || self.shards_met() == self.header.shards {
            return Err(Kind::Illegal(
                Reason::Records,
                "a shard comes after the files, or is one too many",
            ));
        }
        let mut chunks = Vec::new();
        let mut offset = 0;
        for record in payload.chunks(CHUNK_RECORD_BYTES) {
            let short = chunks.last().is_some_and(|last: &Chunk| last.plain_bytes != CHUNK_BYTES);
            let chunk = read_chunk(record)?;
            let good = chunk.stored_offset == offset
                && chunk.stored_bytes == chunk.plain_bytes
                && (1..=CHUNK_BYTES).contains(&chunk.plain_bytes)
                && chunk.plain_bytes % PAGE_BYTES == 0
                && !short;
            if !good {
                return Err(Kind::Illegal(
                    Reason::ChunkTable,
                    "a chunk table has gaps or chunks of a wrong size",
                ));
            }
            offset += u64::from(chunk.stored_bytes);
            chunks.push(chunk);
        }
        if offset == 0 || offset > SHARD_BYTES_MAX {
            return Err(Kind::Illegal(
                Reason::ChunkTable,
                "a shard is empty or larger than 256 MiB",
            ));
        }
        let pages = u32::try_from(offset / u64::from(PAGE_BYTES)).unwrap_or(u32::MAX);
        self.shard_pages.push(pages);
        Ok(Record::Shard(chunks))
    }

    fn file(&mut self, payload: &[u8]) -> Result<Record, Kind> {
        let complete = self.segments_left == 0 && self.shards_met() == self.header.shards;
        if !complete || self.files == self.header.files {
            return Err(Kind::Illegal(
                Reason::Records,
                "a file begins too early, or is one too many",
            ));
        }
        let Some((length, name)) = payload.split_first_chunk::<8>() else {
            return Err(Kind::Illegal(Reason::Record, "a file record is too short"));
        };
        let length = u64::from_le_bytes(*length);
        let name = std::str::from_utf8(name).unwrap_or_default();
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(Kind::Illegal(
                Reason::FileName,
                "a file's name is empty, too long or no UTF-8",
            ));
        }
        self.files += 1;
        self.segments_left = segments(length);
        let tail = length.div_ceil(u64::from(PAGE_BYTES)) % u64::from(PAGES_PER_SEGMENT);
        self.last_pages = match u16::try_from(tail) {
            Ok(0) | Err(_) => PAGES_PER_SEGMENT,
            Ok(pages) => pages,
        };
        Ok(Record::File { name: name.to_owned(), length })
    }

    fn segment(&mut self, kind: u8, payload: &[u8]) -> Result<Record, Kind> {
        self.segments_left = self.segments_left.checked_sub(1).ok_or(Kind::Illegal(
            Reason::Records,
            "a file has more segments than its length allows",
        ))?;
        let pages = if self.segments_left == 0 { self.last_pages } else { PAGES_PER_SEGMENT };
        let runs = match (kind, payload) {
            (3, []) => Vec::new(),
            (4, [a, b, c, d]) => vec![Run { first: 0, pages, place: place([*a, *b, *c, *d]) }],
            (5, [a, b, c, d, bits @ ..]) => runs_of_bitmap(place([*a, *b, *c, *d]), bits)?,
            (6, records) => runs_of_list(records)?,
            _ => return Err(Kind::Illegal(Reason::Record, "a segment record has a wrong length")),
        };
        let mut next = 0;
        for run in &runs {
            let end = run.first.checked_add(run.pages).filter(|end| *end <= pages);
            match end {
                Some(end) if run.pages > 0 && run.first >= next => next = end,
                _ => {
                    return Err(Kind::Illegal(
                        Reason::PageOrder,
                        "a segment's runs overlap, are out of order or pass the file's end",
                    ));
                }
            }
            let available = self.shard_pages.get(usize::from(run.place.shard)).copied();
            let last = u32::from(run.place.page) + u32::from(run.pages);
            if available.is_none_or(|available| last > available) {
                return Err(Kind::Illegal(
                    Reason::PageRange,
                    "a page lies beyond the end of its shard",
                ));
            }
        }
        Ok(Record::Segment(runs))
    }
}

fn read_header(input: &mut impl Read) -> Result<Header, Kind> {
    let mut bytes = [0_u8; 32];
    input.read_exact(&mut bytes)?;
    let Some((magic, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Kind::Magic);
    };
    if *magic != MAGIC {
        return Err(Kind::Magic);
    }
    let [v0, v1, hash, flags, numbers @ ..] = rest else {
        return Err(Kind::Magic);
    };
    let version = u16::from_le_bytes([*v0, *v1]);
    if version != VERSION {
        return Err(Kind::Unknown("page index version", version.into()));
    }
    let hash = match hash {
        1 => ChunkHash::Blake3,
        2 => ChunkHash::Sha256,
        other => return Err(Kind::Unknown("chunk hash", u32::from(*other))),
    };
    if *flags != 0 {
        return Err(Kind::Unknown("flags", u32::from(*flags)));
    }
    let mut fields = numbers.chunks_exact(4).map(|four| match four {
        [a, b, c, d] => u32::from_le_bytes([*a, *b, *c, *d]),
        _ => 0,
    });
    let mut field = || fields.next().unwrap_or_default();
    let (shards, files, chunk, page, zero) = (field(), field(), field(), field(), field());
    if chunk != CHUNK_BYTES || page != PAGE_BYTES || zero != 0 {
        return Err(Kind::Illegal(Reason::Header, "chunks are not 4 MiB, or pages not 4 KiB"));
    }
    if shards > SHARDS_MAX || files > FILES_MAX {
        return Err(Kind::Illegal(
            Reason::Header,
            "it announces more shards or files than any checkpoint has",
        ));
    }
    Ok(Header { hash, shards, files })
}

fn read_chunk(record: &[u8]) -> Result<Chunk, Kind> {
    let wrong = Kind::Illegal(Reason::Record, "a chunk record is too short");
    let Some((offset, rest)) = record.split_first_chunk::<8>() else { return Err(wrong) };
    let Some((stored, rest)) = rest.split_first_chunk::<4>() else { return Err(wrong) };
    let Some((plain, rest)) = rest.split_first_chunk::<4>() else { return Err(wrong) };
    let Some((encoding, hash)) = rest.split_first() else { return Err(wrong) };
    let Ok(hash) = <[u8; 32]>::try_from(hash) else { return Err(wrong) };
    if *encoding != 0 {
        return Err(Kind::Unknown("chunk encoding", u32::from(*encoding)));
    }
    Ok(Chunk {
        stored_offset: u64::from_le_bytes(*offset),
        stored_bytes: u32::from_le_bytes(*stored),
        plain_bytes: u32::from_le_bytes(*plain),
        encoding: Encoding::Raw,
        hash,
    })
}

const fn place(bytes: [u8; 4]) -> Place {
    let [a, b, c, d] = bytes;
    Place { shard: u16::from_le_bytes([a, b]), page: u16::from_le_bytes([c, d]) }
}

fn runs_of_list(records: &[u8]) -> Result<Vec<Run>, Kind> {
    if records.is_empty() || !records.len().is_multiple_of(8) {
        return Err(Kind::Illegal(Reason::Record, "a list of runs is empty or has a wrong length"));
    }
    let runs = records.chunks_exact(8).filter_map(|record| match record {
        [f0, f1, n0, n1, place_bytes @ ..] => Some(Run {
            first: u16::from_le_bytes([*f0, *f1]),
            pages: u16::from_le_bytes([*n0, *n1]),
            place: place(place_bytes.try_into().ok()?),
        }),
        _ => None,
    });
    Ok(runs.collect())
}

fn runs_of_bitmap(start: Place, bits: &[u8]) -> Result<Vec<Run>, Kind> {
    if bits.len() != 128 || bits.iter().all(|byte| *byte == 0) {
        return Err(Kind::Illegal(Reason::Record, "a bitmap is empty or does not have 1,024 bits"));
    }
    let mut runs: Vec<Run> = Vec::new();
    let mut next = u32::from(start.page);
    for page in 0..PAGES_PER_SEGMENT {
        let set = bits.get(usize::from(page / 8)).is_some_and(|byte| byte >> (page % 8) & 1 == 1);
        if !set {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.first + run.pages == page => run.pages += 1,
            _ => {
                let stored = u16::try_from(next);
                let Ok(stored) = stored else {
                    return Err(Kind::Illegal(
                        Reason::PageRange,
                        "a page lies beyond the end of its shard",
                    ));
                };
                let place = Place { shard: start.shard, page: stored };
                runs.push(Run { first: page, pages: 1, place });
            }
        }
        next += 1;
    }
    Ok(runs)
}
