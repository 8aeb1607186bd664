//! Blobs up. An upload that breaks off goes on where the registry says that it stands, also in
//! another run; where it does not say, the blob is sent anew.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::stream::TryStreamExt as _;
use kybernate_spec::Descriptor;
use oci_client::errors::OciDistributionError;
use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RANGE,
};
use reqwest::{Body, Method, Response, Url};

use super::Remote;
use super::documents::text;
use super::error::is_transient;
use super::notes::Note;
use super::patience::{Patience, while_moving, within_stall};
use super::tokens::Access;
use crate::checked::length;
use crate::store::{BlobSource, StoreError, StoreErrorKind};

/// Blobs below this are simply sent again: asking and noting where they stand costs more.
const NOTED_BYTES_MIN: u64 = 8 << 20;

/// Why an upload failed: what was to be sent could not be read, or it could not be sent.
enum UploadFailure {
    Source(StoreError),
    Registry(StoreErrorKind),
}

/// An upload that the registry has begun.
struct Session {
    /// Where it goes on. Whoever knows it can write to it, so it is never logged.
    url: Url,
    /// Bytes that the registry has.
    offset: u64,
}

/// One blob on its way up.
struct Upload<'a> {
    remote: &'a Remote,
    descriptor: &'a Descriptor,
    source: &'a dyn BlobSource,
    note: Option<Note>,
    session: Option<Session>,
    patience: Patience,
}

impl Remote {
    pub(super) async fn upload(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        let mut upload = Upload {
            remote: self,
            descriptor,
            source,
            note: None,
            session: None,
            patience: Patience::default(),
        };
        if descriptor.size >= NOTED_BYTES_MIN
            && let Some(notes) = &self.shared.notes
        {
            upload.note = notes.take(&format!("{}@{}", self.name(), descriptor.digest)).await;
        }
        upload.run().await.map_err(|failure| match failure {
            UploadFailure::Source(error) => error,
            UploadFailure::Registry(kind) => {
                self.error("push blob", &format!("@{}", descriptor.digest), kind)
            }
        })
    }
}

