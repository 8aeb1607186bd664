//! What a request brings to prove who sends it: the header `Authorization`.

use std::fmt;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::HeaderMap;
use http::header::AUTHORIZATION;

/// Longest header read; a token with many claims has a few KiB.
const HEADER_BYTES_MAX: usize = 32 << 10;

/// Some clients leave the padding out.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What was brought, unproven.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A name and a password (RFC 7617).
    Basic {
        /// The name; it has no `:`.
        user: String,
        /// The password.
        password: String,
    },
    /// A token (RFC 6750).
    Bearer(String),
}

/// Why a header is no credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    /// More than one header.
    #[error("there is more than one Authorization header")]
    Several,
    /// Too long, or bytes that no header of the kind has.
    #[error("the Authorization header cannot be read")]
    Malformed,
    /// Neither Basic nor Bearer.
    #[error("the scheme of the Authorization header is neither Basic nor Bearer")]
    Scheme,
}

impl Credentials {
    /// Reads the headers of a request. An empty name with an empty password is nothing: clients
    /// that have no password send that.
    pub fn of(headers: &HeaderMap) -> Result<Option<Self>, CredentialsError> {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let Some(value) = values.next() else { return Ok(None) };
        if values.next().is_some() {
            return Err(CredentialsError::Several);
        }
        match value.to_str() {
            Ok(text) => Self::parse(text),
            Err(_not_ascii) => Err(CredentialsError::Malformed),
        }
    }

    /// Reads the header's value.
    pub fn parse(text: &str) -> Result<Option<Self>, CredentialsError> {
        if text.len() > HEADER_BYTES_MAX {
            return Err(CredentialsError::Malformed);
        }
        let (scheme, rest) = text.split_once(' ').ok_or(CredentialsError::Malformed)?;
        let rest = rest.trim();
        if scheme.eq_ignore_ascii_case("basic") {
            let (user, password) = basic(rest).ok_or(CredentialsError::Malformed)?;
            let nothing = user.is_empty() && password.is_empty();
            Ok((!nothing).then_some(Self::Basic { user, password }))
        } else if !scheme.eq_ignore_ascii_case("bearer") {
            Err(CredentialsError::Scheme)
        } else if rest.is_empty() || !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            Err(CredentialsError::Malformed)
        } else {
            Ok(Some(Self::Bearer(rest.to_owned())))
        }
    }
}

fn basic(encoded: &str) -> Option<(String, String)> {
    let decoded = String::from_utf8(BASE64.decode(encoded).ok()?).ok()?;
    let (user, password) = decoded.split_once(':')?;
    let printable = !decoded.chars().any(char::is_control);
    printable.then(|| (user.to_owned(), password.to_owned()))
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Neither a password nor a token ever gets into a log.
        f.write_str(match self {
            Self::Basic { .. } => "Basic",
            Self::Bearer(_) => "Bearer",
        })
    }
}

#[cfg(test)]
mod tests;
