//! Ends a CRIU that dumps for too long, and not what it dumps.
//!
//! CRIU makes a process work for it: it writes a system call and a trap over the beginning of its
//! code, or has it run code of CRIU's own, and puts everything back afterwards (compel, `infect.c`).
//! Killed just then, it leaves a process that dies of the trap. So CRIU is stopped, what it works on
//! is looked at, and it goes on for a moment until it can be killed.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use fs_err as fs;
use rustix::fs::FlockOperation;
use rustix::process::Signal;

use crate::cgroup::Freezer;
use crate::patience::Patience;
use crate::process::{self, field};

/// How long a good moment is waited for, and for one look, and for others who look.
const CUT_LIMIT: Duration = Duration::from_secs(3);

/// How often CRIU is looked at, at least: the machine may have stood still for all of that time. Where it has
/// not, these take a second.
const LOOKS_MIN: u32 = 20;

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

/// What it is told of as having stopped for, by a trap that is a signal for it.
const TRAP: &str = "5";

/// How CRIU's code in a process waits for CRIU (compel, `plugins/std/infect.c`).
const RECEIVE: [libc::c_long; 2] = [libc::SYS_recvfrom, libc::SYS_recvmsg];

/// The same in one of 32 bits (`socketcall(2)` on x86), and what it is then asked for first.
const RECEIVE_32: (libc::c_long, [&str; 2]) = (102, ["0xc", "0x11"]);

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

/// How a thread is.
#[derive(Clone, Copy, Debug, Default)]
struct Thread {
    state: Option<char>,
    /// Its program counter.
    at: Option<u64>,
    /// Whether it waits for what somebody sends.
    receives: bool,
    /// Whether it has blocked what CRIU has it block.
    is_deaf: bool,
    /// Whether it is given a trap when its tracer is gone: nobody has asked why it stopped.
    has_trap: bool,
}

/// Kills the CRIU that dumps the processes of a cgroup. Where that `stays` frozen, nothing of it runs
/// before somebody has put right what is left: its sockets deny what they are asked
/// ([`crate::connections`]). Else it runs from then on.
pub(crate) async fn cut(criu: u32, freezer: &Freezer, stays: bool) -> io::Result<()> {
    let _alone = alone(criu).await;
    let mut tries = Patience::new(CUT_LIMIT, LOOK_EVERY).at_least(LOOKS_MIN);
    let mut answers = true;
    while answers && tries.once_more().await {
        process::signal(criu, Signal::STOP)?;
        let mut rests = Patience::new(REST_LIMIT, LOOK_EVERY);
        let mut moment = Moment::Restless;
        while moment == Moment::Restless && rests.once_more().await {
            let freezer = freezer.clone();
            let looked = tokio::task::spawn_blocking(move || look(criu, &freezer));
            let looked = tokio::time::timeout(CUT_LIMIT, looked).await;
            answers = looked.is_ok();
            // What cannot be looked at must not leave it stopped: it is killed in the end.
            let looked = looked.ok().and_then(Result::ok).and_then(Result::ok);
            moment = looked.unwrap_or(Moment::Bad);
        }
        if moment == Moment::Good {
            return end(criu, freezer, stays).await;
        }
        process::signal(criu, Signal::CONT)?;
    }
    tracing::warn!(pid = criu, "a dump is ended at a bad moment: none was good");
    end(criu, freezer, stays).await
}

/// Waits until nobody else ends the same CRIU, the guardian or an agent: one would have it go on while another
/// looks at what it has stopped at. Returns what keeps others away; they may be late, and are not waited for then.
async fn alone(criu: u32) -> Option<OwnedFd> {
    let mut looks = Patience::new(CUT_LIMIT * 2, LOOK_EVERY);
    while looks.once_more().await {
        match reserve(criu) {
            Ok(Some(alone)) => return Some(alone),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, pid = criu, "others may end it as well");
                return None;
            }
        }
    }
    None
}

/// Locks a file of CRIU's in `/proc` that only root may open; nothing when somebody else has.
fn reserve(criu: u32) -> io::Result<Option<OwnedFd>> {
    let own = OwnedFd::from(fs::File::open(format!("/proc/{criu}/syscall"))?.into_file());
    match rustix::fs::flock(&own, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        locked => Ok(locked.map(|()| Some(own))?),
    }
}

