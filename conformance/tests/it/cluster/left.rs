//! What restored pods have left in containerd when all of them are gone.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;

use super::story::{LIMIT, Story};

/// What only a pod that is there may have: images stay, with the snapshots that they are made of,
/// until the kubelet needs room. A cgroup may go while it is looked into, at which find ends with 1; that it
/// finds any, [`shows`] makes sure.
const OF_PODS: &str = r#"
ctr -n k8s.io container ls -q
ctr -n k8s.io task ls -q
ctr -n k8s.io leases ls -q
ctr -n k8s.io snapshot ls | awk 'NR > 1 && $NF != "Committed"'
awk '$5 ~ /kybernate.*volumes|containerd.*k8s.io/ { print "mount", $5 }' /proc/self/mountinfo
find /sys/fs/cgroup -path '*kubepods*' -path '*pod*-*' -type d 2>/dev/null || :
"#;

/// What it looks for is there while a container is: as a container, a task, a snapshot and a mount.
pub(super) fn shows(node: &Node, id: &str) {
    let seen = node.run(&["sh", "-c", OF_PODS]).unwrap();
    let ids = seen.lines().filter(|line| line.contains(id)).collect::<Vec<_>>();
    assert!(ids.len() >= 4, "{}: {id} is only in {ids:?}", node.name());
    assert!(ids.iter().any(|line| line.trim_end().ends_with("Active")), "{ids:?}");
    assert!(ids.iter().any(|line| line.starts_with("mount ")), "{ids:?}");
    assert!(seen.lines().any(|line| line.contains("/kubepods")), "{seen}");
}

/// Deletes the pods that are left, once, and waits until nothing of any is there.
pub(super) fn nothing_is(story: &Story, node: &Node) {
    let words = ["delete", "pod", "--wait=false", "--all", "--all-namespaces"];
    story.cluster.kubectl(&words).unwrap();
    let mut left = String::new();
    let gone = wait_until(LIMIT, || {
        left = node.run(&["sh", "-c", OF_PODS]).unwrap();
        left.is_empty()
    });
    assert!(gone, "{}: {left}", node.name());
}
