//! Who asks, and how a policy names them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use globset::{GlobBuilder, GlobMatcher};
use serde_json::{Map, Value};

use super::grant::Grants;

/// Who sends a request, as far as that is proven.
#[derive(Debug, Clone, Default)]
pub struct Identity {
    /// What its credentials say.
    pub holder: Holder,
    /// The client certificate that its connection was made with.
    pub certificate: Option<Arc<CertificateNames>>,
    /// What a token is limited to. Without, the policy alone decides.
    pub grants: Option<Grants>,
}

/// What credentials prove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Holder {
    /// There were none.
    #[default]
    Nobody,
    /// A user of the htpasswd file, by password or by a token of ours.
    User(Box<str>),
    /// Whoever an issuer vouches for.
    Token {
        /// The issuer's name in our configuration.
        issuer: Arc<str>,
        /// Claim `sub`; empty when there is none.
        subject: Box<str>,
        /// All claims.
        claims: Arc<Map<String, Value>>,
    },
}

/// The names in a client certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CertificateNames {
    /// The subject's common names, and alternative names that are URIs or DNS names.
    pub names: Vec<String>,
}

/// A pattern for identities.
///
/// ```text
/// anonymous                       everyone, also without credentials
/// authenticated                   everyone with credentials or a client certificate
/// user:NAME                       a user of the htpasswd file
/// group:NAME                      whoever the policy lists in that group
/// token:ISSUER:SUBJECT            a token of that issuer, by its claim `sub`
/// claim:ISSUER:CLAIM=VALUE        a token of that issuer with a claim that is, or lists, the value;
///                                 a CLAIM that begins with / is a JSON pointer
/// certificate:NAME                a client certificate with that common name, URI or DNS name
/// ```
///
/// NAME, SUBJECT and VALUE are globs in which `*` also stands for `/`.
#[derive(Debug, Clone)]
pub(super) enum Subject {
    Anonymous,
    Authenticated,
    Group(String),
    User(GlobMatcher),
    Certificate(GlobMatcher),
    Token { issuer: String, subject: GlobMatcher },
    Claim { issuer: String, claim: String, value: GlobMatcher },
}

/// Why a text is not a [`Subject`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SubjectError {
    #[error(
        "{0:?} names nobody; write anonymous, authenticated, user:NAME, group:NAME, \
         certificate:NAME, token:ISSUER:SUBJECT or claim:ISSUER:CLAIM=VALUE"
    )]
    Shape(String),
    #[error("{0:?} is no pattern ({1})")]
    Glob(String, globset::ErrorKind),
}

impl Identity {
    /// Whether nothing is proven.
    pub fn is_anonymous(&self) -> bool {
        self.holder == Holder::Nobody && self.certificate.is_none()
    }

    /// Returns what the identity is called, also in logs; nothing when it is anonymous.
    pub fn name(&self) -> Option<String> {
        match (&self.holder, &self.certificate) {
            (Holder::User(name), _) => Some(format!("user:{name}")),
            (Holder::Token { issuer, subject, .. }, _) => Some(format!("token:{issuer}:{subject}")),
            (Holder::Nobody, Some(certificate)) => {
                let name = certificate.names.first().map_or("", String::as_str);
                Some(format!("certificate:{name}"))
            }
            (Holder::Nobody, None) => None,
        }
    }
}

impl Subject {
    /// Whether the pattern means `identity`; a group means nobody by itself.
    pub(super) fn matches(&self, identity: &Identity) -> bool {
        match (self, &identity.holder) {
            (Self::Anonymous, _) => true,
            (Self::Authenticated, _) => !identity.is_anonymous(),
            (Self::Certificate(glob), _) => {
                let names = identity.certificate.iter().flat_map(|held| &held.names);
                names.into_iter().any(|name| glob.is_match(name))
            }
            (Self::User(glob), Holder::User(name)) => glob.is_match(&**name),
            (Self::Token { issuer, subject }, Holder::Token { issuer: by, subject: held, .. }) => {
                **issuer == **by && subject.is_match(&**held)
            }
            (Self::Claim { issuer, claim, value }, Holder::Token { issuer: by, claims, .. }) => {
                **issuer == **by && holds(claims, claim, value)
            }
            (Self::Group(_) | Self::User(_) | Self::Token { .. } | Self::Claim { .. }, _) => false,
        }
    }

    /// Returns the issuer that it speaks of.
    pub(super) fn issuer(&self) -> Option<&str> {
        match self {
            Self::Token { issuer, .. } | Self::Claim { issuer, .. } => Some(issuer),
            _ => None,
        }
    }
}

/// Whether a claim is, or lists, a value.
fn holds(claims: &Map<String, Value>, claim: &str, value: &GlobMatcher) -> bool {
    let matches = |found: &Value| match found {
        Value::String(text) => value.is_match(text),
        Value::Bool(_) | Value::Number(_) => value.is_match(found.to_string()),
        _ => false,
    };
    match find(claims, claim) {
        Some(Value::Array(found)) => found.iter().any(matches),
        Some(found) => matches(found),
        None => false,
    }
}

fn find<'a>(claims: &'a Map<String, Value>, claim: &str) -> Option<&'a Value> {
    let Some(pointer) = claim.strip_prefix('/') else { return claims.get(claim) };
    let (first, rest) = pointer.split_once('/').map_or((pointer, None), |(a, b)| (a, Some(b)));
    // RFC 6901, 4: the order matters.
    let found = claims.get(&first.replace("~1", "/").replace("~0", "~"))?;
    rest.map_or(Some(found), |rest| found.pointer(&format!("/{rest}")))
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, SubjectError> {
        let shape = || SubjectError::Shape(text.to_owned());
        let full = |part: &str| Some(part.to_owned()).filter(|part| !part.is_empty());
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let glob = |pattern: &str| {
            let pattern = full(pattern).ok_or_else(shape)?;
            let built = GlobBuilder::new(&pattern).backslash_escape(true).build();
            let wrong =
                |error: globset::Error| SubjectError::Glob(pattern.clone(), error.kind().clone());
            Ok(built.map_err(wrong)?.compile_matcher())
        };
        let by_issuer = || {
            let (issuer, rest) = rest.split_once(':').ok_or_else(shape)?;
            Ok::<_, SubjectError>((full(issuer).ok_or_else(shape)?, rest))
        };
        match kind {
            "anonymous" if rest.is_empty() && !text.contains(':') => Ok(Self::Anonymous),
            "authenticated" if rest.is_empty() && !text.contains(':') => Ok(Self::Authenticated),
            "user" => Ok(Self::User(glob(rest)?)),
            "group" => Ok(Self::Group(full(rest).ok_or_else(shape)?)),
            "certificate" => Ok(Self::Certificate(glob(rest)?)),
            "token" => {
                let (issuer, subject) = by_issuer()?;
                Ok(Self::Token { issuer, subject: glob(subject)? })
            }
            "claim" => {
                let (issuer, rest) = by_issuer()?;
                let (claim, value) = rest.split_once('=').ok_or_else(shape)?;
                let claim = full(claim).ok_or_else(shape)?;
                Ok(Self::Claim { issuer, claim, value: glob(value)? })
            }
            _ => Err(shape()),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().as_deref().unwrap_or("anonymous"))
    }
}

#[cfg(test)]
mod tests;
