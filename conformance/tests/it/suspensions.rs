//! Containers that are suspended in place: nothing of them runs until somebody resumes them.

use std::path::Path;
use std::process::Child;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Agent, Scenario, counter};
use rustix::process::Signal;
use serde_json::Value;

use crate::failures::victims::{END_LIMIT, catch, running, signal};
use crate::harness::{at_once, checkpoint, on_both, restore, said, start};

/// The memory of what is dumped: long enough to be met while it is written.
const MIB: u32 = 96;
/// How often that is tried.
const TRIES: u32 = 5;

/// Reads the workload's counter from outside: nothing can be asked of what is frozen.
fn seen(node: &Node, id: &str) -> u64 {
    let state = "/run/containerd/io.containerd.runtime.v2.task/default";
    let file = node.path(&format!("{state}/{id}/rootfs/state/status.json"));
    let status: Value = serde_json::from_slice(&fs_err::read(file).unwrap()).unwrap();
    counter(&status).unwrap()
}

/// The counter stands still for a hundred times as long as a tick of another one takes.
fn stands_still(scenario: &Scenario, node: &Node, id: &str, clock: &str) {
    let before = seen(node, id);
    scenario.wait_for_ticks(node, clock).unwrap();
    scenario.wait_for_ticks(node, clock).unwrap();
    assert_eq!(seen(node, id), before, "it runs");
}

fn status(scenario: &Scenario, node: &Node, id: &str) -> (String, bool) {
    let list = scenario.kyb_json(node, &["ps", "--container", id]).unwrap();
    let one = &list["containers"][0];
    (one["status"].as_str().unwrap().to_owned(), one["suspendedSince"].is_string())
}

/// Takes a checkpoint, and stops its CRIU while that writes memory. Killed elsewhere, it may leave a
/// process in what it wrote over its code (`spec/decisions/0040`). Nothing when it was quicker.
fn stop_in_a_dump(scenario: &Scenario, node: &Node) -> Option<(Child, Vec<Process>)> {
    let reference = scenario.reference(&format!("suspended/cut:{}", node.name()));
    let key = format!("node-{}", node.name());
    // A CRIU whose other half is killed hangs: nobody but the deadline ends it.
    let words = ["kyb", "checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
    let words = [&words[..], &["--pause-deadline", "8s"]].concat();
    let mut kyb = node.command(&words).spawn().unwrap();
    let begun = || {
        let mut dumps = fs_err::read_dir(node.path("/run/kybernate/stage")).unwrap().flatten();
        let pages =
            dumps.find_map(|dump| fs_err::metadata(dump.path().join("images/pages-1.img")).ok());
        pages.is_some_and(|pages| (1..u64::from(MIB) << 20).contains(&pages.len()))
    };
    let mut ended = false;
    let caught = catch(|| {
        ended = kyb.try_wait().unwrap().is_some();
        ended || begun()
    });
    assert!(caught, "no CRIU came");
    let dumpers = running(node, "criu");
    signal(&dumpers, Signal::STOP);
    let stopped = |process: &Process| {
        let stat = fs_err::read_to_string(format!("/proc/{}/stat", process.pid));
        stat.is_ok_and(|stat| stat.contains(") T "))
    };
    let held = wait_until(END_LIMIT, || dumpers.iter().all(|one| stopped(one) || !one.runs()));
    if held && begun() && dumpers.iter().any(|one| one.runs()) {
        return Some((kyb, dumpers));
    }
    signal(&dumpers, Signal::CONT);
    kyb.wait().unwrap();
    None
}

fn fails(scenario: &Scenario, node: &Node, words: &[&str], reason: &str) {
    let output = scenario.kyb(node, words).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains(reason), "{}", said(&output));
}

#[test]
fn a_suspended_container_stands_still_until_it_is_resumed() {
    let mut scenario = start();
    at_once(&scenario, |node| {
        for id in ["job", "clock"] {
            scenario.run_workload(node, id, 16, &[]).unwrap();
        }
        stays_suspended(&scenario, node);
    });
    on_both(&mut scenario, |scenario, node, agent| {
        let agent = is_resumed(scenario, node, agent);
        let _agent = divides_itself(scenario, node, agent);
        is_somebody_elses(scenario, node);
    });
    scenario.end().unwrap();
}

/// Suspends a container and takes a checkpoint of it, which leaves it so; what is restored of that, on
/// node b, runs.
fn stays_suspended(scenario: &Scenario, node: &Node) {
    let told = scenario.kyb_json(node, &["suspend", "job"]).unwrap();
    assert_eq!((&told["suspended"][0], &told["already"]), (&"cpu".into(), &false.into()));
    stands_still(scenario, node, "job", "clock");
    assert_eq!(status(scenario, node, "job"), ("paused".to_owned(), true));
    let again = scenario.kyb_json(node, &["suspend", "job"]).unwrap();
    assert_eq!((&again["already"], &again["since"]), (&true.into(), &told["since"]));

    let reference = scenario.reference(&format!("suspended/job:{}", node.name()));
    checkpoint(scenario, node, "job", &reference);
    stands_still(scenario, node, "job", "clock");
    assert_eq!(status(scenario, node, "job"), ("paused".to_owned(), true));
    let (b, name) = (&scenario.testbed.b, format!("of-{}", node.name()));
    let output = restore(scenario, b, &reference, &name, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, &name).unwrap();
    assert!(counter(&after) > Some(seen(node, "job")), "{after}");
}

