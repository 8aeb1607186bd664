//! What CRIU reads stays: nobody takes it away, and nothing else gets its room.

use std::process::{Child, Stdio};

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;
use serde_json::Value;

use super::{MIB, restored, stage, tier};
use crate::failures::cancels;
use crate::failures::halt::halt;
use crate::failures::pods::hang_in;
use crate::failures::victims::{END_LIMIT, signal};
use crate::harness::said;
use crate::pods::{command_of, make_ready};

/// Begins to restore what is staged, by either way, holds CRIU, and asks for its room: there is room for
/// one of the two.
pub(super) fn what_is_read_stays(scenario: &Scenario, node: &Node, [staged, other]: [&str; 2]) {
    let (kyb, begun) = restore(node, staged);
    let criu = halt(node, &begun, &begun);
    it_cannot_go(scenario, node, [staged, other]);
    signal(&criu, Signal::CONT);
    it_goes_after(scenario, node, kyb, staged);

    let told = scenario.kyb_json(node, &["inspect", staged, "--plain-http"]).unwrap();
    let pinned = format!("{staged}@{}", told["digest"].as_str().unwrap());
    make_ready(scenario, node, &pinned);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mib = MIB.to_string();
    let program = ["/workload", "run", "--state", "/state", "--mib", &mib];
    let create = hang_in(node, &mut command_of(node, [&pinned, "main"], &[&wish], &[], &program));
    it_cannot_go(scenario, node, [&pinned, other]);
    node.freezer("main").set(false).unwrap();
    it_goes_after(scenario, node, create, &pinned);
}

/// Somebody removes what is staged in `directory` while CRIU reads it: the restore fails and says why, or
/// CRIU had it all, and another one fetches what is gone. Returns whether it failed.
pub(super) fn what_is_read_is_removed(
    scenario: &Scenario,
    node: &Node,
    staged: &str,
    directory: &str,
) -> bool {
    let (kyb, begun) = restore(node, staged);
    let criu = halt(node, &begun, &begun);
    node.run(&["sh", "-c", &format!("rm -rf {directory}/*/images")]).unwrap();
    signal(&criu, Signal::CONT);
    let output = kyb.wait_with_output().unwrap();
    let (status, text) = (output.status, said(&output));
    println!("{}: {status}: {text}", node.name());
    if status.success() {
        scenario.wait_for_ticks(node, "main").unwrap();
        scenario.remove(node, "main").unwrap();
    } else {
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.contains("tier was changed while CRIU read it"), "{text}");
        assert!(text.contains("/images`: No such file"), "{text}");
    }
    let told = restored(scenario, node, staged, "main").0;
    assert!(told["staged"].is_null(), "{told}");
    scenario.remove(node, "main").unwrap();
    !status.success()
}

/// Begins to restore what is staged. Also returns whether CRIU has begun.
fn restore<'a>(node: &'a Node, staged: &str) -> (Child, impl Fn() -> bool + use<'a>) {
    let words = ["kyb", "restore", staged, "--plain-http", "--name", "main"];
    let mut kyb = node.command(&words);
    let kyb = kyb.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    (kyb, move || cancels::stage(node, "work/restore.log") > 0)
}

/// Returns what is staged in a node's memory.
fn staged_on(scenario: &Scenario, node: &Node) -> Value {
    tier(&scenario.kyb_json(node, &["node"]).unwrap(), "ram")["staged"].clone()
}

fn it_cannot_go(scenario: &Scenario, node: &Node, [staged, other]: [&str; 2]) {
    assert_eq!(staged_on(scenario, node)[0]["pinned"], true);
    let output = scenario.kyb(node, &["evict", staged]).unwrap();
    assert!(!output.status.success(), "it is gone");
    assert!(said(&output).contains("reads it"), "{}", said(&output));
    let words = ["stage", other, "--tier", "ram", "--plain-http"];
    let output = scenario.kyb(node, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("read by"), "{}", said(&output));
}

/// Waits until the container runs, and takes away what it came from, which nobody misses then.
fn it_goes_after(scenario: &Scenario, node: &Node, restore: Child, staged: &str) {
    let output = restore.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(node, "main").unwrap();
    // The agent hears of a pod's container when that runs already.
    let is_free = || staged_on(scenario, node)[0]["pinned"] == false;
    assert!(wait_until(END_LIMIT, is_free), "somebody reads it still");
    let told = scenario.kyb_json(node, &["evict", staged]).unwrap();
    assert_eq!(told["evicted"][0]["tier"], "ram", "{told}");
    scenario.remove(node, "main").unwrap();
    stage(scenario, node, staged, "ram");
}
