//! The process that asks the driver: a call that never returns takes only this process with it.
//!
//! It ends when the agent does: nothing is begun that nobody has written down as begun. Only what
//! cannot be left in the middle is brought to its end first ([`moves`]).

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kybernate_spec::gpu;
use rustix::process::Signal;

use super::call::{Code, Failure, Looked, Reply, Request, State, Storage, Work};
use super::management::{Management, Usage};
use super::storage::{Aside, moves};
use super::sys::{Driver, GpuPair};
use super::{Pair, REQUEST_BYTES_MAX, Use};
use crate::cgroup;

/// How often a process between two states is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Answers the one request on standard input.
pub fn run() -> ExitCode {
    let mut line = String::new();
    let read = io::stdin().lock().take(REQUEST_BYTES_MAX).read_line(&mut line);
    if !matches!(read, Ok(length) if length > 0) {
        return ExitCode::FAILURE;
    }
    // Standard input stays open as long as the agent lives and wants an answer.
    std::thread::spawn(end_with_the_agent);
    let reply = match serde_json::from_str::<Request>(&line) {
        Ok(request) => answer(&request).unwrap_or_else(Reply::Failed),
        Err(error) => Reply::Failed(Failure::Request(error.to_string())),
    };
    let mut out = io::stdout().lock();
    let written = serde_json::to_writer(&mut out, &reply).map_err(io::Error::from);
    match written.and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_nobody_listens) => ExitCode::FAILURE,
    }
}

/// By a signal: another thread may be in a call that does not return, and the driver's library must not
/// be asked to tidy up meanwhile.
fn end_with_the_agent() {
    let mut rest = [0; 64];
    while matches!(io::stdin().lock().read(&mut rest), Ok(length) if length > 0) {}
    moves::end();
    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap_or_default();
}

fn answer(request: &Request) -> Result<Reply, Failure> {
    let management = || Management::open(&request.management);
    match &request.work {
        Work::Facts => {
            let facts = management()?.facts();
            facts.map(Reply::Facts).map_err(|error| unmanaged(&request.management, &error))
        }
        Work::Look { pids } => {
            let usage = management().and_then(|management| {
                let usage = management.usage(pids);
                usage.map_err(|error| unmanaged(&request.management, &error))
            });
            let driver = open(&request.driver)?;
            look(&driver, pids, usage).map(Reply::Looked)
        }
        Work::Take { pids, lock_ms, uses, storage } => {
            let driver = open(&request.driver)?;
            let gpus: Vec<&str> = uses.iter().map(|one| &*one.uuid).collect();
            if let Some(storage) = storage
                && let Some(reason) = left_behind()
            {
                return Err(Failure::Storage { path: storage.directory.clone(), reason });
            }
            let aside = aside(&driver, storage.as_ref(), &gpus)?;
            if let Some(aside) = &aside {
                // Before anything is touched.
                aside.prepare(uses)?;
            }
            let usage = || management().ok()?.usage(pids).ok();
            take(&driver, pids, *lock_ms, aside.as_ref(), usage).map(|()| Reply::Done)
        }
        Work::Bring { pids, uses, pairs, storage } => {
            let driver = open(&request.driver)?;
            let moved = pairs.iter().map(|pair| &*pair.to);
            let stays = uses.iter().map(|one| &*one.uuid).filter(|_| pairs.is_empty());
            let gpus: Vec<&str> = moved.chain(stays).collect();
            let warning = storage.as_ref().and_then(|_| left_behind());
            let aside = aside(&driver, storage.as_ref(), &gpus)?;
            let free = || {
                let free = management()?.free();
                free.map_err(|error| unmanaged(&request.management, &error))
            };
            let has_room = |away: &[Use]| has_room(away, pairs, free);
            bring(&driver, pids, uses, pairs, has_room, aside.as_ref())?;
            Ok(warning.map_or(Reply::Done, Reply::Warned))
        }
    }
}

/// Leaves the agent's cgroup: whatever ends its service does not end us then. Returns why that is not
/// so.
fn left_behind() -> Option<String> {
    let why = match cgroup::leave(std::process::id()) {
        Ok(0) => "none can be written to".to_owned(),
        Ok(_) => return None,
        Err(error) => error.to_string(),
    };
    Some(format!(
        "the process that moves it cannot leave the agent's cgroup, and would be ended with it: {why}"
    ))
}

