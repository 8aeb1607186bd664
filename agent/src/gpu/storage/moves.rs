//! Whether a move is begun that only this process can bring to its end. While that is so, it does not
//! end with the agent: it would take a process's GPU memory with it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Failure;

/// Held for a look, and to wait for a change.
static MOVES: Mutex<Moves> =
    Mutex::new(Moves { begun: false, unwanted: false, patience: Duration::ZERO });

static CHANGED: Condvar = Condvar::new();

/// Bytes copied so far.
static COPIED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Moves {
    begun: bool,
    /// Nobody waits for the answer.
    unwanted: bool,
    patience: Duration,
}

/// A move that is begun, until it is dropped.
#[derive(Debug)]
pub(super) struct Moving;

/// Says how long a move may stand still that nobody waits for.
pub(super) fn patience(milliseconds: u64) {
    moves().patience = Duration::from_millis(milliseconds);
}

/// Begins a move, unless nobody wants it any more.
pub(super) fn begin(pid: u32) -> Result<Moving, Failure> {
    let mut moves = moves();
    if moves.unwanted || is_unwanted(Duration::ZERO) {
        return Err(Failure::Unwanted(pid));
    }
    moves.begun = true;
    Ok(Moving)
}

/// Waits for so long. Returns whether nobody waits for an answer any more.
pub(in crate::gpu) fn is_unwanted(wait: Duration) -> bool {
    let stdin = std::io::stdin();
    // Whoever asked has hung up; that is told without being asked for.
    let mut stdin = [PollFd::new(&stdin, PollFlags::empty())];
    let wait = Timespec::try_from(wait).unwrap_or_default();
    poll(&mut stdin, Some(&wait)).is_ok_and(|told| told > 0)
}

/// Notes that a move goes on.
pub(super) fn copied(bytes: usize) {
    COPIED.fetch_add(u64::try_from(bytes).unwrap_or_default(), Ordering::Relaxed);
}

/// Returns when this process may end, since nobody waits for it: no move is begun, nor will be, or
/// the driver stands still.
pub(in crate::gpu) fn end() {
    let mut moves = moves();
    moves.unwanted = true;
    while moves.begun {
        let (before, patience) = (COPIED.load(Ordering::Relaxed), moves.patience);
        let waited = CHANGED.wait_timeout_while(moves, patience, |moves| moves.begun);
        let (now, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && COPIED.load(Ordering::Relaxed) == before {
            return;
        }
        moves = now;
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        moves().begun = false;
        CHANGED.notify_all();
    }
}

fn moves() -> MutexGuard<'static, Moves> {
    MOVES.lock().unwrap_or_else(PoisonError::into_inner)
}
