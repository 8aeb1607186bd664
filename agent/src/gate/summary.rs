//! What the images say, decoded. Runs in the process without privileges.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use kybernate_packager::criu::messages::{
    CORE, Core, Credentials, IDS, Ids, MOUNTS, MountEntry, ProcessCore, SECCOMP, Seccomp,
    ThreadCore,
};
use kybernate_packager::criu::{
    ImageError, Inventory, Magic, NO_LOCK, Process, capability_names, process_id,
};
use kybernate_spec::checkpoint::Identity;
use serde::{Deserialize, Serialize};

use super::images::{
    CGROUPS, Cgroups, DESCRIPTORS, Descriptor, FILES, File, NETWORK, Network, PIDS, Pids, REMAPS,
    Remap,
};
use super::memory::{self, Links, Ways};
use super::mounts::MountFact;
use super::opened::{Memory, Opened, Paths};
use super::records::{Failure, each, maybe_one, one};
use super::remaps::{self, CopyFact, LinkFact, Remaps};
use super::seccomp::{Filters, Refused};
use super::{cgroups, pages, sockets};

/// More of anything than this is no container: the summary stays small whatever the images hold.
const ENTRIES_MAX: usize = 1 << 16;

/// As many mounts as no container has.
const MOUNTS_MAX: usize = 1 << 12;

/// Files of CRIU's that hold a TCP connection begin so.
const TCP_IMAGE: &str = "tcp-stream-";

/// And those with the rules of a network that is the container's own, which runc leaves out.
const RULES: [&str; 3] = ["iptables-", "ip6tables-", "nftables-"];

/// States of a process that will never run again; it needs no credentials.
const DEAD: u32 = 2;
const ZOMBIE: u32 = 6;

/// `SCHED_OTHER`, `SCHED_BATCH` and `SCHED_IDLE`: no other is everybody's.
const USUAL_POLICIES: [u32; 3] = [0, 3, 5];

/// Limits of how urgent a process may make itself (getrlimit(2)), with their numbers, and up to where they let
/// it go before nobody: 20 is a nice value of 0.
pub(crate) const URGENT_LIMITS: [(&str, usize, u64); 2] =
    [("RLIMIT_NICE", 13, 20), ("RLIMIT_RTPRIO", 14, 0)];

/// What the images say about identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) processes: u32,
    pub(crate) threads: u32,
    /// 0 none, 1 `SELinux`, 2 `AppArmor`.
    pub(crate) lsm: i32,
    pub(crate) plugins: Vec<String>,
    /// Whether the dump says which of CRIU's plugins it needs.
    pub(crate) lists_plugins: bool,
    /// Whether its TCP connections were closed, which a restore has to be told.
    pub(crate) tcp_close: bool,
    /// How CRIU would lock the network that it restores into.
    pub(crate) network_lock: u32,
    /// The different identities of the threads.
    pub(crate) identities: BTreeSet<ThreadIdentity>,
    /// Namespaces the processes share with the host the dump was taken on.
    pub(crate) host_namespaces: BTreeSet<String>,
    /// Namespaces that whoever restores hands over, and by which names CRIU asks for them.
    pub(crate) external_namespaces: BTreeMap<String, String>,
    /// Whether some process is in other namespaces than the first.
    pub(crate) nested_namespaces: bool,
    pub(crate) mounts: Vec<MountFact>,
    /// How many mount namespaces there are.
    pub(crate) mount_namespaces: u32,
    /// Kinds of open files, by CRIU's numbers.
    pub(crate) file_kinds: BTreeSet<i32>,
    /// Capabilities without which nobody makes some of its sockets.
    pub(crate) for_sockets: BTreeSet<String>,
    /// Permissions of the root directory, which each process has open.
    pub(crate) root_mode: Option<u32>,
    /// Open files that someone outside must provide.
    pub(crate) external_files: BTreeSet<String>,
    /// Paths of open files that are on no mount of the dump's own.
    pub(crate) opened: BTreeSet<String>,
    /// Paths of what CRIU makes.
    pub(crate) made: BTreeSet<String>,
    /// Paths of both that would lead CRIU out of the container, the first few.
    pub(crate) elsewhere: BTreeSet<String>,
    /// Symbolic links that are open themselves.
    pub(crate) open_links: BTreeSet<String>,
    /// Paths of files and mounts that a link of the dump's own files in memory leads elsewhere.
    pub(crate) led: BTreeSet<String>,
    /// Those links that may be on the way to what CRIU makes.
    pub(crate) links_in_memory: BTreeMap<String, String>,
    /// Files that CRIU makes of others, which it removes.
    pub(crate) links: Vec<LinkFact>,
    /// Files without a name that CRIU would make where the dump's own files lead it.
    pub(crate) copies: Vec<CopyFact>,
    /// The labels that `SELinux` is told to give to open sockets.
    pub(crate) socket_labels: BTreeSet<String>,
    /// How many bytes must be in which file of pages, by its number.
    pub(crate) memory: BTreeMap<u32, u64>,
    /// How many sets of cgroups the threads are in, when all are one cgroup of version 2 at which
    /// their cgroup namespace begins. CRIU can be let make that: it makes nothing else of it.
    pub(crate) own_cgroup: Option<usize>,
    /// The sets of cgroups that threads are in.
    pub(crate) cgroup_sets: BTreeSet<u32>,
    /// Names of all files of the dump.
    pub(crate) names: BTreeSet<String>,
}

