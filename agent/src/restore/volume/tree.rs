//! The tar of a captured mount becomes a directory: one of ours, or of another program's archive.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fs_err as fs;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use tar::Entry;

use crate::layer::{ATTRIBUTE_RECORD, DEFAULT_ACL, RECORDS_BYTES_MAX, is_attribute, read_records};
use crate::stage;

/// Nothing leads out of what is unpacked: whoever else has the mount may change it meanwhile.
const WITHIN: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// What was made at the top of a directory, also when it was not filled to the end.
pub(crate) type Names = Arc<Mutex<BTreeSet<OsString>>>;

/// Unpacks everything but devices and sockets; nothing leads out of `target`.
pub(super) fn extract(bytes: impl io::Read, target: &Path, made: &Names) -> io::Result<()> {
    stage::make(target)?;
    // As containerd makes its own /dev/shm.
    fs::set_permissions(target, std::fs::Permissions::from_mode(0o1777))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, target, flags, Mode::empty())?;
    let mut archive = tar::Archive::new(bytes);
    let (mut before, mut directories) = (Before::default(), Vec::new());
    // Raw, since the library's reader of records ends one at a line feed, and a value may have one.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        if before.read(&mut entry)? {
            continue;
        }
        let before = std::mem::take(&mut before);
        if before.size.is_some_and(|size| size != entry.size()) {
            // The next header is elsewhere.
            return Err(io::Error::other("a file is larger than its header can say"));
        }
        if before.is_sparse {
            return Err(io::Error::other("it has a file in GNU tar's form for sparse ones"));
        }
        let path = before.path.unwrap_or_else(|| entry.path_bytes().into_owned());
        let Some(path) = below(&path) else { continue };
        let link = before.link.or_else(|| Some(entry.link_name_bytes()?.into_owned()));
        let said = Said::of(&entry, before.owner, before.attributes)?;
        if entry.header().entry_type().is_dir() {
            // What is put into it changes its time, and gets what it has for new files.
            directories.push((path.clone(), said.time.clone(), said.default_acl()));
        }
        unpack((&root, made), &path, &mut entry, (&said, link))?;
    }
    // To its end, where the digest is compared.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    for (path, time, default_acl) in directories.iter().rev() {
        let directory = open_directory(&root, path)?;
        default_acl.iter().try_for_each(|acl| set_attribute(&directory, acl))?;
        rustix::fs::futimens(directory, time)?;
    }
    Ok(())
}

