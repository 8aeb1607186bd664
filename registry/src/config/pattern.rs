//! Patterns over names.

use std::borrow::Cow;
use std::fmt;

use globset::{GlobBuilder, GlobMatcher};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A pattern over names of repositories or tags: `*` is any text without a `/`, `**` any number of
/// parts between slashes, `?` one letter, `[a-z]` one of some, `{a,b}` either.
#[derive(Clone)]
pub struct Pattern(GlobMatcher);

/// Whether each `**` is a whole part of a pattern. Beside letters it would mean no more than `*`, and
/// a rule would say nothing of what it seems to speak of.
pub(crate) fn stars_stand_alone(text: &str) -> bool {
    text.match_indices("**").all(|(at, stars)| {
        let (before, after) = text.split_at(at);
        let after = after.strip_prefix(stars).unwrap_or_default();
        // One that is all of an alternative is read as `*`.
        let behind_brace = before.ends_with(['{', ',']) && after.starts_with('/');
        (before.is_empty() || before.ends_with('/') || behind_brace)
            && (after.is_empty() || after.starts_with(['/', '}', ',']))
    })
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, globset::Error> {
        // As in the policy: a pattern means the same wherever it is written.
        let glob = GlobBuilder::new(text).literal_separator(true).backslash_escape(true).build()?;
        Ok(Self(glob.compile_matcher()))
    }

    /// Whether a name matches.
    pub fn matches(&self, name: &str) -> bool {
        self.0.is_match(name)
    }

    /// Whether a name matches one of `patterns`.
    pub fn any(patterns: &[Self], name: &str) -> bool {
        patterns.iter().any(|pattern| pattern.matches(name))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.glob().glob())
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.glob().glob())
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.glob() == other.0.glob()
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let malformed =
            || D::Error::invalid_value(Unexpected::Str(&text), &"a pattern such as \"team/**\"");
        if !stars_stand_alone(&text) {
            let wanted = &"`**` alone between slashes, as in \"team/**\" or \"team-*/**\"";
            return Err(D::Error::invalid_value(Unexpected::Str(&text), wanted));
        }
        match Self::parse(&text) {
            Ok(pattern) if !text.is_empty() => Ok(pattern),
            Ok(_) | Err(_) => Err(malformed()),
        }
    }
}

impl JsonSchema for Pattern {
    fn schema_name() -> Cow<'static, str> {
        "Pattern".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "pattern", "examples": ["team/**", "v*"] })
    }
}

#[cfg(test)]
mod tests;
