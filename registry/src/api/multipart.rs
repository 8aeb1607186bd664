//! Several ranges of a blob in one reply (RFC 9110, 14.6; RFC 2046, 5.1).

use std::ops::Range;
use std::sync::Arc;
use std::vec;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use kybernate_spec::chain;
use tokio::sync::OwnedSemaphorePermit;

use super::Call;
use super::blob::describe;
use crate::error::ApiError;
use crate::store::{BlobReader, OpenBlob, ReadError};

/// Length of the mark between parts: 128 bits; RFC 2046 allows 70 letters.
const MARK_LETTERS: usize = 32;

/// What is still to be sent.
struct Rest {
    reader: BlobReader,
    /// Each part with what stands before it.
    parts: vec::IntoIter<(Bytes, Range<u64>)>,
    /// What stands after the last.
    end: Option<Bytes>,
    // Held while bytes leave, as every pull does.
    place: OwnedSemaphorePermit,
}

/// Sends parts of a blob, in the order in which they were asked for.
pub(super) async fn reply(
    call: Call<'_>,
    blob: OpenBlob,
    parts: Vec<Range<u64>>,
) -> Result<Response, ApiError> {
    let (digest, length) = (blob.digest.clone(), blob.length);
    // No content holds its own digest: to make one is to break the hash. So no part holds the mark.
    let mark: String = digest.hex().chars().take(MARK_LETTERS).collect();
    let end = Bytes::from(format!("\r\n--{mark}--\r\n"));
    let parts: Vec<_> = parts.into_iter().map(|part| (head(&mark, &part, length), part)).collect();
    let sizes = parts.iter().map(|(head, part)| size(head) + part.end - part.start);
    let total = sizes.sum::<u64>() + size(&end);
    let mut parts = parts.into_iter();
    let Some((head, part)) = parts.next() else { return Err(ApiError::Range { length }) };

    let place = call.app.sending.take().await?;
    let reader = BlobReader::new(Arc::clone(&call.app.store), blob, part.start, part.end);
    // The first chunk is checked before the reply begins: corrupt is absent.
    let Some((first, reader)) = reader.next().await? else {
        return Err(ApiError::Range { length });
    };
    let rest = Rest { reader, parts, end: Some(end), place };
    let rest = stream::try_unfold(rest, Rest::next).inspect_err(
        |error| tracing::error!(error = %chain(error), "a pull of several ranges is cut"),
    );
    let body = Body::from_stream(stream::iter([Ok(head), Ok(first)]).chain(rest));
    let mut response = (StatusCode::PARTIAL_CONTENT, body).into_response();
    describe(response.headers_mut(), &digest, total);
    if let Ok(value) = HeaderValue::try_from(format!("multipart/byteranges; boundary={mark}")) {
        response.headers_mut().insert(CONTENT_TYPE, value);
    }
    Ok(response)
}

impl Rest {
    async fn next(self) -> Result<Option<(Bytes, Self)>, ReadError> {
        let Self { mut reader, mut parts, mut end, place } = self;
        if !reader.is_done() {
            let next = reader.next().await?;
            return Ok(next.map(|(bytes, reader)| (bytes, Self { reader, parts, end, place })));
        }
        let bytes = match parts.next() {
            Some((head, part)) => {
                reader.aim(part);
                Some(head)
            }
            None => end.take(),
        };
        Ok(bytes.map(|bytes| (bytes, Self { reader, parts, end, place })))
    }
}

fn head(mark: &str, part: &Range<u64>, length: u64) -> Bytes {
    let (first, last) = (part.start, part.end - 1);
    format!(
        "\r\n--{mark}\r\nContent-Type: application/octet-stream\r\n\
         Content-Range: bytes {first}-{last}/{length}\r\n\r\n"
    )
    .into()
}

fn size(bytes: &Bytes) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}
