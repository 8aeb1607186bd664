//! Operations that are cancelled: the source runs on, nothing is left, and the next try works.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;
use serde_json::Value;

use super::halt::halt;
use super::victims::{END_LIMIT, catch, running, signal};
use super::{first, has_tag, is, locks};
use crate::harness::{checkpoint, nodes, on_both, restore, said, start};
use crate::privileges::LOCK;

/// How long a cancelled operation may take to end: CRIU gets five seconds to end by itself, then
/// containerd has to notice that it did not.
const CANCEL_LIMIT: Duration = Duration::from_secs(25);

/// Starts `kyb` without waiting for it.
pub(super) fn begin(node: &Node, words: &[&str]) -> Child {
    let mut command = node.command(&[&["kyb"], words, &["--plain-http"]].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the newest operation, as `kyb ps` tells it; null where there was none yet.
pub(super) fn newest(scenario: &Scenario, node: &Node) -> Value {
    let told = scenario.kyb_json(node, &["ps", "--operations"]).unwrap();
    told["operations"].as_array().unwrap().last().cloned().unwrap_or_default()
}

/// Waits until the newest operation is at a step, and returns its id.
pub(super) fn at_step(scenario: &Scenario, node: &Node, steps: &[&str]) -> String {
    let mut now = Value::Null;
    let reached = wait_until(END_LIMIT, || {
        now = newest(scenario, node);
        now["step"].as_str().is_some_and(|step| steps.contains(&step))
    });
    assert!(reached, "it is not at {steps:?}: {now}");
    now["id"].as_str().unwrap().to_owned()
}

/// Cancels an operation, twice, and returns what was undone.
fn cancel(scenario: &Scenario, node: &Node, id: &str) -> String {
    let began = Instant::now();
    let told = scenario.kyb_json(node, &["cancel", id]).unwrap();
    assert_eq!(told["state"], "cancelled", "{told}");
    assert!(began.elapsed() < CANCEL_LIMIT, "it took {:?}", began.elapsed());
    let again = scenario.kyb_json(node, &["cancel", id]).unwrap();
    assert_eq!(again["undone"], told["undone"]);
    let listed = scenario.kyb_json(node, &["ps", "--operations", "--state", "cancelled"]).unwrap();
    let listed = listed["operations"].as_array().unwrap();
    assert!(listed.iter().any(|one| one["id"] == id && one["error"] == "it was cancelled"));
    told["undone"].to_string()
}

/// Waits until a `kyb` has failed, and returns what it said.
pub(super) fn fails(kyb: Child) -> String {
    let output = kyb.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    said(&output)
}

pub(crate) fn stage(node: &Node, file: &str) -> u64 {
    let files = staged(node, "/run/kybernate/stage", file);
    files.filter_map(|file| fs::metadata(file).ok()).map(|file| file.len()).sum()
}

/// Whether CRIU has made all of a restore, and only has to let go of it, by its log in an operation's
/// directory below this one.
pub(super) fn has_made_all(node: &Node, stages: &str, log: &str) -> bool {
    let mut logs = staged(node, stages, log).filter_map(|log| fs::read(log).ok());
    logs.any(|log| String::from_utf8_lossy(&log).contains("Restore via sigreturn"))
}

/// Whether CRIU has stopped a process of a source. Held before that for long, it gives up by itself (its
/// own limit for that is 10 s).
pub(super) fn has_seized(node: &Node) -> bool {
    says(node, "work/dump.log", "Seized task")
}

/// Whether a log in an operation's directory has such words.
pub(crate) fn says(node: &Node, log: &str, words: &str) -> bool {
    let mut logs = staged(node, "/run/kybernate/stage", log).filter_map(|log| fs::read(log).ok());
    logs.any(|log| String::from_utf8_lossy(&log).contains(words))
}

/// Returns where such a file may be in the directories of operations.
fn staged<'f>(node: &Node, stages: &str, file: &'f str) -> impl Iterator<Item = PathBuf> + use<'f> {
    let stages = fs::read_dir(node.path(stages)).ok().into_iter().flatten();
    stages.filter_map(move |entry| Some(entry.ok()?.path().join(file)))
}

/// Stops CRIU in the long part of a dump.
fn in_memory(node: &Node) -> Vec<Process> {
    halt(node, || has_seized(node), || stage(node, "images/pages-1.img") > 0)
}

/// The source runs, nothing is frozen or locked, and nothing is left.
fn runs_on(scenario: &Scenario, node: &Node, before: &str) {
    assert!(is(node, "job", "RUNNING"));
    scenario.wait_for_ticks(node, "job").unwrap();
    assert_eq!(running(node, "criu"), []);
    assert_eq!(locks(node, &first(node)), "", "its network is locked");
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
}

pub(super) fn registry(scenario: &Scenario) -> Process {
    scenario.registry.as_ref().unwrap().process().unwrap()
}

