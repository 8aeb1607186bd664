//! Content digests.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256, Sha512};

/// The hash functions of the OCI image specification that Kybernate stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// SHA-256, the algorithm every client knows.
    Sha256,
    /// SHA-512.
    Sha512,
}

/// A content digest: an algorithm, `:`, and lowercase hexadecimal digits.
///
/// A `Digest` was parsed or computed, never assembled, so holding one means the text is canonical
/// and safe as a file name (image specification, "Digests").
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    algorithm: Algorithm,
    hex: Box<str>,
}

/// Why a text is not a [`Digest`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// There is no `:` between algorithm and digits.
    #[error("digest {0:?} has no algorithm")]
    MissingAlgorithm(Box<str>),
    /// The algorithm is not one Kybernate knows.
    #[error("digest algorithm {0:?} is not supported, use sha256 or sha512")]
    UnsupportedAlgorithm(Box<str>),
    /// The digits are too few, too many, uppercase, or not hexadecimal.
    #[error("digest {0:?} is not {1} lowercase hexadecimal digits after the algorithm")]
    MalformedHex(Box<str>, usize),
}

/// Computes a [`Digest`] while bytes pass by.
#[derive(Clone, Debug)]
pub struct Hasher {
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Sha256(Sha256),
    Sha512(Sha512),
}

impl Algorithm {
    /// Returns the name used before the `:`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Returns how many hexadecimal digits a digest has.
    pub const fn hex_length(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Sha512 => 128,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "sha256" => Ok(Self::Sha256),
            "sha512" => Ok(Self::Sha512),
            other => Err(DigestError::UnsupportedAlgorithm(other.into())),
        }
    }
}

impl Digest {
    /// Hashes `content` with SHA-256.
    pub fn of(content: &[u8]) -> Self {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(content);
        hasher.finish()
    }

    /// Returns the algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the digits without the algorithm.
    pub fn hex(&self) -> &str {
        &self.hex
    }
}

impl Hasher {
    /// Starts a hash.
    pub fn new(algorithm: Algorithm) -> Self {
        let state = match algorithm {
            Algorithm::Sha256 => State::Sha256(Sha256::new()),
            Algorithm::Sha512 => State::Sha512(Sha512::new()),
        };
        Self { state }
    }

    /// Takes more bytes in.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.state {
            State::Sha256(hash) => hash.update(bytes),
            State::Sha512(hash) => hash.update(bytes),
        }
    }

    /// Returns the digest of everything taken in.
    pub fn finish(self) -> Digest {
        match self.state {
            State::Sha256(hash) => {
                Digest { algorithm: Algorithm::Sha256, hex: hex(&hash.finalize()) }
            }
            State::Sha512(hash) => {
                Digest { algorithm: Algorithm::Sha512, hex: hex(&hash.finalize()) }
            }
        }
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (algorithm, hex) =
            text.split_once(':').ok_or_else(|| DigestError::MissingAlgorithm(text.into()))?;
        let algorithm: Algorithm = algorithm.parse()?;
        let canonical = hex.len() == algorithm.hex_length()
            && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !canonical {
            return Err(DigestError::MalformedHex(text.into(), algorithm.hex_length()));
        }
        Ok(Self { algorithm, hex: hex.into() })
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm, self.hex)
    }
}

impl JsonSchema for Digest {
    fn schema_name() -> Cow<'static, str> {
        "Digest".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A content digest: an algorithm, `:`, and lowercase hexadecimal digits.",
            "pattern": "^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$",
        })
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn hex(bytes: &[u8]) -> Box<str> {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text.into()
}

#[cfg(test)]
mod tests;
