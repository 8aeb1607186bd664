//! Where a dump appears, whole.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

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
    /// Whether the directory is there already. Then it may be a mount point, somebody's working
    /// directory, or be reached over a link, so it is filled and not replaced.
    exists: bool,
}

impl Place {
    /// Finds out whether `directory` can be had, and prepares for it.
    pub(super) fn prepare(directory: &Path) -> io::Result<Self> {
        match leftovers::clear(directory, PREFIX) {
            Ok(()) => {
                for entry in fs::read_dir(directory)? {
                    if entry?.file_name() != OsStr::new(FILE_SYSTEMS_OWN) {
                        return Err(io::ErrorKind::DirectoryNotEmpty.into());
                    }
                }
                Self::begin(directory, directory.to_owned(), true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let (parent, target) = split(directory)?;
                if fs::symlink_metadata(&target).is_ok() {
                    let text = format!("{} is a link that leads nowhere", directory.display());
                    return Err(io::Error::new(io::ErrorKind::NotFound, text));
                }
                fs::create_dir_all(&parent)?;
                Self::begin(&parent, target, false)
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
        if !self.exists {
            return fs::rename(&self.staging, &self.target);
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.staging)? {
            names.push(entry?.file_name());
        }
        names.sort_by_key(|name| name == OsStr::new(FIRST_READ));
        for (moved, name) in names.iter().enumerate() {
            if let Err(error) = fs::rename(self.staging.join(name), self.target.join(name)) {
                for name in names.iter().take(moved) {
                    fs::remove_file(self.target.join(name))?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn begin(parent: &Path, target: PathBuf, exists: bool) -> io::Result<Self> {
        let scratch = Scratch::begin(parent, PREFIX)?;
        let staging = scratch.path().join("dump");
        std::fs::DirBuilder::new().mode(0o700).create(&staging)?;
        Ok(Self { scratch, staging, target, exists })
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
