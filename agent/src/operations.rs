//! The operations of this node: what runs, what ran, and what a dead agent left behind.
//!
//! Each is a file in `<root>/operations`, written before anything is made that would have to be
//! undone, so that a restarted agent knows.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt as _};
use kybernate_packager::agent_api as api;
use kybernate_packager::progress::{Progress, Snapshot};
use kybernate_packager::spans::Span;
use kybernate_packager::trace_parent::TraceParent;
use kybernate_spec::Digest;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod cancel;
mod end;
mod journal;
mod record;

pub(crate) use self::cancel::CancelCause;
pub use self::cancel::{CancelError, Cancelled, Stopped};
use self::journal::{Journal, Lines, surplus};
pub use self::record::RefusedBy;
pub(crate) use self::record::{
    Conclusion, Kind, Made, Record, Sizes, SourceEnd, State, Suspension, TagState, Tagging,
};
use crate::metrics::Metrics;
use crate::runtime::Namespace;

/// Changes a slow client may be behind before it is sent the present state instead.
const CHANGES_BEHIND_MAX: usize = 256;

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// All operations.
#[derive(Debug)]
pub(crate) struct Operations {
    journal: Journal,
    // Held to look up or change one entry, never across an `.await` or a file access.
    entries: Mutex<BTreeMap<String, Entry>>,
    changes: broadcast::Sender<String>,
    pub(crate) metrics: Metrics,
}

#[derive(Clone, Debug)]
struct Entry {
    record: Record,
    /// What it becomes when that is on the disk.
    ending: Option<Record>,
    // Held while the record is written.
    lines: Arc<tokio::sync::Mutex<Option<Lines>>>,
    progress: Progress,
    /// Asks the one who drives it to end.
    cancel: CancellationToken,
    /// Why it cannot be cancelled any more.
    committed: Option<&'static str>,
    /// What it waits for just now; empty when for nothing.
    waits_for: String,
}

/// The one who drives an operation.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    id: Arc<str>,
    operations: Arc<Operations>,
    /// Counts its bytes and times its steps.
    pub(crate) progress: Progress,
    /// What goes on when nobody waits for it any more: threads, and calls that make something.
    works: TaskTracker,
}

/// What an operation is about.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) kind: Kind,
    pub(crate) container: String,
    pub(crate) namespace: String,
    pub(crate) reference: String,
    /// How long it may take.
    pub(crate) time_out: Option<Duration>,
}

#[cfg(test)]
impl Subject {
    /// One for tests.
    pub(crate) fn example() -> Self {
        Self {
            kind: Kind::Checkpoint,
            container: "web".to_owned(),
            namespace: "default".to_owned(),
            reference: "localhost:5000/web:1".to_owned(),
            time_out: None,
        }
    }
}

/// Which operations are asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filter {
    /// Of this namespace; empty means of all.
    pub(crate) namespace: String,
    /// About this container; empty means about all.
    pub(crate) container: String,
    /// In one of these states; none named means in any.
    pub(crate) states: Vec<api::OperationState>,
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

/// Reads what an earlier agent did not finish, and how many operations cannot be read.
pub(crate) fn unfinished(directory: &Path) -> io::Result<(Vec<Record>, usize)> {
    let (journal, mut records) = Journal::open(directory)?;
    let unread = journal.count()?.saturating_sub(records.len());
    records.retain(|record| !record.is_finished());
    Ok((records, unread))
}

