//! A container's own cgroups, where a node has those of version 2 alone: what the emulated machine
//! has (`emulated`). Elsewhere nothing is shown.

use std::process::Command;

use fs_err as fs;
use kybernate_conformance::node::Node;

use crate::harness::all_passed;
use crate::workloads::Place;

/// End-to-end tests of freezers and of who is in a cgroup.
const TESTS: &[&str] = &[
    "failures::claims::a_pods_container_is_restored_when_the_agent_dies_meanwhile",
    "failures::deaths::the_source_runs_on_whenever_the_agent_dies",
    "failures::pods::a_pods_restore_that_hangs_or_is_killed_leaves_nothing",
    "failures::restores::nothing_half_made_is_left_when_the_agent_dies_in_a_restore",
    "suspensions::a_dump_that_is_cut_short_leaves_it_suspended",
    "suspensions::a_suspended_container_stands_still_until_it_is_resumed",
];

/// Only those of version 2 are seen, by this machine's own kernel. Its controllers may be version 1's:
/// limits are not shown there.
#[test]
fn agents_that_die_leave_nothing_on_cgroups_of_version_2() {
    let script = "mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec \"$@\"";
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "unshare", "--mount", "--propagation", "private"]);
    command.args(["sh", "-c", script, "sh"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "--test-threads=2"]).args(TESTS);
    all_passed(&command.output().unwrap(), TESTS);
}

/// What has `ctr run` give a container a cgroup namespace and show it its cgroups, as the CRI plugin
/// does by itself.
const SHOWN: &[&str] = &[
    "--with-ns",
    "cgroup:",
    "--mount",
    "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro:nosuid:noexec:nodev",
];

/// A limit that nobody else has.
const LIMIT: &str = "1234567168";

/// Whether a node has nothing but cgroups of version 2.
fn is_unified(node: &Node) -> bool {
    let kind = node.run(&["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).unwrap();
    kind.trim() == "cgroup2fs"
}

/// Returns the options with which a container sees its cgroups of version 2.
pub(crate) fn shown(node: &Node) -> &'static [&'static str] {
    if is_unified(node) { SHOWN } else { &[] }
}

/// Makes sure that a container's cgroup namespace begins at its own cgroup: it is told `/`, and sees
/// the limit that the cgroup gets now.
pub(crate) fn are_its_own(node: &Node, id: &str) {
    if !is_unified(node) {
        return;
    }
    let place = Place { node, namespace: "default", id, state: "/state" };
    let pid = place.pid().unwrap().to_string();
    let membership = format!("/proc/{pid}/cgroup");
    let outside = node.run(&["cat", &membership]).unwrap();
    let path = outside.trim().strip_prefix("0::").unwrap();
    println!("{} {id}: in {path}", node.name());
    assert!(path.len() > 1 && path.contains(id), "{outside}");
    let inside = node.run(&["nsenter", "-t", &pid, "-C", "cat", &membership]).unwrap();
    assert_eq!(inside, "0::/\n", "{id} is in another cgroup namespace");
    let limit = |directory: &str| node.run(&["cat", &format!("{directory}/memory.max")]).unwrap();
    fs::write(node.path(&format!("/sys/fs/cgroup{path}/memory.max")), LIMIT).unwrap();
    assert_eq!(limit(&format!("/proc/{pid}/root/sys/fs/cgroup")).trim(), LIMIT);
    let mounts = node.run(&["cat", "/proc/mounts"]).unwrap();
    assert!(!mounts.contains("cgyard"), "CRIU has left its cgroups: {mounts}");
}
