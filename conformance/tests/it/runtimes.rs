//! Another runtime than runc beneath kybernate-runc.

use std::process::{Output, Stdio};

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use crate::failures::victims::running;
use crate::harness::{checkpoint, nodes, on_both, said, start};
use crate::pods::{CONFIG, command_of, make_ready};

const CRUN: &str = "/usr/bin/crun";
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
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", id, &reference, "--plain-http", "--sign-key", &key];
    let output = scenario.kyb(node, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("another runtime than runc made it"), "{}", said(&output));
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    scenario.wait_for_ticks(node, id).unwrap();
}

/// Gives node b what node a has of crun; a package more would have everybody make its root again.
fn install(scenario: &Scenario) {
    let [a, b] = nodes(scenario);
    let script = format!("ldd {CRUN} | awk '$1 ~ /yajl/ {{ print $3 }}'");
    let library = a.run(&["sh", "-c", &script]).unwrap();
    for file in [CRUN, library.trim()] {
        fs::copy(a.path(file), b.path(file)).unwrap();
    }
}

#[test]
fn crun_runs_containers_and_restores_none() {
    let mut scenario = start();
    install(&scenario);
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let _agent = scenario.start_agent(node, CONFIG).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("runtimes/job:{}", node.name()));
        let digest = checkpoint(scenario, node, "job", &reference);
        let before = scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();
        let pinned = format!("{reference}@{digest}");
        make_ready(scenario, node, &pinned);
        is_found(scenario, node, &pinned);
        fs::write(node.path(SETTINGS), format!("runtime = \"{CRUN}\"\n")).unwrap();
        runs(scenario, node, &pinned);
        restores_none(scenario, node, (&pinned, &before));
    });
    scenario.end().unwrap();
}

/// Where nobody has said which, it is runc, and crun where that is not installed.
fn is_found(scenario: &Scenario, node: &Node, pinned: &str) {
    const RUNC: &str = "/usr/sbin/runc";
    let is_crun = || {
        let output = create(node, "found", pinned, &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "found").unwrap();
        let is_crun = is_cruns(node, "found");
        scenario.remove(node, "found").unwrap();
        is_crun
    };
    assert!(!is_crun());
    let hidden = node.path("/usr/sbin/runc-elsewhere");
    fs::rename(node.path(RUNC), &hidden).unwrap();
    assert!(is_crun());
    let crun = node.path("/usr/bin/crun-elsewhere");
    fs::rename(node.path(CRUN), &crun).unwrap();
    let output = create(node, "none", pinned, &[]);
    assert!(said(&output).contains("neither runc nor crun is installed"), "{}", said(&output));
    node.run(&["ctr", "container", "rm", "none"]).unwrap();
    fs::rename(crun, node.path(CRUN)).unwrap();
    fs::rename(hidden, node.path(RUNC)).unwrap();
}

/// Everything else than a restore is crun's.
fn runs(scenario: &Scenario, node: &Node, pinned: &str) {
    let output = create(node, "plain", pinned, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(is_cruns(node, "plain"));
    scenario.wait_for_ticks(node, "plain").unwrap();
    node.run(&["ctr", "task", "pause", "plain"]).unwrap();
    node.run(&["ctr", "task", "resume", "plain"]).unwrap();
    scenario.wait_for_ticks(node, "plain").unwrap();
    is_refused(scenario, node, "plain");
    scenario.remove(node, "plain").unwrap();
    assert!(!node.path("/run/containerd/runc/default/plain").exists());
}

/// A restore fails by name, before CRIU begins, and goes on with runc.
fn restores_none(scenario: &Scenario, node: &Node, (pinned, before): (&str, &Value)) {
    let wish = format!("restore.kybernate.io/main={pinned}");
    let output = create(node, "main", pinned, &[&wish]);
    assert!(!output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("only runc restores"), "{}", said(&output));
    assert_eq!(running(node, "criu"), []);
    let told = scenario.kyb_json(node, &["ps", "--operations", "--container", "main"]).unwrap();
    let last = told["operations"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last["state"], "failed", "{last}");
    assert!(last["error"].as_str().unwrap().contains("only runc restores"), "{last}");
    node.output(&["ctr", "container", "rm", "main"]).unwrap();
    let output = create(node, "main", pinned, &[&wish, "on-failure.kybernate.io/main=cold"]);
    assert!(output.status.success(), "{}", said(&output));
    let cold = scenario.wait_for_ticks(node, "main").unwrap();
    assert_ne!(cold["boot_id_of_process"], before["boot_id_of_process"]);
    assert!(is_cruns(node, "main"));
    scenario.remove(node, "main").unwrap();

    fs::remove_file(node.path(SETTINGS)).unwrap();
    let output = create(node, "main", pinned, &[&wish]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(node, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    scenario.remove(node, "main").unwrap();
}
