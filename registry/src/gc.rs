//! Garbage collection beside pushes and pulls.
//!
//! `reach` says what is needed, given what refers to what; `references` reads that out of
//! manifests. `collect` applies it to a repository: what is not needed and old enough goes to
//! quarantine, what has been there long enough goes for good. `contents` removes content that no
//! repository links any more. `run` puts them together: over what was noted since the last
//! time, or over everything.
//!
//! Nothing waits for a collection but the manifests of one repository, for some links at a time.

use std::time::Duration;

use kybernate_spec::{Digest, RepositoryName};
use serde::{Deserialize, Serialize};

mod collect;
mod contents;
mod reach;
mod references;
mod run;

pub(crate) use self::references::names;
pub use self::run::{Run, Scope};

/// How long what nothing needs is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// A blob is not condemned within this time after it was pushed, mounted or shown to a client:
    /// its manifest may be on the way.
    pub grace: Duration,
    /// A manifest without tag, index and subject is not condemned within this time after it was
    /// pushed or lost its tag; never, when there is no time.
    pub untagged: Option<Duration>,
    /// What is condemned can be revived for this time.
    pub quarantine: Duration,
}

impl Default for Settings {
    /// A push may take a working day: four hours until a blob is condemned, and twelve more in
    /// which its manifest brings it back.
    fn default() -> Self {
        Self {
            grace: Duration::from_hours(4),
            untagged: Some(Duration::from_hours(24)),
            quarantine: Duration::from_hours(12),
        }
    }
}

/// What a repository links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// A manifest.
    Manifest,
    /// A blob.
    Blob,
}

impl LinkKind {
    /// Returns the word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blob => "blob",
            Self::Manifest => "manifest",
        }
    }

    /// Reads what [`LinkKind::name`] returned.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        [Self::Blob, Self::Manifest].into_iter().find(|kind| kind.name() == name)
    }
}

/// What a collection did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// A link went to quarantine.
    Condemned {
        /// Where.
        repository: RepositoryName,
        /// Of what.
        kind: LinkKind,
        /// Which.
        digest: Digest,
    },
    /// A link came back from quarantine, because something needs it.
    Revived {
        /// Where.
        repository: RepositoryName,
        /// Of what.
        kind: LinkKind,
        /// Which.
        digest: Digest,
    },
    /// A link's quarantine is over and it went for good.
    Purged {
        /// Where.
        repository: RepositoryName,
        /// Of what.
        kind: LinkKind,
        /// Which.
        digest: Digest,
    },
    /// Content without any link went.
    Removed {
        /// Which.
        digest: Digest,
        /// How long it was.
        bytes: u64,
    },
    /// A repository was left alone, since what it needs cannot be told.
    Skipped {
        /// Which.
        repository: RepositoryName,
        /// Why.
        reason: String,
    },
    /// How far it is.
    Progress {
        /// Repositories looked at.
        done: u64,
        /// Repositories to look at.
        of: u64,
    },
    /// It is over.
    Done(Summary),
}

/// What a collection did in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Nothing was changed; the figures are what would be.
    pub dry_run: bool,
    /// It ended before its end, because it was asked to.
    pub stopped: bool,
    /// Repositories looked at.
    pub repositories: u64,
    /// Repositories left alone, since what they need cannot be told.
    pub skipped: u64,
    /// Links moved to quarantine.
    pub condemned: u64,
    /// Links moved back.
    pub revived: u64,
    /// Links whose quarantine was over.
    pub purged: u64,
    /// Contents removed.
    pub removed: u64,
    /// Bytes of the contents removed.
    pub removed_bytes: u64,
    /// How long it took.
    pub duration_ms: u64,
}

impl Summary {
    /// Whether there was nothing to do.
    pub fn is_idle(&self) -> bool {
        self.condemned + self.revived + self.purged + self.removed + self.skipped == 0
    }

    fn count(&mut self, event: &Event) {
        match event {
            Event::Condemned { .. } => self.condemned += 1,
            Event::Revived { .. } => self.revived += 1,
            Event::Purged { .. } => self.purged += 1,
            Event::Skipped { .. } => self.skipped += 1,
            Event::Removed { bytes, .. } => {
                self.removed += 1;
                self.removed_bytes += bytes;
            }
            Event::Progress { .. } | Event::Done(_) => {}
        }
    }
}

/// The first 128 bits of a digest: what sets of very many digests are made of.
///
/// Two digests that share them would keep each other's content, no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(u128);

impl Key {
    pub(crate) fn of(digest: &Digest) -> Self {
        let digits = digest.hex().get(..32).unwrap_or_default();
        Self(u128::from_str_radix(digits, 16).unwrap_or_default())
    }

    /// Returns which of `parts` it falls into.
    pub(crate) fn part(self, parts: u128) -> u128 {
        self.0 % parts.max(1)
    }
}

#[cfg(test)]
mod tests;
