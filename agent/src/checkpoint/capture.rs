//! Captures directories as plain tar files: what the container wrote to its root file system, and
//! mounts that CRIU leaves alone.
//!
//! The container is frozen meanwhile, but a mount may be shared with others that run. So the walk
//! holds directories by descriptor and follows no link. [`spool`] has who copies what is large,
//! [`draft`] what was copied before the container was frozen.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use kybernate_packager::pack::Pieces;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use tar::{EntryType, Header};

mod draft;
mod spool;

pub(crate) use self::draft::{Draft, Since};
use self::spool::{Shared, Spool};
use crate::links::FileId;

/// Directories within directories; overlayfs and tar have no bound of their own, our stack has.
const DEPTH_MAX: usize = 512;

/// Largest extended attribute (xattr(7)).
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// What is looked at beforehand: a container that runs can make and move files as fast as they are.
const ENTRIES_MAX: usize = 16_000_000;

/// Longest path within the directory. Whoever unpacks puts theirs before it, and has 4096 for all.
const PATH_BYTES_MAX: usize = 3800;

/// In a layer, the name of what was deleted begins so (image specification, "Whiteouts").
const WHITEOUT_MARK: &[u8] = b".wh.";

/// Longest name that fits into a plain tar header.
const PLAIN_NAME_BYTES: usize = 100;

/// What a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tree {
    /// The upper directory of an overlay: what is deleted below is written as OCI whiteouts.
    Upper,
    /// A mount: everything there is, and how the directory itself is.
    Mount,
}

/// Extended attributes, as a tar has them.
type Attributes = Vec<(String, Vec<u8>)>;

/// Why a directory was not captured.
#[derive(Debug, thiserror::Error)]
#[error("failed to capture {path:?}")]
pub(crate) struct CaptureError {
    /// The file or directory.
    path: PathBuf,
    /// What happened.
    #[source]
    source: io::Error,
}

/// A name that something has in a tar beside those that it has in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Where, from the top of the directory.
    pub(crate) place: PathBuf,
    pub(crate) file: FileId,
}

/// Writes a mount as a tar, as [`capture`] does, with more names for its files.
pub(crate) fn capture_linked(
    directory: &Path,
    links: &[Link],
    tar: &Path,
    stop: &AtomicBool,
) -> Result<Pieces, CaptureError> {
    write(Wish { directory, tree: Tree::Mount, draft: None, links }, tar, stop)
}

/// Writes `directory` as a tar, to a new file where it is not in `draft` already, and returns where it
/// lies. Ends early when `stop` is set.
pub(crate) fn capture(
    directory: &Path,
    tree: Tree,
    draft: Option<&Draft>,
    tar: &Path,
    stop: &AtomicBool,
) -> Result<Pieces, CaptureError> {
    write(Wish { directory, tree, draft, links: &[] }, tar, stop)
}

/// What is captured.
#[derive(Clone, Copy)]
struct Wish<'a> {
    directory: &'a Path,
    tree: Tree,
    draft: Option<&'a Draft>,
    links: &'a [Link],
}

fn write(wish: Wish<'_>, tar: &Path, stop: &AtomicBool) -> Result<Pieces, CaptureError> {
    let Wish { directory, tree, draft, links } = wish;
    let at = |path: &Path, source| CaptureError { path: path.to_owned(), source };
    let shared = Shared::create(tar, stop).map_err(|error| at(tar, error))?;
    let root = open_directory(rustix::fs::CWD, directory.as_os_str());
    let root = root.map_err(|error| at(directory, error))?;
    let walked = std::thread::scope(|scope| {
        let mut walk = Walk {
            out: tar::Builder::new(Spool::new(scope, &shared)),
            tree,
            draft,
            linked: HashMap::new(),
            added: links,
            scratch: vec![0; ATTRIBUTE_BYTES_MAX],
            place: PathBuf::new(),
        };
        let done = walk.top(&root).and_then(|()| walk.directory(&root, 0));
        let done = done.and_then(|()| walk.links(&root));
        let done = done.and_then(|()| walk.out.into_inner()?.finish());
        done.map_err(|error| {
            shared.give_up();
            at(&directory.join(&walk.place), error)
        })
    });
    // What went wrong in a thread is why the walk ended.
    match shared.failure() {
        Some(CaptureError { path, source }) => Err(at(&directory.join(path), source)),
        None => walked,
    }
}

/// What a directory has that somebody may write to.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// Of its files, as they would be read.
    pub(crate) bytes: u64,
    /// The first that a layer of an image cannot hold, with the reason.
    pub(crate) unfit: Option<String>,
}

