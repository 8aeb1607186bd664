//! Files that processes hold by a name which was deleted. CRIU keeps one without any name as a copy. One
//! that has another name it keeps by a name of its own (criu(8), `--link-remap`), which it makes beside
//! the deleted one while it dumps and takes away in the end: `link_remap.NUMBER`.
//!
//! On an overlay, a file of a lower layer seems to have its name still when that is gone. CRIU finds out
//! when it tries, which it has to be told to, and keeps a copy.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use fs_err as fs;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags, open, openat,
    openat2, statat, statx, unlinkat,
};
use rustix::io::Errno;

use crate::cgroup::Freezer;
use crate::process::field;

/// The option that lets CRIU make such names.
pub(crate) const OPTION: &str = "link-remap";

/// How the names begin that CRIU makes; a number follows.
const MARK: &str = "link_remap.";

/// What the kernel adds to a name that was deleted.
const DELETED: &str = " (deleted)";

/// How long whoever is to run waits until such names are taken away.
const CLEAR_LIMIT: Duration = Duration::from_secs(2);

/// Files that are looked at, of one process.
const HELD_MAX: usize = 100_000;

/// Directories within directories, and entries, that are looked into for another name.
const DEPTH_MAX: usize = 512;
const ENTRIES_MAX: usize = 16_000_000;

/// A file that is held by a name which was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) how: How,
    /// Its name in the container, when it had it.
    pub(crate) name: String,
    /// The mount it was opened on.
    pub(crate) mount: Option<u64>,
    pub(crate) file: FileId,
    pub(crate) length: u64,
    /// How many names it has, as far as it tells.
    pub(crate) links: u64,
    pub(crate) stamp: Stamp,
    /// Whether one of them was found where it was looked for.
    pub(crate) named: bool,
}

/// What holds a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    Descriptor(u32),
    Mapping,
}

/// Which file it is, on its mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// By what a file is known in an overlay and in its upper directory, where its numbers may be others:
/// those of the lower layer's file that it was copied from, and of the overlay's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stamp {
    mode: u32,
    length: u64,
    changed: (i64, i64),
    written: (i64, i64),
}

impl FileId {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

impl Stamp {
    fn of(stat: &Stat) -> Self {
        let nanoseconds = |number: u64| i64::try_from(number).unwrap_or_default();
        Self {
            mode: stat.st_mode,
            length: u64::try_from(stat.st_size).unwrap_or_default(),
            changed: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
            written: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
        }
    }
}

impl Held {
    /// Returns its key for [`by_inode`].
    pub(crate) const fn inode(&self) -> (u64, u32, u64) {
        (self.file.inode, self.stamp.mode, self.links)
    }

    pub(crate) const fn is_directory(&self) -> bool {
        matches!(FileType::from_raw_mode(self.stamp.mode), FileType::Directory)
    }
}

impl std::fmt::Display for How {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Descriptor(number) => write!(f, "descriptor {number}"),
            Self::Mapping => write!(f, "a mapping"),
        }
    }
}

/// Returns what a process holds so, by descriptors and mappings; `process` is its directory in a proc(5).
/// What goes away meanwhile is passed over.
pub(crate) fn held(process: &Path) -> Vec<Held> {
    let mut found = Vec::new();
    let descriptors = fs::read_dir(process.join("fd")).ok().into_iter().flatten();
    for entry in descriptors.filter_map(Result::ok).take(HELD_MAX) {
        let number: Option<u32> = entry.file_name().to_str().and_then(|number| number.parse().ok());
        let Some(number) = number else { continue };
        let info = process.join("fdinfo").join(number.to_string());
        let mount = || field(&fs::read_to_string(info).ok()?, "mnt_id:")?.parse().ok();
        found.extend(look(&entry.path(), How::Descriptor(number), mount));
    }
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    let lines = maps.split(|byte| *byte == b'\n').filter(|line| line.ends_with(DELETED.as_bytes()));
    let mut seen = BTreeSet::new();
    for line in lines.take(HELD_MAX) {
        let range = line.split(|byte| *byte == b' ').next().and_then(unpadded);
        let Some(range) = range else { continue };
        let link = process.join("map_files").join(range);
        let mount =
            || Some(statx(CWD, &link, AtFlags::empty(), StatxFlags::MNT_ID).ok()?.stx_mnt_id);
        let mapped = look(&link, How::Mapping, mount);
        // A program's parts are mapped one by one.
        found.extend(mapped.filter(|held| seen.insert((held.name.clone(), held.file))));
    }
    found.sort_by_key(|held| held.how);
    found
}

fn look(link: &Path, how: How, mount: impl FnOnce() -> Option<u64>) -> Option<Held> {
    let target = fs::read_link(link).ok()?.to_string_lossy().into_owned();
    let name = target.strip_suffix(DELETED).filter(|name| name.starts_with('/'))?;
    // Follows the link, which leads into the container without looking its path up here.
    let stat = rustix::fs::stat(link).ok()?;
    Some(Held {
        how,
        name: name.to_owned(),
        mount: mount(),
        file: FileId::of(&stat),
        length: u64::try_from(stat.st_size).unwrap_or_default(),
        links: stat.st_nlink,
        stamp: Stamp::of(&stat),
        named: false,
    })
}

