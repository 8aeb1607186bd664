//! Operations that somebody else has asked for, watched to their end.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::cancels::newest;
use super::halt::{hold, let_go, start_holding};
use super::victims::{END_LIMIT, running, signal};
use crate::harness::{at_once, nodes, restore, said};

fn watch(node: &Node, id: &str) -> Child {
    let mut command = node.command(&["kyb", "watch", id, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Without an id, everything that begins is told, in lines; what had ended before is not.
fn watch_all(scenario: &Scenario, node: &Node) {
    let file = scenario.testbed.private().join(format!("watched-{}", node.name()));
    let lines = fs_err::File::create(&file).unwrap().into_parts().0;
    let mut command = node.command(&["kyb", "watch", "--json"]);
    let mut kyb = command.stdout(lines).stderr(Stdio::null()).spawn().unwrap();
    let told = || -> Vec<serde_json::Value> {
        let text = fs_err::read_to_string(&file).unwrap();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let seen = |kind: &str| {
        let done = |one: &serde_json::Value| one["kind"] == kind && one["state"] == "done";
        told().iter().any(done)
    };
    let begins = |one: &serde_json::Value| one["kind"] == "suspend" && one["state"] == "running";
    // It may come too late for the first ones, and what is quick may be over when it is told.
    let watched = wait_until(END_LIMIT, || {
        scenario.kyb_json(node, &["suspend", "job"]).unwrap();
        scenario.kyb_json(node, &["resume", "job"]).unwrap();
        seen("resume") && seen("suspend") && told().iter().any(begins)
    });
    let told = told();
    assert!(watched, "{told:?}");
    assert!(told.iter().all(|one| one["kind"] != "checkpoint"), "{told:?}");
    signal(&running(node, "kyb"), Signal::INT);
    kyb.wait().unwrap();
}

#[test]
fn an_operation_is_watched_by_somebody_else_until_it_ends() {
    let scenario = start_holding();
    let ids = at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("watched/job:{}", node.name()));
        is_watched(&scenario, node, &reference);
        let id = is_told_again(&scenario, node, &reference);
        watch_all(&scenario, node);
        id
    });
    for (node, id) in nodes(&scenario).into_iter().rev().zip(ids) {
        // It is another agent's.
        let output = scenario.kyb(node, &["watch", &id]).unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("kyb ps --operations"), "{}", said(&output));
    }
    scenario.end().unwrap();
}

/// How long a pause is held.
const LONG: Duration = Duration::from_secs(2);

/// Watches a checkpoint that is under way, to its end.
fn is_watched(scenario: &Scenario, node: &Node, reference: &str) {
    let began = Instant::now();
    let asked = hold(node, reference, &[]);
    let held = Instant::now();
    let id = newest(scenario, node)["id"].as_str().unwrap().to_owned();
    // Who asked for it is not needed any more.
    signal(&running(node, "kyb"), Signal::KILL);
    drop(asked);
    let watches = watch(node, &id);
    // Most of its time it is paused then.
    while held.elapsed() < LONG {
        newest(scenario, node);
    }
    let held = held.elapsed();
    let_go(node);
    let output = watches.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["id"], &told["state"]), (&id.clone().into(), &"done".into()), "{told}");
    let crane = ["crane", "digest", "--insecure", reference];
    let digest = scenario.testbed.b.run(&crane).unwrap();
    assert_eq!(told["digest"], digest.trim(), "{told}");
    let paused = Duration::from_micros(told["pausedMicroseconds"].as_u64().unwrap());
    assert!((held..began.elapsed()).contains(&paused), "{paused:?} of {held:?}: {told}");
    let lines = String::from_utf8_lossy(&output.stderr);
    assert!(lines.contains("dump: "), "no line for a step: {lines}");
    let output = scenario.kyb(node, &["watch", &id]).unwrap();
    assert!(said(&output).contains(&format!("checkpoint {id} is done")), "{}", said(&output));
}

/// Watches a restore that was refused before: it is told again, with the same exit code.
fn is_told_again(scenario: &Scenario, node: &Node, reference: &str) -> String {
    let refused = restore(scenario, node, reference, "again", &["--insecure-no-signature"]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    let id = newest(scenario, node)["id"].as_str().unwrap().to_owned();
    let output = scenario.kyb(node, &["watch", &id]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("refused (policy)"), "{}", said(&output));
    id
}
