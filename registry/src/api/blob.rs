//! Blobs (distribution specification, "Pulling blobs", "Deleting blobs").

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::{self, Stream};
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_RANGE, RANGE,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use kybernate_spec::{Digest, chain};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, Span};

use super::{CONTENT_DIGEST, Call, digest, multipart, repository};
use crate::condition::{Condition, WriteConditions};
use crate::error::ApiError;
use crate::range::Wanted;
use crate::store::{BlobReader, OpenBlob, ReadError};

pub(super) async fn head(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    Ok(described(&open(call, name, text).await?))
}

pub(super) async fn get(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    let blob = open(call, name, text).await?;
    let (digest, length) = (blob.digest.clone(), blob.length);
    // Conditions come before ranges (RFC 9110, 13.2.2): where nothing is to be sent, none is wrong.
    if Condition::of(&call.parts.headers, &entity_tag(&digest)) != Condition::Goes {
        return Ok(described(&blob));
    }
    // Content under a digest never changes, so `If-Range` can only fail for somebody else's tag.
    let same = call.header(IF_RANGE).is_none_or(|tag| tag == entity_tag(&digest));
    let header = call.header(RANGE).filter(|_| same);
    let (status, part) = match Wanted::of(header, length) {
        Wanted::Whole => (StatusCode::OK, 0..length),
        Wanted::Part(part) => (StatusCode::PARTIAL_CONTENT, part),
        Wanted::Several(parts) => return multipart::reply(call, blob, parts).await,
        Wanted::Unsatisfiable => return Err(ApiError::Range { length }),
    };
    let place = call.app.sending.take().await?;
    let store = Arc::clone(&call.app.store);
    let reader = BlobReader::new(store, blob, part.start, part.end);
    // The first chunk is checked before the reply begins: corrupt is absent.
    let first = reader.next().await?;
    let mut response = (status, Body::from_stream(rest(first, place))).into_response();
    let headers = response.headers_mut();
    describe(headers, &digest, part.end - part.start);
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {}-{}/{length}", part.start, part.end - 1);
        insert(headers, CONTENT_RANGE, &range);
    }
    Ok(response)
}

pub(super) async fn delete(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    let (repository, digest) = (repository(name)?, digest(text)?);
    let conditions = WriteConditions::of(&call.parts.headers);
    let place = call.app.may_delete().await?;
    let removed = call.on_store(move |store| {
        let _place = place;
        // What is under a digest is always the same: nothing can come between the two.
        let goes = match conditions {
            Some(conditions) if store.blob(&repository, &digest)?.is_some() => {
                conditions.allow(Some(&entity_tag(&digest)))
            }
            _ => true,
        };
        if goes { store.unlink(&repository, &digest).map(Some) } else { Ok(None) }
    });
    match removed.await? {
        None => Err(ApiError::Precondition),
        Some(true) => Ok(StatusCode::ACCEPTED.into_response()),
        Some(false) => Err(ApiError::BlobUnknown),
    }
}

async fn open(call: Call<'_>, name: &str, text: &str) -> Result<OpenBlob, ApiError> {
    let (repository, digest) = (repository(name)?, digest(text)?);
    let found = call.look(move |store| store.blob(&repository, &digest)).await?;
    found.ok_or(ApiError::BlobUnknown)
}

/// Returns the reply to a HEAD.
fn described(blob: &OpenBlob) -> Response {
    let mut response = StatusCode::OK.into_response();
    describe(response.headers_mut(), &blob.digest, blob.length);
    response
}

/// Streams what has been read and what follows. An error cuts the connection.
fn rest(
    first: Option<(Bytes, BlobReader)>,
    place: Place,
) -> impl Stream<Item = Result<Bytes, ReadError>> {
    // hyper asks for the body outside of the request's span.
    let span = Span::current();
    stream::try_unfold((At::First(first), place), move |(at, place)| {
        next_part(at, place).instrument(span.clone())
    })
}

/// How far a body is.
enum At {
    First(Option<(Bytes, BlobReader)>),
    Next(BlobReader),
}

type Place = OwnedSemaphorePermit;

async fn next_part(at: At, place: Place) -> Result<Option<(Bytes, (At, Place))>, ReadError> {
    let next = match at {
        At::First(first) => Ok(first),
        At::Next(reader) => reader.next().await,
    };
    match next {
        Ok(next) => Ok(next.map(|(bytes, reader)| (bytes, (At::Next(reader), place)))),
        Err(error) => {
            tracing::error!(error = %chain(&error), "a pull is cut");
            Err(error)
        }
    }
}

pub(super) fn describe(headers: &mut HeaderMap, digest: &Digest, length: u64) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    insert(headers, ETAG, &entity_tag(digest));
    insert(headers, CONTENT_DIGEST, &digest.to_string());
}

pub(super) fn entity_tag(digest: &Digest) -> String {
    format!("\"{digest}\"")
}

fn insert(headers: &mut HeaderMap, name: http::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
