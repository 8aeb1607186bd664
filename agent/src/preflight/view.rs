//! What /proc tells about the processes of a container. Everything is bounded, and whatever goes
//! away while it is looked at is passed over: a process that has ended is in nobody's way.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use rustix::fs::OFlags;

use super::socket::{self, Sockets};
use crate::links::{self, Held};
use crate::mounts::Mount;
use crate::process::field;

/// Processes looked at. A container with more is dumped all the same.
const PROCESSES_MAX: usize = 4096;

/// Descriptors looked at, of all processes together.
const FILES_MAX: usize = 100_000;

/// How many CRIU's code in a process opens there at a time: with three descriptors to spare neither 4.1 nor
/// 4.2 dumps it, with four both do.
const CRIU_FILES: u64 = 4;

/// Mounts looked at, of all mount namespaces together; a container has some thirty.
const MOUNTS_MAX: usize = 20_000;

/// Bytes read of one file of /proc: ten thousand sockets take a megabyte and a half.
const BYTES_MAX: u64 = 8 << 20;

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct View {
    /// The container's first process.
    pub(super) init: u32,
    pub(super) processes: Vec<Process>,
    /// Sockets of the container's network namespaces.
    pub(super) sockets: Sockets,
    /// What could not be looked at, for people.
    pub(super) missed: Vec<String>,
}

/// One process.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) parent: u32,
    /// What its `ns` links say, by kind.
    pub(super) namespaces: BTreeMap<&'static str, String>,
    /// In how many PID namespaces it has an id.
    pub(super) depth: usize,
    /// Whether one of its user and group ids is not root's.
    pub(super) foreign: bool,
    pub(super) traced: bool,
    /// Whether its first thread has ended and others have not.
    pub(super) headless: bool,
    /// Whether a signal has stopped it.
    pub(super) stopped: bool,
    /// Files that it has, by names that are not UTF-8.
    pub(super) odd: Vec<String>,
    /// Whether a mapping is of `memfd_secret(2)`.
    pub(super) secret: bool,
    /// Whether it has the code of a killed CRIU.
    pub(super) infected: bool,
    /// Whether it has guard pages that its CRIU does not know.
    pub(super) guarded: bool,
    /// Those of its mount namespace, with the first process that is in it.
    pub(super) mounts: Vec<Mount>,
    pub(super) files: Vec<OpenFile>,
    /// What it holds by names that were deleted.
    pub(super) held: Vec<Held>,
    /// How many descriptors it may have, if that is known.
    pub(super) files_max: Option<u64>,
}

/// One descriptor.
#[derive(Debug, Default)]
pub(super) struct OpenFile {
    pub(super) number: u32,
    /// What its link says: a path in the container, or `socket:[5]` and the like.
    pub(super) target: String,
    pub(super) is_device: bool,
    /// Whether it is a symbolic link, and not what that leads to (`O_PATH` with `O_NOFOLLOW`).
    pub(super) is_link: bool,
    /// Whether it is a pipe that keeps what was written at once together (`O_DIRECT`, pipe(2)).
    pub(super) packets: bool,
    /// Mount it was opened on.
    pub(super) mount: Option<u64>,
    /// Its lines in `fdinfo`, as far as a check looks at them.
    pub(super) locks: usize,
    /// Devices of the file systems that are watched.
    pub(super) watches: Vec<u64>,
    /// What the kernel calls the protocol of a socket.
    pub(super) protocol: Option<String>,
}

impl OpenFile {
    /// Returns the number of a socket.
    pub(super) fn socket(&self) -> Option<u64> {
        self.target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    }
}

impl View {
    /// Looks at processes in a mounted proc(5): at `init` and what descends from it, which is what
    /// is dumped. What was started from outside is not.
    pub(super) fn of(proc: &Path, init: u32, pids: &[u32]) -> Self {
        let mut view = Self { init, ..Self::default() };
        if pids.len() > PROCESSES_MAX {
            view.missed.push(format!("{} of {} processes", pids.len() - PROCESSES_MAX, pids.len()));
        }
        let mut files = 0;
        let mut nets = BTreeMap::new();
        for pid in pids.iter().copied().take(PROCESSES_MAX) {
            let directory = proc.join(pid.to_string());
            let Ok(mut process) = Process::of(&directory, pid) else { continue };
            if files < FILES_MAX {
                process.files =
                    open_files(&directory.join("fd"), &directory, &mut files, &mut process.odd);
                process.held = links::held(&directory);
            } else {
                view.missed.push(format!("the descriptors of process {pid}"));
            }
            if let Some(net) = process.namespaces.get("net") {
                nets.entry(net.clone()).or_insert(directory);
            }
            view.processes.push(process);
        }
        if files >= FILES_MAX {
            view.missed.push(format!("descriptors beyond {FILES_MAX}"));
        }
        view.keep_descendants(init);
        view.look_at_mounts(proc);
        for directory in nets.into_values() {
            view.sockets.add(&directory.join("net"));
        }
        view
    }

