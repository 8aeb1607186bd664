//! Finding who is to die, and the moment for it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::process::Child;
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;
use serde_json::Value;

use super::cancels::newest;

/// How long whoever is left may take to put everything right: they wait for what may come back.
pub(crate) const END_LIMIT: Duration = Duration::from_mins(1);
/// After a moment is seen, at most this passes before someone dies.
const JITTER_MICROS: u64 = 4000;

/// How often a moment is looked for: without a rest, those who are looked at wait for a processor.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Waits for a moment closely. It may be far away on a loaded machine.
pub(crate) fn catch(mut what: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + END_LIMIT;
    while !what() {
        if Instant::now() > end {
            return false;
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
    true
}

/// Lets a random instant pass.
pub(super) fn dither() {
    let random = RandomState::new().hash_one(0);
    let end = Instant::now() + Duration::from_micros(random % JITTER_MICROS);
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Returns the processes in a node that `fit`.
pub(crate) fn processes(node: &Node, fit: impl Fn(u32) -> bool) -> Vec<Process> {
    let space = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = space(node.init().pid);
    let pids = fs::read_dir("/proc").unwrap();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| fit(*pid) && space(*pid) == own).filter_map(Process::find).collect()
}

/// Returns the processes of a program in a node. CRIU changes its command line, not this name.
pub(crate) fn running(node: &Node, name: &str) -> Vec<Process> {
    let comm = |pid| fs::read_to_string(format!("/proc/{pid}/comm"));
    processes(node, |pid| comm(pid).is_ok_and(|comm| comm.trim() == name))
}

/// Whether a process is a guardian.
pub(crate) fn guards(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("\0guardian\0")
}

/// Kills a node's `kyb` in the middle of an operation, and waits until the agent has done that alone.
pub(crate) fn is_done_without_kyb(scenario: &Scenario, node: &Node, mut kyb: Child, kind: &str) {
    signal(&running(node, "kyb"), Signal::KILL);
    assert!(!kyb.wait().unwrap().success(), "kyb was done before on {}", node.name());
    let mut last = Value::Null;
    let ended = wait_until(END_LIMIT, || {
        last = newest(scenario, node);
        last["state"] != "running"
    });
    assert!(ended && last["kind"] == kind && last["state"] == "done", "{last}");
}

/// Starts the containerd of a node that was killed, and waits until it answers.
pub(crate) fn start_containerd(node: &Node) {
    let script = "containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &";
    node.run(&["sh", "-c", script]).unwrap();
    let answers = || node.run(&["ctr", "--connect-timeout", "1s", "version"]).is_ok();
    assert!(wait_until(END_LIMIT, answers), "containerd does not start again");
}

pub(crate) fn signal(processes: &[Process], signal: Signal) {
    for process in processes {
        process.signal(signal);
    }
}
