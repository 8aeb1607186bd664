//! Memory that CRIU reads as it comes from the registry, and what goes wrong meanwhile.

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::cancels::{begin, fails, registry, stage};
use super::halt::halt;
use super::victims::{END_LIMIT, catch, running, signal};
use crate::harness::{checkpoint, restore, said, start};

/// Memory of the process; more than is fetched ahead.
const MIB: u32 = 256;

/// The file systems of ours that are mounted on a node, and the bytes that are in its staging
/// directory.
fn mounted(node: &Node) -> (usize, u64) {
    let mounts = node.run(&["cat", "/proc/self/mounts"]).unwrap();
    let used = node.run(&["du", "-sxb", "/run/kybernate/stage"]).unwrap();
    let used = used.split_whitespace().next().unwrap().parse().unwrap();
    (mounts.matches("kybernate-memory").count(), used)
}

/// Begins a restore and holds CRIU at its beginning, and the registry.
fn half_way(
    scenario: &Scenario,
    node: &Node,
    reference: &str,
) -> (std::process::Child, Vec<Process>) {
    let kyb = begin(node, &["restore", reference, "--name", "job"]);
    let begun = || stage(node, "work/restore.log") > 0;
    let criu = halt(node, begun, begun);
    registry(scenario).signal(Signal::STOP);
    (kyb, criu)
}

/// The registry goes.
fn the_registry_goes(scenario: &mut Scenario, name: &str, reference: &str, before: &str) {
    let (kyb, criu) = half_way(scenario, scenario.node(name), reference);
    drop(scenario.registry.take());
    signal(&criu, Signal::CONT);
    let node = scenario.node(name);
    let told = fails(kyb);
    assert!(told.contains("pull blob"), "{told}");
    assert_eq!(running(node, "criu"), []);
    assert_eq!(scenario.traces(node).unwrap(), before);
    assert_eq!(mounted(node).0, 0);
    scenario.registry = Some(scenario.start_registry().unwrap());
}

/// The agent dies, and with it what CRIU reads; the next one takes the rest away.
fn the_agent_dies(scenario: &mut Scenario, name: &str, reference: &str, before: &str) {
    let (kyb, criu) = half_way(scenario, scenario.node(name), reference);
    scenario.agent(name).take().unwrap().kill();
    signal(&criu, Signal::CONT);
    registry(scenario).signal(Signal::CONT);
    fails(kyb);
    let node = scenario.node(name);
    assert!(wait_until(END_LIMIT, || running(node, "criu").is_empty()), "CRIU goes on");
    scenario.next_agent(name, "").unwrap();
    let node = scenario.node(name);
    // It is another process.
    let left = |traces: &str| {
        let lines = traces.lines().filter(|line| !line.contains("kybernate-agent"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut now = Vec::new();
    let clean = wait_until(END_LIMIT, || {
        now = left(&scenario.traces(node).unwrap());
        now == left(before)
    });
    assert!(clean, "{now:?} is left, and before it was {before}");
    assert_eq!(mounted(node).0, 0);
}

/// Where it is not wanted, the memory is written first.
fn where_it_is_not_wanted(scenario: &mut Scenario, name: &str, reference: &str) {
    scenario.next_agent(name, "pages_on_demand = false\n").unwrap();
    let node = scenario.node(name);
    let kyb = begin(node, &["restore", reference, "--name", "job"]);
    let written = || {
        let entries = fs::read_dir(node.path("/run/kybernate/stage")).unwrap();
        let files = entries.map(|entry| entry.unwrap().path().join("images/pages-1.img"));
        let found = files.filter_map(|file| fs::symlink_metadata(file).ok());
        found.map(|file| file.is_file()).next()
    };
    let mut found = None;
    let seen = catch(|| {
        found = written();
        found.is_some()
    });
    assert!(seen, "nothing is written");
    assert_eq!(found, Some(true));
    let output = kyb.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(node, "job").unwrap();
}

#[test]
fn memory_comes_while_it_is_restored() {
    let mut scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", MIB, &[]).unwrap();
    let reference = scenario.reference("memory/job:v1");
    checkpoint(&scenario, a, "job", &reference);
    scenario.remove(a, "job").unwrap();
    for name in ["a", "b"] {
        let node = scenario.node(name);
        // The first one leaves the image and its layers.
        let output = restore(&scenario, node, &reference, "job", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();
        let before = scenario.traces(node).unwrap();

        // It is written nowhere, and CRIU waits for it.
        let (kyb, criu) = half_way(&scenario, node, &reference);
        let (mounts, bytes) = mounted(node);
        assert_eq!(mounts, 1);
        assert!(bytes < 8 << 20, "{bytes} bytes are staged");
        signal(&criu, Signal::CONT);
        registry(&scenario).signal(Signal::CONT);
        let output = kyb.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
        assert_eq!(mounted(node).0, 0);
        scenario.remove(node, "job").unwrap();
        assert_eq!(scenario.traces(node).unwrap(), before);

        // It takes a minute to believe that; `slow` shows it on both nodes.
        if name == "a" {
            the_registry_goes(&mut scenario, name, &reference, &before);
        }
        the_agent_dies(&mut scenario, name, &reference, &before);
        where_it_is_not_wanted(&mut scenario, name, &reference);
    }
    scenario.end().unwrap();
}
