//! What was copied before the container is frozen: files that nobody writes to.
//!
//! A file that was not written to since has the same time of its last change (`st_ctime`, which
//! nobody can set), and then the copy is its content. That holds only if every write of before has
//! ended when the copying begins, and if every later one changes that time ([`Since`]):
//!
//! ```text
//!  write ─────┐                          ┌─ a write that changes the time: copied anew, while frozen
//!  ═══════════╪═══ everybody stands ═════╪═══════════════════════╪══════════
//!             └ ends before              copying …               frozen: the times are compared
//! ```

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Stat};

use super::spool::{Shared, Spool};
use super::{
    ATTRIBUTE_BYTES_MAX, Attributes, CaptureError, DEPTH_MAX, Tree, attributes, names,
    open_directory, open_only_file,
};

/// Smaller files are read while the container is frozen: finding them again costs nearly as much.
const FILE_BYTES_MIN: u64 = 32 << 10;

/// Files that are remembered: some 200 bytes each.
const FILES_MAX: usize = 100_000;

/// Bytes of a file's attributes that are remembered: capabilities and access lists have some hundred,
/// and whoever writes to the container may give each file 64 KiB of them.
const ATTRIBUTE_BYTES_KEPT: usize = 1 << 10;

/// What is looked at: a container that runs can make files as fast as they are looked at.
const ENTRIES_MAX: usize = 4_000_000;

/// How coarse the time of a change may be: a tick of the kernel is 10 ms at most.
const TICK: Duration = Duration::from_millis(100);

/// File systems that note the time when a shared mapping is first written to, too (their
/// `page_mkwrite`); a tmpfs does not. ext2 to ext4, XFS, Btrfs (`linux/magic.h`).
const NOTING: [u64; 3] = [0xef53, 0x5846_5342, 0x9123_683e];

/// The moment from which on every change of a file can be told.
#[derive(Clone, Debug)]
pub(crate) struct Since {
    /// A moment at which no system call of the container was under way, or before.
    pub(crate) moment: SystemTime,
    /// Names of files that were mapped then: what is written through such a mapping need not
    /// change a time.
    pub(crate) mapped: HashSet<OsString>,
}

/// Copies of files, in one file.
#[derive(Debug)]
pub(crate) struct Draft {
    path: Arc<Path>,
    copies: HashMap<(u64, u64), Copy>,
}

#[derive(Debug)]
struct Copy {
    version: Version,
    /// Where it begins.
    from: u64,
    attributes: Attributes,
}

/// What tells one content of a file from a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    bytes: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    fn of(stat: &Stat) -> Self {
        let nanoseconds = |part: u64| i64::try_from(part).unwrap_or(i64::MAX);
        Self {
            bytes: stat.st_size,
            modified: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
            changed: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
        }
    }

    /// Whether it is as it was before a moment, and a tick more. Small inodes (ext2, ext3, and ext4
    /// that was made so) have whole seconds, and within that one every change has the same time.
    fn is_before(&self, moment: SystemTime) -> bool {
        let Ok(moment) = moment.duration_since(UNIX_EPOCH) else { return false };
        let moment = moment.saturating_sub(TICK);
        let before = i64::try_from(moment.as_secs()).unwrap_or(i64::MAX);
        let (seconds, nanoseconds) = self.changed;
        let last = seconds.saturating_add(i64::from(nanoseconds == 0));
        (last, nanoseconds) < (before, i64::from(moment.subsec_nanos()))
    }
}

impl Draft {
    /// Whether changes of files in a directory can be told.
    pub(crate) fn is_possible(directory: &Path) -> bool {
        let kind = rustix::fs::statfs(directory).map(|found| u64::try_from(found.f_type));
        kind.is_ok_and(|kind| kind.is_ok_and(|kind| NOTING.contains(&kind)))
    }

