//! Names that CRIU makes in a source's files while it dumps, and takes away in the end.

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::cancels::{at_step, begin, fails, has_seized};
use super::first;
use super::halt::halt;
use super::victims::{END_LIMIT, guards, processes, running, signal};
use crate::harness::start;

/// A file that is written to by a name that was deleted, and has another one, by a shell that has enough
/// memory for its dump to be met while it has CRIU's name.
const WRITES: &str = "x=$(head -c 100000000 /dev/zero | tr '\\0' x); \
                      cd /dev/shm; exec 9>one; ln one two; rm one; \
                      while true; do echo more >&9; sleep 0.1; done";

/// Starts it, and returns its first process.
fn run(scenario: &Scenario, node: &Node) -> u32 {
    let (image, config) = (scenario.image(), "org.criu.config=/var/lib/kybernate/criu/job.conf");
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    let run = ["ctr", "run", "-d", "--annotation", config, &image, "job", "sh", "-c", WRITES];
    node.run(&run).unwrap();
    let pid = first(node).parse().unwrap();
    writes_on(node, pid);
    pid
}

/// Waits until more is in the file, by its other name.
fn writes_on(node: &Node, pid: u32) {
    let file = node.path(&format!("/proc/{pid}/root/dev/shm/two"));
    let length = || fs::metadata(&file).map_or(0, |file| file.len());
    let before = length();
    assert!(wait_until(END_LIMIT, || length() > before), "it does not go on from {before}");
}

/// Returns how many names CRIU has in the source's shared memory, by its first process.
fn names(node: &Node, pid: u32) -> usize {
    let listed = fs::read_dir(node.path(&format!("/proc/{pid}/root/dev/shm"))).unwrap();
    let names = listed.map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_string_lossy().starts_with("link_remap.")).count()
}

/// Stops CRIU when it has made a name.
fn halted(node: &Node, pid: u32) -> Vec<Process> {
    halt(node, || has_seized(node), || names(node, pid) > 0)
}

#[test]
fn what_a_killed_criu_named_is_taken_away() {
    let mut scenario = start();
    for name in ["a", "b"] {
        let node = if name == "a" { &scenario.testbed.a } else { &scenario.testbed.b };
        let pid = run(&scenario, node);
        let reference = scenario.reference("links/job:v1");
        let words = ["checkpoint", "job", &reference, "--sign-key", &format!("node-{name}")];
        // One that hangs has to be killed.
        let kyb = begin(node, &words);
        halted(node, pid);
        let id = at_step(&scenario, node, &["dump"]);
        let told = scenario.kyb_json(node, &["cancel", &id]).unwrap();
        assert_eq!(told["state"], "cancelled", "{told}");
        assert!(fails(kyb).contains("it was cancelled; the source runs"));
        assert_eq!(running(node, "criu"), []);
        assert_eq!(names(node, pid), 0, "{name}");
        writes_on(node, pid);
        scenario.remove(node, "job").unwrap();
    }

    // Nobody is left who would take it away but the next agent.
    let a = &scenario.testbed.a;
    let pid = run(&scenario, a);
    let reference = scenario.reference("links/job:v2");
    let mut kyb = begin(a, &["checkpoint", "job", &reference, "--sign-key", "node-a"]);
    halted(a, pid);
    let agents = running(a, "kybernate-agent");
    let guardians = processes(a, guards);
    assert!(!agents.is_empty() && !guardians.is_empty());
    signal(&guardians, Signal::KILL);
    signal(&agents, Signal::KILL);
    // It would wait for the next agent.
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    assert!(names(a, pid) > 0, "it was gone before");
    drop(scenario.agent_a.take());
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "").unwrap());
    let a = &scenario.testbed.a;
    // It may run before: CRIU had thawed it.
    assert!(wait_until(END_LIMIT, || names(a, pid) == 0), "a name is left");
    writes_on(a, pid);
    scenario.end().unwrap();
}
