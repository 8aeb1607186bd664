//! A checksum per chunk of a blob, made while it is pushed and checked on every read.
//!
//! ```text
//! offset size  field                      file <hex>.crc beside blob <hex>, little-endian
//! 0      8     "kybcrc64"
//! 8      4     version, 1
//! 12     4     chunk length, 1048576
//! 16     8     length of the blob
//! 24     8     CRC-64/NVME of bytes 0 to 23
//! 32     8×n   CRC-64/NVME of each chunk of the blob, in order
//! ```
//!
//! CRC-64 costs 0.08 CPU-s per GiB where SHA-256 costs 0.6, so bulk reads can afford it. A blob of
//! at most [`DIGEST_CHECKED_MAX`] bytes has no such file: it is checked against its digest, which
//! costs less than a second file would at push.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use crc_fast::CrcAlgorithm;

use super::glance;

/// Bytes covered by one checksum.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Bytes covered by one checksum, for arithmetic on offsets.
pub(crate) const CHUNK_LENGTH: u64 = 1 << 20;
/// Largest blob that is checked against its digest on each read instead of against checksums.
pub(crate) const DIGEST_CHECKED_MAX: u64 = 64 << 10;

/// Checksums kept in memory for one upload before they go to disk: 32 KiB cover 4 GiB.
const PENDING_MAX: usize = 4096;
/// Checksums read at once: 4 KiB cover 512 MiB.
const WINDOW: u64 = 512;
const MAGIC: &[u8; 8] = b"kybcrc64";
const VERSION: u32 = 1;
const HEADER_LENGTH: u64 = 32;

/// Checksums a run of bytes that comes in pieces.
#[derive(Clone, Debug)]
pub(crate) struct ChunkSums {
    current: crc_fast::Digest,
    room: usize,
    first: u64,
    pending: Vec<u64>,
}

/// Checksums of consecutive chunks, ready for the file.
#[derive(Debug)]
pub(crate) struct SumRun {
    first: u64,
    sums: Vec<u64>,
}

/// Looks up the checksums of a stored blob.
#[derive(Debug)]
pub(crate) struct ChunkTable {
    file: File,
    chunks: u64,
    first: u64,
    window: Vec<u64>,
}

/// Returns the checksum of one chunk.
pub(crate) fn sum(chunk: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, chunk)
}

impl Default for ChunkSums {
    fn default() -> Self {
        let current = crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme);
        Self { current, room: CHUNK_BYTES, first: 0, pending: Vec::new() }
    }
}

impl ChunkSums {
    /// Takes the next bytes in.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while let Some((head, tail)) = bytes.split_at_checked(self.room) {
            self.current.update(head);
            self.pending.push(self.current.finalize_reset());
            self.room = CHUNK_BYTES;
            bytes = tail;
        }
        if !bytes.is_empty() {
            self.current.update(bytes);
            self.room -= bytes.len();
        }
    }

    /// Returns the finished checksums once they are many, so that memory does not grow with the
    /// blob.
    pub(crate) fn spill(&mut self) -> Option<SumRun> {
        (self.pending.len() >= PENDING_MAX).then(|| self.take())
    }

    /// Returns the checksums not yet spilled, the last chunk's included.
    pub(crate) fn finish(mut self) -> SumRun {
        if self.room < CHUNK_BYTES {
            self.pending.push(self.current.finalize());
        }
        self.take()
    }

    fn take(&mut self) -> SumRun {
        let sums = std::mem::take(&mut self.pending);
        let run = SumRun { first: self.first, sums };
        self.first += run.count();
        run
    }
}

impl SumRun {
    /// Writes the checksums to their place in the file.
    pub(crate) fn write(&self, file: &File) -> io::Result<()> {
        let bytes: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        file.write_all_at(&bytes, HEADER_LENGTH + self.first * 8)
    }

    /// Returns the file of a blob of `length` bytes, when these are all its checksums.
    pub(crate) fn file(&self, length: u64) -> Vec<u8> {
        let sums = self.sums.iter().flat_map(|sum| sum.to_le_bytes());
        header(length).into_iter().chain(sums).collect()
    }

    fn count(&self) -> u64 {
        u64::try_from(self.sums.len()).unwrap_or(u64::MAX)
    }
}

/// Writes the header of the file for a blob of `length` bytes, which makes the file valid.
pub(crate) fn write_header(file: &File, length: u64) -> io::Result<()> {
    file.set_len(HEADER_LENGTH + length.div_ceil(CHUNK_LENGTH) * 8)?;
    file.write_all_at(&header(length), 0)
}

fn header(length: u64) -> Vec<u8> {
    let chunk = u32::try_from(CHUNK_BYTES).unwrap_or(u32::MAX);
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(chunk.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(sum(&bytes).to_le_bytes());
    bytes
}

impl ChunkTable {
    /// Reads the header of `file`. Returns nothing when it does not describe a blob of `length`
    /// bytes, so also for a blob that was cut or has grown.
    pub(crate) fn open(file: File, length: u64) -> io::Result<Option<Self>> {
        let chunks = length.div_ceil(CHUNK_LENGTH);
        if file.metadata()?.len() != HEADER_LENGTH + chunks * 8 {
            return Ok(None);
        }
        let mut found = [0; 32];
        glance::read_exact_at(&file, &mut found, 0)?;
        let good = found.as_slice() == header(length);
        Ok(good.then_some(Self { file, chunks, first: 0, window: Vec::new() }))
    }

    /// Returns the checksum of a chunk when it is in memory.
    pub(crate) fn cached(&self, chunk: u64) -> Option<u64> {
        let at = chunk.checked_sub(self.first)?;
        self.window.get(usize::try_from(at).ok()?).copied()
    }

    /// Returns the checksum of a chunk, from the file when it must. Blocks.
    pub(crate) fn load(&mut self, chunk: u64) -> io::Result<u64> {
        if let Some(sum) = self.cached(chunk) {
            return Ok(sum);
        }
        let count = self.chunks.saturating_sub(chunk).min(WINDOW);
        let mut bytes = vec![0; usize::try_from(count * 8).unwrap_or(0)];
        glance::read_exact_at(&self.file, &mut bytes, HEADER_LENGTH + chunk * 8)?;
        let (sums, _) = bytes.as_chunks::<8>();
        self.window = sums.iter().map(|sum| u64::from_le_bytes(*sum)).collect();
        self.first = chunk;
        self.cached(chunk).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests;
