//! Decides what of a container CRIU would not take, or no restore. Nothing here reads anything.
//!
//! What CRIU refuses was measured with 4.1.1 and 4.2.1 on Linux 6.18. What CRIU takes and the gate of
//! every restore refuses goes by the gate's own lists.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use super::check::{Check, Finding};
use super::gpu::{GPUS, Unsaved};
use super::linked;
use super::options::CriuOptions;
use super::socket::Tcp;
use super::view::{OpenFile, Process, View};
use crate::gate;
use crate::mounts::Mount;

/// Findings of one kind that are told; the rest is counted.
const TOLD_MAX: usize = 8;

/// Size above which CRIU does not keep a deleted file, unless it is told to.
pub(super) const GHOST_BYTES: u64 = 1 << 20;

/// Device files that CRIU dumps as regular files and terminals, in a container's /dev.
const DEVICES: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/kmsg",
    "/dev/mem",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/pts/ptmx",
    "/dev/console",
];

/// Anonymous files that CRIU dumps, with its numbers of their kinds; not all of them come back.
const ANONYMOUS: &[(&str, i32)] = &[
    ("[eventfd]", 6),
    ("[eventpoll]", 7),
    ("inotify", 8),
    ("[signalfd]", 9),
    ("[fanotify]", 12),
    ("[timerfd]", 17),
    ("bpf-map", 19),
    ("[pidfd]", 20),
];

/// Namespaces of which each process of a container is in the same, in the kernel's words.
const NAMESPACES: &[&str] = &["mnt", "net", "ipc", "uts"];

/// Protocols of sockets that CRIU dumps, in the kernel's words.
const PROTOCOLS: &[&str] = &[
    "UNIX",
    "UNIX-STREAM",
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PING",
    "PINGv6",
    "PACKET",
    "NETLINK",
];

/// Those that are neither internet nor packet sockets.
const LOCAL: &[&str] = &["UNIX", "UNIX-STREAM", "NETLINK"];

/// What is to become of established TCP connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TcpPolicy {
    #[default]
    Refuse,
    Keep,
    Close,
}

impl TcpPolicy {
    /// Whether connections go into a dump, with what CRIU is told besides.
    pub(crate) fn keeps(self, options: &CriuOptions) -> bool {
        match self {
            Self::Keep => true,
            Self::Refuse => options.has("tcp-established") && !options.has("tcp-close"),
            Self::Close => false,
        }
    }
}

/// What a request chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) tcp: TcpPolicy,
    /// Whether file locks are a reason not to take it.
    pub(crate) refuse_locks: bool,
}

/// What else is known.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Context {
    pub(super) policy: Policy,
    /// What CRIU is told by the container's configuration file.
    pub(super) options: CriuOptions,
    /// Whether that file can be written for this operation.
    pub(super) own_options: bool,
    /// Whether a network namespace was made for it, as a restore makes one: without loopback when CRIU
    /// connects the sockets again.
    pub(super) own_network: bool,
    /// The user namespace that containers have by default.
    pub(super) user_namespace: Option<String>,
    /// Where the specification mounts something of the node.
    pub(super) bound: Vec<String>,
    /// Those of them whose content goes along.
    pub(super) captured: Vec<String>,
    /// Whether CRIU is run without the capability to read limits of other users' processes.
    pub(super) no_limits: bool,
    /// Whether CRIU never comes to an end with a process that is stopped: with cgroups of version 1.
    pub(super) waits_for_stopped: bool,
    /// Whether CRIU cannot dump internet sockets with this kernel.
    pub(super) no_internet: bool,
    /// GPUs whose memory nobody saves.
    pub(super) unsaved: Vec<Unsaved>,
    /// Exec sessions, by name.
    pub(super) execs: Vec<String>,
    /// The other end of connected unix sockets.
    pub(super) peers: BTreeMap<u64, u64>,
}

/// Returns all that was found, in the order it is told.
pub(super) fn judge(view: &View, context: &Context) -> Vec<Finding> {
    let mut found = BTreeSet::new();
    let mut say = |check, subject: String| {
        found.insert(Finding::new(check, subject));
    };
    for name in &context.execs {
        say(Check::ExecSession, format!("exec {name:?}"));
    }
    for missed in &view.missed {
        say(Check::Incomplete, missed.clone());
    }
    let depth = view.processes.iter().map(|process| process.depth).min().unwrap_or_default();
    let init = view.processes.iter().find(|process| process.pid == view.init);
    for process in &view.processes {
        of_process(process, depth, context, &mut say);
        of_namespaces(process, init, &mut say);
        of_mounts(process, context, &mut say);
    }
    let world = World::of(view);
    for (process, file) in view.files() {
        of_file(process, file, &world, context, &mut say);
        if let Some(number) = file.socket() {
            of_socket(process, file, number, &world, context, &mut say);
        }
    }
    linked::of_all(view, context, &mut say);
    of_tcp(view, &world, context, &mut say);
    bound(found)
}

