//! Opening a store: one server at a time, on a layout it knows.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use backon::{BlockingRetryable as _, ExponentialBuilder};
use fs_err as fs;
use kybernate_spec::Algorithm;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::Store;
use super::house::House;
use super::indexed::Seal;
use super::layout::Layout;

/// The file that says what the directory is.
pub(crate) const VERSION_FILE: &str = "kybernate-registry.json";
/// The layout this program reads and writes.
const LAYOUT: u32 = 1;
/// What a store's root may hold before its version file is there: a first start that was killed.
const OURS: [&str; 6] = ["blobs", "repositories", "uploads", "tmp", "corrupt", "gc"];

/// How soon and how rarely it is looked whether a store that was locked is free. What holds it for a
/// moment only, such as a look at another process's open files, is gone at the first look.
const LOOKS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// Why a directory cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another server has it.
    #[error("the store at {0:?} is already served by another process")]
    Locked(PathBuf),
    /// Written by a program that knows more.
    #[error("the store at {root:?} has layout {found}, this program knows layout {LAYOUT}")]
    Layout {
        /// The root.
        root: PathBuf,
        /// The version found.
        found: u32,
    },
    /// The version file is not ours.
    #[error("{0:?} does not describe a store")]
    Malformed(PathBuf, #[source] serde_json::Error),
    /// The directory belongs to something else.
    #[error("{root:?} holds {found:?} and is no store: give an empty or new directory")]
    Foreign {
        /// The root.
        root: PathBuf,
        /// What is in the way.
        found: String,
    },
    /// There is nothing to look after.
    #[error(
        "{root:?} is no store: {found}, and a store has {VERSION_FILE:?} in its root; name the \
         directory that `serve` was given"
    )]
    NoStore {
        /// The root.
        root: PathBuf,
        /// What is there instead.
        found: String,
    },
    /// Input or output failed.
    #[error("failed to open the store at {0:?}")]
    Io(PathBuf, #[source] io::Error),
}

impl OpenError {
    /// Whether another directory has to be named: trying again would not help.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Foreign { .. } | Self::NoStore { .. })
    }

    /// Whether another process has the store, so that waiting for it may help.
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked(_))
    }
}

#[derive(Serialize, Deserialize)]
struct Version {
    layout: u32,
}

/// The right to be the only one who works on a store.
#[derive(Debug)]
pub(super) struct Lock(fs::File);

impl Lock {
    /// Returns nothing when somebody else has it.
    fn take(root: &Path) -> io::Result<Option<Self>> {
        let file = fs::File::open(root)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it is on this directory.
    pub(super) fn is_of(&self, found: &Metadata) -> io::Result<bool> {
        let held = self.0.metadata()?;
        Ok((held.dev(), held.ino()) == (found.dev(), found.ino()))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing alone leaves it to whoever is being forked just now, until that one executes.
        if let Err(error) = flock(&self.0, FlockOperation::Unlock) {
            tracing::debug!(%error, "a store is not unlocked");
        }
    }
}

/// When to look again for a store that another process has, for as long as `wait`.
pub(crate) fn looks(wait: Duration) -> ExponentialBuilder {
    let [first, longest] = LOOKS;
    let looks = ExponentialBuilder::new().with_min_delay(first).with_max_delay(longest);
    looks.without_max_times().with_total_delay(Some(wait))
}

impl Store {
    /// Opens the store at `root` as [`Self::open`] does, and waits as long as `wait` for another
    /// process to let go of it: one that drains, or that was killed. Blocks.
    pub fn open_within(root: &Path, wait: Duration) -> Result<Self, OpenError> {
        let began = Instant::now();
        let mut waited = false;
        let opened = (|| Self::open(root))
            .retry(looks(wait))
            .when(OpenError::is_locked)
            .notify(|_locked, _pause| {
                if !std::mem::replace(&mut waited, true) {
                    tracing::warn!(?root, ?wait, "another process has the store; waiting for it");
                }
            })
            .call();
        if waited && opened.is_ok() {
            tracing::info!(?root, waited = ?began.elapsed(), "the other process let go of the store");
        }
        opened
    }

