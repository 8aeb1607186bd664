//! The tar of a captured mount becomes a directory: one of ours, or of another program's archive.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use tar::{Entry, Header};

use crate::layer::is_attribute;
use crate::stage;

/// What the records of a tar call an extended attribute.
const ATTRIBUTE: &str = "SCHILY.xattr.";

/// No link leads out of what is unpacked.
const WITHIN: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// Unpacks everything but devices and sockets; nothing leads out of `target`.
pub(super) fn extract(bytes: impl io::Read, target: &Path) -> io::Result<()> {
    stage::make(target)?;
    // As containerd makes its own /dev/shm.
    fs::set_permissions(target, std::fs::Permissions::from_mode(0o1777))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, target, flags, Mode::empty())?;
    let mut archive = tar::Archive::new(bytes);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let Some(path) = below(&entry.path()?) else { continue };
        if kind.is_dir() {
            // What is put into it changes its time.
            directories.push((path.clone(), times(entry.header())?));
        }
        let is_top = path.as_os_str().is_empty();
        if kind.is_dir() && is_top {
            own(&root, entry.header())?;
        } else if kind.is_fifo() && !is_top {
            pipe(&root, &path, entry.header())?;
        } else if !(kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link())
            || !entry.unpack_in(target)?
        {
            continue;
        }
        if kind.is_file() || kind.is_dir() {
            let made = open(&root, &path)?;
            set_attributes(&made, &mut entry)?;
            rustix::fs::futimens(&made, &times(entry.header())?)?;
        }
    }
    // To its end, where the digest is compared.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    for (path, times) in directories.iter().rev() {
        rustix::fs::futimens(open(&root, path)?, times)?;
    }
    Ok(())
}

/// Returns a path as the names on the way; `None` when it leads elsewhere.
fn below(path: &Path) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => found.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(found)
}

/// Opens a file or directory that was made.
fn open(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), WITHIN)?)
}

fn owner(header: &Header) -> io::Result<(Uid, Gid)> {
    let id = |id: u64| u32::try_from(id).map_err(io::Error::other);
    Ok((Uid::from_raw(id(header.uid()?)?), Gid::from_raw(id(header.gid()?)?)))
}

fn mode(header: &Header) -> io::Result<Mode> {
    Ok(Mode::from_raw_mode(header.mode()? & 0o7777))
}

fn times(header: &Header) -> io::Result<Timestamps> {
    let seconds = i64::try_from(header.mtime()?).map_err(io::Error::other)?;
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Ok(Timestamps { last_access: time, last_modification: time })
}

/// Gives a volume's own directory the owner and the permissions that it had.
fn own(root: &OwnedFd, header: &Header) -> io::Result<()> {
    let (user, group) = owner(header)?;
    rustix::fs::fchown(root, Some(user), Some(group))?;
    Ok(rustix::fs::fchmod(root, mode(header)?)?)
}

/// Makes a named pipe, which a process may have open.
fn pipe(root: &OwnedFd, path: &Path, header: &Header) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let parent = open(root, parent)?;
    rustix::fs::mknodat(&parent, name, FileType::Fifo, Mode::empty(), 0)?;
    let (user, group) = owner(header)?;
    let (links, none) = (AtFlags::SYMLINK_NOFOLLOW, AtFlags::empty());
    rustix::fs::chownat(&parent, name, Some(user), Some(group), links)?;
    // Just made in a directory that nobody else sees yet: it is no link.
    rustix::fs::chmodat(&parent, name, mode(header)?, none)?;
    Ok(rustix::fs::utimensat(&parent, name, &times(header)?, links)?)
}

/// Gives a file or directory its extended attributes. One that the file system does not take is left
/// out: a tmpfs takes those of users since Linux 6.6.
fn set_attributes(made: &OwnedFd, entry: &mut Entry<'_, impl io::Read>) -> io::Result<()> {
    let Some(records) = entry.pax_extensions()? else { return Ok(()) };
    for record in records {
        let record = record?;
        let name = record.key().ok().and_then(|key| key.strip_prefix(ATTRIBUTE));
        let Some(name) = name.filter(|name| is_attribute(name)) else { continue };
        match rustix::fs::fsetxattr(made, name, record.value_bytes(), XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                tracing::warn!(name, "a volume's file system does not take an attribute");
            }
            set => set?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

    use tar::EntryType;

    use super::*;

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
            let record = format!("{ATTRIBUTE}{attribute}");
            tar.append_pax_extensions([(&*record, &b"value"[..])]).unwrap();
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
        add(&mut tar, EntryType::Regular, "hidden", "user.overlay.opaque");
        let target = top.path().join("volume");
        extract(&*tar.into_inner().unwrap(), &target).unwrap();
        for name in ["d", "d/file"] {
            let mut value = [0; 8];
            let length = rustix::fs::getxattr(target.join(name), "user.own", &mut value).unwrap();
            assert_eq!(value.get(..length), Some(&b"value"[..]), "{name}");
            assert_eq!(fs::metadata(target.join(name)).unwrap().mtime(), 77, "{name}");
        }
        let pipe = fs::metadata(target.join("d/pipe")).unwrap();
        assert!(pipe.file_type().is_fifo());
        assert_eq!((pipe.mode() & 0o7777, pipe.mtime()), (0o640, 0));
        assert!(!target.join("d/device").exists());
        let mut value = [0; 8];
        rustix::fs::getxattr(target.join("hidden"), "user.overlay.opaque", &mut value).unwrap_err();
    }

    #[test]
    fn nothing_leads_out_of_the_volume() {
        let top = tempfile::tempdir().unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        let mut link = Header::new_gnu();
        link.set_entry_type(EntryType::Symlink);
        link.set_size(0);
        link.set_uid(0);
        builder.append_link(&mut link, "out", top.path()).unwrap();
        let mut file = Header::new_gnu();
        file.set_size(1);
        file.set_mode(0o644);
        builder.append_data(&mut file.clone(), "out/escaped", &b"x"[..]).unwrap();
        builder.append_data(&mut file, "kept", &b"y"[..]).unwrap();
        let tar = builder.into_inner().unwrap();

        let target = top.path().join("volume");
        // Either way out is fine, as long as nothing escapes.
        let _outcome = extract(&*tar, &target);
        assert!(!top.path().join("escaped").exists());

        let mut builder = tar::Builder::new(Vec::new());
        builder.append_link(&mut link, "out", top.path()).unwrap();
        add(&mut builder, EntryType::Fifo, "out/escaped", "");
        let target = top.path().join("other");
        extract(&*builder.into_inner().unwrap(), &target).unwrap_err();
        assert!(!top.path().join("escaped").exists());
    }
}
