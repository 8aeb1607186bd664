//! Checkpoints that lie ready: dump directories in memory or on disk, within a budget each.
//!
//! Reading order: here is what is known while the agent runs, and who may use what; `ledger` does
//! the sums and says what has to go, `shelf` has the files, `record` what is written beside
//! them, `content` proves what is in them, `gone` finds what somebody else removed or changed,
//! `order` and `run` are `Stage`, `evict` is `Evict`, `tell` what clients are told.
//!
//! A checkpoint is staged under its digest, so whose reference led to it does not matter: a restore
//! checks the signature for its own.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kybernate_packager::progress::Progress;
use kybernate_spec::{Digest, chain};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

mod content;
mod evict;
mod figures;
mod gone;
mod ledger;
mod order;
mod record;
mod run;
mod shelf;
mod tell;

pub use self::evict::EvictError;
pub(crate) use self::evict::Wanted;
pub(crate) use self::figures::Figures;
use self::ledger::{Entry, Ledger, Room};
pub(crate) use self::order::Order;
use self::record::Record;
pub(crate) use self::run::run;
use self::shelf::Shelf;
use crate::config::StagingConfig;

/// Where a checkpoint lies ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Tier {
    /// A tmpfs.
    Ram,
    /// A directory on disk.
    Nvme,
}

/// All tiers of this node.
#[derive(Debug)]
pub(crate) struct Staging {
    tiers: BTreeMap<Tier, Kept>,
    /// Tiers whose disks could not be used when the agent started.
    closed: BTreeMap<Tier, Closed>,
    /// Counts the changes, for whoever waits for one.
    changes: watch::Sender<u64>,
    figures: Figures,
}

/// Why a tier is not used.
#[derive(Clone, Debug)]
struct Closed {
    directory: PathBuf,
    reason: String,
}

/// One tier.
#[derive(Debug)]
struct Kept {
    shelf: Arc<Shelf>,
    // Held for a few sums only, never across an `.await` or a file access.
    ledger: Mutex<Ledger>,
}

/// Why something is not staged.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The node's configuration has no such tier.
    #[error(
        "this node has no {0} tier: [staging.{0}] budget in the agent's configuration makes one"
    )]
    NoTier(&'static str),
    /// What the tier is on has a fault.
    #[error(
        "the {tier} tier is closed: {directory:?} could not be used when the agent started ({reason}); start \
         the agent anew when its disk is mended"
    )]
    Closed {
        /// The tier.
        tier: &'static str,
        /// Where it is.
        directory: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// It would never fit, or not as long as what is there is in use.
    #[error("the {tier} tier has a budget of {budget} bytes, and about {needed} are needed{}",
        in_use(.pinned))]
    Budget {
        /// The tier.
        tier: &'static str,
        /// Bytes it may hold.
        budget: u64,
        /// Bytes that are asked for.
        needed: u64,
        /// What is there and cannot go.
        pinned: Vec<String>,
    },
    /// The machine's memory does not allow it now.
    #[error("about {needed} bytes of memory are needed, and {available} are available")]
    Memory {
        /// Bytes that are asked for.
        needed: u64,
        /// Bytes that can be had.
        available: u64,
    },
    /// A file could not be read, written or removed.
    #[error("failed to {0} the {1} tier")]
    Io(&'static str, &'static str, #[source] io::Error),
}

/// A staged checkpoint that someone reads: it stays until this is dropped.
#[derive(Debug)]
pub(crate) struct Use {
    staging: Arc<Staging>,
    pub(crate) tier: Tier,
    digest: Digest,
    user: String,
    directory: PathBuf,
}

/// Room in a tier for a checkpoint that is being staged; given back when this is dropped.
#[derive(Debug)]
struct Reservation {
    staging: Arc<Staging>,
    tier: Tier,
    digest: Digest,
}

/// What is asked of a tier.
#[derive(Clone, Debug)]
struct Wish {
    tier: Tier,
    digest: Digest,
    /// About how many bytes it will take.
    bytes: u64,
    /// Who stages it.
    operation: String,
    reference: String,
}

/// What became of a wish.
#[derive(Debug)]
enum Granted {
    /// It is there.
    Present,
    /// There is room for it, and nobody else stages it.
    Room(Reservation),
}

impl Tier {
    /// Returns the word of the API and of the configuration.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Nvme => "nvme",
        }
    }
}