/// Kills it, with what it may have thawed for its work frozen before; not where it cannot die before its disk
/// answers: nobody may be left by then who would let that run.
async fn end(criu: u32, freezer: &Freezer, stays: bool) -> io::Result<()> {
    let dies = state(&format!("/proc/{criu}")).is_some_and(|state| state != 'D');
    if stays && dies {
        let freezer = freezer.clone();
        let frozen = tokio::task::spawn_blocking(move || freezer.freeze());
        let frozen = tokio::time::timeout(CUT_LIMIT, frozen).await.map_err(io::Error::from);
        let frozen = frozen.and_then(|frozen| frozen.map_err(io::Error::other));
        if let Err(error) = frozen.and_then(|frozen| frozen) {
            tracing::warn!(%error, "failed to freeze a container whose dump is ended");
        }
    }
    process::kill(criu)
}

/// Looks at every thread that CRIU traces.
fn look(criu: u32, freezer: &Freezer) -> io::Result<Moment> {
    let stopped = state(&format!("/proc/{criu}")).is_none_or(|state| "TtZX".contains(state));
    let mut worst = if stopped { Moment::Good } else { Moment::Restless };
    for pid in freezer.processes()? {
        let Ok(maps) = process::read(format!("/proc/{pid}/maps")) else { continue };
        let foreign = foreign(&maps);
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        let threads = threads.filter_map(Result::ok);
        let traced = threads.filter_map(|thread| of(&thread.path().display().to_string(), criu));
        let judged = traced.map(|thread| judge(thread, &foreign)).max();
        let written = || foreign.written_over.as_ref().is_some_and(|code| holds(pid, code));
        // Only of those that CRIU has: what is read may be anybody's.
        match judged {
            Some(Moment::Good) if written() => worst = worst.max(Moment::Bad),
            Some(judged) => worst = worst.max(judged),
            None => {}
        }
    }
    Ok(worst)
}

/// Returns how a thread is that CRIU traces.
fn of(thread: &str, criu: u32) -> Option<Thread> {
    let read = |name: &str| process::read(format!("{thread}/{name}")).unwrap_or_default();
    let status = read("status");
    if field(&status, "TracerPid:")?.parse().ok() != Some(criu) {
        return None;
    }
    let (call, stat) = (read("syscall"), read("stat"));
    Some(Thread {
        at: program_counter(&call),
        receives: receives(&call),
        is_deaf: field(&status, "SigBlk:") == Some(BLOCKED),
        // The last one (`proc_pid_stat(5)`, `exit_code`).
        has_trap: stat.split_ascii_whitespace().next_back() == Some(TRAP),
        state: state(thread),
    })
}

/// Whether a thread waits for what somebody sends (`proc_pid_syscall(5)`).
fn receives(call: &str) -> bool {
    let mut words = call.split_ascii_whitespace();
    let number: Option<libc::c_long> = words.next().and_then(|number| number.parse().ok());
    let (number_32, asked) = RECEIVE_32;
    let is_asked = words.next().is_some_and(|word| asked.contains(&word));
    number.is_some_and(|number| RECEIVE.contains(&number) || number == number_32 && is_asked)
}

