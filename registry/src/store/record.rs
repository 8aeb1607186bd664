//! The small objects of the store: one line that can be checked, then JSON.
//!
//! ```text
//! kybernate-tag 1 0123456789abcdef
//! {"digest":"sha256:…"}
//! ```
//!
//! The first line has the kind, the version of the kind, and the CRC-64/NVME of everything after
//! the line. A record that does not check is as good as absent: it was torn before it was
//! acknowledged, or it rotted, and in both cases a push writes it anew.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::checksum::sum;

/// Version of every kind of record so far.
const VERSION: &str = "1";

/// A type that is stored as a record.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// The word after `kybernate-`.
    const KIND: &'static str;
}

/// Why bytes are not a record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("record has no header line")]
    NoHeader,
    #[error("record is of another kind or version: {0:?}")]
    Header(String),
    #[error("record does not match its checksum")]
    Checksum,
    #[error("record is not valid JSON")]
    Json(#[source] serde_json::Error),
}

/// Returns the bytes to store.
pub(crate) fn encode<R: Record>(record: &R) -> Result<Vec<u8>, RecordError> {
    let body = serde_json::to_vec(record).map_err(RecordError::Json)?;
    let mut bytes = format!("kybernate-{} {VERSION} {:016x}\n", R::KIND, sum(&body)).into_bytes();
    bytes.extend(body);
    Ok(bytes)
}

/// Reads what [`encode`] made.
pub(crate) fn decode<R: Record>(bytes: &[u8]) -> Result<R, RecordError> {
    let end = bytes.iter().position(|b| *b == b'\n').ok_or(RecordError::NoHeader)?;
    let (header, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let header = String::from_utf8_lossy(header);
    let Some(checksum) = header.strip_prefix(&format!("kybernate-{} {VERSION} ", R::KIND)) else {
        return Err(RecordError::Header(header.chars().take(80).collect()));
    };
    if checksum != format!("{:016x}", sum(body)) {
        return Err(RecordError::Checksum);
    }
    serde_json::from_slice(body).map_err(RecordError::Json)
}

#[cfg(test)]
mod tests;
