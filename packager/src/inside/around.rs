//! What is around the processes: namespaces, mounts, cgroups, locks, objects of System V.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use super::files::shown;
use super::images::Ids;
use super::images::around::{
    CGROUP, Cgroups, IdRange, IpcHead, MESSAGES, MOUNTS, MessageEntry, MessagesEntry, MountEntry,
    NETWORK, NETWORK_DEVICES, NetworkDevice, NetworkEntry, PID, PidEntry, SEMAPHORES,
    SHARED_MEMORY, SemaphoresEntry, SharedMemoryEntry, USER, UTS, UserEntry, Uts,
};
use super::images::files::{LOCKS, Lock as LockEntry};
use super::names;
use super::source::{RecordError, Records, Source};
use crate::criu::Magic;

/// `MS_RDONLY` of mount(2).
const READ_ONLY: u32 = 1;

/// Kinds of namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NamespaceKind {
    /// Processes.
    Pid,
    /// Network devices and addresses.
    Network,
    /// Objects of System V.
    Ipc,
    /// Host name.
    Uts,
    /// Mounts.
    Mount,
    /// Users and groups.
    User,
    /// Control groups.
    Cgroup,
    /// Clocks.
    Time,
}

/// A namespace that processes live in.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Namespace {
    /// Its kind.
    pub kind: NamespaceKind,
    /// Its number within the dump.
    pub number: u32,
    /// Whether it is that of whoever took the dump: a restore makes none, and uses its own.
    pub of_host: bool,
    /// The processes in it.
    pub processes: Vec<u32>,
    /// Host name, of a UTS namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    /// Devices, of a network namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Users, of a user namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uids: Vec<UserMap>,
    /// Groups, of a user namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gids: Vec<UserMap>,
    /// By which name a restore is given it from outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external: Option<String>,
}

/// Users or groups of a namespace and who they are outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UserMap {
    /// First inside.
    pub inside: u32,
    /// First outside.
    pub outside: u32,
    /// How many.
    pub count: u32,
}

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Where.
    pub path: String,
    /// Kind of file system.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is mounted.
    pub source: String,
    /// Which directory of it.
    pub root: String,
    /// Whether nothing in it may be written.
    pub read_only: bool,
    /// Whether it comes from outside, so that a restore must bring it along.
    pub external: bool,
    /// Its number.
    pub id: u32,
    /// The number of the mount it is in.
    pub parent: u32,
    /// Number of its namespace.
    pub namespace: u32,
}

/// A place in a hierarchy of cgroups.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cgroup {
    /// The controllers of the hierarchy; empty for that of version 2.
    pub hierarchy: String,
    /// The place.
    pub path: String,
}

/// A lock on a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lock {
    /// The process that holds it.
    pub pid: i32,
    /// The descriptor.
    pub fd: i32,
    /// What kind: `posix`, `flock`, `lease`, `open-file` or `other`.
    pub kind: String,
    /// Whether nobody else may have one.
    pub exclusive: bool,
    /// First byte.
    pub start: i64,
    /// Number of bytes; 0 for all that follow.
    pub length: i64,
}

/// Kinds of objects of System V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IpcKind {
    /// Shared memory.
    SharedMemory,
    /// A queue of messages.
    Messages,
    /// Semaphores.
    Semaphores,
}

/// An object of System V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IpcObject {
    /// Its kind.
    pub kind: IpcKind,
    /// Its id.
    pub id: u32,
    /// Its key.
    pub key: u32,
    /// Its owner.
    pub uid: u32,
    /// Who may do what, as for files.
    pub mode: u32,
    /// How large: bytes of shared memory, messages of a queue, or semaphores.
    pub size: u64,
}

/// Returns the namespaces of the processes. `host` are those of whoever took the dump.
pub(super) fn namespaces(
    source: &mut Source,
    ids: &BTreeMap<u32, Ids>,
    host: Ids,
) -> Vec<Namespace> {
    let mut members: BTreeMap<(NamespaceKind, u32), Vec<u32>> = BTreeMap::new();
    for (pid, ids) in ids {
        for (kind, number) in places(ids) {
            if let Some(number) = number {
                members.entry((kind, number)).or_default().push(*pid);
            }
        }
    }
    let host: BTreeMap<NamespaceKind, Option<u32>> = places(&host).into();
    let describe = |((kind, number), processes)| {
        let of_host = host.get(&kind) == Some(&Some(number));
        namespace(source, kind, number, of_host, processes)
    };
    members.into_iter().map(describe).collect()
}

const fn places(ids: &Ids) -> [(NamespaceKind, Option<u32>); 8] {
    [
        (NamespaceKind::Pid, ids.pid),
        (NamespaceKind::Network, ids.network),
        (NamespaceKind::Ipc, ids.ipc),
        (NamespaceKind::Uts, ids.uts),
        (NamespaceKind::Mount, ids.mount),
        (NamespaceKind::User, ids.user),
        (NamespaceKind::Cgroup, ids.cgroup),
        (NamespaceKind::Time, ids.time),
    ]
}

