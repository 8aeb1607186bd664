//! Opens the index in the background, makes it again when it must, and looks after it.

use std::sync::Arc;
use std::time::Duration;

use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use super::database::{Database, IndexError};
use super::remove_others;
use crate::store::{ScanError, Store};

/// How often the database is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Looks after which even a few changes are synced, so that they do not stay in memory for ever.
const LOOKS_PER_SYNC: u32 = 30;
/// First wait after a failed attempt; each further one waits twice as long.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest wait after a failed attempt: a full disk may be full for long.
const PAUSE_MAX: Duration = Duration::from_mins(5);

/// What an index was made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Reindexed {
    /// Repositories.
    pub repositories: u64,
    /// Tags of all of them.
    pub tags: u64,
    /// Referrers of all of them.
    pub referrers: u64,
    /// Blobs and manifests they show.
    pub links: u64,
}

/// Keeps the index of `store` until `cancel`.
pub(crate) async fn keep(store: Arc<Store>, cancel: CancellationToken) {
    let mut pause = PAUSE_MIN;
    while !cancel.is_cancelled() {
        if store.index().is_hopeless() {
            tracing::error!("the index was lost too often and is given up; the objects answer");
            return;
        }
        let (at, stop) = (Arc::clone(&store), cancel.clone());
        let prepared = tokio::task::spawn_blocking(move || prepare(&at, &|| stop.is_cancelled()));
        match prepared.await {
            Ok(Ok(())) => {
                pause = PAUSE_MIN;
                watch(&store, &cancel).await;
            }
            Ok(Err(_)) if cancel.is_cancelled() => return,
            Ok(Err(error)) => {
                tracing::warn!(error = %chain(&error), again_in = ?pause, "failed to make the index; the objects answer");
                let _ended = tokio::time::timeout(pause, cancel.cancelled()).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            Err(error) => {
                tracing::error!(%error, "the index is given up; the objects answer");
                return;
            }
        }
    }
}

/// Looks after an index that answers, until it does no longer.
async fn watch(store: &Arc<Store>, cancel: &CancellationToken) {
    let mut looks = 0u32;
    // Also while somebody makes it again who asked for that.
    while !store.index().is_absent() {
        tokio::select! {
            () = cancel.cancelled() => return,
            () = store.index().woken() => {}
            _over = tokio::time::timeout(LOOK_EVERY, std::future::pending::<()>()) => {}
        }
        looks = looks.wrapping_add(1);
        let at = Arc::clone(store);
        let all = looks.is_multiple_of(LOOKS_PER_SYNC);
        let looking = tokio::task::spawn_blocking(move || at.index().look_after(all));
        if let Err(error) = looking.await {
            tracing::error!(%error, "failed to look after the index");
        }
    }
}

/// Opens the index, or makes it. Blocks.
fn prepare(store: &Arc<Store>, stop: &dyn Fn() -> bool) -> Result<(), ScanError> {
    store.break_seal().map_err(ScanError::Seal)?;
    if let Some(sealed) = store.sealed() {
        let dir = store.index_dir();
        let opened = Database::unseal(&dir, &sealed.database, &sealed.files).map(Arc::new);
        match opened.and_then(|database| Ok((store.index().opened(&database)?, database))) {
            Ok((true, database)) => {
                remove_others(&dir, database.name());
                tracing::info!("the index is open");
                return Ok(());
            }
            Ok((false, database)) => database.abandon(),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the index cannot be used and is made again");
            }
        }
        store.index().forget_waiting();
    }
    rebuild(store, stop).map(drop)
}

/// Makes the index again although it may be right: for who has changed the objects by hand. Blocks.
pub(crate) fn reindex(store: &Arc<Store>, stop: &dyn Fn() -> bool) -> Result<Reindexed, ScanError> {
    if store.index().is_hopeless() {
        return Err(ScanError::Index(IndexError::Hopeless));
    }
    store.break_seal().map_err(ScanError::Seal)?;
    rebuild(store, stop)
}

/// Makes the index again from the objects, which may change meanwhile. Blocks.
fn rebuild(store: &Arc<Store>, stop: &dyn Fn() -> bool) -> Result<Reindexed, ScanError> {
    let index = store.index();
    let _one_at_a_time = index.building();
    // Where the store has gone nothing is made, and there is nothing to be read.
    store.probe().map_err(|error| ScanError::Objects(std::io::Error::other(error)))?;
    let dir = store.index_dir();
    let name = random_name().map_err(ScanError::Seal)?;
    let database = Database::create(&dir, &name).map_err(ScanError::Index)?;
    let database = Arc::new(database);
    index.begin(&database);
    let scanned = store.scan(&database, stop).and_then(|counts| {
        database.sync().map_err(ScanError::Index)?;
        if index.complete(&database) { Ok(counts) } else { Err(ScanError::Index(IndexError::Gone)) }
    });
    if scanned.is_err() {
        index.abort(&database);
    }
    let counts = scanned?;
    remove_others(&dir, &name);
    let Reindexed { repositories, tags, referrers, links } = counts;
    tracing::info!(repositories, tags, referrers, links, "the index is made");
    Ok(counts)
}

/// Returns 64 random bits as text.
fn random_name() -> std::io::Result<String> {
    let mut bits = [0; 8];
    getrandom::fill(&mut bits)?;
    Ok(format!("{:016x}", u64::from_be_bytes(bits)))
}
