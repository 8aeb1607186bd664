//! Reading everything again, to find what has rotted while nobody asked for it.
//!
//! A pass goes through all contents in order of their digests, re-hashes each and compares the
//! checksums beside it. What does not match is moved away as a read of it would, so the next push
//! heals it; checksums that do not match good content are made anew. Then it looks, repository by
//! repository, whether manifests have what they name: what was moved away now or before, or is gone.
//! How far a pass is is written down now and then: after a restart it goes on from there.
//!
//! One pass is under way at a time. Whoever scrubs, in the background or for an operator, moves it
//! on by one content or repository after the other.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kybernate_spec::{Digest, RepositoryName, chain};
use serde::{Deserialize, Serialize};

use crate::store::{Proof, Store, StoreError};

/// How often progress is told and written down.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// Bytes after which a pass rests, so that no rest is long.
const STRIDE: u64 = 1 << 20;

/// What looking at a manifest and for its parts counts as, of the bytes that may be read in a second:
/// 16 looks at the disk.
const LOOK_BYTES: u64 = 64 << 10;

/// How far a pass is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// When it began, in seconds since 1970.
    pub began: u64,
    /// The last content that was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Digest>,
    /// Contents read.
    pub contents: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Contents moved away.
    pub corrupt: u64,
    /// Contents whose checksums were made anew.
    pub repaired: u64,
    /// Contents and manifests that could not be read or looked at.
    #[serde(default)]
    pub unreadable: u64,
    /// All contents are read.
    #[serde(default)]
    pub read: bool,
    /// The last repository whose manifests were looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub looked_at: Option<RepositoryName>,
    /// Manifests looked at.
    #[serde(default)]
    pub manifests: u64,
    /// Manifests that lack something.
    #[serde(default)]
    pub incomplete: u64,
    /// It is over.
    pub done: bool,
}

impl Pass {
    /// Whether it has found anything that clients cannot be served.
    pub fn has_found(&self) -> bool {
        self.corrupt + self.unreadable + self.incomplete > 0
    }
}

/// What scrubbing tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// Content did not match its digest and was moved away.
    Corrupt {
        /// Which.
        digest: Digest,
    },
    /// Content was good and its checksums were not; they were made anew.
    Repaired {
        /// Which.
        digest: Digest,
    },
    /// Content could not be read; it was left as it is.
    Unreadable {
        /// Which.
        digest: Digest,
        /// Why.
        reason: String,
    },
    /// A manifest names what its repository does not have.
    Missing {
        /// What is not there; the manifest itself when that cannot be read.
        digest: Digest,
        /// Where.
        repository: RepositoryName,
        /// Which manifest.
        manifest: Digest,
    },
    /// How far it is.
    Progress(Pass),
    /// The pass is over, or was stopped.
    Done(Pass),
}

/// Scrubbing to be done: what is left of the pass under way, or a new one.
pub struct Run<'a> {
    /// On what.
    pub store: &'a Arc<Store>,
    /// Begin a new pass even if one is under way.
    pub restart: bool,
    /// Bytes read per second, at most.
    pub rate: Option<u64>,
    /// Is told what is found.
    pub tell: &'a mut dyn FnMut(&Event),
    /// Rests for a time and says whether to go on.
    pub rest: &'a mut dyn FnMut(Duration) -> bool,
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { restart, rate, .. } = self;
        f.debug_struct("Run").field("restart", restart).field("rate", rate).finish_non_exhaustive()
    }
}

