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
            // Of a part, CRIU goes to the part by its path, from outside of the container: any directory
            // on the way may be a link. So there is none.
            TMPFS | DEVPTS | MQUEUE => {
                self.root == "/" || is_plain(self.root) && self.root.rfind('/') == Some(0)
            }
            CGROUP | CGROUP2 => {
                let is_place =
                    self.path == CGROUPS || self.read_only && self.path.starts_with(CGROUPS);
                is_place && (self.root == "/" || is_plain(self.root))
            }
            _ => false,
        }
    }

    /// Whether its files are in memory.
    pub(crate) const fn is_memory(self) -> bool {
        self.kind == TMPFS
    }

    /// Whether only a container that has the same from its runtime may have it: the node's devices
    /// and cgroups can be changed there.
    pub(crate) const fn is_privileged(self) -> bool {
        !self.read_only && matches!(self.kind, SYSFS | CGROUP | CGROUP2)
    }

    /// Whether it is all of a file system in its place, or a part that is locked there.
    fn is_within(self, top: &str) -> bool {
        self.path == top && self.root == "/"
            || self.read_only
                && self.path.strip_prefix(top) == Some(self.root)
                && is_plain(self.root)
                && !leads_out(self.root)
    }
}

/// Whether a path in `/proc` is a process's: what is there leads to its files, whoever it is when CRIU
/// follows it.
fn leads_out(path: &str) -> bool {
    let first = path.split('/').nth(1).unwrap_or_default();
    first.starts_with(|letter: char| letter.is_ascii_digit()) || first.contains("self")
}

/// Whether a path, of more than `/`, is written as the kernel does. For CRIU it ends at the first NUL,
/// and means another file than what we read.
pub(super) fn is_plain(path: &str) -> bool {
    let parts = path.strip_prefix('/').map(|path| path.split('/'));
    let is_name = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
    parts.is_some_and(|mut parts| parts.all(is_name))
}
