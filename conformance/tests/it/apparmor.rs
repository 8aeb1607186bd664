//! Containers with a profile of `AppArmor`, as each Pod has one where the kernel has that, as the
//! emulated machine's does (`emulated`).

use std::process::{Output, Stdio};

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::harness::{checkpoint, nodes, refused, restore, said};
use crate::pods::{WORKLOAD, command_of, make_ready};
use crate::workloads::Place;

/// The name that containerd gives its own profile, which denies little.
const PROFILE: &str = "cri-containerd.apparmor.d";
/// The same rules by another name.
const OTHER: &str = "another-profile";

/// Has `ctr` load containerd's profile by such a name, and confine a container by it.
const fn confined_by(profile: &str) -> [&str; 2] {
    ["--apparmor-default-profile", profile]
}

/// Shows a node what the kernel says of profiles.
fn show_security(node: &Node) {
    node.run(&["mount", "-t", "securityfs", "securityfs", "/sys/kernel/security"]).unwrap();
}

/// Returns what the kernel says of a container's first process.
fn profile_of(node: &Node, id: &str) -> String {
    let place = Place { node, namespace: "default", id, state: "/state" };
    let current = format!("/proc/{}/attr/current", place.pid().unwrap());
    node.run(&["cat", &current]).unwrap().trim().to_owned()
}

/// Creates a pod's container that is to go on where a checkpoint was taken, under a profile.
fn create(node: &Node, pinned: &str, options: &[&str]) -> Output {
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mut create = command_of(node, [pinned, "main"], &[&wish], options, &WORKLOAD);
    create.stdin(Stdio::null()).output().unwrap()
}

/// It is not created, for its profile.
fn is_not_created(node: &Node, pinned: &str, options: &[&str]) {
    let output = create(node, pinned, options);
    let text = said(&output);
    assert!(!output.status.success() && text.contains("profile"), "{options:?}: {text}");
    node.run(&["ctr", "container", "rm", "main"]).unwrap();
}

pub(crate) fn who_was_confined_is_confined_again(scenario: &Scenario) {
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap();
    assert_eq!(enabled.trim(), "Y", "this kernel has no AppArmor");
    for node in nodes(scenario) {
        show_security(node);
    }
    let [a, b] = nodes(scenario);
    scenario.run_workload(a, "job", 24, &confined_by(PROFILE)).unwrap();
    let confined = format!("{PROFILE} (enforce)");
    assert_eq!(profile_of(a, "job"), confined);
    let before = scenario.wait_for_ticks(a, "job").unwrap();
    let reference = scenario.reference("apparmor/job:v1");
    let pinned = format!("{reference}@{}", checkpoint(scenario, a, "job", &reference));
    scenario.wait_for_ticks(a, "job").unwrap();
    scenario.remove(a, "job").unwrap();
    // By `kyb restore` a container has no profile, and what was confined is not set free.
    for node in [a, b] {
        refused(scenario, node, &reference, &[], "profile");
    }
    for node in [a, b] {
        make_ready(scenario, node, &pinned);
        if node.name() == b.name() {
            is_not_created(node, &pinned, &confined_by(OTHER));
            is_not_created(node, &pinned, &[]);
        }
        let output = create(node, &pinned, &confined_by(PROFILE));
        assert!(output.status.success(), "{}", said(&output));
        let after = scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
        assert_eq!(profile_of(node, "main"), confined);
        // It may be taken again.
        let reference = scenario.reference(&format!("apparmor/job:{}", node.name()));
        checkpoint(scenario, node, "main", &reference);
        scenario.remove(node, "main").unwrap();
    }
    starts_free(scenario, b);
}

/// What was not confined is no container's that is: CRIU would leave it free.
fn starts_free(scenario: &Scenario, b: &Node) {
    scenario.run_workload(b, "free", 16, &[]).unwrap();
    assert_eq!(profile_of(b, "free"), "unconfined");
    let reference = scenario.reference("apparmor/free:v1");
    let pinned = format!("{reference}@{}", checkpoint(scenario, b, "free", &reference));
    make_ready(scenario, b, &pinned);
    is_not_created(b, &pinned, &confined_by(PROFILE));
    let output = restore(scenario, b, &reference, "again", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(profile_of(b, "again"), "unconfined");
    for id in ["free", "again"] {
        scenario.remove(b, id).unwrap();
    }
}