    /// Copies what of `directory` has not changed since a while to a new file, as far as it fits into
    /// so many bytes. Ends early when `stop` is set.
    pub(crate) fn copy(
        directory: &Path,
        since: &Since,
        to: &Path,
        bytes_max: u64,
        stop: &AtomicBool,
    ) -> Result<Self, CaptureError> {
        let at = |path: &Path, source| CaptureError { path: path.to_owned(), source };
        let shared = Shared::create(to, stop).map_err(|error| at(to, error))?;
        let root = open_directory(rustix::fs::CWD, directory.as_os_str());
        let root = root.map_err(|error| at(directory, error))?;
        let copied = std::thread::scope(|scope| {
            let mut walk = Walk {
                out: Spool::new(scope, &shared),
                since,
                copies: HashMap::new(),
                entries: 0,
                bytes_max,
                scratch: vec![0; ATTRIBUTE_BYTES_MAX],
                place: PathBuf::new(),
            };
            let done = walk.directory(&root, 0).and_then(|()| walk.out.finish());
            done.map(|_| walk.copies).map_err(|error| {
                shared.give_up();
                at(&directory.join(&walk.place), error)
            })
        });
        match shared.failure() {
            Some(CaptureError { path, source }) => Err(at(&directory.join(path), source)),
            None => copied.map(|copies| Self { path: to.into(), copies }),
        }
    }

    /// The file that the copies are in.
    pub(super) const fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Returns where the content of a file is, and its attributes; `None` when it was not copied, or
    /// may have changed since.
    pub(super) fn content(&self, stat: &Stat) -> Option<(u64, &Attributes)> {
        let copy = self.copies.get(&(stat.st_dev, stat.st_ino))?;
        (copy.version == Version::of(stat)).then_some((copy.from, &copy.attributes))
    }

    /// How many files there are.
    pub(crate) fn files(&self) -> usize {
        self.copies.len()
    }
}

struct Walk<'scope, 'env> {
    out: Spool<'scope, 'env>,
    since: &'env Since,
    copies: HashMap<(u64, u64), Copy>,
    entries: usize,
    bytes_max: u64,
    scratch: Vec<u8>,
    /// Where we are, from the top.
    place: PathBuf,
}

impl Walk<'_, '_> {
    /// Copies what can be copied. The container runs: what is gone, or something else by now, is left
    /// for later.
    fn directory(&mut self, directory: &OwnedFd, depth: usize) -> io::Result<()> {
        let Ok(names) = names(directory) else { return Ok(()) };
        for name in names {
            self.entries += 1;
            let is_full = self.entries > ENTRIES_MAX || self.copies.len() >= FILES_MAX;
            let Ok(name) = name else { return Ok(()) };
            if is_full || depth > DEPTH_MAX {
                return Ok(());
            }
            self.out.check()?;
            self.place.push(OsStr::from_bytes(name.to_bytes()));
            self.entry(directory, &name, depth)?;
            self.place.pop();
        }
        Ok(())
    }

