//! Copies what a container has written before it is paused, so that a pause does not last longer the
//! more was written: only what changes meanwhile is copied while it stands still
//! (`spec/decisions/0051`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use fs_err as fs;
use kybernate_spec::chain;
use tokio::time::Instant;

use super::capture::{Draft, Since};
use super::mapped::{self, Mapped};
use super::source::Source;
use crate::app::App;
use crate::cgroup::Freezer;
use crate::patience::{Patience, Pauses};

/// Less than this is copied while the container is paused, in a few milliseconds.
const WRITTEN_MIN: u64 = 8 << 20;

/// How long the processes may take to stand still, and stand. One that is longer in a system call, as
/// in a fsync(2), keeps the others waiting, and so does one with very many mappings.
const STAND_LIMIT: Duration = Duration::from_millis(100);

/// How often it is tried.
const ATTEMPTS: usize = 4;

/// How often they are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// What became of holding everybody.
enum Stood {
    All(Since),
    /// Somebody was in a system call for long.
    NotAll,
    /// Changes can come from where nobody looks.
    Unseen,
}

/// Processes that stand still. Dropped, they go on.
struct Standing<'a>(&'a Freezer);

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.thaw() {
            tracing::error!(%error, "failed to let a container go on");
        }
    }
}

/// Whether there is much to copy, room for it, and a way to tell what changes afterwards.
pub(super) async fn is_worthwhile(app: &Arc<App>, source: &Source) -> bool {
    if source.suspended || source.estimate.written < WRITTEN_MIN {
        return false;
    }
    let (app, upper, stage) = (Arc::clone(app), source.upper.clone(), Arc::clone(&source.stage));
    // What changes is there once more.
    let bytes = source.estimate.room.saturating_add(source.estimate.written);
    let look = tokio::task::spawn_blocking(move || {
        Draft::is_possible(&upper) && stage.grows(&app.config, bytes)
    });
    look.await.unwrap_or_default()
}

/// Holds everybody for a moment, so that no write is under way, and looks which files are mapped.
/// `None` when changes could be missed, or somebody does not stand still.
pub(super) async fn moment(freezer: &Freezer) -> Option<Since> {
    let mut pauses = Pauses::default();
    for _ in 0..ATTEMPTS {
        match stand(freezer).await {
            Ok(Stood::All(since)) => return Some(since),
            Ok(Stood::Unseen) => return None,
            Ok(Stood::NotAll) => pauses.pause().await,
            Err(error) => {
                tracing::warn!(%error, "files are copied while the container is paused");
                return None;
            }
        }
    }
    None
}

async fn stand(freezer: &Freezer) -> io::Result<Stood> {
    // Whoever else has it frozen is not to find it running.
    if freezer.is_divided()? || freezer.is_frozen()? {
        return Ok(Stood::Unseen);
    }
    // A time that is too early only means that more is copied later.
    let moment = SystemTime::now();
    let mut looks = Patience::new(STAND_LIMIT, LOOK_EVERY);
    // Let go when this ends, however it does.
    let _standing = Standing(freezer);
    let until = Instant::now() + STAND_LIMIT;
    freezer.freeze()?;
    while looks.once_more().await {
        if !freezer.holds()? {
            continue;
        }
        // One that was made since then holds processes that are not asked.
        if freezer.is_divided()? {
            return Ok(Stood::Unseen);
        }
        let pids = freezer.processes()?;
        let mapped = tokio::task::spawn_blocking(move || mapped::by_all(&pids, until.into_std()));
        return Ok(match mapped.await.map_err(io::Error::other)?? {
            Mapped::Names(mapped) => Stood::All(Since { moment, mapped }),
            Mapped::Unseen => Stood::Unseen,
            Mapped::Late => Stood::NotAll,
        });
    }
    Ok(Stood::NotAll)
}

/// Copies what has not changed for a while. `None` when that cannot be done: everything is copied
/// while the container is paused, then.
pub(super) async fn copy(
    source: &Source,
    since: Since,
    to: &Path,
    stop: &Arc<AtomicBool>,
) -> Option<Draft> {
    let (upper, to, stop) = (source.upper.clone(), to.to_owned(), Arc::clone(stop));
    let bytes_max = source.estimate.written;
    let copied = tokio::task::spawn_blocking(move || {
        let copied = Draft::copy(&upper, &since, &to, bytes_max, &stop);
        copied.inspect_err(|_| {
            // Its room is needed.
            fs::remove_file(&to).unwrap_or_default();
        })
    });
    match copied.await.map(|copied| copied.map_err(|error| chain(&error).to_string())) {
        Ok(Ok(draft)) => {
            tracing::debug!(files = draft.files(), "copied before the pause");
            Some(draft)
        }
        Ok(Err(error)) => {
            tracing::warn!(error, "files are copied while the container is paused");
            None
        }
        Err(_ended) => None,
    }
}
