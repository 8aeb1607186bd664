//! Who dies while a checkpoint is on its way to the registry.

use std::process::Child;
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;

use super::cancels::{at_step, begin, newest, registry, stage};
use super::victims::{END_LIMIT, catch, guards, running, signal};
use super::{has_tag, is};
use crate::harness::{checkpoint, nodes, on_both, restore, said, start};

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

/// How many manifests of a checkpoint come to the registry: at least those of its parts, its index, its
/// signature and its tag.
const MANIFESTS_MIN: usize = 4;

/// How often it may be too quick for that on this machine.
const TRIES: u32 = 3;

/// What the registry may take to store one, and to say so.
const ANSWER_LIMIT: Duration = Duration::from_millis(10);

/// How long the agent goes on between two looks.
const STEP: Duration = Duration::from_micros(400);

fn parent(process: Process) -> Option<Process> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Process::find(parent.trim().parse().ok()?)
}

/// Kills the agent when so many manifests have come to a repository, if need be before it is told so.
/// Returns whether all was over by then.
fn dies_at(
    place: &mut Place<'_>,
    kyb: &mut Child,
    path: &str,
    count: usize,
    unheard: bool,
) -> bool {
    let log = place.scenario.testbed.private().join("registry.log");
    let put = format!("http.method=PUT http.route=\"manifest\" repository=\"{path}\"");
    let came = || fs::read_to_string(&log).unwrap().matches(&put).count();
    let agent = running(place.node, "kybernate-agent");
    let agent: Vec<_> = agent.into_iter().filter(|one| !guards(one.pid)).collect();
    let outside: Vec<_> = agent.iter().filter_map(|one| parent(*one)).collect();
    let mut ended = false;
    let caught = catch(|| {
        ended = kyb.try_wait().unwrap().is_some();
        if ended || !unheard || came() + 2 < count {
            return ended || came() >= count;
        }
        // From then on it goes from look to look only: it sends the last one, and hears no answer.
        signal(&agent, Signal::STOP);
        let end = Instant::now() + ANSWER_LIMIT;
        while came() < count && Instant::now() < end {
            std::thread::park_timeout(STEP / 4);
        }
        let comes = came() >= count;
        if !comes {
            signal(&agent, Signal::CONT);
            std::thread::park_timeout(STEP);
        }
        comes
    });
    assert!(caught, "there are {} of {count} manifests in {path} only", came());
    signal(&agent, Signal::KILL);
    // Who entered the node for it stands, too, since it did.
    signal(&outside, Signal::CONT);
    place.agent.take().unwrap().kill();
    ended
}

/// Takes `job` and lets the agent die when so many of its manifests have come; with an `unheard` number
/// of its own before it is told so. Returns whether it was too late for that.
fn manifests(place: &mut Place<'_>, count: usize, unheard: Option<u32>) -> bool {
    let (scenario, node, stop) = (place.scenario, place.node, place.node.name() == "b");
    let what = format!("{count} manifests on {}, unheard: {unheard:?}", node.name());
    let path = format!("pushes/{}-{count}-{}", node.name(), unheard.unwrap_or_default());
    let reference = scenario.reference(&format!("{path}:v1"));
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "job", &reference, "--sign-key", &key];
    let mut kyb = begin(node, &[&words[..], if stop { &["--stop"] } else { &[] }].concat());
    let ended = dies_at(place, &mut kyb, &path, count, unheard.is_some());
    let ends = || is(node, "job", "RUNNING") || (stop && is(node, "job", "STOPPED"));
    assert!(wait_until(END_LIMIT, ends), "{what}: the source neither runs nor has ended");
    place.agent = Some(scenario.start_agent(node, "").unwrap());
    assert!(wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some()), "{what}: kyb waits");
    let done = settles(scenario, node, &what);
    let last = newest(scenario, node);
    println!("{what}: {last}");
    let has_ended = is(node, "job", "STOPPED");
    // Whoever reads it knows what there is.
    let told = last["error"].as_str().unwrap_or_default().contains("is stored, and tagged");
    assert!(!has_ended || done || told, "{what}: the source has ended, {last}");
    assert_eq!(has_tag(scenario, &reference), done || told, "{what}: {last}");
    if has_ended {
        scenario.remove(node, "job").unwrap();
        let output = restore(scenario, node, &reference, "job", &[]);
        assert!(output.status.success(), "{what}: {}", said(&output));
    }
    scenario.wait_for_ticks(node, "job").unwrap();
    checkpoint(scenario, node, "job", &scenario.reference(&format!("{path}:next")));
    ended
}

/// Between any two things that make it a checkpoint: whoever asks afterwards is told what there is.
#[test]
fn what_there_is_is_told_whenever_the_agent_dies() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        let mut place = Place { scenario, node, agent: Some(agent) };
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let mut count = 0;
        while !manifests(&mut place, count + 1, None) {
            count += 1;
        }
        assert!(count >= MANIFESTS_MIN, "{count} manifests");
        // The last one is its tag.
        let unheard = (1..=TRIES).any(|number| !manifests(&mut place, count, Some(number)));
        assert!(unheard, "it heard of its tag each time on {}", node.name());
    });
    scenario.end().unwrap();
}
