//! Blobs up and down.

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use backon::Retryable;
use futures::stream::{self, StreamExt, TryStreamExt};
use kybernate_spec::{Descriptor, Digest, RepositoryName};
use oci_client::client::{BlobResponse, SizedStream};
use oci_client::errors::OciDistributionError;

use super::error::is_transient;
use super::patience::{REPEATS, pauses, persist, tell, while_moving, within_stall};
use super::{Remote, image};
use crate::checked::length;
use crate::store::{BlobSource, BlobStream, StoreError, StoreErrorKind};

/// Why an upload failed: what was to be sent could not be read, or it could not be sent.
enum UploadFailure {
    Source(StoreError),
    Registry(StoreErrorKind),
}

/// A download under way.
struct Download {
    remote: Remote,
    descriptor: Descriptor,
    next: u64,
    end: u64,
    body: Option<SizedStream>,
    breaks: usize,
}

impl Remote {
    pub(super) async fn find_blob(&self, digest: &Digest) -> Result<bool, StoreErrorKind> {
        self.shared.documents.exists(&format!("blobs/{digest}")).await
    }

    pub(super) async fn link_blob(
        &self,
        digest: &Digest,
        from: &RepositoryName,
    ) -> Result<bool, StoreErrorKind> {
        let target = self.image("latest");
        let source = image(&self.shared.registry, from, "latest");
        let digest = digest.to_string();
        let linked =
            persist(|| within_stall(self.shared.client.mount_blob(&target, &source, &digest)))
                .await;
        match linked {
            Ok(()) => Ok(true),
            // Accepted as an upload instead: the registry does not know the blob, or does not mount.
            Err(
                StoreErrorKind::Registry(OciDistributionError::SpecViolationError(_))
                | StoreErrorKind::NotFound
                | StoreErrorKind::Unauthorized,
            ) => Ok(false),
            Err(kind) => Err(kind),
        }
    }

    pub(super) async fn upload(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        let attempts = AtomicUsize::new(0);
        let attempt = async || {
            // A broken PUT is an unknown outcome: the registry may have all of it.
            if attempts.fetch_add(1, Ordering::Relaxed) > 0
                && self.find_blob(&descriptor.digest).await.map_err(UploadFailure::Registry)?
            {
                return Ok(());
            }
            self.upload_once(descriptor, source).await
        };
        let pushed = attempt
            .retry(pauses())
            .when(|failure| matches!(failure, UploadFailure::Registry(kind) if is_transient(kind)))
            .notify(|failure, pause| {
                if let UploadFailure::Registry(kind) = failure {
                    tell(kind, pause);
                }
            })
            .await;
        pushed.map_err(|failure| match failure {
            UploadFailure::Source(error) => error,
            UploadFailure::Registry(kind) => {
                self.error("push blob", &format!("@{}", descriptor.digest), kind)
            }
        })
    }

    async fn upload_once(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), UploadFailure> {
        let content = source.open(descriptor).await.map_err(UploadFailure::Source)?;
        let sent = Arc::new(AtomicU64::new(0));
        // Keeps why reading failed, which the HTTP client would only repeat as text. Held for an
        // assignment only, never across an `.await`.
        let broken = Arc::new(Mutex::new(None));
        let body = {
            let (sent, broken) = (Arc::clone(&sent), Arc::clone(&broken));
            content
                .inspect_ok(move |bytes| {
                    sent.fetch_add(length(bytes), Ordering::Relaxed);
                })
                .map_err(move |error| {
                    let told = error.to_string();
                    *broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    OciDistributionError::IoError(io::Error::other(told))
                })
        };
        let target = self.image("latest");
        let digest = descriptor.digest.to_string();
        let push =
            self.shared.client.push_blob_stream(&target, body, &digest, Some(descriptor.size));
        let pushed = while_moving(&sent, descriptor.size, push).await;
        match (pushed, broken.lock().unwrap_or_else(PoisonError::into_inner).take()) {
            (_, Some(error)) => Err(UploadFailure::Source(error)),
            // Some registries acknowledge without saying where the blob is.
            (
                Ok(_)
                | Err(StoreErrorKind::Registry(OciDistributionError::RegistryNoLocationError)),
                _,
            ) => Ok(()),
            (Err(kind), None) => Err(UploadFailure::Registry(kind)),
        }
    }