impl Operations {
    /// Reads what an earlier agent kept, and forgets what is too old.
    pub(crate) fn open(directory: &Path) -> Result<Arc<Self>, OperationsError> {
        let wrong =
            |source| OperationsError { operation: "read", directory: directory.to_owned(), source };
        let (journal, mut records) = Journal::open(directory).map_err(wrong)?;
        let forgotten = surplus(records.iter(), jiff::Timestamp::now());
        for id in &forgotten {
            journal.remove(id).map_err(wrong)?;
        }
        records.retain(|record| !forgotten.contains(&record.id));
        let metrics = Metrics::default();
        for record in records.iter().filter(|record| !record.is_finished()) {
            metrics.began(record.kind);
        }
        let entries = records.into_iter().map(|record| (record.id.clone(), Entry::new(record)));
        Ok(Arc::new(Self {
            journal,
            entries: Mutex::new(entries.collect()),
            changes: broadcast::Sender::new(CHANGES_BEHIND_MAX),
            metrics,
        }))
    }

    /// Makes sure that an operation could be written down just now. Blocks.
    pub(crate) fn probe(&self) -> Result<(), OperationsError> {
        let directory = || self.journal.directory().to_owned();
        let wrong = |source| OperationsError { operation: "write", directory: directory(), source };
        self.journal.probe().map_err(wrong)
    }

    /// Begins an operation.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        subject: Subject,
    ) -> Result<Driver, OperationsError> {
        let now = jiff::Timestamp::now();
        let record = Record {
            container: subject.container,
            namespace: subject.namespace,
            reference: subject.reference,
            deadline: subject.time_out.and_then(|time| now.checked_add(time).ok()),
            ..Record::new(new_id(now), subject.kind, now)
        };
        let entry = Entry::new(record.clone());
        let driver = Driver {
            id: record.id.as_str().into(),
            operations: Arc::clone(self),
            progress: entry.progress.clone(),
            works: TaskTracker::new(),
        };
        let forgotten = {
            let mut entries = self.entries();
            entries.insert(record.id.clone(), entry);
            let forgotten = surplus(entries.values().map(|entry| &entry.record), now);
            forgotten.iter().filter_map(|id| entries.remove(id)).collect()
        };
        if let Err(error) = self.write(&record.id, forgotten).await {
            // Nobody would ever end it. What may lie on the disk is no more than a beginning.
            self.entries().remove(&record.id);
            return Err(error);
        }
        self.metrics.began(record.kind);
        driver.publish();
        Ok(driver)
    }

    /// Returns what an earlier agent did not finish and `is_wanted`, each with a driver to finish it.
    pub(crate) fn interrupted(
        self: &Arc<Self>,
        is_wanted: impl Fn(&Record) -> bool,
    ) -> Vec<(Record, Driver)> {
        let entries = self.entries();
        let unfinished = entries.values().filter(|entry| !entry.record.is_finished());
        let wanted = unfinished.filter(|entry| is_wanted(&entry.record));
        let driven = wanted.map(|entry| {
            let driver = Driver {
                id: entry.record.id.as_str().into(),
                operations: Arc::clone(self),
                progress: entry.progress.clone(),
                works: TaskTracker::new(),
            };
            (entry.record.clone(), driver)
        });
        driven.collect()
    }

    /// Returns the containers, each with its namespace, for which a checkpoint is being taken that moves
    /// to the pod's container with this note.
    pub(crate) fn takers(&self, note: &Path) -> Vec<(String, String)> {
        let entries = self.entries();
        let open = entries.values().map(|entry| &entry.record);
        let taking = open.filter(|record| {
            let takes = |made: &Made| matches!(made, Made::Taken { note: its, .. } if its == note);
            !record.is_finished() && record.made.iter().any(takes)
        });
        taking.map(|record| (record.namespace.clone(), record.container.clone())).collect()
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
            let driver = Driver {
                id: id.into(),
                operations: Arc::clone(self),
                progress: entry.progress,
                works: TaskTracker::new(),
            };
            driver.update(|record| record.tag = TagState::Tagged).await?;
        }
        Ok(self.present(id))
    }

    /// Returns the last checkpoint in a fitting place that was taken of a container, or that it was
    /// restored from, since it was created: where, and which.
    pub(crate) fn last_checkpoint(
        &self,
        namespace: &str,
        container: &str,
        created: jiff::Timestamp,
        fits: impl Fn(&str) -> bool,
    ) -> Option<(String, Digest)> {
        let entries = self.entries();
        let its = entries.values().map(|entry| &entry.record).filter(|record| {
            matches!(record.kind, Kind::Checkpoint | Kind::Restore)
                && record.state == State::Done
                && record.namespace == namespace
                && record.container == container
                && fits(&record.reference)
        });
        let ended = its.filter_map(|record| Some((record.finished_at?, record)));
        let ended =
            ended.filter(|(finished, record)| *finished >= created && record.digest.is_some());
        // Of two at a time, the one that began last may have ended first.
        let (_, last) = ended.max_by_key(|(finished, _)| *finished)?;
        Some((last.reference.clone(), last.digest.clone()?))
    }

    /// Returns operations as clients are told, oldest first.
    pub(crate) fn list(&self, filter: &Filter) -> Vec<api::Operation> {
        let mut told: Vec<_> = self.entries().values().map(Entry::to_api).collect();
        told.retain(|one| filter.has(one));
        told
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

    /// Returns one operation as clients are told.
    pub(crate) fn present(&self, id: &str) -> Option<api::Operation> {
        self.entries().get(id).map(Entry::to_api)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an operation as it is now. Two may want that at once: each returns when a record is
    /// on the disk that has its change, and no older one ever replaces a younger.
    async fn write(&self, id: &str, forgotten: Vec<Entry>) -> Result<(), OperationsError> {
        let lines = self.entries().get(id).map(|entry| Arc::clone(&entry.lines));
        let Some(lines) = lines else { return Ok(()) };
        let mut lines = lines.lock_owned().await;
        let record = self.entries().get(id).map(|entry| entry.latest().clone());
        let journal = self.journal.clone();
        // It holds the lock, since whoever waits may go away before it is written.
        let written = tokio::task::spawn_blocking(move || {
            for entry in forgotten {
                // Whoever writes it now must not bring it back.
                let _last = entry.lines.blocking_lock();
                journal.remove(&entry.record.id)?;
            }
            let Some(record) = record else { return Ok(()) };
            journal.write(&mut lines, &record)?;
            if record.is_finished() {
                *lines = None;
            }
            Ok(())
        });
        let written = written.await.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|source| OperationsError {
            operation: "keep",
            directory: self.journal.directory().to_owned(),
            source,
        })
    }

    /// Tells whoever watches that something about an operation changed.
    fn tell(&self, id: &str) {
        // Nobody watches: nothing to tell.
        self.changes.send(id.to_owned()).unwrap_or_default();
    }
}

