//! What a machine must have for a testbed, looked at before anything is touched.

use std::fmt;
use std::path::Path;
use std::process::Command;

use fs_err as fs;

use crate::command;

/// The oldest kernel that has what CRIU, runc and the agent ask for: `openat2` (5.6), `clone3` with
/// given process ids (5.5), `CAP_CHECKPOINT_RESTORE` (5.9), and that Debian still supports.
const KERNEL_MIN: (u32, u32) = (5, 10);
/// What namespaces, mounts, links and other processes' memory need: bit in `CapEff`, and name.
const CAPABILITIES: [(u32, &str); 4] =
    [(12, "CAP_NET_ADMIN"), (18, "CAP_SYS_CHROOT"), (19, "CAP_SYS_PTRACE"), (21, "CAP_SYS_ADMIN")];
/// The programs that make nodes, and the registry beside ours, with Debian's package of each.
const PROGRAMS: [(&str, &str); 6] = [
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("ip", "iproute2"),
    ("debootstrap", "debootstrap"),
    ("docker-registry", "docker-registry"),
];

/// Everything that a machine lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct PreflightError {
    /// One clause each.
    pub lacks: Vec<String>,
}

impl fmt::Display for PreflightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this machine cannot hold nodes: {}", self.lacks.join("; "))
    }
}

/// Looks at everything a testbed needs.
pub fn preflight() -> Result<(), PreflightError> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut lacks = Vec::new();
    if rustix::process::geteuid().is_root() {
        lacks.extend(missing_capabilities(&read("/proc/self/status")));
    } else {
        lacks.push("run it as root, which namespaces, mounts and cgroups need".to_owned());
    }
    lacks.extend(old_kernel(&read("/proc/sys/kernel/osrelease")));
    // CRIU reads mappings there; it is the plainest sign of CONFIG_CHECKPOINT_RESTORE.
    if !Path::new("/proc/self/map_files").exists() {
        lacks.push("the kernel was built without CONFIG_CHECKPOINT_RESTORE".to_owned());
    }
    if !read("/proc/filesystems").lines().any(|line| line.ends_with("\toverlay")) && !has_module() {
        lacks.push("the kernel has no overlay file system".to_owned());
    }
    if fs::read_dir("/sys/fs/cgroup").map_or(true, |mut entries| entries.next().is_none()) {
        lacks.push("no cgroups are mounted at /sys/fs/cgroup".to_owned());
    }
    for (program, package) in PROGRAMS {
        if !is_installed(program) {
            lacks.push(format!("{program} is missing: `make setup` installs {package}"));
        }
    }
    if lacks.is_empty() { Ok(()) } else { Err(PreflightError { lacks }) }
}

fn missing_capabilities(status: &str) -> Option<String> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(line.trim(), 16).ok()?;
    let missing = CAPABILITIES.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    let names: Vec<&str> = missing.map(|(_, name)| *name).collect();
    (!names.is_empty()).then(|| format!("root lacks {} here", names.join(", ")))
}

fn old_kernel(release: &str) -> Option<String> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let found = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    let (major, minor) = KERNEL_MIN;
    (found < KERNEL_MIN).then(|| format!("kernel {} is older than {major}.{minor}", release.trim()))
}

/// A module that is not loaded yet is loaded by the first mount.
fn has_module() -> bool {
    let mut modprobe = Command::new("modprobe");
    command::run(modprobe.args(["--dry-run", "--quiet", "overlay"])).is_ok()
}

pub(crate) fn is_installed(program: &str) -> bool {
    let mut search = Command::new("sh");
    command::run(search.args(["-c", "command -v \"$1\"", "sh", program])).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{missing_capabilities, old_kernel};

    #[test]
    fn an_old_kernel_is_named() {
        assert_eq!(old_kernel("6.18.44-fc-v669\n"), None);
        assert_eq!(old_kernel("5.10.0-28-amd64\n"), None);
        let found = old_kernel("5.4.0-150-generic\n");
        assert_eq!(found.as_deref(), Some("kernel 5.4.0-150-generic is older than 5.10"));
    }

    #[test]
    fn a_root_without_capabilities_is_told_which() {
        assert_eq!(missing_capabilities("CapPrm:\t0\nCapEff:\t000001fffeffffff\n"), None);
        let found = missing_capabilities("CapEff:\t00000000a80425fb\n");
        let wanted = "root lacks CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN here";
        assert_eq!(found.as_deref(), Some(wanted));
    }
}
