//! The queue of events, so that a kill loses none of them.
//!
//! ```text
//! notify/outbox.log
//! 0123456789abcdef {"kind":"event","number":7,"good":false,"event":{…}}      is under way
//! 0123456789abcdef {"kind":"settled","number":7,"good":true}                 was done
//! 0123456789abcdef {"kind":"endpoint","name":"ci","next":8,"lost":0}         how far it is
//! 0123456789abcdef {"kind":"delivered","name":"ci","number":7,"lost":0}      it has got it
//! ```
//!
//! A line begins with the CRC-64/NVME of the rest of it. An event is on the disk before what it
//! tells of is done; all other lines are merely written, since what a power failure takes of them
//! is found out anew: an event that is not settled by looking at the store, one that is not
//! delivered by delivering it again. The file is written anew when it has grown.

use std::borrow::Cow;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fs_err as fs;
use kybernate_spec::chain;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::Event;
use super::queue::{Entry, Parcel, Queue};
use crate::config::NotifyEndpoint;
use crate::metrics::NotifyMetrics;
use crate::store::line_sum;
use crate::trace;

/// The file is written anew when it is this long, …
const REWRITE_BYTES_MIN: u64 = 1 << 20;
/// … and this many times as long as it was when it was written.
const REWRITE_GROWTH: u64 = 4;
/// Numbers above this are nobody's: a million events a second would take 290,000 years.
const NUMBER_MAX: u64 = u64::MAX >> 1;

/// Why events cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("failed to open the outbox {path:?}")]
pub struct OpenError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Events on the disk.
#[derive(Debug)]
pub(super) struct Outbox {
    directory: PathBuf,
    // Held for a change of the queue and the write of one line, or of the file anew.
    inner: Mutex<Inner>,
    /// How much of what was ever written is on the disk. Held while it is synced: who waits for it
    /// finds its own lines synced.
    synced: Mutex<u64>,
    changed: watch::Sender<()>,
    metrics: NotifyMetrics,
}

#[derive(Debug)]
struct Inner {
    queue: Queue,
    file: Arc<fs::File>,
    /// Bytes ever written, to all files.
    written: u64,
    /// Of those, up to the last line that says what became of an event.
    settled: u64,
    length: u64,
    rewrite_at: u64,
    /// The last line may be torn: nothing is to be joined to it.
    torn: bool,
}

/// One line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line<'a> {
    Event {
        number: u64,
        good: bool,
        /// Whether it is the push of a blob.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        blob: bool,
        event: Box<Cow<'a, Event>>,
    },
    Settled {
        number: u64,
        good: bool,
    },
    Endpoint {
        name: String,
        next: u64,
        lost: u64,
    },
    Delivered {
        name: String,
        number: u64,
        lost: u64,
    },
}

impl<'a> Line<'a> {
    fn event(number: u64, good: bool, event: &'a Event) -> Self {
        Self::Event { number, good, blob: event.pushed_blob, event: Box::new(Cow::Borrowed(event)) }
    }

    fn is_possible(&self) -> bool {
        let (number, lost) = match self {
            Self::Event { number, .. } | Self::Settled { number, .. } => (*number, 0),
            Self::Endpoint { next: number, lost, .. } | Self::Delivered { number, lost, .. } => {
                (*number, *lost)
            }
        };
        number.max(lost) <= NUMBER_MAX
    }
}

/// Events whose cause is under way. When it is dropped, they count as done.
#[derive(Debug)]
#[must_use]
pub(super) struct Intent<'a> {
    outbox: &'a Outbox,
    numbers: Vec<u64>,
}

