//! Open files.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::images::files::{
    Descriptor, FDINFO, FILES, File, MEMFDS, MemfdInode, REMAPS, Regular, Remap, TTYS, TtyInfo,
};
use super::names;
use super::sockets::{self, Socket};
use super::source::{ENTRIES_MAX, Source};

/// Longest path shown (Linux, `PATH_MAX`).
const PATH_BYTES_MAX: usize = 4096;

/// The kernel's name for the file behind memory that was mapped as shared.
const ANONYMOUS: &str = "/dev/zero";

/// What an open file takes, its path aside.
const FILE_BYTES: usize = 192;

/// Kind of file in a mode (inode(7)).
const MODE_KIND: u32 = 0o170_000;
const MODE_CHARACTER_DEVICE: u32 = 0o020_000;
const MODE_BLOCK_DEVICE: u32 = 0o060_000;
const MODE_DIRECTORY: u32 = 0o040_000;

/// `O_APPEND` and `O_NONBLOCK` of open(2).
const APPEND: u32 = 0o2000;
const NON_BLOCKING: u32 = 0o4000;

/// One open descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OpenFile {
    /// The descriptor.
    pub fd: u32,
    /// Number of what is open, the same wherever it is open too.
    pub id: u32,
    /// Whether another program does not get it.
    pub close_on_exec: bool,
    /// What is open.
    #[serde(flatten)]
    pub kind: FileKind,
}

/// What may be done with an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// It is read.
    Read,
    /// It is written.
    Write,
    /// Both.
    ReadWrite,
}

/// What is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "type")]
pub enum FileKind {
    /// A regular file.
    File {
        /// Where it is.
        path: String,
        /// Where the next byte is read or written.
        offset: u64,
        /// What may be done with it.
        access: Access,
        /// Whether writes go to its end.
        append: bool,
        /// Its length.
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
        /// Whether it has no name any more; its content is in the dump then.
        deleted: bool,
        /// Whether a restore must bring it along.
        external: bool,
    },
    /// A directory.
    Directory {
        /// Where it is.
        path: String,
    },
    /// A device.
    Device {
        /// Where it is.
        path: String,
        /// What may be done with it.
        access: Access,
    },
    /// One end of a pipe.
    Pipe {
        /// Number of the pipe, the same for both ends.
        pipe: u32,
        /// Which end.
        access: Access,
        /// Whether it does not wait.
        non_blocking: bool,
    },
    /// A pipe with a name.
    Fifo {
        /// Number of the pipe.
        pipe: u32,
        /// Where it is.
        #[serde(skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
    /// A socket.
    Socket(Socket),
    /// A counter (eventfd(2)).
    Eventfd {
        /// What it counts.
        counter: u64,
    },
    /// What waits for others (epoll(7)).
    Epoll {
        /// The descriptors it waits for.
        watched: Vec<u32>,
    },
    /// Signals, to be read (signalfd(2)).
    Signalfd {
        /// Which signals.
        signals: Vec<String>,
    },
    /// A timer (timerfd(2)).
    Timerfd {
        /// Which clock.
        clock: String,
        /// Milliseconds until it goes off, when it is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        expires_ms: Option<u64>,
    },
    /// Changes of files (inotify(7)).
    Inotify {
        /// How many files and directories it watches.
        watches: usize,
    },
    /// Changes of files (fanotify(7)).
    Fanotify {
        /// How many marks it has.
        marks: usize,
    },
    /// A file in memory (`memfd_create`).
    Memfd {
        /// Its name, which need not be its own.
        name: String,
        /// Its length.
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
        /// Where the next byte is read or written.
        offset: u64,
        /// What may be done with it.
        access: Access,
    },
    /// A terminal.
    Tty {
        /// What kind: `pseudo`, `console`, `virtual`, `controlling`, `external` or `serial`.
        terminal: String,
        /// Where it is.
        #[serde(skip_serializing_if = "Option::is_none")]
        path: Option<String>,
        /// The session it controls; 0 for none.
        session: u32,
    },
    /// A namespace.
    Namespace {
        /// Which kind.
        namespace: String,
    },
    /// A network device of its own (tun, tap).
    Tun {
        /// The device.
        device: String,
    },
    /// A map of eBPF.
    Bpf {
        /// Its name.
        name: String,
    },
    /// A process (pidfd).
    Pidfd {
        /// Its id.
        pid: i32,
    },
    /// A file that one of CRIU's plugins knows: a GPU's, for instance.
    Plugin,
    /// Something this program does not know.
    Unknown {
        /// CRIU's number for the kind.
        number: i32,
    },
}

/// All open files of a dump.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By number: what it is, and whether it is shown at all.
    files: BTreeMap<u32, FileKind>,
    /// Files in memory, by the file's number.
    memfds: BTreeMap<u32, MemoryFile>,
}

