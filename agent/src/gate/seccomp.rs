//! What the seccomp filters of a dump refuse (seccomp(2)). That there are some says nothing: one that lets
//! everything through is a filter too. So each is followed, as the kernel does it, for the system calls
//! through which a process reaches its kernel and its node, under every architecture that the kernel takes
//! calls of. What is compared with that is what the new container's profile refuses (`profile`).

use std::collections::BTreeSet;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

mod filters;
mod profile;
mod program;
mod word;

pub(super) use self::filters::Filters;
use self::program::{Call, Program};

/// A system call that is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Guarded {
    name: &'static str,
    /// Bits of its first argument, where they matter: all others may be anything.
    first: u32,
}

const fn whatever(name: &'static str) -> Guarded {
    Guarded { name, first: 0 }
}

/// `CLONE_NEWUSER`: a user namespace, in which a process may everything that namespaces limit.
const NEW_USER: u32 = 0x1000_0000;

/// Calls that one of the usual profiles refuses (containerd's, Docker's, Podman's) and that reach beyond a
/// container's own processes. `io_uring_*` is not among them: containerd 1.7 lets it through and 2.x does
/// not, and what came from the one could not be restored on the other.
const CALLS: &[Guarded] = &[
    // These all of those profiles refuse, whatever the capabilities.
    whatever("kexec_file_load"),
    whatever("kexec_load"),
    whatever("swapoff"),
    whatever("swapon"),
    whatever("acct"),
    whatever("add_key"),
    whatever("bpf"),
    whatever("clock_settime"),
    whatever("clock_settime64"),
    Guarded { name: "clone", first: NEW_USER },
    whatever("clone3"),
    whatever("delete_module"),
    whatever("fanotify_init"),
    whatever("finit_module"),
    whatever("fsconfig"),
    whatever("fsmount"),
    whatever("fsopen"),
    whatever("fspick"),
    whatever("init_module"),
    whatever("ioperm"),
    whatever("iopl"),
    whatever("keyctl"),
    whatever("mount"),
    whatever("mount_setattr"),
    whatever("move_mount"),
    whatever("open_by_handle_at"),
    whatever("open_tree"),
    whatever("open_tree_attr"),
    whatever("perf_event_open"),
    whatever("pivot_root"),
    whatever("quotactl"),
    whatever("quotactl_fd"),
    whatever("reboot"),
    whatever("request_key"),
    whatever("setns"),
    whatever("settimeofday"),
    whatever("stime"),
    whatever("syslog"),
    whatever("umount"),
    whatever("umount2"),
    whatever("unshare"),
    whatever("userfaultfd"),
    whatever("vm86"),
    whatever("vm86old"),
];

/// How many of them every usual profile refuses.
const ALWAYS: usize = 4;

/// An architecture that a process here can make calls of.
struct Architecture {
    /// The kernel's number (`AUDIT_ARCH_…`).
    number: u32,
    /// Returns the number of a call, if there is one of that name.
    call: fn(&str) -> Option<u32>,
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURES: &[Architecture] = &[
    Architecture { number: 0xc000_003e, call: number::<syscalls::x86_64::Sysno> },
    Architecture { number: 0xc000_003e, call: x32 },
    Architecture { number: 0x4000_0003, call: number::<syscalls::x86::Sysno> },
];

#[cfg(target_arch = "aarch64")]
const ARCHITECTURES: &[Architecture] = &[
    Architecture { number: 0xc000_00b7, call: aarch64 },
    Architecture { number: 0x4000_0028, call: number::<syscalls::arm::Sysno> },
];

/// Returns the number of a call of `x32`, which are those of the architecture with a bit more, but for the
/// few that it has of its own (`arch/x86/entry/syscalls/syscall_64.tbl`).
#[cfg(target_arch = "x86_64")]
fn x32(name: &str) -> Option<u32> {
    const BIT: u32 = 0x4000_0000;
    match name {
        "kexec_load" => Some(BIT + 528),
        _ => number::<syscalls::x86_64::Sysno>(name).map(|number| number | BIT),
    }
}

/// Returns the number of a call of the architecture, whose table has one that only 32 bits have.
#[cfg(target_arch = "aarch64")]
fn aarch64(name: &str) -> Option<u32> {
    (name != "clock_settime64").then(|| number::<syscalls::aarch64::Sysno>(name)).flatten()
}

fn number<Sysno: FromStr + Numbered>(name: &str) -> Option<u32> {
    name.parse().ok().map(|call: Sysno| call.number())
}

/// A system call of one of the tables.
trait Numbered {
    fn number(self) -> u32;
}

macro_rules! numbered {
    ($($table:ident),+) => {
        $(impl Numbered for syscalls::$table::Sysno {
            fn number(self) -> u32 {
                self.id().unsigned_abs()
            }
        })+
    };
}

#[cfg(target_arch = "x86_64")]
numbered!(x86_64, x86);
#[cfg(target_arch = "aarch64")]
numbered!(aarch64, arm);

/// Which of [`CALLS`] are refused, a bit for each.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub(crate) struct Refused(u64);

impl Refused {
    /// Everything, as for processes that may compute and nothing else.
    pub(super) const ALL: Self = Self((1 << CALLS.len()) - 1);

    /// What a filter refuses that deserves the name.
    pub(crate) const ALWAYS: Self = Self((1 << ALWAYS) - 1);

    fn of(refuses: impl Fn(Guarded) -> bool) -> Self {
        let bits = CALLS.iter().enumerate().filter(|(_, call)| refuses(**call));
        Self(bits.map(|(bit, _)| 1_u64 << bit).sum())
    }

    /// Returns what a filter refuses, if it is one: what it lets through for some arguments it does not.
    pub(super) fn by_program(program: &[u8]) -> Option<Self> {
        let program = Program::parse(program)?;
        Some(Self::of(|guarded| {
            ARCHITECTURES.iter().all(|architecture| {
                let number = (architecture.call)(guarded.name);
                number.is_none_or(|number| {
                    let (architecture, first) = (architecture.number, guarded.first);
                    program.refuses(Call { number, architecture, first })
                })
            })
        }))
    }

    /// Returns what is refused here or there.
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns what is refused here and not there.
    pub(super) fn beyond(self, other: Self) -> BTreeSet<String> {
        let bits = CALLS.iter().enumerate();
        let bits = bits.filter(|(bit, _)| (self.0 & !other.0) >> bit & 1 == 1);
        bits.map(|(_, call)| call.to_string()).collect()
    }
}

/// What several filters refuse together: the kernel asks all, and takes the hardest answer.
impl FromIterator<Self> for Refused {
    fn from_iter<T: IntoIterator<Item = Self>>(all: T) -> Self {
        all.into_iter().fold(Self::default(), Self::and)
    }
}

impl std::fmt::Display for Guarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.first {
            NEW_USER => write!(f, "{}(CLONE_NEWUSER)", self.name),
            0 => f.write_str(self.name),
            first => write!(f, "{}({first:#x})", self.name),
        }
    }
}

#[cfg(test)]
mod tests;
