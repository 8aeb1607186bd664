//! What the machine starts from: QEMU, installed when it is missing, and Debian's kernel with a
//! first file system, made once from its packages, then kept.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

use super::QEMU;
use crate::command::{self, CommandError};
use crate::preflight::is_installed;
use crate::root::{self, Release};

const INSTALL: &str = include_str!("install.sh");
const MAKE: &str = include_str!("make.sh");
const BOOT: &str = include_str!("boot.sh");
/// What it was made by.
const MADE_BY: &str = "made-by";

/// Why the machine cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum MadeError {
    /// QEMU is missing, and could not be installed.
    #[error("failed to install QEMU")]
    Install(#[source] CommandError),
    /// A file could not be read or written.
    #[error("failed to prepare the machine's kernel in {0:?}")]
    Io(PathBuf, #[source] io::Error),
    /// Debian's packages could not be fetched or unpacked.
    #[error("failed to make the machine's kernel in {0:?}")]
    Make(PathBuf, #[source] CommandError),
    /// apt's configuration names no mirror.
    #[error("failed to find a Debian mirror in /etc/apt: the machine's kernel comes from it")]
    NoMirror,
}

/// A directory of what the machine starts from.
#[derive(Clone, Debug)]
pub(super) struct Made(PathBuf);

impl Made {
    /// Returns Debian's kernel.
    pub(super) fn kernel(&self) -> PathBuf {
        self.0.join("vmlinuz")
    }

    /// Returns the file system that the kernel starts from.
    pub(super) fn first(&self) -> PathBuf {
        self.0.join("first.cpio.gz")
    }
}

/// Returns it, making it first when it is missing or made by another version of the scripts. `say`
/// hears what takes long. Safe to call from several processes: one makes it, others wait.
pub(super) fn ensure(say: &dyn Fn(&str)) -> Result<Made, MadeError> {
    let directory = root::cache().join("machine");
    let failed = |error| MadeError::Io(directory.clone(), error);
    fs::create_dir_all(&directory).map_err(failed)?;
    let lock = fs::File::create(directory.join("lock")).map_err(failed)?;
    flock(lock.file(), FlockOperation::LockExclusive).map_err(|errno| failed(errno.into()))?;
    if !is_installed(QEMU) {
        say("installing QEMU, once, half a minute");
        shell(INSTALL, &[]).map_err(MadeError::Install)?;
    }
    let done = directory.join("made");
    let wanted = [MAKE, BOOT].concat();
    if fs::read_to_string(done.join(MADE_BY)).is_ok_and(|by| by == wanted) {
        return Ok(Made(done));
    }
    say("making the machine from Debian's kernel, once, half a minute");
    let partial = directory.join("partial");
    for old in [&partial, &done] {
        remove(old).map_err(failed)?;
    }
    fs::create_dir_all(&partial).map_err(failed)?;
    let mirror = root::mirror().ok_or(MadeError::NoMirror)?;
    let name = Release::Trixie.name();
    let variables = [
        ("DIRECTORY", &*partial.to_string_lossy()),
        ("MIRROR", &mirror),
        ("RELEASE", name),
        ("BOOT", BOOT),
    ];
    shell(MAKE, &variables).map_err(|error| MadeError::Make(directory.clone(), error))?;
    let made = partial.join("made");
    fs::write(made.join(MADE_BY), wanted).map_err(failed)?;
    fs::rename(&made, &done).map_err(failed)?;
    remove(&partial).map_err(failed)?;
    say(&format!("the machine is complete: {}", done.display()));
    Ok(Made(done))
}

/// Runs a script, which ends when we are killed.
fn shell(script: &str, variables: &[(&str, &str)]) -> Result<(), CommandError> {
    let mut shell = Command::new("setpriv");
    shell.args(["--pdeathsig", "KILL", "--", "sh", "-c", script]);
    shell.envs(variables.iter().copied());
    command::run(&mut shell).map(drop)
}

fn remove(directory: &Path) -> io::Result<()> {
    if directory.exists() { fs::remove_dir_all(directory) } else { Ok(()) }
}
