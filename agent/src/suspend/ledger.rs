//! What is suspended, in memory and on disk.
//!
//! ```text
//! <root>/suspended             0700
//!   NAMESPACE/CONTAINER.json   0600  written beside it, synced, renamed
//! ```

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::chain;
use serde::{Deserialize, Serialize};

use super::Wanted;
use crate::cgroup::Freezer;
use crate::gpu::Held;
use crate::{process, stage};

/// Largest record read back.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// What a record ends with that is not written to its end.
const UNFINISHED: &str = "new";

/// A container that this agent, or an earlier one, has suspended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspended {
    pub(super) namespace: String,
    pub(super) container: String,
    /// Its first process, and when that began: another one of this name is not suspended.
    pub(super) pid: u32,
    started: Option<u64>,
    /// The cgroup that the runtime has made, where it was written down.
    #[serde(default)]
    pub(super) cgroup: Option<String>,
    pub(crate) since: jiff::Timestamp,
    /// How far it is. What earlier agents wrote down they had done, as far as they knew.
    #[serde(default)]
    pub(super) phase: Phase,
    /// Whose GPU memory was moved.
    #[serde(default)]
    pub(crate) gpu: Held,
}

/// How far a suspension is. What was begun is brought to its end, also by the next agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    /// containerd is being asked to pause it, or is about to be.
    Suspending,
    /// It is paused.
    #[default]
    Suspended,
    /// containerd is being asked to resume it, or is about to be.
    Resuming,
}

/// Everything that is suspended.
#[derive(Debug)]
pub(crate) struct Ledger {
    directory: Arc<Path>,
    // Held for a look-up only, never across an `.await` or a file access.
    known: Mutex<BTreeMap<(String, String), Suspended>>,
}

/// Why a suspension is not written down, or not forgotten.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} the suspended containers in {directory:?}")]
pub struct LedgerError {
    /// What was tried.
    operation: &'static str,
    /// Where.
    directory: PathBuf,
    /// What happened.
    #[source]
    source: io::Error,
}

impl Suspended {
    /// One that is begun.
    pub(crate) fn new(
        wanted: &Wanted,
        pid: u32,
        started: Option<u64>,
        since: jiff::Timestamp,
    ) -> Self {
        let Wanted { namespace, container } = wanted.clone();
        let (phase, cgroup, gpu) = (Phase::Suspending, None, Held::default());
        Self { namespace, container, pid, started, cgroup, since, phase, gpu }
    }

    /// The same, as far as this.
    pub(super) fn at(self, phase: Phase) -> Self {
        Self { phase, ..self }
    }

    /// Whether this is its first process.
    pub(super) fn is(&self, pid: u32) -> bool {
        self.pid == pid
            && match self.started {
                Some(born) => process::is_there(pid, born),
                None => matches!(process::started(pid), Ok(None)),
            }
    }

    /// The same, in the cgroup that the runtime has made.
    pub(crate) fn within(self, cgroup: Option<String>) -> Self {
        Self { cgroup, ..self }
    }

    /// Returns what holds it back.
    pub(super) fn freezer(&self) -> io::Result<Freezer> {
        Freezer::of(self.pid, self.cgroup.as_deref())
    }

    /// The same, with GPU memory that was moved.
    pub(crate) fn with(self, gpu: Held) -> Self {
        Self { gpu, ..self }
    }

    pub(crate) fn wanted(&self) -> Wanted {
        Wanted { namespace: self.namespace.clone(), container: self.container.clone() }
    }
}

impl Ledger {
    /// Reads what an earlier agent kept.
    pub(crate) fn open(directory: &Path) -> Result<Self, LedgerError> {
        let wrong =
            |source| LedgerError { operation: "read", directory: directory.to_owned(), source };
        let known = read_all(directory).map_err(wrong)?;
        let known = known.into_iter().map(|one| (key(&one.wanted()), one)).collect();
        Ok(Self { directory: directory.into(), known: Mutex::new(known) })
    }

    /// Returns what is known about a container.
    pub(crate) fn get(&self, wanted: &Wanted) -> Option<Suspended> {
        self.known().get(&key(wanted)).cloned()
    }

    /// Returns all of them.
    pub(crate) fn all(&self) -> Vec<Suspended> {
        self.known().values().cloned().collect()
    }