    /// Opens the store at `root`, which is made when it is missing. Blocks.
    ///
    /// The store is locked until the value is dropped, also against other processes.
    pub fn open(root: &Path) -> Result<Self, OpenError> {
        let failed = |error| OpenError::Io(root.to_owned(), error);
        let root = make_root(root).map_err(failed)?;
        let Some(lock) = Lock::take(&root).map_err(failed)? else {
            return Err(OpenError::Locked(root));
        };
        let known = check_version(&root)?;
        let layout = Layout::new(root.clone());
        let house = House::open(&layout).map_err(failed)?;
        let seal = Seal::take(&layout).map_err(failed)?;
        let mut store = Self::new(layout, lock, house, seal);
        store.was_killed &= known;
        let prepared = store.make_directories(known).and_then(|()| store.clean(SystemTime::now()));
        prepared.map_err(failed)?;
        if !known {
            store.write_version().map_err(failed)?;
        }
        Ok(store)
    }

    /// Opens the store at `root` if there is one, and else makes nothing. Blocks.
    pub fn open_existing(root: &Path) -> Result<Self, OpenError> {
        Self::require(root)?;
        Self::open(root)
    }

    /// Fails when there is no store at `root`. Blocks.
    pub(crate) fn require(root: &Path) -> Result<(), OpenError> {
        let known = root.join(VERSION_FILE).try_exists();
        if known.map_err(|error| OpenError::Io(root.to_owned(), error))? {
            return Ok(());
        }
        let found = match fs::read_dir(root).map(|mut entries| entries.next()) {
            Ok(None) => "it is empty".to_owned(),
            Ok(Some(entry)) => {
                let name = entry.map_err(|error| OpenError::Io(root.to_owned(), error))?;
                format!("it holds {:?}", name.file_name().to_string_lossy())
            }
            Err(error) => format!("it cannot be listed ({})", error.kind()),
        };
        Err(OpenError::NoStore { root: root.to_owned(), found })
    }

    /// Makes what is missing of the directories. In a store that is `known` nothing is synced that is
    /// there: it was, before the version was written down.
    fn make_directories(&self, known: bool) -> io::Result<()> {
        let layout = &self.layout;
        let ensure = |dir: &Path| {
            if known { self.directories.ensure_again(dir) } else { self.directories.ensure(dir) }
        };
        self.directories.remember(layout.root());
        for dir in [
            layout.repositories(),
            layout.uploads(),
            layout.temporary(),
            layout.corrupt(),
            layout.housekeeping(),
        ] {
            ensure(&dir)?;
        }
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            let dir = layout.algorithm(algorithm);
            ensure(&dir)?;
            let mut synced = known;
            let shelves = (0..=255).map(|first: u8| dir.join(format!("{first:02x}")));
            for shelf in shelves.clone() {
                match fs::create_dir(&shelf) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    made => {
                        made?;
                        synced = false;
                    }
                }
            }
            // One sync for all of them: the first push to each shelf need not wait for its own.
            if !synced {
                self.directories.sync(&dir)?;
            }
            shelves.for_each(|shelf| self.directories.remember(&shelf));
        }
        Ok(())
    }

    fn write_version(&self) -> io::Result<()> {
        let bytes = serde_json::to_vec(&Version { layout: LAYOUT })?;
        self.place(&bytes, &self.layout.version_file())?;
        self.directories.sync(self.layout.root())
    }
}

/// Makes the root and what is missing above it, and returns its absolute path.
fn make_root(root: &Path) -> io::Result<PathBuf> {
    let root = std::path::absolute(root)?;
    let missing: Vec<_> = root.ancestors().take_while(|dir| !dir.exists()).collect();
    for dir in missing.into_iter().rev() {
        fs::create_dir(dir)?;
        if let Some(parent) = dir.parent() {
            fs::File::open(parent)?.sync_all()?;
        }
    }
    Ok(root)
}

/// Returns whether there is a version file; a directory of somebody else is refused.
fn check_version(root: &Path) -> Result<bool, OpenError> {
    let failed = |error| OpenError::Io(root.to_owned(), error);
    let path = root.join(VERSION_FILE);
    match fs::read(&path) {
        Ok(bytes) => {
            let version: Version = serde_json::from_slice(&bytes)
                .map_err(|error| OpenError::Malformed(path, error))?;
            if version.layout != LAYOUT {
                return Err(OpenError::Layout { root: root.to_owned(), found: version.layout });
            }
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            for entry in fs::read_dir(root).map_err(failed)? {
                let found = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
                if !OURS.contains(&&*found) && found != "lost+found" {
                    return Err(OpenError::Foreign { root: root.to_owned(), found });
                }
            }
            Ok(false)
        }
        Err(error) => Err(failed(error)),
    }
}
