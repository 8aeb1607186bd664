//! The root file systems that nodes are overlays of: made once by debootstrap, then kept.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

use crate::command::{self, CommandError};

/// What every node needs.
const COMMON: &[&str] = &[
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
];
/// What other people look into artifacts with; Debian has them from forky on.
const TOOLS: &[&str] = &["cosign", "crane", "oras", "skopeo", "umoci"];
/// Names the packages of a finished root.
const MARKER: &str = "var/lib/kybernate-root";

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
            Self::Trixie => COMMON.to_vec(),
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
    let wanted = release.packages().join("\n");
    if fs::read_to_string(root.join(MARKER)).is_ok_and(|found| found == wanted) {
        return Ok(root);
    }
    say(&format!(
        "making the {} node root with debootstrap, once (about a minute)",
        release.name()
    ));
    let partial = roots.join(format!("{}.partial", release.name()));
    for old in [&partial, &root] {
        if old.exists() {
            fs::remove_dir_all(old).map_err(io)?;
        }
    }
    let mirror = mirror().ok_or(RootError::NoMirror)?;
    bootstrap(release, &partial, &mirror)
        .map_err(|error| RootError::Command(root.clone(), error))?;
    let mut marker = fs::File::create(partial.join(MARKER)).map_err(io)?;
    marker.write_all(wanted.as_bytes()).map_err(io)?;
    fs::rename(&partial, &root).map_err(io)?;
    Ok(root)
}

fn bootstrap(release: Release, target: &Path, mirror: &str) -> Result<(), CommandError> {
    let mut debootstrap = Command::new("debootstrap");
    debootstrap
        .arg("--variant=minbase")
        .arg(format!("--include={}", release.packages().join(",")))
        .arg(release.name())
        .arg(target)
        .arg(mirror);
    // Older debootstraps do not know younger releases; all since 2008 are installed as sid is.
    let scripts = Path::new("/usr/share/debootstrap/scripts");
    if !scripts.join(release.name()).exists() {
        debootstrap.arg(scripts.join("sid"));
    }
    command::run(debootstrap.stdin(Stdio::null())).map(drop)
}

/// Returns the first mirror of this machine's own apt configuration.
fn mirror() -> Option<String> {
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
    use super::mirror_in;

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