    /// Whether the container with this first process was suspended here.
    pub(crate) fn is(&self, wanted: &Wanted, pid: u32) -> bool {
        self.get(wanted).is_some_and(|known| known.is(pid))
    }

    /// Writes one down.
    pub(crate) async fn add(&self, one: Suspended) -> Result<(), LedgerError> {
        let (directory, record) = (Arc::clone(&self.directory), one.clone());
        let written = tokio::task::spawn_blocking(move || write(&directory, &record)).await;
        let written = written.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|source| self.error("keep", source))?;
        self.known().insert(key(&one.wanted()), one);
        Ok(())
    }

    /// Writes down how far one is that is written down. Where that cannot be done, this agent knows
    /// it all the same, and the next one looks for itself.
    pub(super) async fn note(&self, one: Suspended) {
        if let Err(error) = self.add(one.clone()).await {
            tracing::error!(error = %chain(&error), container = one.container, "not noted");
            self.known().insert(key(&one.wanted()), one);
        }
    }

    /// Forgets one, if it is there.
    pub(crate) async fn forget(&self, wanted: &Wanted) -> Result<(), LedgerError> {
        let (directory, wanted) = (Arc::clone(&self.directory), wanted.clone());
        self.known().remove(&key(&wanted));
        let removed = tokio::task::spawn_blocking(move || remove(&directory, &wanted)).await;
        let removed = removed.map_err(io::Error::other).and_then(|removed| removed);
        removed.map_err(|source| self.error("forget", source))
    }

    fn error(&self, operation: &'static str, source: io::Error) -> LedgerError {
        LedgerError { operation, directory: self.directory.to_path_buf(), source }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<(String, String), Suspended>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(wanted: &Wanted) -> (String, String) {
    (wanted.namespace.clone(), wanted.container.clone())
}

/// Returns where the record of a container is. containerd's ids are safe as file names; what is not
/// such an id has no place.
fn place(directory: &Path, wanted: &Wanted) -> io::Result<PathBuf> {
    let is_id = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    if is_id(&wanted.namespace) && is_id(&wanted.container) {
        return Ok(directory.join(&wanted.namespace).join(format!("{}.json", wanted.container)));
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no name of containerd's"))
}

fn write(directory: &Path, one: &Suspended) -> io::Result<()> {
    let path = place(directory, &one.wanted())?;
    let parent = path.parent().unwrap_or(directory);
    stage::make(parent)?;
    let temporary = path.with_extension(UNFINISHED);
    let mut options = fs::OpenOptions::new();
    options.create(true).write(true).truncate(true).mode(0o600);
    let mut file = options.open(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(one)?)?;
    file.sync_all()?;
    fs::rename(temporary, &path)?;
    fs::File::open(parent)?.sync_all()?;
    fs::File::open(directory)?.sync_all()
}

fn remove(directory: &Path, wanted: &Wanted) -> io::Result<()> {
    match fs::remove_file(place(directory, wanted)?) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Reads all records. What was not written to its end is removed; what cannot be read, or is not the agent's,
/// is passed over.
fn read_all(directory: &Path) -> io::Result<Vec<Suspended>> {
    stage::make(directory)?;
    let mut found = Vec::new();
    for namespace in fs::read_dir(directory)? {
        let namespace = namespace?;
        if !namespace.file_type()?.is_dir() {
            tracing::warn!(path = ?namespace.path(), "this is no suspension, and stays");
            continue;
        }
        for file in fs::read_dir(namespace.path())? {
            let path = file?.path();
            let extension = path.extension();
            if extension.is_some_and(|extension| extension == UNFINISHED) && path.is_file() {
                fs::remove_file(&path)?;
                continue;
            }
            if extension.is_none_or(|extension| extension != "json") {
                tracing::warn!(?path, "this is no suspension, and stays");
                continue;
            }
            match read(directory, &path) {
                Ok(one) => found.push(one),
                Err(error) => tracing::warn!(%error, ?path, "passing over a suspension"),
            }
        }
    }
    Ok(found)
}

fn read(directory: &Path, path: &Path) -> io::Result<Suspended> {
    if fs::metadata(path)?.len() > RECORD_BYTES_MAX {
        return Err(io::Error::other("it is too large"));
    }
    let one: Suspended = serde_json::from_slice(&fs::read(path)?)?;
    if place(directory, &one.wanted())? == path {
        return Ok(one);
    }
    Err(io::Error::other("the file is named after another container"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(container: &str) -> Wanted {
        Wanted { namespace: "default".to_owned(), container: container.to_owned() }
    }

    fn suspended(container: &str) -> Suspended {
        let pid = std::process::id();
        Suspended::new(
            &wanted(container),
            pid,
            process::started(pid).unwrap(),
            jiff::Timestamp::now(),
        )
    }

    #[tokio::test]
    async fn what_is_not_the_agents_stays_and_keeps_it_from_nothing() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("suspended");
        let web = suspended("web");
        Ledger::open(&directory).unwrap().add(web.clone()).await.unwrap();
        let within = directory.join("default");
        fs::create_dir(within.join("directory")).unwrap();
        fs::create_dir(within.join("directory.new")).unwrap();
        for file in [directory.join("README"), within.join("notes.txt"), within.join("half.new")] {
            fs::write(file, "").unwrap();
        }
        assert_eq!(Ledger::open(&directory).unwrap().all(), [web]);
        let left = [directory.join("README"), within.join("notes.txt"), within.join("directory")];
        assert!(left.iter().all(|path| path.exists()) && !within.join("half.new").exists());
    }

    #[tokio::test]
    async fn what_was_suspended_is_known_to_the_next_agent_until_it_is_resumed() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("suspended");
        let ledger = Ledger::open(&directory).unwrap();
        let (one, pid) = (suspended("web"), std::process::id());
        ledger.add(one.clone()).await.unwrap();
        ledger.add(suspended("job")).await.unwrap();
        let next = Ledger::open(&directory).unwrap();
        assert_eq!((next.get(&wanted("web")), next.all().len()), (Some(one), 2));
        assert!(next.is(&wanted("web"), pid) && !next.is(&wanted("web"), pid + 1));
        next.forget(&wanted("web")).await.unwrap();
        next.forget(&wanted("web")).await.unwrap();
        assert_eq!(Ledger::open(&directory).unwrap().all().len(), 1);
    }

    #[tokio::test]
    async fn how_far_it_is_is_known_to_the_next_agent_and_earlier_ones_had_done_it() {
        let top = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(top.path()).unwrap();
        let phase = || Ledger::open(top.path()).unwrap().get(&wanted("web")).unwrap().phase;
        ledger.add(suspended("web")).await.unwrap();
        assert_eq!(phase(), Phase::Suspending);
        for next in [Phase::Suspended, Phase::Resuming] {
            ledger.note(suspended("web").at(next)).await;
            assert_eq!((phase(), ledger.get(&wanted("web")).unwrap().phase), (next, next));
        }
        let file = top.path().join("default/web.json");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("\"phase\": \"resuming\",", "")).unwrap();
        assert_eq!(phase(), Phase::Suspended);

        // A file in its place, as good as a full disk.
        fs::remove_dir_all(top.path().join("default")).unwrap();
        fs::write(top.path().join("default"), "").unwrap();
        ledger.note(suspended("web")).await;
        assert_eq!(ledger.get(&wanted("web")).unwrap().phase, Phase::Suspending);
    }

    #[tokio::test]
    async fn a_process_that_got_the_same_number_is_another_one() {
        let top = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(top.path()).unwrap();
        let mut one = suspended("web");
        one.started = one.started.map(|ticks| ticks + 1);
        ledger.add(one).await.unwrap();
        assert!(!ledger.is(&wanted("web"), std::process::id()));
    }

    #[tokio::test]
    async fn torn_and_strange_records_are_passed_over() {
        let top = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(top.path()).unwrap();
        ledger.add(suspended("web")).await.unwrap();
        let place = top.path().join("default");
        let whole = fs::read(place.join("web.json")).unwrap();
        fs::write(place.join("other.json"), &whole).unwrap();
        fs::write(place.join("torn.json"), &whole[..9]).unwrap();
        fs::write(place.join("half.new"), &whole[..9]).unwrap();
        let all = Ledger::open(top.path()).unwrap().all();
        assert_eq!(all.iter().map(|one| &*one.container).collect::<Vec<_>>(), ["web"]);
        assert!(!place.join("half.new").exists());
    }

    #[tokio::test]
    async fn a_name_that_leads_elsewhere_has_no_record() {
        let top = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(top.path()).unwrap();
        ledger.add(suspended("../../x")).await.unwrap_err();
        assert_eq!(ledger.all(), []);
    }
}
