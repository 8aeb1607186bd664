//! Programs of the node's configuration that run around a checkpoint.

use std::process::{Command, Stdio};
use std::time::Instant;

use kybernate_conformance::command::{self, wait_until};
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Agent, Scenario};

use crate::failures::halt::{HOLD, hold, make_pipe};
use crate::failures::victims::{END_LIMIT, running};
use crate::harness::{checkpoint, on_both, said, start};

/// Where they write it down.
const FILE: &str = "/root/hooks";

/// Each writes down that it ran, and what the container's first process did then.
const HOOKS: &str = r#"
[[hooks]]
name = "before"
when = "before"
command = ["/bin/sh", "-c", "echo $KYBERNATE_PHASE $KYBERNATE_CONTAINER >> /root/hooks"]
[[hooks]]
name = "paused"
when = "while_paused"
command = ["/bin/sh", "-c", "echo $KYBERNATE_PHASE $(ctr task ls | grep -o PAUSED) >> /root/hooks"]
[[hooks]]
name = "after"
when = "after"
command = ["/bin/sh", "-c", "echo $KYBERNATE_PHASE $(ctr task ls | grep -o RUNNING) >> /root/hooks"]
[[hooks]]
name = "failed"
when = "failed"
command = ["/bin/sh", "-c", "echo $KYBERNATE_PHASE $(ctr task ls | grep -o RUNNING) >> /root/hooks"]
[[hooks]]
name = "refuse"
when = "before"
command = ["/bin/sh", "-c", "echo not flushed >&2; exit 3"]
on_request = true
[[hooks]]
name = "hang"
when = "before"
command = ["/bin/sleep", "600"]
limit = "2s"
on_request = true
[[hooks]]
name = "spoil"
when = "while_paused"
command = ["/bin/false"]
on_request = true
[[hooks]]
name = "complain"
when = "after"
command = ["/bin/false"]
on_request = true
"#;

/// Returns what the hooks have written since the last look.
fn written(node: &Node) -> String {
    let file = node.path(FILE);
    let text = fs_err::read_to_string(&file).unwrap_or_default();
    fs_err::remove_file(&file).unwrap_or_default();
    text
}

/// Waits until they have written this.
fn wait_for(node: &Node, text: &str) {
    let mut noted = String::new();
    let is_written = wait_until(END_LIMIT, || {
        noted = fs_err::read_to_string(node.path(FILE)).unwrap_or_default();
        noted == text
    });
    assert!(is_written, "{noted:?} is not {text:?}");
}

fn asked(scenario: &Scenario, node: &Node, more: &[&str]) -> (Option<i32>, String) {
    let reference = scenario.reference(&format!("hooked/refused:{}", node.name()));
    let words = ["checkpoint", "job", &reference, "--plain-http", "--unsigned"];
    let output = scenario.kyb(node, &[&words[..], more].concat()).unwrap();
    (output.status.code(), said(&output))
}

fn each_fails(scenario: &Scenario, node: &Node) {
    let before = scenario.traces(node).unwrap();
    for (hook, code, told, ran) in [
        ("refuse", Some(2), "not flushed", "before job\nfailed RUNNING\n"),
        ("spoil", Some(1), "\"spoil\"", "before job\nwhile_paused PAUSED\nfailed RUNNING\n"),
        ("hang", Some(2), "did not end within 2s", "before job\nfailed RUNNING\n"),
        ("complain", Some(0), "\"complain\"", "before job\nwhile_paused PAUSED\nafter RUNNING\n"),
        ("paused", Some(64), "no hook \"paused\"", ""),
    ] {
        let begun = Instant::now();
        let (ended, text) = asked(scenario, node, &["--hook", hook]);
        assert!(ended == code && text.contains(told), "{hook}: {ended:?} {text}");
        assert_eq!(written(node), ran, "{hook}");
        assert!(begun.elapsed().as_secs() < 60, "{hook}");
        scenario.wait_for_ticks(node, "job").unwrap();
    }
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
}

/// The hooks are those of the checkpoint: the next agent has none in its own configuration.
fn the_agent_dies(scenario: &Scenario, node: &Node, agent: Agent) {
    let reference = scenario.reference(&format!("hooked/killed:{}", node.name()));
    let kyb = hold(node, &reference, &[]);
    // What is held is the last of them.
    wait_for(node, "before job\nwhile_paused PAUSED\n");
    agent.kill();
    drop(kyb);
    // Its guardian lets the source go on, and runs nothing.
    scenario.wait_for_ticks(node, "job").unwrap();
    assert_eq!(written(node), "before job\nwhile_paused PAUSED\n");
    let _agent = scenario.start_agent(node, "").unwrap();
    wait_for(node, "failed RUNNING\n");
    scenario.wait_for_ticks(node, "job").unwrap();
}

#[test]
fn hooks_run_around_the_pause_and_a_source_outlives_them() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let agent = scenario.start_agent(node, &[HOOKS, HOLD].concat()).unwrap();
        make_pipe(node);
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("hooked/job:{}", node.name()));
        checkpoint(scenario, node, "job", &reference);
        assert_eq!(written(node), "before job\nwhile_paused PAUSED\nafter RUNNING\n");
        each_fails(scenario, node);
        the_agent_dies(scenario, node, agent);
    });
    scenario.end().unwrap();
}

/// In the pause the agent may open nothing any more, for a while.
const SQUEEZE: &str = r#"
[[hooks]]
name = "squeeze"
when = "while_paused"
command = ["/bin/sh", "-c", "prlimit --pid $PPID --nofile=12:"]
"#;

/// Who cannot be looked at for want of descriptors has not ended: its pause is not forgotten.
#[test]
fn a_source_comes_back_though_the_agent_can_open_nothing() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let _agent = scenario.start_agent(node, SQUEEZE).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("squeezed/job:{}", node.name()));
        let words =
            ["kyb", "checkpoint", "job", &reference, "--plain-http", "--unsigned", "--stop"];
        let mut kyb = node.command(&words).stderr(Stdio::null()).spawn().unwrap();
        let squeezed = || {
            let agents = running(node, "kybernate-agent");
            let limits =
                |one: &Process| fs_err::read_to_string(format!("/proc/{}/limits", one.pid));
            let is_squeezed = |limits: String| limits.contains("Max open files            12 ");
            agents.iter().find(|one| limits(one).is_ok_and(is_squeezed)).copied()
        };
        assert!(wait_until(END_LIMIT, || squeezed().is_some()), "nobody is squeezed");
        let agent = squeezed().unwrap().pid.to_string();
        let file = scenario.testbed.private().join(format!("agent-{}.log", node.name()));
        let log = || fs_err::read_to_string(&file).unwrap();
        assert!(wait_until(END_LIMIT, || log().contains("os error 24")), "{}", log());
        command::run(Command::new("prlimit").args(["--pid", &agent, "--nofile=1024:"])).unwrap();
        assert!(wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some()), "{}", log());
        assert!(!kyb.wait().unwrap().success());
        scenario.wait_for_ticks(node, "job").unwrap();
        assert!(!log().contains("the source has ended"), "{}", log());
    });
    scenario.end().unwrap();
}
