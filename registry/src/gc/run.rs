//! One collection from beginning to end.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::time::{Duration, Instant, SystemTime};

use kybernate_spec::{Digest, RepositoryName, chain};

use super::{Event, Key, LinkKind, Settings, Summary, collect, contents};
use crate::store::{Store, StoreError};

/// How soon a repository that could not be read is looked at again.
const LOOK_AGAIN: Duration = Duration::from_hours(1);
/// How often it is told how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Where to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Where garbage may be, as was noted when it came about.
    Noted,
    /// Everywhere: also at what a power failure let be forgotten, or was never noted.
    Everything,
}

/// A collection to be run.
pub struct Run<'a> {
    /// On what.
    pub store: &'a Store,
    /// Where to look.
    pub scope: Scope,
    /// Change nothing and tell what would be done.
    pub dry_run: bool,
    /// The time at which it begins.
    pub now: SystemTime,
    /// Is told everything that is done.
    pub tell: &'a mut dyn FnMut(&Event),
    /// Is called between steps with the time since its last call; takes its time where the
    /// collection is to be gentle, and says whether it is to go on.
    pub pace: &'a mut dyn FnMut(Duration) -> bool,
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, dry_run, now, .. } = self;
        f.debug_struct("Run")
            .field("scope", scope)
            .field("dry_run", dry_run)
            .field("now", now)
            .finish_non_exhaustive()
    }
}

/// What a collection under way knows.
pub(super) struct Work<'a> {
    pub(super) store: &'a Store,
    pub(super) settings: Settings,
    pub(super) dry_run: bool,
    pub(super) now: SystemTime,
    /// Links that a real run would have removed by now.
    pub(super) leaving: HashSet<(RepositoryName, LinkKind, Key)>,
    /// Contents that have lost a link.
    suspects: Vec<Digest>,
    summary: Summary,
    tell: &'a mut dyn FnMut(&Event),
    pace: &'a mut dyn FnMut(Duration) -> bool,
    paced: Instant,
}

impl Run<'_> {
    /// Collects. One collection runs at a time; a second waits for the first. Blocks.
    ///
    /// What cannot be read is told and left out. An error ends the collection; everything done so
    /// far is done, and the next one goes on.
    pub fn collect(self) -> Result<Summary, StoreError> {
        let Self { store, scope, dry_run, now, tell, pace } = self;
        let began = Instant::now();
        let _only = store.collecting();
        let settings = store.gc_settings();
        store.seen().turn(now, settings.grace);
        let mut work = Work {
            store,
            settings,
            dry_run,
            now,
            leaving: HashSet::new(),
            suspects: Vec::new(),
            summary: Summary { dry_run, ..Summary::default() },
            tell,
            pace,
            paced: Instant::now(),
        };
        if let Err(error) = work.all(scope) {
            store.metrics().gc.failed();
            return Err(StoreError::during("collect garbage")(error));
        }
        work.summary.duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let summary = work.summary;
        store.metrics().gc.ended(&summary, SystemTime::now());
        if scope == Scope::Everything && !dry_run && !summary.stopped {
            store.everything_is_done()?;
        }
        (work.tell)(&Event::Done(summary));
        Ok(summary)
    }
}

impl Work<'_> {
    fn all(&mut self, scope: Scope) -> io::Result<()> {
        let repositories = match scope {
            Scope::Noted => self.store.notes().due(self.now),
            Scope::Everything => self.store.all_repositories()?,
        };
        let of = u64::try_from(repositories.len()).unwrap_or(u64::MAX);
        let mut told = Instant::now();
        for repository in repositories {
            if self.stopped() {
                break;
            }
            self.repository(&repository);
            self.summary.repositories += 1;
            if told.elapsed() >= PROGRESS_EVERY {
                told = Instant::now();
                self.tell(Event::Progress { done: self.summary.repositories, of });
            }
            self.pause();
        }
        let mut suspects = std::mem::take(&mut self.suspects);
        suspects.extend(self.store.notes().contents());
        if scope == Scope::Everything {
            suspects.extend(contents::unlinked(self)?);
        }
        contents::remove(self, suspects)?;
        if self.dry_run { Ok(()) } else { self.store.settle_notes() }
    }

    fn repository(&mut self, repository: &RepositoryName) {
        let notes = self.store.notes();
        if !self.dry_run {
            notes.take(repository);
        }
        let next = match collect::collect(self, repository) {
            Ok(next) => next,
            Err(error) => {
                let reason = chain(&error).to_string();
                tracing::warn!(%repository, reason, "garbage collection leaves a repository alone");
                self.tell(Event::Skipped { repository: repository.clone(), reason });
                Some(self.now + LOOK_AGAIN)
            }
        };
        if let Some(next) = next.filter(|_| !self.dry_run) {
            notes.repository(repository, next);
        }
        if self.summary.stopped && !self.dry_run {
            notes.repository(repository, self.now);
        }
    }

    /// A link went for good, or would.
    pub(super) fn leaves(&mut self, repository: &RepositoryName, kind: LinkKind, digest: &Digest) {
        if self.dry_run {
            self.leaving.insert((repository.clone(), kind, Key::of(digest)));
        }
        self.suspects.push(digest.clone());
        let (repository, digest) = (repository.clone(), digest.clone());
        self.tell(Event::Purged { repository, kind, digest });
    }

    /// It is known whether a content is needed.
    pub(super) fn settled(&self, digest: &Digest) {
        if !self.dry_run {
            self.store.notes().take_content(digest);
        }
    }

    pub(super) fn tell(&mut self, event: Event) {
        self.summary.count(&event);
        (self.tell)(&event);
    }

    /// Takes a rest where that is asked for.
    pub(super) fn pause(&mut self) {
        let go_on = (self.pace)(self.paced.elapsed());
        self.summary.stopped |= !go_on;
        self.paced = Instant::now();
    }

    /// Whether it is to end early.
    pub(super) fn stopped(&self) -> bool {
        self.summary.stopped
    }
}
