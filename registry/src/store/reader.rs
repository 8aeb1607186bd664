//! Reading a blob: a chunk at a time, each checked before a byte of it leaves.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kybernate_spec::{Digest, Hasher};
use rustix::io::{Errno, pread};
use tracing::Span;

use super::checksum::{CHUNK_BYTES, CHUNK_LENGTH, sum};
use super::glance::{glance, read_exact_at};
use super::{Buffer, OpenBlob, Store};

/// Reads a range of a blob. Memory: one chunk at a time, whatever the length.
#[derive(Debug)]
pub struct BlobReader {
    store: Arc<Store>,
    blob: OpenBlob,
    position: u64,
    end: u64,
}

/// Why a blob could not be read further.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The stored bytes are not what was pushed. They have been moved away.
    #[error("stored content of {0} is corrupt")]
    Corrupt(Digest),
    /// Storage failed, which may pass.
    #[error("failed to read {0}")]
    Io(Digest, #[source] io::Error),
}

impl BlobReader {
    pub(crate) fn new(store: Arc<Store>, blob: OpenBlob, position: u64, end: u64) -> Self {
        Self { store, blob, position, end }
    }

    /// Whether everything that was wanted has been read.
    pub(crate) fn is_done(&self) -> bool {
        self.position >= self.end
    }

    /// Goes on with another part of the blob.
    pub(crate) fn aim(&mut self, part: Range<u64>) {
        (self.position, self.end) = (part.start, part.end);
    }

    /// Returns the next checked bytes and the reader for what follows, or nothing at the end.
    ///
    /// Cancellation loses nothing but the reader.
    pub async fn next(mut self) -> Result<Option<(Bytes, Self)>, ReadError> {
        if self.is_done() {
            return Ok(None);
        }
        let (mut reader, outcome) = match self.read_cached() {
            Some(chunk) => (self, Ok(chunk)),
            None => self.read_blocking().await?,
        };
        let chunk = match outcome {
            Ok(chunk) => chunk,
            Err(Fault::Io(error)) => return Err(ReadError::Io(reader.blob.digest, error)),
            Err(Fault::Corrupt(why)) => return Err(reader.condemn(why).await),
        };
        let start = reader.position - reader.chunk() * CHUNK_LENGTH;
        let wanted = usize::try_from(reader.end - reader.position).unwrap_or(usize::MAX);
        let start = usize::try_from(start).unwrap_or(usize::MAX).min(chunk.filled().len());
        let stop = start.saturating_add(wanted).min(chunk.filled().len());
        let bytes = chunk.into_bytes().slice(start..stop);
        reader.position += u64::try_from(bytes.len()).unwrap_or(0);
        Ok(Some((bytes, reader)))
    }

    fn chunk(&self) -> u64 {
        self.position / CHUNK_LENGTH
    }

    /// Returns how many bytes the current chunk has.
    fn chunk_length(&self) -> usize {
        let rest = self.blob.length.saturating_sub(self.chunk() * CHUNK_LENGTH);
        usize::try_from(rest).unwrap_or(usize::MAX).min(CHUNK_BYTES)
    }

    /// Reads the current chunk on the spot when it and its checksum are in memory: a hop to the
    /// blocking pool costs more than the copy.
    fn read_cached(&mut self) -> Option<Buffer> {
        let (chunk, length) = (self.chunk(), self.chunk_length());
        if let Some(table) = &mut self.blob.table {
            glance(|| table.load(chunk)).ok()?;
        }
        let mut buffer = self.empty_buffer();
        let spare = buffer.spare().get_mut(..length)?;
        let offset = chunk * CHUNK_LENGTH;
        glance(|| read_exact_at(self.blob.file.file(), spare, offset)).ok()?;
        buffer.advance(length);
        // A mismatch is told by the blocking read, which also knows how to tell it.
        self.matches(chunk, buffer.filled()).is_ok_and(|good| good).then_some(buffer)
    }

    async fn read_blocking(mut self) -> Result<(Self, Result<Buffer, Fault>), ReadError> {
        let digest = self.blob.digest.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let outcome = self.read();
            self.store.metrics().read.observe(began.elapsed());
            (self, outcome)
        });
        reading.await.map_err(|error| ReadError::Io(digest, io::Error::other(error)))
    }

    fn read(&mut self) -> Result<Buffer, Fault> {
        let chunk = self.chunk();
        let length = self.chunk_length();
        let mut buffer = self.empty_buffer();
        while buffer.filled().len() < length {
            let offset = chunk * CHUNK_LENGTH + u64::try_from(buffer.filled().len()).unwrap_or(0);
            let missing = length - buffer.filled().len();
            let spare = buffer.spare().get_mut(..missing).unwrap_or_default();
            match pread(&self.blob.file, spare, offset) {
                Ok(0) => return Err(Fault::Corrupt("it is shorter than it was")),
                Ok(read) => buffer.advance(read),
                Err(Errno::INTR) => {}
                // Also when the device says that it cannot: that may pass, and proves nothing.
                Err(error) => return Err(Fault::Io(error.into())),
            }
        }
        let good = self.matches(chunk, buffer.filled()).map_err(Fault::Io)?;
        if good { Ok(buffer) } else { Err(Fault::Corrupt("a checksum does not match")) }
    }

    fn matches(&mut self, chunk: u64, bytes: &[u8]) -> io::Result<bool> {
        let Some(table) = &mut self.blob.table else {
            let mut hasher = Hasher::new(self.blob.digest.algorithm());
            hasher.update(bytes);
            return Ok(hasher.finish() == self.blob.digest);
        };
        match table.load(chunk) {
            Ok(expected) => Ok(sum(bytes) == expected),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn empty_buffer(&self) -> Buffer {
        let whole = usize::try_from(self.blob.length).unwrap_or(usize::MAX);
        self.store.buffer(whole.min(CHUNK_BYTES))
    }

    async fn condemn(self, why: &'static str) -> ReadError {
        let digest = self.blob.digest.clone();
        let span = Span::current();
        let moving = tokio::task::spawn_blocking(move || {
            let _request = span.enter();
            self.store.quarantine(&self.blob.digest, &self.blob.file, why);
        });
        match moving.await {
            Ok(()) => ReadError::Corrupt(digest),
            Err(error) => ReadError::Io(digest, io::Error::other(error)),
        }
    }
}

#[derive(Debug)]
enum Fault {
    Corrupt(&'static str),
    Io(io::Error),
}

#[cfg(test)]
mod tests;