/// What descriptors are compared with.
struct World<'a> {
    mounts: BTreeMap<u64, &'a Mount>,
    sockets: BTreeSet<u64>,
    internet: BTreeSet<u64>,
    unix: &'a BTreeMap<u64, String>,
    has_master: bool,
}

impl<'a> World<'a> {
    fn of(view: &'a View) -> Self {
        let mounts = view.processes.iter().flat_map(|process| &process.mounts);
        let is_master = |file: &OpenFile| file.target.ends_with("/ptmx");
        Self {
            mounts: mounts.map(|mount| (mount.id, mount)).collect(),
            sockets: view.files().filter_map(|(_, file)| file.socket()).collect(),
            internet: view.sockets.internet.iter().copied().collect(),
            unix: &view.sockets.unix,
            has_master: view.files().any(|(_, file)| is_master(file)),
        }
    }

    /// Returns the kind of the file system on a device.
    fn kind(&self, device: u64) -> Option<&str> {
        let mut mounts = self.mounts.values();
        mounts.find(|mount| mount.device == device).map(|mount| &*mount.kind)
    }
}

pub(super) fn name(process: &Process) -> String {
    format!("process {} {:?}", process.pid, process.name)
}

fn of_process(
    process: &Process,
    depth: usize,
    context: &Context,
    say: &mut impl FnMut(Check, String),
) {
    let namespace = |kind| process.namespaces.get(kind);
    if process.infected {
        say(Check::CriuCode, name(process));
    }
    if process.traced {
        say(Check::Traced, name(process));
    }
    if process.headless {
        say(Check::FirstThread, name(process));
    }
    if process.stopped && context.waits_for_stopped {
        say(Check::StoppedProcess, name(process));
    }
    for file in &process.odd {
        say(Check::FileName, format!("{file} of {}", name(process)));
    }
    if process.secret {
        say(Check::SecretMemory, name(process));
    }
    if process.lacks_descriptors() {
        say(Check::DescriptorLimit, name(process));
    }
    if process.guarded {
        say(Check::GuardPages, name(process));
    }
    if process.foreign && context.no_limits {
        say(Check::OtherUser, name(process));
    }
    if let (Some(own), Some(usual)) = (namespace("user"), &context.user_namespace)
        && own != usual
    {
        say(Check::UserNamespace, name(process));
    }
    let differ =
        |one, other| matches!((namespace(one), namespace(other)), (Some(a), Some(b)) if a != b);
    if process.depth > depth || differ("pid", "pid_for_children") {
        say(Check::NestedPidNamespace, name(process));
    }
    if differ("time", "time_for_children") {
        say(Check::TimeNamespace, name(process));
    }
}

fn of_namespaces(process: &Process, init: Option<&Process>, say: &mut impl FnMut(Check, String)) {
    for kind in NAMESPACES {
        let usual = init.and_then(|init| init.namespaces.get(kind));
        // Of a process that has just ended nobody can tell.
        if let (Some(own), Some(usual)) = (process.namespaces.get(kind), usual)
            && own != usual
        {
            say(Check::NestedNamespace, format!("{}: {kind}", name(process)));
        }
    }
}

fn of_mounts(process: &Process, context: &Context, say: &mut impl FnMut(Check, String)) {
    let at = |mount: &Mount| format!("{} on {}", mount.kind, mount.point.display());
    for mount in &process.mounts {
        if mount.point != *"/" && !is_provided(mount, context) && !fits(mount) {
            say(Check::Mount, at(mount));
        }
    }
    for hidden in hidden(&process.mounts) {
        say(Check::HiddenMount, at(hidden));
    }
}

/// Whether the runtime of the new container provides it: what the specification binds, its cgroups of
/// version 1, and what hides a file.
fn is_provided(mount: &Mount, context: &Context) -> bool {
    context.bound.iter().any(|place| mount.point == *place)
        || mount.kind == "cgroup" && mount.point.starts_with("/sys/fs/cgroup")
        || mount.root == *"/null" && !mount.point.starts_with("/dev")
}

