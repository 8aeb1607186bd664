//! Checkpoints that are taken here and restored there.

use std::process::Command;

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Scenario, counter};
use serde_json::Value;

use crate::harness::{CPU, MEMORY, bin, checkpoint, limit, refused, restore, said, start};

/// What the table of workloads calls what moves here.
pub(crate) const COUNTER: &str = "a process that counts";
/// From which node to which it moves.
pub(crate) const WAYS: [[&str; 2]; 3] = [["a", "b"], ["a", "a"], ["b", "b"]];
/// What it says of itself, and what the table says is the same afterwards.
pub(crate) const FACTS: [(&str, &str); 3] = [
    ("checksum_ok", "sums over its memory"),
    ("pipe_ok", "a child behind pipes"),
    ("log_ok", "the lines that each has written"),
];

/// The demo asserts each thing it tells: the way from a to b, what other tools see, the refusals.
#[test]
fn the_demo_tells_its_story() {
    let mut demo = Command::new(bin().join("kybernate-conformance"));
    let output = demo.args(["demo", "--mib", "64"]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

/// Moves the workload and checks that the same process goes on. Returns what it said before.
fn journey(scenario: &Scenario, from: &Node, to: &Node, name: &str) -> Value {
    let source = format!("source-{name}");
    scenario.run_workload(from, &source, 24, &[]).unwrap();
    let before = scenario.wait_for_ticks(from, &source).unwrap();
    let reference = scenario.reference(&format!("journey/{name}:v1"));
    checkpoint(scenario, from, &source, &reference);
    let still = scenario.wait_for_ticks(from, &source).unwrap();
    assert_eq!(still["boot_id_of_process"], before["boot_id_of_process"]);

    let output = restore(scenario, to, &reference, name, &[]);
    assert!(output.status.success(), "{}", said(&output));
    goes_on(scenario, to, name, &before);
    before
}

fn goes_on(scenario: &Scenario, node: &Node, name: &str, before: &Value) {
    let after = scenario.wait_for_ticks(node, name).unwrap();
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    assert!(counter(&after) > counter(before));
    for (fact, _) in FACTS {
        assert_eq!(after[fact], true, "{after}");
    }
}

#[test]
fn a_container_moves_to_a_newer_node_and_to_its_own() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        let mounts = node.run(&["cat", "/proc/mounts"]).unwrap();
        let mut staging =
            mounts.lines().filter(|line| line.contains(" /run/kybernate/stage tmpfs "));
        assert!(staging.next().is_some_and(|line| line.contains("huge=within_size")), "{mounts}");
        assert_eq!(staging.next(), None);
    }
    for [from, to] in WAYS {
        let name = format!("{from}-to-{to}");
        let (from, to) = (scenario.node(from), scenario.node(to));
        let before = journey(&scenario, from, to, &name);
        // What was restored can be taken again.
        let reference = scenario.reference(&format!("journey/{name}:v2"));
        checkpoint(&scenario, to, &name, &reference);
        let again = format!("{name}-again");
        let output = restore(&scenario, to, &reference, &again, &["--memory-limit", "8MiB"]);
        let (text, told) = (said(&output), "the new container may have 8388608 bytes");
        assert!(output.status.code() == Some(1) && text.contains(told), "{text}");
        let limits = ["--memory-limit", "256MiB", "--cpus", "1.5"];
        let output = restore(&scenario, to, &reference, &again, &limits);
        assert!(output.status.success(), "{}", said(&output));
        goes_on(&scenario, to, &again, &before);
        assert_eq!(limit(to, &again, MEMORY), (256 << 20).to_string());
        let quota = limit(to, &again, CPU);
        assert!(["150000", "150000 100000"].contains(&&*quota), "{quota}");
    }
    scenario.end().unwrap();
}

#[test]
fn stopping_ends_the_source_only_when_the_checkpoint_is_durable() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("stop/job:v1");
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", "node-a", "--stop"];
    let output = scenario.kyb(a, &words).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let tasks = a.run(&["ctr", "task", "ls"]).unwrap();
    assert!(!tasks.contains("RUNNING") && !tasks.contains("PAUSED"), "{tasks}");
    let output = restore(&scenario, &scenario.testbed.b, &reference, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(&scenario.testbed.b, "job").unwrap();
    scenario.end().unwrap();
}

#[test]
fn files_in_dev_shm_move_too() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "shm", 16, &[]).unwrap();
    let write = "echo kept > /dev/shm/note; echo changed > /state/note; rm /etc/os-release";
    a.run(&["ctr", "task", "exec", "--exec-id", "w", "shm", "sh", "-c", write]).unwrap();
    let reference = scenario.reference("shm/job:v1");
    checkpoint(&scenario, a, "shm", &reference);
    let output = restore(&scenario, b, &reference, "shm", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let read = "cat /dev/shm/note /state/note; ls /etc/os-release 2>/dev/null || echo gone";
    let found =
        b.told(&["ctr", "task", "exec", "--exec-id", "r", "shm", "sh", "-c", read]).unwrap();
    assert_eq!(found, "kept\nchanged\ngone\n");
    scenario.end().unwrap();
}

#[test]
fn other_peoples_tools_copy_it_and_it_still_restores() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("tools/job:v1");
    let digest = checkpoint(&scenario, a, "job", &reference);
    let peer = scenario.start_peer().unwrap();
    let copy = |tool: &str| scenario.peer_reference(&format!("{tool}/job:v1"));
    let (oras, crane, skopeo) = (copy("oras"), copy("crane"), copy("skopeo"));
    b.run(&["oras", "copy", "-r", "--from-plain-http", "--to-plain-http", &reference, &oras])
        .unwrap();
    b.run(&["crane", "copy", "--insecure", &reference, &crane]).unwrap();
    let (from, to) = (format!("docker://{reference}"), format!("docker://{skopeo}"));
    let flags = ["--src-tls-verify=false", "--dest-tls-verify=false", "--preserve-digests"];
    b.run(&[&["skopeo", "copy", "--all"], &flags[..], &[&from, &to]].concat()).unwrap();
    for copy in [&oras, &crane, &skopeo] {
        let found = b.run(&["crane", "digest", "--insecure", copy]).unwrap();
        assert_eq!(found.trim(), digest, "{copy}");
    }
    // oras takes the signature along, also into a registry without a referrers API.
    let cosign = ["cosign", "verify", "--key", "/srv/share/node-a.pub", "--insecure-ignore-tlog"];
    b.run(&[&cosign[..], &["--allow-http-registry", &oras]].concat()).unwrap();
    let output = restore(&scenario, b, &oras, "from-oras", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(b, "from-oras").unwrap();
    // The others leave the signature behind, so an enforcing node refuses their copies.
    refused(&scenario, b, &crane, &[], "not signed");
    // ctr takes the runnable image of it.
    b.run(&["ctr", "image", "pull", "--plain-http", &skopeo]).unwrap();
    let words = ["ctr", "run", "--rm", &skopeo, "cold", "cat", "/state/ticks.log"];
    assert!(b.told(&words).unwrap().starts_with("1\n"), "the rootfs diff is not in the image");
    drop(peer);
    scenario.end().unwrap();
}
