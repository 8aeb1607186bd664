//! Content that no repository links any more.

use std::collections::HashSet;
use std::io;
use std::ops::ControlFlow;

use kybernate_spec::{Digest, RepositoryName};

use super::run::Work;
use super::{Event, Key, LinkKind};
use crate::store::Store;

/// Contents looked for in all repositories at once, while it is noticed who links them.
const BATCH: usize = 256;
/// Links held in memory at once when everything is looked at: ~8 MiB.
const LINKS_MAX: u64 = 250_000;

/// There is content and nothing that could link it.
#[derive(Debug, thiserror::Error)]
#[error(
    "content is here and no repository is, so nothing of it is removed: bring back the disk that \
     \"repositories\" is on"
)]
struct NoRepositories;

/// Lists the repositories, of which there is one at least: none is ever removed, and what has
/// content has had one.
fn repositories(store: &Store) -> io::Result<Vec<RepositoryName>> {
    let repositories = store.all_repositories()?;
    if repositories.is_empty() { Err(io::Error::other(NoRepositories)) } else { Ok(repositories) }
}

/// Removes those of `suspects` that nothing links.
pub(super) fn remove(work: &mut Work<'_>, mut suspects: Vec<Digest>) -> io::Result<()> {
    suspects.sort_unstable();
    suspects.dedup();
    let store = work.store;
    for batch in suspects.chunks(BATCH) {
        if work.stopped() {
            break;
        }
        // Watched before the repositories are listed: a link in a new one is noticed too.
        let watched = store.watch(batch);
        let repositories = repositories(store)?;
        for (digest, watch) in batch.iter().zip(&watched) {
            if store.is_linked_anywhere(&repositories, digest, &work.leaving)? {
                work.settled(digest);
                continue;
            }
            let gone = if work.dry_run {
                store.content_length(digest)?
            } else {
                store.remove_content(watch)?
            };
            work.settled(digest);
            if let Some(bytes) = gone {
                work.tell(Event::Removed { digest: digest.clone(), bytes });
            }
        }
        work.pause();
    }
    Ok(())
}

/// Returns all contents that nothing links at the moment.
pub(super) fn unlinked(work: &mut Work<'_>) -> io::Result<Vec<Digest>> {
    let store = work.store;
    if !work.dry_run {
        store.remove_stray_checksums()?;
    }
    let mut count = 0;
    store.each_content(None, |_| {
        count += 1;
        Ok(ControlFlow::Continue(()))
    })?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let parts = u128::from(count / LINKS_MAX + 1);
    let mut unlinked = Vec::new();
    for part in 0..parts {
        let links = links(work, parts, part)?;
        if work.stopped() {
            break;
        }
        store.each_content(None, |digest| {
            let key = Key::of(&digest);
            if key.part(parts) == part && !links.contains(&key) {
                unlinked.push(digest);
            }
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok(unlinked)
}

/// Returns what all repositories link, as far as it falls into the part.
fn links(work: &mut Work<'_>, parts: u128, part: u128) -> io::Result<HashSet<Key>> {
    let store = work.store;
    let mut links = HashSet::new();
    for repository in repositories(store)? {
        if work.stopped() {
            break;
        }
        let mut enter = |key: Key| {
            if key.part(parts) == part {
                links.insert(key);
            }
        };
        for kind in [LinkKind::Blob, LinkKind::Manifest] {
            store.each_link(&repository, kind, |digest| {
                enter(Key::of(&digest));
                Ok(())
            })?;
        }
        for condemned in store.condemned(&repository)? {
            let key = Key::of(&condemned.digest);
            if !work.leaving.contains(&(repository.clone(), condemned.kind, key)) {
                enter(key);
            }
        }
        work.pause();
    }
    Ok(links)
}