#[test]
fn a_checkpoint_is_cancelled_while_it_is_dumped() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, _agent| {
        scenario.run_workload(node, "job", 256, &[]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("cancel/dump:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--sign-key", &key];

        // One that is well, by Ctrl-C.
        let kyb = begin(node, &words);
        assert!(catch(|| stage(node, "work/dump.log") > 0), "it does not come to that");
        let asks = running(node, "kyb");
        assert_eq!(asks.len(), 1);
        signal(&asks, Signal::INT);
        assert!(fails(kyb).contains("cancelling operation"));
        assert_eq!(newest(scenario, node)["state"], "cancelled");
        runs_on(scenario, node, &before);
        assert!(!has_tag(scenario, &reference));
        checkpoint(scenario, node, "job", &reference);
        assert!(has_tag(scenario, &reference));
        let done = newest(scenario, node);
        let late = scenario.kyb(node, &["cancel", done["id"].as_str().unwrap()]).unwrap();
        assert_eq!(late.status.code(), Some(1));
        assert!(said(&late).contains("has ended already: done"), "{}", said(&late));

        // One that hangs, in the long part of a dump, which has to be killed.
        let kyb = begin(node, &words);
        let criu = in_memory(node);
        let id = at_step(scenario, node, &["dump"]);
        let percent = &newest(scenario, node)["progress"]["percent"];
        assert!(percent.as_u64().is_some_and(|percent| percent < 100), "{percent}");
        let undone = cancel(scenario, node, &id);
        assert!(undone.contains("the source runs") && undone.contains("staging"), "{undone}");
        assert!(criu.iter().all(|process| !process.runs()), "CRIU outlives it");
        assert!(fails(kyb).contains("it was cancelled; the source runs"));
        runs_on(scenario, node, &before);

        // It left its code in the source, which can only be dumped again when it is started anew.
        scenario.remove(node, "job").unwrap();
        scenario.run_workload(node, "job", 256, &[]).unwrap();
        let before = scenario.traces(node).unwrap();
        // One whose time is over: it is over when this machine has come as far, however slow it is.
        let kyb = begin(node, &[&words[..], &["--timeout", "20s"]].concat());
        in_memory(node);
        assert!(fails(kyb).contains("its time was over"));
        runs_on(scenario, node, &before);
    });
    scenario.end().unwrap();
}

/// A source that is killed while CRIU has it dies when CRIU lets it run: nobody says that it runs on.
#[test]
fn a_checkpoint_whose_source_is_killed_in_the_dump_says_so() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, _agent| {
        // Its image stays.
        scenario.run_workload(node, "job", 64, &[]).unwrap();
        scenario.remove(node, "job").unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("cancel/ended:{}", node.name()));
        let key = format!("node-{}", node.name());
        for cancelled in [false, true] {
            scenario.run_workload(node, "job", 64, &[]).unwrap();
            // Not later: in a dump containerd does not know it.
            let pid = first(node);
            let kyb = begin(node, &["checkpoint", "job", &reference, "--sign-key", &key]);
            let criu = in_memory(node);
            node.run(&["kill", "-KILL", &pid]).unwrap();
            let said = if cancelled {
                let id = at_step(scenario, node, &["dump"]);
                let undone = cancel(scenario, node, &id);
                assert!(undone.contains("the source has ended"), "{undone}");
                fails(kyb)
            } else {
                signal(&criu, Signal::CONT);
                fails(kyb)
            };
            let last = newest(scenario, node);
            let state = if cancelled { "cancelled" } else { "failed" };
            assert_eq!(last["state"], state, "{last}");
            let ended = "; the source has ended, with exit status 137";
            assert!(said.contains(ended) && !said.contains("the source runs"), "{said}");
            assert!(!has_tag(scenario, &reference));
            scenario.remove(node, "job").unwrap();
            assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        }
        scenario.run_workload(node, "job", 64, &[]).unwrap();
        checkpoint(scenario, node, "job", &reference);
    });
    scenario.end().unwrap();
}

#[test]
fn a_checkpoint_is_cancelled_while_it_is_pushed() {
    let scenario = start();
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 128, &[]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("cancel/push:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--sign-key", &key];
        for stop in [false, true] {
            let kyb = begin(node, &[&words[..], if stop { &["--stop"] } else { &[] }].concat());
            assert!(catch(|| stage(node, "work/dump.log") > 0), "it does not come to that");
            // As slow as can be.
            registry(&scenario).signal(Signal::STOP);
            let id = at_step(&scenario, node, &["pack", "push"]);
            assert!(is(node, "job", if stop { "PAUSED" } else { "RUNNING" }));
            let undone = cancel(&scenario, node, &id);
            assert!(undone.contains("staging"), "{undone}");
            assert_eq!(undone.contains("the source runs"), stop, "{undone}");
            fails(kyb);
            runs_on(&scenario, node, &before);
            registry(&scenario).signal(Signal::CONT);
            assert!(!has_tag(&scenario, &reference));
        }
        checkpoint(&scenario, node, "job", &reference);
        assert!(has_tag(&scenario, &reference));
    }
    scenario.end().unwrap();
}

