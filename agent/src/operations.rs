//! The operations of this node: what runs, what ran, and what a dead agent left behind.
//!
//! Each is a JSON file in `<root>/operations`, written before anything is made that would have to
//! be undone, so that a restarted agent knows.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fs_err as fs;
use futures::stream::{BoxStream, StreamExt as _};
use kybernate_packager::agent_api as api;
use kybernate_packager::progress::{Progress, Snapshot};
use kybernate_spec::chain;
use tokio::sync::broadcast;

mod record;

pub use self::record::RefusedBy;
use self::record::step_times;
pub(crate) use self::record::{Conclusion, Kind, Made, Record, Sizes, State, TagState};

/// Finished operations that are remembered. A few KB each; enough to look back over a day.
const FINISHED_MAX: usize = 200;

/// Changes a slow client may be behind before it is sent the present state instead.
const CHANGES_BEHIND_MAX: usize = 256;

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Largest file read back.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// All operations.
#[derive(Debug)]
pub(crate) struct Operations {
    directory: PathBuf,
    // Held to look up or change one entry, never across an `.await` or a file access.
    entries: Mutex<BTreeMap<String, Entry>>,
    changes: broadcast::Sender<String>,
}

#[derive(Clone, Debug)]
struct Entry {
    record: Record,
    progress: Progress,
}

/// The one who drives an operation.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    id: Arc<str>,
    operations: Arc<Operations>,
    /// Counts its bytes and times its steps.
    pub(crate) progress: Progress,
}

/// What an operation is about.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) kind: Kind,
    pub(crate) container: String,
    pub(crate) namespace: String,
    pub(crate) reference: String,
}

/// Why operations are not kept.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} the operations in {directory:?}")]
pub struct OperationsError {
    /// What was tried.
    operation: &'static str,
    /// Where.
    directory: PathBuf,
    /// What happened.
    #[source]
    source: io::Error,
}

impl Operations {
    /// Reads what an earlier agent kept. A file that cannot be read is passed over with a warning.
    pub(crate) fn open(directory: &Path) -> Result<Arc<Self>, OperationsError> {
        let entries = read_all(directory).map_err(|source| OperationsError {
            operation: "read",
            directory: directory.to_owned(),
            source,
        })?;
        Ok(Arc::new(Self {
            directory: directory.to_owned(),
            entries: Mutex::new(entries),
            changes: broadcast::Sender::new(CHANGES_BEHIND_MAX),
        }))
    }

