//! kybernate-runc when CRIU hangs, and when it is killed itself.

use std::process::{Child, Command, Stdio};

use fs_err as fs;
use rustix::process::Signal;

use super::locks;
use super::victims::{catch, running, signal};
use crate::harness::start;
use crate::pods::{ROOT_MODE, Staged, root, stage_on, stage_on_both};
use crate::workloads::Place;
use crate::workloads::client::{Line, inside};

/// Begins to restore a container and freezes CRIU in the middle, which never ends then.
pub(super) fn hang(staged: &Staged) -> Child {
    hang_in(staged, &mut staged.command("main", &staged.pinned, &[&staged.wish()]))
}

pub(super) fn hang_in(staged: &Staged, create: &mut Command) -> Child {
    let freezer = staged.node().freezer("main");
    let create = create.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let create = create.spawn().unwrap();
    // The first that is in there is CRIU.
    let begun =
        || fs::read(freezer.directory().join("cgroup.procs")).is_ok_and(|found| !found.is_empty());
    assert!(catch(begun), "CRIU does not begin");
    freezer.set(true).unwrap();
    create
}

/// Nothing of a restore is left on the node, and the name can be used again.
pub(super) fn is_clean(staged: &Staged, what: &str, network: &[&str]) {
    let (node, scenario) = (staged.node(), &staged.scenario);
    assert_eq!(running(node, "criu"), [], "{what}");
    let script = "ls /run/containerd/runc/default; find /run/kybernate/runc -type f; \
                  iptables -w 5 -S | grep -i criu; ls -d /sys/fs/cgroup/freezer/default/*/ \
                  /sys/fs/cgroup/default/*/ 2>/dev/null";
    let left = node.output(&["sh", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "{what}");
    node.output(&["ctr", "container", "rm", "main"]).unwrap();
    let workload = ["/workload", "run", "--state", "/state", "--mib", "24"];
    let mut create =
        staged.command_of("main", &staged.pinned, &[&staged.wish()], network, &workload);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{what}: {}", crate::harness::said(&output));
    let after = scenario.wait_for_ticks(node, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], staged.before["boot_id_of_process"], "{what}");
    scenario.remove(node, "main").unwrap();
}

#[test]
fn a_pods_restore_that_hangs_is_ended_and_leaves_nothing() {
    let mut staged = stage_on_both();
    for at in ["a", "b"] {
        staged.at = at;
        let create = hang(&staged);
        let output = create.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("took longer than 5 s"), "{text}");
        is_clean(&staged, "CRIU hangs", &[]);

        // containerd kills a runtime that takes too long for it, and nobody else.
        let create = hang(&staged);
        let wrapper = running(staged.node(), "kybernate-runc");
        assert!(!wrapper.is_empty(), "it is gone already");
        signal(&wrapper, Signal::KILL);
        let output = create.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && !text.contains("took longer"), "{text}");
        is_clean(&staged, "the wrapper is killed", &[]);
    }
    staged.scenario.end().unwrap();
}

#[test]
fn what_starts_cold_after_a_failed_restore_answers() {
    const PORT: u16 = 7000;
    // The network of a pod, which outlives its containers.
    let scenario = start();
    for node in [&scenario.testbed.a, &scenario.testbed.b] {
        node.run(&["sh", "-c", "ip netns add pod && ip -n pod link set lo up"]).unwrap();
    }
    let network = ["--with-ns", "network:/run/netns/pod"];
    let staged = stage_on(scenario, &network);
    let b = staged.node();
    let annotations = [&staged.wish(), "on-failure.kybernate.io/main=cold"];
    let server = ["busybox", "httpd", "-f", "-p", "7000", "-h", "/bin"];
    let mut create = staged.command_of("main", &staged.pinned, &annotations, &network, &server);
    let create = hang_in(&staged, &mut create);
    let output = create.wait_with_output().unwrap();
    let text = crate::harness::said(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(running(b, "criu"), []);
    let place = Place { node: b, namespace: "default", id: "main", state: "" };
    let ask = || Line::connect(PORT).ask("GET /busybox HTTP/1.0\r\n\r\n").unwrap();
    assert_eq!(inside(place, ask).join().unwrap(), "HTTP/1.1 200 OK");
    let pid = place.pid().unwrap().to_string();
    assert_eq!(locks(b, &pid), "", "the pod's network is locked");
    let mode = b.run(&["stat", "-L", "-c", "%a", &root(b, "main")]).unwrap();
    assert_ne!(mode.trim(), ROOT_MODE, "it is the dump's");
    staged.scenario.remove(b, "main").unwrap();
    is_clean(&staged, "it started cold", &network);
    b.run(&["ip", "netns", "del", "pod"]).unwrap();
    staged.scenario.end().unwrap();
}