fn namespace(
    source: &mut Source,
    kind: NamespaceKind,
    number: u32,
    of_host: bool,
    processes: Vec<u32>,
) -> Namespace {
    let mut found = Namespace {
        kind,
        number,
        of_host,
        processes,
        host_name: None,
        devices: Vec::new(),
        uids: Vec::new(),
        gids: Vec::new(),
        external: None,
    };
    match kind {
        NamespaceKind::Uts => {
            let uts: Option<Uts> = source.one(&format!("utsns-{number}.img"), UTS);
            found.host_name = uts.map(|uts| match &*uts.domain_name {
                "" | "(none)" => shown(&uts.host_name),
                domain => shown(&format!("{}.{domain}", uts.host_name)),
            });
        }
        NamespaceKind::Network => {
            let device = |device: NetworkDevice| found.devices.push(shown(&device.name));
            source.each(&format!("netdev-{number}.img"), NETWORK_DEVICES, device);
            let network: Option<NetworkEntry> = source.one(&format!("netns-{number}.img"), NETWORK);
            found.external = network.and_then(|network| network.external_key);
        }
        NamespaceKind::User => {
            let user: UserEntry =
                source.one(&format!("userns-{number}.img"), USER).unwrap_or_default();
            found.uids = user.uids.iter().map(range).collect();
            found.gids = user.gids.iter().map(range).collect();
        }
        NamespaceKind::Pid => {
            let pid: Option<PidEntry> = source.one(&format!("pidns-{number}.img"), PID);
            found.external = pid.and_then(|pid| pid.external_key);
        }
        NamespaceKind::Ipc | NamespaceKind::Mount | NamespaceKind::Cgroup | NamespaceKind::Time => {
        }
    }
    found
}

const fn range(of: &IdRange) -> UserMap {
    UserMap { inside: of.first, outside: of.outside, count: of.count }
}

/// Returns the mounts of all namespaces that have an image.
pub(super) fn mounts(source: &mut Source) -> Vec<Mount> {
    let mut mounts = Vec::new();
    for (image, number) in source.numbered("mountpoints") {
        let namespace = number.parse().unwrap_or(0);
        source.each(&image, MOUNTS, |entry: MountEntry| mounts.push(mount(&entry, namespace)));
    }
    mounts
}

fn mount(entry: &MountEntry, namespace: u32) -> Mount {
    let kind = match (entry.kind, &entry.kind_name) {
        (0 | 16, Some(name)) => shown(name),
        (kind, _) => names::file_system(kind).to_owned(),
    };
    Mount {
        path: shown(&entry.path),
        kind,
        source: shown(&entry.source),
        root: shown(&entry.root),
        read_only: entry.flags & READ_ONLY != 0,
        external: entry.external == Some(true) || entry.external_key.is_some(),
        id: entry.id,
        parent: entry.parent,
        namespace,
    }
}

/// Returns where the processes are in the hierarchies of cgroups, each place once.
pub(super) fn cgroups(source: &mut Source) -> Vec<Cgroup> {
    let all: Cgroups = source.one("cgroup.img", CGROUP).unwrap_or_default();
    let places = all.sets.iter().flat_map(|set| &set.places);
    let places =
        places.map(|place| Cgroup { hierarchy: shown(&place.hierarchy), path: shown(&place.path) });
    places.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the locks on files.
pub(super) fn locks(source: &mut Source) -> Vec<Lock> {
    let mut locks = Vec::new();
    source.each("filelocks.img", LOCKS, |lock: LockEntry| {
        let kind = match lock.flags {
            1 => "posix",
            2 => "flock",
            32 => "lease",
            1024 => "open-file",
            _ => "other",
        };
        locks.push(Lock {
            pid: lock.pid,
            fd: lock.fd,
            kind: kind.to_owned(),
            exclusive: lock.kind == 1,
            start: lock.start,
            length: lock.length,
        });
    });
    locks
}

/// Returns the objects of System V.
pub(super) fn ipc(source: &mut Source) -> Vec<IpcObject> {
    type Read = fn(&mut Records, &mut Vec<IpcObject>) -> Result<(), RecordError>;
    let kinds: [(&str, Magic, Read); 3] = [
        ("ipcns-shm", SHARED_MEMORY, shared_memory),
        ("ipcns-msg", MESSAGES, messages),
        ("ipcns-sem", SEMAPHORES, semaphores),
    ];
    let mut found = Vec::new();
    for (prefix, magic, read) in kinds {
        for (image, _) in source.numbered(prefix) {
            source.records(&image, magic, |records| read(records, &mut found));
        }
    }
    found
}

fn shared_memory(records: &mut Records, found: &mut Vec<IpcObject>) -> Result<(), RecordError> {
    while let Some(entry) = records.next::<SharedMemoryEntry>()? {
        found.push(object(IpcKind::SharedMemory, entry.head, entry.size));
        if entry.in_pages != Some(true) {
            records.skip(padded(entry.size, 4))?;
        }
    }
    Ok(())
}

fn messages(records: &mut Records, found: &mut Vec<IpcObject>) -> Result<(), RecordError> {
    while let Some(entry) = records.next::<MessagesEntry>()? {
        found.push(object(IpcKind::Messages, entry.head, entry.count.into()));
        for _ in 0..entry.count {
            let Some(message) = records.next::<MessageEntry>()? else { return Ok(()) };
            records.skip(padded(message.length.into(), 8))?;
        }
    }
    Ok(())
}

fn semaphores(records: &mut Records, found: &mut Vec<IpcObject>) -> Result<(), RecordError> {
    while let Some(entry) = records.next::<SemaphoresEntry>()? {
        found.push(object(IpcKind::Semaphores, entry.head, entry.count.into()));
        records.skip(padded(u64::from(entry.count).saturating_mul(2), 8))?;
    }
    Ok(())
}

fn object(kind: IpcKind, head: Option<IpcHead>, size: u64) -> IpcObject {
    let head = head.unwrap_or_default();
    IpcObject { kind, id: head.id, key: head.key, uid: head.uid, mode: head.mode, size }
}

const fn padded(bytes: u64, to: u64) -> u64 {
    bytes.saturating_add(to - 1) / to * to
}
