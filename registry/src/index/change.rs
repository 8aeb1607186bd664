//! What is in the index, and how it is named.
//!
//! ```text
//! list          key                                            value
//! repositories   <name>                                         bytes shown, u64 little-endian
//! tags           <name> 0 <tag>                                 –
//! referrers      <name> 0 <alg>-<hex> 0 <alg>-<hex>             descriptor of the second, JSON
//! links          <name> 0 b|m <alg>-<hex>                       bytes of the content, u64
//! ```
//!
//! No name, tag or digest holds a zero byte, so the keys sort as the names do.

use kybernate_spec::{Descriptor, Digest, RepositoryName, Tag};

use crate::gc::LinkKind;
use crate::store::file_name;

/// A list in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Repositories,
    Tags,
    Referrers,
    Links,
}

/// An entry that is there now, or no longer.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(super) list: List,
    pub(super) key: Vec<u8>,
    pub(super) value: Option<Vec<u8>>,
}

impl Change {
    /// The repository exists, if only as a directory.
    pub(crate) fn repository(name: &RepositoryName) -> Self {
        let value = Some(Vec::new());
        Self { list: List::Repositories, key: name.as_str().as_bytes().to_vec(), value }
    }

    /// The tag exists.
    pub(crate) fn tag(name: &RepositoryName, tag: &Tag) -> Self {
        Self { list: List::Tags, key: tag_key(name, tag), value: Some(Vec::new()) }
    }

    /// The tag does not exist.
    pub(crate) fn no_tag(name: &RepositoryName, tag: &Tag) -> Self {
        Self { list: List::Tags, key: tag_key(name, tag), value: None }
    }

    /// The manifest is here and refers to `subject`. Nothing when its descriptor cannot be told.
    pub(crate) fn referrer(
        name: &RepositoryName,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Result<Self, serde_json::Error> {
        let key = referrer_key(name, subject, &referrer.digest);
        let value = Some(serde_json::to_vec(referrer)?);
        Ok(Self { list: List::Referrers, key, value })
    }

    /// The manifest does not refer to `subject`, or is not here.
    pub(crate) fn no_referrer(name: &RepositoryName, subject: &Digest, referrer: &Digest) -> Self {
        let key = referrer_key(name, subject, referrer);
        Self { list: List::Referrers, key, value: None }
    }

    /// The repository shows content of so many bytes.
    pub(crate) fn link(name: &RepositoryName, kind: LinkKind, digest: &Digest, bytes: u64) -> Self {
        let value = Some(bytes.to_le_bytes().to_vec());
        Self { list: List::Links, key: link_key(name, kind, digest), value }
    }

    /// The repository does not show the content.
    pub(crate) fn no_link(name: &RepositoryName, kind: LinkKind, digest: &Digest) -> Self {
        Self { list: List::Links, key: link_key(name, kind, digest), value: None }
    }

    /// The repository's part of the key.
    pub(super) fn repository_key(&self) -> &[u8] {
        self.key.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

/// What all keys of a repository begin with, but for its own.
pub(super) fn prefix(name: &RepositoryName) -> Vec<u8> {
    [name.as_str().as_bytes(), &[0]].concat()
}

/// What the keys of all referrers of `subject` begin with.
pub(super) fn subject_prefix(name: &RepositoryName, subject: &Digest) -> Vec<u8> {
    [&prefix(name), file_name(subject).as_bytes(), &[0]].concat()
}

fn tag_key(name: &RepositoryName, tag: &Tag) -> Vec<u8> {
    [&prefix(name), tag.as_str().as_bytes()].concat()
}

fn referrer_key(name: &RepositoryName, subject: &Digest, referrer: &Digest) -> Vec<u8> {
    [&subject_prefix(name, subject), file_name(referrer).as_bytes()].concat()
}

fn link_key(name: &RepositoryName, kind: LinkKind, digest: &Digest) -> Vec<u8> {
    let kind = match kind {
        LinkKind::Blob => b"b",
        LinkKind::Manifest => b"m",
    };
    [&prefix(name), kind.as_slice(), file_name(digest).as_bytes()].concat()
}
