//! Where everything is below the root.
//!
//! ```text
//! kybernate-registry.json                          version of this layout
//! blobs/<alg>/<hh>/<hex>                           content, named by its digest
//! blobs/<alg>/<hh>/<hex>.crc                       its checksums, see `checksum`
//! repositories/<name>/_blobs/<alg>/<hex>           the repository may show this blob (empty file)
//! repositories/<name>/_manifests/<alg>/<hex>       … and this manifest (record with its media type)
//! repositories/<name>/_tags/<tag>                  the tag's manifest (record)
//! repositories/<name>/_referrers/<alg>/<hex>/<alg>-<hex>   a referrer of the first (its descriptor)
//! repositories/<name>/_condemned/blob-<alg>-<hex>  garbage in quarantine: a link of `_blobs`
//! repositories/<name>/_condemned/manifest-<alg>-<hex>      … and one of `_manifests`
//! index/<name>/                                    sled over the above; may be deleted at any time
//! index.seal                                       says which of them agrees with the above (record)
//! uploads/<id>-<repository>                        bytes of an unfinished upload
//! tmp/                                             records being written; emptied at start
//! corrupt/                                         content that did not match, moved out of the way
//! gc/candidates.log                                where garbage may be, see `notes`
//! gc/everything                                    modified when garbage was last looked for everywhere
//! gc/settings                                      how long the last server kept garbage (record)
//! gc/scrub                                         how far scrubbing is (record)
//! notify/outbox.log                                events to be told, see `notify::outbox`
//! ```
//!
//! No component of a repository name begins with `_`, so the names cannot meet.

use std::path::{Path, PathBuf};

use kybernate_spec::{Algorithm, Digest, RepositoryName, Tag};

/// The paths of one store.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

/// Directories of links inside a repository, told from components of its name by the `_`.
pub(crate) const BLOBS: &str = "_blobs";
pub(crate) const MANIFESTS: &str = "_manifests";
pub(crate) const TAGS: &str = "_tags";
const REFERRERS: &str = "_referrers";
const CONDEMNED: &str = "_condemned";

impl Layout {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn version_file(&self) -> PathBuf {
        self.root.join(super::open::VERSION_FILE)
    }

    pub(crate) fn algorithm(&self, algorithm: Algorithm) -> PathBuf {
        self.root.join("blobs").join(algorithm.name())
    }

    /// The directory of a blob.
    pub(crate) fn shelf(&self, digest: &Digest) -> PathBuf {
        let first = digest.hex().get(..2).unwrap_or_default();
        self.algorithm(digest.algorithm()).join(first)
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.shelf(digest).join(digest.hex())
    }

    pub(crate) fn checksums(&self, digest: &Digest) -> PathBuf {
        self.shelf(digest).join(format!("{}.crc", digest.hex()))
    }

    pub(crate) fn repositories(&self) -> PathBuf {
        self.root.join("repositories")
    }

    pub(crate) fn repository(&self, name: &RepositoryName) -> PathBuf {
        self.repositories().join(name.as_str())
    }

    pub(crate) fn blob_links(&self, name: &RepositoryName, algorithm: Algorithm) -> PathBuf {
        self.repository(name).join(BLOBS).join(algorithm.name())
    }

    pub(crate) fn blob_link(&self, name: &RepositoryName, digest: &Digest) -> PathBuf {
        self.blob_links(name, digest.algorithm()).join(digest.hex())
    }

    pub(crate) fn manifest_links(&self, name: &RepositoryName, algorithm: Algorithm) -> PathBuf {
        self.repository(name).join(MANIFESTS).join(algorithm.name())
    }

    pub(crate) fn manifest_link(&self, name: &RepositoryName, digest: &Digest) -> PathBuf {
        self.manifest_links(name, digest.algorithm()).join(digest.hex())
    }

    pub(crate) fn tags(&self, name: &RepositoryName) -> PathBuf {
        self.repository(name).join(TAGS)
    }

    pub(crate) fn tag(&self, name: &RepositoryName, tag: &Tag) -> PathBuf {
        self.tags(name).join(tag.as_str())
    }

    pub(crate) fn referrers(&self, name: &RepositoryName, subject: &Digest) -> PathBuf {
        self.subjects(name, subject.algorithm()).join(subject.hex())
    }

    /// The directory of all that has referrers.
    pub(crate) fn subjects(&self, name: &RepositoryName, algorithm: Algorithm) -> PathBuf {
        self.repository(name).join(REFERRERS).join(algorithm.name())
    }

    pub(crate) fn condemned(&self, name: &RepositoryName) -> PathBuf {
        self.repository(name).join(CONDEMNED)
    }

    pub(crate) fn housekeeping(&self) -> PathBuf {
        self.root.join("gc")
    }

    pub(crate) fn candidates(&self) -> PathBuf {
        self.housekeeping().join("candidates.log")
    }

    pub(crate) fn index(&self) -> PathBuf {
        self.root.join("index")
    }

    pub(crate) fn seal(&self) -> PathBuf {
        self.root.join("index.seal")
    }

    pub(crate) fn everything(&self) -> PathBuf {
        self.housekeeping().join("everything")
    }

    pub(crate) fn gc_settings(&self) -> PathBuf {
        self.housekeeping().join("settings")
    }

    pub(crate) fn scrub_progress(&self) -> PathBuf {
        self.housekeeping().join("scrub")
    }

    pub(crate) fn uploads(&self) -> PathBuf {
        self.root.join("uploads")
    }

    pub(crate) fn notices(&self) -> PathBuf {
        self.root.join("notify")
    }

    pub(crate) fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub(crate) fn corrupt(&self) -> PathBuf {
        self.root.join("corrupt")
    }
}

/// Returns a digest as one file name.
pub(crate) fn file_name(digest: &Digest) -> String {
    format!("{}-{}", digest.algorithm(), digest.hex())
}

/// Reads what [`file_name`] made.
pub(crate) fn parse_file_name(name: &str) -> Option<Digest> {
    name.replacen('-', ":", 1).parse().ok()
}
