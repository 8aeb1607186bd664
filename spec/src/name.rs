//! Repository names and tags, as the distribution specification has them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A repository name: path components of lowercase letters, digits and separators, joined by `/`
/// (distribution specification, "Pulling manifests").
///
/// Holding one means it is safe as a relative path: no component is empty, `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepositoryName(Box<str>);

/// A tag: a letter, digit or `_`, then up to 127 letters, digits, `_`, `.` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(Box<str>);

/// Why a text is not a [`RepositoryName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a repository name: {1}")]
pub struct NameError(Box<str>, &'static str);

/// Why a text is not a [`Tag`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a tag: it must match [a-zA-Z0-9_][a-zA-Z0-9._-]{{0,127}}")]
pub struct TagError(Box<str>);

impl RepositoryName {
    /// Longest name accepted; the limit clients share, since the host name counts towards 255.
    pub const LENGTH_MAX: usize = 255;

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Tag {
    /// Longest tag the distribution specification allows.
    pub const LENGTH_MAX: usize = 128;

    /// Returns the tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RepositoryName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |why| Err(NameError(text.into(), why));
        if text.is_empty() || text.len() > Self::LENGTH_MAX {
            return refuse("it must have between 1 and 255 characters");
        }
        if !text.split('/').all(is_component) {
            return refuse(
                "each path component must be lowercase letters and digits, \
                 separated by one '.', one or two '_', or dashes",
            );
        }
        Ok(Self(text.into()))
    }
}

impl FromStr for Tag {
    type Err = TagError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let good = text.len() <= Self::LENGTH_MAX
            && text.bytes().next().is_some_and(word)
            && text.bytes().all(|b| word(b) || b == b'.' || b == b'-');
        if good { Ok(Self(text.into())) } else { Err(TagError(text.into())) }
    }
}

/// Whether `text` matches `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`.
fn is_component(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let edges = text.bytes().next().is_some_and(alphanumeric)
        && text.bytes().next_back().is_some_and(alphanumeric);
    edges
        && text
            .split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            .all(|separator| matches!(separator, "" | "." | "_" | "__") || is_dashes(separator))
}

fn is_dashes(text: &str) -> bool {
    text.bytes().all(|b| b == b'-')
}

macro_rules! text_newtype {
    ($type:ty, $error:ty) => {
        impl TryFrom<String> for $type {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.0.into()
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_newtype!(RepositoryName, NameError);
text_newtype!(Tag, TagError);

#[cfg(test)]
mod tests;
