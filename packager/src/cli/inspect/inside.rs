//! What is inside, as tables.

use std::collections::BTreeMap;

use kybernate_packager::inside::{
    Access, FileKind, HeldSocket, Inside, IpcKind, KindBytes, MemoryKind, Mount, Namespace,
    NamespaceKind, OpenFile, Process, ProcessState, Seccomp, Socket, SocketState, Thread,
};

use super::super::page::{Cell, Page, Table, Tone};
use crate::terminal::bytes;

/// Deepest indentation of the tree of processes.
const DEPTH_MAX: usize = 24;

/// Descriptors named for one socket.
const HOLDERS_SHOWN: usize = 4;

/// Adds everything to the page.
pub(super) fn tell(page: &mut Page, inside: &Inside, rows: usize) {
    page.table("PROCESSES", processes(&inside.processes, rows));
    page.table("THREADS", threads(&inside.processes, rows));
    page.table("MEMORY", memory(&inside.memory));
    page.table("SOCKETS", sockets(&inside.sockets, rows));
    page.table("OPEN FILES", files(&inside.processes, rows));
    page.table("NAMESPACES", namespaces(&inside.namespaces, rows));
    page.table("MOUNTS", mounts(&inside.mounts, rows));
    page.table("DEVICES", plain(&["PATH"], rows, inside.devices.iter().map(|path| [path])));
    let cgroups = inside.cgroups.iter().map(|cgroup| [&cgroup.hierarchy, &cgroup.path]);
    page.table("CGROUPS", plain(&["HIERARCHY", "PATH"], rows, cgroups));
    page.table("LOCKS", locks(inside, rows));
    page.table("SYSTEM V OBJECTS", ipc(inside, rows));
    let mut problems = Table::new(&["IMAGE", "WHAT"], usize::MAX);
    for problem in &inside.problems {
        problems.row(vec![(&problem.image).into(), Cell::new(&problem.message, Tone::Bad)]);
    }
    page.table("COULD NOT BE READ", problems);
}

fn processes(processes: &[Process], rows: usize) -> Table {
    let headings = ["PID", "STATE", "THREADS", "USER", "SECCOMP", "FILES", "STORED", "COMMAND"];
    let mut table = Table::new(&headings, rows);
    let mut depths: BTreeMap<u32, usize> = BTreeMap::new();
    for process in processes {
        let depth = depths.get(&process.parent).map_or(0, |depth| depth + 1).min(DEPTH_MAX);
        depths.insert(process.pid, depth);
        let first = process.threads.first();
        let user = first.and_then(|first| first.credentials.as_ref());
        let state = match process.state {
            ProcessState::Alive => Cell::new("alive", Tone::Good),
            ProcessState::Stopped => Cell::new("stopped", Tone::Odd),
            ProcessState::Zombie => Cell::new("zombie", Tone::Odd),
            ProcessState::Unknown => "-".into(),
        };
        let stored =
            process.memory.iter().fold(0_u64, |sum, kind| sum.saturating_add(kind.stored_bytes));
        let program = process.executable.as_deref().unwrap_or_default();
        let indent = if depth == 0 { String::new() } else { "  ".repeat(depth - 1) + "└ " };
        table.row(vec![
            Cell::number(&process.pid.to_string()),
            state,
            Cell::number(&process.threads.len().to_string()),
            Cell::number(
                &user.map_or_else(|| "-".to_owned(), |user| user.effective_uid.to_string()),
            ),
            seccomp(first),
            Cell::number(&process.files.len().to_string()),
            Cell::number(&bytes(stored)),
            format!("{indent}{} {program}", process.name).into(),
        ]);
    }
    table
}

fn seccomp(thread: Option<&Thread>) -> Cell {
    match thread.map(|thread| thread.seccomp) {
        Some(Seccomp::Filter) => "filter".into(),
        Some(Seccomp::Strict) => "strict".into(),
        Some(Seccomp::None) => Cell::new("none", Tone::Odd),
        None => "-".into(),
    }
}

/// Lists threads where a process has several, or where something waits for one.
fn threads(processes: &[Process], rows: usize) -> Table {
    let mut table = Table::new(&["PID", "TID", "SECCOMP", "PENDING", "NAME"], rows);
    for process in processes {
        let waits = !process.pending_signals.is_empty();
        let one = process.threads.len() < 2;
        for (at, thread) in process.threads.iter().enumerate() {
            let own = thread.pending_signals.iter();
            let whole = process.pending_signals.iter().filter(|_| at == 0);
            let pending: Vec<&str> = own.chain(whole).map(String::as_str).collect();
            if one && !waits && pending.is_empty() {
                continue;
            }
            table.row(vec![
                Cell::number(&process.pid.to_string()),
                Cell::number(&thread.id.to_string()),
                seccomp(Some(thread)),
                if pending.is_empty() { "-".into() } else { pending.join(",").into() },
                (&thread.name).into(),
            ]);
        }
    }
    table
}

