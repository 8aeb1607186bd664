//! How readily the kernel ends a restored container's processes when memory runs out (proc(5),
//! `oom_score_adj`). CRIU gives each what it had where the dump was taken; kubelet gives each Pod its own,
//! by what that may have and by what its node has.

use std::collections::BTreeSet;
use std::io::{self, Write as _};

use fs_err as fs;

use crate::cgroup::Freezer;
use crate::process;

/// As often it is looked for processes that were made meanwhile.
const ROUNDS_MAX: usize = 16;

/// What a new container's processes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Adjustment {
    pub(super) wanted: i32,
    /// Whether they may go below that (`CAP_SYS_RESOURCE`).
    pub(super) may_lower: bool,
}

/// Gives the processes in a cgroup what those of a new container have. Whoever had another one than the
/// first process keeps that, unless it is less, and it could not have got it here.
///
/// The kernel lets each go back to what root gave it last, and that was CRIU: so each is given the new
/// container's once, whatever it has made of its own by then.
pub(super) fn adjust(cgroup: &str, first: Option<u32>, adjustment: Adjustment) -> io::Result<()> {
    let freezer = Freezer::at(cgroup)?;
    let had = first.map(read).transpose()?.flatten();
    let mut done = BTreeSet::new();
    for _ in 0..ROUNDS_MAX {
        let before = done.len();
        for pid in freezer.processes()? {
            if done.insert(pid) {
                adjust_one(pid, had, adjustment)?;
            }
        }
        if done.len() == before {
            return Ok(());
        }
    }
    Err(io::Error::other("there are new processes all the time"))
}

fn adjust_one(pid: u32, had: Option<i32>, adjustment: Adjustment) -> io::Result<()> {
    let Some(has) = read(pid)? else { return Ok(()) };
    for value in adjustment.written(has, had) {
        match write(pid, value) {
            Err(error) if process::is_gone(&error) => {}
            written => written?,
        }
    }
    Ok(())
}

impl Adjustment {
    /// Returns what is written to a process that has this, in this order.
    fn written(self, has: i32, had: Option<i32>) -> Vec<i32> {
        let Self { wanted, may_lower } = self;
        match has {
            _ if Some(has) == had || has == wanted => vec![wanted],
            // It can get there again by itself.
            _ if may_lower => Vec::new(),
            _ if has < wanted => vec![wanted],
            _ => vec![wanted, has],
        }
    }
}

/// Returns what a process has; `None` when it has ended.
fn read(pid: u32) -> io::Result<Option<i32>> {
    match process::read(file(pid)) {
        Ok(text) => text.trim().parse().map(Some).map_err(io::Error::other),
        Err(error) if process::is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn write(pid: u32, wanted: i32) -> io::Result<()> {
    // An error in the middle is the kernel's own.
    let file = fs::OpenOptions::new().write(true).open(file(pid))?;
    file.into_parts().0.write_all(wanted.to_string().as_bytes())
}

fn file(pid: u32) -> String {
    format!("/proc/{pid}/oom_score_adj")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_its_own_keeps_it_where_it_may() {
        let adjustment = Adjustment { wanted: 990, may_lower: false };
        let written = |has, had| adjustment.written(has, had);
        // What the first has is the old container's.
        assert_eq!([written(992, Some(992)), written(-997, Some(-997))], [[990], [990]]);
        assert_eq!(written(990, Some(992)), [990], "it could go back to less");
        assert_eq!(written(1000, Some(992)), [990, 1000], "it gave itself up");
        assert_eq!([written(-1000, Some(992)), written(-1000, None)], [[990], [990]]);
        let mighty = Adjustment { may_lower: true, ..adjustment };
        assert_eq!(mighty.written(-1000, Some(992)), [0; 0]);
        assert_eq!(mighty.written(992, Some(992)), [990]);
    }
}