impl Filter {
    fn has(&self, one: &api::Operation) -> bool {
        let is = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
        is(&self.namespace, &one.containerd_namespace)
            && is(&self.container, &one.container)
            && (self.states.is_empty() || self.states.contains(&one.state()))
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

    /// Does `work` on a thread where it may block. It goes on when nobody waits for it any more, but
    /// what it makes is not taken away before its end ([`Self::rests`]).
    pub(crate) fn spawn_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        self.works.spawn_blocking(work)
    }

    /// Returns a namespace through which what is made is not taken away before it is there.
    pub(crate) fn follow(&self, namespace: Namespace) -> Namespace {
        namespace.followed_by(self.works.clone())
    }

    /// Waits until nobody makes any more what is to be taken away.
    pub(crate) async fn rests(&self) {
        self.works.close();
        self.works.wait().await;
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

    /// Returns what is counted.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.operations.metrics
    }

    /// Tells what it waits for, because nothing else can be done; nothing any more when empty.
    pub(crate) fn waits_for(&self, what: &str) {
        {
            let mut entries = self.operations.entries();
            let Some(entry) = entries.get_mut(&*self.id) else { return };
            if entry.waits_for == what {
                return;
            }
            what.clone_into(&mut entry.waits_for);
        }
        match what {
            "" => tracing::info!(operation.id = self.id(), "the operation waits no longer"),
            what => tracing::warn!(operation.id = self.id(), "the operation waits for {what}"),
        }
        self.publish();
    }

