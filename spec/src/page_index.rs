//! The page index: where each page of each bulk file is, and what each chunk hashes to.
//!
//! ```text
//! header, 32 bytes    magic "KYBPAGES" | version u16 | hash u8 | flags u8 | shards u32 | files u32
//!                     | chunk bytes u32 | page bytes u32 | zero u32
//! then records        length u32 (of what follows) | kind u8 | payload
//!   1 shard           one per shard, in the order of the manifest's layers; payload: its chunks, each
//!                     stored offset u64 | stored length u32 | plain length u32 | encoding u8 | hash [32]
//!   2 file            file length u64 | name
//!   then, per 4 MiB of the file, one of
//!   3 hole            nothing is stored
//!   4 run             every page, from: shard u16 | page u16
//!   5 bitmap          the pages whose bit is set, from: shard u16 | page u16 | bits [128]
//!   6 runs            n × ( page in the segment u16 | pages u16 | shard u16 | page u16 )
//!   0 end             nothing follows
//! ```
//!
//! All numbers are little-endian. Shards come first, so a reader knows every shard's size before it
//! meets an extent. The index is written and read in order and never held whole: [`Reader`] keeps
//! 8 bytes per shard, [`write_header`] and its siblings keep nothing.

use std::io::{self, Read, Write};

mod read;

pub use self::read::{Cursor, PageIndexError, PageIndexErrorKind, Reader, Record};

/// Version of the binary format.
pub const VERSION: u16 = 1;
/// Bytes of a chunk: the unit of verification and of range transfer.
pub const CHUNK_BYTES: u32 = 4 << 20;
/// Bytes of a file that one segment record describes.
pub const SEGMENT_BYTES: u32 = 4 << 20;
/// Bytes of a page.
pub const PAGE_BYTES: u32 = 4096;
/// Pages of a full segment, and of a full chunk.
pub const PAGES_PER_SEGMENT: u16 = 1024;
/// Largest shard, in bytes: registries that limit blobs at all accept this, and a page's place in
/// its shard fits 16 bits.
pub const SHARD_BYTES_MAX: u64 = 256 << 20;
/// Most shards of a checkpoint: their place in the manifest fits 16 bits.
pub const SHARDS_MAX: u32 = 1 << 16;
/// Most files of a page index; one per process and then some.
pub const FILES_MAX: u32 = 1 << 20;

const MAGIC: [u8; 8] = *b"KYBPAGES";
const CHUNK_RECORD_BYTES: usize = 49;

/// What hashes the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkHash {
    /// BLAKE3 with 256 bits of output.
    Blake3,
    /// SHA-256.
    Sha256,
}

/// How a chunk's bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As they are. The only encoding of version 1.
    Raw,
}

/// One chunk of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where in the stored blob it begins.
    pub stored_offset: u64,
    /// Bytes in the stored blob.
    pub stored_bytes: u32,
    /// Bytes after decoding.
    pub plain_bytes: u32,
    /// How the bytes are stored.
    pub encoding: Encoding,
    /// Hash over the stored bytes.
    pub hash: [u8; 32],
}

/// The beginning of a page index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What hashes the chunks.
    pub hash: ChunkHash,
    /// Number of shards.
    pub shards: u32,
    /// Number of files.
    pub files: u32,
}

/// Where a stored page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Which shard.
    pub shard: u16,
    /// Which page of it.
    pub page: u16,
}

/// Consecutive pages of a segment that are consecutive in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First page within the segment.
    pub first: u16,
    /// Number of pages, at least 1.
    pub pages: u16,
    /// Where the first page is stored.
    pub place: Place,
}

/// Writes the header.
pub fn write_header(out: &mut impl Write, header: &Header) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    let hash = match header.hash {
        ChunkHash::Blake3 => 1_u8,
        ChunkHash::Sha256 => 2,
    };
    out.write_all(&[hash, 0])?;
    for number in [header.shards, header.files, CHUNK_BYTES, PAGE_BYTES, 0] {
        out.write_all(&number.to_le_bytes())?;
    }
    Ok(())
}

/// Writes a shard's chunk table.
pub fn write_shard(out: &mut impl Write, chunks: &[Chunk]) -> io::Result<()> {
    let mut payload = Vec::with_capacity(chunks.len() * CHUNK_RECORD_BYTES);
    for chunk in chunks {
        payload.extend_from_slice(&chunk.stored_offset.to_le_bytes());
        payload.extend_from_slice(&chunk.stored_bytes.to_le_bytes());
        payload.extend_from_slice(&chunk.plain_bytes.to_le_bytes());
        payload.push(match chunk.encoding {
            Encoding::Raw => 0,
        });
        payload.extend_from_slice(&chunk.hash);
    }
    write_record(out, 1, &payload)
}

