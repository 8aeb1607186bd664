//! A name for each request, in its reply and in every log line about it.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName, HeaderValue};

/// The header that carries it, both ways.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A client's id is taken when it is this short, room for two UUIDs, …
const LENGTH_MAX: usize = 80;

/// What tells this process' ids from those of every other; an id is no secret.
static PROCESS: LazyLock<u64> = LazyLock::new(|| getrandom::u64().unwrap_or_default());
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A request's id: the client's, or one of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// Takes the client's id when it is one that a log can hold, or makes one.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(&REQUEST_ID).filter(|id| is_sane(id.as_bytes()));
        given.cloned().map_or_else(Self::make, Self)
    }

    fn make() -> Self {
        // A counter behind a random number: no system call for each request.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:016x}-{count:x}", *PROCESS);
        Self(HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("none")))
    }

    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    pub(crate) fn header(self) -> HeaderValue {
        self.0
    }
}

/// … and holds nothing that a log or a shell could take for something else.
fn is_sane(id: &[u8]) -> bool {
    let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:+/=".contains(byte);
    (1..=LENGTH_MAX).contains(&id.len()) && id.iter().all(good)
}

#[cfg(test)]
mod tests;
