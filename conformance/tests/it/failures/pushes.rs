//! Who dies while a checkpoint is on its way to the registry.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::cancels::{at_step, begin, registry, stage};
use super::victims::{END_LIMIT, catch, running, signal};
use super::{has_tag, is};
use crate::harness::{checkpoint, start};

/// Who is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// The agent. The next one starts when the source runs, as the guardian has it.
    Agent,
    /// kyb. Nobody else is to care.
    Kyb,
    /// containerd, which comes back at once.
    Containerd,
}

/// Takes `job` and lets somebody die while the registry does not answer. Returns whether it was
/// stored in the end.
fn round(scenario: &mut Scenario, victim: Victim, stop: bool) -> bool {
    let what = format!("{victim:?}, stop: {stop}");
    let reference = scenario.reference(&format!("pushes/{victim:?}-{stop}:v1").to_lowercase());
    let words = ["checkpoint", "job", &reference, "--sign-key", "node-a"];
    let mut kyb =
        begin(&scenario.testbed.a, &[&words[..], if stop { &["--stop"] } else { &[] }].concat());
    assert!(catch(|| stage(&scenario.testbed.a, "work/dump.log") > 0), "{what}: no dump");
    registry(scenario).signal(Signal::STOP);
    at_step(scenario, &scenario.testbed.a, &["pack", "push"]);
    assert!(is(&scenario.testbed.a, "job", if stop { "PAUSED" } else { "RUNNING" }), "{what}");
    match victim {
        Victim::Agent => {
            scenario.agent_a.take().unwrap().kill();
            let node = &scenario.testbed.a;
            let runs = || is(node, "job", "RUNNING");
            assert!(wait_until(END_LIMIT, runs), "{what}: the source does not run");
            scenario.agent_a = Some(scenario.start_agent(node, "").unwrap());
        }
        Victim::Kyb => signal(&running(&scenario.testbed.a, "kyb"), Signal::KILL),
        Victim::Containerd => {
            signal(&running(&scenario.testbed.a, "containerd"), Signal::KILL);
            let script = "containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &";
            scenario.testbed.a.run(&["sh", "-c", script]).unwrap();
        }
    }
    registry(scenario).signal(Signal::CONT);
    let ended = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
    assert!(ended, "{what}: kyb waits");
    let done = settles(scenario, &scenario.testbed.a, &what);
    assert_eq!(has_tag(scenario, &reference), done, "{what}");
    done
}

/// Waits until no operation is open, and returns whether the last one is done.
fn settles(scenario: &Scenario, node: &Node, what: &str) -> bool {
    let mut last = String::new();
    let closed = wait_until(END_LIMIT, || {
        let told = scenario.kyb_json(node, &["ps", "--operations"]).unwrap();
        let states = told["operations"].as_array().unwrap().iter();
        let states: Vec<_> = states.map(|one| one["state"].to_string()).collect();
        last = states.last().cloned().unwrap_or_default();
        !states.iter().any(|state| state == "\"running\"")
    });
    assert!(closed, "{what}: operations stay open");
    last == "\"done\""
}

#[test]
fn nothing_is_lost_by_whoever_dies_while_it_is_pushed() {
    let mut scenario = start();
    scenario.run_workload(&scenario.testbed.a, "job", 128, &[]).unwrap();
    let before = scenario.wait_for_ticks(&scenario.testbed.a, "job").unwrap();
    for victim in [Victim::Agent, Victim::Kyb, Victim::Containerd] {
        for stop in [false, true] {
            let what = format!("{victim:?}, stop: {stop}");
            let done = round(&mut scenario, victim, stop);
            let node = &scenario.testbed.a;
            // One that is stored may end its source, and no other.
            assert_eq!(done, !matches!(victim, Victim::Agent), "{what}");
            if done && stop {
                assert!(!is(node, "job", "RUNNING"), "{what}: it was to be stopped");
                scenario.remove(node, "job").unwrap();
                let stored = format!("pushes/{victim:?}-{stop}:v1").to_lowercase();
                let stored = scenario.reference(&stored);
                let output = crate::harness::restore(&scenario, node, &stored, "job", &[]);
                assert!(output.status.success(), "{what}: {}", crate::harness::said(&output));
            }
            let now = scenario.wait_for_ticks(node, "job").unwrap();
            assert_eq!(now["boot_id_of_process"], before["boot_id_of_process"], "{what}");
            let next = scenario.reference(&format!("pushes/{victim:?}-{stop}:next").to_lowercase());
            checkpoint(&scenario, node, "job", &next);
            scenario.wait_for_ticks(node, "job").unwrap();
        }
    }
    scenario.end().unwrap();
}
