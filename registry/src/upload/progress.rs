//! Where an upload stands.

use std::io;
use std::sync::Arc;

use kybernate_spec::{Algorithm, Hasher};
use rustix::io::{Errno, pread};

use super::{Arrival, UploadError};
use crate::store::{CHUNK_BYTES, ChunkSums, Store, StoreError, SumRun, UploadFile};

/// What is known of the bytes received so far. It is a value: going back is keeping the old one.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pub(crate) received: u64,
    pub(crate) algorithm: Algorithm,
    pub(crate) hasher: Hasher,
    pub(crate) sums: ChunkSums,
}

impl Progress {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        let hasher = Hasher::new(algorithm);
        Self { received: 0, algorithm, hasher, sums: ChunkSums::default() }
    }

    /// Takes the next bytes in. Returns checksums that are to be written now.
    pub(crate) fn update(&mut self, bytes: &[u8]) -> Option<SumRun> {
        self.hasher.update(bytes);
        self.sums.update(bytes);
        self.received += u64::try_from(bytes.len()).unwrap_or(0);
        self.sums.spill()
    }

    /// Whether the chunk follows what is there.
    pub(crate) fn expects(&self, arrival: &Arrival<'_>) -> Result<(), UploadError> {
        let Some(range) = arrival.range else { return Ok(()) };
        if range.start != self.received {
            return Err(UploadError::OutOfOrder { received: self.received });
        }
        match arrival.length {
            Some(length) if length != range.length => Err(UploadError::Length),
            _ => Ok(()),
        }
    }

    /// Chooses the algorithm of the digest the client gave, as long as nothing is hashed yet.
    pub(crate) fn or_for(self, algorithm: Algorithm) -> Self {
        if self.received == 0 && self.algorithm != algorithm { Self::new(algorithm) } else { self }
    }

    /// Makes the progress of a file again. Returns nothing when there is no file. Blocks.
    pub(crate) fn read(
        store: &Arc<Store>,
        upload: &UploadFile,
    ) -> Result<Option<Self>, StoreError> {
        let Some(file) = upload.open()? else { return Ok(None) };
        let read = || -> io::Result<Self> {
            let mut progress = Self::new(Algorithm::Sha256);
            read_through(store, &file, |bytes| {
                if let Some(run) = progress.update(bytes) {
                    run.write(&upload.checksums()?)?;
                }
                Ok(())
            })?;
            Ok(progress)
        };
        read().map(Some).map_err(StoreError::during("continue an upload"))
    }
}

/// Hands a file's bytes to `each`, a chunk at a time. Blocks.
pub(crate) fn read_through(
    store: &Arc<Store>,
    file: &std::fs::File,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = store.buffer(CHUNK_BYTES);
    let mut offset = 0;
    loop {
        buffer.clear();
        match pread(file, buffer.spare(), offset) {
            Ok(0) => return Ok(()),
            Ok(read) => buffer.advance(read),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        offset += u64::try_from(buffer.filled().len()).unwrap_or(0);
        each(buffer.filled())?;
    }
}
