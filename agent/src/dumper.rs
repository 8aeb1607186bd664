//! Ends a CRIU that dumps for too long, and not what it dumps.
//!
//! CRIU makes a process work for it: it writes a system call and a trap over the beginning of its
//! code, or has it run code of CRIU's own, and puts everything back afterwards (compel, `infect.c`).
//! Killed just then, it leaves a process that dies of the trap. So CRIU is stopped, what it works on
//! is looked at, and it goes on for a moment until it can be killed.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
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

/// What CRIU writes there (compel, `code_syscall`, `MEMFD_FNAME`): a system call and traps, for each
/// architecture that we are built for, and the name of its memory behind that.
const SYSCALLS: [[u8; 8]; 3] = [
    [0x0f, 0x05, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc],
    [0xcd, 0x80, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc],
    [0x01, 0x00, 0x00, 0xd4, 0x00, 0x00, 0x20, 0xd4],
];
const NAME: [u8; 8] = *b"CRIUMFD\0";

/// Signals that a thread has blocked while it does what CRIU wants of it: all but those that nobody can
/// block, and the one of the trap.
const BLOCKED: &str = "fffffffffffbfeef";

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
    /// Whether CRIU's bytes are over its code just now.
    is_written: bool,
}

/// How a thread is.
#[derive(Clone, Copy, Debug)]
struct Thread {
    state: Option<char>,
    /// Its program counter.
    at: Option<u64>,
    /// Whether it has blocked what CRIU has it block.
    is_deaf: bool,
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
        let mut foreign = foreign(&maps);
        foreign.is_written = foreign.written_over.as_ref().is_some_and(|code| holds(pid, code));
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.filter_map(Result::ok) {
            let thread = thread.path().display().to_string();
            let status = process::read(format!("{thread}/status")).unwrap_or_default();
            if field(&status, "TracerPid:").and_then(|pid| pid.parse().ok()) != Some(criu) {
                continue;
            }
            let at = process::read(format!("{thread}/syscall")).unwrap_or_default();
            let at = program_counter(&at);
            let is_deaf = field(&status, "SigBlk:") == Some(BLOCKED);
            worst = worst.max(judge(Thread { state: state(&thread), at, is_deaf }, &foreign));
        }
    }
    Ok(worst)
}

/// Decides about one thread. One that is stopped is to be where it was found, with what it had blocked
/// and its code as it was. One that sleeps in CRIU's own code waits for CRIU there, and puts everything
/// back when nobody speaks to it any more; one that sleeps in a system call that CRIU wrote over its code
/// comes to the trap after it.
fn judge(thread: Thread, foreign: &Foreign) -> Moment {
    let Thread { state, at, is_deaf } = thread;
    let within = |range: &Range<u64>| at.is_some_and(|at| range.contains(&at));
    let is_as_it_was = !is_deaf && !foreign.is_written;
    let written_over = foreign.written_over.as_ref().is_some_and(within);
    match state {
        None | Some('Z' | 'X') => Moment::Good,
        Some('S' | 'D' | 'I') if at.is_some() && !written_over => Moment::Good,
        Some('t' | 'T') => {
            let elsewhere = at.is_some() && !written_over && !foreign.code.iter().any(within);
            if elsewhere && is_as_it_was { Moment::Good } else { Moment::Bad }
        }
        _ => Moment::Restless,
    }
}

