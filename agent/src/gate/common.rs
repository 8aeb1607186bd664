//! What any container may have. The gate takes nothing else, whatever the new container is, so the
//! preflight of a checkpoint goes by the same lists.

/// File systems by CRIU's numbers (`images/mnt.proto`).
const PROC: i32 = 1;
const SYSFS: i32 = 2;
const TMPFS: i32 = 5;
const DEVPTS: i32 = 6;
const CGROUP: i32 = 12;
const MQUEUE: i32 = 14;
const CGROUP2: i32 = 23;

/// File systems that containers mount within themselves, by the kernel's names and CRIU's numbers.
pub(crate) const FILE_SYSTEMS: &[(&str, i32)] = &[
    ("proc", PROC),
    ("sysfs", SYSFS),
    ("tmpfs", TMPFS),
    ("devpts", DEVPTS),
    ("cgroup", CGROUP),
    ("mqueue", MQUEUE),
    ("cgroup2", CGROUP2),
];

/// Kinds of open files that stay inside the container (`images/fdinfo.proto`): regular files, pipes,
/// FIFOs, sockets, event, signal and timer descriptors, terminals, memfds, pidfds. Not among them:
/// namespaces, tunnels, fanotify marks, eBPF maps, and what a plugin or the outside would provide.
pub(crate) const FILE_KINDS: &[i32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 17, 18, 20];

/// Where the container's own cgroups are.
const CGROUPS: &str = "/sys/fs/cgroup";

/// A mount that nobody outside provides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inside<'a> {
    /// CRIU's number of the file system.
    pub(crate) kind: i32,
    /// Which directory of the file system is mounted.
    pub(crate) root: &'a str,
    pub(crate) path: &'a str,
    pub(crate) read_only: bool,
}

impl Inside<'_> {
    /// Whether some container may have it.
    pub(crate) fn fits(self) -> bool {
        match self.kind {
            PROC => self.is_within("/proc"),
            SYSFS => self.is_within("/sys"),
            TMPFS | DEVPTS | MQUEUE => true,
            CGROUP | CGROUP2 => {
                self.path == CGROUPS || self.read_only && self.path.starts_with(CGROUPS)
            }
            _ => false,
        }
    }

    /// Whether only a container that has the same from its runtime may have it: the node's devices
    /// and cgroups can be changed there.
    pub(crate) const fn is_privileged(self) -> bool {
        !self.read_only && matches!(self.kind, SYSFS | CGROUP | CGROUP2)
    }

    /// Whether it is all of a file system in its place, or a part that is locked there.
    fn is_within(self, top: &str) -> bool {
        self.path == top && self.root == "/"
            || self.read_only && self.path.strip_prefix(top) == Some(self.root)
    }
}
