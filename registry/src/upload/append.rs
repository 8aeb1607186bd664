//! From a body to a file: hashed as it arrives, written a chunk at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use kybernate_spec::{Digest, Hasher, RepositoryName};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::progress::{Progress, read_through};
use super::{Arrival, UploadError, Uploads};
use crate::places::Pace;
use crate::quota::Allowance;
use crate::store::{
    Buffer, CHUNK_BYTES, CHUNK_LENGTH, Commit, Sink, Store, StoreError, SumRun, UploadFile,
};
use crate::trace;

/// How long a client may send nothing. There is no limit on the whole: a push takes its time.
const SILENCE_MAX: Duration = Duration::from_mins(1);

/// What a body has added.
#[derive(Debug)]
pub(crate) struct Appended {
    /// How the body ended.
    pub(crate) outcome: Result<(), UploadError>,
    /// What is not yet in the file.
    pub(crate) remainder: Remainder,
}

/// Received bytes on their way to the file: one chunk being filled, one being written.
#[derive(Debug)]
pub(crate) struct Remainder {
    progress: Progress,
    file: Arc<Sink>,
    buffer: Buffer,
    writing: Option<JoinHandle<io::Result<Buffer>>>,
}

/// Where a body goes.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    pub(crate) uploads: &'a Uploads,
    /// The upload's file, open.
    pub(crate) file: Arc<Sink>,
    pub(crate) upload: &'a UploadFile,
    pub(crate) repository: &'a RepositoryName,
    /// What the repository has room for.
    pub(crate) allowance: &'a mut Allowance,
}

