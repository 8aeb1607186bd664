//! A container's own cgroups, where a node has those of version 2 alone: what the emulated machine
//! has (`tests/machines`). Elsewhere nothing is shown.

use fs_err as fs;
use kybernate_conformance::node::Node;

use crate::workloads::Place;

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