    /// Begins an operation.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        subject: Subject,
    ) -> Result<Driver, OperationsError> {
        let now = jiff::Timestamp::now();
        let record = Record {
            id: new_id(now),
            kind: subject.kind,
            state: State::Running,
            container: subject.container,
            namespace: subject.namespace,
            reference: subject.reference,
            digest: None,
            error: String::new(),
            refused_by: None,
            started_at: now,
            finished_at: None,
            restored_pid: 0,
            sizes: Sizes::default(),
            times: Vec::new(),
            made: Vec::new(),
            tag: TagState::None,
            conclusion: None,
        };
        let progress = Progress::default();
        let driver = Driver {
            id: record.id.as_str().into(),
            operations: Arc::clone(self),
            progress: progress.clone(),
        };
        let forgotten = {
            let mut entries = self.entries();
            entries.insert(record.id.clone(), Entry { record: record.clone(), progress });
            forget(&mut entries)
        };
        self.write(record, forgotten).await?;
        driver.publish();
        Ok(driver)
    }

    /// Returns what an earlier agent did not finish, each with a driver to finish it.
    pub(crate) fn interrupted(self: &Arc<Self>) -> Vec<(Record, Driver)> {
        let entries = self.entries();
        let unfinished = entries.values().filter(|entry| !entry.record.is_finished());
        let driven = unfinished.map(|entry| {
            let driver = Driver {
                id: entry.record.id.as_str().into(),
                operations: Arc::clone(self),
                progress: entry.progress.clone(),
            };
            (entry.record.clone(), driver)
        });
        driven.collect()
    }

    /// Notes that a checkpoint has got the tag it was waiting for, and returns it; `None` when there
    /// is no such operation. Any other operation stays as it is.
    pub(crate) async fn tagged(
        self: &Arc<Self>,
        id: &str,
    ) -> Result<Option<api::Operation>, OperationsError> {
        let entry = self.entries().get(id).cloned();
        let Some(entry) = entry else { return Ok(None) };
        if entry.record.tag == TagState::AwaitsSigner {
            let driver =
                Driver { id: id.into(), operations: Arc::clone(self), progress: entry.progress };
            driver.update(|record| record.tag = TagState::Tagged).await?;
        }
        Ok(self.present(id))
    }

    /// Returns all operations as clients are told, oldest first.
    pub(crate) fn list(&self) -> Vec<api::Operation> {
        self.entries().values().map(Entry::to_api).collect()
    }

    /// Returns the present state, then each change. With an id only that operation's, and the
    /// stream ends with it; `None` when there is no such operation.
    pub(crate) fn watch(
        self: &Arc<Self>,
        id: Option<String>,
    ) -> Option<BoxStream<'static, api::Operation>> {
        // Subscribed before the first look, so that no change falls between.
        let changes = self.changes.subscribe();
        let first: Vec<String> = match &id {
            Some(id) => self.entries().contains_key(id).then(|| vec![id.clone()])?,
            None => self.entries().keys().cloned().collect(),
        };
        let watched = Watched {
            operations: Arc::clone(self),
            pending: first.into(),
            changes,
            only: id,
            ended: false,
        };
        Some(futures::stream::unfold(watched, Watched::next).boxed())
    }

    fn present(&self, id: &str) -> Option<api::Operation> {
        self.entries().get(id).map(Entry::to_api)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn write(&self, record: Record, forgotten: Vec<String>) -> Result<(), OperationsError> {
        let directory = self.directory.clone();
        let written = tokio::task::spawn_blocking(move || {
            for id in forgotten {
                fs::remove_file(file_of(&directory, &id))?;
            }
            write(&directory, &record)
        });
        let written = written.await.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|source| OperationsError {
            operation: "keep",
            directory: self.directory.clone(),
            source,
        })
    }
}

impl Driver {
    /// Returns the operation's id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the operation as clients are told.
    pub(crate) fn to_api(&self) -> api::Operation {
        self.operations.present(&self.id).unwrap_or_default()
    }

    /// Begins the next step.
    pub(crate) fn step(&self, name: &'static str) {
        self.progress.step(name);
        self.publish();
    }

    /// Does `work` and meanwhile tells, a few times a second, how far it is.
    pub(crate) async fn tell_while<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let mut ticks = tokio::time::interval(TELL_EVERY);
        let mut last = Snapshot::default();
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = ticks.tick() => {
                    let now = self.progress.snapshot();
                    if now != last {
                        last = now;
                        self.publish();
                    }
                }
            }
        }
    }

    /// Tells whoever watches that something changed.
    pub(crate) fn publish(&self) {
        // Nobody watches: nothing to tell.
        self.operations.changes.send(self.id.to_string()).unwrap_or_default();
    }

    /// Changes what is known and keeps it before returning.
    pub(crate) async fn update(
        &self,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), OperationsError> {
        let record = {
            let mut entries = self.operations.entries();
            let Some(entry) = entries.get_mut(&*self.id) else { return Ok(()) };
            change(&mut entry.record);
            entry.record.clone()
        };
        self.publish();
        self.operations.write(record, Vec::new()).await
    }

    /// Notes that something is about to be made that has to be undone should we die.
    pub(crate) async fn will_make(&self, made: Made) -> Result<(), OperationsError> {
        self.update(|record| record.made.push(made)).await
    }

    /// Returns what was made, last first.
    pub(crate) fn made(&self) -> Vec<Made> {
        let entries = self.operations.entries();
        let made = entries.get(&*self.id).map(|entry| entry.record.made.clone());
        let mut made = made.unwrap_or_default();
        made.reverse();
        made
    }

    /// Ends the operation; without a conclusion it stays open for the next agent.
    pub(crate) async fn close(&self, conclusion: Option<Conclusion>) {
        let Some(conclusion) = conclusion else { return };
        if let Err(error) = self.finish(|record| record.conclude(conclusion)).await {
            tracing::error!(error = %chain(&error), operation.id = self.id(), "failed to close it");
        }
    }

    /// Ends the operation.
    pub(crate) async fn finish(
        &self,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), OperationsError> {
        self.progress.finish();
        let snapshot = self.progress.snapshot();
        self.update(|record| {
            record.finished_at = Some(jiff::Timestamp::now());
            record.times = step_times(&snapshot);
            record.sizes.transferred_bytes = snapshot.transferred;
            record.made.clear();
            change(record);
            tracing::info!(
                operation.id = record.id,
                operation.kind = ?record.kind,
                operation.state = ?record.state,
                container = record.container,
                reference = record.reference,
                error = record.error,
                "the operation has ended"
            );
        })
        .await
    }
}