impl Run<'_> {
    /// Scrubs until the pass is over or it is asked to stop. Blocks.
    pub fn scrub(mut self) -> Result<Pass, StoreError> {
        let store = Arc::clone(self.store);
        let began = store.scrubbing(|pass| {
            if self.restart || pass.done || pass.began == 0 {
                *pass = Pass { began: seconds(SystemTime::now()), ..Pass::default() };
            }
            Ok(pass.clone())
        })?;
        (self.tell)(&Event::Progress(began.clone()));
        let began = began.began;
        let mut pace = Pace { rate: self.rate, began: Instant::now(), bytes: 0 };
        let mut told = Instant::now();
        let mut repositories = None;
        loop {
            let pass = store.scrubbing(|pass| {
                // Another may have come to its end, or begun anew: then this one's work is done.
                if pass.began == began && !pass.done {
                    if pass.read {
                        self.look(pass, &mut pace, &mut repositories)?;
                    } else {
                        self.step(pass, &mut pace)?;
                    }
                }
                Ok(pass.clone())
            })?;
            let over = pass.done || pass.began != began;
            let stopped = !(self.rest)(pace.due());
            if over || stopped || told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                store.keep_scrub_progress(&pass)?;
                (self.tell)(&Event::Progress(pass.clone()));
            }
            if pass.done {
                store.metrics().note_incomplete(pass.incomplete);
            }
            if over || stopped {
                (self.tell)(&Event::Done(pass.clone()));
                return Ok(pass);
            }
        }
    }

    /// Reads the next contents, up to about a stride.
    fn step(&mut self, pass: &mut Pass, pace: &mut Pace) -> Result<(), StoreError> {
        let mut left = STRIDE;
        let next = self.store.contents_after(pass.after.as_ref())?;
        pass.read = next.is_empty();
        for digest in next {
            // A large one takes long: the rests are within it.
            let mut rest = |bytes| {
                pace.bytes += bytes;
                (self.rest)(pace.due())
            };
            let proof = match self.store.prove(&digest, &mut rest) {
                Ok(Some(proof)) => proof,
                // Told to stop in the middle: it is read from its beginning the next time.
                Ok(None) => return Ok(()),
                Err(error) => {
                    let reason = chain(&error).to_string();
                    tracing::error!(blob.digest = %digest, reason, "scrubbing could not read content");
                    (self.tell)(&Event::Unreadable { digest: digest.clone(), reason });
                    pass.unreadable += 1;
                    Proof::Gone
                }
            };
            match proof {
                Proof::Good(length) => pass.bytes += length,
                Proof::Repaired(length) => {
                    pass.bytes += length;
                    pass.repaired += 1;
                    (self.tell)(&Event::Repaired { digest: digest.clone() });
                }
                Proof::Corrupt => {
                    pass.corrupt += 1;
                    (self.tell)(&Event::Corrupt { digest: digest.clone() });
                }
                Proof::Gone => {}
            }
            pass.contents += 1;
            let length = match proof {
                Proof::Good(length) | Proof::Repaired(length) => length,
                Proof::Corrupt | Proof::Gone => 0,
            };
            pass.after = Some(digest);
            left = left.saturating_sub(length);
            if left == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Looks whether the manifests of the next repository have what they name. `repositories` are
    /// those that there were when the first was looked at.
    fn look(
        &mut self,
        pass: &mut Pass,
        pace: &mut Pace,
        repositories: &mut Option<Vec<RepositoryName>>,
    ) -> Result<(), StoreError> {
        let all = match repositories {
            Some(all) => all,
            none => none.insert(self.store.repositories_in_order()?),
        };
        let next = pass.looked_at.as_ref();
        let next = next.map_or(0, |last| all.partition_point(|name| name <= last));
        let Some(repository) = all.get(next) else {
            pass.done = true;
            return Ok(());
        };
        let mut found = Pass::default();
        for manifest in self.store.manifests_of(repository)? {
            found.manifests += 1;
            pace.bytes += LOOK_BYTES;
            match self.store.lacks(repository, &manifest) {
                Ok(lacking) if lacking.is_empty() => {}
                Ok(lacking) => {
                    found.incomplete += 1;
                    self.tell_missing(repository, &manifest, lacking);
                }
                Err(error) => {
                    found.unreadable += 1;
                    let reason = chain(&error).to_string();
                    tracing::error!(blob.digest = %manifest, reason, "scrubbing could not look at a manifest");
                    (self.tell)(&Event::Unreadable { digest: manifest, reason });
                }
            }
            // Told to stop: the repository is looked at from its beginning the next time.
            if !(self.rest)(pace.due()) {
                return Ok(());
            }
        }
        pass.looked_at = Some(repository.clone());
        pass.manifests += found.manifests;
        pass.incomplete += found.incomplete;
        pass.unreadable += found.unreadable;
        Ok(())
    }

    fn tell_missing(
        &mut self,
        repository: &RepositoryName,
        manifest: &Digest,
        lacking: Vec<Digest>,
    ) {
        let (first, count) = (lacking.first().map(ToString::to_string), lacking.len());
        tracing::error!(%repository, %manifest, first, count, "a manifest lacks what it names: push that again, or delete the manifest");
        for digest in lacking {
            let (repository, manifest) = (repository.clone(), manifest.clone());
            (self.tell)(&Event::Missing { digest, repository, manifest });
        }
    }
}

/// Keeps the mean rate at or below the one that is asked for.
struct Pace {
    rate: Option<u64>,
    began: Instant,
    bytes: u64,
}

impl Pace {
    /// Returns how long to rest now.
    fn due(&mut self) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        let micros = u128::from(self.bytes) * 1_000_000 / u128::from(rate.max(1));
        let due = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
        due.saturating_sub(self.began.elapsed())
    }
}

/// Returns the time as it is written down.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
