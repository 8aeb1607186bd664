//! Files that are read again when they change.
//!
//! They are looked at, not listened to: what an editor renames over them, what Kubernetes swaps by
//! a symbolic link and what changes on a network file system all show in the same way. What is
//! wrong is told once and the last good content stays.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use fs_err as fs;
use io::Read as _;
use kybernate_spec::{Algorithm, Digest, Hasher};
use tokio::sync::watch;

use crate::config::{Mistake, Origin, Place};
use crate::tasks::Tasks;

/// How often files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A file younger than this may change again without a new time: file systems count in steps, the
/// coarsest of them in two seconds.
const TIME_STEP: Duration = Duration::from_secs(3);
/// Longest file: 200,000 users with bcrypt hashes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What files say, as of their last good content.
pub(crate) struct Followed<T> {
    what: &'static str,
    paths: Arc<[PathBuf]>,
    parse: Arc<Parse<T>>,
    current: watch::Sender<Arc<T>>,
    seen: Seen,
}

type Parse<T> = dyn Fn(&[Vec<u8>]) -> Result<T, Vec<Mistake>> + Send + Sync;

/// What was last read, good or bad.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    stamps: Vec<Option<Stamp>>,
    /// Over all contents; nothing when one could not be read.
    digest: Option<Digest>,
    /// Whether the stamps may stay the same although something changes.
    fresh: bool,
}

/// What tells one state of a file from another, through symbolic links.
#[derive(Debug, Clone, PartialEq)]
struct Stamp {
    file: (u64, u64),
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Reads files for the first time; `what` is what logs call them.
    pub(crate) fn open(
        what: &'static str,
        paths: impl Into<Arc<[PathBuf]>>,
        parse: impl Fn(&[Vec<u8>]) -> Result<T, Vec<Mistake>> + Send + Sync + 'static,
    ) -> Result<Self, Vec<Mistake>> {
        let paths = paths.into();
        let (seen, contents) = read(&paths, SystemTime::now());
        let first = parse(&contents.map_err(|mistake| vec![mistake])?)?;
        let current = watch::Sender::new(Arc::new(first));
        Ok(Self { what, paths, parse: Arc::new(parse), current, seen })
    }

    /// Returns what the files say.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.current.borrow())
    }

    /// Returns the path of the first file.
    pub(crate) fn first(&self) -> &Path {
        self.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Returns a view of what the files say, which stays up to date once they are followed.
    pub(crate) fn view(&self) -> View<T> {
        View(self.current.subscribe())
    }

    /// Follows the files for as long as tasks run.
    pub(crate) fn follow(mut self, tasks: &Tasks) {
        tasks.spawn(|cancel| async move {
            let mut ticks = tokio::time::interval(LOOK_EVERY);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _tick = ticks.tick() => {}
                    () = cancel.cancelled() => return,
                }
                match tokio::task::spawn_blocking(move || self.look()).await {
                    Ok(next) => self = next,
                    Err(error) => {
                        tracing::error!(%error, "a file is not followed any more");
                        return;
                    }
                }
            }
        });
    }

    /// Looks once.
    fn look(mut self) -> Self {
        if !self.seen.fresh && stamps(&self.paths) == self.seen.stamps {
            return self;
        }
        let (seen, contents) = read(&self.paths, SystemTime::now());
        let same = seen.digest.is_some() && seen.digest == self.seen.digest;
        let told = seen.digest.is_none() && self.seen.digest.is_none();
        self.seen = seen;
        if same || told {
            return self;
        }
        match contents.map_err(|mistake| vec![mistake]).and_then(|read| (self.parse)(&read)) {
            Ok(next) => {
                self.current.send_replace(Arc::new(next));
                tracing::info!(what = self.what, "read again");
            }
            Err(mistakes) => {
                for mistake in mistakes {
                    tracing::error!(what = self.what, %mistake, "not read again: what was there before stays in force");
                }
            }
        }
        self
    }
}

/// What files say.
pub(crate) struct View<T>(watch::Receiver<Arc<T>>);

impl<T> View<T> {
    /// Returns what the files say once they say something else; nothing when they are no longer
    /// followed.
    pub(crate) async fn changed(&mut self) -> Option<Arc<T>> {
        self.0.changed().await.ok()?;
        Some(Arc::clone(&self.0.borrow_and_update()))
    }

    /// Returns what the files say now.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.borrow())
    }
}

impl<T> Clone for View<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> fmt::Debug for View<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("View")
    }
}

impl<T> fmt::Debug for Followed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("paths", &self.paths).finish_non_exhaustive()
    }
}

/// Returns a mistake that is about a whole file, or a line of it.
pub(crate) fn mistake(path: &Path, line: Option<usize>, told: impl Into<String>) -> Mistake {
    let place = Place { origin: Origin::File(path.to_owned()), at: line.map(|line| (line, 1)) };
    Mistake { place, setting: String::new(), told: told.into() }
}

fn read(paths: &[PathBuf], now: SystemTime) -> (Seen, Result<Vec<Vec<u8>>, Mistake>) {
    // Before the contents: what changes while it is read is read again.
    let stamps = stamps(paths);
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let young = i64::try_from(since_epoch.saturating_sub(TIME_STEP).as_secs()).unwrap_or(i64::MAX);
    let fresh = stamps.iter().flatten().any(|stamp| stamp.modified.0 >= young);
    let contents: Result<Vec<_>, _> = paths.iter().map(|path| read_one(path)).collect();
    let digest = contents.as_ref().ok().map(|contents| {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        for content in contents {
            hasher.update(&content.len().to_le_bytes());
            hasher.update(content);
        }
        hasher.finish()
    });
    (Seen { stamps, digest, fresh }, contents)
}

fn read_one(path: &Path) -> Result<Vec<u8>, Mistake> {
    let unreadable = |error: io::Error| {
        let cause = error.kind();
        mistake(path, None, format!("the file cannot be read ({cause})"))
    };
    let file = fs::File::open(path).map_err(unreadable)?;
    let mut content = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content).map_err(unreadable)?;
    if u64::try_from(content.len()).is_ok_and(|length| length > FILE_BYTES_MAX) {
        return Err(mistake(path, None, format!("the file has more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(content)
}

fn stamps(paths: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let found = fs::metadata(path).ok()?;
        Some(Stamp {
            file: (found.dev(), found.ino()),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    };
    paths.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests;