impl Entry {
    fn to_api(&self) -> api::Operation {
        let mut snapshot = self.progress.snapshot();
        if self.record.is_finished() {
            snapshot = Snapshot { transferred: snapshot.transferred, ..Snapshot::default() };
        }
        self.record.to_api(&snapshot)
    }
}

struct Watched {
    operations: Arc<Operations>,
    pending: std::collections::VecDeque<String>,
    changes: broadcast::Receiver<String>,
    only: Option<String>,
    ended: bool,
}

impl Watched {
    async fn next(mut self) -> Option<(api::Operation, Self)> {
        use broadcast::error::RecvError;
        loop {
            if self.ended {
                return None;
            }
            if let Some(operation) =
                self.pending.pop_front().and_then(|id| self.operations.present(&id))
            {
                let running = operation.state() == api::OperationState::Running;
                self.ended = self.only.is_some() && !running;
                return Some((operation, self));
            }
            match self.changes.recv().await {
                Ok(id) if self.only.as_ref().is_none_or(|only| *only == id) => {
                    self.pending.push_back(id);
                }
                Ok(_) => {}
                // Too far behind: the present state of everything makes up for what was missed.
                Err(RecvError::Lagged(_)) => match &self.only {
                    Some(id) => self.pending.push_back(id.clone()),
                    None => self.pending.extend(self.operations.entries().keys().cloned()),
                },
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// Drops the oldest finished operations beyond the bound; returns their ids.
fn forget(entries: &mut BTreeMap<String, Entry>) -> Vec<String> {
    let finished: Vec<String> = entries
        .iter()
        .filter(|(_, entry)| entry.record.is_finished())
        .map(|(id, _)| id.clone())
        .collect();
    let surplus = finished.len().saturating_sub(FINISHED_MAX);
    let forgotten: Vec<String> = finished.into_iter().take(surplus).collect();
    for id in &forgotten {
        entries.remove(id);
    }
    forgotten
}

/// Ids sort by time.
fn new_id(now: jiff::Timestamp) -> String {
    // Without randomness the time alone has to do; two operations never begin in one nanosecond.
    let random = getrandom::u32().unwrap_or_default();
    format!("{:012x}{random:08x}", now.as_millisecond())
}

fn file_of(directory: &Path, id: &str) -> PathBuf {
    directory.join(format!("{id}.json"))
}

/// Writes a record so that it is there whole or not at all, also after a power cut.
fn write(directory: &Path, record: &Record) -> io::Result<()> {
    let path = file_of(directory, &record.id);
    let temporary = path.with_extension("new");
    let mut file = fs::File::create(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(record)?)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    fs::File::open(directory)?.sync_all()
}

fn read_all(directory: &Path) -> io::Result<BTreeMap<String, Entry>> {
    crate::stage::make(directory)?;
    let mut entries = BTreeMap::new();
    for file in fs::read_dir(directory)? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match read(&path) {
            Ok(record) => {
                let progress = Progress::default();
                entries.insert(record.id.clone(), Entry { record, progress });
            }
            Err(error) => tracing::warn!(%error, ?path, "passing over an unreadable operation"),
        }
    }
    Ok(entries)
}

fn read(path: &Path) -> io::Result<Record> {
    if fs::metadata(path)?.len() > RECORD_BYTES_MAX {
        return Err(io::Error::other("the file is too large"));
    }
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

#[cfg(test)]
mod tests;
