//! Who dies while a checkpoint is on its way to the registry.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;

use super::cancels::{at_step, begin, registry, stage};
use super::victims::{END_LIMIT, catch, running, signal};
use super::{has_tag, is};
use crate::harness::{checkpoint, nodes, restore, said, start};

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

/// One node with the container that is taken.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    agent: Option<Agent>,
}

impl Place<'_> {
    fn reference(&self, victim: Victim, stop: bool, tag: &str) -> String {
        let path = format!("pushes/{}-{victim:?}-{stop}", self.node.name()).to_lowercase();
        self.scenario.reference(&format!("{path}:{tag}"))
    }
}

/// Takes `job` and lets somebody die while the registry does not answer. Returns whether it was
/// stored in the end.
fn round(place: &mut Place<'_>, victim: Victim, stop: bool) -> bool {
    let (scenario, node) = (place.scenario, place.node);
    let what = format!("{victim:?} on {}, stop: {stop}", node.name());
    let reference = place.reference(victim, stop, "v1");
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "job", &reference, "--sign-key", &key];
    let mut kyb = begin(node, &[&words[..], if stop { &["--stop"] } else { &[] }].concat());
    assert!(catch(|| stage(node, "work/dump.log") > 0), "{what}: no dump");
    registry(scenario).signal(Signal::STOP);
    at_step(scenario, node, &["pack", "push"]);
    assert!(is(node, "job", if stop { "PAUSED" } else { "RUNNING" }), "{what}");
    match victim {
        Victim::Agent => {
            place.agent.take().unwrap().kill();
            let runs = || is(node, "job", "RUNNING");
            assert!(wait_until(END_LIMIT, runs), "{what}: the source does not run");
            place.agent = Some(scenario.start_agent(node, "").unwrap());
        }
        Victim::Kyb => signal(&running(node, "kyb"), Signal::KILL),
        Victim::Containerd => {
            signal(&running(node, "containerd"), Signal::KILL);
            let script = "containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &";
            node.run(&["sh", "-c", script]).unwrap();
        }
    }
    registry(scenario).signal(Signal::CONT);
    let ended = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
    assert!(ended, "{what}: kyb waits");
    let done = settles(scenario, node, &what);
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
    // One that was forgotten is neither.
    assert!(["\"done\"", "\"failed\""].contains(&&*last), "{what}: {last}");
    last == "\"done\""
}

#[test]
fn nothing_is_lost_by_whoever_dies_while_it_is_pushed() {
    let mut scenario = start();
    let agents = [scenario.agent_a.take(), scenario.agent_b.take()];
    // Each of them dies on both nodes, and with both ends of the source.
    let stops = [[false, true, false], [true, false, true]];
    for ((node, agent), stops) in nodes(&scenario).into_iter().zip(agents).zip(stops) {
        let mut place = Place { scenario: &scenario, node, agent };
        scenario.run_workload(node, "job", 128, &[]).unwrap();
        let before = scenario.wait_for_ticks(node, "job").unwrap();
        for (victim, stop) in
            [Victim::Agent, Victim::Kyb, Victim::Containerd].into_iter().zip(stops)
        {
            let what = format!("{victim:?} on {}, stop: {stop}", node.name());
            let done = round(&mut place, victim, stop);
            // One that is stored may end its source, and no other.
            assert_eq!(done, !matches!(victim, Victim::Agent), "{what}");
            if done && stop {
                assert!(!is(node, "job", "RUNNING"), "{what}: it was to be stopped");
                scenario.remove(node, "job").unwrap();
                let stored = place.reference(victim, stop, "v1");
                let output = restore(&scenario, node, &stored, "job", &[]);
                assert!(output.status.success(), "{what}: {}", said(&output));
            }
            let now = scenario.wait_for_ticks(node, "job").unwrap();
            assert_eq!(now["boot_id_of_process"], before["boot_id_of_process"], "{what}");
            checkpoint(&scenario, node, "job", &place.reference(victim, stop, "next"));
            scenario.wait_for_ticks(node, "job").unwrap();
        }
    }
    scenario.end().unwrap();
}
