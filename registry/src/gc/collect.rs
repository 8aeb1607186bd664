//! One repository: what nothing needs goes to quarantine, what was there long enough goes.

use std::collections::HashSet;
use std::io;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use kybernate_spec::{Digest, RepositoryName};

use super::reach::{Graph, Needed, parents_first};
use super::references::names;
use super::run::Work;
use super::{Event, Key, LinkKind};
use crate::store::{Barrier, Condemned, Store};

/// Links moved while the repository's manifests wait: well under a millisecond.
const BATCH: usize = 64;

/// What was found out about a repository.
struct Finding {
    manifests: Vec<Digest>,
    blobs: Vec<Digest>,
    /// Condemned and needed after all.
    revive: Vec<Condemned>,
    /// Condemned for long enough.
    purge: Vec<Condemned>,
    /// When something may be garbage that is not yet.
    next: Option<SystemTime>,
}

/// A manifest that is needed cannot be read, so it cannot be told what else is needed.
#[derive(Debug, thiserror::Error)]
#[error("manifest {0} is needed and its content is missing or corrupt: push it again or delete it")]
struct Unreadable(Digest);

/// Collects a repository's garbage. Returns when it is worth another look.
pub(super) fn collect(
    work: &mut Work<'_>,
    repository: &RepositoryName,
) -> io::Result<Option<SystemTime>> {
    let store = work.store;
    let barrier = (!work.dry_run).then(|| store.raise_barrier(repository));
    let (mut needed, finding) = find(work, repository)?;
    let Some(barrier) = barrier else {
        tell(work, repository, &finding);
        return Ok(finding.next);
    };
    let mut sweep = Sweep { repository, barrier, needed: &mut needed };
    sweep.revive(work, &finding.revive)?;
    sweep.purge(work, &finding.purge)?;
    if !finding.manifests.is_empty() || !finding.blobs.is_empty() {
        store.prepare_condemning(repository)?;
        let order = parents_first(&Parts { store, repository }, finding.manifests);
        // Whoever is stopped in between has manifests less, never blobs less.
        sweep.condemn(work, LinkKind::Manifest, &order)?;
        sweep.condemn(work, LinkKind::Blob, &finding.blobs)?;
        let quarantined = later(work.now, work.settings.quarantine);
        return Ok(Some(finding.next.map_or(quarantined, |next| next.min(quarantined))));
    }
    Ok(finding.next)
}

fn tell(work: &mut Work<'_>, repository: &RepositoryName, finding: &Finding) {
    let links = |kind: LinkKind, digests: &[Digest]| {
        let events = digests.iter().map(|digest| Event::Condemned {
            repository: repository.clone(),
            kind,
            digest: digest.clone(),
        });
        events.collect::<Vec<_>>()
    };
    for Condemned { kind, digest, .. } in &finding.revive {
        let (repository, digest) = (repository.clone(), digest.clone());
        work.tell(Event::Revived { repository, kind: *kind, digest });
    }
    for Condemned { kind, digest, .. } in &finding.purge {
        work.leaves(repository, *kind, digest);
    }
    let manifests = links(LinkKind::Manifest, &finding.manifests);
    for event in manifests.into_iter().chain(links(LinkKind::Blob, &finding.blobs)) {
        work.tell(event);
    }
}

fn find(work: &Work<'_>, repository: &RepositoryName) -> io::Result<(Needed, Finding)> {
    let Work { store, settings, now, .. } = *work;
    let mut manifests = Vec::new();
    store.each_link(repository, LinkKind::Manifest, |digest| {
        manifests.push(digest);
        Ok(())
    })?;
    let known = Known {
        manifests: manifests.iter().map(Key::of).collect(),
        subjects: store.subjects(repository)?,
    };
    let graph = Linked { store, repository, known: Some(known) };
    let mut needed = Needed::default();
    needed.extend(&graph, store.tagged(repository)?)?;
    let mut next = Next::default();
    let mut old = Vec::new();
    for manifest in manifests {
        if needed.contains(&manifest) {
            continue;
        }
        let until = match settings.untagged {
            Some(life) => work.kept(repository, LinkKind::Manifest, &manifest, life)?,
            None => Kept::Always,
        };
        match until {
            Kept::No => old.push(manifest),
            Kept::Until(_) | Kept::Always => {
                next.at(until);
                needed.extend(&graph, [manifest])?;
            }
        }
    }
    old.retain(|manifest| !needed.contains(manifest));
    let mut blobs = Vec::new();
    store.each_link(repository, LinkKind::Blob, |digest| {
        if !needed.contains(&digest) {
            match work.kept(repository, LinkKind::Blob, &digest, settings.grace)? {
                Kept::No => blobs.push(digest),
                until => next.at(until),
            }
        }
        Ok(())
    })?;
    old.sort_unstable();
    blobs.sort_unstable();
    let mut finding =
        Finding { manifests: old, blobs, revive: Vec::new(), purge: Vec::new(), next: None };
    for condemned in store.condemned(repository)? {
        let over = later(condemned.since, settings.quarantine);
        // The link beside it was made anew when something needed it.
        let live = store.link_time(repository, condemned.kind, &condemned.digest)?.is_some();
        if needed.contains(&condemned.digest) && !live {
            finding.revive.push(condemned);
        } else if over <= now {
            finding.purge.push(condemned);
        } else {
            next.at(Kept::Until(over));
        }
    }
    Ok((needed, Finding { next: next.0, ..finding }))
}

