//! Where dumps lie while they are taken or restored: in memory when they fit there, else on disk.
//! Only root can look inside.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::chain;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

mod promised;
mod tmpfs;

pub(crate) use self::promised::{Promised, Promises};
pub(crate) use self::tmpfs::used;

use crate::config::StagingConfig;
use crate::mounts::{self, Mount};
use crate::process::memory_available;

/// `f_type` of a tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Added to every estimate: CRIU's small images and what grew since.
const MARGIN_BYTES: u64 = 32 << 20;

/// Why there is no place for a dump.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// There is no room.
    #[error("{directory:?} has {available} bytes left{}, about {needed} are needed", beside(*promised))]
    NoSpace {
        /// Where.
        directory: PathBuf,
        /// Bytes that are left.
        available: u64,
        /// Bytes of these that other operations will write.
        promised: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// The directory cannot be used.
    #[error("failed to prepare a place for the dump")]
    Io(#[from] io::Error),
}

fn beside(promised: u64) -> String {
    match promised {
        0 => String::new(),
        promised => format!(", of which operations that are under way will write {promised}"),
    }
}

/// Mounts a tmpfs of the agent's own on the staging directory, unless one is there or something lies
/// in it. What a dump writes and CRIU reads then comes in huge pages, which halves the time of both;
/// small files still take small pages. Where that cannot be, the directory is used as it is. One that
/// an earlier agent mounted gets the size that the configuration has now.
pub(crate) fn mount(staging: &StagingConfig) -> io::Result<()> {
    let directory = &staging.tmpfs;
    make(directory)?;
    // A share of the memory in percent: what tmpfs's `size` takes.
    let size = format!("{:.0}%", (staging.memory_share * 100.0).max(1.0));
    if tmpfs::is_ours(directory)? {
        // What lies in it may be more than that: then it stays as it is until the next start.
        if let Err(error) = tmpfs::resize(directory, &size) {
            tracing::warn!(error = %chain(&error), ?directory, size, "the tmpfs keeps its size");
        }
        return Ok(());
    }
    if is_mount_point(directory)? || fs::read_dir(directory)?.next().is_some() {
        return Ok(());
    }
    if let Err(error) = tmpfs::mount(directory, &size) {
        tracing::warn!(error = %chain(&error), ?directory, "no tmpfs of our own for staging");
    }
    Ok(())
}

/// Whether the agent has mounted a tmpfs there.
pub(crate) fn is_ours(directory: &Path) -> bool {
    tmpfs::is_ours(directory).unwrap_or(false)
}

/// Makes sure that a directory is in memory: mounts a tmpfs there that holds `bytes` unless it is,
/// and gives one that an earlier agent mounted that size, or what lies in it.
pub(crate) fn mount_memory(directory: &Path, bytes: u64) -> io::Result<()> {
    let wanted = bytes.saturating_add(MARGIN_BYTES);
    if tmpfs::is_ours(directory)? {
        let used = used(directory)?;
        return tmpfs::resize(directory, &wanted.max(used).to_string());
    }
    if !is_mount_point(directory)? && fs::read_dir(directory)?.next().is_none() {
        tmpfs::mount(directory, &wanted.to_string())?;
    } else if is_tmpfs(directory) && tmpfs::total(directory)? < bytes {
        tracing::warn!(
            ?directory,
            budget = bytes,
            "the tmpfs that was mounted here is smaller than the budget: mount it anew with more"
        );
    }
    if is_tmpfs(directory) {
        return Ok(());
    }
    Err(io::Error::other(format!("{} is not in memory: mount a tmpfs there", directory.display())))
}

/// Makes a directory that only root can look into, and those above it.
pub(crate) fn make(directory: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory)
}

/// The directory within an operation's on which a dump's memory is mounted while CRIU reads it.
pub(crate) const MEMORY: &str = "memory";

/// Takes away what is mounted on a directory, if anything is: whoever reads there gets an error.
pub(crate) fn unmount(directory: &Path) -> io::Result<()> {
    let how = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    match rustix::mount::unmount(directory, how) {
        // Nothing is mounted there, or it is not there.
        Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes a directory with its content, if it is there; what is mounted in it is none of that.
pub(crate) fn remove(directory: &Path) -> io::Result<()> {
    // An agent that was killed has left it mounted, and nobody can look into it any more.
    unmount(&directory.join(MEMORY))?;
    unmount_within(directory)?;
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Takes away what is mounted in a directory. A CRIU that was killed may have left the node's cgroups
/// there, of which whoever removed them as files would remove each that nobody is in.
fn unmount_within(directory: &Path) -> io::Result<()> {
    let directory = match fs::canonicalize(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let is_within = |mount: &Mount| mount.point.starts_with(&directory) && mount.point != directory;
    let within: Vec<Mount> = mounts::own()?.into_iter().filter(is_within).collect();
    within.iter().rev().try_for_each(|mount| unmount(&mount.point))
}

/// Whether so many bytes fit into the staging directory in memory, where there is so much `less`, and
/// `more`, than the kernel says.
fn fits_memory(staging: &StagingConfig, needed: u64, less: u64, more: u64) -> bool {
    let room = |bytes: u64| bytes.saturating_add(more).saturating_sub(less);
    let available = room(memory_available().unwrap_or(0));
    #[expect(
        clippy::cast_precision_loss,
        clippy::as_conversions,
        reason = "a share of the memory needs no last byte"
    )]
    let share = needed as f64 <= available as f64 * staging.memory_share;
    share
        && make(&staging.tmpfs).is_ok()
        && is_tmpfs(&staging.tmpfs)
        && space(&staging.tmpfs).is_ok_and(|space| room(space) >= needed)
}

fn is_mount_point(directory: &Path) -> io::Result<bool> {
    let parent = directory.parent().unwrap_or(directory);
    Ok(rustix::fs::stat(directory)?.st_dev != rustix::fs::stat(parent)?.st_dev)
}

fn is_tmpfs(directory: &Path) -> bool {
    rustix::fs::statfs(directory).is_ok_and(|found| u64::try_from(found.f_type) == Ok(TMPFS_MAGIC))
}

/// Returns how many bytes the file system of a directory has left.
pub(crate) fn space(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ServeArgs};

    pub(super) fn config(root: &Path, memory_share: f64) -> Config {
        let file = root.join("agent.toml");
        let tmpfs = root.join("tmpfs");
        let text = format!("[staging]\ntmpfs = {tmpfs:?}\nmemory_share = {memory_share}\n");
        fs::write(&file, text).unwrap();
        let args =
            ServeArgs { config: Some(file), root: Some(root.to_owned()), ..ServeArgs::default() };
        args.validate().unwrap()
    }

    #[test]
    fn what_is_no_tmpfs_is_not_taken_for_memory() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path(), 1.0);
        let chosen = Promises::default().choose(&config, 1 << 20).unwrap();
        let expected = if is_tmpfs(root.path()) { "tmpfs" } else { "stage" };
        assert_eq!(chosen.place(), root.path().join(expected));
    }

    #[test]
    fn no_room_is_an_error_that_tells_how_much_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let error = Promises::default().choose(&config(root.path(), 0.5), u64::MAX / 2);
        let error = error.unwrap_err();
        assert!(matches!(error, StageError::NoSpace { .. }), "{error}");
    }
}