    fn look_at_mounts(&mut self, proc: &Path) {
        let (mut seen, mut left) = (BTreeSet::new(), MOUNTS_MAX);
        for process in &mut self.processes {
            let namespace = process.namespaces.get("mnt");
            if namespace.is_none_or(|namespace| seen.insert(namespace.clone())) {
                process.mounts = mounts(&proc.join(process.pid.to_string()), &mut left);
            }
        }
        if left == 0 {
            self.missed.push(format!("mounts beyond {MOUNTS_MAX}"));
        }
    }

    fn keep_descendants(&mut self, init: u32) {
        let mut kept = BTreeSet::from([init]);
        loop {
            let before = kept.len();
            let children = self.processes.iter().filter(|one| kept.contains(&one.parent));
            let children: Vec<u32> = children.map(|one| one.pid).collect();
            kept.extend(children);
            if kept.len() == before {
                break;
            }
        }
        self.processes.retain(|process| kept.contains(&process.pid));
    }

    /// Returns every descriptor with its process.
    pub(super) fn files(&self) -> impl Iterator<Item = (&Process, &OpenFile)> {
        self.processes.iter().flat_map(|one| one.files.iter().map(move |file| (one, file)))
    }
}

impl Process {
    fn of(directory: &Path, pid: u32) -> io::Result<Self> {
        let status = read(&directory.join("status"))?;
        let maps = read_bytes(&directory.join("maps")).unwrap_or_default();
        let links = ["cwd", "root", "exe"].map(|link| fs::read_link(directory.join(link)));
        let mut odd: Vec<String> =
            links.iter().flatten().filter_map(|link| odd_name(link)).collect();
        let mapped = maps.split_inclusive(|byte| *byte == b'\n');
        odd.extend(mapped.filter_map(|line| odd_mapping(line.strip_suffix(b"\n")?)));
        let maps = String::from_utf8_lossy(&maps);
        let text = |key| field(&status, key).unwrap_or_default();
        let namespace = |kind: &'static str| {
            let link = fs::read_link(directory.join("ns").join(kind)).ok()?;
            Some((kind, link.to_string_lossy().into_owned()))
        };
        let whole = ["user", "net", "mnt", "ipc", "uts", "time", "pid"];
        let kinds = whole.into_iter().chain(["time_for_children", "pid_for_children"]);
        Ok(Self {
            pid,
            name: text("Name:").to_owned(),
            parent: text("PPid:").parse().unwrap_or_default(),
            namespaces: kinds.filter_map(namespace).collect(),
            depth: text("NSpid:").split_whitespace().count(),
            foreign: is_foreign(text("Uid:")) || is_foreign(text("Gid:")),
            traced: !matches!(text("TracerPid:"), "" | "0"),
            headless: text("State:").starts_with('Z')
                && text("Threads:").parse().is_ok_and(|threads: u64| threads > 1),
            stopped: text("State:").starts_with('T'),
            odd,
            secret: maps.lines().any(|line| line.contains(" /secretmem")),
            infected: crate::process::is_infected(&maps),
            guarded: false,
            mounts: Vec::new(),
            files: Vec::new(),
            held: Vec::new(),
            files_max: files_max(directory),
        })
    }

    /// Whether there is no room for what CRIU opens in it.
    pub(super) fn lacks_descriptors(&self) -> bool {
        let Some(max) = self.files_max else { return false };
        // Those above are from before the limit was set, and take no place below.
        let below = self.files.iter().filter(|file| u64::from(file.number) < max).count();
        let below = u64::try_from(below).unwrap_or(u64::MAX);
        max.saturating_sub(below) < CRIU_FILES
    }
}

