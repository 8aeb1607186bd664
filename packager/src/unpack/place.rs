//! Where a dump appears, whole.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use rustix::fs::{FlockOperation, RenameFlags};
use rustix::io::Errno;

use crate::leftovers::{self, Scratch};

/// How the names of what is not finished begin.
const PREFIX: &str = ".kybernate-unpack-";

/// The image that CRIU reads first: without it a directory is no dump.
const FIRST_READ: &str = "inventory.img";

/// What a file system's own root directory may hold.
const FILE_SYSTEMS_OWN: &str = "lost+found";

/// The directory asked for, and the one beside or in it where its files are made.
#[derive(Debug)]
pub(super) struct Place {
    scratch: Scratch,
    staging: PathBuf,
    target: PathBuf,
    /// The directory, when it is there already. Then it may be a mount point, somebody's working
    /// directory, or be reached over a link, so it is filled and not replaced. Locked, so that two
    /// runs do not mix their files.
    there: Option<File>,
}

impl Place {
    /// Finds out whether `directory` can be had, and prepares for it.
    pub(super) fn prepare(directory: &Path) -> io::Result<Self> {
        match lock(directory) {
            Ok(lock) => {
                leftovers::clear(directory, PREFIX)?;
                for entry in fs::read_dir(directory)? {
                    if entry?.file_name() != OsStr::new(FILE_SYSTEMS_OWN) {
                        return Err(io::ErrorKind::DirectoryNotEmpty.into());
                    }
                }
                Self::begin(directory, directory.to_owned(), Some(lock))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (parent, target) = split(directory)?;
                if fs::symlink_metadata(&target).is_ok() {
                    let text = format!("{} is a link that leads nowhere", directory.display());
                    return Err(io::Error::new(io::ErrorKind::NotFound, text));
                }
                fs::create_dir_all(&parent)?;
                Self::begin(&parent, target, None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the directory to fill.
    pub(super) fn staging(&self) -> &Path {
        &self.staging
    }

    /// Returns what keeps the directory, for threads that write there.
    pub(super) fn kept(&self) -> Scratch {
        self.scratch.clone()
    }

    /// Gives the files their place. Until the last step it holds no dump.
    pub(super) fn publish(self) -> io::Result<()> {
        if self.there.is_none() {
            return fs::rename(&self.staging, &self.target);
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.staging)? {
            names.push(entry?.file_name());
        }
        names.sort_by_key(|name| name == OsStr::new(FIRST_READ));
        for (moved, name) in names.iter().enumerate() {
            if let Err(error) = move_new(&self.staging.join(name), &self.target.join(name)) {
                for name in names.iter().take(moved) {
                    fs::remove_file(self.target.join(name))?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn begin(parent: &Path, target: PathBuf, there: Option<File>) -> io::Result<Self> {
        let scratch = Scratch::begin(parent, PREFIX)?;
        let staging = scratch.path().join("dump");
        std::fs::DirBuilder::new().mode(0o700).create(&staging)?;
        Ok(Self { scratch, staging, target, there })
    }
}

/// Locks a directory that is there, unless somebody fills it already.
fn lock(directory: &Path) -> io::Result<File> {
    // What is no directory says so here, before it is opened: a pipe would hold us up.
    fs::read_dir(directory)?;
    let (file, _path) = fs::File::open(directory)?.into_parts();
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            let text = format!("something else is being unpacked into {}", directory.display());
            Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
        }
        Err(error) => Err(error.into()),
    }
}

/// Moves a file to a place where there is none.
fn move_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::CWD;
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // A file system that cannot tell, as NFS.
        Err(Errno::INVAL) => fs::rename(from, to),
        Err(Errno::EXIST) => {
            let text = format!("{} has come into being meanwhile", to.display());
            Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
        }
        Err(error) => Err(error.into()),
    }
}

/// Splits a path that does not exist into its parent, which may not either, and itself without
/// anything odd at its end.
fn split(directory: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let name = directory.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = match directory.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let target = parent.join(name);
    Ok((parent, target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_fills_a_directory() {
        let top = tempfile::tempdir().unwrap();
        let first = Place::prepare(top.path()).unwrap();
        let second = Place::prepare(top.path()).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::ResourceBusy);
        drop(first);
        Place::prepare(top.path()).unwrap();
        assert_eq!(fs::read_dir(top.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_comes_meanwhile_is_not_replaced() {
        let top = tempfile::tempdir().unwrap();
        let place = Place::prepare(top.path()).unwrap();
        for name in ["a.img", "b.img", FIRST_READ] {
            fs::write(place.staging().join(name), "unpacked").unwrap();
        }
        fs::write(top.path().join("b.img"), "somebody's").unwrap();
        let error = place.publish().unwrap_err();
        assert!(error.to_string().contains("b.img"), "{error}");
        let left: Vec<_> = fs::read_dir(top.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(fs::read_to_string(top.path().join("b.img")).unwrap(), "somebody's");
    }
}
