//! Who dies while kybernate-runc claims a staged checkpoint, or restores it: the container is
//! created as its pod wants, and the next one is restored.

use std::process::{Child, Stdio};

use kybernate_conformance::command::wait_until;
use rustix::process::Signal;
use serde_json::Value;

use super::cancels::registry;
use super::has_tag;
use super::pods::{hang, hang_in, is_clean};
use super::victims::{END_LIMIT, running, signal, start_containerd};
use crate::harness::{next_agents, said};
use crate::pods::{CONFIG, Staged, stage_on_both};
use crate::trust::{METRICS, are_told};

/// Has a failed restore start afresh.
pub(crate) const COLD: &str = "on-failure.kybernate.io/main=cold";

/// Has a workload go on in one place only.
const MOVE: &str = "restore-as.kybernate.io/main=move";

/// Returns the operations that are open, or all.
fn operations(staged: &Staged, more: &[&str]) -> Vec<Value> {
    let words = [&["ps", "--operations", "--container", "main"], more].concat();
    let told = staged.scenario.kyb_json(staged.node(), &words).unwrap();
    told["operations"].as_array().cloned().unwrap_or_default()
}

/// Waits until no claim is open, and returns the last one.
fn settled(staged: &Staged, what: &str) -> Value {
    let mut open = Vec::new();
    let closed = wait_until(END_LIMIT, || {
        open = operations(staged, &["--state", "running"]);
        open.is_empty()
    });
    assert!(closed, "{what}: {open:?} stay open");
    operations(staged, &[]).pop().unwrap()
}

/// Begins to create a container, and holds the agent while it judges: the registry says nothing.
fn asks(staged: &Staged, annotations: &[&str]) -> Child {
    registry(&staged.scenario).signal(Signal::STOP);
    let mut create = staged.here().command("main", &staged.pinned, annotations);
    let create = create.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let create = create.spawn().unwrap();
    let asked = || !operations(staged, &["--state", "running"]).is_empty();
    assert!(wait_until(END_LIMIT, asked), "nobody asks");
    create
}