/// An agent that is killed, and its next one, change nothing. Then somebody resumes it.
fn is_resumed(scenario: &Scenario, node: &Node, agent: Agent) -> Agent {
    let since = scenario.kyb_json(node, &["suspend", "job"]).unwrap()["since"].clone();
    agent.kill();
    stands_still(scenario, node, "job", "clock");
    let agent = scenario.start_agent(node, "").unwrap();
    stands_still(scenario, node, "job", "clock");
    assert_eq!(status(scenario, node, "job"), ("paused".to_owned(), true));
    let told = scenario.kyb_json(node, &["resume", "job"]).unwrap();
    assert_eq!((&told["already"], &told["since"]), (&false.into(), &since));
    scenario.wait_for_ticks(node, "job").unwrap();
    assert_eq!(status(scenario, node, "job"), ("running".to_owned(), false));
    let told = scenario.kyb_json(node, &["resume", "job"]).unwrap();
    assert_eq!(told["already"], true);
    agent
}

/// A process in a cgroup within the container's, as systemd makes them, changes nothing: that is not
/// frozen by itself, at which nobody would find it, and it is found by the next agent.
fn divides_itself(scenario: &Scenario, node: &Node, agent: Agent) -> Agent {
    let freezer = node.freezer("job");
    let within = freezer.directory().join("init.scope");
    fs_err::create_dir(&within).unwrap();
    let go = |from: &Path, to: &Path| {
        for pid in fs_err::read_to_string(from.join("cgroup.procs")).unwrap().lines() {
            fs_err::write(to.join("cgroup.procs"), pid).unwrap();
        }
    };
    go(freezer.directory(), &within);
    scenario.kyb_json(node, &["suspend", "job"]).unwrap();
    assert!(freezer.is_frozen());
    assert_eq!(scenario.kyb_json(node, &["suspend", "job"]).unwrap()["already"], true);
    agent.kill();
    let agent = scenario.start_agent(node, "").unwrap();
    stands_still(scenario, node, "job", "clock");
    // containerd knows nothing of this, and takes it for running.
    scenario.kyb_json(node, &["resume", "job"]).unwrap();
    freezer.set(true).unwrap();
    fails(scenario, node, &["suspend", "job"], "paused by somebody else");
    freezer.set(false).unwrap();
    scenario.wait_for_ticks(node, "job").unwrap();
    go(&within, freezer.directory());
    fs_err::remove_dir(&within).unwrap();
    agent
}

/// What somebody else paused is not ours, neither way, and what has ended is nobody's.
fn is_somebody_elses(scenario: &Scenario, node: &Node) {
    node.run(&["ctr", "task", "pause", "job"]).unwrap();
    for word in ["suspend", "resume"] {
        fails(scenario, node, &[word, "job"], "paused by somebody else");
    }
    assert_eq!(status(scenario, node, "job"), ("paused".to_owned(), false));
    node.run(&["ctr", "task", "resume", "job"]).unwrap();
    // What was suspended and somebody else resumed is forgotten.
    scenario.kyb_json(node, &["suspend", "job"]).unwrap();
    node.run(&["ctr", "task", "resume", "job"]).unwrap();
    assert_eq!(scenario.kyb_json(node, &["resume", "job"]).unwrap()["already"], true);
    fails(scenario, node, &["suspend", "nobody"], "nobody");
    node.run(&["ctr", "task", "kill", "-s", "KILL", "clock"]).unwrap();
    assert!(wait_until(END_LIMIT, || status(scenario, node, "clock").0 == "stopped"));
    fails(scenario, node, &["suspend", "clock"], "only what runs can be suspended");
    fails(scenario, node, &["resume", "clock"], "clock");
}

/// What is to be seen of it when it is not as it should be.
fn told(scenario: &Scenario, node: &Node) -> String {
    let script = "ctr task ls; tail -n 15 /var/lib/kybernate/containerd.log";
    let here = said(&node.output(&["sh", "-c", script]).unwrap());
    let log = scenario.testbed.private().join(format!("agent-{}.log", node.name()));
    let log = fs_err::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    format!("{here}\n{}", lines[lines.len().saturating_sub(25)..].join("\n"))
}

/// Whoever dies in the middle of its dump: it stays suspended.
#[test]
fn a_dump_that_is_cut_short_leaves_it_suspended() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        scenario.run_workload(node, "clock", 16, &[]).unwrap();
        is_cut_short(scenario, node, None);
        is_cut_short(scenario, node, Some(agent));
    });
    scenario.end().unwrap();
}

/// Kills a CRIU in the middle, and the agent too, if it is given one; then the next one comes.
fn is_cut_short(scenario: &Scenario, node: &Node, agent: Option<Agent>) {
    // What a CRIU was killed in is not dumped again.
    scenario.run_workload(node, "job", MIB, &[]).unwrap();
    scenario.kyb_json(node, &["suspend", "job"]).unwrap();
    let stopped = (0..TRIES).find_map(|_| stop_in_a_dump(scenario, node));
    let Some((mut kyb, dumpers)) = stopped else { panic!("CRIU was always quicker") };
    let dies = agent.is_some();
    if let Some(agent) = agent {
        agent.kill();
    }
    signal(&dumpers, Signal::KILL);
    let _next = if dies {
        kyb.kill().unwrap();
        kyb.wait().unwrap();
        Some(scenario.start_agent(node, "").unwrap())
    } else {
        assert!(!kyb.wait().unwrap().success());
        None
    };
    let open = || {
        let list = scenario.kyb_json(node, &["ps", "--operations", "--state", "running"]).unwrap();
        !list["operations"].as_array().unwrap().is_empty()
    };
    assert!(wait_until(END_LIMIT, || !open()), "an operation stays open");
    stands_still(scenario, node, "job", "clock");
    let now = status(scenario, node, "job");
    assert_eq!(now, ("paused".to_owned(), true), "{}", told(scenario, node));
    scenario.kyb_json(node, &["resume", "job"]).unwrap();
    scenario.wait_for_ticks(node, "job").unwrap();
    scenario.remove(node, "job").unwrap();
}
