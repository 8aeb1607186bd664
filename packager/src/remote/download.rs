//! Blobs down. A download that breaks off goes on at the next byte.

use std::io;

use futures::stream::{self, BoxStream, StreamExt as _, TryStreamExt as _};
use kybernate_spec::Descriptor;
use oci_client::errors::OciDistributionError;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_RANGE, RANGE};
use reqwest::{Response, StatusCode};

use super::Remote;
use super::documents::text;
use super::patience::{Patience, persist, within_stall};
use super::tokens::Access;
use crate::checked::length;
use crate::store::{BlobStream, StoreError, StoreErrorKind};

/// What is said of a blob that is not there.
const NAMED: &str = ", which a manifest names: the registry's log tells whether it was removed or found to be damaged";

/// The bytes of one reply.
type Body = BoxStream<'static, Result<bytes::Bytes, reqwest::Error>>;

/// A download under way.
struct Download {
    remote: Remote,
    descriptor: Descriptor,
    begin: u64,
    next: u64,
    end: u64,
    body: Option<Body>,
    patience: Patience,
}

impl Remote {
    pub(super) async fn download(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        length: u64,
    ) -> Result<BlobStream, StoreError> {
        let mut download = Download {
            remote: self.clone(),
            descriptor: descriptor.clone(),
            begin: offset,
            next: offset,
            end: offset.saturating_add(length),
            body: None,
            patience: Patience::default(),
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

    /// Whether the registry, and whoever is before it, answers with a part of a blob when it is asked
    /// for one. All of a blob is as good an answer by the standard (RFC 9110, 14.2).
    pub async fn gives_parts(&self, descriptor: &Descriptor) -> Result<bool, StoreError> {
        let (last, end) = (descriptor.size.saturating_sub(1), descriptor.size);
        match persist(|| self.ask(descriptor, last, end)).await {
            Ok(reply) => Ok(last == 0 || reply.status() == StatusCode::PARTIAL_CONTENT),
            Err(kind) => Err(self.error("pull blob", &format!("@{}", descriptor.digest), kind)),
        }
    }

    /// Asks for a part of a blob and checks that it is that part of that blob.
    async fn ask(
        &self,
        descriptor: &Descriptor,
        next: u64,
        end: u64,
    ) -> Result<Response, StoreErrorKind> {
        let documents = &self.shared.documents;
        let address = documents.address(&format!("blobs/{}", descriptor.digest))?;
        // What is compressed on the way has neither the length nor the offsets asked for.
        let mut request = documents.http().get(address.clone()).header(ACCEPT_ENCODING, "identity");
        if next > 0 || end < descriptor.size {
            request = request.header(RANGE, format!("bytes={next}-{}", end.saturating_sub(1)));
        }
        let request = documents.sign(request, &address, Access::Pull).await?;
        let reply = within_stall(request.send()).await?;
        let range = text(reply.headers(), CONTENT_RANGE.as_str());
        let (first, total) = range.as_deref().map_or((None, None), parse);
        let total = match reply.status() {
            StatusCode::OK => reply.content_length(),
            _ => total,
        };
        if let Some(total) = total
            && total != descriptor.size
            && [StatusCode::OK, StatusCode::PARTIAL_CONTENT, StatusCode::RANGE_NOT_SATISFIABLE]
                .contains(&reply.status())
        {
            let wrong = format!("the registry has {total} bytes instead of {}", descriptor.size);
            return Err(StoreErrorKind::Mismatch(wrong));
        }
        let reply = documents.check(reply).await?;
        match reply.status() {
            StatusCode::OK => Ok(reply),
            StatusCode::PARTIAL_CONTENT if first == Some(next) => Ok(reply),
            status => {
                let text = format!("it answered {status} with another part than was asked for");
                Err(OciDistributionError::SpecViolationError(text).into())
            }
        }
    }
}

impl Download {
    /// Returns the next bytes, or nothing after the last ones.
    async fn read(&mut self) -> Result<Option<bytes::Bytes>, StoreErrorKind> {
        while self.next < self.end {
            self.open().await.map_err(|kind| self.cut_short(kind))?;
            let Some(body) = &mut self.body else { break };
            let broken = match within_stall(body.try_next()).await {
                Ok(Some(mut bytes)) => {
                    let rest = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
                    bytes.truncate(rest);
                    self.next = self.next.saturating_add(length(&bytes));
                    self.patience = Patience::default();
                    return Ok(Some(bytes));
                }
                Ok(None) => ended_early(),
                Err(kind) => kind,
            };
            self.body = None;
            tracing::debug!(blob.digest = %self.descriptor.digest, offset = self.next,
                "a download broke and is resumed");
            self.patience.wait(broken).await?;
        }
        Ok(None)
    }

    /// Sees to it that there is a body that goes on at the next byte.
    async fn open(&mut self) -> Result<(), StoreErrorKind> {
        if self.body.is_some() || self.next >= self.end {
            return Ok(());
        }
        let (next, end) = (self.next, self.end);
        let reply = persist(|| self.remote.ask(&self.descriptor, next, end)).await?;
        let whole = reply.status() == StatusCode::OK;
        let body = reply.bytes_stream().boxed();
        self.body = Some(if whole { skip(body, next) } else { body });
        Ok(())
    }

    /// Says what it means that there is nothing at the next byte: a registry that finds what it sends to
    /// be damaged ends its reply there, and has the blob no more.
    fn cut_short(&self, kind: StoreErrorKind) -> StoreErrorKind {
        match kind {
            StoreErrorKind::NotFound if self.next > self.begin => {
                StoreErrorKind::Mismatch(format!(
                    "the registry ended it at byte {} and has it no more: it has found it to be damaged, or \
                 somebody has removed it",
                    self.next
                ))
            }
            kind => kind,
        }
    }

    fn error(&self, kind: StoreErrorKind) -> StoreError {
        let digest = &self.descriptor.digest;
        let subject = match kind {
            StoreErrorKind::NotFound => format!("@{digest}{NAMED}"),
            _ => format!("@{digest}"),
        };
        self.remote.error("pull blob", &subject, kind)
    }
}

fn ended_early() -> StoreErrorKind {
    StoreErrorKind::Io(io::ErrorKind::UnexpectedEof.into())
}

/// Drops the first bytes of a body, for registries that do not know ranges.
fn skip(body: Body, bytes: u64) -> Body {
    let mut left = bytes;
    body.try_filter_map(move |mut bytes| {
        let drop = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
        let kept = bytes.split_off(drop);
        left -= length(&bytes);
        std::future::ready(Ok((!kept.is_empty()).then_some(kept)))
    })
    .boxed()
}

/// Reads `bytes FIRST-LAST/TOTAL`: the first byte and the total, as far as they are told.
fn parse(range: &str) -> (Option<u64>, Option<u64>) {
    let Some((part, total)) = range.trim().trim_start_matches("bytes ").split_once('/') else {
        return (None, None);
    };
    let first = part.split_once('-').and_then(|(first, _)| first.trim().parse().ok());
    (first, total.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_range_tells_first_byte_and_total() {
        assert_eq!(parse("bytes 5-9/10"), (Some(5), Some(10)));
        assert_eq!(parse("bytes 5-9/*"), (Some(5), None));
        assert_eq!(parse("bytes */10"), (None, Some(10)));
        assert_eq!(parse("lines"), (None, None));
    }
}
