//! What proves to an endpoint where an event comes from.

use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fs_err as fs;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use sha2::Sha256;

use crate::config::NotifyEndpoint;

const ID: HeaderName = HeaderName::from_static("webhook-id");
const TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
/// A secret that begins so goes on in base64.
const SECRET_PREFIX: &str = "whsec_";
/// What is longer is no secret of ours.
const SECRET_BYTES_MAX: usize = 64 << 10;

/// Why a request cannot be signed. Says nothing of what is in the files.
#[derive(Debug, thiserror::Error)]
pub(super) enum SignError {
    #[error("failed to read {what}")]
    Read {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the file of {0} does not hold one line that can be sent")]
    Malformed(&'static str),
}

/// Returns the headers of a request: its id for whoever gets it twice, and what proves its origin,
/// as Standard Webhooks has it. Blocks.
pub(super) fn headers(
    endpoint: &NotifyEndpoint,
    id: &str,
    body: &[u8],
    now: SystemTime,
) -> Result<HeaderMap, SignError> {
    let mut headers = HeaderMap::new();
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let text = |text: &str| {
        HeaderValue::from_str(text).map_err(|_unprintable| SignError::Malformed("the event's id"))
    };
    headers.insert(ID, text(id)?);
    headers.insert(TIMESTAMP, HeaderValue::from(now));
    if let Some(path) = &endpoint.bearer {
        let token = read(path, "the bearer token")?;
        let unprintable = |_| SignError::Malformed("the bearer token");
        let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(unprintable)?;
        value.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, value);
    }
    if let Some(path) = &endpoint.secret {
        let key = key(&read(path, "the secret")?)?;
        headers.insert(
            SIGNATURE,
            text(&format!("v1,{}", STANDARD.encode(mac(&key, id, now, body)?)))?,
        );
    }
    Ok(headers)
}

/// Returns the HMAC-SHA-256 of `id.timestamp.body`.
fn mac(key: &[u8], id: &str, timestamp: u64, body: &[u8]) -> Result<Vec<u8>, SignError> {
    let too_long = |_| SignError::Malformed("the secret");
    let mut mac = Hmac::<Sha256>::new_from_slice(key).map_err(too_long)?;
    mac.update(format!("{id}.{timestamp}.").as_bytes());
    mac.update(body);
    Ok(mac.finalize().into_bytes().to_vec())
}

fn key(secret: &str) -> Result<Vec<u8>, SignError> {
    match secret.strip_prefix(SECRET_PREFIX) {
        Some(encoded) => {
            STANDARD.decode(encoded).map_err(|_malformed| SignError::Malformed("the secret"))
        }
        None => Ok(secret.as_bytes().to_vec()),
    }
}

fn read(path: &Path, what: &'static str) -> Result<String, SignError> {
    let text = fs::read_to_string(path).map_err(|source| SignError::Read { what, source })?;
    let line = text.trim();
    if line.is_empty() || line.contains('\n') || line.len() > SECRET_BYTES_MAX {
        return Err(SignError::Malformed(what));
    }
    Ok(line.to_owned())
}

#[cfg(test)]
mod tests;
