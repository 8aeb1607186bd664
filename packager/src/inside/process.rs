//! Processes and their threads.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use schemars::JsonSchema;
use serde::Serialize;

use super::files::{OpenFile, Table};
use super::images::{
    self, CORE, Core, FS, FileSystem, IDS, Ids, ProcessCore, Signal, Signals, TreeEntry,
};
use super::memory::{Accounts, KindBytes, MappedRegion, ProcessMemory};
use super::names::{capabilities, signal};
use super::source::Source;
use crate::criu::Magic;

/// Most processes and threads shown: as many as one container may have where people ask for very
/// many.
const THREADS_MAX: usize = 1 << 16;

/// Most groups of one thread (Linux, `NGROUPS_MAX`).
const GROUPS_MAX: usize = 1 << 16;

/// Most signals shown of one queue.
const SIGNALS_MAX: usize = 64;

/// One process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// Its id in the innermost namespace.
    pub pid: u32,
    /// Its parent's; 0 when that is outside.
    pub parent: u32,
    /// Its process group's.
    pub group: u32,
    /// Its session's.
    pub session: u32,
    /// Its name, as ps(1) shows it.
    pub name: String,
    /// Whether it runs.
    pub state: ProcessState,
    /// How it ended, as wait(2) tells, when it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_status: Option<u32>,
    /// Its program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executable: Option<String>,
    /// Where in its memory its arguments are.
    #[serde(skip)]
    pub(crate) arguments: Option<Range<u64>>,
    /// Its working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
    /// Its root directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_directory: Option<String>,
    /// Its threads; the first is the one it began with.
    pub threads: Vec<Thread>,
    /// Signals that wait for any of its threads.
    pub pending_signals: Vec<String>,
    /// Its memory by kind.
    pub memory: Vec<KindBytes>,
    /// Its mappings, by address.
    pub regions: Vec<MappedRegion>,
    /// Its open files, by descriptor.
    pub files: Vec<OpenFile>,
}

/// Whether a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProcessState {
    /// It runs, or waits for something.
    Alive,
    /// A signal has stopped it.
    Stopped,
    /// It has ended; its parent has not asked how.
    Zombie,
    /// The images do not say.
    Unknown,
}

/// One thread.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Thread {
    /// Its id in the innermost namespace.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// What limits its system calls.
    pub seccomp: Seccomp,
    /// Who it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<Credentials>,
    /// Signals that wait for it.
    pub pending_signals: Vec<String>,
}

/// What limits the system calls of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Seccomp {
    /// Nothing.
    #[default]
    None,
    /// It may read, write and end.
    Strict,
    /// A program decides.
    Filter,
}

/// Who a thread is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    /// User.
    pub uid: u32,
    /// User that permissions are checked for.
    pub effective_uid: u32,
    /// Group.
    pub gid: u32,
    /// Group that permissions are checked for.
    pub effective_gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// Capabilities it can use, as `CAP_CHOWN`.
    pub effective_capabilities: BTreeSet<String>,
    /// Capabilities it can use or regain.
    pub capabilities: BTreeSet<String>,
    /// Whether no program can give it more.
    pub no_new_privileges: bool,
    /// Profile of the security module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_profile: Option<String>,
}

/// The processes of a dump, not looked into yet.
#[derive(Debug)]
pub(super) struct Tree {
    entries: Vec<TreeEntry>,
    cores: BTreeMap<u32, Core>,
    ids: BTreeMap<u32, Ids>,
}

