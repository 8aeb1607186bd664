//! What the rest of the store tells garbage collection, and what it asks.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use kybernate_spec::{Digest, RepositoryName};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use serde::{Deserialize, Serialize};

use super::layout::Layout;
use super::notes::Notes;
use super::pins::{Hold, Pins};
use super::record::Record;
use super::seen::Seen;
use super::{Store, StoreError, absent, read_record};
use crate::gc::Settings;
use crate::scrub::Pass;

/// What garbage collection has to know.
#[derive(Debug)]
pub(super) struct House {
    pub(super) pins: Pins,
    pub(super) seen: Seen,
    pub(super) notes: Notes,
    settings: RwLock<Settings>,
    /// Manifests pushed to the repository that is being collected since that began.
    barrier: Mutex<Option<(RepositoryName, Vec<Digest>)>>,
    /// Held by the one collection that may run.
    collecting: Mutex<()>,
    /// How far scrubbing is, once that was read. Held by whoever moves it on.
    pub(super) scrubbing: Mutex<Option<Pass>>,
}

/// Collects what is pushed to a repository until it is dropped.
#[derive(Debug)]
pub(crate) struct Barrier<'a>(&'a House);

/// [`Settings`] as they are written down, in milliseconds.
#[derive(Debug, Serialize, Deserialize)]
struct KeptSettings {
    grace: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    untagged: Option<u64>,
    quarantine: u64,
}

impl Record for KeptSettings {
    const KIND: &'static str = "gc";
}

impl From<Settings> for KeptSettings {
    fn from(Settings { grace, untagged, quarantine }: Settings) -> Self {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            grace: millis(grace),
            untagged: untagged.map(millis),
            quarantine: millis(quarantine),
        }
    }
}

impl From<KeptSettings> for Settings {
    fn from(KeptSettings { grace, untagged, quarantine }: KeptSettings) -> Self {
        let time = Duration::from_millis;
        Self { grace: time(grace), untagged: untagged.map(time), quarantine: time(quarantine) }
    }
}

impl House {
    pub(super) fn open(layout: &Layout) -> io::Result<Self> {
        Ok(Self {
            pins: Pins::default(),
            seen: Seen::default(),
            notes: Notes::open(layout.candidates())?,
            settings: RwLock::default(),
            barrier: Mutex::default(),
            collecting: Mutex::default(),
            scrubbing: Mutex::default(),
        })
    }

