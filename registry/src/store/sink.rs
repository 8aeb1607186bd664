//! The open file of an upload, written past the page cache where the file system can.
//!
//! What is pushed is rarely read soon by this machine, and a page cache full of dirty pages makes
//! the sync at the end long: with direct writes the bytes are on the disk while the next ones
//! arrive, at half the processor time. Whole chunks at multiples of a chunk go directly; what is
//! shorter goes through the page cache, and so does everything where the file system has no direct
//! writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

use super::buffer::Buffer;
use super::checksum::CHUNK_LENGTH;
use super::upload_file::UploadFile;

/// How much is reserved on the disk ahead of what is written, as much again as there is within
/// these limits: few extents for large blobs, little for a client that sends less than it says.
const RESERVED_MIN: u64 = 8 << 20;
const RESERVED_MAX: u64 = 64 << 20;

/// An upload's file, open.
#[derive(Debug)]
pub(crate) struct Sink {
    file: File,
    direct: Option<File>,
    /// Where the upload will end as far as the client says; nothing is reserved beyond.
    end: u64,
    reserved: AtomicU64,
}

impl Sink {
    /// Opens an upload that exists. `received` bytes are there, `more` are announced.
    pub(crate) fn open(
        upload: &UploadFile,
        received: u64,
        more: u64,
    ) -> Result<Option<Self>, super::StoreError> {
        let Some(file) = upload.open()? else { return Ok(None) };
        let end = received.saturating_add(more);
        // One whole chunk must fit between two multiples of a chunk.
        let direct = received.next_multiple_of(CHUNK_LENGTH) + CHUNK_LENGTH <= end;
        let direct = if direct { upload.open_direct() } else { None };
        Ok(Some(Self { file, direct, end, reserved: AtomicU64::new(0) }))
    }

    /// Returns the file, through the page cache.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Writes a buffer at `offset`. Blocks.
    pub(crate) fn write(&self, buffer: &Buffer, offset: u64) -> io::Result<()> {
        let bytes = buffer.filled();
        let whole = buffer.is_chunk() && buffer.is_full() && offset.is_multiple_of(CHUNK_LENGTH);
        if let Some(direct) = self.direct.as_ref().filter(|_| whole) {
            self.reserve(offset);
            match direct.write_at(bytes, offset) {
                Ok(written) if written == bytes.len() => return Ok(()),
                // A file system may allow the flag and not the write; and after a short write the
                // rest is no longer aligned.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                Err(error) => return Err(error),
            }
        }
        self.file.write_all_at(bytes, offset)?;
        if whole {
            // Begins to write back what was just written, so that the sync at the end is short.
            let length = std::num::NonZeroU64::new(CHUNK_LENGTH);
            let _only_advice = fadvise(&self.file, offset, length, Advice::DontNeed);
        }
        Ok(())
    }

    /// Reserves room from `offset` on. A file system without that makes room as it goes.
    fn reserve(&self, offset: u64) {
        let reserved = self.reserved.load(Ordering::Relaxed).max(offset);
        if offset + CHUNK_LENGTH <= reserved {
            return;
        }
        let until = self.end.min(offset.saturating_add(offset.clamp(RESERVED_MIN, RESERVED_MAX)));
        let Some(length) = until.checked_sub(reserved).filter(|length| *length > 0) else { return };
        let flags = FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, flags, reserved, length).is_ok() {
            self.reserved.store(until, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