/// What holds a file in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryFile {
    /// The number of the shared memory.
    pub(super) shared: u32,
    /// Whether it is no file but memory that was mapped as shared: CRIU makes files of such.
    pub(super) anonymous: bool,
}

/// What files refer to.
struct Behind {
    paths: BTreeMap<u32, String>,
    deleted: BTreeSet<u32>,
    memfds: BTreeMap<u64, MemfdInode>,
    ttys: BTreeMap<u32, TtyInfo>,
}

impl Table {
    /// Reads what is open, whoever holds it.
    pub(super) fn read(source: &mut Source) -> Self {
        let mut raw: Vec<File> = Vec::new();
        source.each("files.img", FILES, |file| raw.push(file));
        let behind = Behind::read(source, &raw);
        let mut table = Self::default();
        for file in raw {
            if let Some(memfd) = &file.memfd {
                let inode = behind.memfds.get(&u64::from(memfd.inode));
                let known = inode.map(|inode| MemoryFile {
                    shared: inode.shared,
                    anonymous: inode.name == ANONYMOUS,
                });
                table.memfds.extend(known.map(|known| (file.id, known)));
            }
            let kind = behind.kind(source, &file);
            table.files.insert(file.id, kind);
        }
        table
    }

    /// Returns the path of an open file.
    pub(super) fn path(&self, id: u32) -> Option<String> {
        match self.files.get(&id)? {
            FileKind::File { path, .. }
            | FileKind::Directory { path }
            | FileKind::Device { path, .. } => Some(path.clone()),
            FileKind::Memfd { name, .. } => Some(format!("memfd:{name}")),
            _ => None,
        }
    }

    /// Returns what holds a file in memory.
    pub(super) fn memfd(&self, id: u64) -> Option<MemoryFile> {
        self.memfds.get(&u32::try_from(id).ok()?).copied()
    }

    /// Returns the open descriptors of a table.
    pub(super) fn of(&self, source: &mut Source, table: u32) -> Vec<OpenFile> {
        let image = format!("fdinfo-{table}.img");
        // Any number of processes may have the same table.
        if !source.affords(&image, 1) {
            return Vec::new();
        }
        let mut descriptors: Vec<Descriptor> = Vec::new();
        source.each(&image, FDINFO, |descriptor| descriptors.push(descriptor));
        descriptors.sort_unstable_by_key(|descriptor| descriptor.fd);
        let mut open = Vec::new();
        for descriptor in descriptors {
            let Some(kind) = self.files.get(&descriptor.id) else {
                let text = format!("descriptor {} is of no open file", descriptor.fd);
                source.problem(&image, text);
                if source.affords(&image, FILE_BYTES) {
                    continue;
                }
                break;
            };
            if !source.affords(&image, kind.bytes()) {
                break;
            }
            open.push(OpenFile {
                fd: descriptor.fd,
                id: descriptor.id,
                close_on_exec: descriptor.flags & 1 != 0,
                kind: kind.clone(),
            });
        }
        open
    }
}

impl FileKind {
    /// Returns about what it takes.
    fn bytes(&self) -> usize {
        let more = match self {
            Self::File { path, .. } | Self::Directory { path } | Self::Device { path, .. } => {
                path.len()
            }
            Self::Memfd { name, .. } | Self::Bpf { name } | Self::Tun { device: name } => {
                name.len()
            }
            Self::Fifo { path, .. } | Self::Tty { path, .. } => {
                path.as_ref().map_or(0, String::len)
            }
            Self::Epoll { watched } => watched.len().saturating_mul(4),
            Self::Signalfd { signals } => signals.len().saturating_mul(32),
            Self::Socket(socket) => {
                let ends = [&socket.local, &socket.remote].into_iter().flatten();
                ends.map(String::len).sum()
            }
            _ => 0,
        };
        FILE_BYTES.saturating_add(more)
    }
}

impl Behind {
    fn read(source: &mut Source, files: &[File]) -> Self {
        let paths = files
            .iter()
            .filter_map(|file| Some((file.id, shown(&file.regular.as_ref()?.name))))
            .collect();
        let mut deleted = BTreeSet::new();
        source.each("remap-fpath.img", REMAPS, |remap: Remap| {
            // A link elsewhere stands for a deleted file that another name had.
            if matches!(remap.kind, None | Some(0 | 1)) {
                deleted.insert(remap.file);
            }
        });
        let (mut memfds, mut ttys) = (BTreeMap::new(), BTreeMap::new());
        source.each("memfd.img", MEMFDS, |inode: MemfdInode| {
            memfds.insert(inode.id, inode);
        });
        source.each("tty-info.img", TTYS, |tty: TtyInfo| {
            ttys.insert(tty.id, tty);
        });
        Self { paths, deleted, memfds, ttys }
    }