/// Decides about one thread. One that is stopped is to be where it was found, with what it had blocked. One
/// that CRIU's own code has wait for CRIU puts everything back when nobody speaks to it any more; one that
/// sleeps elsewhere in there, or in a system call that CRIU wrote over its code, comes to the trap after it.
fn judge(thread: Thread, foreign: &Foreign) -> Moment {
    let Thread { state, at, receives, is_deaf, has_trap } = thread;
    let within = |range: &Range<u64>| at.is_some_and(|at| range.contains(&at));
    let written_over = foreign.written_over.as_ref().is_some_and(within);
    let is_criu = foreign.code.iter().any(within);
    let elsewhere = at.is_some() && !written_over && !is_criu;
    match state {
        None | Some('Z' | 'X') => Moment::Good,
        Some('S') if is_criu && receives => Moment::Good,
        Some('S' | 'D' | 'I') if elsewhere => Moment::Good,
        Some('t' | 'T') if elsewhere && !is_deaf && !has_trap => Moment::Good,
        Some('t' | 'T') => Moment::Bad,
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
    Foreign { written_over: code, code: criu.collect() }
}

/// Whether CRIU's bytes are at the beginning of a process's code; not, where that cannot be read.
fn holds(pid: u32, code: &Range<u64>) -> bool {
    let read = |name: &str, at: u64, bytes: &mut [u8]| {
        let file = fs::File::open(format!("/proc/{pid}/{name}")).map(fs::File::into_file);
        file.and_then(|file| file.read_exact_at(bytes, at)).is_ok()
    };
    // What was written to is a page of the process's own. Another one would have to be read from its file.
    let mut page = [0; 8];
    let number = code.start / u64::try_from(rustix::param::page_size()).unwrap_or(u64::MAX);
    let is_own = read("pagemap", number * 8, &mut page) && is_own(u64::from_ne_bytes(page));
    let mut bytes = [0; 16];
    is_own && read("mem", code.start, &mut bytes) && is_of_criu(&bytes)
}

/// Whether a page is there, or swapped, and not of a file (`/proc/PID/pagemap`, bits 63, 62 and 61).
fn is_own(page: u64) -> bool {
    page >> 62 != 0 && page >> 61 & 1 == 0
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
        Thread { state: Some(state), at, ..Thread::default() }
    }

    #[test]
    fn what_works_for_criu_is_not_left_alone() {
        let foreign = foreign(MAPS);
        let (written_over, criu) = (0x7fb4_1a3e_7003, 0x7fb4_1b26_b000);
        for at in [written_over, criu] {
            assert_eq!(judge(thread('t', Some(at)), &foreign), Moment::Bad, "{at:x}");
            for state in ['S', 'D', 'R'] {
                let judged = judge(thread(state, Some(at)), &foreign);
                assert_eq!(judged, Moment::Restless, "{state} {at:x}");
            }
        }
        for (state, moment) in [('S', Moment::Good), ('D', Moment::Restless), ('t', Moment::Bad)] {
            let waits = Thread { receives: true, ..thread(state, Some(criu)) };
            assert_eq!(judge(waits, &foreign), moment, "{state}");
        }
        for state in ['t', 'S'] {
            assert_eq!(judge(thread(state, Some(0x7fb4_1a3e_8000)), &foreign), Moment::Good);
        }
        assert_eq!(judge(thread('t', None), &foreign), Moment::Bad);
        assert_eq!(judge(thread('S', None), &foreign), Moment::Restless);
        assert_eq!(judge(Thread::default(), &foreign), Moment::Good);
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
        let (foreign, there) = (foreign(MAPS), Some(0x7fb4_1a3e_8000));
        let deaf = Thread { is_deaf: true, ..thread('t', there) };
        assert_eq!(judge(deaf, &foreign), Moment::Bad);
        let trapped = Thread { has_trap: true, ..thread('t', there) };
        assert_eq!(judge(trapped, &foreign), Moment::Bad);
        // CRIU's code puts that back.
        let within =
            Thread { receives: true, is_deaf: true, ..thread('S', Some(0x7fb4_1b26_b000)) };
        assert_eq!(judge(within, &foreign), Moment::Good);
    }

    #[test]
    fn a_page_of_its_own_was_written_to() {
        let (present, swapped, of_file) = (1 << 63, 1 << 62, 1 << 61);
        assert!(is_own(present | 7) && is_own(swapped));
        assert!(!is_own(present | of_file) && !is_own(0) && !is_own(of_file));
        let own = vec![0x0f_u8, 0x05, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0xcc, 0, 0, 0, 0, 0, 0, 0, 0];
        let at = u64::try_from(own.as_ptr().addr()).unwrap();
        assert!(holds(std::process::id(), &(at..at + 16)));
        assert!(!holds(std::process::id(), &(0..16)));
    }

    #[test]
    fn who_receives_is_told_from_others() {
        let [from, message] = RECEIVE;
        for call in [format!("{from} 0x3 0x7f"), format!("{message} 0x3"), "102 0xc 0x1".into()] {
            assert!(receives(&call), "{call}");
        }
        for call in ["running\n", "-1 0xc 0x11", "102 0x1 0xc", "102", ""] {
            assert!(!receives(call), "{call}");
        }
    }

    #[test]
    fn one_at_a_time_ends_it() {
        let own = std::process::id();
        let alone = reserve(own).unwrap();
        assert!(alone.is_some() && reserve(own).unwrap().is_none());
        drop(alone);
        assert!(reserve(own).unwrap().is_some());
        assert_eq!(reserve(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
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
