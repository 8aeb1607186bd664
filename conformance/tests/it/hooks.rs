//! Programs of the node's configuration that run around a checkpoint.

use std::time::Instant;

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::harness::{checkpoint, said, start};

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
    let file = node.path("/root/hooks");
    let text = fs_err::read_to_string(&file).unwrap_or_default();
    fs_err::remove_file(&file).unwrap_or_default();
    text
}

fn asked(scenario: &Scenario, node: &Node, more: &[&str]) -> (Option<i32>, String) {
    let reference = scenario.reference("hooked/job:refused");
    let words = ["checkpoint", "job", &reference, "--plain-http", "--unsigned"];
    let output = scenario.kyb(node, &[&words[..], more].concat()).unwrap();
    (output.status.code(), said(&output))
}

#[test]
fn hooks_run_around_the_pause_and_a_source_outlives_them() {
    let mut scenario = start();
    scenario.agent_a.take().unwrap().kill();
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, HOOKS).unwrap());
    scenario.run_workload(&scenario.testbed.a, "job", 16, &[]).unwrap();
    let a = &scenario.testbed.a;
    checkpoint(&scenario, a, "job", &scenario.reference("hooked/job:v1"));
    assert_eq!(written(a), "before job\nwhile_paused PAUSED\nafter RUNNING\n");

    let before = scenario.traces(a).unwrap();
    for (hook, code, told, ran) in [
        ("refuse", Some(2), "not flushed", "before job\nfailed RUNNING\n"),
        ("spoil", Some(1), "\"spoil\"", "before job\nwhile_paused PAUSED\nfailed RUNNING\n"),
        ("hang", Some(2), "did not end within 2s", "before job\nfailed RUNNING\n"),
        ("complain", Some(0), "\"complain\"", "before job\nwhile_paused PAUSED\nafter RUNNING\n"),
        ("paused", Some(64), "no hook \"paused\"", ""),
    ] {
        let begun = Instant::now();
        let (ended, text) = asked(&scenario, a, &["--hook", hook]);
        assert!(ended == code && text.contains(told), "{hook}: {ended:?} {text}");
        assert_eq!(written(a), ran, "{hook}");
        assert!(begun.elapsed().as_secs() < 60, "{hook}");
        scenario.wait_for_ticks(a, "job").unwrap();
    }
    assert_eq!(scenario.traces(a).unwrap(), before, "something is left");
    scenario.end().unwrap();
}