fn memory(kinds: &[KindBytes]) -> Table {
    let mut table = Table::new(&["KIND", "MAPPED", "STORED"], usize::MAX);
    for kind in kinds {
        table.row(vec![
            memory_kind(kind.kind).into(),
            Cell::number(&bytes(kind.mapped_bytes)),
            Cell::number(&bytes(kind.stored_bytes)),
        ]);
    }
    table
}

/// Names a kind of memory.
pub(in super::super) const fn memory_kind(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::PrivateAnonymous => "private anonymous",
        MemoryKind::Heap => "heap",
        MemoryKind::Stack => "stack",
        MemoryKind::PrivateFile => "private file",
        MemoryKind::SharedFile => "shared file",
        MemoryKind::SharedAnonymous => "shared anonymous",
        MemoryKind::Memfd => "memfd",
        MemoryKind::SystemV => "system v",
        MemoryKind::Huge => "huge pages",
        MemoryKind::Kernel => "kernel's",
        MemoryKind::Other => "other",
    }
}

fn sockets(sockets: &[HeldSocket], rows: usize) -> Table {
    let headings = ["PROTOCOL", "STATE", "LOCAL", "REMOTE", "QUEUED", "HELD BY"];
    let mut table = Table::new(&headings, rows);
    let mut sorted: Vec<&HeldSocket> = sockets.iter().collect();
    sorted.sort_by_key(|held| (held.socket.state, held.socket.protocol.clone()));
    for held in sorted {
        let Socket { protocol, local, remote, .. } = &held.socket;
        let dash = |text: &Option<String>| text.as_deref().unwrap_or("-").into();
        let queued = match (held.socket.send_queue_bytes, held.socket.receive_queue_bytes) {
            (None, None) => "-".to_owned(),
            (send, receive) => {
                format!("{} out, {} in", send.unwrap_or(0), receive.unwrap_or(0))
            }
        };
        let holders = held.held_by.iter().take(HOLDERS_SHOWN);
        let mut holders: Vec<String> =
            holders.map(|held| format!("{} fd {}", held.pid, held.fd)).collect();
        if held.held_by.len() > HOLDERS_SHOWN {
            holders.push(format!("{} more", held.held_by.len() - HOLDERS_SHOWN));
        }
        table.row(vec![
            protocol.into(),
            socket_state(held.socket.state),
            dash(local),
            dash(remote),
            queued.into(),
            holders.join(", ").into(),
        ]);
    }
    table
}

fn socket_state(state: SocketState) -> Cell {
    match state {
        SocketState::Listen => Cell::new("listen", Tone::Good),
        SocketState::Established => Cell::new("established", Tone::Good),
        SocketState::Connecting => Cell::new("connecting", Tone::Odd),
        SocketState::Closing => Cell::new("closing", Tone::Odd),
        SocketState::Unconnected => "unconnected".into(),
        SocketState::Unknown => "-".into(),
    }
}

fn files(processes: &[Process], rows: usize) -> Table {
    let mut table = Table::new(&["PID", "FD", "TYPE", "ACCESS", "WHAT"], rows);
    for process in processes {
        for file in &process.files {
            let (kind, access, what) = file_row(file);
            table.row(vec![
                Cell::number(&process.pid.to_string()),
                Cell::number(&file.fd.to_string()),
                kind.into(),
                access.map_or("-", access_name).into(),
                what.into(),
            ]);
        }
    }
    table
}

fn file_row(file: &OpenFile) -> (&'static str, Option<Access>, String) {
    match &file.kind {
        FileKind::File { path, offset, access, append, bytes: length, deleted, external } => {
            let of = length.map_or_else(String::new, |length| format!(" of {length}"));
            let words = [(append, "append"), (deleted, "deleted"), (external, "external")];
            let words = words.into_iter().filter(|(is, _)| **is).map(|(_, word)| word);
            let place = format!("{path} at {offset}{of}");
            let what = std::iter::once(&*place).chain(words).collect::<Vec<_>>().join(", ");
            ("file", Some(*access), what)
        }
        FileKind::Directory { path } => ("directory", None, path.clone()),
        FileKind::Device { path, access } => ("device", Some(*access), path.clone()),
        FileKind::Pipe { pipe, access, .. } => ("pipe", Some(*access), format!("pipe {pipe}")),
        FileKind::Fifo { pipe, path } => {
            ("fifo", None, path.clone().unwrap_or_else(|| format!("pipe {pipe}")))
        }
        FileKind::Socket(socket) => ("socket", None, socket_row(socket)),
        FileKind::Memfd { name, bytes: length, access, .. } => {
            let length = length.map_or_else(String::new, |length| format!(", {}", bytes(length)));
            ("memfd", Some(*access), format!("{name}{length}"))
        }
        FileKind::Tty { terminal, path, session } => {
            let path = path.as_deref().unwrap_or("-");
            ("tty", None, format!("{path}, {terminal}, session {session}"))
        }
        other => event_row(other),
    }
}

