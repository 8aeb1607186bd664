//! Where an artifact is: in a registry or in an image layout on disk.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Digest, DigestError, NameError, RepositoryName, Tag, TagError};

mod credentials;

pub use self::credentials::without_credentials;

/// What ends the scheme of a URL.
const SCHEME_END: &str = "://";

/// `host[:port]/name[:tag][@digest]`: something in a registry.
///
/// The host is always written: there is no default registry, so that a checkpoint is never pushed
/// to a public place by a typing mistake.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// `host` or `host:port`.
    pub registry: Box<str>,
    /// The repository within the registry.
    pub repository: RepositoryName,
    /// A name for a digest; without tag and digest, `latest` is meant.
    pub tag: Option<Tag>,
    /// The content itself. When both are given, the digest decides.
    pub digest: Option<Digest>,
}

/// `oci:DIR[:tag][@digest]`: something in an OCI image layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayoutReference {
    /// The directory that holds `oci-layout`.
    pub directory: PathBuf,
    /// The `org.opencontainers.image.ref.name` in `index.json`.
    pub tag: Option<Tag>,
    /// The content itself.
    pub digest: Option<Digest>,
}

/// Either kind, as the command line accepts them everywhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// In a registry.
    Registry(Reference),
    /// In an image layout on disk.
    Layout(LayoutReference),
}

/// Why a text is not a [`Reference`], [`LayoutReference`] or [`Location`]. Credentials that somebody
/// wrote into it are not repeated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a reference (host[:port]/name[:tag][@digest] or oci:DIR[:tag])")]
pub struct ReferenceError {
    text: Box<str>,
    #[source]
    kind: ReferenceErrorKind,
}

/// Which part of a reference is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceErrorKind {
    /// There is no host, or the first component does not look like one.
    #[error("it must begin with a registry's host, as in registry.example.com/{0}")]
    MissingHost(Box<str>),
    /// The host has characters no host has.
    #[error("{0:?} is not a host with an optional port")]
    MalformedHost(Box<str>),
    /// The name does not parse.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The tag does not parse.
    #[error(transparent)]
    Tag(#[from] TagError),
    /// The digest does not parse.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// It is a URL.
    #[error("it is a URL: leave out {0:?}")]
    Scheme(Box<str>),
    /// It holds the name of a user, with a password maybe.
    #[error(
        "it holds credentials, which other users of the machine can read on a command line: \
         leave them out and keep them with `kyb login {0}`; a password that was shown is best changed"
    )]
    Credentials(Box<str>),
    /// The directory of a layout is empty.
    #[error("there is no directory after \"oci:\"")]
    MissingDirectory,
}

impl Reference {
    /// Returns the same repository with this digest and no tag.
    #[must_use]
    pub fn at(&self, digest: &Digest) -> Self {
        Self { tag: None, digest: Some(digest.clone()), ..self.clone() }
    }

    /// Returns what follows the repository in a manifest's address: the digest, the tag, or
    /// `latest`.
    pub fn manifest_reference(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.to_string(),
            (None, None) => "latest".to_owned(),
        }
    }

    /// Returns the host without its port.
    pub fn host(&self) -> &str {
        match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.registry,
        }
    }

    /// Whether the host is this machine's loopback interface, where plain HTTP is the custom.
    pub fn is_loopback(&self) -> bool {
        let host = self.host();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost"
            || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl Location {
    /// Returns the same place with this digest and no tag.
    #[must_use]
    pub fn at(&self, digest: &Digest) -> Self {
        match self {
            Self::Registry(reference) => Self::Registry(reference.at(digest)),
            Self::Layout(layout) => Self::Layout(LayoutReference {
                tag: None,
                digest: Some(digest.clone()),
                ..layout.clone()
            }),
        }
    }

    /// Returns the tag, if one was written.
    pub fn tag(&self) -> Option<&Tag> {
        match self {
            Self::Registry(reference) => reference.tag.as_ref(),
            Self::Layout(layout) => layout.tag.as_ref(),
        }
    }

    /// Returns the digest, if one was written.
    pub fn digest(&self) -> Option<&Digest> {
        match self {
            Self::Registry(reference) => reference.digest.as_ref(),
            Self::Layout(layout) => layout.digest.as_ref(),
        }
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_registry(text).map_err(|kind| ReferenceError::of(text, kind))
    }
}

impl FromStr for Location {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |kind| ReferenceError::of(text, kind);
        match text.strip_prefix("oci:") {
            Some(layout) => parse_layout(layout).map(Self::Layout).map_err(wrong),
            None => text.parse().map(Self::Registry),
        }
    }
}

