//! What is under construction, and what a killed run left of it.
//!
//! Whoever builds something under a temporary name holds a lock on it (`flock`), which ends with the
//! process. So what nobody holds is a left-over, and the next who builds in the same place removes
//! it; what is held is never touched. Everything here blocks.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use fs_err as fs;
use rustix::fs::{FlockOperation, Mode, OFlags};
use tempfile::{NamedTempFile, TempDir};

/// How often a name is taken anew when somebody else, who saw it before it was locked, has taken it
/// for a left-over.
const ATTEMPTS: usize = 16;

/// A directory under construction. It goes with all that is in it when its last clone is dropped: so
/// whoever still writes there has one.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    directory: TempDir,
    _lock: File,
}

impl Scratch {
    /// Makes a directory in `parent` whose name begins with `prefix`, after removing the left-overs
    /// of that prefix.
    pub(crate) fn begin(parent: &Path, prefix: &str) -> io::Result<Self> {
        clear(parent, prefix)?;
        for _ in 0..ATTEMPTS {
            let directory = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
            if let Some(lock) = open(directory.path())?
                && hold(&lock, directory.path())?
            {
                return Ok(Self { held: Arc::new(Held { directory, _lock: lock }) });
            }
        }
        Err(taken())
    }

    /// Returns where it is.
    pub(crate) fn path(&self) -> &Path {
        self.held.directory.path()
    }
}

/// Makes the file that `create` makes, and locks it.
pub(crate) fn locked(create: impl Fn() -> io::Result<NamedTempFile>) -> io::Result<NamedTempFile> {
    for _ in 0..ATTEMPTS {
        let made = create()?;
        if hold(made.as_file(), made.path())? {
            return Ok(made);
        }
    }
    Err(taken())
}

/// Removes what begins with `prefix` in `directory` and is held by nobody. What cannot be removed
/// stays, and the log says why.
pub(crate) fn clear(directory: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix)
            && let Err(error) = remove_if_left(&entry.path())
        {
            tracing::debug!(%error, path = %entry.path().display(), "a left-over stays");
        }
    }
    Ok(())
}

fn remove_if_left(path: &Path) -> io::Result<()> {
    let Some(file) = open(path)? else { return Ok(()) };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) if is_at(&file, path)? => {}
        Ok(()) | Err(rustix::io::Errno::WOULDBLOCK) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    tracing::debug!(path = %path.display(), "removing what a killed run left");
    if file.metadata()?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Opens a file or directory, whatever it is; `None` for links and for what is gone.
fn open(path: &Path) -> io::Result<Option<File>> {
    use rustix::io::Errno;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::NOENT | Errno::LOOP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Locks what was just made at `path`. Returns whether it still is there: before it was locked, it
/// looked like a left-over.
fn hold(file: &File, path: &Path) -> io::Result<bool> {
    rustix::fs::flock(file, FlockOperation::LockExclusive)?;
    is_at(file, path)
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((open.dev(), open.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn taken() -> io::Error {
    let text = "what was begun was taken for a left-over, again and again";
    io::Error::other(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn only_what_nobody_holds_is_removed() {
        let top = tempfile::tempdir().unwrap();
        let alive = Scratch::begin(top.path(), ".x-").unwrap();
        fs::write(alive.path().join("content"), "kept").unwrap();
        fs::create_dir(top.path().join(".x-dead")).unwrap();
        fs::write(top.path().join(".x-dead/content"), "left").unwrap();
        fs::write(top.path().join(".x-file"), "left").unwrap();
        fs::write(top.path().join("other"), "kept").unwrap();
        std::os::unix::fs::symlink(top.path().join("other"), top.path().join(".x-link")).unwrap();

        let second = Scratch::begin(top.path(), ".x-").unwrap();
        let left = names(top.path());
        assert_eq!(left.len(), 4, "{left:?}");
        assert!(alive.path().join("content").exists() && second.path().exists());
        drop((alive, second));
        assert_eq!(names(top.path()).len(), 2, "the file and the link are not ours");
    }

    #[test]
    fn whoever_is_taken_for_dead_while_beginning_begins_again() {
        let top = tempfile::tempdir().unwrap();
        let first = std::cell::Cell::new(true);
        let create = || {
            let made = tempfile::Builder::new().prefix(".x-").tempfile_in(top.path())?;
            if first.replace(false) {
                clear(top.path(), ".x-")?;
            }
            Ok(made)
        };
        let made = locked(create).unwrap();
        assert!(made.path().exists());
        clear(top.path(), ".x-").unwrap();
        assert!(made.path().exists(), "it is held now");
    }
}