impl Tree {
    /// Reads which processes there are. Each process and thread is shown once, whatever the images
    /// say.
    pub(super) fn read(source: &mut Source) -> Self {
        let mut entries: Vec<TreeEntry> = Vec::new();
        let (mut known, mut twice, mut many, mut listed) = (BTreeSet::new(), false, false, 0);
        source.each("pstree.img", Magic::PSTREE, |entry: TreeEntry| {
            listed += 1 + entry.threads.len();
            many |= listed > 2 * THREADS_MAX || known.len() >= THREADS_MAX;
            if many || !known.insert(entry.pid) {
                twice |= !many;
                return;
            }
            entries.push(entry);
        });
        let mut cores = BTreeMap::new();
        for entry in &mut entries {
            let own = entry.pid;
            let core = core(source, own);
            // Of one that has ended CRIU lists numbers of no thread.
            if core.as_ref().and_then(|core| core.process.as_ref()).is_some_and(is_dead) {
                entry.threads.clear();
            }
            cores.extend(core.map(|core| (own, core)));
            entry.threads.retain(|thread| {
                many |= known.len() >= THREADS_MAX;
                let new = *thread != own && !many && known.insert(*thread);
                twice |= *thread != own && !many && !new;
                new
            });
        }
        if twice {
            source.problem("pstree.img", "it has a process or thread twice");
        }
        if many {
            source.problem("pstree.img", format!("it has more than {THREADS_MAX} threads"));
        }
        for tid in entries.iter().flat_map(|entry| &entry.threads) {
            cores.extend(core(source, *tid).map(|core| (*tid, core)));
        }
        let mut ids = BTreeMap::new();
        for entry in &entries {
            let pid = entry.pid;
            let there = source.one::<Ids>(&format!("ids-{pid}.img"), IDS);
            let found = there.or_else(|| cores.get(&pid)?.ids);
            ids.extend(found.map(|found| (pid, found)));
        }
        Self { entries: in_order(entries), cores, ids }
    }

    /// Returns what each living process shares with others.
    pub(super) const fn ids(&self) -> &BTreeMap<u32, Ids> {
        &self.ids
    }

    /// Looks into each process.
    pub(super) fn processes(
        &self,
        source: &mut Source,
        files: &Table,
        accounts: &mut Accounts<'_>,
    ) -> Vec<Process> {
        let mut processes = Vec::with_capacity(self.entries.len());
        for entry in &self.entries {
            let ids = self.ids.get(&entry.pid);
            let open = ids.map_or_else(Vec::new, |ids| files.of(source, ids.files));
            let memory = accounts.process(source, files, entry.pid);
            let place: Option<FileSystem> = source.one(&format!("fs-{}.img", entry.pid), FS);
            processes.push(self.process(entry, files, (open, memory, place)));
        }
        processes
    }

    fn process(
        &self,
        entry: &TreeEntry,
        files: &Table,
        (open, memory, place): (Vec<OpenFile>, ProcessMemory, Option<FileSystem>),
    ) -> Process {
        let core = self.cores.get(&entry.pid);
        let leader = core.and_then(|core| core.process.clone()).unwrap_or_default();
        let state = match leader.state {
            1 => ProcessState::Alive,
            3 => ProcessState::Stopped,
            2 | 6 => ProcessState::Zombie,
            _ => ProcessState::Unknown,
        };
        let threads = [&entry.pid].into_iter().chain(&entry.threads);
        let threads = match state {
            ProcessState::Zombie => Vec::new(),
            _ => threads.map(|tid| self.thread(*tid, &leader)).collect(),
        };
        Process {
            pid: entry.pid,
            parent: entry.ppid,
            group: entry.pgid,
            session: entry.sid,
            name: text(&leader.comm),
            state,
            exit_status: (state == ProcessState::Zombie).then_some(leader.exit_code),
            executable: memory.executable.and_then(|id| files.path(id)),
            arguments: memory.arguments,
            working_directory: place.and_then(|place| files.path(place.working_directory)),
            root_directory: place.and_then(|place| files.path(place.root)),
            threads,
            pending_signals: pending(leader.signals.as_ref()),
            memory: memory.kinds,
            regions: memory.regions,
            files: open,
        }
    }

