//! Checkpoints that store only what has changed since an earlier one.

use std::collections::BTreeSet;

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Scenario, counter};
use serde_json::Value;

use crate::harness::{change_a_bit, restore, said, start};
use crate::trust::parts;

/// The workload's memory, which does not change while it runs.
const MIB: u32 = 96;

/// How far the workload counts between a base and the next checkpoint.
const DISTANCE: u64 = 20;

/// Returns the last line of the workload's log in the image that a checkpoint has: what it had
/// counted at that instant.
fn counted(node: &Node, reference: &str, name: &str) -> u64 {
    node.run(&["ctr", "image", "pull", "--plain-http", reference]).unwrap();
    let words = ["ctr", "run", "--rm", reference, name, "tail", "-n", "1", "/state/ticks.log"];
    node.told(&words).unwrap().trim().parse().unwrap()
}

fn sent(taken: &Value) -> u64 {
    taken["sizes"]["transferredBytes"].as_u64().unwrap()
}

#[test]
fn an_increment_is_small_and_restores_alone_on_another_node() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", MIB, &[]).unwrap();
    let first = scenario.reference("increments/job:v1");
    let words = ["checkpoint", "job", &first, "--plain-http", "--sign-key", "node-a"];
    let whole = scenario.kyb_json(a, &[&words[..], &["--page-hashes"]].concat()).unwrap();
    let mut seen = scenario.wait_for_ticks(a, "job").unwrap();
    let mut frozen = 0;

    // The second is the base of a third, on what the first has stored.
    let mut base = first.clone();
    for number in [2, 3] {
        let next = scenario.reference(&format!("increments/job:v{number}"));
        let words = ["checkpoint", "job", &next, "--plain-http", "--sign-key", "node-a"];
        let more = ["--page-hashes", "--base", &base];
        // At its base's instant it had not counted as far as was seen after it.
        let far = counter(&seen).map(|counter| counter + DISTANCE);
        let before = scenario.wait_for(a, "job", |status| counter(status) >= far).unwrap();
        let taken = scenario.kyb_json(a, &[&words[..], &more].concat()).unwrap();
        println!("v{number}: {} of {} bytes sent", sent(&taken), sent(&whole));
        assert!(sent(&taken) * 10 < sent(&whole), "{taken} is as large as {whole}");
        assert!(taken["sizes"]["dumpBytes"].as_u64() > Some(u64::from(MIB) << 20), "{taken}");
        let facts = scenario.kyb_json(a, &["inspect", &next, "--plain-http"]).unwrap();
        assert!(facts.to_string().contains("\"generation\":"), "{facts}");
        seen = scenario.wait_for_ticks(a, "job").unwrap();
        frozen = counted(b, &next, &format!("at-{number}"));
        assert!(counter(&before) <= Some(frozen) && Some(frozen) <= counter(&seen), "{frozen}");
        base = next;
    }
    scenario.remove(a, "job").unwrap();

    let output = restore(&scenario, b, &base, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, "job").unwrap();
    assert_eq!(after["boot_id_of_process"], seen["boot_id_of_process"]);
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
    // The first thing that it wrote here follows on the last thing that it wrote there: counted on
    // from its base, it would say less.
    let line = format!("head -n {} /state/ticks.log | tail -n 1", frozen + 1);
    let line =
        b.told(&["ctr", "task", "exec", "--exec-id", "l", "job", "sh", "-c", &line]).unwrap();
    assert_eq!(line.trim().parse(), Ok(frozen + 1));
    scenario.end().unwrap();
}