#[derive(Default)]
struct Next(Option<SystemTime>);

impl Next {
    fn at(&mut self, kept: Kept) {
        if let Kept::Until(time) = kept {
            self.0 = Some(self.0.map_or(time, |earliest| earliest.min(time)));
        }
    }
}

/// Whether what nothing needs is kept all the same.
#[derive(Clone, Copy)]
enum Kept {
    No,
    Until(SystemTime),
    Always,
}

/// Adds, and stays where the clock cannot go further.
fn later(time: SystemTime, duration: Duration) -> SystemTime {
    time.checked_add(duration)
        .unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(u64::MAX >> 8))
}

impl Work<'_> {
    /// Says how long something is kept that nothing needs, `life` being how long it is after it was
    /// made.
    fn kept(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
        life: Duration,
    ) -> io::Result<Kept> {
        let Some(made) = self.store.link_time(repository, kind, digest)? else {
            return Ok(Kept::No);
        };
        if later(made, life) > self.now {
            return Ok(Kept::Until(later(made, life)));
        }
        let grace = self.settings.grace;
        let seen = !grace.is_zero() && self.store.seen().contains(repository, digest);
        Ok(if seen { Kept::Until(later(self.now, grace)) } else { Kept::No })
    }
}

/// The changing part, in steps between which pushes go on.
struct Sweep<'a> {
    repository: &'a RepositoryName,
    barrier: Barrier<'a>,
    needed: &'a mut Needed,
}

impl Sweep<'_> {
    /// Runs `step` for each item while nothing is pushed to the repository, some at a time. What
    /// was pushed in between is needed.
    fn each<T>(
        &mut self,
        work: &mut Work<'_>,
        items: &[T],
        mut step: impl FnMut(&mut Work<'_>, &Needed, &T) -> io::Result<()>,
    ) -> io::Result<()> {
        let (store, repository) = (work.store, self.repository);
        for batch in items.chunks(BATCH) {
            if work.stopped() {
                break;
            }
            {
                let lock = store.repository_lock(repository);
                let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
                let graph = Linked { store, repository, known: None };
                self.needed.extend(&graph, self.barrier.drain())?;
                for item in batch {
                    step(work, self.needed, item)?;
                }
            }
            store.sync_condemned(repository)?;
        }
        Ok(())
    }

    fn condemn(
        &mut self,
        work: &mut Work<'_>,
        kind: LinkKind,
        digests: &[Digest],
    ) -> io::Result<()> {
        let repository = self.repository;
        let life = match kind {
            LinkKind::Manifest => work.settings.untagged.unwrap_or(Duration::MAX),
            LinkKind::Blob => work.settings.grace,
        };
        let now = work.now;
        self.each(work, digests, |work, needed, digest| {
            let young = |made| later(made, life) > now;
            if !needed.contains(digest) && work.store.condemn(repository, kind, digest, young)? {
                let (repository, digest) = (repository.clone(), digest.clone());
                work.tell(Event::Condemned { repository, kind, digest });
            }
            Ok(())
        })
    }

    fn revive(&mut self, work: &mut Work<'_>, condemned: &[Condemned]) -> io::Result<()> {
        let repository = self.repository;
        self.each(work, condemned, |work, _, Condemned { kind, digest, .. }| {
            work.store.revive(repository, *kind, digest)?;
            let (repository, kind, digest) = (repository.clone(), *kind, digest.clone());
            work.tell(Event::Revived { repository, kind, digest });
            Ok(())
        })
    }

    fn purge(&mut self, work: &mut Work<'_>, condemned: &[Condemned]) -> io::Result<()> {
        let repository = self.repository;
        self.each(work, condemned, |work, _, Condemned { kind, digest, .. }| {
            if work.store.purge(repository, *kind, digest)? {
                work.leaves(repository, *kind, digest);
            }
            Ok(())
        })
    }
}

/// A repository as it is on disk.
struct Linked<'a> {
    store: &'a Store,
    repository: &'a RepositoryName,
    /// What is known of it; without, the disk is asked.
    known: Option<Known>,
}

struct Known {
    manifests: HashSet<Key>,
    subjects: HashSet<Key>,
}

impl Graph for Linked<'_> {
    type Error = io::Error;

    fn neighbours(&self, digest: &Digest) -> io::Result<Vec<Digest>> {
        let Self { store, repository, known } = self;
        let key = Key::of(digest);
        let (linked, subject) = match known {
            Some(known) => (known.manifests.contains(&key), known.subjects.contains(&key)),
            None => (store.link_time(repository, LinkKind::Manifest, digest)?.is_some(), true),
        };
        let mut neighbours = Vec::new();
        if linked {
            let Some((media_type, content)) = store.linked_manifest(repository, digest)? else {
                return Err(io::Error::other(Unreadable(digest.clone())));
            };
            neighbours = names(media_type.as_deref(), &content);
        }
        if subject {
            neighbours.extend(store.attached(repository, digest)?);
        }
        Ok(neighbours)
    }
}

/// What manifests consist of, without what is attached to them.
struct Parts<'a> {
    store: &'a Store,
    repository: &'a RepositoryName,
}

impl Graph for Parts<'_> {
    type Error = io::Error;

    fn neighbours(&self, digest: &Digest) -> io::Result<Vec<Digest>> {
        let found = self.store.linked_manifest(self.repository, digest)?;
        let names = found.map(|(media_type, content)| names(media_type.as_deref(), &content));
        Ok(names.unwrap_or_default())
    }
}