/// Who a thread is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ThreadIdentity {
    pub(crate) uids: BTreeSet<u32>,
    pub(crate) gids: BTreeSet<u32>,
    /// All it could use or get back, the bounding set included.
    pub(crate) capabilities: BTreeSet<String>,
    /// Of these, what it can use now.
    pub(crate) held: BTreeSet<String>,
    pub(crate) no_new_privileges: bool,
    pub(crate) seccomp: bool,
    /// What its seccomp filters refuse.
    pub(crate) refused: Refused,
    /// Whether it goes before other processes of the node.
    pub(crate) is_urgent: bool,
    /// The limits that let it, when it wants, by their names.
    pub(crate) limits: BTreeSet<String>,
    /// What CRIU gives to the thread: a profile of `AppArmor`, a label of `SELinux`.
    pub(crate) lsm_profile: Option<String>,
    /// The label that sockets get which the thread makes.
    pub(crate) lsm_socket: Option<String>,
}

/// Why images cannot be judged. Such a dump is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SummaryError {
    #[error("failed to decode {0:?}")]
    Image(String, #[source] ImageError),
    #[error("{0:?} is missing")]
    Missing(String),
    #[error("{0}")]
    Contradiction(String),
    #[error("there are too many {0}")]
    TooMany(&'static str),
}

/// Takes images one by one and sums them up.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    summary: Summary,
    tree: Vec<Process>,
    inventory: Option<Inventory>,
    cores: BTreeMap<u32, Core>,
    ids: BTreeMap<u32, Ids>,
    /// Names of namespaces that come from outside, by their kind and number.
    external: BTreeMap<(&'static str, u32), String>,
    filters: Filters,
    remaps: Remaps,
    opened: Opened,
    cgroups: Option<Cgroups>,
    /// What comes last.
    memory: Links,
    ways: Option<Ways>,
}

/// Images of which there is one for each process, table of descriptors or mount namespace.
const NUMBERED: &[&str] = &["core", "ids", "fdinfo", "mountpoints"];

/// Whether the gate wants to see the content of this file.
pub(crate) fn is_judged(name: &str) -> bool {
    matches!(
        name,
        "inventory.img"
            | "pstree.img"
            | "files.img"
            | "seccomp.img"
            | "cgroup.img"
            | "remap-fpath.img"
    ) || NUMBERED.iter().any(|prefix| numbered(name, prefix).is_some())
        || pages::is_pagemap(name)
        || remaps::ghost(name).is_some()
        || memory::is_content(name)
        || namespace(name).is_some()
}

/// Returns which namespace an image is about, if it can come from outside.
fn namespace(name: &str) -> Option<(&'static str, u32)> {
    let of = |prefix, kind| numbered(name, prefix).map(|number| (kind, number));
    of("netns", "network").or_else(|| of("pidns", "pid"))
}

/// Returns the number in a name as CRIU writes it: `core-1.img`, but not `core-01.img`, which would
/// be judged in place of the file that CRIU reads.
fn numbered(name: &str, prefix: &str) -> Option<u32> {
    process_id(name, prefix).filter(|number| name == format!("{prefix}-{number}.img"))
}

impl Builder {
    /// Takes the name of a file.
    pub(crate) fn name(&mut self, name: &str) -> Result<(), SummaryError> {
        let prefix = NUMBERED
            .iter()
            .find(|prefix| name.strip_prefix(**prefix).is_some_and(|rest| rest.starts_with('-')));
        let is_none = prefix.is_some_and(|prefix| numbered(name, prefix).is_none());
        let is_ghost = || name.starts_with(remaps::GHOSTS) && remaps::ghost(name).is_none();
        let is_content = || memory::is_content(name) && memory::device(name).is_none();
        if is_none || is_ghost() || is_content() {
            return contradiction(format!("{name:?} is no name that CRIU gives a file"));
        }
        self.summary.names.insert(name.to_owned());
        bounded(self.summary.names.len(), "files")
    }

    /// Takes a file that [`is_judged`].
    pub(crate) fn image(&mut self, name: &str, content: impl Read) -> Result<(), SummaryError> {
        self.decode(name, content).map_err(|error| match error {
            Failure::Image(error) => SummaryError::Image(name.to_owned(), error),
            Failure::Other(error) => error,
        })
    }

    /// Puts everything together.
    pub(crate) fn finish(mut self) -> Result<Summary, SummaryError> {
        let missing = |name: &str| SummaryError::Missing(name.to_owned());
        let inventory = self.inventory.take().ok_or_else(|| missing("inventory.img"))?;
        if !(1..=2).contains(&inventory.img_version) {
            let version = inventory.img_version;
            return contradiction(format!("images of version {version} are not known"));
        }
        self.summary.lsm = inventory.lsm.unwrap_or(0);
        self.summary.tcp_close = inventory.tcp_close.unwrap_or(false);
        // One that says nothing of it is from when there was but one way.
        self.summary.network_lock = inventory.network_lock.unwrap_or_default();
        self.summary.lists_plugins = inventory.plugins.is_some();
        self.summary.plugins = inventory.plugins.unwrap_or_default().names;
        let host = inventory.root_ids.ok_or_else(|| {
            SummaryError::Contradiction("the inventory names no namespaces".to_owned())
        })?;
        let tree = std::mem::take(&mut self.tree);
        if tree.is_empty() {
            return Err(missing("pstree.img"));
        }
        self.count(&tree)?;
        self.identities(&tree)?;
        self.namespaces(&tree, host)?;
        self.summary.own_cgroup = self.own_cgroup(&tree);
        if self.summary.file_kinds.is_empty() {
            // CRIU would take open files from images of an old form, which nobody here reads.
            return contradiction("files.img has no open file".to_owned());
        }
        let links = self.remaps.links_on(&self.summary.mounts);
        let copies = links.and_then(|links| Ok((links, self.remaps.copies(&self.summary.mounts)?)));
        (self.summary.links, self.summary.copies) = copies.map_err(SummaryError::Contradiction)?;
        (self.summary.led, self.summary.links_in_memory) = (self.memory.led, self.memory.all);
        let summary = &mut self.summary;
        [summary.opened, summary.made, summary.elsewhere, summary.open_links] =
            self.opened.on(&summary.mounts, &self.remaps);
        Ok(self.summary)
    }

    fn decode(&mut self, name: &str, content: impl Read) -> Result<(), Failure> {
        if let Some(pid) = numbered(name, "core") {
            let core = one(content, CORE)?;
            self.cores.insert(pid, core);
            bounded(self.cores.len(), "threads")?;
        } else if let Some(pid) = numbered(name, "ids") {
            self.ids.insert(pid, one(content, IDS)?);
        } else if numbered(name, "fdinfo").is_some() {
            let labels = &mut self.summary.socket_labels;
            each(content, DESCRIPTORS, |descriptor: Descriptor| {
                labels.extend(descriptor.label.filter(|label| !label.is_empty()));
                bounded(labels.len(), "labels")
            })?;
        } else if numbered(name, "mountpoints").is_some() {
            self.summary.mount_namespaces += 1;
            self.mounts(content)?;
        } else if let Some((kind, number)) = namespace(name) {
            let external = match kind {
                "network" => one::<Network>(content, NETWORK)?.external,
                _ => one::<Pids>(content, PIDS)?.external,
            };
            self.external.extend(external.map(|key| ((kind, number), key)));
            bounded(self.external.len(), "namespaces")?;
        } else if remaps::ghost(name).is_some() {
            remaps::judge_ghost(name, content)?;
        } else if let Some(device) = memory::device(name) {
            self.content(device, content)?;
        } else if pages::is_pagemap(name) {
            let (number, bytes) = pages::needed(content)?;
            let memory = &mut self.summary.memory;
            // Each is read from the beginning of its file.
            let most = memory.entry(number).or_default();
            *most = bytes.max(*most);
            bounded(memory.len(), "files of pages")?;
        } else {
            match name {
                "inventory.img" => self.inventory = Some(one(content, Magic::INVENTORY)?),
                "pstree.img" => {
                    each(content, Magic::PSTREE, |process: Process| {
                        self.tree.push(process);
                        bounded(self.tree.len(), "processes")
                    })?;
                }
                "files.img" => self.files(content)?,
                "remap-fpath.img" => {
                    each(content, REMAPS, |remap: Remap| {
                        bounded(self.remaps.add(remap), "files without their names")
                    })?;
                }
                "seccomp.img" => {
                    let seccomp: Seccomp = one(content, SECCOMP)?;
                    self.filters = Filters::of(&seccomp);
                }
                "cgroup.img" => {
                    self.cgroups = maybe_one(content, CGROUPS)?;
                    if let Some(reason) = self.cgroups.as_ref().and_then(cgroups::wrong) {
                        return Err(SummaryError::Contradiction(reason.to_owned()).into());
                    }
                    let sets = self.cgroups.as_ref().map(cgroups::sets);
                    self.summary.cgroup_sets = sets.unwrap_or_default();
                    bounded(self.summary.cgroup_sets.len(), "sets of cgroups")?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn mounts(&mut self, content: impl Read) -> Result<(), Failure> {
        let mounts = &mut self.summary.mounts;
        each(content, MOUNTS, |mount: MountEntry| {
            mounts.push(MountFact::of(mount));
            // Each is compared with all others.
            if mounts.len() > MOUNTS_MAX { Err(SummaryError::TooMany("mounts")) } else { Ok(()) }
        })
    }

    /// Takes what is to be in a file system in memory, when all is known that CRIU goes by.
    fn content(&mut self, device: u32, content: impl Read) -> Result<(), Failure> {
        let (mounts, opened) = (&self.summary.mounts, &self.opened);
        let ways = self.ways.get_or_insert_with(|| {
            let (straight, makes) = opened.ways(&self.remaps);
            let places = mounts.iter().map(|mount| &*mount.path);
            Ways::of(straight.into_iter().chain(places), makes)
        });
        let taken = self.memory.take(content, device, mounts, ways).map_err(ImageError::from)?;
        Ok(taken.map_err(SummaryError::Contradiction)?)
    }

    fn files(&mut self, content: impl Read) -> Result<(), Failure> {
        let (summary, remaps) = (&mut self.summary, &mut self.remaps);
        let opened = &mut self.opened;
        each(content, FILES, |file: File| {
            summary.file_kinds.insert(file.kind);
            bounded(summary.file_kinds.len(), "kinds of files")?;
            summary.for_sockets.extend(sockets::needed(&file).map(str::to_owned));
            remaps.number(file.id);
            bounded(opened.add(&file), "paths of open files")?;
            if let Some(regular) = file.regular {
                remaps.file(file.kind, &regular);
                if matches!(&*regular.name, "/" | ".") {
                    summary.root_mode = regular.mode.map(|mode| mode & 0o7777);
                }
                if regular.external == Some(true) {
                    summary.external_files.insert(regular.name);
                }
            }
            bounded(summary.external_files.len(), "external files")
        })
    }

    /// The process tree and the cores must name the same threads: CRIU would restore the one and
    /// not look at the other.
    fn count(&mut self, tree: &[Process]) -> Result<(), SummaryError> {
        let mut threads = BTreeSet::new();
        let leaders: BTreeSet<u32> = tree.iter().map(|process| process.pid).collect();
        for process in tree {
            threads.insert(process.pid);
            // CRIU lists as many threads of a dead process as the kernel does, with whatever numbers
            // were in its memory, and restores none of them (4.1.1, 4.2.1).
            if !self.is_dead(process.pid) {
                threads.extend(&process.threads);
            }
            bounded(threads.len(), "threads")?;
        }
        if leaders.len() != tree.len() {
            return contradiction("a process is listed twice in the process tree".to_owned());
        }
        if let Some(stray) = self.cores.keys().find(|pid| !threads.contains(pid)) {
            return contradiction(format!("process {stray} has a core but is not in the tree"));
        }
        if let Some(lost) = threads.iter().find(|pid| !self.cores.contains_key(pid)) {
            return Err(SummaryError::Missing(format!("core-{lost}.img")));
        }
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.summary.processes = count(leaders.len());
        self.summary.threads = count(threads.len());
        Ok(())
    }

    fn identities(&mut self, tree: &[Process]) -> Result<(), SummaryError> {
        for process in tree {
            let leader = self.cores.get(&process.pid).and_then(|core| core.process.clone());
            let leader = leader.unwrap_or_default();
            let is_dead = self.is_dead(process.pid);
            let others = process.threads.iter().filter(|tid| !is_dead && **tid != process.pid);
            let ids: Vec<u32> = [&process.pid].into_iter().chain(others).copied().collect();
            let thread = |tid: &u32| self.cores.get(tid).and_then(|core| core.thread.clone());
            let threads: Vec<ThreadCore> =
                ids.iter().map(|tid| thread(tid).unwrap_or_default()).collect();
            let refused = match threads.split_first() {
                Some((first, others)) if !is_dead => self.filters.refused(first, others.iter()),
                _ => Ok(vec![None]),
            };
            let refused = refused.map_err(|why| {
                SummaryError::Contradiction(format!("process {} {why}", process.pid))
            })?;
            for ((tid, thread), refused) in ids.into_iter().zip(threads).zip(refused) {
                if let Some(credentials) = &thread.credentials {
                    let identity = identity(tid, credentials, (&thread, &leader), refused)?;
                    self.summary.identities.insert(identity);
                    bounded(self.summary.identities.len(), "identities")?;
                } else if !is_dead {
                    return contradiction(format!("thread {tid} has no credentials"));
                }
            }
        }
        Ok(())
    }

    /// Returns how many sets of cgroups are described, if all are one and every thread was in it.
    fn own_cgroup(&self, tree: &[Process]) -> Option<usize> {
        let own = self.cgroups.as_ref().and_then(cgroups::own)?;
        let mut living = tree.iter().filter(|process| !self.is_dead(process.pid));
        let all = living.all(|process| {
            let leader = self.cores.get(&process.pid).and_then(|core| core.process.as_ref());
            let older = leader.and_then(|leader| leader.cgroups);
            process.threads.iter().chain([&process.pid]).all(|tid| {
                let thread = self.cores.get(tid).and_then(|core| core.thread.as_ref());
                let set = thread.and_then(|thread| thread.cgroups).or(older);
                set.is_some_and(|set| own.contains(&set))
            })
        });
        all.then_some(own.len())
    }

    /// Whether a process will never run again.
    fn is_dead(&self, pid: u32) -> bool {
        let core = self.cores.get(&pid).and_then(|core| core.process.as_ref());
        core.is_some_and(|core| matches!(core.state, DEAD | ZOMBIE))
    }

    /// Finds the namespaces shared with the host of the dump: CRIU makes no new one for those.
    fn namespaces(&mut self, tree: &[Process], host: Ids) -> Result<(), SummaryError> {
        let mut first = None;
        for process in tree {
            if self.is_dead(process.pid) {
                continue;
            }
            let core = self.cores.get(&process.pid);
            // Both places must agree: CRIU reads the separate file.
            let (there, inside) = (self.ids.get(&process.pid), core.and_then(|core| core.ids));
            if there.is_some() && inside.is_some() && there != inside.as_ref() {
                return contradiction(format!("process {} is in two places at once", process.pid));
            }
            let Some(ids) = there.copied().or(inside) else {
                return Err(SummaryError::Missing(format!("ids-{}.img", process.pid)));
            };
            let first = first.get_or_insert(ids);
            let places = |ids: &Ids| [ids.pid, ids.network, ids.ipc, ids.uts, ids.mount, ids.user];
            self.summary.nested_namespaces |= places(first) != places(&ids);
            let names = ["pid", "network", "ipc", "uts", "mount", "user"];
            for ((name, ours), theirs) in names.iter().zip(places(&ids)).zip(places(&host)) {
                // Without a number there is nothing new to be made.
                if ours.is_none() || ours == theirs {
                    self.summary.host_namespaces.insert((*name).to_owned());
                } else if let Some(key) =
                    ours.and_then(|number| self.external.get(&(*name, number)))
                {
                    // One that is the host's CRIU does not look at.
                    self.summary.external_namespaces.insert((*name).to_owned(), key.clone());
                }
            }
        }
        Ok(())
    }
}

impl Summary {
    /// Whether TCP connections are in it that go on.
    pub(crate) fn keeps_connections(&self) -> bool {
        self.names.iter().any(|name| name.starts_with(TCP_IMAGE))
    }

    /// Whether CRIU would lock the network that it restores into for nothing: what a lock keeps is
    /// connections, and it must be taken away where the dump has it among its own rules.
    pub(crate) fn locks_in_vain(&self) -> bool {
        let is_rules = |name: &String| RULES.iter().any(|rules| name.starts_with(rules));
        self.network_lock != NO_LOCK
            && !self.keeps_connections()
            && !self.names.iter().any(is_rules)
    }

    /// Returns which files its runtime had hidden.
    pub(crate) fn masked(&self) -> Vec<String> {
        let masked = self.mounts.iter().filter(|mount| mount.is_masked());
        masked.map(|mount| mount.path.clone()).collect()
    }

    /// Whether the container saw cgroups of version 1, which its runtime mounts.
    pub(crate) fn has_cgroups(&self) -> bool {
        let given = self.mounts.iter().filter(|mount| mount.external.is_some());
        given.into_iter().any(|mount| mount.path.starts_with("/sys/fs/cgroup/"))
    }

    /// Returns the paths by which CRIU goes in the new root file system.
    pub(crate) fn paths(&self) -> Paths {
        let all = |paths: &BTreeSet<String>| paths.iter().cloned().collect();
        let places = self.mounts.iter().filter(|mount| mount.is_filled());
        let places = places.map(|mount| mount.path.clone()).collect();
        let memory = Memory { places, links: self.links_in_memory.clone() };
        Paths { opened: all(&self.opened), made: all(&self.made), memory }
    }

    /// Returns who the processes are, for the facts of a checkpoint.
    pub(crate) fn identity(&self) -> Identity {
        let all = &self.identities;
        Identity {
            uids: all.iter().flat_map(|one| one.uids.clone()).collect(),
            gids: all.iter().flat_map(|one| one.gids.clone()).collect(),
            capabilities: all.iter().flat_map(|one| one.capabilities.clone()).collect(),
            no_new_privileges: all.iter().all(|one| one.no_new_privileges),
            seccomp: all.iter().all(|one| one.seccomp),
        }
    }
}

const fn bounded(number: usize, what: &'static str) -> Result<(), SummaryError> {
    if number > ENTRIES_MAX { Err(SummaryError::TooMany(what)) } else { Ok(()) }
}

/// Says who a thread is.
fn identity(
    tid: u32,
    credentials: &Credentials,
    (thread, leader): (&ThreadCore, &ProcessCore),
    refused: Option<Refused>,
) -> Result<ThreadIdentity, SummaryError> {
    let of = credentials;
    // CRIU has each of them win over what the thread says, and for the first thread alone, and then installs
    // all filters for all threads (`check_core`).
    if leader.old_seccomp_mode.is_some() || leader.old_seccomp_filter.is_some() {
        return contradiction(format!("thread {tid} has its seccomp from a CRIU that is too old"));
    }
    let sets = [&of.inheritable, &of.permitted, &of.effective, &of.bounding, &of.ambient];
    let told = |label: &Option<String>| label.clone().filter(|label| !label.is_empty());
    Ok(ThreadIdentity {
        uids: [of.uid, of.euid, of.suid, of.fsuid].into(),
        gids: [of.gid, of.egid, of.sgid, of.fsgid].into_iter().chain(of.groups.clone()).collect(),
        capabilities: sets.into_iter().flat_map(|set| capability_names(set)).collect(),
        held: [&of.permitted, &of.effective, &of.ambient]
            .into_iter()
            .flat_map(|set| capability_names(set))
            .collect(),
        no_new_privileges: of.no_new_privs == Some(1),
        seccomp: refused.is_some(),
        refused: refused.unwrap_or_default(),
        is_urgent: thread.nice.unwrap_or(0) < 0
            || thread.policy.is_some_and(|policy| !USUAL_POLICIES.contains(&policy)),
        limits: urgent_limits(leader),
        lsm_profile: told(&of.lsm_profile),
        lsm_socket: told(&of.lsm_socket),
    })
}

/// Returns the limits of a process that let it go before others when it wants.
fn urgent_limits(process: &ProcessCore) -> BTreeSet<String> {
    let limits = process.limits.as_ref().map(|limits| &*limits.all).unwrap_or_default();
    let most = |number: usize| limits.get(number).map_or(0, |limit| limit.most);
    let urgent = URGENT_LIMITS.iter().filter(|(_, number, usual)| most(*number) > *usual);
    urgent.map(|(name, _, _)| (*name).to_owned()).collect()
}

const fn contradiction<T>(text: String) -> Result<T, SummaryError> {
    Err(SummaryError::Contradiction(text))
}
