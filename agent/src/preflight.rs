//! Looks, before anything is frozen, for what CRIU would not take, so that it costs no pause, and for
//! what the gate of every restore would refuse, so that nobody stops a source for nothing.
//!
//! [`view`] reads /proc, [`peers`] asks the kernel whom unix sockets talk to, [`rules`] decides,
//! [`check`] has the words. What a look misses, since the container runs on while it is looked at,
//! CRIU finds later.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

mod check;
mod gpu;
mod guards;
mod linked;
mod options;
mod peers;
mod rules;
mod socket;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use self::check::{Check, Finding, Findings};
pub(crate) use self::options::{CriuOptions, DEFAULT_FILE};
use self::rules::{Context, judge};
pub(crate) use self::rules::{Policy, TcpPolicy};
use self::view::View;
use crate::gpu::Gpus;
use crate::process::{self, field};

/// First kernel that refuses socket options which CRIU asks every socket for, and the first CRIU
/// that does without.
const STRICT_KERNEL: [u64; 2] = [6, 16];
const LENIENT_CRIU: [u64; 2] = [4, 2];

/// The capability that prlimit(2) wants for another user's process.
const CAP_SYS_RESOURCE: u32 = 24;

/// Whom to look at, and how.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    /// The container's first process.
    pub(crate) init: u32,
    /// All processes of its cgroup.
    pub(crate) pids: Vec<u32>,
    pub(crate) policy: Policy,
    /// Where its specification mounts something of the node.
    pub(crate) bound: Vec<String>,
    /// Those of them whose content goes along, and the directories that are mounted there.
    pub(crate) captured: Vec<(String, PathBuf)>,
    /// The upper directory of its root file system.
    pub(crate) upper: Option<PathBuf>,
    /// CRIU's configuration file for it.
    pub(crate) criu_config: PathBuf,
    /// Whether that can be written for this operation.
    pub(crate) own_options: bool,
    /// Whether a network namespace was made for it.
    pub(crate) own_network: bool,
    pub(crate) kernel: Vec<u64>,
    pub(crate) criu: Vec<u64>,
    pub(crate) execs: Vec<String>,
    /// Who moves GPU memory.
    pub(crate) gpus: Gpus,
}

/// What a look found.
#[derive(Debug)]
pub(crate) struct Looked {
    pub(crate) findings: Vec<Finding>,
    /// Whether CRIU has to make names for files, or try to.
    pub(crate) links: bool,
}

/// Looks at a container. Takes as long as its descriptors are many: 10 µs each.
pub(crate) fn look(subject: &Subject) -> Looked {
    let proc = Path::new("/proc");
    let mut view = View::of(proc, subject.init, &subject.pids);
    if guards::are_to_be_found(&subject.criu, &subject.kernel) {
        guards::find(&mut view, proc);
    }
    linked::find_names(&mut view, &subject.captured, subject.upper.as_deref());
    let net = proc.join(subject.init.to_string()).join("ns/net");
    let peers = peers::peers(&net).unwrap_or_else(|error: io::Error| {
        view.missed.push(format!("the other ends of unix sockets: {error}"));
        BTreeMap::default()
    });
    let user = fs_err::read_link("/proc/self/ns/user").ok();
    // CRIU is started by the shim, as the container's first process was.
    let shim = view.processes.iter().find(|process| process.pid == subject.init);
    let shim = shim.map_or(0, |process| process.parent);
    let context = Context {
        policy: subject.policy,
        options: CriuOptions::of(&subject.criu_config),
        own_options: subject.own_options,
        own_network: subject.own_network,
        user_namespace: user.map(|link| link.to_string_lossy().into_owned()),
        bound: subject.bound.clone(),
        captured: subject.captured.iter().map(|(place, _)| place.clone()).collect(),
        no_limits: lacks(proc, shim, CAP_SYS_RESOURCE),
        waits_for_stopped: !kybernate_packager::node::is_cgroup_v2(),
        no_internet: subject.kernel.as_slice() >= STRICT_KERNEL.as_slice()
            && subject.criu.as_slice() < LENIENT_CRIU.as_slice(),
        unsaved: gpu::unsaved(&subject.gpus),
        execs: subject.execs.clone(),
        peers,
    };
    Looked { findings: judge(&view, &context), links: linked::needs_links(&view) }
}

/// Whether a process lacks a capability. What cannot be looked at lacks none.
fn lacks(proc: &Path, pid: u32, capability: u32) -> bool {
    let status = process::read(proc.join(pid.to_string()).join("status"));
    let effective =
        status.ok().and_then(|status| u64::from_str_radix(field(&status, "CapEff:")?, 16).ok());
    effective.is_some_and(|effective| effective & (1 << capability) == 0)
}
