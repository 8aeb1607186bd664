//! Containers that are suspended in place: nothing of them runs until somebody resumes them.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Scenario, counter};
use rustix::process::Signal;
use serde_json::Value;

use crate::failures::victims::{END_LIMIT, catch, running};
use crate::harness::{checkpoint, restore, said, start};

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

/// Whether a dump has begun.
fn begun(node: &Node) -> bool {
    let mut dumps = fs_err::read_dir(node.path("/run/kybernate/stage")).unwrap().flatten();
    dumps.any(|dump| dump.path().join("work/dump.log").exists())
}

fn fails(scenario: &Scenario, node: &Node, words: &[&str], reason: &str) {
    let output = scenario.kyb(node, words).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains(reason), "{}", said(&output));
}

#[test]
fn a_suspended_container_stands_still_until_it_is_resumed() {
    let mut scenario = start();
    for id in ["job", "clock"] {
        scenario.run_workload(&scenario.testbed.a, id, 16, &[]).unwrap();
    }
    let a = &scenario.testbed.a;
    let told = scenario.kyb_json(a, &["suspend", "job"]).unwrap();
    assert_eq!((&told["suspended"][0], &told["already"]), (&"cpu".into(), &false.into()));
    stands_still(&scenario, a, "job", "clock");
    assert_eq!(status(&scenario, a, "job"), ("paused".to_owned(), true));
    let again = scenario.kyb_json(a, &["suspend", "job"]).unwrap();
    assert_eq!((&again["already"], &again["since"]), (&true.into(), &told["since"]));

    // A checkpoint leaves it suspended, and what is restored elsewhere runs.
    let reference = scenario.reference("suspended/job:v1");
    checkpoint(&scenario, a, "job", &reference);
    stands_still(&scenario, a, "job", "clock");
    assert_eq!(status(&scenario, a, "job"), ("paused".to_owned(), true));
    let output = restore(&scenario, &scenario.testbed.b, &reference, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(&scenario.testbed.b, "job").unwrap();
    assert!(counter(&after) > Some(seen(a, "job")), "{after}");

    // An agent that is killed, and its next one, change nothing.
    scenario.agent_a.take().unwrap().kill();
    stands_still(&scenario, &scenario.testbed.a, "job", "clock");
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "").unwrap());
    let a = &scenario.testbed.a;
    stands_still(&scenario, a, "job", "clock");
    assert_eq!(status(&scenario, a, "job"), ("paused".to_owned(), true));
    let told = scenario.kyb_json(a, &["resume", "job"]).unwrap();
    assert_eq!((&told["already"], &told["since"]), (&false.into(), &again["since"]));
    scenario.wait_for_ticks(a, "job").unwrap();
    assert_eq!(status(&scenario, a, "job"), ("running".to_owned(), false));
    let told = scenario.kyb_json(a, &["resume", "job"]).unwrap();
    assert_eq!(told["already"], true);

    // What somebody else paused is not ours, neither way.
    a.run(&["ctr", "task", "pause", "job"]).unwrap();
    for word in ["suspend", "resume"] {
        fails(&scenario, a, &[word, "job"], "paused by somebody else");
    }
    assert_eq!(status(&scenario, a, "job"), ("paused".to_owned(), false));
    a.run(&["ctr", "task", "resume", "job"]).unwrap();
    // What was suspended and somebody else resumed is forgotten.
    scenario.kyb_json(a, &["suspend", "job"]).unwrap();
    a.run(&["ctr", "task", "resume", "job"]).unwrap();
    assert_eq!(scenario.kyb_json(a, &["resume", "job"]).unwrap()["already"], true);
    fails(&scenario, a, &["suspend", "nobody"], "nobody");
    a.run(&["ctr", "task", "kill", "-s", "KILL", "clock"]).unwrap();
    assert!(wait_until(END_LIMIT, || status(&scenario, a, "clock").0 == "stopped"));
    fails(&scenario, a, &["suspend", "clock"], "only what runs can be suspended");
    fails(&scenario, a, &["resume", "clock"], "clock");
    scenario.end().unwrap();
}

/// Whoever dies in the middle of its dump: it stays suspended.
#[test]
fn a_dump_that_is_cut_short_leaves_it_suspended() {
    let mut scenario = start();
    scenario.run_workload(&scenario.testbed.a, "job", 96, &[]).unwrap();
    scenario.run_workload(&scenario.testbed.a, "clock", 16, &[]).unwrap();
    scenario.kyb_json(&scenario.testbed.a, &["suspend", "job"]).unwrap();
    for agent_too in [false, true] {
        let a = &scenario.testbed.a;
        let reference = scenario.reference("suspended/cut:v1");
        // A CRIU whose other half is killed hangs: nobody but the deadline ends it.
        let words =
            ["kyb", "checkpoint", "job", &reference, "--plain-http", "--sign-key", "node-a"];
        let words = [&words[..], &["--pause-deadline", "8s"]].concat();
        let mut kyb = a.command(&words).spawn().unwrap();
        let mut dumpers: Vec<Process> = Vec::new();
        let caught = catch(|| {
            // Before that, it is asked for its version only.
            if begun(a) {
                dumpers = running(a, "criu");
            }
            !dumpers.is_empty()
        });
        assert!(caught, "no CRIU came");
        if agent_too {
            scenario.agent_a.take().unwrap().kill();
        }
        for dumper in dumpers {
            dumper.signal(Signal::KILL);
        }
        if agent_too {
            kyb.kill().unwrap();
            kyb.wait().unwrap();
            scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "").unwrap());
        } else {
            assert!(!kyb.wait().unwrap().success());
        }
        let a = &scenario.testbed.a;
        let open = || {
            let list = scenario.kyb_json(a, &["ps", "--operations", "--state", "running"]).unwrap();
            !list["operations"].as_array().unwrap().is_empty()
        };
        assert!(wait_until(END_LIMIT, || !open()), "an operation stays open");
        stands_still(&scenario, a, "job", "clock");
        assert_eq!(status(&scenario, a, "job"), ("paused".to_owned(), true));
    }
    let a = &scenario.testbed.a;
    scenario.kyb_json(a, &["resume", "job"]).unwrap();
    scenario.wait_for_ticks(a, "job").unwrap();
    scenario.end().unwrap();
}
