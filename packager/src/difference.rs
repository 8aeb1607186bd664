//! What of a container's memory changed between two checkpoints.
//!
//! Pages are found by what they are the memory of: a process and an address. Two that are stored in
//! one place are the same; others are compared by their hashes. Where a checkpoint carries no page
//! hashes, the chunks that hold such pages are fetched and hashed here, and only those.

mod compare;
mod fetch;
mod side;

use std::io;
use std::path::PathBuf;

use kybernate_spec::Digest;
use schemars::JsonSchema;
use serde::Serialize;

use self::compare::{Ask, Pending};
use self::side::Side;
use crate::artifact::{ArtifactError, Checkpoint};
use crate::inside::MemoryKind;
use crate::inside::memory::hexadecimal;
use crate::progress::Progress;
use crate::store::Store;
use crate::stored::StoredError;
use crate::unpack::UnpackError;
use crate::wanted;

/// A page's bytes.
pub const PAGE_BYTES: u64 = 4096;

/// Why two checkpoints could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum DifferenceError {
    /// One of them could not be opened.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// One of them could not be read.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A pagemap of one of them cannot be read.
    #[error("failed to read which memory is where")]
    Memory(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

impl From<StoredError> for DifferenceError {
    fn from(error: StoredError) -> Self {
        Self::Memory(error.into())
    }
}

/// What changed. Claims, as far as page hashes are: whoever packed has computed those.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// The checkpoint that the other is compared with.
    pub from: Digest,
    /// The other.
    pub to: Digest,
    /// Whether the second was taken with the first as its base.
    pub based: bool,
    /// All pages of all processes.
    pub pages: PageCounts,
    /// Processes of either, by their ids.
    pub processes: Vec<ProcessDifference>,
    /// Memory that several processes may share, by its lowest mapper.
    pub shared: Vec<RegionDifference>,
    /// Bytes of pages that were fetched to compare them.
    pub fetched_bytes: u64,
}

/// Pages of 4096 bytes by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PageCounts {
    /// Stored in both, with the same content.
    pub unchanged: u64,
    /// Stored in both, with other content.
    pub changed: u64,
    /// Stored in the second only.
    pub added: u64,
    /// Stored in the first; in the second they are not in the dump.
    pub removed: u64,
    /// Stored in the first; in the second they are zero.
    pub zeroed: u64,
    /// Stored in both, not compared because that would have needed their bytes.
    pub unknown: u64,
}

/// What became of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    /// It is in both.
    Kept,
    /// It is in the second only.
    Added,
    /// It is in the first only.
    Removed,
}

/// What became of a process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessDifference {
    /// Its id.
    pub pid: u32,
    /// Its name, in the second where it is in both.
    pub name: String,
    /// Which of the two it is in.
    pub change: Change,
    /// Its own pages, those outside of any mapping too.
    pub pages: PageCounts,
    /// Its mappings in the second, and those of the first where the second has none.
    pub regions: Vec<RegionDifference>,
}

/// What became of a mapping, or of shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RegionDifference {
    /// The process, or the lowest one that maps it.
    pub pid: u32,
    /// First address, in hexadecimal.
    #[serde(serialize_with = "hexadecimal")]
    #[schemars(with = "String")]
    pub start: u64,
    /// First address after it, in hexadecimal.
    #[serde(serialize_with = "hexadecimal")]
    #[schemars(with = "String")]
    pub end: u64,
    /// Its kind.
    pub kind: MemoryKind,
    /// The file it maps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Which of the two it is in.
    pub change: Change,
    /// Its pages.
    pub pages: PageCounts,
}

/// Two checkpoints whose indexes are at hand.
#[derive(Debug)]
pub struct Comparison {
    from: Side,
    to: Side,
    first: Difference,
    pending: Pending,
}

impl PageCounts {
    /// Returns the pages whose content is another one, or gone.
    pub const fn differing(&self) -> u64 {
        self.changed
            .saturating_add(self.added)
            .saturating_add(self.removed)
            .saturating_add(self.zeroed)
    }

    /// Whether there is nothing to tell.
    pub const fn is_quiet(&self) -> bool {
        self.differing() == 0 && self.unknown == 0
    }

    const fn add(&mut self, other: &Self) {
        self.unchanged = self.unchanged.saturating_add(other.unchanged);
        self.changed = self.changed.saturating_add(other.changed);
        self.added = self.added.saturating_add(other.added);
        self.removed = self.removed.saturating_add(other.removed);
        self.zeroed = self.zeroed.saturating_add(other.zeroed);
        self.unknown = self.unknown.saturating_add(other.unknown);
    }
}

impl Comparison {
    /// Fetches everything but the pages of both, and compares as far as that goes.
    pub async fn begin(
        from: (&Store, Checkpoint),
        to: (&Store, Checkpoint),
    ) -> Result<Self, DifferenceError> {
        let (from, to) = futures::try_join!(Side::open(from.0, from.1), Side::open(to.0, to.1))?;
        let compared = wanted::blocking(move |wanted| {
            let mut pending = Pending::default();
            let first = compare::compare(&from, &to, &mut Ask::Places(&mut pending), wanted);
            Ok((from, to, first, pending))
        });
        let (from, to, first, pending) =
            compared.await.map_err(|error| DifferenceError::Io("compare", error))?;
        Ok(Self { first: first?, from, to, pending })
    }

    /// Returns how many bytes [`Self::finish`] has to fetch: page hashes where there are any,
    /// else the chunks with pages that only their content can tell apart.
    pub fn bytes_to_fetch(&self) -> u64 {
        if self.pending.is_empty() {
            return 0;
        }
        let one = |side: &Side, needed| side.bytes_to_fetch(needed);
        one(&self.from, &self.pending.from).saturating_add(one(&self.to, &self.pending.to))
    }

    /// Returns what is known without fetching anything more.
    pub fn as_far_as_known(self) -> Difference {
        self.first
    }

    /// Fetches what is needed, and compares everything.
    pub async fn finish(mut self, progress: &Progress) -> Result<Difference, DifferenceError> {
        if self.pending.is_empty() {
            return Ok(self.first);
        }
        progress.step("fetch");
        progress.expect(self.bytes_to_fetch());
        let fetched = futures::try_join!(
            self.from.fetch_hashes(&self.pending.from, progress),
            self.to.fetch_hashes(&self.pending.to, progress)
        )?;
        progress.step("compare");
        let (from, to) = (self.from, self.to);
        let compared = wanted::blocking(move |wanted| {
            Ok(compare::compare(&from, &to, &mut Ask::Hashes, wanted))
        });
        let compared = compared.await.map_err(|error| DifferenceError::Io("compare", error))?;
        Ok(Difference { fetched_bytes: fetched.0.saturating_add(fetched.1), ..compared? })
    }
}

/// Makes a directory of our own for images, which is removed with what is returned.
fn scratch() -> io::Result<(tempfile::TempDir, PathBuf)> {
    let scratch = tempfile::tempdir()?;
    let images = scratch.path().join("images");
    fs_err::create_dir(&images)?;
    Ok((scratch, images))
}
