//! The one place where a failure becomes a reply.

use std::borrow::Cow;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::{ALLOW, CONTENT_RANGE, LOCATION, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderName, HeaderValue, StatusCode};
use kybernate_spec::{Digest, DigestError, MANIFEST_BYTES_MAX, NameError, TagError, chain};

use crate::access::sign::SignError;
use crate::manifest::ManifestError;
use crate::places::Full;
use crate::request_id::RequestId;
use crate::store::{ReadError, StoreError, StoreErrorKind};
use crate::upload::UploadError;

const NOT_AS_WANTED: &str =
    "what is here now is not what If-Match or If-None-Match asks for: look at it again";

const UNREACHABLE: &str =
    "the registry's storage cannot be reached, so it cannot be told what is in it: try again later";

/// Seconds after which to come again when the store has gone: somebody has to bring it back.
const STORE_AGAIN: u64 = 30;

/// Seconds after which to come again when all transfers have places; nobody knows when they end.
const PLACES_AGAIN: u64 = 10;

/// The error codes of the distribution specification that this registry sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ErrorCode {
    /// The blob is not here.
    BlobUnknown,
    /// The upload cannot go on like this.
    BlobUploadInvalid,
    /// The upload is not here.
    BlobUploadUnknown,
    /// The caller may not do this, or a rule says no.
    Denied,
    /// The caller has to prove who it is.
    Unauthorized,
    /// The digest is malformed or does not match the content.
    DigestInvalid,
    /// The manifest refers to something that is not here.
    ManifestBlobUnknown,
    /// The manifest is malformed.
    ManifestInvalid,
    /// The manifest is not here.
    ManifestUnknown,
    /// The repository's name is malformed.
    NameInvalid,
    /// The repository is not here.
    NameUnknown,
    /// The length is not what was announced, or too large.
    SizeInvalid,
    /// Too much at once.
    #[serde(rename = "TOOMANYREQUESTS")]
    TooManyRequests,
    /// There is no such operation.
    Unsupported,
    /// We failed; the client did nothing wrong.
    Unknown,
}

