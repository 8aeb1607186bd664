//! The root file systems that nodes are overlays of: made once by debootstrap, then kept.

use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

use crate::command::{self, CommandError};

/// What every node needs.
const COMMON: &[&str] = &[
    // containerd has its profiles loaded by it, where the kernel has AppArmor.
    "apparmor",
    "busybox-static",
    "ca-certificates",
    "containerd",
    "containernetworking-plugins",
    "criu",
    "curl",
    "iproute2",
    "iptables",
    "jq",
    "nftables",
    "procps",
    "runc",
    // What runs services by their units, inside of a node.
    "systemd",
];
/// What other people look into artifacts with; Debian has them from forky on.
const TOOLS: &[&str] = &["cosign", "crane", "oras", "skopeo", "umoci"];
/// What other people take checkpoints with, and run containers with.
const OTHERS: &[&str] = &["crun", "podman"];
/// What dpkg knows about a root's packages. A root is moved to its place when it is complete, so
/// these are all that is left to compare.
const STATUS: &str = "var/lib/dpkg/status";

/// A release of Debian that nodes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Debian 13: containerd 1.7, runc 1.1, CRIU 4.1.
    Trixie,
    /// Debian 14: containerd 2.1, runc 1.3, CRIU 4.2.
    Forky,
}

/// Why a root could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// A file could not be read or written.
    #[error("failed to prepare the node root {0:?}")]
    Io(PathBuf, #[source] std::io::Error),
    /// A program failed.
    #[error("failed to make the node root {0:?}")]
    Command(PathBuf, #[source] CommandError),
    /// apt's configuration names no mirror.
    #[error("failed to find a Debian mirror in /etc/apt: node roots are installed from it")]
    NoMirror,
}

impl Release {
    /// Returns Debian's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trixie => "trixie",
            Self::Forky => "forky",
        }
    }

    fn packages(self) -> Vec<&'static str> {
        match self {
            Self::Trixie => [COMMON, OTHERS].concat(),
            Self::Forky => [COMMON, TOOLS].concat(),
        }
    }
}

/// Returns where roots and running testbeds are kept: `KYBERNATE_CACHE`, or `/var/cache/kybernate`.
pub fn cache() -> PathBuf {
    std::env::var_os("KYBERNATE_CACHE")
        .map_or_else(|| PathBuf::from("/var/cache/kybernate"), PathBuf::from)
}

/// Returns the root of `release`, making it first when it is missing or its packages changed.
/// `say` hears what takes long. Safe to call from several processes: one makes it, others wait.
pub fn ensure(release: Release, say: &dyn Fn(&str)) -> Result<PathBuf, RootError> {
    let roots = cache().join("roots");
    let root = roots.join(release.name());
    let io = |error| RootError::Io(root.clone(), error);
    fs::create_dir_all(&roots).map_err(io)?;
    let lock = fs::File::create(roots.join(format!("{}.lock", release.name()))).map_err(io)?;
    flock(lock.file(), FlockOperation::LockExclusive).map_err(|errno| io(errno.into()))?;
    let missing = |root: &Path| {
        let status = fs::read_to_string(root.join(STATUS)).unwrap_or_default();
        let installed: Vec<&str> = installed(&status).collect();
        release.packages().into_iter().find(|package| !installed.contains(package))
    };
    let Some(package) = missing(&root) else { return Ok(root) };
    let why = if root.exists() { format!(": it has no {package}") } else { String::new() };
    let name = release.name();
    say(&format!("making the {name} node root with debootstrap, once, about a minute{why}"));
    let partial = roots.join(format!("{name}.partial"));
    remove(&partial).map_err(io)?;
    let mirror = mirror().ok_or(RootError::NoMirror)?;
    bootstrap(release, &partial, &mirror)
        .map_err(|error| RootError::Command(root.clone(), error))?;
    remove(&root).map_err(io)?;
    fs::rename(&partial, &root).map_err(io)?;
    say(&format!("the {name} node root is complete: {}", root.display()));
    Ok(root)
}

fn remove(directory: &Path) -> std::io::Result<()> {
    if directory.exists() { fs::remove_dir_all(directory) } else { Ok(()) }
}

/// Returns the installed packages of a dpkg status file.
fn installed(status: &str) -> impl Iterator<Item = &str> {
    status.split("\n\n").filter_map(|package| {
        let field = |name| package.lines().find_map(|line: &str| line.strip_prefix(name));
        field("Status: ").filter(|status| *status == "install ok installed")?;
        field("Package: ")
    })
}

fn bootstrap(release: Release, target: &Path, mirror: &str) -> Result<(), CommandError> {
    // It ends when we are killed, and in namespaces of its own what it has mounted and started
    // goes with it.
    let mut debootstrap = Command::new("setpriv");
    debootstrap
        .args(["--pdeathsig", "KILL", "--", "unshare"])
        .args(["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"])
        .args(["debootstrap", "--variant=minbase"])
        .arg(format!("--include={}", release.packages().join(",")))
        .arg(release.name())
        .arg(target)
        .arg(mirror);
    // Older debootstraps do not know younger releases; all since 2008 are installed as sid is.
    let scripts = Path::new("/usr/share/debootstrap/scripts");
    if !scripts.join(release.name()).exists() {
        debootstrap.arg(scripts.join("sid"));
    }
    command::run(&mut debootstrap).map(drop)
}

/// Returns the first mirror of this machine's own apt configuration.
pub(crate) fn mirror() -> Option<String> {
    let directory = fs::read_dir("/etc/apt/sources.list.d").ok()?;
    let mut files: Vec<PathBuf> = directory.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.push(PathBuf::from("/etc/apt/sources.list"));
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).find_map(|text| mirror_in(&text))
}

/// Finds a mirror in a sources file of either form: `URIs: …` or `deb [options] … suite`.
fn mirror_in(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let words = match line.strip_prefix("URIs:") {
            Some(rest) => rest,
            None => line.strip_prefix("deb ")?,
        };
        let url = words.split_whitespace().find(|word| word.contains("://"))?;
        Some(url.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::{installed, mirror_in};

    #[test]
    fn only_installed_packages_count() {
        let status = "Package: criu\nStatus: install ok installed\nVersion: 4\n\n\
                      Package: runc\nStatus: deinstall ok config-files\n\n\
                      Package: jq\nEssential: no\nStatus: install ok installed\n";
        assert_eq!(installed(status).collect::<Vec<_>>(), ["criu", "jq"]);
    }

    #[test]
    fn both_forms_of_sources_name_a_mirror() {
        let deb822 = "Types: deb\n# x\nURIs: http://mirror.test/debian http://other.test\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("http://mirror.test/debian"));
        let list =
            "# deb http://no.test\ndeb [arch=amd64 signed-by=/k] http://mirror.test/d sid main";
        assert_eq!(mirror_in(list).as_deref(), Some("http://mirror.test/d"));
        assert_eq!(mirror_in("deb-src http://mirror.test/d sid main"), None);
    }
}
