//! Which endpoint a path names.
//!
//! Repository names hold `/`, and may hold any word the API uses, so a path is read from the
//! right: what stands last says what stands before it.

use std::borrow::Cow;

/// An endpoint and the parts of its path, percent-decoded and not yet checked.
#[derive(Debug, PartialEq, Eq)]
pub enum Route<'a> {
    /// `/livez`: the process runs.
    Live,
    /// `/readyz`: the process serves.
    Ready,
    /// `/startupz`: the process has started to serve.
    Started,
    /// `/metrics`: figures for Prometheus.
    Metrics,
    /// `/token`: our own token server.
    Token,
    /// `/token/keys`: the public keys of its tokens.
    TokenKeys,
    /// `/v2/`: the API is spoken here.
    Base,
    /// `/v2/_catalog`: repositories.
    Catalog,
    /// `/v2/<name>/tags/list`.
    Tags(Cow<'a, str>),
    /// `/v2/<name>/blobs/<digest>`.
    Blob(Cow<'a, str>, Cow<'a, str>),
    /// `/v2/<name>/blobs/uploads/`: begins an upload.
    Uploads(Cow<'a, str>),
    /// `/v2/<name>/blobs/uploads/<id>`: an upload.
    Upload(Cow<'a, str>, Cow<'a, str>),
    /// `/v2/<name>/manifests/<tag or digest>`.
    Manifest(Cow<'a, str>, Cow<'a, str>),
    /// `/v2/<name>/referrers/<digest>`.
    Referrers(Cow<'a, str>, Cow<'a, str>),
}

impl<'a> Route<'a> {
    /// Every name that [`Self::label`] returns, and the name of what is no endpoint.
    pub const LABELS: [&'static str; 15] = [
        "livez",
        "readyz",
        "startupz",
        "metrics",
        "token",
        "token keys",
        "base",
        "catalog",
        "tags",
        "blob",
        "uploads",
        "upload",
        "manifest",
        "referrers",
        "none",
    ];

    /// Reads a path. Returns nothing when it is no endpoint of this registry.
    pub fn of(path: &'a str) -> Option<Self> {
        match path {
            "/livez" => return Some(Self::Live),
            "/readyz" => return Some(Self::Ready),
            "/startupz" => return Some(Self::Started),
            "/metrics" => return Some(Self::Metrics),
            "/token" => return Some(Self::Token),
            "/token/keys" => return Some(Self::TokenKeys),
            "/v2" | "/v2/" => return Some(Self::Base),
            "/v2/_catalog" => return Some(Self::Catalog),
            _ => {}
        }
        let path = path.strip_prefix("/v2/")?;
        if let Some(name) = strip(path, "/blobs/uploads/").or_else(|| strip(path, "/blobs/uploads"))
        {
            return Some(Self::Uploads(decode(name)?));
        }
        if let Some(name) = strip(path, "/tags/list") {
            return Some(Self::Tags(decode(name)?));
        }
        let (rest, last) = path.rsplit_once('/')?;
        let (name, kind) = rest.rsplit_once('/')?;
        let last = decode(last).filter(|last| !last.is_empty())?;
        match kind {
            "blobs" => Some(Self::Blob(decode(name)?, last)),
            "manifests" => Some(Self::Manifest(decode(name)?, last)),
            "referrers" => Some(Self::Referrers(decode(name)?, last)),
            "uploads" => Some(Self::Upload(decode(strip(name, "/blobs")?)?, last)),
            _ => None,
        }
    }

    /// Returns the endpoint's name for logs. It never holds an upload's id.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Live => "livez",
            Self::Ready => "readyz",
            Self::Started => "startupz",
            Self::Metrics => "metrics",
            Self::Token => "token",
            Self::TokenKeys => "token keys",
            Self::Base => "base",
            Self::Catalog => "catalog",
            Self::Tags(_) => "tags",
            Self::Blob(..) => "blob",
            Self::Uploads(_) => "uploads",
            Self::Upload(..) => "upload",
            Self::Manifest(..) => "manifest",
            Self::Referrers(..) => "referrers",
        }
    }

    /// Returns its path with names in the place of what differs.
    pub fn template(&self) -> &'static str {
        match self {
            Self::Live => "/livez",
            Self::Ready => "/readyz",
            Self::Started => "/startupz",
            Self::Metrics => "/metrics",
            Self::Token => "/token",
            Self::TokenKeys => "/token/keys",
            Self::Base => "/v2/",
            Self::Catalog => "/v2/_catalog",
            Self::Tags(_) => "/v2/{name}/tags/list",
            Self::Blob(..) => "/v2/{name}/blobs/{digest}",
            Self::Uploads(_) => "/v2/{name}/blobs/uploads/",
            Self::Upload(..) => "/v2/{name}/blobs/uploads/{id}",
            Self::Manifest(..) => "/v2/{name}/manifests/{reference}",
            Self::Referrers(..) => "/v2/{name}/referrers/{digest}",
        }
    }

    /// Whether it is for those who run the registry, and asks nobody who they are.
    pub fn is_for_operators(&self) -> bool {
        matches!(self, Self::Live | Self::Ready | Self::Started | Self::Metrics)
    }

    /// Returns the repository's name as it was asked for.
    pub fn repository(&self) -> Option<&str> {
        match self {
            Self::Live
            | Self::Ready
            | Self::Started
            | Self::Metrics
            | Self::Token
            | Self::TokenKeys
            | Self::Base
            | Self::Catalog => None,
            Self::Tags(name)
            | Self::Uploads(name)
            | Self::Blob(name, _)
            | Self::Upload(name, _)
            | Self::Manifest(name, _)
            | Self::Referrers(name, _) => Some(name),
        }
    }

    /// Returns the digest or tag as it was asked for.
    pub fn reference(&self) -> Option<&str> {
        match self {
            Self::Blob(_, reference)
            | Self::Manifest(_, reference)
            | Self::Referrers(_, reference) => Some(reference),
            // The last part of an upload's path is its secret.
            Self::Upload(..)
            | Self::Live
            | Self::Token
            | Self::TokenKeys
            | Self::Ready
            | Self::Started
            | Self::Metrics
            | Self::Base
            | Self::Catalog
            | Self::Tags(_)
            | Self::Uploads(_) => None,
        }
    }
}

/// Returns a path, or a part of one, without what suffices to go on with an upload: what follows
/// `blobs/uploads`, wherever that is. Some client may ask for anything below an upload.
pub fn without_secrets(path: &str) -> Cow<'_, str> {
    if !path.contains("blobs/uploads/") {
        return Cow::Borrowed(path);
    }
    let mut before = ["", ""];
    let part = |part| {
        let secret = before == ["blobs", "uploads"] && !str::is_empty(part);
        let [_, last] = before;
        before = [last, part];
        if secret { "REDACTED" } else { part }
    };
    Cow::Owned(path.split('/').map(part).collect::<Vec<_>>().join("/"))
}

/// Takes `suffix` off when a name is left before it.
fn strip<'a>(path: &'a str, suffix: &str) -> Option<&'a str> {
    path.strip_suffix(suffix).filter(|name| !name.is_empty())
}

/// Undoes percent-encoding: some clients write `sha256%3A…`. Returns nothing for what is not
/// percent-encoded UTF-8.
fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut pieces = text.split('%');
    bytes.extend_from_slice(pieces.next()?.as_bytes());
    for piece in pieces {
        let (hex, rest) = piece.split_at_checked(2)?;
        if !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

#[cfg(test)]
mod tests;
