//! Another runtime than runc beneath kybernate-runc.

use std::process::{Output, Stdio};

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::running;
use crate::harness::{checkpoint, said, start};
use crate::pods::{CONFIG, command_of, make_ready};

const SETTINGS: &str = "/etc/kybernate/runc.toml";

/// Creates and starts a pod's container with kybernate-runc.
fn create(node: &Node, id: &str, image: &str, annotations: &[&str]) -> Output {
    let program = ["/workload", "run", "--state", "/state", "--mib", "16"];
    let mut command = command_of(node, [image, id], annotations, &[], &program);
    command.stdin(Stdio::null()).output().unwrap()
}

/// What crun keeps of a container is there, and what runc would keep is not.
fn is_cruns(node: &Node, id: &str) -> bool {
    let place = node.path("/run/containerd/runc/default").join(id);
    place.join("status").exists() && !place.join("state.json").exists()
}

fn is_refused(scenario: &Scenario, node: &Node, id: &str) {
    let output = scenario.kyb(node, &["preflight", id]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("refuse runtime: "), "{}", said(&output));
    let before = scenario.traces(node).unwrap();
    let reference = scenario.reference("runtimes/refused:v1");
    let words = ["checkpoint", id, &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(node, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("another runtime than runc made it"), "{}", said(&output));
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    scenario.wait_for_ticks(node, id).unwrap();
}

#[test]
fn crun_runs_containers_and_restores_none() {
    let mut scenario = start();
    scenario.agent_a.take().unwrap().kill();
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, CONFIG).unwrap());
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("runtimes/job:v1");
    let digest = checkpoint(&scenario, a, "job", &reference);
    let before = scenario.wait_for_ticks(a, "job").unwrap();
    scenario.remove(a, "job").unwrap();
    let pinned = format!("{reference}@{digest}");
    make_ready(&scenario, a, &pinned);
    fs::write(a.path(SETTINGS), "runtime = \"/usr/bin/crun\"\n").unwrap();

    // Everything else than a restore is crun's.
    let output = create(a, "plain", &pinned, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(is_cruns(a, "plain"));
    scenario.wait_for_ticks(a, "plain").unwrap();
    a.run(&["ctr", "task", "pause", "plain"]).unwrap();
    a.run(&["ctr", "task", "resume", "plain"]).unwrap();
    scenario.wait_for_ticks(a, "plain").unwrap();
    is_refused(&scenario, a, "plain");
    scenario.remove(a, "plain").unwrap();
    assert!(!a.path("/run/containerd/runc/default/plain").exists());

    // A restore fails by name, before CRIU begins.
    let wish = format!("restore.kybernate.io/main={pinned}");
    let output = create(a, "main", &pinned, &[&wish]);
    assert!(!output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("only runc restores"), "{}", said(&output));
    assert_eq!(running(a, "criu"), []);
    let told = scenario.kyb_json(a, &["ps", "--operations", "--container", "main"]).unwrap();
    let last = told["operations"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last["state"], "failed", "{last}");
    assert!(last["error"].as_str().unwrap().contains("only runc restores"), "{last}");
    a.output(&["ctr", "container", "rm", "main"]).unwrap();
    let output = create(a, "main", &pinned, &[&wish, "on-failure.kybernate.io/main=cold"]);
    assert!(output.status.success(), "{}", said(&output));
    let cold = scenario.wait_for_ticks(a, "main").unwrap();
    assert_ne!(cold["boot_id_of_process"], before["boot_id_of_process"]);
    assert!(is_cruns(a, "main"));
    scenario.remove(a, "main").unwrap();

    // With runc it goes on.
    fs::remove_file(a.path(SETTINGS)).unwrap();
    let output = create(a, "main", &pinned, &[&wish]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(a, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    scenario.remove(a, "main").unwrap();
    scenario.end().unwrap();
}