/// A source is not kept waiting for a registry.
#[test]
fn a_source_that_is_to_be_stopped_runs_on_when_its_deadline_passes() {
    let scenario = start();
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 128, &[]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("cancel/late:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--sign-key", &key];
        let kyb = begin(node, &[&words[..], &["--stop", "--pause-deadline", "15s"]].concat());
        assert!(catch(|| stage(node, "work/dump.log") > 0), "it does not come to that");
        registry(&scenario).signal(Signal::STOP);
        let told = fails(kyb);
        assert!(told.contains("was not stored within the 15s"), "{told}");
        let last = newest(&scenario, node);
        assert_eq!(last["undone"][0], "the source runs", "{last}");
        runs_on(&scenario, node, &before);
        registry(&scenario).signal(Signal::CONT);
        assert!(!has_tag(&scenario, &reference));
        checkpoint(&scenario, node, "job", &reference);
    }
    scenario.end().unwrap();
}

/// Where connections were kept, CRIU locks the network that a container is given while it restores, and
/// that outlives the container. None were here, so the test locks it as CRIU does.
#[test]
fn a_given_network_is_open_when_a_restore_into_it_is_cancelled() {
    let mut scenario = start();
    let given = "network:/run/netns/pod";
    on_both(&mut scenario, |scenario, node, _agent| {
        node.run(&["sh", "-c", "ip netns add pod && ip -n pod link set lo up"]).unwrap();
        scenario.run_workload(node, "job", 64, &["--with-ns", given]).unwrap();
        let reference = scenario.reference(&format!("cancel/given:{}", node.name()));
        checkpoint(scenario, node, "job", &reference);
        scenario.remove(node, "job").unwrap();
        let rules = || node.run(&["ip", "netns", "exec", "pod", "iptables", "-S"]).unwrap();

        let words = ["restore", &reference, "--name", "job", "--allow-host-namespace", given];
        let kyb = begin(node, &words);
        let log = "work/restore.log";
        let is_made = || has_made_all(node, "/run/kybernate/stage", log);
        halt(node, || stage(node, log) > 0, is_made);
        assert!(!rules().contains("CRIU"), "it is locked in vain");
        node.run(&["ip", "netns", "exec", "pod", "sh", "-c", LOCK]).unwrap();
        let id = at_step(scenario, node, &["restore"]);
        cancel(scenario, node, &id);
        fails(kyb);
        assert!(!rules().contains("CRIU"), "{}", rules());

        let more = ["--allow-host-namespace", given];
        let output = restore(scenario, node, &reference, "job", &more);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
        assert!(!rules().contains("CRIU"), "{}", rules());
        scenario.remove(node, "job").unwrap();
        node.run(&["ip", "netns", "del", "pod"]).unwrap();
    });
    scenario.end().unwrap();
}

#[test]
fn a_restore_is_cancelled() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 128, &[]).unwrap();
    let reference = scenario.reference("cancel/restore:v1");
    checkpoint(&scenario, a, "job", &reference);
    scenario.remove(a, "job").unwrap();
    for node in nodes(&scenario) {
        // The first one leaves the image and its layers.
        assert!(restore(&scenario, node, &reference, "job", &[]).status.success());
        scenario.remove(node, "job").unwrap();
        let before = scenario.traces(node).unwrap();
        let words = ["restore", &reference, "--name", "job"];

        let kyb = begin(node, &words);
        assert!(catch(|| stage(node, "images/pages-1.img") > 0), "it does not come to that");
        registry(&scenario).signal(Signal::STOP);
        let id = newest(&scenario, node)["id"].as_str().unwrap().to_owned();
        cancel(&scenario, node, &id);
        registry(&scenario).signal(Signal::CONT);
        fails(kyb);
        assert_eq!(scenario.traces(node).unwrap(), before);

        let kyb = begin(node, &words);
        let begun = || stage(node, "work/restore.log") > 0;
        halt(node, begun, begun);
        let id = at_step(&scenario, node, &["restore"]);
        let undone = cancel(&scenario, node, &id);
        for what in ["task", "container", "snapshot", "staging", "lease"] {
            assert!(undone.contains(what), "{undone} has no {what}");
        }
        fails(kyb);
        assert_eq!(running(node, "criu"), []);
        assert_eq!(scenario.traces(node).unwrap(), before);

        let output = restore(&scenario, node, &reference, "job", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
    }
    scenario.end().unwrap();
}