impl Outbox {
    /// Reads what an earlier process left; `is_true` says of an event that was under way when it
    /// died whether it tells the truth. Blocks.
    pub(super) fn open(
        directory: &Path,
        keep: usize,
        endpoints: &[NotifyEndpoint],
        metrics: NotifyMetrics,
        is_true: &dyn Fn(&Event) -> bool,
    ) -> Result<Self, OpenError> {
        let path = directory.join("outbox.log");
        let failed = |source| OpenError { path: path.clone(), source };
        make_directory(directory).map_err(failed)?;
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(failed)?,
        };
        let mut queue = read(&bytes, Queue::new(keep, endpoints));
        let unsettled = queue.entries().filter(|(_, entry)| !entry.good);
        let unsettled: Vec<_> =
            unsettled.map(|(number, entry)| (number, Arc::clone(&entry.event))).collect();
        for (number, event) in unsettled {
            queue.settle(number, is_true(&event));
        }
        queue.trim();
        let (file, length) = write_anew(directory, &queue).map_err(failed)?;
        let inner = Inner {
            queue,
            file: Arc::new(file),
            written: 0,
            settled: 0,
            length,
            rewrite_at: rewrite_at(length),
            torn: false,
        };
        let outbox = Self {
            directory: directory.to_owned(),
            inner: Mutex::new(inner),
            synced: Mutex::new(0),
            changed: watch::Sender::new(()),
            metrics,
        };
        outbox.count(&outbox.lock());
        Ok(outbox)
    }

    /// Writes events down and returns when they are on the disk. What cannot be written is told all
    /// the same, unless the process dies. Blocks.
    pub(super) fn intend(&self, events: Vec<Event>) -> Intent<'_> {
        if events.is_empty() {
            return Intent { outbox: self, numbers: Vec::new() };
        }
        let mut inner = self.lock();
        let numbers = events.into_iter().map(|event| self.add(&mut inner, event, false)).collect();
        let written = inner.written;
        drop(inner);
        if let Err(error) = trace::part("notify.sync", || self.sync(written)) {
            tracing::error!(error = %chain(&error), "events under way would not survive a crash");
        }
        self.rewrite_if_long();
        Intent { outbox: self, numbers }
    }

    /// Returns once it is on the disk what became of every event so far. Who changes what nobody is
    /// told of asks for it first: after that the store no longer says whether an event was true.
    /// Blocks.
    pub(super) fn remember(&self) {
        let settled = self.lock().settled;
        if let Err(error) = trace::part("notify.sync", || self.sync(settled)) {
            tracing::error!(error = %chain(&error), "events that were acknowledged may not survive a crash");
        }
    }

    /// Adds an event of what was done already. Blocks shortly.
    pub(super) fn mention(&self, event: Event) {
        let mut inner = self.lock();
        self.add(&mut inner, event, true);
        drop(inner);
        self.changed.send_replace(());
        self.rewrite_if_long();
    }

    fn add(&self, inner: &mut Inner, event: Event, good: bool) -> u64 {
        let (number, event) = (inner.queue.next(), Arc::new(event));
        inner.append(&Line::event(number, good, &event));
        let lost = inner.queue.push(number, event, good);
        if lost > 0 {
            self.metrics.lost.inc_by(lost);
        }
        self.count(inner);
        number
    }

    /// Returns what an endpoint gets next, as soon as there is something.
    pub(super) async fn next(&self, endpoint: usize) -> Parcel {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let taken = self.lock().queue.take(endpoint);
            if let Some(parcel) = taken {
                return parcel;
            }
            if changed.changed().await.is_err() {
                // The sender lives in `self`.
                std::future::pending::<()>().await;
            }
        }
    }

    /// An endpoint has got an event. Blocks shortly.
    pub(super) fn delivered(&self, endpoint: usize, parcel: &Parcel) {
        let mut inner = self.lock();
        let Parcel { number, lost, .. } = *parcel;
        inner.queue.delivered(endpoint, number, lost);
        if let Some(cursor) = inner.queue.cursors().get(endpoint) {
            let name = cursor.endpoint.name.clone();
            inner.append(&Line::Delivered { name, number, lost });
        }
        self.count(&inner);
        drop(inner);
        self.rewrite_if_long();
    }

    /// An endpoint has taken an event.
    pub(super) fn took(&self, name: &str) {
        self.metrics.delivered(name);
    }

    /// An endpoint has not taken an event.
    pub(super) fn failed(&self, name: &str) {
        self.metrics.failed(name);
    }

    fn settle(&self, numbers: &[u64], good: bool) {
        let mut inner = self.lock();
        for number in numbers {
            inner.queue.settle(*number, good);
            inner.append(&Line::Settled { number: *number, good });
        }
        inner.settled = inner.written;
        self.count(&inner);
        drop(inner);
        self.changed.send_replace(());
    }

    /// Returns once the first `written` bytes are on the disk; one sync serves all who wait.
    fn sync(&self, written: u64) -> io::Result<()> {
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        if *synced < written {
            let (file, written) = {
                let inner = self.lock();
                (Arc::clone(&inner.file), inner.written)
            };
            file.file().sync_data()?;
            *synced = written;
        }
        Ok(())
    }

    fn rewrite_if_long(&self) {
        if !self.lock().is_long() {
            return;
        }
        // In the order that `sync` takes them.
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inner = self.lock();
        if !inner.is_long() {
            return;
        }
        match write_anew(&self.directory, &inner.queue) {
            Ok((file, length)) => {
                inner.file = Arc::new(file);
                inner.length = length;
                inner.torn = false;
                *synced = inner.written;
            }
            Err(error) => tracing::error!(error = %chain(&error), "failed to shorten the outbox"),
        }
        // Not at once again, also when it failed.
        inner.rewrite_at = rewrite_at(inner.length);
    }

    fn count(&self, inner: &Inner) {
        let waiting = inner.queue.len();
        self.metrics.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Intent<'_> {
    /// Says whether what the events tell of was done.
    pub(super) fn settle(mut self, done: bool) {
        let numbers = std::mem::take(&mut self.numbers);
        if !numbers.is_empty() {
            self.outbox.settle(&numbers, done);
        }
    }
}