/// Takes hold of where GPU memory is kept.
fn aside<'a>(
    driver: &'a Driver,
    storage: Option<&Storage>,
    gpus: &[&str],
) -> Result<Option<Aside<'a>>, Failure> {
    let Some(storage) = storage else { return Ok(None) };
    Aside::lock(driver, storage, gpus).map(Some)
}

fn open(path: &Path) -> Result<Driver, Failure> {
    Driver::open(path)
        .map_err(|error| Failure::Library { path: path.to_owned(), reason: error.to_string() })
}

fn unmanaged(path: &Path, error: &nvml_wrapper::error::NvmlError) -> Failure {
    Failure::Library { path: path.to_owned(), reason: error.to_string() }
}

/// Asks how far each process is. What no GPU is used by is left out.
fn look(driver: &Driver, pids: &[u32], usage: Result<Usage, Failure>) -> Result<Looked, Failure> {
    let (usage, missed) = match usage {
        Ok(usage) => (usage, None),
        Err(failure) => (Usage::default(), Some(failure.to_string())),
    };
    let mut states = Vec::new();
    for pid in pids {
        let uses = usage.users.contains(pid);
        if is_stopped(*pid) {
            // A question about it would not return.
            if uses {
                return Err(Failure::Stopped(*pid));
            }
            continue;
        }
        match state(driver, *pid) {
            Ok(state) => states.push((*pid, state)),
            Err(Failure::Call { code, .. }) if code.is_of_no_user() && !uses => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(Looked { states, uses: usage.uses, missed, has_storage: driver.has_storage() })
}

/// Locks all, then moves the memory of each. On a failure some are locked, or more: whoever asked
/// brings them back.
fn take(
    driver: &Driver,
    pids: &[u32],
    lock_ms: u32,
    aside: Option<&Aside<'_>>,
    usage: impl FnOnce() -> Option<Usage>,
) -> Result<(), Failure> {
    for pid in pids {
        match state(driver, *pid)? {
            State::Running => {}
            State::Failed => return Err(Failure::Lost(*pid)),
            state => return Err(Failure::Foreign { pid: *pid, state }),
        }
        on(*pid, "cuCheckpointProcessLock", |pid| driver.lock(pid, lock_ms))?;
    }
    if let Some(aside) = aside {
        // They may have got more since they were looked at, and get none any more.
        aside.make_room(bytes_of(usage(), aside)?)?;
    }
    for pid in pids {
        match aside {
            None => on(*pid, "cuCheckpointProcessCheckpoint", |pid| driver.checkpoint(pid))?,
            Some(aside) => aside.take(*pid)?,
        }
        // Whether it is really there, and whether whoever brings it back will be there, too.
        on(*pid, "cuCheckpointProcessGetRestoreThreadId", |pid| driver.restore_thread(pid))?;
        match state(driver, *pid)? {
            State::Checkpointed => {}
            state => return Err(Failure::Foreign { pid: *pid, state }),
        }
    }
    Ok(())
}

/// Returns how many bytes are moved, or more where nobody knows.
fn bytes_of(usage: Option<Usage>, aside: &Aside<'_>) -> Result<u64, Failure> {
    let known = usage
        .filter(|usage| !usage.unmeasured)
        .map(|usage| usage.uses.iter().fold(0_u64, |sum, one| sum.saturating_add(one.bytes)));
    known.filter(|bytes| *bytes > 0).map_or_else(|| aside.at_most(), Ok)
}

/// Brings each process back to where it runs. One that cannot be does not keep the others; what has
/// ended needs nothing.
fn bring(
    driver: &Driver,
    pids: &[u32],
    uses: &[Use],
    pairs: &[Pair],
    has_room: impl FnOnce(&[Use]) -> Result<(), Failure>,
    aside: Option<&Aside<'_>>,
) -> Result<(), Failure> {
    let mut states = Vec::new();
    let mut done = Ok(());
    for pid in pids {
        match settled(driver, *pid, aside) {
            Ok(state) => states.push((*pid, state)),
            Err(Failure::Call { code, .. }) if code.is_of_another(has_ended(*pid)) => {}
            Err(failure) => done = worse(done, Err(failure)),
        }
    }
    let mapped = mapping(pairs)?;
    let can = ready(driver, &states, uses, has_room, aside);
    for (pid, state) in &mut states {
        match *state {
            State::Checkpointed if aside.is_some_and(Aside::is_gone) => {
                done = worse(done, Err(Failure::Lost(*pid)));
            }
            State::Checkpointed => {
                let restore = || match aside {
                    None => {
                        on(*pid, "cuCheckpointProcessRestore", |pid| driver.restore(pid, &mapped))
                    }
                    Some(aside) => aside.bring(*pid, pairs, &mapped),
                };
                match can.clone().and_then(|()| restore()) {
                    Ok(()) => *state = State::Locked,
                    Err(failure) => done = worse(done, Err(failure)),
                }
            }
            // It may be locked for whoever has come after us.
            State::Locked if aside.is_some_and(Aside::is_gone) => {
                done = worse(done, Err(Failure::Foreign { pid: *pid, state: *state }));
            }
            State::Running | State::Locked => {}
            State::Failed => done = worse(done, Err(Failure::Lost(*pid))),
            // Nobody else is at it: whoever began has ended, and nobody can go on.
            State::Checkpointing | State::Restoring if aside.is_some() => {
                done = worse(done, Err(Failure::Lost(*pid)));
            }
            State::Checkpointing | State::Restoring | State::Other => {
                done = worse(done, Err(Failure::Foreign { pid: *pid, state: *state }));
            }
        }
    }
    if aside.is_some_and(Aside::is_gone) {
        return done;
    }
    for (pid, _) in states.iter().filter(|(_, state)| *state == State::Locked) {
        let unlocked = on(*pid, "cuCheckpointProcessUnlock", |pid| driver.unlock(pid));
        done = worse(done, unlocked);
    }
    done
}

/// Does whatever may fail before memory comes back to those that are away.
fn ready(
    driver: &Driver,
    states: &[(u32, State)],
    uses: &[Use],
    has_room: impl FnOnce(&[Use]) -> Result<(), Failure>,
    aside: Option<&Aside<'_>>,
) -> Result<(), Failure> {
    let is = |wanted| move |(_, state): &&(u32, State)| *state == wanted;
    let away: Vec<u32> = states.iter().filter(is(State::Checkpointed)).map(|one| one.0).collect();
    match aside {
        _ if away.is_empty() => Ok(()),
        Some(aside) if aside.is_gone() => Ok(()),
        Some(aside) => {
            let lengths = aside.lengths(&away, uses)?;
            // What we need of the GPUs ourselves is no room any more.
            aside.wake()?;
            has_room(&lengths)
        }
        None => {
            let is_back =
                |(_, state): &(u32, State)| matches!(state, State::Running | State::Locked);
            if !states.iter().any(is_back) {
                // Nothing of it is back yet: which of it is whose is not known.
                has_room(uses)?;
            }
            on(0, "cuInit", |_| driver.init())
        }
    }
}

/// Asks how far a process is. One between two states may be on its way without us, and is looked at
/// again for a while.
fn settled(driver: &Driver, pid: u32, aside: Option<&Aside<'_>>) -> Result<State, Failure> {
    let end = aside.map(|aside| Instant::now() + aside.look());
    loop {
        let state = state(driver, pid)?;
        let is_between = matches!(state, State::Checkpointing | State::Restoring);
        let goes_on = end.is_some_and(|end| Instant::now() < end);
        if !is_between || !goes_on || moves::is_unwanted(LOOK_EVERY) {
            return Ok(state);
        }
    }
}

/// Returns the failure that counts. What is lost nobody brings back, and nobody tries again: so it is
/// said only when there is nothing else.
fn worse(one: Result<(), Failure>, other: Result<(), Failure>) -> Result<(), Failure> {
    match (&one, &other) {
        (Ok(()), _) => other,
        (Err(Failure::Lost(_)), Err(failure)) if !matches!(failure, Failure::Lost(_)) => other,
        _ => one,
    }
}

/// Whether what comes back has room: a restore that finds too little never works again, as others
/// have seen (drivers 580 and 595).
fn has_room(
    uses: &[Use],
    pairs: &[Pair],
    free: impl FnOnce() -> Result<BTreeMap<String, u64>, Failure>,
) -> Result<(), Failure> {
    if uses.is_empty() {
        return Ok(());
    }
    let free = free()?;
    for one in uses {
        let pair = pairs.iter().find(|pair| pair.from == one.uuid);
        let uuid = pair.map_or(&one.uuid, |pair| &pair.to);
        let free = free.get(uuid).copied().unwrap_or_default();
        if free < one.bytes {
            return Err(Failure::Room { uuid: uuid.clone(), needed: one.bytes, free });
        }
    }
    Ok(())
}

/// Returns the pairs in the driver's words; none when all stay where they were.
fn mapping(pairs: &[Pair]) -> Result<Vec<GpuPair>, Failure> {
    if pairs.iter().all(|pair| pair.from == pair.to) {
        return Ok(Vec::new());
    }
    let pair = |pair: &Pair| Ok(GpuPair { old: bytes(&pair.from)?, new: bytes(&pair.to)? });
    pairs.iter().map(pair).collect()
}

/// Reads `GPU-` and a UUID.
pub(super) fn bytes(uuid: &str) -> Result<[u8; 16], Failure> {
    gpu::uuid_bytes(uuid).ok_or_else(|| Failure::Uuid(uuid.to_owned()))
}

fn state(driver: &Driver, pid: u32) -> Result<State, Failure> {
    on(pid, "cuCheckpointProcessGetState", |pid| driver.state(pid))
}

pub(super) fn on<T>(
    pid: u32,
    call: &str,
    act: impl FnOnce(i32) -> Result<T, Code>,
) -> Result<T, Failure> {
    let number = i32::try_from(pid).unwrap_or(-1);
    act(number).map_err(|code| Failure::Call { call: call.to_owned(), pid, code })
}

/// Whether a process is stopped, by a signal or a debugger.
fn is_stopped(pid: u32) -> bool {
    matches!(scheduled(pid), Some(b'T' | b't'))
}

/// Whether a process has ended; its parent may not have asked for it yet.
fn has_ended(pid: u32) -> bool {
    matches!(scheduled(pid), None | Some(b'Z' | b'X'))
}

/// Returns what the kernel does with a process (`proc_pid_stat(5)`, field 3).
fn scheduled(pid: u32) -> Option<u8> {
    let text = fs_err::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let end = text.iter().rposition(|byte| *byte == b')')?;
    text.get(end + 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_stay_are_not_mapped_and_others_are_all_of_them() {
        let uuid = |n: u8| format!("GPU-{n:02x}000000-0000-0000-0000-000000000000");
        let pair = |from: u8, to: u8| Pair { from: uuid(from), to: uuid(to) };
        assert_eq!(mapping(&[pair(1, 1), pair(2, 2)]).unwrap().len(), 0);
        let moved = mapping(&[pair(1, 1), pair(2, 3)]).unwrap();
        assert_eq!((moved.len(), moved[1].old[0], moved[1].new[0]), (2, 2, 3));
    }

    #[test]
    fn room_is_looked_for_where_the_memory_goes() {
        let uses = [Use { uuid: "GPU-a".into(), bytes: 10 }];
        let pairs = [Pair { from: "GPU-a".into(), to: "GPU-b".into() }];
        let free = |a: u64, b: u64| {
            move || Ok(BTreeMap::from([("GPU-a".to_owned(), a), ("GPU-b".to_owned(), b)]))
        };
        has_room(&uses, &[], free(10, 0)).unwrap();
        has_room(&uses, &pairs, free(0, 10)).unwrap();
        let short = has_room(&uses, &pairs, free(10, 9)).unwrap_err();
        assert_eq!(short, Failure::Room { uuid: "GPU-b".into(), needed: 10, free: 9 });
    }

    #[test]
    fn a_process_that_runs_is_not_stopped() {
        assert!(!is_stopped(std::process::id()) && !is_stopped(0));
        assert!(!has_ended(std::process::id()) && has_ended(0));
    }
}