/// Writes a range of addresses as `map_files` does: without zeros before them.
pub(crate) fn unpadded(range: &[u8]) -> Option<String> {
    let (from, to) = std::str::from_utf8(range).ok()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(format!("{:x}-{:x}", number(from)?, number(to)?))
}

/// Whether a name is one that CRIU makes, and returns its number.
pub(crate) fn number(name: &str) -> Option<u32> {
    let number = name.strip_prefix(MARK)?.parse().ok()?;
    (name == format!("{MARK}{number}")).then_some(number)
}

/// Returns whose names are in a directory or below it, as `key` tells files apart.
pub(crate) fn named<K: Ord>(
    directory: &Path,
    wanted: &BTreeSet<K>,
    key: impl Fn(&Stat) -> K,
) -> BTreeSet<K> {
    let mut search = Search { wanted, key, found: BTreeSet::new(), entries: 0 };
    if !wanted.is_empty()
        && let Ok(top) = open(directory, DIRECTORY, Mode::empty())
    {
        search.directory(&top, 0);
    }
    search.found
}

/// Returns a file's key in [`named`] where its numbers are its own.
pub(crate) fn by_number(stat: &Stat) -> FileId {
    FileId::of(stat)
}

/// The same in the upper directory of an overlay, for a file that nobody writes to.
pub(crate) fn by_stamp(stat: &Stat) -> Stamp {
    Stamp::of(stat)
}

/// The same for one that was made there: inode, mode and how many names it has.
pub(crate) fn by_inode(stat: &Stat) -> (u64, u32, u64) {
    (stat.st_ino, stat.st_mode, stat.st_nlink)
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Search<'a, K, F> {
    wanted: &'a BTreeSet<K>,
    key: F,
    found: BTreeSet<K>,
    entries: usize,
}

impl<K: Ord, F: Fn(&Stat) -> K> Search<'_, K, F> {
    fn directory(&mut self, directory: &OwnedFd, depth: usize) {
        let Ok(entries) = Dir::read_from(directory) else { return };
        for entry in entries.map_while(Result::ok) {
            let name = entry.file_name();
            if self.entries >= ENTRIES_MAX || self.found.len() == self.wanted.len() {
                return;
            }
            if !matches!(name.to_bytes(), b"." | b"..") {
                self.entries += 1;
                self.entry(directory, name, depth);
            }
        }
    }

    fn entry(&mut self, parent: &OwnedFd, name: &CStr, depth: usize) {
        let Ok(stat) = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            let key = (self.key)(&stat);
            if self.wanted.contains(&key) {
                self.found.insert(key);
            }
        } else if depth < DEPTH_MAX
            && let Ok(below) = openat(parent, name, DIRECTORY, Mode::empty())
        {
            self.directory(&below, depth + 1);
        }
    }
}

/// Removes what a CRIU that was killed has left in the files of a container, whose processes stand still
/// or go on. What fails is told, and keeps nobody from running.
pub(crate) async fn clear(freezer: &Freezer) {
    let freezer = freezer.clone();
    let removed =
        tokio::task::spawn_blocking(move || remove_left(Path::new("/proc"), &freezer.processes()?));
    // A file may be on a file system that does not answer.
    let Ok(removed) = tokio::time::timeout(CLEAR_LIMIT, removed).await else {
        tracing::warn!("names that CRIU made may be left: looking for them takes too long");
        return;
    };
    match removed.map_err(io::Error::other).and_then(|removed| removed) {
        Ok(0) => {}
        Ok(removed) => tracing::warn!(removed, "removed names of a CRIU that did not end well"),
        Err(error) => tracing::warn!(%error, "failed to remove names that CRIU made"),
    }
}

/// Removes the names that a CRIU which was killed has left in the files of processes: those that it gives
/// to what they hold by a deleted name, where it makes them. Returns how many there were.
pub(crate) fn remove_left(proc: &Path, pids: &[u32]) -> io::Result<usize> {
    let (mut seen, mut removed, mut failed) = (BTreeSet::new(), 0, Ok(()));
    for pid in pids {
        let process = proc.join(pid.to_string());
        for held in held(&process).into_iter().filter(|held| held.links > 0) {
            if seen.insert((held.name.clone(), held.file)) {
                match remove_names(&process, &held) {
                    Ok(names) => removed += names,
                    Err(error) => failed = Err(error),
                }
            }
        }
    }
    failed.map(|()| removed)
}

fn remove_names(process: &Path, held: &Held) -> io::Result<usize> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = match open(process.join("root"), flags, Mode::empty()) {
        // It has ended.
        Err(Errno::NOENT | Errno::SRCH) => return Ok(0),
        root => root?,
    };
    // CRIU takes the first that is there.
    let Some(directory) = Path::new(&held.name).ancestors().skip(1).find_map(|directory| {
        let inside = directory.strip_prefix("/").ok()?;
        let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
        let resolve =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&root, inside, DIRECTORY, Mode::empty(), resolve).ok()
    }) else {
        return Ok(0);
    };
    let mut removed = 0;
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_str().ok().and_then(number).is_none() {
            continue;
        }
        let is_its = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileId::of(&stat) == held.file);
        if is_its {
            unlinkat(&directory, name, AtFlags::empty())?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests;