/// Whether the gate takes it.
fn fits(mount: &Mount) -> bool {
    let known = gate::FILE_SYSTEMS.iter().find(|(name, _)| *name == mount.kind);
    let inside = known.zip(mount.root.to_str()).zip(mount.point.to_str());
    inside.is_some_and(|(((_, kind), root), path)| {
        gate::Inside { kind: *kind, root, path, read_only: mount.read_only }.fits()
    })
}

/// Returns the mounts that another one covers: the gate of a restore refuses such images, since
/// what is seen at a place would depend on an order.
fn hidden(mounts: &[Mount]) -> impl Iterator<Item = &Mount> {
    let mut places: BTreeMap<&Path, Vec<&Mount>> = BTreeMap::new();
    for mount in mounts {
        places.entry(&mount.point).or_default().push(mount);
    }
    let mut found = Vec::new();
    for (place, here) in &places {
        let above = place.ancestors().skip(1).find_map(|above| places.get(above));
        let above: BTreeSet<u64> = above.into_iter().flatten().map(|mount| mount.id).collect();
        let parents: BTreeSet<u64> = here.iter().map(|mount| mount.parent).collect();
        // Only what is at "/" stands on nothing that is seen.
        let stands = |mount: &&Mount| place.parent().is_none() || above.contains(&mount.parent);
        let covered = here.iter().filter(|mount| parents.contains(&mount.id));
        let beside = here.iter().filter(|mount| here.len() == 1 && !stands(mount));
        found.extend(covered.chain(beside).copied());
    }
    found.into_iter()
}

fn of_file(
    process: &Process,
    file: &OpenFile,
    world: &World<'_>,
    context: &Context,
    say: &mut impl FnMut(Check, String),
) {
    let at = || format!("descriptor {} of {}: {}", file.number, name(process), file.target);
    if file.locks > 0 && context.policy.refuse_locks {
        say(Check::FileLock, at());
    }
    if let Some(kind) = file.target.strip_prefix("anon_inode:") {
        match kind {
            "[io_uring]" => say(Check::IoUring, at()),
            "[fanotify]" => say(Check::Fanotify, at()),
            "inotify" => {
                let found = |device: &u64| world.kind(*device) == Some("tmpfs");
                if !file.watches.iter().all(found) && !context.options.has("force-irmap") {
                    say(Check::Inotify, at());
                }
            }
            other if !comes_back(other) => say(Check::Descriptor, at()),
            _ => {}
        }
    }
    if is_namespace(&file.target) {
        say(Check::NamespaceFile, at());
    }
    if file.packets {
        say(Check::Descriptor, at());
    }
    if file.is_link {
        return say(Check::OpenLink, at());
    }
    if file.is_device {
        return of_device(file, world, context, say, at);
    }
    let gone = file.target.ends_with(" (deleted)");
    if file.target.starts_with("/memfd:") || file.target.starts_with("/secretmem") {
        return;
    }
    let inside = file.mount.is_none_or(|id| world.mounts.contains_key(&id));
    if file.target.starts_with('/') && !gone && !inside {
        say(if file.number <= 2 { Check::StdioFile } else { Check::ExternalFile }, at());
    }
}

/// Whether an anonymous file is dumped, and taken back by the gate.
fn comes_back(name: &str) -> bool {
    let kind = ANONYMOUS.iter().find(|(known, _)| *known == name);
    kind.is_some_and(|(_, kind)| gate::FILE_KINDS.contains(kind))
}

/// Whether a link leads to a namespace, as `net:[4026531840]`.
fn is_namespace(target: &str) -> bool {
    let kinds = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
    target.split_once(":[").is_some_and(|(kind, _)| kinds.contains(&kind))
}

fn of_device(
    file: &OpenFile,
    world: &World<'_>,
    context: &Context,
    say: &mut impl FnMut(Check, String),
    at: impl Fn() -> String,
) {
    let target = &*file.target;
    if target.starts_with("/dev/pts/") || target == "/dev/console" {
        // One whose other end is in the container is CRIU's everyday business.
        if !world.has_master {
            say(Check::Terminal, at());
        }
    } else if GPUS.iter().any(|gpu| target.starts_with(gpu)) {
        let mut unsaved = context.unsaved.iter();
        if let Some(gpu) = unsaved.find(|gpu| target.starts_with(gpu.prefix)) {
            say(gpu.check, format!("{}; {}", at(), gpu.lack));
        }
    } else if !DEVICES.contains(&target) {
        say(Check::Device, at());
    }
}