/// What is staged can be taken away: nobody has it.
fn is_free(staged: &Staged) {
    let output = staged.scenario.kyb(staged.node(), &["evict", &staged.pinned]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn a_pods_container_starts_as_it_wants_when_the_agent_dies_in_a_claim() {
    let mut staged = stage_on_both().in_haste();
    for (at, annotation) in [("a", None), ("a", Some(COLD)), ("b", None), ("b", Some(COLD))] {
        staged.at = at;
        let wish = staged.here().wish();
        let annotations: Vec<&str> = [&*wish].into_iter().chain(annotation).collect();
        let create = asks(&staged, &annotations);
        staged.kill_agent();
        registry(&staged.scenario).signal(Signal::CONT);
        let output = create.wait_with_output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.success(), annotation.is_some(), "{annotation:?}: {text}");
        let node = staged.node();
        if annotation.is_some() {
            let fresh = staged.scenario.wait_for_ticks(node, "main").unwrap();
            assert_ne!(fresh["boot_id_of_process"], staged.before["boot_id_of_process"]);
            staged.scenario.remove(node, "main").unwrap();
        } else {
            assert!(text.contains("failed to restore"), "{text}");
        }
        staged.start_agent();
        let last = settled(&staged, "the agent died in a claim");
        assert_eq!(last["state"], "failed", "{last}");
        is_clean(staged.here(), "the agent died in a claim", &[]);
    }
    is_free(&staged);
    staged.scenario.end().unwrap();
}

#[test]
fn a_pods_container_is_restored_when_the_agent_dies_meanwhile() {
    let mut staged = stage_on_both().in_haste();
    for at in ["a", "b"] {
        staged.at = at;
        let create = hang(staged.here());
        staged.kill_agent();
        let node = staged.node();
        node.freezer("main").set(false).unwrap();
        let output = create.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let after = staged.scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(after["boot_id_of_process"], staged.before["boot_id_of_process"]);

        // The next agent learns of it, and leaves it what it needs.
        staged.start_agent();
        let last = settled(&staged, "the agent died in a restore");
        assert_eq!(last["state"], "done", "{last}");
        let node = staged.node();
        let options = node.path("/run/kybernate/volumes/default/main/criu.conf");
        assert!(options.exists(), "no options");
        staged.scenario.wait_for_ticks(node, "main").unwrap();
        staged.scenario.remove(node, "main").unwrap();
        is_clean(staged.here(), "the agent died in a restore", &[]);
        is_free(&staged);
    }
    staged.scenario.end().unwrap();
}

#[test]
fn others_can_have_what_was_to_move_when_the_agent_dies_and_nothing_moved() {
    let mut staged = stage_on_both().in_haste();
    let (repository, digest) = staged.pinned.split_once("@sha256:").unwrap();
    let repository = repository.rsplit_once(':').unwrap().0;
    let claim = format!("{repository}:sha256-{digest}.claim");
    for at in ["a", "b"] {
        staged.at = at;
        let here = staged.here();
        let create =
            hang_in(here.node, &mut here.command("main", here.pinned, &[&here.wish(), MOVE]));
        assert!(has_tag(&staged.scenario, &claim), "nobody has it");
        staged.kill_agent();
        let output = create.wait_with_output().unwrap();
        assert!(!output.status.success(), "{}", said(&output));
        assert!(has_tag(&staged.scenario, &claim), "who let go of it?");
        staged.start_agent();
        let last = settled(&staged, "nothing moved");
        assert_eq!(last["state"], "failed", "{last}");
        assert!(!has_tag(&staged.scenario, &claim), "it stays taken: {last}");
        is_clean(staged.here(), "nothing moved", &[]);
        is_free(&staged);
    }
    staged.scenario.end().unwrap();
}

#[test]
fn what_has_moved_is_refused_to_a_second_one_on_either_node() {
    let mut staged = stage_on_both();
    next_agents(&mut staged.scenario, &format!("metrics = \"unix:{METRICS}\"\n{CONFIG}"));
    let here = staged.here();
    let output = here.create("main", here.pinned, &[&here.wish(), MOVE]);
    assert!(output.status.success(), "{}", said(&output));
    let before = staged.scenario.wait_for_ticks(here.node, "main").unwrap();
    staged.on_both(|spot| {
        let output = spot.create("second", spot.pinned, &[&spot.wish(), MOVE]);
        let (text, name) = (said(&output), spot.node.name());
        assert!(!output.status.success() && text.contains("refused (claim)"), "on {name}: {text}");
        are_told(&staged.scenario, spot.node, "claim", &["restore"]);
        spot.node.run(&["ctr", "container", "rm", "second"]).unwrap();
    });
    let after = staged.scenario.wait_for_ticks(here.node, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    staged.scenario.remove(here.node, "main").unwrap();
    staged.scenario.end().unwrap();
}

#[test]
fn a_pods_container_can_be_created_again_when_containerd_dies_meanwhile() {
    let mut staged = stage_on_both().in_haste();
    for (at, claims) in [("a", true), ("a", false), ("b", true), ("b", false)] {
        staged.at = at;
        let what =
            if claims { "containerd died in a claim" } else { "containerd died in a restore" };
        let create =
            if claims { asks(&staged, &[&staged.here().wish()]) } else { hang(staged.here()) };
        signal(&running(staged.node(), "containerd"), Signal::KILL);
        registry(&staged.scenario).signal(Signal::CONT);
        let output = create.wait_with_output().unwrap();
        assert!(!output.status.success(), "{what}: {}", said(&output));
        start_containerd(staged.node());
        let idle = || running(staged.node(), "kybernate-runc").is_empty();
        assert!(wait_until(END_LIMIT, idle), "{what}: kybernate-runc is left");
        is_clean(staged.here(), what, &[]);
        let last = settled(&staged, what);
        assert_eq!(last["state"], "done", "{what}: {last}");
    }
    is_free(&staged);
    staged.scenario.end().unwrap();
}