    pub(super) async fn download(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        length: u64,
    ) -> Result<BlobStream, StoreError> {
        let mut download = Download {
            remote: self.clone(),
            descriptor: descriptor.clone(),
            next: offset,
            end: offset.saturating_add(length),
            body: None,
            breaks: 0,
        };
        // Opened here, so that a missing blob is told before the first byte is asked for.
        download.open().await.map_err(|kind| download.error(kind))?;
        let stream =
            stream::try_unfold(download, async |mut download| match download.read().await {
                Ok(bytes) => Ok(bytes.map(|bytes| (bytes, download))),
                Err(kind) => Err(download.error(kind)),
            });
        Ok(stream.boxed())
    }
}

impl Download {
    /// Returns the next bytes, or nothing after the last ones.
    async fn read(&mut self) -> Result<Option<bytes::Bytes>, StoreErrorKind> {
        while self.next < self.end {
            self.open().await?;
            let Some(body) = &mut self.body else { break };
            match within_stall(body.try_next()).await {
                Ok(Some(mut bytes)) => {
                    let rest = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
                    bytes.truncate(rest);
                    self.next = self.next.saturating_add(length(&bytes));
                    self.breaks = 0;
                    return Ok(Some(bytes));
                }
                Ok(None) => self.interrupted(ended_early())?,
                Err(kind) => self.interrupted(kind)?,
            }
        }
        Ok(None)
    }

    /// Sees to it that there is a body that goes on at the next byte.
    async fn open(&mut self) -> Result<(), StoreErrorKind> {
        if self.body.is_some() || self.next >= self.end {
            return Ok(());
        }
        let image = self.remote.image("latest");
        let digest = self.descriptor.digest.to_string();
        let client = &self.remote.shared.client;
        let (offset, length) = (self.next, self.end - self.next);
        let got = persist(|| {
            within_stall(client.pull_blob_stream_partial(&image, &*digest, offset, Some(length)))
        });
        self.body = Some(match got.await? {
            BlobResponse::Partial(body) => body,
            BlobResponse::Full(body) => skip(body, offset),
        });
        Ok(())
    }

    /// Gives up after too many breaks in a row without a byte between them.
    fn interrupted(&mut self, kind: StoreErrorKind) -> Result<(), StoreErrorKind> {
        self.body = None;
        self.breaks += 1;
        if self.breaks > REPEATS || !is_transient(&kind) {
            return Err(kind);
        }
        let reason = kybernate_spec::chain(&kind);
        tracing::debug!(blob.digest = %self.descriptor.digest, offset = self.next, %reason,
            "a download broke and is resumed");
        Ok(())
    }

    fn error(&self, kind: StoreErrorKind) -> StoreError {
        self.remote.error("pull blob", &format!("@{}", self.descriptor.digest), kind)
    }
}

fn ended_early() -> StoreErrorKind {
    StoreErrorKind::Io(io::ErrorKind::UnexpectedEof.into())
}

/// Drops the first bytes of a body, for registries that do not know ranges.
fn skip(body: SizedStream, bytes: u64) -> SizedStream {
    let SizedStream { content_length, digest_header_value, stream } = body;
    let mut left = bytes;
    let stream = stream
        .try_filter_map(move |mut bytes| {
            let drop = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            let kept = bytes.split_off(drop);
            left -= length(&bytes);
            std::future::ready(Ok((!kept.is_empty()).then_some(kept)))
        })
        .boxed();
    SizedStream { content_length, digest_header_value, stream }
}
