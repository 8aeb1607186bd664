//! Names for the kernel's numbers.

use std::collections::BTreeSet;

/// Words of a set of capabilities: the kernel has two.
const WORDS_MAX: usize = 4;

/// Names of signals from 1 on (signal(7), x86 and ARM).
const SIGNALS: &[&str] = &[
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

/// Returns a signal's name; the ones for programs' own use are numbered from 34.
pub(super) fn signal(number: u32) -> String {
    let named = usize::try_from(number).ok().and_then(|number| SIGNALS.get(number.checked_sub(1)?));
    match (named, number) {
        (Some(name), _) => (*name).to_owned(),
        (None, 34..=64) => format!("SIGRTMIN+{}", number - 34),
        (None, _) => format!("signal {number}"),
    }
}

/// Returns the signals of a mask, lowest first.
pub(super) fn signals(mask: u64) -> Vec<String> {
    (0..u64::BITS).filter(|bit| mask & (1 << bit) != 0).map(|bit| signal(bit + 1)).collect()
}

/// Returns the names of a set of capabilities as CRIU and the kernel write it: 32 bits a word.
pub(super) fn capabilities(words: &[u32]) -> BTreeSet<String> {
    crate::criu::capability_names(words.get(..WORDS_MAX).unwrap_or(words))
}

/// Returns the name of a kind of file system, by CRIU's number for it.
pub(super) const fn file_system(kind: i32) -> &'static str {
    match kind {
        1 => "proc",
        2 => "sysfs",
        3 => "devtmpfs",
        4 => "binfmt_misc",
        5 => "tmpfs",
        6 => "devpts",
        7 => "simfs",
        8 => "pstore",
        9 => "securityfs",
        10 => "fusectl",
        11 => "debugfs",
        12 => "cgroup",
        13 => "aufs",
        14 => "mqueue",
        15 => "fuse",
        17 => "overlay",
        18 => "autofs",
        19 => "tracefs",
        23 => "cgroup2",
        _ => "other",
    }
}

/// Returns the name of a netlink protocol (linux/netlink.h).
pub(super) fn netlink(protocol: u32) -> String {
    let name = match protocol {
        0 => "route",
        2 => "usersock",
        4 => "sock-diag",
        5 => "nflog",
        6 => "xfrm",
        7 => "selinux",
        9 => "audit",
        12 => "netfilter",
        15 => "kobject-uevent",
        16 => "generic",
        _ => return protocol.to_string(),
    };
    name.to_owned()
}

/// Returns the name of a clock (linux/time.h).
pub(super) fn clock(number: u32) -> String {
    let name = match number {
        0 => "realtime",
        1 => "monotonic",
        7 => "boottime",
        8 => "realtime-alarm",
        9 => "boottime-alarm",
        _ => return number.to_string(),
    };
    name.to_owned()
}

/// Returns the kind of namespace that a flag of clone(2) makes.
pub(super) const fn namespace(flag: u32) -> &'static str {
    match flag {
        0x0000_0080 => "time",
        0x0002_0000 => "mount",
        0x0200_0000 => "cgroup",
        0x0400_0000 => "uts",
        0x0800_0000 => "ipc",
        0x1000_0000 => "user",
        0x2000_0000 => "pid",
        0x4000_0000 => "network",
        _ => "other",
    }
}
