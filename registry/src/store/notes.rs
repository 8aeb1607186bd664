//! Where garbage may be: what deletes, moved tags and abandoned pushes leave is noted when it
//! happens, so that a collection looks there and nowhere else.
//!
//! ```text
//! gc/candidates.log
//! 0123456789abcdef repository 1750000000 team/model      look at it from this second on
//! 0123456789abcdef content sha256:…                      may have no link any more
//! ```
//!
//! A line begins with the CRC-64/NVME of the rest of it. Lines are appended and not synced: a note
//! lost to a power failure costs space until a collection looks everywhere, and a torn one is
//! skipped. After a collection the file is written anew with what is left.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName};

use super::checksum::sum;
use super::{Store, absent};

/// Contents noted at once. More are found when everything is looked at.
const CONTENTS_MAX: usize = 100_000;

/// What is noted.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    // Held for a look-up and, for what is new, the write of one line.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    path: PathBuf,
    file: Option<fs::File>,
    repositories: HashMap<RepositoryName, u64>,
    contents: HashSet<Digest>,
}

impl Notes {
    /// Reads the notes at `path`, written by earlier processes.
    pub(crate) fn open(path: PathBuf) -> io::Result<Self> {
        let mut state = State { path, ..State::default() };
        let bytes = absent(fs::read(&state.path))?.unwrap_or_default();
        for line in String::from_utf8_lossy(&bytes).split_terminator('\n') {
            state.read(line);
        }
        Ok(Self { state: Mutex::new(state) })
    }

    /// Notes that a repository may have garbage from `due` on.
    pub(crate) fn repository(&self, name: &RepositoryName, due: SystemTime) {
        let due = seconds(due);
        let mut state = self.lock();
        if state.repositories.get(name).is_some_and(|noted| *noted <= due) {
            return;
        }
        state.repositories.insert(name.clone(), due);
        state.append(&format!("repository {due} {name}"));
    }

    /// Notes that content may have no link any more.
    pub(crate) fn content(&self, digest: &Digest) {
        let mut state = self.lock();
        if state.contents.len() < CONTENTS_MAX && state.contents.insert(digest.clone()) {
            state.append(&format!("content {digest}"));
        }
    }

    /// Returns the repositories whose time has come.
    pub(crate) fn due(&self, now: SystemTime) -> Vec<RepositoryName> {
        let now = seconds(now);
        let state = self.lock();
        let due = state.repositories.iter().filter(|(_, due)| **due <= now);
        let mut due: Vec<_> = due.map(|(name, _)| name.clone()).collect();
        due.sort_unstable();
        due
    }

    /// Returns the contents noted.
    pub(crate) fn contents(&self) -> Vec<Digest> {
        self.lock().contents.iter().cloned().collect()
    }

    /// Forgets a repository: it is about to be looked at, and what happens from now on is noted
    /// again. The file forgets only with [`Notes::settle`], so a killed process looks again.
    pub(crate) fn take(&self, name: &RepositoryName) {
        self.lock().repositories.remove(name);
    }

    /// Forgets a content that was looked at.
    pub(crate) fn take_content(&self, digest: &Digest) {
        self.lock().contents.remove(digest);
    }

    /// Writes the file anew with what is still to be looked at.
    fn settle(&self, store: &Store) -> io::Result<()> {
        let mut state = self.lock();
        let repositories = state.repositories.iter();
        let repositories = repositories.map(|(name, due)| format!("repository {due} {name}"));
        let contents = state.contents.iter().map(|digest| format!("content {digest}"));
        let lines: String = repositories.chain(contents).map(|text| line(&text)).collect();
        state.file = None;
        store.place(lines.as_bytes(), &state.path)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn append(&mut self, text: &str) {
        let mut write = || -> io::Result<()> {
            let file = match &mut self.file {
                Some(file) => file,
                none => {
                    let mut options = fs::OpenOptions::new();
                    let file = none.insert(options.append(true).create(true).open(&self.path)?);
                    // What stands last may be torn: nothing is to be joined to it.
                    file.write_all(b"\n")?;
                    file
                }
            };
            // One write: lines of one process never mix.
            file.write_all(line(text).as_bytes())
        };
        if let Err(error) = write() {
            // It is in memory, and what is lost with that is found when everything is looked at.
            tracing::warn!(%error, "failed to note where garbage may be");
        }
    }

    fn read(&mut self, text: &str) {
        let Some((checksum, text)) = text.split_once(' ') else { return };
        if checksum != format!("{:016x}", sum(text.as_bytes())) {
            return;
        }
        let mut words = text.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some("repository"), Some(due), Some(name)) => {
                if let (Ok(due), Ok(name)) = (due.parse(), name.parse()) {
                    let earliest = self.repositories.entry(name).or_insert(due);
                    *earliest = due.min(*earliest);
                }
            }
            (Some("content"), Some(digest), None) => {
                if let Ok(digest) = digest.parse() {
                    self.contents.insert(digest);
                }
            }
            _ => {}
        }
    }
}

fn line(text: &str) -> String {
    format!("{:016x} {text}\n", sum(text.as_bytes()))
}

/// Returns whole seconds, rounded up: nothing is looked at before its time.
fn seconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    (since + Duration::from_nanos(999_999_999)).as_secs()
}

impl Store {
    /// Forgets on disk, too, where garbage no longer is.
    pub(crate) fn settle_notes(&self) -> io::Result<()> {
        self.house.notes.settle(self)
    }
}

#[cfg(test)]
mod tests;
