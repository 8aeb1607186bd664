//! Containers in scopes that systemd makes, as most kubelets have it: with cgroups of version 2. In version 1
//! the last systemd takes the processes out of the devices' cgroup, in which runc looks for whom to kill.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use serde_json::Value;

use super::{LIMIT, Machine};
use crate::failures::claims::COLD;
use crate::trust::replace_criu;

const SLICE: &str = "pods-burst.slice";

/// A CRIU that is killed as soon as something of what it restores is in the scope. Who kills it is not its
/// child.
const DIES: &str = r#"#!/bin/sh
[ "$1" = swrk ] || exec /usr/sbin/criu.real "$@"
kills() {
    while kill -0 $$; do
        for child in $(pgrep -P $$); do
            grep -q ctr-cold.scope /proc/$child/cgroup && : >/var/lib/kybernate/criu-died && kill -9 $$
        done
    done
}
(kills </dev/null >/dev/null 2>&1 &)
exec /usr/sbin/criu.real "$@"
"#;
const DIED: &str = "/var/lib/kybernate/criu-died";

/// Runs the workload in a scope.
pub(super) fn run(machine: &Machine, image: &str, id: &str, more: &[&str]) {
    let cgroup = format!("{SLICE}:ctr:{id}");
    let options = ["--runc-systemd-cgroup", "--cgroup", &cgroup];
    machine.start_workload(image, id, &[&options, more].concat());
    let scope = format!("ctr-{id}.scope");
    let place = format!("/pods.slice/{SLICE}/{scope}");
    assert_eq!(machine.shows(&scope, "ControlGroup"), place);
    let tasks = machine.run(&["ctr", "task", "ls"]);
    let task = tasks.lines().find(|line| line.starts_with(&format!("{id} "))).unwrap();
    let process = format!("/proc/{}/cgroup", task.split_whitespace().nth(1).unwrap());
    let cgroups = machine.run(&["cat", &process]);
    assert!(cgroups.lines().any(|line| line.ends_with(&place)), "{cgroups}");
}

/// Ends a container, whose scope systemd takes away.
fn remove(machine: &Machine, id: &str) {
    machine.run(&["ctr", "task", "rm", "-f", id]);
    machine.run(&["ctr", "container", "rm", id]);
    let is_gone = || machine.shows(&format!("ctr-{id}.scope"), "ActiveState") == "inactive";
    assert!(wait_until(LIMIT, is_gone), "{}", machine.state());
}

/// What has a scope of its own stands still in place, and goes on as a pod's container in another one; one
/// that cannot be restored begins anew in it.
pub(super) fn goes_on(machine: &Machine, node: &Node, repository: &str) {
    machine.run(&["kyb", "suspend", "job"]);
    assert!(machine.run(&["ctr", "task", "ls"]).contains("PAUSED"));
    machine.run(&["kyb", "resume", "job"]);
    machine.ticks_on("job");

    let reference = format!("{repository}:scope");
    let words = ["kyb", "checkpoint", "job", &reference, "--plain-http", "--stop", "--json"];
    let taken: Value = serde_json::from_str(&machine.run(&words)).unwrap();
    let pinned = format!("{repository}@{}", taken["digest"].as_str().unwrap());
    machine.run(&["kyb", "stage", &pinned, "--tier", "ram", "--plain-http"]);
    machine.run(&["ctr", "image", "pull", "--plain-http", &pinned]);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let of_a_pod = [
        "--runc-binary=/usr/local/bin/kybernate-runc",
        "--annotation=io.kubernetes.cri.container-type=container",
        "--annotation=io.kubernetes.cri.container-name=main",
        "--annotation",
        &wish,
    ];
    remove(machine, "job");
    run(machine, &pinned, "back", &of_a_pod);
    let operations = machine.run(&["kyb", "ps", "--operations"]);
    let is_restore = |line: &str| line.contains("back") && line.contains("done");
    assert!(operations.lines().any(is_restore), "{operations}");
    // It can be taken once more.
    let again = format!("{repository}:again");
    machine.run(&["kyb", "checkpoint", "back", &again, "--plain-http"]);
    remove(machine, "back");

    replace_criu(node, DIES);
    let cold = ["--annotation", COLD];
    run(machine, &pinned, "cold", &[&of_a_pod[..], &cold].concat());
    assert!(machine.output(&["test", "-e", DIED]).status.success(), "nobody tried to restore it");
    remove(machine, "cold");
}
