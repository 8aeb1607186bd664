//! The directories that a layer is unpacked into, and what is made in them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use tar::{Entry, EntryType, Header};
use tokio_util::sync::CancellationToken;

use super::LayerError;
use super::about::{About, DEFAULT_ACL};

/// Directories within directories: each is held open.
const DEPTH_MAX: usize = 128;

/// How much of a file is written at once.
const BUFFER_BYTES: usize = 256 << 10;

/// In a layer, the name of what was deleted begins so (image specification, "Whiteouts").
const WHITEOUT_MARK: &[u8] = b".wh.";

/// In a layer, a file of this name says that its directory hides the one below it, less the mark.
const OPAQUE: &[u8] = b".wh..opq";

/// An upper directory on its way. Where it is written to is a stack of open directories, and this has
/// made each of them.
pub(super) struct Tree<'a> {
    root: OwnedFd,
    open: Vec<Open>,
    buffer: Vec<u8>,
    /// What a part of a file is compared with.
    zeros: Vec<u8>,
    wanted: &'a CancellationToken,
}

/// A directory that things are put in.
struct Open {
    /// Below the root.
    path: PathBuf,
    directory: OwnedFd,
    /// Its own time, which counts when nothing is put in any more.
    time: Timestamps,
    /// What is made in it from then on gets this: what was in it has its own.
    default_acl: Option<Vec<u8>>,
}

