//! A source that is to be stopped is ended only where nothing of it has run since its dump.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use super::cancels::newest;
use super::halt::{hold, let_go, start_holding};
use super::has_tag;
use super::victims::END_LIMIT;
use crate::harness::at_once;

/// Waits until the last operation of a node is over.
fn ended(scenario: &Scenario, node: &Node) -> Value {
    let mut last = Value::Null;
    let ended = wait_until(END_LIMIT, || {
        last = newest(scenario, node);
        last["state"] != "running"
    });
    assert!(ended, "{last}");
    last
}

#[test]
fn what_somebody_lets_run_is_neither_stored_nor_ended() {
    let scenario = start_holding();
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 32, &[]).unwrap();
        for (how, more) in [("stopped", &["--stop"][..]), ("left", &[])] {
            let reference = scenario.reference(&format!("stops/{how}:{}", node.name()));
            let _kyb = hold(node, &reference, more);
            node.run(&["ctr", "task", "resume", "job"]).unwrap();
            let_go(node);
            let last = ended(&scenario, node);
            assert_eq!(last["state"], "failed", "{last}");
            assert!(last.to_string().contains("somebody else let the container run"), "{last}");
            assert!(!has_tag(&scenario, &reference), "{last}");
            scenario.wait_for_ticks(node, "job").unwrap();
        }
    });
    scenario.end().unwrap();
}

/// Whoever kills a paused container lets it run into its end, and may leave its cgroup.
#[test]
fn what_somebody_else_has_ended_meanwhile_is_stopped() {
    let scenario = start_holding();
    at_once(&scenario, |node| {
        for (how, words) in [
            ("removed", &["ctr", "task", "rm", "-f", "job"][..]),
            ("killed", &["ctr", "task", "kill", "-s", "KILL", "job"]),
        ] {
            scenario.run_workload(node, "job", 32, &[]).unwrap();
            let reference = scenario.reference(&format!("stops/{how}:{}", node.name()));
            let _kyb = hold(node, &reference, &["--stop"]);
            node.run(words).unwrap();
            let_go(node);
            let last = ended(&scenario, node);
            assert_eq!(last["state"], "done", "{how}: {last}");
            assert!(has_tag(&scenario, &reference), "{how}: {last}");
            scenario.remove(node, "job").unwrap();
        }
    });
    scenario.end().unwrap();
}
