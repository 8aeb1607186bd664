//! Processes that wait in vfork(2), as Python does for what it starts and a runtime in `posix_spawn(3)`,
//! until their child has executed its program.
//!
//! CRIU stops each thread for itself. One that waits so is not stopped before its child goes on, which is
//! stopped too: CRIU waits 10 s for it and gives up ("Unseizable non-zombie", `compel/src/lib/infect.c`,
//! CRIU 4.1 to 4.2). Where a container was frozen in such a moment, it goes on for another one.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use fs_err as fs;

use crate::cgroup::Freezer;
use crate::patience::Patience;
use crate::process;

/// How long other moments are looked for. Executing a program takes milliseconds.
const LIMIT: Duration = Duration::from_secs(2);
/// How many, at least: the machine may have stood still for all of that time.
const LOOKS_MIN: u32 = 20;
/// How long a container goes on, and how often it is looked whether it stands still.
const EVERY: Duration = Duration::from_millis(3);
/// How long it may take until all stand still. Who forks just then may keep a freezer of version 1 from
/// that for ever; runc, too, lets it go on and tries again.
const STAND_LIMIT: Duration = Duration::from_millis(50);
/// How long it is tried to have all stand still again.
const STILL_LIMIT: Duration = Duration::from_secs(10);

/// Lets a container that was frozen go on for some milliseconds at a time, until nobody in it waits in
/// vfork(2). Returns one that still does then, which CRIU cannot stop.
pub(crate) async fn settle(freezer: &Freezer) -> io::Result<Option<u32>> {
    let mut looks = Patience::new(LIMIT, EVERY).at_least(LOOKS_MIN);
    let mut last = None;
    while looks.once_more().await {
        let looked = freezer.clone();
        let waits = tokio::task::spawn_blocking(move || {
            looked.processes().map(|processes| processes.into_iter().find(|pid| waits(*pid)))
        });
        last = waits.await.map_err(io::Error::other)??;
        if last.is_none() {
            return Ok(None);
        }
        tracing::debug!("frozen in the middle of vfork(2): once more");
        go_on(freezer).await?;
    }
    Ok(last)
}

/// Lets a container go on for a moment, and has it stand still again.
async fn go_on(freezer: &Freezer) -> io::Result<()> {
    let mut tries = Patience::new(STILL_LIMIT, EVERY);
    while tries.once_more().await {
        freezer.thaw()?;
        let mut moment = Patience::new(EVERY, EVERY);
        while moment.once_more().await {}
        freezer.freeze()?;
        let mut looks = Patience::new(STAND_LIMIT, EVERY);
        while looks.once_more().await {
            if freezer.holds()? {
                return Ok(());
            }
        }
    }
    Err(io::Error::other("it does not stand still again"))
}

/// Whether a thread of a process waits in vfork(2), or in another call that does the same. Of one that has
/// ended meanwhile nobody asks.
fn waits(pid: u32) -> bool {
    let threads = process::threads(pid).unwrap_or_default();
    threads.into_iter().any(|thread| {
        let call = process::read(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
        is_vfork(&call, |address| {
            let mut flags = [0; 8];
            let memory = fs::File::open(format!("/proc/{pid}/mem"))?.into_parts().0;
            memory.read_exact_at(&mut flags, address)?;
            Ok(u64::from_ne_bytes(flags))
        })
    })
}

/// Whether what `/proc/PID/syscall` says (`proc_pid_syscall(5)`) is a call that waits for a child. `flags`
/// reads those of clone3(2) from the process's memory.
fn is_vfork(call: &str, flags: impl Fn(u64) -> io::Result<u64>) -> bool {
    let waits: u64 = libc::CLONE_VFORK.unsigned_abs().into();
    let mut words = call.split_whitespace();
    let (Some(number), first) =
        (words.next().and_then(|word| word.parse::<libc::c_long>().ok()), words.next())
    else {
        return false;
    };
    let first = first.and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => true,
        libc::SYS_clone => first.is_some_and(|flags| flags & waits != 0),
        libc::SYS_clone3 => first.and_then(|at| flags(at).ok()).is_some_and(|is| is & waits != 0),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