#[test]
fn the_last_checkpoint_is_the_base_by_itself() {
    let mut scenario = start();
    // The next agent knows of it, too.
    let agent = scenario.agent_a.take().unwrap();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let take = |node: &Node, name: &str, more: &[&str]| {
        let (key, reference) =
            (format!("node-{}", node.name()), scenario.reference(&format!("increments/{name}")));
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        scenario.kyb_json(node, &[&words[..], more].concat()).unwrap()
    };
    scenario.run_workload(a, "job", MIB, &[]).unwrap();
    let first = take(a, "job:v1", &[]);
    assert_eq!(first["base"], Value::Null, "{first}");
    // A pause is a part of the operation.
    let steps = first["timesMicroseconds"].as_object().unwrap().values();
    let all: u64 = steps.filter_map(Value::as_u64).sum();
    let paused = first["pausedMicroseconds"].as_u64().unwrap();
    assert!((1..all).contains(&paused), "{first}");
    agent.kill();
    let _agent = scenario.start_agent(a, "").unwrap();
    let second = take(a, "job:v2", &[]);
    assert_eq!(second["base"], first["digest"], "{second}");
    assert!(sent(&second) * 10 < sent(&first), "{second} is as large as {first}");
    let full = take(a, "job:v3", &["--full"]);
    assert_eq!(full["base"], Value::Null, "{full}");
    scenario.remove(a, "job").unwrap();

    // What it was restored from is as good as what was taken of it.
    let output = restore(&scenario, b, &scenario.reference("increments/job:v3"), "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let fourth = take(b, "job:v4", &[]);
    assert_eq!(fourth["base"], full["digest"], "{fourth}");
    assert!(sent(&fourth) * 10 < sent(&first), "{fourth} is as large as {first}");
    // Nothing is fetched from another repository for it.
    assert_eq!(take(b, "other:v1", &[])["base"], Value::Null);
    let fifth = take(b, "job:v5", &[]);
    assert_eq!(fifth["base"], fourth["digest"], "{fifth}");
    // One that is gone is no reason to have none.
    let gone = scenario.reference("increments/job");
    let gone = format!("{gone}@{}", fifth["digest"].as_str().unwrap());
    b.run(&["kyb", "rm", &gone, "--plain-http"]).unwrap();
    let last = take(b, "job:v6", &[]);
    assert_eq!(last["base"], Value::Null, "{last}");
    let told = last["warnings"][0].as_str().unwrap();
    assert!(told.contains(&gone), "{told}");
    scenario.remove(b, "job").unwrap();

    let output = restore(&scenario, b, &scenario.reference("increments/job:v4"), "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, "job").unwrap();
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
    scenario.end().unwrap();
}

/// Changes a bit of each blob of these that is as large as only memory is, as a disk does when nobody looks.
/// Returns how many.
fn rot(scenario: &Scenario, blobs: &BTreeSet<String>) -> usize {
    let all = scenario.registry_root().join("blobs/sha256");
    let files = blobs.iter().map(|blob| {
        let hex = blob.strip_prefix("sha256:").unwrap();
        all.join(&hex[..2]).join(hex)
    });
    let large = files.filter(|file| fs::metadata(file).unwrap().len() > 16 << 20);
    large.map(|file| change_a_bit(&file)).count()
}

#[test]
fn what_has_rotted_in_the_registry_is_sent_again_in_full() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", MIB, &[]).unwrap();
    let repository = scenario.reference("increments/rotted");
    let take = |tag: &str, more: &[&str]| {
        let reference = format!("{repository}:{tag}");
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", "node-a"];
        let taken = scenario.kyb_json(a, &[&words[..], more].concat()).unwrap();
        let blobs = parts(b, &repository, taken["digest"].as_str().unwrap()).1;
        (taken, blobs)
    };
    let (first, rotted) = take("v1", &[]);
    assert!(rot(&scenario, &rotted) > 0, "{first}");
    let (full, blobs) = take("v2", &["--full", "--stop"]);
    let same = rotted.intersection(&blobs).count();
    println!("{} of {} bytes sent, {same} blobs once more", sent(&full), sent(&first));
    assert!(full["sizes"]["pageBytes"].as_u64() < Some(sent(&full)), "{full}");
    scenario.remove(a, "job").unwrap();

    let output = restore(&scenario, b, &format!("{repository}:v2"), "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, "job").unwrap();
    assert_eq!(after["checksum_ok"], true, "{after}");
    scenario.end().unwrap();
}

#[test]
fn a_base_that_cannot_be_used_is_named_before_anything_is_touched() {
    let mut scenario = start();
    scenario.agent_a.take().unwrap().kill();
    scenario.environment.push("KYBERNATE_AGENT_PAGE_HASHES=false".to_owned());
    let a = &scenario.testbed.a;
    let _agent = scenario.start_agent(a, "").unwrap();
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let take = |tag: &str, more: &[&str]| {
        let reference = scenario.reference(&format!("increments/job:{tag}"));
        let words = ["checkpoint", "job", &reference, "--plain-http"];
        scenario.kyb(a, &[&words[..], more].concat()).unwrap()
    };
    let plain = take("plain", &["--sign-key", "node-a"]);
    assert!(plain.status.success(), "{}", said(&plain));
    let unsigned = take("unsigned", &["--unsigned", "--page-hashes"]);
    assert!(unsigned.status.success(), "{}", said(&unsigned));

    let before = scenario.traces(a).unwrap();
    let cases = [
        ("plain", 1, "--page-hashes"),
        ("unsigned", 2, "not signed"),
        ("missing", 1, "increments/job:missing"),
    ];
    for (base, code, reason) in cases {
        let base = scenario.reference(&format!("increments/job:{base}"));
        let output = take("next", &["--sign-key", "node-a", "--base", &base]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(reason) && text.contains(&base), "{text}");
        assert_eq!(scenario.traces(a).unwrap(), before, "something is left");
    }
    let layout = take("next", &["--sign-key", "node-a", "--base", "oci:/tmp/layout:v1"]);
    assert_eq!(layout.status.code(), Some(64), "{}", said(&layout));
    scenario.wait_for_ticks(a, "job").unwrap();
    scenario.end().unwrap();
}