    fn kind(&self, source: &mut Source, file: &File) -> FileKind {
        if let Some(socket) = sockets::of(source, file) {
            return FileKind::Socket(socket);
        }
        if let Some(regular) = &file.regular {
            return self.regular(file.id, regular);
        }
        if let Some(memfd) = &file.memfd {
            let inode = self.memfds.get(&u64::from(memfd.inode));
            return FileKind::Memfd {
                name: inode.map_or_else(String::new, |inode| shown(&inode.name)),
                bytes: inode.map(|inode| inode.size),
                offset: memfd.position,
                access: access(memfd.flags),
            };
        }
        if let Some(tty) = &file.tty {
            let info = self.ttys.get(&tty.info).copied().unwrap_or_default();
            return FileKind::Tty {
                terminal: terminal(info.kind).to_owned(),
                path: tty.file.and_then(|file| self.paths.get(&file).cloned()),
                session: info.session,
            };
        }
        if let Some(pipe) = &file.pipe {
            let non_blocking = pipe.flags & NON_BLOCKING != 0;
            return FileKind::Pipe { pipe: pipe.pipe, access: access(pipe.flags), non_blocking };
        }
        if let Some(fifo) = &file.fifo {
            let path = fifo.file.and_then(|file| self.paths.get(&file).cloned());
            return FileKind::Fifo { pipe: fifo.pipe, path };
        }
        waiting(file).unwrap_or_else(|| other(file))
    }

    fn regular(&self, id: u32, file: &Regular) -> FileKind {
        let path = shown(&file.name);
        let access = access(file.flags);
        let is_device = path.starts_with("/dev/") && !path.starts_with("/dev/shm/");
        match file.mode.map(|mode| mode & MODE_KIND) {
            Some(MODE_CHARACTER_DEVICE | MODE_BLOCK_DEVICE) => FileKind::Device { path, access },
            // Older versions do not tell what it is.
            None if is_device => FileKind::Device { path, access },
            Some(MODE_DIRECTORY) => FileKind::Directory { path },
            _ => FileKind::File {
                path,
                offset: file.position,
                access,
                append: file.flags & APPEND != 0,
                bytes: file.size,
                deleted: self.deleted.contains(&id),
                external: file.external == Some(true),
            },
        }
    }
}

/// Files that programs wait with.
fn waiting(file: &File) -> Option<FileKind> {
    if let Some(eventfd) = &file.eventfd {
        return Some(FileKind::Eventfd { counter: eventfd.counter });
    }
    if let Some(epoll) = &file.epoll {
        let watched = epoll.watched.iter().map(|watched| watched.fd).take(ENTRIES_MAX).collect();
        return Some(FileKind::Epoll { watched });
    }
    if let Some(signalfd) = &file.signalfd {
        return Some(FileKind::Signalfd { signals: names::signals(signalfd.mask) });
    }
    if let Some(timer) = &file.timerfd {
        let ms = timer.seconds.saturating_mul(1000).saturating_add(timer.nanoseconds / 1_000_000);
        let set = timer.seconds != 0 || timer.nanoseconds != 0;
        let clock = names::clock(timer.clock);
        return Some(FileKind::Timerfd { clock, expires_ms: set.then_some(ms) });
    }
    if let Some(inotify) = &file.inotify {
        return Some(FileKind::Inotify { watches: inotify.watches.len() });
    }
    let fanotify = file.fanotify.as_ref()?;
    Some(FileKind::Fanotify { marks: fanotify.marks.len() })
}

fn other(file: &File) -> FileKind {
    if let Some(namespace) = &file.namespace {
        return FileKind::Namespace { namespace: names::namespace(namespace.flag).to_owned() };
    }
    if let Some(tun) = &file.tun {
        return FileKind::Tun { device: tun.device.as_deref().map_or_else(String::new, shown) };
    }
    if let Some(bpf) = &file.bpf {
        return FileKind::Bpf { name: shown(&bpf.name) };
    }
    if let Some(pidfd) = &file.pidfd {
        return FileKind::Pidfd { pid: pidfd.pid };
    }
    match file.kind {
        16 => FileKind::Plugin,
        number => FileKind::Unknown { number },
    }
}

const fn access(flags: u32) -> Access {
    match flags & 3 {
        0 => Access::Read,
        1 => Access::Write,
        _ => Access::ReadWrite,
    }
}

const fn terminal(kind: i32) -> &'static str {
    match kind {
        1 => "pseudo",
        2 => "console",
        3 => "virtual",
        4 => "controlling",
        5 => "external",
        6 => "serial",
        _ => "unknown",
    }
}

/// Returns as much of a path or name as the kernel would have taken.
pub(super) fn shown(text: &str) -> String {
    let mut end = text.len().min(PATH_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_owned()
}