fn event_row(kind: &FileKind) -> (&'static str, Option<Access>, String) {
    match kind {
        FileKind::Eventfd { counter } => ("eventfd", None, format!("counts {counter}")),
        FileKind::Epoll { watched } => {
            ("epoll", None, format!("waits for {} descriptors", watched.len()))
        }
        FileKind::Signalfd { signals } => ("signalfd", None, signals.join(",")),
        FileKind::Timerfd { clock, expires_ms } => {
            let when = expires_ms.map_or_else(|| "not set".to_owned(), |ms| format!("in {ms} ms"));
            ("timerfd", None, format!("{clock}, {when}"))
        }
        FileKind::Inotify { watches } => ("inotify", None, format!("{watches} watches")),
        FileKind::Fanotify { marks } => ("fanotify", None, format!("{marks} marks")),
        FileKind::Namespace { namespace } => ("namespace", None, namespace.clone()),
        FileKind::Tun { device } => ("tun", None, device.clone()),
        FileKind::Bpf { name } => ("bpf", None, name.clone()),
        FileKind::Pidfd { pid } => ("pidfd", None, format!("process {pid}")),
        FileKind::Unknown { number } => ("unknown", None, format!("kind {number} of CRIU's")),
        // What is left is a plugin's: the others have rows of their own.
        _ => ("plugin", None, "a file that a plugin of CRIU's knows".to_owned()),
    }
}

fn socket_row(socket: &Socket) -> String {
    let ends = [&socket.local, &socket.remote].into_iter().flatten();
    let ends: Vec<&str> = ends.map(String::as_str).collect();
    let text = format!("{} {}", socket.protocol, ends.join(" → "));
    text.trim_end().to_owned()
}

const fn access_name(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
        Access::ReadWrite => "read, write",
    }
}

fn namespaces(namespaces: &[Namespace], rows: usize) -> Table {
    let mut table = Table::new(&["KIND", "WHOSE", "PROCESSES", "WHAT"], rows);
    for namespace in namespaces {
        let kind = match namespace.kind {
            NamespaceKind::Pid => "pid",
            NamespaceKind::Network => "network",
            NamespaceKind::Ipc => "ipc",
            NamespaceKind::Uts => "uts",
            NamespaceKind::Mount => "mount",
            NamespaceKind::User => "user",
            NamespaceKind::Cgroup => "cgroup",
            NamespaceKind::Time => "time",
        };
        let whose =
            if namespace.of_host { Cell::new("the node's", Tone::Odd) } else { "its own".into() };
        let mut what: Vec<String> = namespace.host_name.clone().into_iter().collect();
        what.extend((!namespace.devices.is_empty()).then(|| namespace.devices.join(", ")));
        what.extend(namespace.external.as_ref().map(|name| format!("external {name}")));
        what.extend(
            namespace.uids.iter().map(|map| {
                format!("users {} as {}, {} of them", map.inside, map.outside, map.count)
            }),
        );
        let count = Cell::number(&namespace.processes.len().to_string());
        table.row(vec![kind.into(), whose, count, what.join("; ").into()]);
    }
    table
}

fn mounts(mounts: &[Mount], rows: usize) -> Table {
    let mut table = Table::new(&["PATH", "TYPE", "SOURCE", "HOW"], rows);
    for mount in mounts {
        let how = match (mount.read_only, mount.external) {
            (true, true) => "read-only, external",
            (true, false) => "read-only",
            (false, true) => "external",
            (false, false) => "-",
        };
        table.row(vec![
            (&mount.path).into(),
            (&mount.kind).into(),
            (&mount.source).into(),
            how.into(),
        ]);
    }
    table
}

fn plain<'a, const N: usize>(
    headings: &[&str; N],
    rows: usize,
    lines: impl Iterator<Item = [&'a String; N]>,
) -> Table {
    let mut table = Table::new(headings, rows);
    for line in lines {
        table.row(line.into_iter().map(Into::into).collect());
    }
    table
}

fn locks(inside: &Inside, rows: usize) -> Table {
    let mut table = Table::new(&["PID", "FD", "KIND", "HOW", "RANGE"], rows);
    for lock in &inside.locks {
        let range = match lock.length {
            0 => format!("from {}", lock.start),
            length => format!("from {}, {length} bytes", lock.start),
        };
        table.row(vec![
            Cell::number(&lock.pid.to_string()),
            Cell::number(&lock.fd.to_string()),
            (&lock.kind).into(),
            if lock.exclusive { "exclusive" } else { "shared" }.into(),
            range.into(),
        ]);
    }
    table
}

fn ipc(inside: &Inside, rows: usize) -> Table {
    let mut table = Table::new(&["KIND", "ID", "KEY", "OWNER", "MODE", "SIZE"], rows);
    for object in &inside.ipc {
        let (kind, size) = match object.kind {
            IpcKind::SharedMemory => ("shared memory", bytes(object.size)),
            IpcKind::Messages => ("messages", object.size.to_string()),
            IpcKind::Semaphores => ("semaphores", object.size.to_string()),
        };
        table.row(vec![
            kind.into(),
            Cell::number(&object.id.to_string()),
            format!("{:#x}", object.key).into(),
            Cell::number(&object.uid.to_string()),
            format!("{:o}", object.mode).into(),
            size.into(),
        ]);
    }
    table
}