impl<'a> Tree<'a> {
    pub(super) fn open(upper: &Path, wanted: &'a CancellationToken) -> Result<Self, LayerError> {
        let root = rustix::fs::openat(CWD, upper, directory_flags(), Mode::empty());
        let root = root.map_err(|errno| failure(Path::new(""), errno))?;
        let [buffer, zeros] = [vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]];
        Ok(Self { root, open: Vec::new(), buffer, zeros, wanted })
    }

    /// Makes what an entry of the tar says.
    pub(super) fn add(
        &mut self,
        about: &About,
        entry: &mut Entry<'_, impl Read>,
    ) -> Result<(), LayerError> {
        let name = self.descend(&about.path)?;
        let kind = entry.header().entry_type();
        if !about.attributes.is_empty() && !kind.is_file() && !kind.is_dir() {
            return Err(LayerError::Unknown("extended attributes of what is no file"));
        }
        let hidden = name.as_bytes().strip_prefix(WHITEOUT_MARK).map(OsStr::from_bytes);
        let made = match kind {
            EntryType::Regular if let Some(hidden) = hidden => return self.hide(about, hidden),
            // To others it deletes something, whatever it is.
            _ if hidden.is_some() => {
                return Err(LayerError::Unknown("a mark that is no file"));
            }
            EntryType::Regular => return self.file(about, name, entry),
            EntryType::Directory => return self.directory(about, name),
            EntryType::Link => return self.link(about, name),
            EntryType::Symlink => {
                let target = about.target.as_deref().unwrap_or_default();
                rustix::fs::symlinkat(OsStr::from_bytes(target), self.here(), name)
            }
            EntryType::Fifo => self.node(name, FileType::Fifo, 0),
            EntryType::Char => self.node(name, FileType::CharacterDevice, device(entry.header())?),
            EntryType::Block => self.node(name, FileType::BlockDevice, device(entry.header())?),
            _ => {
                return Err(LayerError::Unknown("an entry of a kind that the agent does not know"));
            }
        };
        made.and_then(|()| self.describe(about, name, kind)).map_err(|e| failure(&about.path, e))
    }

    /// Ends every directory.
    pub(super) fn finish(mut self) -> Result<(), LayerError> {
        self.leave(|_| false)
    }

    /// Goes to the directory that something is put in, and returns its name there.
    fn descend<'p>(&mut self, path: &'p Path) -> Result<&'p OsStr, LayerError> {
        self.leave(|open| path.starts_with(open))?;
        let here = self.open.last().map_or(Path::new(""), |open| &open.path);
        match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) if parent == here => Ok(name),
            _ => Err(LayerError::Unknown("something that does not follow its directory")),
        }
    }

    /// Ends directories, innermost first, up to one that is to stay.
    fn leave(&mut self, stays: impl Fn(&Path) -> bool) -> Result<(), LayerError> {
        while let Some(open) = self.open.pop_if(|open| !stays(&open.path)) {
            let acl = open.default_acl.as_ref().map_or(Ok(()), |value| {
                rustix::fs::fsetxattr(&open.directory, DEFAULT_ACL, value, XattrFlags::empty())
            });
            let ended = acl.and_then(|()| rustix::fs::futimens(&open.directory, &open.time));
            ended.map_err(|errno| failure(&open.path, errno))?;
        }
        Ok(())
    }

    fn here(&self) -> &OwnedFd {
        self.open.last().map_or(&self.root, |open| &open.directory)
    }

    fn directory(&mut self, about: &About, name: &OsStr) -> Result<(), LayerError> {
        if self.open.len() >= DEPTH_MAX {
            return Err(LayerError::Unknown("directories that are nested deeply"));
        }
        let make = || {
            rustix::fs::mkdirat(self.here(), name, Mode::RWXU)?;
            let flags = directory_flags() | OFlags::NOFOLLOW;
            let directory = rustix::fs::openat(self.here(), name, flags, Mode::empty())?;
            describe_open(&directory, about)?;
            Ok(directory)
        };
        let directory = make().map_err(|errno| failure(&about.path, errno))?;
        let mut attributes = about.attributes.iter();
        let default_acl = attributes.find(|(name, _)| name == DEFAULT_ACL);
        let default_acl = default_acl.map(|(_, value)| value.clone());
        let time = times(about);
        self.open.push(Open { path: about.path.clone(), directory, time, default_acl });
        Ok(())
    }

    fn file(
        &mut self,
        about: &About,
        name: &OsStr,
        content: &mut impl Read,
    ) -> Result<(), LayerError> {
        let at = |errno| failure(&about.path, errno);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.here(), name, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(file.map_err(at)?);
        let mut left = about.size;
        while left > 0 {
            if self.wanted.is_cancelled() {
                return Err(LayerError::Read(super::unwanted()));
            }
            let read = content.read(&mut self.buffer).map_err(LayerError::Read)?;
            let part = self.buffer.get(..read).unwrap_or_default();
            let length = u64::try_from(read).unwrap_or(u64::MAX);
            let place = about.size - left;
            left = left.checked_sub(length).filter(|_| read > 0).ok_or_else(short)?;
            // Where a file has nothing but zeros it takes no room, as it may not have in the source.
            if self.zeros.get(..read) != Some(part) {
                file.write_all_at(part, place).map_err(|error| at(errno(&error)))?;
            }
        }
        file.set_len(about.size).map_err(|error| at(errno(&error)))?;
        let file = OwnedFd::from(file);
        let described = describe_open(&file, about);
        described.and_then(|()| rustix::fs::futimens(&file, &times(about))).map_err(at)
    }

    /// What is deleted, as overlayfs has it ("whiteouts and opaque directories" in the kernel's
    /// filesystems/overlayfs).
    fn hide(&self, about: &About, hidden: &OsStr) -> Result<(), LayerError> {
        let at = |errno| failure(&about.path, errno);
        match (hidden.as_bytes(), self.open.last()) {
            (OPAQUE, Some(open)) => {
                let (name, value) = (c"trusted.overlay.opaque", b"y");
                rustix::fs::fsetxattr(&open.directory, name, value, XattrFlags::empty()).map_err(at)
            }
            (mark, _) if matches!(mark, b"" | b"." | b"..") || mark.starts_with(WHITEOUT_MARK) => {
                Err(LayerError::Unknown("a mark that the agent does not know"))
            }
            _ => {
                let make = || {
                    self.node(hidden, FileType::CharacterDevice, 0)?;
                    chown(self.here(), hidden, about)?;
                    // Its time is in the layer when it is captured again.
                    self.time(about, hidden)
                };
                make().map_err(at)
            }
        }
    }

    /// Another name of a file that was made before.
    fn link(&self, about: &About, name: &OsStr) -> Result<(), LayerError> {
        let target = about.target.as_deref().and_then(super::about::place);
        let target = target.ok_or(LayerError::Unknown("a link to elsewhere"))?;
        let link = || {
            let parent = target.parent().filter(|parent| *parent != Path::new(""));
            // No link leads out of what was unpacked.
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let parent = parent.unwrap_or(Path::new("."));
            let parent = rustix::fs::openat2(&self.root, parent, flags, Mode::empty(), resolve)?;
            let first = target.file_name().unwrap_or_default();
            rustix::fs::linkat(parent, first, self.here(), name, AtFlags::empty())?;
            rustix::fs::statat(self.here(), name, AtFlags::SYMLINK_NOFOLLOW)
        };
        let stat = link().map_err(|errno| failure(&about.path, errno))?;
        // It is one file: of two entries that differ, others heed the last.
        let (owner, group) = about.owner;
        let same = (stat.st_uid, stat.st_gid) == (owner.as_raw(), group.as_raw())
            && Mode::from_raw_mode(stat.st_mode & 0o7777) == about.mode
            && stat.st_mtime == about.seconds;
        same.then_some(()).ok_or(LayerError::Unknown("a link that is unlike what it leads to"))
    }

    fn node(&self, name: &OsStr, kind: FileType, device: u64) -> rustix::io::Result<()> {
        rustix::fs::mknodat(self.here(), name, kind, Mode::empty(), device)
    }

    /// Gives what is no file and no directory its owner, mode and time.
    fn describe(&self, about: &About, name: &OsStr, kind: EntryType) -> rustix::io::Result<()> {
        chown(self.here(), name, about)?;
        if kind != EntryType::Symlink {
            rustix::fs::chmodat(self.here(), name, about.mode, AtFlags::empty())?;
        }
        self.time(about, name)
    }

    fn time(&self, about: &About, name: &OsStr) -> rustix::io::Result<()> {
        rustix::fs::utimensat(self.here(), name, &times(about), AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Gives an open file or directory everything but its time.
fn describe_open(open: &OwnedFd, about: &About) -> rustix::io::Result<()> {
    let (owner, group) = about.owner;
    // In this order: a change of the owner takes some modes and attributes away.
    rustix::fs::fchown(open, Some(owner), Some(group))?;
    rustix::fs::fchmod(open, about.mode)?;
    for (name, value) in about.attributes.iter().filter(|(name, _)| name != DEFAULT_ACL) {
        rustix::fs::fsetxattr(open, &**name, value, XattrFlags::empty())?;
    }
    Ok(())
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn chown(directory: &OwnedFd, name: &OsStr, about: &About) -> rustix::io::Result<()> {
    let (owner, group) = about.owner;
    rustix::fs::chownat(directory, name, Some(owner), Some(group), AtFlags::SYMLINK_NOFOLLOW)
}

fn times(about: &About) -> Timestamps {
    let time = Timespec { tv_sec: about.seconds, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

fn device(header: &Header) -> Result<u64, LayerError> {
    let number = |read: io::Result<Option<u32>>| read.map(Option::unwrap_or_default);
    let major = number(header.device_major()).map_err(LayerError::Read)?;
    let minor = number(header.device_minor()).map_err(LayerError::Read)?;
    Ok(rustix::fs::makedev(major, minor))
}

fn short() -> LayerError {
    LayerError::Read(super::torn())
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC
}

fn failure(path: &Path, errno: Errno) -> LayerError {
    match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::IO | Errno::ROFS | Errno::NOMEM => {
            LayerError::Make { path: path.to_owned(), source: errno.into() }
        }
        Errno::EXIST => LayerError::Unknown("one name twice"),
        // containerd has other privileges, other ways and a name for what is wrong.
        _ => LayerError::Unknown("something that the agent cannot make"),
    }
}
