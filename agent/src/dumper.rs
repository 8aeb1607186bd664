//! Ends a CRIU that dumps for too long, and not what it dumps.
//!
//! CRIU makes a process work for it: it writes a system call and a trap over the beginning of its
//! code, or has it run code of CRIU's own, and puts everything back afterwards (compel, `infect.c`).
//! Killed just then, it leaves a process that dies of the trap. So CRIU is stopped, what it works on
//! is looked at, and it goes on for a moment until it can be killed.

use std::io;
use std::ops::Range;
use std::time::Duration;

use fs_err as fs;
use rustix::process::Signal;

use crate::cgroup::Freezer;
use crate::patience::Patience;
use crate::process::{self, field};

/// How long a good moment is waited for.
const CUT_LIMIT: Duration = Duration::from_secs(3);

/// How long CRIU goes on between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// How long what CRIU has begun may take to come to rest when it is stopped.
const REST_LIMIT: Duration = Duration::from_millis(40);

/// Bytes at the beginning of the code that CRIU writes over, and some.
const WRITTEN_OVER: u64 = 64;

/// What a look at a container's threads found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// Nothing dies when CRIU does.
    Good,
    /// Something does what CRIU wants of it.
    Bad,
    /// Something has not come to rest.
    Restless,
}

/// Where a thread is while it does what CRIU wants of it.
#[derive(Debug)]
struct Foreign {
    /// The beginning of its code, over which CRIU writes.
    written_over: Option<Range<u64>>,
    /// What CRIU has mapped into it.
    code: Vec<Range<u64>>,
}

/// Kills the CRIU that dumps the processes of a cgroup. Where that `stays` frozen, nothing of it runs
/// before somebody has put right what is left: its sockets deny what they are asked
/// ([`crate::connections`]). Else it runs from then on.
pub(crate) async fn cut(criu: u32, freezer: &Freezer, stays: bool) -> io::Result<()> {
    let mut tries = Patience::new(CUT_LIMIT, LOOK_EVERY);
    while tries.once_more().await {
        process::signal(criu, Signal::STOP)?;
        let mut rests = Patience::new(REST_LIMIT, LOOK_EVERY);
        let mut moment = Moment::Restless;
        while moment == Moment::Restless && rests.once_more().await {
            let freezer = freezer.clone();
            let looked = tokio::task::spawn_blocking(move || look(criu, &freezer)).await;
            // What cannot be looked at must not leave it stopped: it is killed in the end.
            moment = looked.ok().and_then(Result::ok).unwrap_or(Moment::Bad);
        }
        if moment == Moment::Good {
            if stays {
                freeze(freezer).await;
            }
            return process::kill(criu);
        }
        process::signal(criu, Signal::CONT)?;
    }
    tracing::warn!(pid = criu, "a dump is ended at a bad moment: none was good");
    process::kill(criu)
}

/// Freezes what CRIU may have thawed for its work.
async fn freeze(freezer: &Freezer) {
    let freezer = freezer.clone();
    let frozen = tokio::task::spawn_blocking(move || freezer.freeze()).await;
    if let Err(error) = frozen.map_err(io::Error::other).and_then(|frozen| frozen) {
        tracing::warn!(%error, "failed to freeze a container whose dump is ended");
    }
}

/// Looks at every thread that CRIU traces.
fn look(criu: u32, freezer: &Freezer) -> io::Result<Moment> {
    let stopped = state(&format!("/proc/{criu}")).is_none_or(|state| "TtZX".contains(state));
    let mut worst = if stopped { Moment::Good } else { Moment::Restless };
    for pid in freezer.processes()? {
        let Ok(maps) = process::read(format!("/proc/{pid}/maps")) else { continue };
        let foreign = foreign(&maps);
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.filter_map(Result::ok) {
            let thread = thread.path().display().to_string();
            let status = process::read(format!("{thread}/status")).unwrap_or_default();
            if field(&status, "TracerPid:").and_then(|pid| pid.parse().ok()) != Some(criu) {
                continue;
            }
            let at = process::read(format!("{thread}/syscall")).unwrap_or_default();
            worst = worst.max(judge(state(&thread), program_counter(&at), &foreign));
        }
    }
    Ok(worst)
}