impl Contents {
    /// Looks at a directory, as far as there is an end. What cannot be read does not count: the answer
    /// is an estimate.
    pub(crate) fn of(directory: &Path, tree: Tree) -> Self {
        let mut look = Look { found: Self::default(), tree, entries: 0, place: PathBuf::from("/") };
        if let Ok(root) = open_directory(rustix::fs::CWD, directory.as_os_str()) {
            look.directory(&root, 0);
        }
        look.found
    }
}

/// A look at a directory. It is the container's: links lead where it wants.
struct Look {
    found: Contents,
    tree: Tree,
    entries: usize,
    place: PathBuf,
}

impl Look {
    fn directory(&mut self, directory: &OwnedFd, depth: usize) {
        let Ok(names) = names(directory) else { return };
        for name in names.map_while(Result::ok) {
            self.entries += 1;
            if self.entries > ENTRIES_MAX {
                return;
            }
            self.place.push(OsStr::from_bytes(name.to_bytes()));
            let fits = fits(self.tree, self.place.strip_prefix("/").unwrap_or(&self.place), depth);
            if let Err(reason) = fits {
                let told = || format!("{:?}: {reason}", self.place.to_string_lossy());
                self.found.unfit.get_or_insert_with(told);
            } else {
                self.entry(directory, &name, depth);
            }
            self.place.pop();
        }
    }

    fn entry(&mut self, parent: &OwnedFd, name: &CStr, depth: usize) {
        let Ok(stat) = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let directory = open_directory(parent, OsStr::from_bytes(name.to_bytes()));
                if let Ok(directory) = directory {
                    self.directory(&directory, depth + 1);
                }
            }
            FileType::RegularFile => {
                let bytes = u64::try_from(stat.st_size).unwrap_or_default();
                self.found.bytes = self.found.bytes.saturating_add(bytes);
            }
            _ => {}
        }
    }
}

/// Whether what is at a place can be in a tar that others unpack, so many directories deep.
fn fits(tree: Tree, place: &Path, depth: usize) -> Result<(), &'static str> {
    let name = place.file_name().unwrap_or_default().as_bytes();
    if depth > DEPTH_MAX {
        Err("directories are nested too deeply")
    } else if place.as_os_str().len() > PATH_BYTES_MAX {
        Err("its path is too long to be unpacked")
    } else if tree == Tree::Upper && name.starts_with(WHITEOUT_MARK) {
        Err("a name that begins with .wh. means a deletion in a container image")
    } else {
        Ok(())
    }
}

struct Walk<'scope, 'env> {
    out: tar::Builder<Spool<'scope, 'env>>,
    tree: Tree,
    draft: Option<&'env Draft>,
    /// First name of each file that has several.
    linked: HashMap<FileId, PathBuf>,
    /// Names that come on top.
    added: &'env [Link],
    /// Room for an attribute.
    scratch: Vec<u8>,
    /// Where we are, from the top; it stays where an error happened.
    place: PathBuf,
}

impl Walk<'_, '_> {
    /// Says how the directory itself is. That of an upper directory is the root of every layer.
    fn top(&mut self, root: &OwnedFd) -> io::Result<()> {
        if self.tree == Tree::Upper {
            return Ok(());
        }
        let attributes = self.attributes(root)?;
        let mut entry = header(&rustix::fs::fstat(root)?, EntryType::Directory);
        self.append(&mut entry, Path::new("./"), None, &attributes)
    }

    fn directory(&mut self, directory: &OwnedFd, depth: usize) -> io::Result<()> {
        let mut names = names(directory)?.collect::<io::Result<Vec<_>>>()?;
        // Equal directories give equal tars.
        names.sort_unstable();
        for name in names {
            self.out.get_ref().check()?;
            self.place.push(OsStr::from_bytes(name.to_bytes()));
            fits(self.tree, &self.place, depth).map_err(io::Error::other)?;
            match self.entry(directory, &name, depth) {
                // Others that have the mount too may run, and remove things: nothing of it is written.
                Err(error) if self.tree == Tree::Mount && is_gone(&error) => {}
                done => done?,
            }
            self.place.pop();
        }
        Ok(())
    }

