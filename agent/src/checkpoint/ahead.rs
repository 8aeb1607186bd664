//! Copies what a container has written before it is paused, so that a pause does not last longer the
//! more was written: only what changes meanwhile is copied while it stands still
//! (`spec/decisions/0051`).

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use fs_err as fs;
use kybernate_spec::chain;

use super::capture::{Draft, Since};
use super::source::Source;
use crate::app::App;
use crate::cgroup::Freezer;
use crate::patience::{Patience, Pauses};
use crate::stage;

/// Less than this is copied while the container is paused, in a few milliseconds.
const WRITTEN_MIN: u64 = 8 << 20;

/// How long the processes may take to stand still. One that is longer in a system call, as in a
/// fsync(2), keeps the others waiting.
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
    let (app, upper, stage) = (Arc::clone(app), source.upper.clone(), source.stage.clone());
    // What changes is there once more.
    let bytes = source.estimate.room.saturating_add(source.estimate.written);
    let look = tokio::task::spawn_blocking(move || {
        Draft::is_possible(&upper) && stage::choose(&app.config, bytes).is_ok_and(|to| to == stage)
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
    if freezer.is_divided()? {
        return Ok(Stood::Unseen);
    }
    // A time that is too early only means that more is copied later.
    let moment = SystemTime::now();
    let mut looks = Patience::new(STAND_LIMIT, LOOK_EVERY);
    // Let go when this ends, however it does.
    let _standing = Standing(freezer);
    freezer.freeze()?;
    while looks.once_more().await {
        if freezer.holds()? {
            let mapped = mapped_by_all(&freezer.processes()?)?;
            return Ok(mapped.map_or(Stood::Unseen, |mapped| Stood::All(Since { moment, mapped })));
        }
    }
    Ok(Stood::NotAll)
}

/// Returns the names of all files that are mapped by several or could be; `None` when a process may
/// have files written to in the background.
fn mapped_by_all(pids: &[u32]) -> io::Result<Option<HashSet<OsString>>> {
    let mut names = HashSet::new();
    for pid in pids {
        if !mapped(&fs::read(format!("/proc/{pid}/maps"))?, &mut names) {
            return Ok(None);
        }
    }
    Ok(Some(names))
}

/// Adds the names of files with shared mappings (`proc_pid_maps(5)`), which may be written to
/// without a system call, now or after an mprotect(2). Returns false when there are asynchronous
/// writes (`io_setup(2)`), which may be under way when nobody is.
fn mapped(maps: &[u8], names: &mut HashSet<OsString>) -> bool {
    for line in maps.split(|byte| *byte == b'\n') {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let modes = fields.nth(1).unwrap_or_default();
        let path = fields.nth(3).unwrap_or_default().trim_ascii_start();
        if path.starts_with(b"/[aio]") {
            return false;
        }
        if modes.last() != Some(&b's') {
            continue;
        }
        // A file may be called as one that is deleted; and line breaks are written in octal.
        let kept = path.strip_suffix(b" (deleted)").unwrap_or(path);
        for path in [path, kept] {
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            names.insert(OsStr::from_bytes(name).to_owned());
            if let Ok(text) = std::str::from_utf8(name) {
                names.insert(text.replace("\\012", "\n").into());
            }
        }
    }
    true
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_by_several_is_known_by_name() {
        let maps = b"\
55d0-55d1 r-xp 00000000 fe:01 12 /bin/private\n\
7f00-7f01 rw-s 00000000 fe:01 13 /data/base.db\n\
7f01-7f02 r--s 00000000 fe:01 14 /data/read only\n\
7f02-7f03 rw-s 00000000 fe:01 15 /data/gone (deleted)\n\
7f03-7f04 rw-s 00000000 fe:01 16 /data/a\\012b\n\
7f04-7f05 rw-p 00000000 00:00 0 [heap]\n";
        let mut names = HashSet::new();
        assert!(mapped(maps, &mut names));
        for name in ["base.db", "read only", "gone", "gone (deleted)", "a\nb"] {
            assert!(names.contains(OsStr::new(name)), "{name} of {names:?}");
        }
        assert!(!names.contains(OsStr::new("private")) && !names.contains(OsStr::new("[heap]")));
    }

    #[test]
    fn who_writes_in_the_background_is_not_believed() {
        let maps = b"7f00-7f01 rw-s 00000000 00:0e 13 /[aio] (deleted)\n";
        assert!(!mapped(maps, &mut HashSet::new()));
        assert!(mapped(b"", &mut HashSet::new()));
    }
}