/// Returns where a stopped thread is when it does what CRIU wants of it: at the beginning of the code,
/// or in what CRIU has mapped (`proc_pid_maps(5)`). That may come before the code, which was the first
/// when CRIU looked.
fn foreign(maps: &str) -> Foreign {
    let range = |line: &str| {
        let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    let is_code = |line: &&str| line.split(' ').nth(1).is_some_and(|modes| modes.contains('x'));
    let is_criu = |line: &&str| line.contains(" /memfd:CRIUMFD");
    let code = maps.lines().find(|line| is_code(line) && !is_criu(line)).and_then(range);
    let code = code.map(|code| code.start..code.start.saturating_add(WRITTEN_OVER));
    let criu = maps.lines().filter(is_criu).filter_map(range);
    Foreign { written_over: code, code: criu.collect(), is_written: false }
}

/// Whether CRIU's bytes are at the beginning of a process's code; not, where that cannot be read.
fn holds(pid: u32, code: &Range<u64>) -> bool {
    let mut bytes = [0; 16];
    let memory = fs::File::open(format!("/proc/{pid}/mem")).map(fs::File::into_file);
    let read = memory.and_then(|memory| memory.read_exact_at(&mut bytes, code.start));
    read.is_ok() && is_of_criu(&bytes)
}

fn is_of_criu(bytes: &[u8; 16]) -> bool {
    SYSCALLS.iter().any(|syscall| bytes.starts_with(syscall)) || bytes.ends_with(&NAME)
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

    fn thread(state: char, at: Option<u64>) -> Thread {
        Thread { state: Some(state), at, is_deaf: false }
    }

    #[test]
    fn what_works_for_criu_is_not_left_alone() {
        let foreign = foreign(MAPS);
        let (written_over, criu) = (0x7fb4_1a3e_7003, 0x7fb4_1b26_b000);
        for (at, asleep) in [(written_over, Moment::Restless), (criu, Moment::Good)] {
            assert_eq!(judge(thread('t', Some(at)), &foreign), Moment::Bad, "{at:x}");
            assert_eq!(judge(thread('S', Some(at)), &foreign), asleep, "{at:x}");
            assert_eq!(judge(thread('R', Some(at)), &foreign), Moment::Restless, "{at:x}");
        }
        for state in ['t', 'S'] {
            assert_eq!(judge(thread(state, Some(0x7fb4_1a3e_8000)), &foreign), Moment::Good);
        }
        assert_eq!(judge(thread('t', None), &foreign), Moment::Bad);
        assert_eq!(judge(thread('S', None), &foreign), Moment::Restless);
        let gone = Thread { state: None, at: None, is_deaf: false };
        assert_eq!(judge(gone, &foreign), Moment::Good);
    }

    #[test]
    fn the_code_is_written_over_also_behind_what_criu_has_mapped() {
        let (heap, own) = MAPS.split_once('\n').unwrap();
        let criu = "7fb41a26a000-7fb41a26f000 rwxs 00000000 00:01 7511 /memfd:CRIUMFD (deleted)";
        let foreign = foreign(&[heap, criu, own].join("\n"));
        for at in [0x7fb4_1a3e_7003, 0x7fb4_1a26_b000, 0x7fb4_1b26_b000] {
            assert_eq!(judge(thread('t', Some(at)), &foreign), Moment::Bad, "{at:x}");
        }
        assert_eq!(judge(thread('t', Some(0x7fb4_1a3e_8000)), &foreign), Moment::Good);
    }

    #[test]
    fn what_is_where_it_was_is_to_be_as_it_was() {
        let (mut foreign, there) = (foreign(MAPS), Some(0x7fb4_1a3e_8000));
        let deaf = Thread { is_deaf: true, ..thread('t', there) };
        assert_eq!(judge(deaf, &foreign), Moment::Bad);
        // CRIU's code puts that back.
        let within = Thread { is_deaf: true, ..thread('S', Some(0x7fb4_1b26_b000)) };
        assert_eq!(judge(within, &foreign), Moment::Good);
        foreign.is_written = true;
        assert_eq!(judge(thread('t', there), &foreign), Moment::Bad);
    }

    #[test]
    fn what_criu_writes_is_known() {
        let of = |begin: [u8; 8], end: [u8; 8]| [begin, end].concat().try_into().unwrap();
        for syscall in SYSCALLS {
            assert!(is_of_criu(&of(syscall, [0x90; 8])));
        }
        assert!(is_of_criu(&of([0x90; 8], NAME)));
        assert!(!is_of_criu(&of([0x90; 8], [0x90; 8])));
        // Of our own, which can be read.
        let maps = process::read("/proc/self/maps").unwrap();
        let code = foreign(&maps).written_over.unwrap();
        assert!(!holds(std::process::id(), &code));
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