    fn entry(&mut self, parent: &OwnedFd, name: &CStr, depth: usize) -> io::Result<()> {
        let Ok(stat) = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(());
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let directory = open_directory(parent, OsStr::from_bytes(name.to_bytes()));
                directory.map_or(Ok(()), |directory| self.directory(&directory, depth + 1))
            }
            FileType::RegularFile if self.is_worthwhile(name, &stat) => {
                open_only_file(parent, name).map_or(Ok(()), |file| self.file(file, name))
            }
            _ => Ok(()),
        }
    }

    fn file(&mut self, file: OwnedFd, name: &CStr) -> io::Result<()> {
        // Of what was opened: the name may be another one's by now. And before it is read.
        let Ok(stat) = rustix::fs::fstat(&file) else { return Ok(()) };
        let Ok(attributes) = attributes(&file, Tree::Upper, &mut self.scratch) else {
            return Ok(());
        };
        let remembered: usize = attributes.iter().map(|(key, value)| key.len() + value.len()).sum();
        if remembered > ATTRIBUTE_BYTES_KEPT || !self.is_worthwhile(name, &stat) {
            return Ok(());
        }
        let from = self.out.position();
        let bytes = u64::try_from(stat.st_size).map_err(io::Error::other)?;
        self.out.content(File::from(file), bytes, &self.place)?;
        let copy = Copy { version: Version::of(&stat), from, attributes };
        self.copies.insert((stat.st_dev, stat.st_ino), copy);
        Ok(())
    }

    /// Whether a file is large enough, has room, and would be told when it changes.
    fn is_worthwhile(&self, name: &CStr, stat: &Stat) -> bool {
        let bytes = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        let end = self.out.position().saturating_add(bytes);
        bytes >= FILE_BYTES_MIN
            && end <= self.bytes_max
            // By another name it may be mapped.
            && stat.st_nlink == 1
            && Version::of(stat).is_before(self.since.moment)
            && !self.since.mapped.contains(OsStr::from_bytes(name.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    use fs_err as fs;

    use super::super::capture;
    use super::*;

    const LENGTH: usize = 200 << 10;

    /// As if everything had been written long before.
    fn now() -> Since {
        let moment = SystemTime::now() + Duration::from_hours(1);
        Since { moment, mapped: HashSet::new() }
    }

    fn draft(top: &Path, since: &Since, to: &Path, bytes_max: u64) -> Draft {
        Draft::copy(top, since, to, bytes_max, &AtomicBool::new(false)).unwrap()
    }

    fn content<'a>(draft: &'a Draft, path: &Path) -> Option<(u64, &'a Attributes)> {
        draft.content(&rustix::fs::lstat(path).unwrap())
    }

    /// Does something to a file until the kernel's clock has moved on.
    fn change(path: &Path, mut how: impl FnMut()) {
        let time = || fs::metadata(path).map(|found| (found.ctime(), found.ctime_nsec())).ok();
        let before = time();
        while time() == before {
            how();
        }
    }

    fn tar(top: &Path, draft: Option<&Draft>) -> Vec<u8> {
        let out = tempfile::tempdir().unwrap();
        let to = out.path().join("tar");
        let stop = AtomicBool::new(false);
        let pieces = capture(top, Tree::Upper, draft, &to, &stop).unwrap();
        let mut bytes = Vec::new();
        pieces.open().unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_has_changed_since_is_copied_anew_and_the_tar_is_the_same() {
        let scratch = tempfile::tempdir().unwrap();
        let top = scratch.path().join("top");
        fs::create_dir_all(top.join("within")).unwrap();
        let path = |name: &str| top.join(name);
        let names =
            ["appended", "cut", "deleted", "kept", "noted", "replaced", "within/kept", "written"];
        for (name, byte) in names.into_iter().zip(b'a'..) {
            fs::write(path(name), vec![byte; LENGTH]).unwrap();
        }
        let copies = scratch.path().join("draft");
        let draft = draft(&top, &now(), &copies, 1 << 30);
        assert_eq!(draft.files(), names.len());

        let written = fs::File::options().write(true).open(path("written")).unwrap();
        let modified = written.metadata().unwrap().modified().unwrap();
        change(&path("written"), || {
            written.file().write_all_at(b"new", 100_000).unwrap();
            // Whoever wants to may set this one back.
            written.set_modified(modified).unwrap();
        });
        let long = fs::File::options().write(true).open(path("appended")).unwrap();
        change(&path("appended"), || {
            long.file().write_all_at(b"more", LENGTH.try_into().unwrap()).unwrap();
        });
        let short = fs::File::options().write(true).open(path("cut")).unwrap();
        change(&path("cut"), || short.set_len(40_000).unwrap());
        let flags = rustix::fs::XattrFlags::empty();
        change(&path("noted"), || {
            // Where there are no attributes, the permissions change.
            let noted = rustix::fs::setxattr(path("noted"), "user.note", b"n", flags);
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            noted.unwrap_or_else(|_| fs::set_permissions(path("noted"), mode).unwrap());
        });
        fs::remove_file(path("deleted")).unwrap();
        fs::write(path("new"), vec![b'z'; LENGTH]).unwrap();
        fs::write(path("other"), vec![b'y'; LENGTH]).unwrap();
        fs::rename(path("other"), path("replaced")).unwrap();
        fs::rename(path("within/kept"), path("within/moved")).unwrap();

        assert!(content(&draft, &path("kept")).is_some());
        for name in ["appended", "cut", "new", "noted", "replaced", "written"] {
            assert!(content(&draft, &path(name)).is_none(), "{name}");
        }
        assert!(tar(&top, Some(&draft)) == tar(&top, None));
        // It is the draft that was read.
        let (from, _) = content(&draft, &path("kept")).unwrap();
        fs::File::options()
            .write(true)
            .open(&copies)
            .unwrap()
            .file()
            .write_all_at(b"!", from)
            .unwrap();
        assert!(tar(&top, Some(&draft)) != tar(&top, None));
    }

    #[test]
    fn what_could_change_without_being_told_is_left_for_later() {
        let scratch = tempfile::tempdir().unwrap();
        let top = scratch.path().join("top");
        fs::create_dir(&top).unwrap();
        for name in ["alone", "linked", "mapped"] {
            fs::write(top.join(name), vec![7; LENGTH]).unwrap();
        }
        fs::hard_link(top.join("linked"), top.join("link")).unwrap();
        fs::write(top.join("small"), [7; 4096]).unwrap();
        std::os::unix::fs::symlink("alone", top.join("symlink")).unwrap();
        let files = |since: &Since, bytes_max: u64, name: &str| {
            let draft = draft(&top, since, &scratch.path().join(name), bytes_max);
            let found: Vec<_> = ["alone", "link", "linked", "mapped", "small", "symlink"]
                .into_iter()
                .filter(|name| content(&draft, &top.join(name)).is_some())
                .collect();
            assert_eq!(found.len(), draft.files());
            found
        };
        let mapped = HashSet::from(["mapped".into()]);
        assert_eq!(files(&Since { mapped, ..now() }, 1 << 30, "1"), ["alone"]);
        assert_eq!(files(&now(), 1 << 30, "2"), ["alone", "mapped"]);
        assert_eq!(files(&now(), 100, "3"), [""; 0]);
        // Written just now: the next write might be of the same tick.
        let since = Since { moment: SystemTime::now(), mapped: HashSet::new() };
        assert_eq!(files(&since, 1 << 30, "4"), [""; 0]);
        assert_eq!(files(&Since { moment: UNIX_EPOCH, ..since }, 1 << 30, "5"), [""; 0]);
    }

    #[test]
    fn a_change_of_the_same_second_counts_where_times_have_whole_seconds() {
        let at = |changed| Version { bytes: 0, modified: (0, 0), changed };
        let moment = |milliseconds| UNIX_EPOCH + Duration::from_millis(milliseconds);
        assert!(at((10, 1)).is_before(moment(10_101)));
        assert!(!at((10, 1)).is_before(moment(10_100)));
        assert!(!at((10, 0)).is_before(moment(11_100)));
        assert!(at((10, 0)).is_before(moment(11_101)));
    }

    #[test]
    fn many_attributes_are_not_remembered() {
        let scratch = tempfile::tempdir().unwrap();
        let top = scratch.path().join("top");
        fs::create_dir(&top).unwrap();
        let flags = rustix::fs::XattrFlags::empty();
        for (name, bytes) in [("few", 500), ("many", 2_000)] {
            fs::write(top.join(name), vec![7; LENGTH]).unwrap();
            let set = rustix::fs::setxattr(top.join(name), "user.note", &vec![b'n'; bytes], flags);
            if set.is_err() {
                println!("skipped: there are no attributes here");
                return;
            }
        }
        let draft = draft(&top, &now(), &scratch.path().join("draft"), 1 << 30);
        assert!(content(&draft, &top.join("few")).is_some());
        assert!(content(&draft, &top.join("many")).is_none());
    }

    #[test]
    fn it_stops_when_told() {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("file"), vec![7; LENGTH]).unwrap();
        let to = scratch.path().join("draft");
        let stopped = Draft::copy(scratch.path(), &now(), &to, 1 << 30, &AtomicBool::new(true));
        stopped.unwrap_err();
    }
}