/// What a handler fails with.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The path is no endpoint.
    #[error("no such endpoint")]
    NoEndpoint,
    /// The endpoint does not know the method.
    #[error("method not allowed")]
    Method(&'static str),
    /// The caller may not do this, and that there is something to do it with is no secret.
    #[error("denied")]
    Denied,
    /// The caller has to prove who it is.
    #[error("unauthorized")]
    Unauthorized {
        /// How: the header `WWW-Authenticate`.
        challenge: String,
        /// What is wrong with what it brought. Never what that was.
        why: String,
    },
    /// The caller asks for too much at once.
    #[error("too many requests")]
    Busy {
        /// What is too much.
        why: &'static str,
        /// Seconds after which it may try again.
        retry_after: u64,
    },
    /// The path holds something that is not a repository name.
    #[error("invalid repository name in request")]
    Name(#[source] NameError),
    /// The request holds something that is not a digest.
    #[error("invalid digest in request")]
    Digest(#[source] DigestError),
    /// A manifest is pushed under something that is not a tag.
    #[error("invalid tag in request")]
    Tag(#[source] TagError),
    /// A PUT that ends an upload does not say the digest.
    #[error("no digest in request")]
    NoDigest,
    /// A query parameter or header makes no sense.
    #[error("malformed {0} in request")]
    Malformed(&'static str),
    /// The repository is not here.
    #[error("no such repository")]
    NameUnknown,
    /// The blob is not here, or not readable through this repository.
    #[error("no such blob")]
    BlobUnknown,
    /// The manifest is not here.
    #[error("no such manifest")]
    ManifestUnknown,
    /// The range does not touch the blob.
    #[error("range not satisfiable")]
    Range {
        /// The blob's length.
        length: u64,
    },
    /// The manifest is longer than allowed.
    #[error("manifest too large")]
    ManifestSize,
    /// What is here is not what the request's conditions want.
    #[error("precondition failed")]
    Precondition,
    /// The manifest is malformed.
    #[error("malformed manifest")]
    Manifest(#[source] ManifestError),
    /// The manifest is not what its digest says.
    #[error("manifest does not match its digest")]
    ManifestDigest {
        /// What the request says.
        expected: Digest,
        /// What was received.
        actual: Digest,
    },
    /// The manifest refers to what the repository does not have.
    #[error("manifest refers to unknown content")]
    MissingReferences(Vec<Digest>),
    /// The upload cannot go on.
    #[error("upload failed")]
    Upload {
        /// Where the upload is found.
        location: Option<String>,
        /// Why.
        #[source]
        error: UploadError,
    },
    /// The client stopped sending.
    #[error("request body ended early")]
    Body,
    /// Stored content could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something is not here, or could not be done, and the store itself is not here: nobody can
    /// tell what is in it.
    #[error("the store cannot be reached")]
    Unreachable(#[source] StoreError),
    /// A token could not be made.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// A task of ours ended without an answer.
    #[error("a task failed")]
    Task(#[source] tokio::task::JoinError),
}

type Message = Cow<'static, str>;

impl From<UploadError> for ApiError {
    fn from(error: UploadError) -> Self {
        Self::Upload { location: None, error }
    }
}

impl From<Full> for ApiError {
    fn from(Full: Full) -> Self {
        Self::Busy { why: "too many transfers are under way", retry_after: PLACES_AGAIN }
    }
}

impl ApiError {
    fn reply(&self) -> (StatusCode, ErrorCode, Message) {
        match self {
            Self::NoEndpoint => no_endpoint(),
            Self::Method(_) => reply(
                StatusCode::METHOD_NOT_ALLOWED,
                ErrorCode::Unsupported,
                "the endpoint does not know this method",
            ),
            Self::Denied => reply(
                StatusCode::FORBIDDEN,
                ErrorCode::Denied,
                "you may not do this with this repository",
            ),
            Self::Unauthorized { why, .. } => {
                reply(StatusCode::UNAUTHORIZED, ErrorCode::Unauthorized, why.clone())
            }
            Self::Busy { why, .. } => {
                reply(StatusCode::TOO_MANY_REQUESTS, ErrorCode::TooManyRequests, *why)
            }
            Self::Name(error) => bad(ErrorCode::NameInvalid, error.to_string()),
            Self::Digest(error) => bad(ErrorCode::DigestInvalid, error.to_string()),
            Self::Tag(error) => bad(ErrorCode::ManifestInvalid, error.to_string()),
            Self::NoDigest => {
                bad(ErrorCode::DigestInvalid, "the query parameter 'digest' is missing")
            }
            Self::Malformed(what) => bad(ErrorCode::Unsupported, format!("malformed {what}")),
            Self::NameUnknown => {
                reply(StatusCode::NOT_FOUND, ErrorCode::NameUnknown, "no such repository")
            }
            Self::BlobUnknown | Self::Read(ReadError::Corrupt(_)) => reply(
                StatusCode::NOT_FOUND,
                ErrorCode::BlobUnknown,
                "the repository has no such blob",
            ),
            Self::ManifestUnknown => reply(
                StatusCode::NOT_FOUND,
                ErrorCode::ManifestUnknown,
                "the repository has no such manifest",
            ),
            Self::Range { length } => reply(
                StatusCode::RANGE_NOT_SATISFIABLE,
                ErrorCode::SizeInvalid,
                format!("the range is outside of the blob's {length} bytes"),
            ),
            Self::Precondition => {
                reply(StatusCode::PRECONDITION_FAILED, ErrorCode::Denied, NOT_AS_WANTED)
            }
            Self::ManifestSize => reply(
                StatusCode::PAYLOAD_TOO_LARGE,
                ErrorCode::SizeInvalid,
                format!("a manifest has at most {MANIFEST_BYTES_MAX} bytes"),
            ),
            Self::Manifest(error) => bad(ErrorCode::ManifestInvalid, chain(error).to_string()),
            Self::ManifestDigest { expected, actual } => {
                bad(ErrorCode::DigestInvalid, mismatch(expected, actual))
            }
            Self::MissingReferences(missing) => bad(
                ErrorCode::ManifestBlobUnknown,
                format!(
                    "the manifest refers to {} that the repository does not have",
                    list(missing)
                ),
            ),
            Self::Upload { error, .. } => upload(error),
            Self::Body => bad(ErrorCode::SizeInvalid, "the request body ended early"),
            Self::Read(ReadError::Io(..)) | Self::Sign(_) | Self::Task(_) => internal(),
            Self::Store(error) => store(error),
            Self::Unreachable(_) => store_has_gone(),
        }
    }

    /// Whether it says that something is not here, or that storage failed: what is said while the
    /// store itself has gone, too.
    pub(crate) fn may_be_of_no_store(&self) -> bool {
        let failed = |error: &StoreError| matches!(error.kind, StoreErrorKind::Io(_));
        match self {
            Self::NameUnknown
            | Self::BlobUnknown
            | Self::ManifestUnknown
            | Self::MissingReferences(_)
            | Self::Upload { error: UploadError::Unknown, .. }
            | Self::Read(ReadError::Io(..)) => true,
            Self::Store(error) | Self::Upload { error: UploadError::Store(error), .. } => {
                failed(error)
            }
            _ => false,
        }
    }

    fn header(&self) -> Option<(HeaderName, String)> {
        match self {
            Self::Method(allowed) => Some((ALLOW, (*allowed).to_owned())),
            Self::Unauthorized { challenge, .. } if !challenge.is_empty() => {
                Some((WWW_AUTHENTICATE, challenge.clone()))
            }
            Self::Busy { retry_after, .. } => Some((RETRY_AFTER, retry_after.to_string())),
            Self::Unreachable(_) => Some((RETRY_AFTER, STORE_AGAIN.to_string())),
            Self::Range { length } => Some((CONTENT_RANGE, format!("bytes */{length}"))),
            Self::Upload { error: UploadError::TooMany, .. } => {
                Some((RETRY_AFTER, "60".to_owned()))
            }
            Self::Upload { error: UploadError::OutOfOrder { received }, .. } => {
                Some((RANGE, received_range(*received)))
            }
            _ => None,
        }
    }

    fn location(&self) -> Option<&str> {
        match self {
            Self::Upload { location, error: UploadError::OutOfOrder { .. } } => location.as_deref(),
            _ => None,
        }
    }
}

/// Returns the `Range` header of an upload. Nothing received and one byte received look the same,
/// as clients expect it.
pub(crate) fn received_range(received: u64) -> String {
    format!("0-{}", received.saturating_sub(1))
}

fn upload(error: &UploadError) -> (StatusCode, ErrorCode, Message) {
    match error {
        UploadError::Unknown => reply(
            StatusCode::NOT_FOUND,
            ErrorCode::BlobUploadUnknown,
            "there is no such upload: begin a new one",
        ),
        UploadError::TooMany => reply(
            StatusCode::TOO_MANY_REQUESTS,
            ErrorCode::TooManyRequests,
            "too many uploads are open",
        ),
        UploadError::OutOfOrder { .. } => reply(
            StatusCode::RANGE_NOT_SATISFIABLE,
            ErrorCode::BlobUploadInvalid,
            error.to_string(),
        ),
        UploadError::Length => bad(ErrorCode::SizeInvalid, error.to_string()),
        UploadError::Digest { expected, actual } => {
            bad(ErrorCode::DigestInvalid, mismatch(expected, actual))
        }
        UploadError::Stalled => {
            reply(StatusCode::REQUEST_TIMEOUT, ErrorCode::BlobUploadInvalid, error.to_string())
        }
        UploadError::Interrupted | UploadError::Superseded => {
            bad(ErrorCode::BlobUploadInvalid, error.to_string())
        }
        UploadError::Store(error) => store(error),
    }
}

fn store(error: &StoreError) -> (StatusCode, ErrorCode, Message) {
    match error.kind {
        StoreErrorKind::NoSpace => reply(
            StatusCode::INSUFFICIENT_STORAGE,
            ErrorCode::Unknown,
            "the registry's storage is full",
        ),
        StoreErrorKind::Quota { limit, used } => reply(
            StatusCode::FORBIDDEN,
            ErrorCode::Denied,
            format!(
                "the repository holds {used} of the {limit} bytes it may, and this is more than \
                 is left: delete what is not needed or ask for a larger quota"
            ),
        ),
        StoreErrorKind::Immutable { ref tag, ref digest } => reply(
            StatusCode::CONFLICT,
            ErrorCode::Denied,
            format!("the tag {tag} is immutable here and stays with {digest}: use another tag"),
        ),
        StoreErrorKind::MediaType { ref there, ref pushed } => bad(
            ErrorCode::ManifestInvalid,
            format!(
                "the repository has this manifest as {there:?}, so it cannot become {pushed:?}: \
                 push it as that, or delete it first"
            ),
        ),
        StoreErrorKind::Io(_) => internal(),
    }
}

fn no_endpoint() -> (StatusCode, ErrorCode, Message) {
    reply(StatusCode::NOT_FOUND, ErrorCode::Unsupported, "no such endpoint")
}

fn store_has_gone() -> (StatusCode, ErrorCode, Message) {
    reply(StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Unknown, UNREACHABLE)
}

fn internal() -> (StatusCode, ErrorCode, Message) {
    reply(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::Unknown, "internal error")
}

fn bad(code: ErrorCode, message: impl Into<Message>) -> (StatusCode, ErrorCode, Message) {
    reply(StatusCode::BAD_REQUEST, code, message)
}

fn reply(
    status: StatusCode,
    code: ErrorCode,
    message: impl Into<Message>,
) -> (StatusCode, ErrorCode, Message) {
    (status, code, message.into())
}

fn mismatch(expected: &Digest, actual: &Digest) -> String {
    format!("the content has digest {actual}, not {expected}")
}

/// Names the first few of what may be thousands.
fn list(digests: &[Digest]) -> String {
    const SHOWN: usize = 5;
    let shown: Vec<_> = digests.iter().take(SHOWN).map(ToString::to_string).collect();
    match digests.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

impl ApiError {
    /// Answers with what the client may know, and logs what it may not.
    pub(crate) fn respond(self, request: &RequestId) -> Response {
        let (status, code, message) = self.reply();
        if status.is_server_error() {
            tracing::error!(error = %chain(&self), "request failed");
        }
        let body = serde_json::json!({ "errors": [{
            "code": code, "message": message, "detail": { "requestId": request.as_str() },
        }] });
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        let location = self.location().map(|location| (LOCATION, location.to_owned()));
        for (name, value) in self.header().into_iter().chain(location) {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(name, value);
            }
        }
        response
    }
}
