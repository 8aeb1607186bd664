//! A source that is to be stopped is ended only where nothing of it has run since its dump.

use std::process::Child;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;
use serde_json::Value;

use super::cancels::{at_step, begin, newest, registry, stage};
use super::halt::{hold, let_go, start_holding};
use super::victims::{END_LIMIT, catch, processes, signal};
use super::{has_tag, is};
use crate::harness::{at_once, next_agents, nodes, on_both, start};

/// A hook behind a checkpoint that takes its time, once.
const LINGER: &str = r#"
[[hooks]]
name = "linger"
when = "after"
command = ["/bin/sh", "-c", "mkdir /root/lingers || exec mkdir /root/again; exec tail -f /etc/hostname"]
limit = "50s"
on_request = true
"#;

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

/// What is stored is told by the next agent, and by which digest: it may be all that is left of its source.
#[test]
fn what_is_stored_stays_known_whoever_dies() {
    let mut scenario = start();
    next_agents(&mut scenario, LINGER);
    on_both(&mut scenario, dies_behind_its_source);
    for node in nodes(&scenario) {
        dies_before_its_source(&scenario, node);
    }
    scenario.end().unwrap();
}

/// Begins a checkpoint of a new `job`, which is to be stopped.
fn begin_to_stop(scenario: &Scenario, node: &Node, reference: &str) -> Child {
    scenario.run_workload(node, "job", 32, &[]).unwrap();
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "job", reference, "--sign-key", &key, "--stop", "--hook", "linger"];
    begin(node, &words)
}

/// The agent dies when the source has been ended, and the operation goes on.
fn dies_behind_its_source(scenario: &Scenario, node: &Node, agent: Agent) {
    let reference = scenario.reference(&format!("stops/behind:{}", node.name()));
    let mut kyb = begin_to_stop(scenario, node, &reference);
    let mut hook = Vec::new();
    let waits = wait_until(END_LIMIT, || {
        hook = processes(node, |pid| has_words(pid, "tail\0-f\0/etc/hostname\0"));
        !hook.is_empty()
    });
    assert!(waits && is(node, "job", "STOPPED"), "{}", newest(scenario, node));
    agent.kill();
    signal(&hook, Signal::KILL);
    let _agent = scenario.start_agent(node, "").unwrap();
    let last = ended(scenario, node);
    kyb.wait().unwrap();
    assert!(last["state"] == "done" && last["tagged"] == true, "{last}");
    node.run(&["rmdir", "/root/lingers", "/root/again"]).unwrap();
    is_told(scenario, &reference, &last);
    scenario.remove(node, "job").unwrap();
}

/// It dies when the tag is there, and nobody answers who is to end the source.
fn dies_before_its_source(scenario: &Scenario, node: &Node) {
    let agent = scenario.start_agent(node, LINGER).unwrap();
    let reference = scenario.reference(&format!("stops/before:{}", node.name()));
    let mut kyb = begin_to_stop(scenario, node, &reference);
    assert!(catch(|| stage(node, "work/dump.log") > 0), "no dump");
    registry(scenario).signal(Signal::STOP);
    at_step(scenario, node, &["pack"]);
    let shim = processes(node, |pid| has_words(pid, "-id\0job\0"));
    assert_eq!(shim.len(), 1, "{shim:?}");
    signal(&shim, Signal::STOP);
    registry(scenario).signal(Signal::CONT);
    at_step(scenario, node, &["stop"]);
    agent.kill();
    let runs = wait_until(END_LIMIT, || node.freezer("job").is_thawed());
    signal(&shim, Signal::CONT);
    assert!(runs, "nobody has let it run");
    let _agent = scenario.start_agent(node, "").unwrap();
    let last = ended(scenario, node);
    kyb.wait().unwrap();
    let stored = last["error"].as_str().unwrap().contains("its checkpoint is stored, and tagged");
    assert!(last["state"] == "failed" && stored, "{last}");
    is_told(scenario, &reference, &last);
    scenario.wait_for_ticks(node, "job").unwrap();
}

/// Whether the command line of a process has such words.
fn has_words(pid: u32, words: &str) -> bool {
    let line = fs_err::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains(words)
}

/// The digest is told, and the tag is there.
fn is_told(scenario: &Scenario, reference: &str, last: &Value) {
    assert!(last["digest"].as_str().unwrap().starts_with("sha256:"), "{last}");
    assert!(has_tag(scenario, reference), "{last}");
}