/// Returns the limit that holds (the soft one, `getrlimit(2)`); nothing where there is none.
fn files_max(directory: &Path) -> Option<u64> {
    let limits = read(&directory.join("limits")).ok()?;
    field(&limits, "Max open files")?.split_whitespace().next()?.parse().ok()
}

/// Whether one of the real, effective and saved ids is not root's: the kernel compares those.
fn is_foreign(ids: &str) -> bool {
    ids.split_whitespace().take(3).any(|id| id != "0")
}

/// `odd` gets those whose names are not UTF-8.
fn open_files(
    links: &Path,
    process: &Path,
    counted: &mut usize,
    odd: &mut Vec<String>,
) -> Vec<OpenFile> {
    let Ok(entries) = fs::read_dir(links) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.filter_map(Result::ok) {
        if *counted >= FILES_MAX {
            break;
        }
        *counted += 1;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let link = fs::read_link(entry.path());
        if let (Some(number), Ok(target)) = (number, link) {
            odd.extend(odd_name(&target));
            let target = target.to_string_lossy().into_owned();
            files.push(open_file(number, target, &entry.path(), process));
        }
    }
    files.sort_by_key(|file| file.number);
    files
}

fn open_file(number: u32, target: String, link: &Path, process: &Path) -> OpenFile {
    use std::os::unix::fs::FileTypeExt as _;

    let info = read(&process.join("fdinfo").join(number.to_string())).unwrap_or_default();
    let lines = |start: &'static str| info.lines().filter(move |line| line.starts_with(start));
    let watched = |line: &str| {
        let word = line.split(' ').find_map(|word| word.strip_prefix("sdev:"))?;
        u64::from_str_radix(word, 16).ok()
    };
    // Follows the link, which leads into the container without looking its path up here.
    let metadata = target.starts_with('/').then(|| fs::metadata(link).ok()).flatten();
    let protocol = target.starts_with("socket:").then(|| socket::protocol(link)).flatten();
    OpenFile {
        number,
        is_link: metadata.as_ref().is_some_and(|metadata| metadata.file_type().is_symlink()),
        is_device: metadata.map_or(is_in_dev(&target), |metadata| {
            metadata.file_type().is_char_device() || metadata.file_type().is_block_device()
        }),
        mount: field(&info, "mnt_id:").and_then(|id| id.parse().ok()),
        locks: lines("lock:").count(),
        watches: lines("inotify ").filter_map(watched).collect(),
        packets: target.starts_with("pipe:[")
            && field(&info, "flags:")
                .and_then(|flags| u32::from_str_radix(flags, 8).ok())
                .is_some_and(|flags| flags & OFlags::DIRECT.bits() != 0),
        protocol,
        target,
    }
}

/// Whether a path, which cannot be looked up any more, would be a device's.
fn is_in_dev(target: &str) -> bool {
    let files = ["/dev/shm/", "/dev/mqueue/", "/dev/hugepages/"];
    target.starts_with("/dev/") && !files.iter().any(|place| target.starts_with(place))
}

/// Reads the mounts that a process sees, up to what is left of a bound.
fn mounts(process: &Path, left: &mut usize) -> Vec<Mount> {
    let text = read(&process.join("mountinfo")).unwrap_or_default();
    let found: Vec<Mount> = crate::mounts::read(text.as_bytes()).take(*left).collect();
    *left -= found.len();
    found
}

/// Reads the beginning of a file of /proc.
pub(super) fn read(path: &Path) -> io::Result<String> {
    read_bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file: PathBuf = path.to_owned();
    fs::File::open(file)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// How the kernel tells what `memfd_create(2)` made: CRIU has no path of that.
const MEMORY_FILE: &[u8] = b"/memfd:";

/// Returns a name that is not UTF-8, as it can be told.
fn odd_name(name: &Path) -> Option<String> {
    if name.as_os_str().as_bytes().starts_with(MEMORY_FILE) {
        return None;
    }
    let told = || format!("\"{}\"", name.as_os_str().as_bytes().escape_ascii());
    name.to_str().is_none().then(told)
}

/// Returns the name of what a line of `proc_pid_maps(5)` maps, when that is not UTF-8.
fn odd_mapping(line: &[u8]) -> Option<String> {
    let begin = line.iter().position(|byte| *byte == b'/')?;
    odd_name(Path::new(OsStr::from_bytes(line.get(begin..)?)))
}