fn of_socket(
    process: &Process,
    file: &OpenFile,
    number: u64,
    world: &World<'_>,
    context: &Context,
    say: &mut impl FnMut(Check, String),
) {
    let protocol = file.protocol.as_deref();
    let at = |what: &str| format!("descriptor {} of {}: {what}", file.number, name(process));
    if let Some(protocol) = protocol
        && !PROTOCOLS.contains(&protocol)
    {
        say(Check::SocketFamily, at(protocol));
    }
    let internet = world.internet.contains(&number)
        || protocol.is_some_and(|name| PROTOCOLS.contains(&name) && !LOCAL.contains(&name));
    if internet && context.no_internet {
        say(Check::InetSocket, at(protocol.unwrap_or("socket")));
    }
    if let Some(peer) = context.peers.get(&number)
        && !world.sockets.contains(peer)
        && !context.options.has("ext-unix-sk")
    {
        let path = world.unix.get(peer).or_else(|| world.unix.get(&number));
        let path = path.filter(|path| !path.is_empty()).map_or("no path", |path| path);
        say(Check::ExternalUnixSocket, at(path));
    }
}

fn of_tcp(view: &View, world: &World<'_>, context: &Context, say: &mut impl FnMut(Check, String)) {
    let ours = |one: &&Tcp| world.sockets.contains(&one.number);
    let all = &view.sockets.tcp;
    let listeners: Vec<&Tcp> = all.iter().filter(ours).filter(|one| one.listens()).collect();
    let datagrams = view.sockets.bound.iter().filter(|(_, number)| world.sockets.contains(number));
    let bound = listeners.iter().map(|one| one.local).chain(datagrams.map(|(local, _)| *local));
    for local in bound {
        let ip: IpAddr = local.ip();
        if !ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast() {
            say(Check::ListenerAddress, local.to_string());
        }
    }
    let options = &context.options;
    let chosen = options.has("tcp-close") || options.has("tcp-established");
    for one in all.iter().filter(ours).filter(|one| one.is_connected()) {
        let ends = format!("{} to {}", one.local, one.remote);
        match context.policy.tcp {
            TcpPolicy::Refuse if !chosen => say(Check::TcpEstablished, ends),
            TcpPolicy::Close if !context.own_options && !options.has("tcp-close") => {
                say(Check::TcpClose, ends);
            }
            _ => {}
        }
    }
    if context.policy.tcp.keeps(options) {
        let halves = |one: &&Tcp| one.is_connected() && one.remote.ip().is_loopback();
        for one in all.iter().filter(ours).filter(halves) {
            let other = all.iter().find(|other| other.is_other_end_of(one));
            // What nobody has accepted is told below; what the other end left behind is no connection.
            let ends = format!("{} to {}", one.local, one.remote);
            if !other.is_some_and(|other| ours(&other) || other.is_in_flight()) {
                say(Check::TcpLoopback, format!("{ends}, whose other end is outside"));
            } else if context.own_network {
                say(Check::TcpLoopback, format!("{ends}, in a network of its own"));
            }
        }
    }
    let closed = context.policy.tcp == TcpPolicy::Close && context.own_options;
    let skipped = closed || options.has("skip-in-flight");
    for one in all.iter().filter(|one| one.is_in_flight() && !skipped) {
        let waits = |listener: &&Tcp| listener.local.port() == one.local.port();
        if listeners.iter().any(waits) {
            say(Check::TcpInFlight, format!("{} to {}", one.remote, one.local));
        }
    }
}

/// Tells the first few of each kind, and how many more there are.
fn bound(found: BTreeSet<Finding>) -> Vec<Finding> {
    let mut told: Vec<Finding> = Vec::new();
    let mut counts: BTreeMap<Check, usize> = BTreeMap::new();
    for finding in found {
        let count = counts.entry(finding.check).or_default();
        *count += 1;
        if *count <= TOLD_MAX {
            told.push(finding);
        }
    }
    for (check, count) in counts.into_iter().filter(|(_, count)| *count > TOLD_MAX) {
        let more = format!("and {} more", count - TOLD_MAX);
        if let Some(last) = told.iter_mut().rfind(|finding| finding.check == check) {
            last.subject = format!("{}; {more}", last.subject);
        }
    }
    told
}