    fn entry(&mut self, parent: &OwnedFd, name: &CStr, depth: usize) -> io::Result<()> {
        let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if self.tree == Tree::Upper && kind == FileType::CharacterDevice && stat.st_rdev == 0 {
            return self.whiteout(&stat);
        }
        if let Some(first) = self.first_name(&stat, kind) {
            let mut header = header(&stat, EntryType::Link);
            return self.append(&mut header, &self.place.clone(), Some(&first), &[]);
        }
        let place = self.place.clone();
        match kind {
            FileType::Directory => {
                let directory = open_directory(parent, OsStr::from_bytes(name.to_bytes()))?;
                let attributes = self.attributes(&directory)?;
                let mut entry = header(&stat, EntryType::Directory);
                let mut slashed = place.into_os_string().into_vec();
                slashed.push(b'/');
                let slashed = PathBuf::from(std::ffi::OsString::from_vec(slashed));
                self.append(&mut entry, &slashed, None, &attributes)?;
                self.opaque(&directory, &stat)?;
                self.directory(&directory, depth + 1)
            }
            FileType::RegularFile => self.file(parent, name, &stat),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new())?;
                let target = PathBuf::from(std::ffi::OsString::from_vec(target.into_bytes()));
                let mut entry = header(&stat, EntryType::Symlink);
                self.append(&mut entry, &place, Some(&target), &[])
            }
            FileType::Fifo => self.special(&stat, EntryType::Fifo),
            FileType::CharacterDevice => self.special(&stat, EntryType::Char),
            FileType::BlockDevice => self.special(&stat, EntryType::Block),
            // Sockets come into being when they are bound; images never hold them.
            FileType::Socket | FileType::Unknown => Ok(()),
        }
    }

    fn file(&mut self, parent: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
        let place = self.place.clone();
        let size = u64::try_from(stat.st_size).map_err(io::Error::other)?;
        let mut entry = header(stat, EntryType::Regular);
        entry.set_size(size);
        if let Some(draft) = self.draft
            && let Some((from, attributes)) = draft.content(stat)
        {
            self.append(&mut entry, &place, None, attributes)?;
            self.out.get_mut().borrow(draft.path(), from, size);
            return Ok(());
        }
        let file = match self.tree {
            Tree::Upper => open_file(parent, name),
            // Others may run that have it mounted too.
            Tree::Mount => open_only_file(parent, name),
        }?;
        let attributes = self.attributes(&file)?;
        self.append(&mut entry, &place, None, &attributes)?;
        self.out.get_mut().content(File::from(file), size, &place)
    }

    /// Returns the name under which a file with several names is in the tar already.
    fn first_name(&mut self, stat: &Stat, kind: FileType) -> Option<PathBuf> {
        let file = FileId::of(stat);
        let is_added = || self.added.iter().any(|link| link.file == file);
        if kind == FileType::Directory || (stat.st_nlink < 2 && !is_added()) {
            return None;
        }
        match self.linked.entry(file) {
            std::collections::hash_map::Entry::Occupied(first) => Some(first.get().clone()),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                vacant.insert(self.place.clone());
                None
            }
        }
    }

    /// Writes the names that come on top.
    fn links(&mut self, root: &OwnedFd) -> io::Result<()> {
        for link in self.added {
            self.place.clone_from(&link.place);
            let first = self.linked.get(&link.file).cloned().ok_or(io::ErrorKind::NotFound)?;
            let stat = rustix::fs::statat(root, &first, AtFlags::SYMLINK_NOFOLLOW)?;
            let mut header = header(&stat, EntryType::Link);
            self.append(&mut header, &link.place, Some(&first), &[])?;
        }
        Ok(())
    }

    /// A deleted file (image specification, "Whiteouts").
    fn whiteout(&mut self, stat: &Stat) -> io::Result<()> {
        let name = self.place.file_name().unwrap_or_default();
        let mut marked = WHITEOUT_MARK.to_vec();
        marked.extend_from_slice(name.as_bytes());
        let path = self.place.with_file_name(OsStr::from_bytes(&marked));
        let mut entry = header(stat, EntryType::Regular);
        self.append(&mut entry, &path, None, &[])
    }

    /// A directory that hides the one below it (image specification, "Opaque Whiteout").
    fn opaque(&mut self, directory: &OwnedFd, stat: &Stat) -> io::Result<()> {
        if self.tree == Tree::Mount {
            return Ok(());
        }
        if attribute(directory, c"trusted.overlay.redirect", &mut self.scratch)?.is_some() {
            let text = "a renamed directory (overlay option redirect_dir) cannot be captured";
            return Err(io::Error::other(text));
        }
        let opaque = attribute(directory, c"trusted.overlay.opaque", &mut self.scratch)?;
        if opaque != Some(b"y") {
            return Ok(());
        }
        let marker = self.place.join(".wh..wh..opq");
        let mut entry = header(stat, EntryType::Regular);
        self.append(&mut entry, &marker, None, &[])
    }

    fn special(&mut self, stat: &Stat, kind: EntryType) -> io::Result<()> {
        let mut entry = header(stat, kind);
        entry.set_device_major(rustix::fs::major(stat.st_rdev))?;
        entry.set_device_minor(rustix::fs::minor(stat.st_rdev))?;
        self.append(&mut entry, &self.place.clone(), None, &[])
    }

    fn attributes(&mut self, file: &OwnedFd) -> io::Result<Attributes> {
        attributes(file, self.tree, &mut self.scratch)
    }

    /// Appends an entry without its content, with extended records for what a plain header cannot
    /// hold.
    fn append(
        &mut self,
        header: &mut Header,
        path: &Path,
        target: Option<&Path>,
        attributes: &[(String, Vec<u8>)],
    ) -> io::Result<()> {
        let path = path.as_os_str().as_bytes();
        let target = target.map(|target| target.as_os_str().as_bytes());
        let mut records: Vec<(&str, &[u8])> = Vec::new();
        let fits = |name: &[u8]| name.len() <= PLAIN_NAME_BYTES && name.is_ascii();
        if !fits(path) {
            records.push(("path", path));
        }
        if let Some(target) = target.filter(|target| !fits(target)) {
            records.push(("linkpath", target));
        }
        records.extend(attributes.iter().map(|(key, value)| (&**key, &**value)));
        if !records.is_empty() {
            self.out.append_pax_extensions(records)?;
        }
        fill(&mut header.as_old_mut().name, path);
        fill(&mut header.as_old_mut().linkname, target.unwrap_or_default());
        header.set_cksum();
        self.out.append(header, io::empty())
    }
}