    /// Tells a collection under way that a manifest is being pushed, before it is looked at what
    /// the manifest needs. The caller holds the repository's lock.
    pub(super) fn pushing(&self, repository: &RepositoryName, manifest: &Digest) {
        let mut barrier = self.barrier.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pushed)) = barrier.as_mut().filter(|(name, _)| name == repository) {
            pushed.push(manifest.clone());
        }
    }

    /// What is linked now may be garbage once its grace is over.
    pub(super) fn linked(&self, repository: &RepositoryName, digest: &Digest) {
        self.seen.note(repository, digest);
        self.notes.repository(repository, from_now(self.settings().grace));
    }

    /// What has lost its tag may be garbage once untagged manifests are.
    pub(super) fn untagged(&self, repository: &RepositoryName) {
        if let Some(untagged) = self.settings().untagged {
            self.notes.repository(repository, from_now(untagged));
        }
    }

    /// What a deleted manifest referred to may be garbage.
    pub(super) fn deleted(&self, repository: &RepositoryName, manifest: &Digest) {
        self.notes.content(manifest);
        self.notes.repository(repository, SystemTime::now());
    }

    pub(super) fn settings(&self) -> Settings {
        *self.settings.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Says how long what is kept without being needed.
    pub fn set_gc(&self, settings: Settings) {
        *self.house.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
    }

    /// Says how long what is kept without being needed, and writes it down for who collects while
    /// nobody serves. Blocks.
    pub(crate) fn serve_gc(&self, settings: Settings) -> Result<(), StoreError> {
        self.set_gc(settings);
        // A start does not wait for the disk to say again what is there.
        if matches!(self.served_gc(), Ok(Some(served)) if served == settings) {
            return Ok(());
        }
        let kept = self.place_record(&KeptSettings::from(settings), &self.layout.gc_settings());
        kept.map_err(StoreError::during("write down how long garbage is kept"))
    }

    /// Returns how long the last server kept what is not needed, when there was one. Blocks.
    pub(crate) fn served_gc(&self) -> Result<Option<Settings>, StoreError> {
        let read = read_record::<KeptSettings>(&self.layout.gc_settings());
        let read = read.map_err(StoreError::during("read how long garbage is kept"))?;
        Ok(read.map(Settings::from))
    }

    /// Returns how long what is kept without being needed.
    pub fn gc_settings(&self) -> Settings {
        self.house.settings()
    }

    /// Waits for the collection that is running to end, and keeps another from beginning.
    pub(crate) fn collecting(&self) -> MutexGuard<'_, ()> {
        self.house.collecting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether garbage was last looked for everywhere `interval` ago. A store where it never was
    /// counts as one where that is just done: it is new.
    pub(crate) fn is_everything_due(
        &self,
        now: SystemTime,
        interval: Duration,
    ) -> Result<bool, StoreError> {
        let path = self.layout.everything();
        let last = || -> io::Result<Option<SystemTime>> {
            absent(std::fs::metadata(&path))?.map(|found| found.modified()).transpose()
        };
        match last().map_err(StoreError::during("look when everything was last collected"))? {
            Some(last) => Ok(now.duration_since(last).is_ok_and(|age| age >= interval)),
            None => self.everything_is_done().map(|()| false),
        }
    }

    /// Garbage was looked for everywhere.
    pub(crate) fn everything_is_done(&self) -> Result<(), StoreError> {
        let noted = self.place(b"", &self.layout.everything());
        noted.map_err(StoreError::during("note that everything was collected"))
    }

    /// Where garbage may be.
    pub(crate) fn notes(&self) -> &Notes {
        &self.house.notes
    }

    /// What clients have looked at lately.
    pub(crate) fn seen(&self) -> &Seen {
        &self.house.seen
    }

    /// Keeps a digest's content and links from being taken away while the value lives.
    pub(super) fn hold(&self, digest: &Digest) -> Hold<'_> {
        self.house.pins.hold(digest)
    }

    /// Begins to notice what is pushed to a repository. Pushes under way are waited for, so what
    /// is not noticed is there to be seen.
    pub(crate) fn raise_barrier(&self, repository: &RepositoryName) -> Barrier<'_> {
        let _held =
            self.repository_lock(repository).write().unwrap_or_else(PoisonError::into_inner);
        let raised = Some((repository.clone(), Vec::new()));
        *self.house.barrier.lock().unwrap_or_else(PoisonError::into_inner) = raised;
        Barrier(&self.house)
    }
}

impl Barrier<'_> {
    /// Returns what was pushed since the last call. The caller holds the repository's lock.
    pub(crate) fn drain(&self) -> Vec<Digest> {
        let mut barrier = self.0.barrier.lock().unwrap_or_else(PoisonError::into_inner);
        barrier.as_mut().map(|(_, pushed)| std::mem::take(pushed)).unwrap_or_default()
    }
}

impl Drop for Barrier<'_> {
    fn drop(&mut self) {
        *self.0.barrier.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Makes a link young again. Returns whether it is there.
pub(super) fn refresh(link: &std::path::Path) -> io::Result<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    let touched = utimensat(CWD, link, &times, AtFlags::empty()).map_err(io::Error::from);
    Ok(absent(touched)?.is_some())
}

fn from_now(duration: Duration) -> SystemTime {
    let now = SystemTime::now();
    now.checked_add(duration).unwrap_or(now)
}