/// Begins a file. Its segments must follow, [`segments`] of them.
pub fn write_file(out: &mut impl Write, name: &str, length: u64) -> io::Result<()> {
    let mut payload = length.to_le_bytes().to_vec();
    payload.extend_from_slice(name.as_bytes());
    write_record(out, 2, &payload)
}

/// Writes one segment in its shortest form. `pages` is the number of pages the segment has: 1,024
/// but in the last one of a file. `runs` are in order and do not overlap.
pub fn write_segment(out: &mut impl Write, pages: u16, runs: &[Run]) -> io::Result<()> {
    let [first, rest @ ..] = runs else {
        return write_record(out, 3, &[]);
    };
    let place = |place: Place| {
        let [a, b] = place.shard.to_le_bytes();
        let [c, d] = place.page.to_le_bytes();
        [a, b, c, d]
    };
    if rest.is_empty() && first.first == 0 && first.pages == pages {
        return write_record(out, 4, &place(first.place));
    }
    // A bitmap says where pages are, so it needs them stored one after another in one shard.
    let consecutive = runs.windows(2).all(|pair| match pair {
        [a, b] => {
            a.place.shard == b.place.shard
                && a.place.page.checked_add(a.pages) == Some(b.place.page)
        }
        _ => true,
    });
    if consecutive && runs.len() * 8 > 132 {
        let mut payload = place(first.place).to_vec();
        payload.extend_from_slice(&bitmap(runs));
        return write_record(out, 5, &payload);
    }
    let mut payload = Vec::with_capacity(runs.len() * 8);
    for run in runs {
        payload.extend_from_slice(&run.first.to_le_bytes());
        payload.extend_from_slice(&run.pages.to_le_bytes());
        payload.extend_from_slice(&place(run.place));
    }
    write_record(out, 6, &payload)
}

/// Writes the end. Anything after it is refused by readers.
pub fn write_end(out: &mut impl Write) -> io::Result<()> {
    write_record(out, 0, &[])
}

/// Copies the records of files and segments, and puts `numbers[old]` for each shard's number.
/// `records` are what [`write_file`] and [`write_segment`] wrote.
pub fn renumber(records: &mut impl Read, out: &mut impl Write, numbers: &[u16]) -> io::Result<()> {
    let unknown = || io::Error::from(io::ErrorKind::InvalidData);
    let mut record = Vec::new();
    loop {
        let mut length = [0; 4];
        match records.read(&mut length)? {
            0 => return Ok(()),
            read => {
                let rest = length.get_mut(read..).unwrap_or_default();
                records.read_exact(rest)?;
            }
        }
        record.clear();
        let wanted = u64::from(u32::from_le_bytes(length));
        let read = records.by_ref().take(wanted).read_to_end(&mut record)?;
        let (kind, payload) = record.split_first_mut().ok_or_else(unknown)?;
        if u64::try_from(read) != Ok(wanted) {
            return Err(unknown());
        }
        // Where the numbers are: at the start of a run or bitmap, in each of a list's runs.
        let places = match kind {
            4 | 5 => payload.get_mut(..2).into_iter().collect::<Vec<_>>(),
            6 => payload.chunks_exact_mut(8).filter_map(|run| run.get_mut(4..6)).collect(),
            _ => Vec::new(),
        };
        for place in places {
            if let [a, b] = place {
                let old = usize::from(u16::from_le_bytes([*a, *b]));
                let new = numbers.get(old).ok_or_else(unknown)?;
                [*a, *b] = new.to_le_bytes();
            }
        }
        out.write_all(&length)?;
        out.write_all(&record)?;
    }
}

/// Returns how many segments a file of `length` bytes has.
pub const fn segments(length: u64) -> u64 {
    length.div_ceil(4 << 20)
}

/// Returns the most bytes a page index over files of `file_bytes` may have: 0.25 % and 1 MiB.
pub const fn index_bytes_max(file_bytes: u64) -> u64 {
    (file_bytes / 400).saturating_add(1 << 20)
}

fn bitmap(runs: &[Run]) -> [u8; 128] {
    let mut bits = [0_u8; 128];
    for run in runs {
        for page in run.first..run.first.saturating_add(run.pages) {
            if let Some(byte) = bits.get_mut(usize::from(page / 8)) {
                *byte |= 1 << (page % 8);
            }
        }
    }
    bits
}

fn write_record(out: &mut impl Write, kind: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len() + 1).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&[kind])?;
    out.write_all(payload)
}

#[cfg(test)]
mod tests;
