//! Directories whose entries survive power loss.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fs_err as fs;

use crate::metrics::Latency;
use crate::trace;

/// Directories remembered as durable, ~100 bytes each. Forgetting one costs a sync.
const KNOWN_MAX: usize = 1 << 16;

/// Makes and syncs directories; one sync serves everybody who waited for it to start.
#[derive(Debug, Default)]
pub(crate) struct Directories {
    known: Mutex<HashSet<PathBuf>>,
    syncing: Mutex<HashMap<PathBuf, Arc<Group>>>,
    /// What [`Self::sync_once`] has synced.
    once: Mutex<HashSet<PathBuf>>,
    waits: Latency,
}

/// Those who wait for one directory.
#[derive(Debug, Default)]
struct Group {
    turn: Mutex<Turn>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct Turn {
    started: u64,
    finished: u64,
    running: bool,
}

impl Directories {
    /// Counts in `waits` how long those who call [`Self::sync`] wait.
    pub(crate) fn new(waits: Latency) -> Self {
        Self { waits, ..Self::default() }
    }

    /// Makes `dir` and what is missing above it, and returns once all of them are durable.
    ///
    /// A directory that exists already may have been made by a process that was killed before it
    /// could sync, so the first use of each directory syncs its parent.
    pub(crate) fn ensure(&self, dir: &Path) -> io::Result<()> {
        if lock(&self.known).contains(dir) {
            return Ok(());
        }
        let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
            return Ok(());
        };
        match fs::create_dir(dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.ensure(parent)?;
                match fs::create_dir(dir) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(error);
                    }
                    _ => {}
                }
            }
            Err(error) => return Err(error),
        }
        self.ensure(parent)?;
        self.sync(parent)?;
        self.remember(dir);
        Ok(())
    }

    /// Makes `dir` as [`Self::ensure`] does, unless it is there: then whoever made it has synced it.
    pub(crate) fn ensure_again(&self, dir: &Path) -> io::Result<()> {
        match fs::create_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.remember(dir);
                Ok(())
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.ensure(dir),
        }
    }

    /// Counts `dir` as durable: the caller has synced its parent.
    pub(crate) fn remember(&self, dir: &Path) {
        let mut known = lock(&self.known);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(dir.to_owned());
    }

    /// Counts `dir` as unknown: the caller may remove it.
    pub(crate) fn forget(&self, dir: &Path) {
        lock(&self.known).remove(dir);
    }

    /// Returns once every entry made or removed in `dir` before the call is durable.
    pub(crate) fn sync(&self, dir: &Path) -> io::Result<()> {
        let group = Arc::clone(lock(&self.syncing).entry(dir.to_owned()).or_default());
        let result = trace::part("store.sync_directory", || self.waits.time(|| group.sync(dir)));
        let mut syncing = lock(&self.syncing);
        // Two handles: ours and the map's. Nobody else can come while the map is locked.
        if Arc::strong_count(&group) == 2 {
            syncing.remove(dir);
        }
        result
    }
}

impl Directories {
    /// Returns once every entry that was made in `dir` before this process began is durable.
    pub(crate) fn sync_once(&self, dir: &Path) -> io::Result<()> {
        if lock(&self.once).contains(dir) {
            return Ok(());
        }
        self.sync(dir)?;
        let mut once = lock(&self.once);
        if once.len() >= KNOWN_MAX {
            once.clear();
        }
        once.insert(dir.to_owned());
        Ok(())
    }
}

impl Group {
    fn sync(&self, dir: &Path) -> io::Result<()> {
        let mut turn = lock(&self.turn);
        // A sync that runs already may have begun before our change: the next one covers it.
        let ticket = turn.started + 1;
        loop {
            if turn.finished >= ticket {
                return Ok(());
            }
            if !turn.running {
                break;
            }
            turn = self.done.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        turn.running = true;
        turn.started += 1;
        let ours = turn.started;
        drop(turn);
        let result = sync_now(dir);
        let mut turn = lock(&self.turn);
        turn.running = false;
        if result.is_ok() {
            turn.finished = turn.finished.max(ours);
        }
        drop(turn);
        self.done.notify_all();
        result
    }
}

fn sync_now(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

/// No code that holds one of these locks can panic half-way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