impl ReferenceError {
    fn of(text: &str, kind: ReferenceErrorKind) -> Self {
        Self { text: without_credentials(text).into(), kind }
    }
}

fn parse_registry(text: &str) -> Result<Reference, ReferenceErrorKind> {
    if let Some(range) = credentials::credentials(text) {
        let host = text.get(range.end + 1..).unwrap_or_default().split('/').next();
        let host = host.filter(|host| host.bytes().all(is_of_a_host));
        let host = host.filter(|host| !host.is_empty()).unwrap_or("REGISTRY");
        return Err(ReferenceErrorKind::Credentials(host.into()));
    }
    if let Some((scheme, _)) = text.split_once(SCHEME_END) {
        return Err(ReferenceErrorKind::Scheme(format!("{scheme}{SCHEME_END}").into()));
    }
    let (rest, digest) = split_digest(text)?;
    let missing = || ReferenceErrorKind::MissingHost(rest.into());
    let (registry, path) = rest.split_once('/').ok_or_else(missing)?;
    let looks_like_host = registry.contains(['.', ':']) || registry == "localhost";
    if !looks_like_host {
        return Err(missing());
    }
    if !registry.bytes().all(is_of_a_host) || registry.starts_with(':') || !has_port(registry) {
        return Err(ReferenceErrorKind::MalformedHost(registry.into()));
    }
    let (name, tag) = split_tag(path)?;
    Ok(Reference { registry: registry.into(), repository: name.parse()?, tag, digest })
}

/// Whether what follows a host's last colon is a port, when there is a colon.
fn has_port(registry: &str) -> bool {
    // Those in brackets belong to an address.
    let rest = registry.rsplit_once(']').map_or(registry, |(_, rest)| rest);
    rest.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_ok())
}

fn is_of_a_host(letter: u8) -> bool {
    letter.is_ascii_alphanumeric() || b".-:[]".contains(&letter)
}

fn parse_layout(text: &str) -> Result<LayoutReference, ReferenceErrorKind> {
    let (rest, digest) = split_digest(text)?;
    let (directory, tag) = match rest.rsplit_once(':') {
        // A colon before a slash belongs to the path.
        Some((directory, tag)) if !tag.contains('/') => (directory, Some(tag.parse()?)),
        _ => (rest, None),
    };
    if directory.is_empty() {
        return Err(ReferenceErrorKind::MissingDirectory);
    }
    Ok(LayoutReference { directory: Path::new(directory).to_owned(), tag, digest })
}

fn split_digest(text: &str) -> Result<(&str, Option<Digest>), DigestError> {
    match text.split_once('@') {
        Some((rest, digest)) => Ok((rest, Some(digest.parse()?))),
        None => Ok((text, None)),
    }
}

fn split_tag(path: &str) -> Result<(&str, Option<Tag>), TagError> {
    match path.split_once(':') {
        Some((name, tag)) => Ok((name, Some(tag.parse()?))),
        None => Ok((path, None)),
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        write_suffix(f, self.tag.as_ref(), self.digest.as_ref())
    }
}

impl fmt::Display for LayoutReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "oci:{}", self.directory.display())?;
        write_suffix(f, self.tag.as_ref(), self.digest.as_ref())
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::Layout(layout) => layout.fmt(f),
        }
    }
}

fn write_suffix(
    f: &mut fmt::Formatter<'_>,
    tag: Option<&Tag>,
    digest: Option<&Digest>,
) -> fmt::Result {
    if let Some(tag) = tag {
        write!(f, ":{tag}")?;
    }
    if let Some(digest) = digest {
        write!(f, "@{digest}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