/// Whether an archive has nothing but the directory itself.
pub(super) fn is_bare(bytes: impl io::Read) -> io::Result<bool> {
    let mut before = Before::default();
    for entry in tar::Archive::new(bytes).entries()?.raw(true) {
        let mut entry = entry?;
        if before.read(&mut entry)? {
            continue;
        }
        let before = std::mem::take(&mut before);
        let path = before.path.unwrap_or_else(|| entry.path_bytes().into_owned());
        if below(&path).is_some_and(|path| !path.as_os_str().is_empty()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An extended attribute.
type Attribute = (String, Vec<u8>);

/// What comes before an entry and belongs to it: the records of pax, and the long names of GNU tar.
#[derive(Debug, Default)]
struct Before {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    is_sparse: bool,
    owner: [Option<u32>; 2],
    attributes: Vec<Attribute>,
}

impl Before {
    /// Reads an entry that is no file. Returns whether it is none.
    fn read(&mut self, entry: &mut Entry<'_, impl io::Read>) -> io::Result<bool> {
        let kind = entry.header().entry_type();
        let is_none = kind.is_pax_local_extensions()
            || kind.is_pax_global_extensions()
            || kind.is_gnu_longname()
            || kind.is_gnu_longlink();
        if !is_none {
            return Ok(false);
        }
        if entry.size() > RECORDS_BYTES_MAX {
            return Err(io::Error::other("very long records before an entry"));
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text)?;
        if kind.is_pax_local_extensions() {
            read_records(&text).try_for_each(|record| record.map(|record| self.take(record)))?;
        } else if kind.is_gnu_longname() {
            self.path = Some(without_end(text));
        } else if kind.is_gnu_longlink() {
            self.link = Some(without_end(text));
        }
        Ok(true)
    }

    fn take(&mut self, (key, value): (&str, &[u8])) {
        let number = || std::str::from_utf8(value).ok()?.parse().ok();
        match key {
            "path" => self.path = Some(value.to_vec()),
            "linkpath" => self.link = Some(value.to_vec()),
            "uid" => self.owner[0] = number(),
            "gid" => self.owner[1] = number(),
            key if key.starts_with("GNU.sparse.") => self.is_sparse = true,
            "size" => {
                self.size = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            }
            _ => {
                if let Some(name) = key.strip_prefix(ATTRIBUTE_RECORD).filter(|n| is_attribute(n)) {
                    self.attributes.push((name.to_owned(), value.to_vec()));
                }
            }
        }
    }
}

/// Long names end with a zero.
fn without_end(mut name: Vec<u8>) -> Vec<u8> {
    name.pop_if(|last| *last == 0);
    name
}

/// What is said of an entry.
#[derive(Debug)]
struct Said {
    owner: (Uid, Gid),
    mode: Mode,
    time: Timestamps,
    attributes: Vec<Attribute>,
}

impl Said {
    fn of(
        entry: &Entry<'_, impl io::Read>,
        [user, group]: [Option<u32>; 2],
        attributes: Vec<Attribute>,
    ) -> io::Result<Self> {
        let header = entry.header();
        let id = |record: Option<u32>, id: io::Result<u64>| match record {
            Some(record) => Ok(record),
            None => u32::try_from(id?).map_err(io::Error::other),
        };
        let owner =
            (Uid::from_raw(id(user, header.uid())?), Gid::from_raw(id(group, header.gid())?));
        let kind = header.entry_type();
        let has_mode = !kind.is_symlink() && !kind.is_hard_link();
        let mode = if has_mode { header.mode()? } else { 0 };
        // Other programs write times before 1970 as what that is without a sign.
        let seconds = header.mtime().unwrap_or_default().cast_signed();
        let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
        Ok(Self {
            owner,
            mode: Mode::from_raw_mode(mode & 0o7777),
            time: Timestamps { last_access: time, last_modification: time },
            attributes,
        })
    }

    fn default_acl(&self) -> Option<Attribute> {
        self.attributes.iter().find(|(name, _)| name == DEFAULT_ACL).cloned()
    }

    /// Gives a file or directory all of it but what new files in it get.
    fn finish(&self, made: &OwnedFd) -> io::Result<()> {
        let (user, group) = self.owner;
        rustix::fs::fchown(made, Some(user), Some(group))?;
        rustix::fs::fchmod(made, self.mode)?;
        let mut attributes = self.attributes.iter().filter(|(name, _)| name != DEFAULT_ACL);
        attributes.try_for_each(|one| set_attribute(made, one))?;
        Ok(rustix::fs::futimens(made, &self.time)?)
    }
}

/// Notes something that was just made. What somebody else has made is not ours to take away, nor to change.
fn note(made: &Names, path: &Path) {
    let mut names = path.components();
    if let (Some(Component::Normal(name)), None) = (names.next(), names.next()) {
        made.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
    }
}

/// Makes a directory, or takes one that we have made.
fn make_directory(parent: &OwnedFd, path: &Path, made: &Names) -> io::Result<()> {
    let Some(name) = path.file_name() else { return Ok(()) };
    let is_top = path.components().nth(1).is_none();
    match rustix::fs::mkdirat(parent, name, Mode::RWXU | Mode::from_raw_mode(0o055)) {
        Ok(()) => note(made, path),
        Err(Errno::EXIST) if !is_top => {}
        Err(Errno::EXIST) if made.lock().unwrap_or_else(PoisonError::into_inner).contains(name) => {
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Makes what an entry says.
fn unpack(
    (root, made): (&OwnedFd, &Names),
    path: &Path,
    entry: &mut Entry<'_, impl io::Read>,
    (said, link): (&Said, Option<Vec<u8>>),
) -> io::Result<()> {
    let kind = entry.header().entry_type();
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return if kind.is_dir() { said.finish(&open_directory(root, path)?) } else { Ok(()) };
    };
    let parent = make_directories((root, made), parent)?;
    if kind.is_dir() {
        make_directory(&parent, path, made)?;
        said.finish(&open_directory(root, path)?)
    } else if kind.is_symlink() {
        let Some(to) = link else { return Ok(()) };
        rustix::fs::symlinkat(OsStr::from_bytes(&to), &parent, name)?;
        note(made, path);
        own_unopened(&parent, name, said)
    } else if kind.is_hard_link() {
        let Some(first) = link.and_then(|first| below(&first)) else { return Ok(()) };
        let (Some(place), Some(first)) = (first.parent(), first.file_name()) else { return Ok(()) };
        let place = open_directory(root, place)?;
        rustix::fs::linkat(&place, first, &parent, name, AtFlags::empty())?;
        note(made, path);
        Ok(())
    } else if kind.is_fifo() {
        rustix::fs::mknodat(&parent, name, FileType::Fifo, Mode::empty(), 0)?;
        note(made, path);
        own_unopened(&parent, name, said)?;
        permit_pipe(&parent, name, said.mode)
    } else if kind.is_file() || kind.is_contiguous() {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let new = rustix::fs::openat2(&parent, name, flags, Mode::RUSR | Mode::WUSR, WITHIN)?;
        note(made, path);
        let mut file = std::fs::File::from(new);
        io::copy(entry, &mut file)?;
        said.finish(&file.into())
    } else if kind.is_gnu_sparse() {
        Err(io::Error::other("it has a file in GNU tar's form for sparse ones"))
    } else {
        Ok(())
    }
}

/// Gives what is not opened its owner and time.
fn own_unopened(parent: &OwnedFd, name: &OsStr, said: &Said) -> io::Result<()> {
    let ((user, group), links) = (said.owner, AtFlags::SYMLINK_NOFOLLOW);
    rustix::fs::chownat(parent, name, Some(user), Some(group), links)?;
    Ok(rustix::fs::utimensat(parent, name, &said.time, links)?)
}

/// Gives a named pipe its permissions. By its descriptor: there is no call that does so by name and
/// follows no link before Linux 6.6.
fn permit_pipe(parent: &OwnedFd, name: &OsStr, mode: Mode) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let pipe = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&pipe)?.st_mode) != FileType::Fifo {
        return Err(io::Error::other("somebody else has replaced it"));
    }
    Ok(rustix::fs::chmod(format!("/proc/self/fd/{}", pipe.as_raw_fd()), mode)?)
}

/// Returns a path as the names on the way; `None` when it leads elsewhere.
fn below(path: &[u8]) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for part in Path::new(OsStr::from_bytes(path)).components() {
        match part {
            Component::Normal(name) => found.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(found)
}

/// Opens a directory, and makes what is missing on the way: not every archive lists it.
fn make_directories((root, made): (&OwnedFd, &Names), path: &Path) -> io::Result<OwnedFd> {
    match open_directory(root, path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    let mut missing = PathBuf::new();
    let mut parent = open_directory(root, &missing)?;
    for name in path.components() {
        missing.push(name);
        match open_directory(root, &missing) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_directory(&parent, &missing, made)?;
                parent = open_directory(root, &missing)?;
            }
            opened => parent = opened?,
        }
    }
    Ok(parent)
}

fn open_directory(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), WITHIN)?)
}