impl Drop for Intent<'_> {
    fn drop(&mut self) {
        // Its cause panicked, after who knows what: told once too often is better than never.
        if !self.numbers.is_empty() {
            self.outbox.settle(&self.numbers, true);
        }
    }
}

impl Inner {
    fn append(&mut self, line: &Line<'_>) {
        let start = if self.torn { "\n" } else { "" };
        let write = || -> io::Result<u64> {
            let text = format!("{start}{}", encode(line)?);
            // One write: a kill tears the last line at most.
            (&mut &*self.file).write_all(text.as_bytes())?;
            Ok(u64::try_from(text.len()).unwrap_or(u64::MAX))
        };
        let written = write();
        self.torn = written.is_err();
        match written {
            Ok(bytes) => {
                self.written += bytes;
                self.length += bytes;
            }
            Err(error) => tracing::error!(%error, "failed to write an event down"),
        }
    }

    fn is_long(&self) -> bool {
        self.length > self.rewrite_at
    }
}

fn rewrite_at(length: u64) -> u64 {
    length.saturating_mul(REWRITE_GROWTH).max(REWRITE_BYTES_MIN)
}

fn encode(line: &Line<'_>) -> io::Result<String> {
    let text = serde_json::to_string(line)?;
    Ok(format!("{:016x} {text}\n", line_sum(text.as_bytes())))
}

fn decode(text: &str) -> Option<Line<'static>> {
    let (checksum, text) = text.split_once(' ')?;
    if checksum != format!("{:016x}", line_sum(text.as_bytes())) {
        return None;
    }
    serde_json::from_str(text).ok().filter(Line::is_possible)
}

/// Does again what the lines say.
pub(super) fn read(bytes: &[u8], mut queue: Queue) -> Queue {
    let mut known = vec![false; queue.cursors().len()];
    for line in String::from_utf8_lossy(bytes).split_terminator('\n') {
        match decode(line) {
            Some(Line::Event { number, good, blob, event }) => {
                let mut event = event.into_owned();
                event.pushed_blob = blob;
                queue.push(number, Arc::new(event), good);
            }
            Some(Line::Settled { number, good }) => queue.settle(number, good),
            Some(Line::Endpoint { name, next, lost }) => {
                if let Some(endpoint) = queue.position(&name) {
                    queue.place(endpoint, next, lost);
                    if let Some(known) = known.get_mut(endpoint) {
                        *known = true;
                    }
                }
            }
            Some(Line::Delivered { name, number, lost }) => {
                if let Some(endpoint) = queue.position(&name) {
                    queue.delivered(endpoint, number, lost);
                }
            }
            None if line.is_empty() => {}
            None => tracing::warn!("a line of the outbox is torn or damaged, and left out"),
        }
    }
    let end = queue.next();
    for (endpoint, known) in known.iter().enumerate() {
        if !known {
            // Who is new is told from now on.
            queue.place(endpoint, end, 0);
        }
    }
    queue
}

/// Writes the file anew, durably, with what is still of use.
fn write_anew(directory: &Path, queue: &Queue) -> io::Result<(fs::File, u64)> {
    let mut text = String::new();
    for cursor in queue.cursors() {
        let name = cursor.endpoint.name.clone();
        text += &encode(&Line::Endpoint { name, next: cursor.next, lost: cursor.lost })?;
    }
    for (number, Entry { event, good }) in queue.entries() {
        text += &encode(&Line::event(number, *good, event))?;
    }
    let (temporary, path) = (directory.join("outbox.new"), directory.join("outbox.log"));
    let mut file = fs::File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.file().sync_data()?;
    fs::rename(&temporary, &path)?;
    fs::File::open(directory)?.sync_all()?;
    Ok((file, u64::try_from(text.len()).unwrap_or(u64::MAX)))
}

fn make_directory(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    match directory.parent() {
        Some(parent) => fs::File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