impl Staging {
    /// Prepares the directories, removes what was not finished, and finds the rest again. A tier whose disk
    /// has a fault is closed: all else goes on without it. Blocks.
    pub(crate) fn open(
        config: &StagingConfig,
        figures: Figures,
    ) -> Result<Arc<Self>, StagingError> {
        let changes = watch::Sender::new(0);
        let (mut tiers, mut closed) = (BTreeMap::new(), BTreeMap::new());
        for (tier, config) in [(Tier::Ram, &config.ram), (Tier::Nvme, &config.nvme)] {
            let Some(config) = config else { continue };
            let shelf = Shelf::new(tier, config.clone());
            let wrong = |source| StagingError::Io("prepare", tier.name(), source);
            let found = match shelf.open() {
                Err(error) if is_fault(&error) => {
                    let reason = chain(&error).to_string();
                    tracing::error!(error = reason, tier = tier.name(), "a tier is closed");
                    closed.insert(tier, Closed { directory: config.directory.clone(), reason });
                    continue;
                }
                found => found.map_err(wrong)?,
            };
            figures.budget(tier, config.budget);
            let ledger = Ledger::new(config.budget, found);
            figures.bytes(tier, ledger.used());
            tiers.insert(tier, Kept { shelf: Arc::new(shelf), ledger: Mutex::new(ledger) });
        }
        Ok(Arc::new(Self { tiers, closed, changes, figures }))
    }

    /// Returns a staged checkpoint for `user` to read, from the quickest tier that has it whole, as far as
    /// that shows without reading it. One that was changed since it was staged is removed.
    pub(crate) async fn take(self: &Arc<Self>, digest: &Digest, user: &str) -> Option<Use> {
        self.first(digest, user, None).await.0
    }

    /// Does the same, and proves what is in it where that lies on a disk. Also says what was not used.
    pub(crate) async fn take_proven(
        self: &Arc<Self>,
        digest: &Digest,
        user: &str,
        progress: &Progress,
    ) -> (Option<Use>, Vec<String>) {
        self.first(digest, user, Some(progress)).await
    }

    async fn first(
        self: &Arc<Self>,
        digest: &Digest,
        user: &str,
        proving: Option<&Progress>,
    ) -> (Option<Use>, Vec<String>) {
        let mut unused = Vec::new();
        for (tier, kept) in &self.tiers {
            if !kept.ledger().begin_use(digest, user) {
                continue;
            }
            let found = Use {
                staging: Arc::clone(self),
                tier: *tier,
                digest: digest.clone(),
                user: user.to_owned(),
                directory: kept.shelf.path(digest),
            };
            let (files, wanted) = (Arc::clone(&kept.shelf), digest.clone());
            let found = match blocking(move || files.check(&wanted)).await {
                Ok(()) => found,
                Err(error) => {
                    unused.push(not_used(*tier, &error));
                    found.give_up(&error).await;
                    continue;
                }
            };
            let found = match proving {
                Some(progress) => found.proven(progress).await,
                None => Ok(found),
            };
            match found {
                Ok(found) => {
                    self.figures.hit(*tier);
                    return (Some(found), unused);
                }
                Err(error) => unused.push(not_used(*tier, &error)),
            }
        }
        if !self.tiers.is_empty() {
            self.figures.miss();
        }
        (None, unused)
    }