impl Upload<'_> {
    async fn run(&mut self) -> Result<(), UploadFailure> {
        let noted = self.note.as_ref().and_then(Note::session);
        self.session = noted.map(|url| Session { url, offset: 0 });
        let mut known = self.session.is_some();
        loop {
            let failure = match self.attempt(known).await {
                Ok(()) => return self.done().await,
                Err(UploadFailure::Registry(kind)) => kind,
                Err(failure) => return Err(failure),
            };
            self.patience.wait(failure).await.map_err(UploadFailure::Registry)?;
            // A broken PUT is an unknown outcome: the registry may have all of it.
            let digest = &self.descriptor.digest;
            if self.remote.find_blob(digest).await.map_err(UploadFailure::Registry)? {
                return self.done().await;
            }
            known = true;
        }
    }

    async fn done(&mut self) -> Result<(), UploadFailure> {
        if let Some(note) = self.note.take() {
            note.forget().await;
        }
        Ok(())
    }

    /// Begins the upload, or finds out how far it is when it is `known` to the registry, and sends
    /// the rest. Ends with a failure that may pass when another attempt makes sense.
    async fn attempt(&mut self, known: bool) -> Result<(), UploadFailure> {
        let session = match self.session.take() {
            Some(session) if known => self.look(session).await?,
            _ => None,
        };
        let session = match session {
            Some(session) => Some(session),
            None => self.adopt().await,
        };
        let resumed = session.is_some();
        let session = match session {
            Some(session) => session,
            None => self.begin().await.map_err(UploadFailure::Registry)?,
        };
        let (url, offset) = (session.url.clone(), session.offset);
        self.session = Some(session);
        match self.send(url, offset).await {
            Err(UploadFailure::Registry(kind)) if resumed && is_about_session(&kind) => {
                let reason = kybernate_spec::chain(&kind);
                tracing::debug!(blob.digest = %self.descriptor.digest, %reason, "sent anew");
                self.session = None;
                Err(UploadFailure::Registry(lost()))
            }
            other => other,
        }
    }

    /// Asks how far an upload is; nothing when the registry does not know it any more.
    async fn look(&mut self, session: Session) -> Result<Option<Session>, UploadFailure> {
        let documents = &self.remote.shared.documents;
        let asked = async {
            let request = documents.http().get(session.url.clone());
            let request = documents.sign(request, &session.url, Access::Push).await?;
            documents.check(within_stall(request.send()).await?).await
        };
        let found: Result<Response, StoreErrorKind> = asked.await;
        match found {
            Ok(reply) => {
                let offset = received(reply.headers());
                if offset > self.descriptor.size {
                    return Ok(None);
                }
                if offset > session.offset {
                    // It moves, so it may take as long as it likes.
                    self.patience = Patience::default();
                }
                let url = next_url(&reply).unwrap_or(session.url);
                tracing::debug!(blob.digest = %self.descriptor.digest, offset, "an upload goes on");
                Ok(Some(Session { url, offset }))
            }
            Err(kind) if is_transient(&kind) => {
                self.session = Some(session);
                Err(UploadFailure::Registry(kind))
            }
            Err(
                kind @ (StoreErrorKind::Unauthorized(_)
                | StoreErrorKind::Denied(_)
                | StoreErrorKind::Full
                | StoreErrorKind::RequestTooLarge),
            ) => Err(UploadFailure::Registry(kind)),
            Err(_gone) => Ok(None),
        }
    }

    async fn begin(&mut self) -> Result<Session, StoreErrorKind> {
        let documents = &self.remote.shared.documents;
        let address = documents.address("blobs/uploads/")?;
        let request = documents.http().post(address.clone()).header(CONTENT_LENGTH, 0);
        let request = documents.sign(request, &address, Access::Push).await?;
        let reply = documents.check(within_stall(request.send()).await?).await?;
        let url = next_url(&reply).ok_or_else(|| {
            StoreErrorKind::from(OciDistributionError::SpecViolationError(
                "it began an upload without saying where".to_owned(),
            ))
        })?;
        Ok(self.begun(url).await)
    }

    /// Goes on with the upload that the registry began when it was to link the blob.
    async fn adopt(&mut self) -> Option<Session> {
        let url = self.remote.shared.begun.take(&self.descriptor.digest)?;
        Some(self.begun(url).await)
    }

    async fn begun(&mut self, url: Url) -> Session {
        if let Some(note) = &mut self.note {
            note.write(&url).await;
        }
        Session { url, offset: 0 }
    }

    /// Sends everything from `offset` on, and ends the upload. Small blobs go with the request that
    /// ends it; of larger ones most registries keep what has arrived only when it comes before.
    async fn send(&self, url: Url, offset: u64) -> Result<(), UploadFailure> {
        let total = self.descriptor.size;
        if total < NOTED_BYTES_MIN {
            return self.transmit(Method::PUT, self.ending(url), offset).await.map(|_reply| ());
        }
        let mut next = url;
        if offset < total {
            let reply = self.transmit(Method::PATCH, next.clone(), offset).await?;
            if reply.headers().contains_key(RANGE) && received(reply.headers()) != total {
                return Err(UploadFailure::Registry(lost()));
            }
            next = next_url(&reply).unwrap_or(next);
        }
        self.transmit(Method::PUT, self.ending(next), total).await.map(|_reply| ())
    }

    /// Returns the address that ends an upload.
    fn ending(&self, mut url: Url) -> Url {
        url.query_pairs_mut().append_pair("digest", &self.descriptor.digest.to_string());
        url
    }

    /// Sends the blob from `offset` on.
    async fn transmit(
        &self,
        method: Method,
        url: Url,
        offset: u64,
    ) -> Result<Response, UploadFailure> {
        let documents = &self.remote.shared.documents;
        let total = self.descriptor.size;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_LENGTH, (total - offset).into());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        if (1..total).contains(&offset) {
            let range = HeaderValue::from_str(&format!("{offset}-{}", total - 1));
            headers.extend(range.map(|range| (CONTENT_RANGE, range)));
        }
        let sent = Arc::new(AtomicU64::new(offset));
        // Keeps why reading failed, which the HTTP client would only repeat as text. Held for an
        // assignment only, never across an `.await`.
        let broken = Arc::new(Mutex::new(None));
        let body = if offset < total {
            let content = self.source.open_at(self.descriptor, offset).await;
            let content = content.map_err(UploadFailure::Source)?;
            let (sent, broken) = (Arc::clone(&sent), Arc::clone(&broken));
            let content = content
                .inspect_ok(move |bytes| {
                    sent.fetch_add(length(bytes), Ordering::Relaxed);
                })
                .map_err(move |error| {
                    let told = error.to_string();
                    *broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    io::Error::other(told)
                });
            Body::wrap_stream(content)
        } else {
            Body::default()
        };
        let request = async {
            let request = documents.http().request(method, url.clone());
            let request = request.headers(headers).body(body);
            let request = documents.sign(request, &url, Access::Push).await?;
            documents.check(request.send().await?).await
        };
        let done = while_moving(&sent, total, request).await;
        match (done, broken.lock().unwrap_or_else(PoisonError::into_inner).take()) {
            (_, Some(error)) => Err(UploadFailure::Source(error)),
            (done, None) => done.map_err(UploadFailure::Registry),
        }
    }
}

/// Whether another upload of the same blob may succeed where this one did not: the registry does
/// not know it any more, has it elsewhere than it said, or has put it together wrongly.
const fn is_about_session(kind: &StoreErrorKind) -> bool {
    match kind {
        StoreErrorKind::NotFound | StoreErrorKind::Disputed(_) => true,
        StoreErrorKind::Registry(OciDistributionError::ServerError { code, .. }) => {
            matches!(*code, 400 | 409 | 410 | 416)
        }
        _ => false,
    }
}

fn lost() -> StoreErrorKind {
    let text = "the registry lost an upload under way";
    StoreErrorKind::Io(io::Error::new(io::ErrorKind::ConnectionReset, text))
}

/// Returns where an upload goes on.
pub(super) fn next_url(reply: &Response) -> Option<Url> {
    let location = text(reply.headers(), LOCATION.as_str())?;
    reply.url().join(&location).ok()
}

/// Returns how many bytes of an upload are there: the end of `Range: 0-N`, and one more. `0-0` is
/// what most say of an empty one.
fn received(headers: &HeaderMap) -> u64 {
    let range = text(headers, RANGE.as_str()).unwrap_or_default();
    let last = range.trim_start_matches("bytes=").split_once('-').map(|(_, last)| last.trim());
    match last.and_then(|last| last.parse::<u64>().ok()) {
        None | Some(0) => 0,
        Some(last) => last.saturating_add(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_read_from_the_range() {
        let there = |range: &'static str| {
            received(&HeaderMap::from_iter([(RANGE, HeaderValue::from_static(range))]))
        };
        assert_eq!((there("0-1023"), there("bytes=0-1023")), (1024, 1024));
        assert_eq!((there("0-0"), there("0--1"), there("nonsense")), (0, 0, 0));
        assert_eq!(received(&HeaderMap::new()), 0);
    }
}