/// Sets an extended attribute. One that the file system does not take is left out, and so is one of the
/// container's own that is too large for it: a tmpfs takes those of users since Linux 6.6, and ext4 none
/// beyond a block.
fn set_attribute(made: &OwnedFd, (name, value): &Attribute) -> io::Result<()> {
    let too_large = [Errno::NOSPC, Errno::RANGE, Errno::TOOBIG];
    match rustix::fs::fsetxattr(made, &**name, value, XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP) => {}
        Err(error) if name.starts_with("user.") && too_large.contains(&error) => {}
        set => return Ok(set?),
    }
    tracing::warn!(name, "a volume's file system does not take an attribute");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

    use tar::{EntryType, Header};

    use super::*;

    /// Of an attribute: the library's reader of records stops at its line feed.
    const VALUE: &[u8] = b"a\n9 b=c\n";

    /// Adds an entry, with an attribute before it.
    fn add(tar: &mut tar::Builder<Vec<u8>>, kind: EntryType, path: &str, attribute: &str) {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(0o640);
        header.set_uid(rustix::process::geteuid().as_raw().into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header.set_mtime(if kind.is_fifo() { 0 } else { 77 });
        header.set_size(0);
        if !attribute.is_empty() {
            let record = format!("{ATTRIBUTE_RECORD}{attribute}");
            tar.append_pax_extensions([(&*record, VALUE)]).unwrap();
        }
        tar.append_data(&mut header, path, io::empty()).unwrap();
    }

    #[test]
    fn attributes_pipes_and_times_come_back() {
        let top = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        add(&mut tar, EntryType::Directory, "d/", "user.own");
        add(&mut tar, EntryType::Regular, "d/file", "user.own");
        add(&mut tar, EntryType::Fifo, "d/pipe", "");
        add(&mut tar, EntryType::Char, "d/device", "");
        add(&mut tar, EntryType::Regular, "other/unlisted/file", "");
        add(&mut tar, EntryType::Regular, "hidden", "user.overlay.opaque");
        let target = top.path().join("volume");
        let made = Names::default();
        extract(&*tar.into_inner().unwrap(), &target, &made).unwrap();
        assert_eq!(*made.lock().unwrap(), ["d", "hidden", "other"].map(OsString::from).into());
        for name in ["d", "d/file"] {
            let mut value = [0; 32];
            let length = rustix::fs::getxattr(target.join(name), "user.own", &mut value).unwrap();
            assert_eq!(value.get(..length), Some(VALUE), "{name}");
            assert_eq!(fs::metadata(target.join(name)).unwrap().mtime(), 77, "{name}");
        }
        let pipe = fs::metadata(target.join("d/pipe")).unwrap();
        assert!(pipe.file_type().is_fifo());
        assert_eq!((pipe.mode() & 0o7777, pipe.mtime()), (0o640, 0));
        assert!(!target.join("d/device").exists());
        let mut value = [0; 8];
        rustix::fs::getxattr(target.join("hidden"), "user.overlay.opaque", &mut value).unwrap_err();
    }

    /// An access control list with one user more, as the kernel keeps it.
    fn acl() -> Vec<u8> {
        let entries = [
            (1u16, 6u16, u32::MAX),
            (2, 6, 1000),
            (4, 4, u32::MAX),
            (16, 6, u32::MAX),
            (32, 0, u32::MAX),
        ];
        let entry = |(tag, permissions, id): (u16, u16, u32)| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        [&2u32.to_le_bytes()[..], &entries.map(entry).concat()].concat()
    }

    #[test]
    fn what_new_files_get_is_for_new_files() {
        let top = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        let record = format!("{ATTRIBUTE_RECORD}{DEFAULT_ACL}");
        tar.append_pax_extensions([(&*record, &*acl())]).unwrap();
        add(&mut tar, EntryType::Directory, "d/", "");
        add(&mut tar, EntryType::Regular, "d/file", "");
        let target = top.path().join("volume");
        extract(&*tar.into_inner().unwrap(), &target, &Names::default()).unwrap();
        let mut value = [0; 64];
        let has = |name: &str, attribute: &str, value: &mut [u8]| {
            rustix::fs::getxattr(target.join(name), attribute, value)
        };
        match has("d", DEFAULT_ACL, &mut value) {
            Ok(length) => assert_eq!(value.get(..length), Some(&*acl())),
            // Not every file system has them.
            Err(error) => assert_eq!(error, Errno::OPNOTSUPP),
        }
        has("d/file", "system.posix_acl_access", &mut value).unwrap_err();
        fs::write(target.join("d/new"), "").unwrap();
        let is_there = has("d", DEFAULT_ACL, &mut value).is_ok();
        assert_eq!(has("d/new", "system.posix_acl_access", &mut value).is_ok(), is_there);
    }

    #[test]
    fn a_directory_alone_is_bare() {
        let mut tar = tar::Builder::new(Vec::new());
        add(&mut tar, EntryType::Directory, "./", "user.own");
        let bytes = tar.into_inner().unwrap();
        assert!(is_bare(&*bytes).unwrap());
        let mut tar = tar::Builder::new(Vec::new());
        add(&mut tar, EntryType::Directory, "./", "");
        add(&mut tar, EntryType::Regular, "./file", "");
        assert!(!is_bare(&*tar.into_inner().unwrap()).unwrap());
    }

    #[test]
    fn what_other_programs_write_is_read() {
        let top = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        // A long name of GNU tar's, and a time before 1970 as it writes that.
        let long = format!("d/{}", "n".repeat(200));
        let mut header = Header::new_gnu();
        header.set_mode(0o600);
        header.set_uid(rustix::process::geteuid().as_raw().into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header.set_size(4);
        header.as_old_mut().mtime = [255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 246];
        tar.append_data(&mut header, &long, &b"abcd"[..]).unwrap();
        let target = top.path().join("volume");
        extract(&*tar.into_inner().unwrap(), &target, &Names::default()).unwrap();
        assert_eq!(fs::read(target.join(&long)).unwrap(), b"abcd");
        assert_eq!(fs::metadata(target.join(&long)).unwrap().mtime(), -10);
    }

    /// Whoever else has the mount may put a link there while it is filled.
    #[test]
    fn nothing_leads_out_of_the_volume() {
        let top = tempfile::tempdir().unwrap();
        let outside = top.path().join("outside");
        for (kind, path) in [
            (EntryType::Regular, "out/escaped"),
            (EntryType::Directory, "out/escaped"),
            (EntryType::Fifo, "out/escaped"),
            (EntryType::Regular, "out"),
            (EntryType::Directory, "out"),
            (EntryType::Fifo, "out"),
            (EntryType::Regular, "out/deep/escaped"),
        ] {
            let target = top.path().join("volume");
            fs::create_dir_all(&outside).unwrap();
            fs::set_permissions(&outside, std::fs::Permissions::from_mode(0o711)).unwrap();
            fs::create_dir(&target).unwrap();
            std::os::unix::fs::symlink(&outside, target.join("out")).unwrap();
            let mut tar = tar::Builder::new(Vec::new());
            add(&mut tar, kind, path, "user.own");
            extract(&*tar.into_inner().unwrap(), &target, &Names::default()).unwrap_err();
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{kind:?} {path}");
            assert_eq!(fs::metadata(&outside).unwrap().mode() & 0o7777, 0o711);
            fs::remove_dir_all(target).unwrap();
        }
    }

    #[test]
    fn what_somebody_else_has_made_is_not_taken_over() {
        let top = tempfile::tempdir().unwrap();
        for kind in [EntryType::Regular, EntryType::Directory, EntryType::Fifo] {
            let target = top.path().join(format!("volume-{kind:?}"));
            fs::create_dir_all(target.join("theirs")).unwrap();
            fs::set_permissions(target.join("theirs"), std::fs::Permissions::from_mode(0o711))
                .unwrap();
            let mut tar = tar::Builder::new(Vec::new());
            add(&mut tar, EntryType::Directory, "ours/", "");
            add(&mut tar, EntryType::Directory, "ours/", "");
            add(&mut tar, kind, "theirs", "user.own");
            let made = Names::default();
            extract(&*tar.into_inner().unwrap(), &target, &made).unwrap_err();
            assert_eq!(*made.lock().unwrap(), [OsString::from("ours")].into(), "{kind:?}");
            assert_eq!(fs::metadata(target.join("theirs")).unwrap().mode() & 0o7777, 0o711);
        }
    }

    #[test]
    fn links_lead_where_they_led() {
        let top = tempfile::tempdir().unwrap();
        fs::write(top.path().join("secret"), "").unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        add(&mut tar, EntryType::Regular, "d/file", "");
        let link = |kind, path: &str, to: &str, tar: &mut tar::Builder<Vec<u8>>| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(0);
            header.set_uid(rustix::process::geteuid().as_raw().into());
            header.set_gid(rustix::process::getegid().as_raw().into());
            tar.append_link(&mut header, path, to).unwrap();
        };
        link(EntryType::Symlink, "to", "../secret", &mut tar);
        link(EntryType::Link, "again", "d/file", &mut tar);
        let bytes = tar.get_ref().clone();
        let target = top.path().join("volume");
        extract(&*bytes, &target, &Names::default()).unwrap();
        assert_eq!(fs::read_link(target.join("to")).unwrap(), Path::new("../secret"));
        let inode = |name: &str| fs::symlink_metadata(target.join(name)).unwrap().ino();
        assert_eq!(inode("again"), inode("d/file"));
        // One to what a link leads to is one to the link, and one through a link is none.
        link(EntryType::Link, "escaped", "to", &mut tar);
        link(EntryType::Symlink, "up", "..", &mut tar);
        link(EntryType::Link, "escaped-too", "up/secret", &mut tar);
        let target = top.path().join("other");
        extract(&*tar.into_inner().unwrap(), &target, &Names::default()).unwrap_err();
        let escaped = fs::symlink_metadata(target.join("escaped")).unwrap();
        assert!(escaped.is_symlink() && !target.join("escaped-too").exists());
    }
}