/// Returns the attributes that are part of an image: the owner's, capabilities, access lists.
fn attributes(file: &OwnedFd, tree: Tree, scratch: &mut [u8]) -> io::Result<Attributes> {
    let length = match rustix::fs::flistxattr(file, &mut *scratch) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let names = scratch.get(..length).unwrap_or_default().to_vec();
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let Ok(text) = std::str::from_utf8(name) else {
            return Err(io::Error::other("the name of an extended attribute is no text"));
        };
        if tree == Tree::Upper && text == "trusted.overlay.metacopy" {
            let text = "a file without its data (overlay option metacopy) cannot be captured";
            return Err(io::Error::other(text));
        }
        let is_kept = (text.starts_with("user.") && !text.starts_with("user.overlay."))
            || text == "security.capability"
            || text.starts_with("system.posix_acl_");
        let name = CString::new(name)?;
        if is_kept && let Some(value) = attribute(file, &name, scratch)? {
            if text.contains('=') {
                // A record of a tar ends its key there.
                let text = "an extended attribute with = in its name cannot be captured";
                return Err(io::Error::other(text));
            }
            found.push((format!("SCHILY.xattr.{text}"), value.to_vec()));
        }
    }
    Ok(found)
}

/// Whether an error says that something is not there, or something else is in its place.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Fills a field of a header with as much of `text` as fits.
fn fill(field: &mut [u8; PLAIN_NAME_BYTES], text: &[u8]) {
    field.fill(0);
    for (place, byte) in field.iter_mut().zip(text) {
        *place = *byte;
    }
}

fn header(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    // Before 1970 there is no plain field; nobody misses it.
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}

/// Lists a directory, in no order.
fn names(directory: &OwnedFd) -> io::Result<impl Iterator<Item = io::Result<CString>> + use<>> {
    let entries = Dir::read_from(directory)?;
    Ok(entries.filter_map(|entry| match entry {
        Ok(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => None,
        Ok(entry) => Some(Ok(entry.file_name().to_owned())),
        Err(error) => Some(Err(error.into())),
    }))
}

fn open_file(parent: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

/// Opens a file in a directory that somebody changes. A device or a pipe that has its name by now is
/// not opened, which could do anything.
fn open_only_file(parent: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
    if kind != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::NotFound, "it is no file any more"));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let link = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(rustix::fs::open(link, flags, Mode::empty())?)
}

fn open_directory(parent: impl std::os::fd::AsFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}

/// Returns an attribute of an open file, read into `scratch`.
fn attribute<'a>(
    file: &OwnedFd,
    name: &CStr,
    scratch: &'a mut [u8],
) -> io::Result<Option<&'a [u8]>> {
    match rustix::fs::fgetxattr(file, name, &mut *scratch) {
        Ok(length) => Ok(scratch.get(..length)),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