/// Decides about one thread. One that is stopped is to be where it was found. One that sleeps in
/// CRIU's own code waits for CRIU there, and puts everything back when nobody speaks to it any more;
/// one that sleeps in a system call that CRIU wrote over its code comes to the trap after it.
fn judge(state: Option<char>, at: Option<u64>, foreign: &Foreign) -> Moment {
    let within = |range: &Range<u64>| at.is_some_and(|at| range.contains(&at));
    let written_over = foreign.written_over.as_ref().is_some_and(within);
    match state {
        None | Some('Z' | 'X') => Moment::Good,
        Some('S' | 'D' | 'I') if at.is_some() && !written_over => Moment::Good,
        Some('t' | 'T') if at.is_some() && !written_over && !foreign.code.iter().any(within) => {
            Moment::Good
        }
        Some('t' | 'T') => Moment::Bad,
        _ => Moment::Restless,
    }
}

/// Returns where a stopped thread is when it does what CRIU wants of it: at the beginning of the code,
/// or in what CRIU has mapped (`proc_pid_maps(5)`).
fn foreign(maps: &str) -> Foreign {
    let range = |line: &str| {
        let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    let is_code = |line: &&str| line.split(' ').nth(1).is_some_and(|modes| modes.contains('x'));
    let code = maps.lines().find(is_code).and_then(range);
    let code = code.map(|code| code.start..code.start.saturating_add(WRITTEN_OVER));
    let criu = maps.lines().filter(|line| line.contains("/memfd:CRIUMFD")).filter_map(range);
    Foreign { written_over: code, code: criu.collect() }
}

/// Returns the program counter, which comes last (`proc_pid_syscall(5)`).
fn program_counter(syscall: &str) -> Option<u64> {
    let last = syscall.split_ascii_whitespace().next_back()?;
    u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
}

fn state(process: &str) -> Option<char> {
    let status = process::read(format!("{process}/status")).ok()?;
    field(&status, "State:")?.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "555591722000-555591744000 rw-p 00000000 00:00 0 [heap]\n\
        7fb41a3e7000-7fb41a3ef000 r-xp 00000000 00:1f 42 /workload\n\
        7fb41b26a000-7fb41b26f000 rwxs 00000000 00:01 7511 /memfd:CRIUMFD (deleted)\n";

    #[test]
    fn what_works_for_criu_is_not_left_alone() {
        let foreign = foreign(MAPS);
        let (written_over, criu) = (0x7fb4_1a3e_7003, 0x7fb4_1b26_b000);
        for (at, asleep) in [(written_over, Moment::Restless), (criu, Moment::Good)] {
            assert_eq!(judge(Some('t'), Some(at), &foreign), Moment::Bad, "{at:x}");
            assert_eq!(judge(Some('S'), Some(at), &foreign), asleep, "{at:x}");
            assert_eq!(judge(Some('R'), Some(at), &foreign), Moment::Restless, "{at:x}");
        }
        for state in ['t', 'S'] {
            assert_eq!(judge(Some(state), Some(0x7fb4_1a3e_8000), &foreign), Moment::Good);
        }
        assert_eq!(judge(Some('t'), None, &foreign), Moment::Bad);
        assert_eq!(judge(Some('S'), None, &foreign), Moment::Restless);
        assert_eq!(judge(None, None, &foreign), Moment::Good);
    }

    #[test]
    fn the_program_counter_comes_last() {
        assert_eq!(program_counter("-1 0x7ffc01 0x7fb41\n"), Some(0x7fb41));
        assert_eq!(program_counter("47 0x3 0x0 0x0 0x0 0x0 0x0 0x7ffc01 0x7fb41"), Some(0x7fb41));
        assert_eq!(program_counter("running\n"), None);
        assert_eq!(program_counter(""), None);
    }

    #[tokio::test]
    async fn who_traces_nobody_is_ended_at_once() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let nobody = Freezer::at("/kybernate-no-such-cgroup").unwrap();
        cut(child.id(), &nobody, false).await.unwrap();
        assert!(!child.wait().unwrap().success());
    }
}
