//! What a failed exchange with a registry means.

use std::io;

use oci_client::errors::{DigestError, OciDistributionError, OciEnvelope, OciErrorCode};

use reqwest::StatusCode;

use super::scheme::speaks_tls;
use crate::store::{StoreErrorKind, Told};

/// Statuses that promise that the same request may work later.
const TRANSIENT: [u16; 6] = [408, 429, 500, 502, 503, 504];

/// What a registry says without room, or past its quota: `ENOSPC` is 28, `EDQUOT` 122.
const FULL: [&str; 5] =
    ["no space left", "ENOSPC", "disk quota exceeded", r#""Err":28}"#, r#""Err":122}"#];

impl From<OciDistributionError> for StoreErrorKind {
    fn from(error: OciDistributionError) -> Self {
        let told = || Told::of(message(&error));
        // Which of the two it is, some registries get wrong in the code.
        match status(&error) {
            Some(401) => return Self::Unauthorized(told()),
            Some(403) => return Self::Denied(told()),
            _ => {}
        }
        let by_status = status(&error).and_then(|status| of_status(status, message(&error)));
        let by_code = find_code(&error, |code| of_code(code, told));
        if let Some(kind) = by_code.or(by_status) {
            return kind;
        }
        match error {
            OciDistributionError::DigestError(DigestError::VerificationError {
                actual, ..
            }) => Self::Mismatch(format!("it is {actual}")),
            OciDistributionError::JsonError(error) => Self::Malformed(error),
            OciDistributionError::IoError(error) => Self::Io(error),
            other => Self::Registry(other),
        }
    }
}

impl From<reqwest::Error> for StoreErrorKind {
    fn from(error: reqwest::Error) -> Self {
        OciDistributionError::RequestError(error).into()
    }
}

/// Whether a reply promises that the same request may work later.
pub(super) fn may_pass(status: StatusCode) -> bool {
    TRANSIENT.contains(&status.as_u16())
}

/// Whether the same request may work a moment later.
pub(super) fn is_transient(kind: &StoreErrorKind) -> bool {
    match kind {
        StoreErrorKind::Io(error) => {
            use io::ErrorKind::{ConnectionReset, Other, TimedOut, UnexpectedEof};
            matches!(error.kind(), ConnectionReset | Other | TimedOut | UnexpectedEof)
        }
        StoreErrorKind::Busy { .. } => true,
        StoreErrorKind::Registry(error) => {
            status(error).is_some_and(|status| TRANSIENT.contains(&status))
                || find_code(error, too_many).is_some()
                || is_broken_connection(error)
        }
        _ => false,
    }
}

fn is_broken_connection(error: &OciDistributionError) -> bool {
    let OciDistributionError::RequestError(error) = error else { return false };
    let never_sent = error.is_builder() || error.is_redirect() || speaks_tls(error);
    error.status().is_none() && !never_sent
}

fn of_status(status: u16, message: &str) -> Option<StoreErrorKind> {
    match status {
        404 => Some(StoreErrorKind::NotFound),
        413 => Some(StoreErrorKind::RequestTooLarge),
        507 => Some(StoreErrorKind::Full),
        // docker-registry answers 500 with the error text of its file system, or its number.
        _ if FULL.iter().any(|sign| message.contains(sign)) => Some(StoreErrorKind::Full),
        _ => None,
    }
}

fn of_code(code: &OciErrorCode, told: impl Fn() -> Told) -> Option<StoreErrorKind> {
    match code {
        OciErrorCode::BlobUnknown
        | OciErrorCode::ManifestUnknown
        | OciErrorCode::NameUnknown
        | OciErrorCode::NotFound => Some(StoreErrorKind::NotFound),
        OciErrorCode::Unauthorized => Some(StoreErrorKind::Unauthorized(told())),
        OciErrorCode::Denied => Some(StoreErrorKind::Denied(told())),
        OciErrorCode::DigestInvalid => Some(StoreErrorKind::Disputed(told())),
        _ => None,
    }
}

fn too_many(code: &OciErrorCode) -> Option<()> {
    (*code == OciErrorCode::Toomanyrequests).then_some(())
}

fn status(error: &OciDistributionError) -> Option<u16> {
    match error {
        OciDistributionError::ServerError { code, .. } => Some(*code),
        OciDistributionError::RequestError(error) => error.status().map(|status| status.as_u16()),
        _ => None,
    }
}

fn message(error: &OciDistributionError) -> &str {
    match error {
        OciDistributionError::ServerError { message, .. } => message,
        _ => "",
    }
}

/// Returns what `tell` makes of the first error code of the reply that means something to it.
fn find_code<T>(
    error: &OciDistributionError,
    tell: impl Fn(&OciErrorCode) -> Option<T>,
) -> Option<T> {
    let first = |envelope: &OciEnvelope| envelope.errors.iter().find_map(|error| tell(&error.code));
    match error {
        OciDistributionError::RegistryError { envelope, .. } => first(envelope),
        // `oci-client` reads the envelope of some replies only.
        OciDistributionError::ServerError { message, .. } => {
            serde_json::from_str(message).ok().and_then(|envelope| first(&envelope))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: u16, message: &str) -> StoreErrorKind {
        let (url, message) = ("http://localhost/v2/".to_owned(), message.to_owned());
        OciDistributionError::ServerError { code, url, message }.into()
    }

    #[test]
    fn a_reply_is_told_by_status_code_and_text() {
        assert!(matches!(answer(404, ""), StoreErrorKind::NotFound));
        assert!(matches!(answer(401, ""), StoreErrorKind::Unauthorized(_)));
        assert!(matches!(answer(403, ""), StoreErrorKind::Denied(_)));
        assert!(matches!(answer(507, ""), StoreErrorKind::Full));
        assert!(matches!(answer(413, "<html>"), StoreErrorKind::RequestTooLarge));
        let text = "write /srv/x: no space left on device";
        assert!(matches!(answer(500, text), StoreErrorKind::Full));
        let text = r#"{"errors":[{"code":"UNKNOWN","message":"unknown error","detail":{
            "DriverName":"filesystem","Enclosed":{"Op":"write","Path":"/srv/x","Err":28}}}]}"#;
        assert!(matches!(answer(500, text), StoreErrorKind::Full));
        let envelope = r#"{"errors":[{"code":"DIGEST_INVALID","message":"x"}]}"#;
        assert!(matches!(answer(400, envelope), StoreErrorKind::Disputed(_)));
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        assert!(is_transient(&answer(503, "")) && is_transient(&answer(429, "")));
        assert!(!is_transient(&answer(400, "")) && !is_transient(&answer(404, "")));
        assert!(!is_transient(&answer(500, "no space left on device")));
    }
}
