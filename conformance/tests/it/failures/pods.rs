//! kybernate-runc when CRIU hangs, and when it is killed itself.

use std::process::{Child, Stdio};

use fs_err as fs;
use rustix::process::Signal;

use super::deaths::{catch, running, signal};
use crate::pods::{Staged, stage};

/// Begins to restore a container and freezes CRIU in the middle, which never ends then, as with a
/// file that is too short.
fn hang(staged: &Staged) -> Child {
    let cgroup = staged.node().path("/sys/fs/cgroup/freezer/default/main");
    let mut create = staged.command("main", &staged.pinned, &[&staged.wish()]);
    let create = create.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let create = create.spawn().unwrap();
    // The first that is in there is CRIU.
    let begun = || fs::read(cgroup.join("cgroup.procs")).is_ok_and(|found| !found.is_empty());
    assert!(catch(begun), "CRIU does not begin");
    fs::write(cgroup.join("freezer.state"), "FROZEN").unwrap();
    create
}

/// Nothing of a restore is left on the node, and the name can be used again.
fn is_clean(staged: &Staged, what: &str) {
    let (b, scenario) = (staged.node(), &staged.scenario);
    assert_eq!(running(b, "criu"), [], "{what}");
    let script = "ls /run/containerd/runc/default; find /run/kybernate/runc -type f; \
                  iptables -w 5 -S | grep -i criu; ls -d /sys/fs/cgroup/freezer/default/*/ 2>/dev/null";
    let left = b.output(&["sh", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "{what}");
    b.output(&["ctr", "container", "rm", "main"]).unwrap();
    let output = staged.create("main", &staged.pinned, &[&staged.wish()]);
    assert!(output.status.success(), "{what}: {}", crate::harness::said(&output));
    let after = scenario.wait_for_ticks(b, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], staged.before["boot_id_of_process"], "{what}");
    scenario.remove(b, "main").unwrap();
}

#[test]
fn a_pods_restore_that_hangs_is_ended_and_leaves_nothing() {
    let staged = stage();
    let create = hang(&staged);
    let output = create.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("took longer than 5 s"), "{text}");
    is_clean(&staged, "CRIU hangs");

    // containerd kills a runtime that takes too long for it, and nobody else.
    let create = hang(&staged);
    let wrapper = running(staged.node(), "kybernate-runc");
    assert!(!wrapper.is_empty(), "it is gone already");
    signal(&wrapper, Signal::KILL);
    let output = create.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !text.contains("took longer"), "{text}");
    is_clean(&staged, "the wrapper is killed");
    staged.scenario.end().unwrap();
}