/// Takes a body in. Fails when the file cannot be written; how the body ended is in the result.
pub(crate) async fn append(
    target: Target<'_>,
    before: Progress,
    arrival: Arrival<'_>,
    mut superseded: watch::Receiver<u64>,
) -> Result<Appended, UploadError> {
    let Target { uploads, file, upload, repository, allowance } = target;
    let store = &uploads.store;
    let Arrival { body, range, length, .. } = arrival;
    let limit = range.map_or(u64::MAX, |range| range.length);
    // Up to the next multiple of a chunk, so that what follows can be written directly.
    let capacity = CHUNK_LENGTH - before.received % CHUNK_LENGTH;
    let capacity = usize::try_from(length.map_or(capacity, |length| length.min(capacity)));
    let capacity = capacity.unwrap_or(CHUNK_BYTES);
    let mut remainder =
        Remainder { progress: before, file, buffer: store.buffer(capacity), writing: None };
    let start = remainder.progress.received;
    let mut pace = Pace::new(&uploads.receiving);
    let outcome = loop {
        let frame = tokio::select! {
            frame = next_paced(body, &mut pace) => frame,
            Ok(()) = superseded.changed() => break Err(UploadError::Superseded),
        };
        let received = remainder.progress.received - start;
        match frame {
            Ok(Some(bytes)) => {
                let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                if received.saturating_add(more) > limit {
                    break Err(UploadError::Length);
                }
                let all = remainder.progress.received.saturating_add(more);
                if let Err(refused) = uploads.cover(allowance, repository, all).await {
                    break Err(refused.into());
                }
                remainder.take(store, upload, &bytes).await?;
            }
            Ok(None) if range.is_some() && received != limit => break Err(UploadError::Length),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    trace::note("kybernate.received.size", remainder.progress.received - start);
    Ok(Appended { outcome, remainder })
}

/// Returns the next bytes of a body, or nothing at its end. A client that is silent for too long is
/// an error.
pub(crate) async fn next_frame(body: &mut Body) -> Result<Option<Bytes>, UploadError> {
    loop {
        let Ok(frame) = tokio::time::timeout(SILENCE_MAX, body.frame()).await else {
            return Err(UploadError::Stalled);
        };
        match frame {
            None => return Ok(None),
            // Trailers say nothing here.
            Some(Ok(frame)) => match frame.into_data() {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(_trailers) => {}
            },
            Some(Err(error)) => {
                tracing::debug!(%error, "a body ended early");
                return Err(UploadError::Interrupted);
            }
        }
    }
}

/// Returns the next bytes of a body. A client that sends too little while others wait for its place
/// is an error too.
pub(crate) async fn next_paced(
    body: &mut Body,
    pace: &mut Pace,
) -> Result<Option<Bytes>, UploadError> {
    let began = Instant::now();
    let frame = next_frame(body).await?;
    if let Some(bytes) = &frame {
        pace.moved(began.elapsed(), u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        if pace.is_too_slow(Duration::ZERO) {
            return Err(UploadError::Stalled);
        }
    }
    Ok(frame)
}

impl Remainder {
    async fn take(
        &mut self,
        store: &Arc<Store>,
        upload: &UploadFile,
        bytes: &Bytes,
    ) -> Result<(), UploadError> {
        let mut position = self.progress.received;
        let spilled = self.progress.update(bytes);
        let mut rest = bytes.as_ref();
        while !rest.is_empty() {
            if self.buffer.is_full() {
                self.swap(store, position).await?;
            }
            let copied = self.buffer.fill_from(rest);
            position += u64::try_from(copied).unwrap_or(0);
            rest = rest.get(copied..).unwrap_or_default();
        }
        match spilled {
            Some(run) => write_sums(upload.clone(), run).await.map_err(UploadError::from),
            None => Ok(()),
        }
    }

    /// Begins to write the buffer, whose bytes end at `position`, and goes on with another.
    async fn swap(&mut self, store: &Arc<Store>, position: u64) -> Result<(), UploadError> {
        let written = self.written().await?.filter(Buffer::is_chunk);
        let mut next = written.unwrap_or_else(|| store.buffer(CHUNK_BYTES));
        next.clear();
        let full = std::mem::replace(&mut self.buffer, next);
        let offset = position.saturating_sub(u64::try_from(full.filled().len()).unwrap_or(0));
        let file = Arc::clone(&self.file);
        self.writing = Some(tokio::task::spawn_blocking(move || {
            file.write(&full, offset)?;
            Ok(full)
        }));
        Ok(())
    }

    /// Waits for the write under way.
    async fn written(&mut self) -> Result<Option<Buffer>, StoreError> {
        let Some(writing) = self.writing.take() else { return Ok(None) };
        let written = writing.await.map_err(io::Error::other).flatten();
        written.map(Some).map_err(StoreError::during("write an upload"))
    }

    /// Writes what is left and returns where the upload stands.
    pub(crate) async fn flush(mut self, store: &Arc<Store>) -> Result<Progress, UploadError> {
        if !self.buffer.filled().is_empty() {
            self.swap(store, self.progress.received).await?;
        }
        self.written().await?;
        Ok(self.progress)
    }

    /// Forgets what came, so that the file is as it was when it had `length` bytes.
    pub(crate) async fn rewind(mut self, length: u64) -> Result<(), UploadError> {
        // A write that is still under way would meet the ones that come next.
        self.written().await?;
        let file = self.file;
        let cutting = tokio::task::spawn_blocking(move || file.file().set_len(length));
        let cut = cutting.await.map_err(io::Error::other).flatten();
        cut.map_err(StoreError::during("rewind an upload")).map_err(UploadError::from)
    }

    /// Proves the digest and returns what is to be committed.
    pub(crate) async fn finish(
        mut self,
        store: &Arc<Store>,
        digest: &Digest,
        repository: &RepositoryName,
        upload: &UploadFile,
    ) -> Result<Commit, UploadError> {
        let same_algorithm = self.progress.algorithm == digest.algorithm();
        if !same_algorithm && !self.buffer.filled().is_empty() {
            // What is to be read again must be in the file.
            self.swap(store, self.progress.received).await?;
            self.buffer.clear();
        }
        self.written().await?;
        let Self { progress, file, buffer, .. } = self;
        let actual = if same_algorithm {
            progress.hasher.finish()
        } else {
            hash_again(store, &file, digest, progress.received).await?
        };
        if actual != *digest {
            return Err(UploadError::Digest { expected: digest.clone(), actual });
        }
        Ok(Commit {
            repository: repository.clone(),
            digest: actual,
            upload: upload.clone(),
            file,
            rest: buffer,
            length: progress.received,
            sums: progress.sums.finish(),
        })
    }
}

/// Hashes a file with the algorithm the client turned out to use, after all bytes were hashed with
/// another: only clients that push SHA-512 in chunks without saying so pay this.
async fn hash_again(
    store: &Arc<Store>,
    file: &Arc<Sink>,
    digest: &Digest,
    length: u64,
) -> Result<Digest, StoreError> {
    let (file, algorithm) = (Arc::clone(file), digest.algorithm());
    crate::app::blocking(store, move |store| {
        let mut hasher = Hasher::new(algorithm);
        let mut hash = || {
            // An interrupted PUT may have left bytes behind the end.
            file.file().set_len(length)?;
            read_through(store, file.file(), |bytes| {
                hasher.update(bytes);
                Ok(())
            })
        };
        hash().map_err(StoreError::during("read an upload again"))?;
        Ok(hasher.finish())
    })
    .await
}

async fn write_sums(upload: UploadFile, run: SumRun) -> Result<(), StoreError> {
    let writing = tokio::task::spawn_blocking(move || run.write(&upload.checksums()?));
    let written = writing.await.map_err(io::Error::other).flatten();
    written.map_err(StoreError::during("write an upload's checksums"))
}

#[cfg(test)]
mod tests;