    /// Waits until the checkpoint is there or it is ours to stage. What was used least recently
    /// goes, where room has to be made.
    async fn reserve(self: &Arc<Self>, wish: &Wish) -> Result<Granted, StagingError> {
        let kept = self.kept(wish.tier)?;
        self.look().await;
        self.stand(wish.tier).await?;
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let room = kept.ledger().reserve(wish);
            match room.map_err(|pinned| self.crowded(wish, pinned))? {
                Room::Present => {
                    self.note_reference(wish).await;
                    return Ok(Granted::Present);
                }
                Room::Reserved => {
                    self.changed(wish.tier);
                    let (staging, digest) = (Arc::clone(self), wish.digest.clone());
                    return Ok(Granted::Room(Reservation { staging, tier: wish.tier, digest }));
                }
                Room::Evict(victims) => self.remove_all(wish.tier, victims).await?,
                // The sender is ours, so the wait ends with a change.
                Room::Wait => changes.changed().await.unwrap_or_default(),
            }
        }
    }

    /// Makes room for more than was thought.
    async fn enlarge(
        self: &Arc<Self>,
        reservation: &Reservation,
        wish: &Wish,
        bytes: u64,
    ) -> Result<(), StagingError> {
        let kept = self.kept(reservation.tier)?;
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let room = kept.ledger().enlarge(&reservation.digest, bytes);
            let larger = Wish { bytes, ..wish.clone() };
            match room.map_err(|pinned| self.crowded(&larger, pinned))? {
                Room::Present | Room::Reserved => return Ok(()),
                Room::Evict(victims) => self.remove_all(reservation.tier, victims).await?,
                Room::Wait => changes.changed().await.unwrap_or_default(),
            }
        }
    }

    /// Removes a checkpoint nobody uses, if it is there; returns whether it was there so.
    async fn drop_entry(
        self: &Arc<Self>,
        tier: Tier,
        digest: &Digest,
    ) -> Result<bool, StagingError> {
        let leaves = self.kept(tier)?.ledger().leave(digest);
        if leaves {
            self.remove_all(tier, vec![digest.clone()]).await?;
        }
        Ok(leaves)
    }

    /// Removes what the ledger has let go: to the end, also when nobody waits for it any more. What was
    /// neither removed nor given back would take its room for ever.
    async fn remove_all(
        self: &Arc<Self>,
        tier: Tier,
        victims: Vec<Digest>,
    ) -> Result<(), StagingError> {
        let staging = Arc::clone(self);
        let removed = tokio::task::spawn_blocking(move || staging.remove_now(tier, &victims)).await;
        let failed = |error| StagingError::Io("make room in", tier.name(), io::Error::other(error));
        removed.map_err(failed)?
    }

    /// Does that now; the first error is told. Blocks.
    fn remove_now(&self, tier: Tier, victims: &[Digest]) -> Result<(), StagingError> {
        let kept = self.kept(tier)?;
        let mut all = Ok(());
        for digest in victims {
            let removed = kept.shelf.remove(digest);
            kept.ledger().left(digest, removed.is_ok());
            self.changed(tier);
            if removed.is_ok() {
                self.figures.evicted(tier);
                tracing::info!(%digest, tier = tier.name(), "a staged checkpoint was removed");
            }
            let removed =
                removed.map_err(|source| StagingError::Io("make room in", tier.name(), source));
            all = all.and(removed);
        }
        all
    }

    /// Keeps by which name a checkpoint was asked for that was there.
    async fn note_reference(&self, wish: &Wish) {
        let Ok(kept) = self.kept(wish.tier) else { return };
        let Some(references) = kept.ledger().refer(&wish.digest, &wish.reference) else { return };
        let (files, digest) = (Arc::clone(&kept.shelf), wish.digest.clone());
        let noted = blocking(move || files.refer(&digest, references)).await;
        if let Err(error) = noted {
            tracing::warn!(error = %chain(&error), "failed to note a reference");
        }
    }

    /// Returns where an operation makes a checkpoint of a tier.
    fn temporary(&self, tier: Tier, operation: &str) -> Result<PathBuf, StagingError> {
        Ok(self.kept(tier)?.shelf.temporary(operation))
    }

    fn crowded(&self, wish: &Wish, pinned: Vec<String>) -> StagingError {
        let budget = self.kept(wish.tier).map_or(0, |kept| kept.shelf.budget());
        StagingError::Budget { tier: wish.tier.name(), budget, needed: wish.bytes, pinned }
    }

    fn kept(&self, tier: Tier) -> Result<&Kept, StagingError> {
        self.tiers.get(&tier).ok_or_else(|| match self.closed.get(&tier) {
            Some(closed) => closed.error(tier),
            None => StagingError::NoTier(tier.name()),
        })
    }

    /// Tells whoever waits that something about a tier has changed.
    fn changed(&self, tier: Tier) {
        if let Ok(kept) = self.kept(tier) {
            self.figures.bytes(tier, kept.ledger().used());
        }
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl Closed {
    fn error(&self, tier: Tier) -> StagingError {
        let Self { directory, reason } = self.clone();
        StagingError::Closed { tier: tier.name(), directory, reason }
    }
}

/// Whether that is a disk's, and not what somebody has set up wrongly: the kernel lets nobody write any more,
/// its server has gone, or what the standard library has no name for, as `EIO` and `EUCLEAN`. That has none
/// for a want of descriptors either: then other files could not be opened.
fn is_fault(error: &io::Error) -> bool {
    use rustix::io::Errno;
    const FAULTS: [Errno; 5] =
        [Errno::IO, Errno::ROFS, Errno::STALE, Errno::NOTCONN, Errno::TIMEDOUT];
    let is_of_one = FAULTS.iter().any(|fault| io::Error::from(*fault).kind() == error.kind());
    is_of_one && fs_err::File::open("/proc/self/status").is_ok()
}

impl Kept {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Use {
    /// Makes sure that what is in it is what was staged, where it lies on a disk: all of it is read. What
    /// is not the same any more is removed.
    pub(crate) async fn proven(self, progress: &Progress) -> Result<Self, StagingError> {
        let kept = self.staging.kept(self.tier)?;
        if !kept.shelf.proves() {
            return Ok(self);
        }
        progress.step("prove");
        let (files, digest) = (Arc::clone(&kept.shelf), self.digest.clone());
        let proven = match blocking(move || files.record(&digest)).await {
            Ok(record) => record.prove(&self.directory, progress).await,
            Err(error) => Err(error),
        };
        match proven {
            Ok(()) => Ok(self),
            Err(error) => {
                let tier = self.tier.name();
                self.give_up(&error).await;
                Err(StagingError::Io("prove what lies in", tier, error))
            }
        }
    }

    /// Reads it no more, for something is wrong with it. When that is not what was staged, or cannot be
    /// read, nobody gets it any more, and it is removed as soon as nobody reads it.
    async fn give_up(self, error: &io::Error) {
        let (staging, tier, digest) = (Arc::clone(&self.staging), self.tier, self.digest.clone());
        if !is_changed(error) && !is_fault(error) {
            tracing::warn!(error = %chain(error), %digest, tier = tier.name(),
                "a staged checkpoint cannot be looked at");
            return;
        }
        tracing::warn!(error = %chain(error), %digest, tier = tier.name(),
            "a staged checkpoint is not as it was, and is not used any more");
        if let Ok(kept) = staging.kept(tier) {
            kept.ledger().spoil(&digest);
        }
        drop(self);
        if let Err(error) = staging.drop_entry(tier, &digest).await {
            tracing::error!(error = %chain(&error), "failed to remove it");
        }
    }

    /// Returns the directory with CRIU's images. Nobody may write there.
    pub(crate) fn images(&self) -> PathBuf {
        self.directory.join(shelf::IMAGES)
    }

    /// Returns the directory with captured mounts, if there are any. Earlier agents staged none.
    pub(crate) fn volumes(&self) -> PathBuf {
        self.directory.join(shelf::VOLUMES)
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if let Ok(kept) = self.staging.kept(self.tier) {
            kept.ledger().end_use(&self.digest, &self.user);
        }
        self.staging.changed(self.tier);
    }
}

impl Reservation {
    /// Describes what lies in `temporary`. Where it is proven before each use, all of it is read.
    async fn describe(
        &self,
        temporary: &Path,
        wish: &Wish,
        progress: &Progress,
    ) -> Result<Record, StagingError> {
        let wrong = |source| StagingError::Io("read what goes to", self.tier.name(), source);
        let directory = temporary.to_owned();
        let (digest, reference) = (self.digest.clone(), wish.reference.clone());
        let described = blocking(move || Record::describe(&directory, digest, reference)).await;
        let record = described.map_err(wrong)?;
        if !self.staging.kept(self.tier)?.shelf.proves() {
            return Ok(record);
        }
        record.with_content(temporary, progress).await.map_err(wrong)
    }

    /// Makes what lies in `temporary` the staged checkpoint. Its files are on the disk when this
    /// returns.
    async fn publish(
        &self,
        temporary: &Path,
        wish: &Wish,
        record: Record,
    ) -> Result<(), StagingError> {
        let staging = &self.staging;
        let kept = staging.kept(self.tier)?;
        let wrong = |source| StagingError::Io("write to", self.tier.name(), source);
        let (directory, sealed) = (temporary.to_owned(), record.clone());
        blocking(move || Shelf::seal(&directory, &sealed)).await.map_err(wrong)?;
        staging.enlarge(self, wish, record.bytes).await?;
        let (files, directory) = (Arc::clone(&kept.shelf), temporary.to_owned());
        let digest = self.digest.clone();
        blocking(move || files.publish(&directory, &digest)).await.map_err(wrong)?;
        kept.ledger().keep(&self.digest, Entry::new(record));
        staging.changed(self.tier);
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Ok(kept) = self.staging.kept(self.tier) {
            kept.ledger().release(&self.digest);
        }
        self.staging.changed(self.tier);
    }
}

fn not_used(tier: Tier, error: &(dyn std::error::Error + 'static)) -> String {
    format!("what lay in the {} tier is not used: {}", tier.name(), chain(error))
}

/// Does work that waits for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await?
}

fn in_use(pinned: &[String]) -> String {
    if pinned.is_empty() {
        return String::new();
    }
    format!("; what is there is in use: {}", pinned.join(", "))
}

/// Whether a look has found something else than was staged, and not only failed, as for want of
/// descriptors.
fn is_changed(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    let changed = [Kind::Other, Kind::NotFound, Kind::InvalidData, Kind::UnexpectedEof];
    changed.contains(&error.kind())
        || matches!(error.kind(), Kind::NotADirectory | Kind::IsADirectory)
}

#[cfg(test)]
mod tests;
