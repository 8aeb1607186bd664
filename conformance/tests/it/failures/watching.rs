//! Operations that somebody else has asked for, watched to their end.

use std::process::{Child, Stdio};

use kybernate_conformance::node::Node;
use rustix::process::Signal;

use super::cancels::newest;
use super::halt::{hold, let_go, start_holding};
use super::victims::{running, signal};
use crate::harness::{restore, said};

fn watch(node: &Node, id: &str) -> Child {
    let mut command = node.command(&["kyb", "watch", id, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn an_operation_is_watched_by_somebody_else_until_it_ends() {
    let scenario = start_holding();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("watched/job:v1");
    let asked = hold(&scenario, &reference, &[]);
    let id = newest(&scenario, a)["id"].as_str().unwrap().to_owned();
    // Who asked for it is not needed any more.
    signal(&running(a, "kyb"), Signal::KILL);
    drop(asked);
    let watches = watch(a, &id);
    let_go(&scenario);
    let output = watches.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["id"], &told["state"]), (&id.clone().into(), &"done".into()), "{told}");
    let digest = b.run(&["crane", "digest", "--insecure", &reference]).unwrap();
    assert_eq!(told["digest"], digest.trim(), "{told}");
    assert!(told["pausedMicroseconds"].as_u64() > Some(0), "{told}");
    let lines = String::from_utf8_lossy(&output.stderr);
    assert!(lines.contains("dump: "), "no line for a step: {lines}");

    // One that is over is told again, with the same exit code.
    let output = scenario.kyb(a, &["watch", &id]).unwrap();
    assert!(said(&output).contains(&format!("checkpoint {id} is done")), "{}", said(&output));
    let refused = restore(&scenario, b, &reference, "job", &["--insecure-no-signature"]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    let id = newest(&scenario, b)["id"].as_str().unwrap().to_owned();
    let output = scenario.kyb(b, &["watch", &id]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("refused (policy)"), "{}", said(&output));
    // It is another agent's.
    let output = scenario.kyb(a, &["watch", &id]).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("kyb ps --operations"), "{}", said(&output));
    scenario.end().unwrap();
}