    /// Tells whoever watches that something changed.
    pub(crate) fn publish(&self) {
        self.operations.tell(&self.id);
    }

    /// Changes what people are told. It goes to the disk with the next thing that has to be there.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Record)) {
        {
            let mut entries = self.operations.entries();
            let Some(entry) = entries.get_mut(&*self.id) else { return };
            change(&mut entry.record);
        }
        self.publish();
    }

    /// Changes what is known and keeps it before returning.
    pub(crate) async fn update(
        &self,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), OperationsError> {
        self.note(change);
        self.operations.write(&self.id, Vec::new()).await
    }

    /// Notes and counts how long the source was paused.
    pub(crate) fn paused(&self, time: Duration) {
        self.metrics().paused(time);
        let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.note(|record| record.paused_microseconds = microseconds);
    }

    /// Notes that something is about to be made that has to be undone should we die.
    pub(crate) async fn will_make(&self, made: Made) -> Result<(), OperationsError> {
        self.will_make_all(vec![made]).await
    }

    /// The same for several things at once, in the order in which they are made: each time costs a
    /// sync of the disk.
    pub(crate) async fn will_make_all(&self, made: Vec<Made>) -> Result<(), OperationsError> {
        self.update(|record| record.made.extend(made)).await
    }

    /// Returns what was made, last first.
    pub(crate) fn made(&self) -> Vec<Made> {
        let entries = self.operations.entries();
        let made = entries.get(&*self.id).map(|entry| entry.record.made.clone());
        let mut made = made.unwrap_or_default();
        made.reverse();
        made
    }

    /// Begins its span, in the trace of whoever asked for it, and says where that is.
    pub(crate) fn begins(&self, parent: Option<TraceParent>) -> Span {
        let span = self.span(parent);
        let (operation, place) = (self.id(), span.place());
        tracing::info!(operation, trace_id = place.trace_id(), "an operation begins");
        span
    }

    fn span(&self, parent: Option<TraceParent>) -> Span {
        let entries = self.operations.entries();
        let record = entries.get(&*self.id).map(|entry| entry.record.clone());
        drop(entries);
        let Some(record) = record else { return Span::of_server("operation", parent, []) };
        let facts = [
            ("kybernate.operation.id", record.id),
            ("container.id", record.container),
            ("kybernate.containerd.namespace", record.namespace),
            ("kybernate.reference", record.reference),
        ];
        Span::of_server(record.kind.name(), parent, facts)
    }
}

impl Entry {
    fn new(record: Record) -> Self {
        Self {
            record,
            ending: None,
            lines: Arc::default(),
            progress: Progress::default(),
            cancel: CancellationToken::new(),
            committed: None,
            waits_for: String::new(),
        }
    }

    /// Returns what is to be on the disk.
    fn latest(&self) -> &Record {
        self.ending.as_ref().unwrap_or(&self.record)
    }

    fn to_api(&self) -> api::Operation {
        let mut snapshot = self.progress.snapshot();
        if self.record.is_finished() {
            snapshot = Snapshot { transferred: snapshot.transferred, ..Snapshot::default() };
        }
        let waits_for = self.waits_for.clone();
        api::Operation { waits_for, ..self.record.to_api(&snapshot) }
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

/// Whether a name is one that an operation's directory can have.
pub(crate) fn is_id(name: &str) -> bool {
    name.len() == 20 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Ids sort by time.
fn new_id(now: jiff::Timestamp) -> String {
    // Without randomness the time alone has to do; two operations never begin in one nanosecond.
    let random = getrandom::u32().unwrap_or_default();
    format!("{:012x}{random:08x}", now.as_millisecond())
}

#[cfg(test)]
mod tests;
