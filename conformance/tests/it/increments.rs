//! Checkpoints that store only what has changed since an earlier one.

use kybernate_conformance::scenario::counter;
use serde_json::Value;

use crate::harness::{restore, said, start};

/// The workload's memory, which does not change while it runs.
const MIB: u32 = 96;

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
    let mut before = scenario.wait_for_ticks(a, "job").unwrap();

    // The second is the base of a third, on what the first has stored.
    let mut base = first.clone();
    for number in [2, 3] {
        let next = scenario.reference(&format!("increments/job:v{number}"));
        let words = ["checkpoint", "job", &next, "--plain-http", "--sign-key", "node-a"];
        let more = ["--page-hashes", "--base", &base];
        let taken = scenario.kyb_json(a, &[&words[..], &more].concat()).unwrap();
        println!("v{number}: {} of {} bytes sent", sent(&taken), sent(&whole));
        assert!(sent(&taken) * 10 < sent(&whole), "{taken} is as large as {whole}");
        assert!(taken["sizes"]["dumpBytes"].as_u64() > Some(u64::from(MIB) << 20), "{taken}");
        let facts = scenario.kyb_json(a, &["inspect", &next, "--plain-http"]).unwrap();
        assert!(facts.to_string().contains("\"generation\":"), "{facts}");
        before = scenario.wait_for_ticks(a, "job").unwrap();
        base = next;
    }
    scenario.remove(a, "job").unwrap();

    let output = restore(&scenario, b, &base, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, "job").unwrap();
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
    assert!(counter(&after) > counter(&before).map(|counter| counter / 2));
    scenario.end().unwrap();
}

#[test]
fn a_base_that_cannot_be_used_is_named_before_anything_is_touched() {
    let scenario = start();
    let a = &scenario.testbed.a;
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
