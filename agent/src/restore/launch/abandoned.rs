//! Notices that CRIU was killed in the middle of a restore.
//!
//! What it has made by then waits for it for ever. So does the runtime, whose socket they hold too, and
//! containerd, which waits for the runtime.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, interval_at};

use crate::cgroup::Freezer;
use crate::process::{self, CRIU_GRACE, PROC, Program, RUNC, has_dead_criu, has_word};

/// How often it is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Returns when a CRIU that worked in the directory `work` has been gone for long, and the runtime has
/// not noticed.
pub(super) async fn abandoned(cgroup: &str, work: &Path) {
    let mut looks = interval_at(Instant::now() + LOOK_EVERY, LOOK_EVERY);
    let mut since = None;
    loop {
        looks.tick().await;
        let (cgroup, work) = (cgroup.to_owned(), work.to_owned());
        let looked = tokio::task::spawn_blocking(move || is_abandoned(&cgroup, &work)).await;
        if !looked.unwrap_or_default() {
            since = None;
        } else if since.get_or_insert_with(Instant::now).elapsed() > CRIU_GRACE {
            return;
        }
    }
}

/// Whether a CRIU has ended, and was not waited for. The runtime has started it, and is the parent of
/// what is in the cgroup, since what CRIU makes first is its sibling; before that, it is known by its
/// words: whom CRIU makes to try what the kernel can is in no cgroup of the container's.
fn is_abandoned(cgroup: &str, work: &Path) -> bool {
    let proc = Path::new(PROC);
    // It is made a while after the restore has begun.
    let processes = Freezer::at(cgroup).and_then(|cgroup| cgroup.processes()).unwrap_or_default();
    let parents = processes.iter().filter_map(|pid| process::parent(*pid));
    let mut runtimes = parents.filter(|parent| !processes.contains(parent)).collect::<Vec<_>>();
    runtimes.extend(runtime(proc, work));
    runtimes.into_iter().any(|runtime| has_dead_criu(proc, runtime).unwrap_or_default())
}

/// Returns the runtime that has CRIU work in a directory.
fn runtime(proc: &Path, work: &Path) -> Option<u32> {
    let has_it = |program: &Program| {
        program.is(RUNC) && has_word(&program.line(), work.as_os_str().as_bytes())
    };
    let programs = process::programs(proc).ok()?;
    programs.into_iter().find(has_it).map(|program| program.pid)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    fn write(proc: &Path, file: &str, text: &str) {
        let file = proc.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn a_runtime_is_known_by_where_its_criu_works() {
        let proc = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| write(proc.path(), file, text);
        let found = || runtime(proc.path(), Path::new("/stage/1/work"));
        write("uptime", "1 1\n");
        write("7/comm", "runc\n");
        write("7/cmdline", "runc\0restore\0--work-path\0/stage/12/work\0web\0");
        write("8/comm", "criu\n");
        write("8/cmdline", "criu\0--work-path\0/stage/1/work\0");
        assert_eq!(found(), None);
        write("9/comm", "runc\n");
        write("9/cmdline", "runc\0restore\0--work-path\0/stage/1/work\0web\0");
        assert_eq!(found(), Some(9));
    }
}