    fn thread(&self, tid: u32, leader: &ProcessCore) -> Thread {
        let core = self.cores.get(&tid).and_then(|core| core.thread.clone()).unwrap_or_default();
        let seccomp = match core.seccomp_mode.or(leader.old_seccomp_mode) {
            Some(1) => Seccomp::Strict,
            Some(2) => Seccomp::Filter,
            _ => Seccomp::None,
        };
        Thread {
            id: tid,
            name: text(core.comm.as_ref().unwrap_or(&leader.comm)),
            seccomp,
            credentials: core.credentials.as_ref().map(credentials),
            pending_signals: pending(core.signals.as_ref()),
        }
    }
}

/// Reads what a thread was when it was dumped.
fn core(source: &mut Source, tid: u32) -> Option<Core> {
    let image = format!("core-{tid}.img");
    let core = source.one::<Core>(&image, CORE)?;
    source.affords(&image, held_bytes(&core)).then_some(core)
}

/// Whether a process had ended, and nobody had asked how (`TASK_DEAD`, `TASK_ZOMBIE` in CRIU's `core.proto`).
const fn is_dead(process: &ProcessCore) -> bool {
    matches!(process.state, 2 | 6)
}

fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// Puts parents before their children. What has no parent here, or is its own ancestor, begins a
/// tree.
fn in_order(entries: Vec<TreeEntry>) -> Vec<TreeEntry> {
    let pids: BTreeSet<u32> = entries.iter().map(|entry| entry.pid).collect();
    let mut children: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut roots = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        if pids.contains(&entry.ppid) {
            children.entry(entry.ppid).or_default().push(at);
        } else {
            roots.push(at);
        }
    }
    let mut left: Vec<Option<TreeEntry>> = entries.into_iter().map(Some).collect();
    let mut ordered = Vec::with_capacity(left.len());
    // What no root leads to goes round in circles, and begins anywhere.
    let circles: Vec<usize> = (0..left.len()).collect();
    for root in roots.into_iter().chain(circles) {
        let mut next = vec![root];
        while let Some(at) = next.pop() {
            let Some(entry) = left.get_mut(at).and_then(Option::take) else { continue };
            next.extend(children.get(&entry.pid).into_iter().flatten().rev());
            ordered.push(entry);
        }
    }
    ordered
}

fn credentials(of: &images::Credentials) -> Credentials {
    let sets = [&of.inheritable, &of.permitted, &of.effective, &of.bounding, &of.ambient];
    Credentials {
        uid: of.uid,
        effective_uid: of.euid,
        gid: of.gid,
        effective_gid: of.egid,
        groups: of.groups.iter().copied().take(GROUPS_MAX).collect(),
        effective_capabilities: capabilities(&of.effective),
        capabilities: sets.into_iter().flat_map(|set| capabilities(set)).collect(),
        no_new_privileges: of.no_new_privs == Some(1),
        security_profile: of.lsm_profile.clone().filter(|profile| !profile.is_empty()),
    }
}

/// Names signals that wait; `siginfo_t` begins with the number.
fn pending(signals: Option<&Signals>) -> Vec<String> {
    let queue = signals.into_iter().flat_map(|signals| &signals.queue).take(SIGNALS_MAX);
    let numbers = queue.filter_map(|queued| queued.info.first_chunk::<4>());
    numbers.map(|number| signal(u32::from_le_bytes(*number))).collect()
}

/// Returns about how many bytes a thread takes beside what every thread does.
fn held_bytes(core: &Core) -> usize {
    let own = core.thread.as_ref();
    let queues = [
        core.process.as_ref().and_then(|process| process.signals.as_ref()),
        own.and_then(|thread| thread.signals.as_ref()),
    ];
    let waiting = queues.into_iter().flatten().flat_map(|signals| &signals.queue);
    let signals: usize = waiting.map(|signal| size_of::<Signal>() + signal.info.len()).sum();
    let credentials = own.and_then(|thread| thread.credentials.as_ref());
    let groups = credentials.map_or(0, |credentials| credentials.groups.len() * 4);
    size_of::<Core>() + signals + groups
}
