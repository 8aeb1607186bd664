//! What becomes of a container's network while it is dumped.

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use super::victims::END_LIMIT;
use super::{first, locks};
use crate::harness::{restore, said, start};

/// How CRIU locks it, in the words of `nft monitor`.
const LOCK: &str = "CRIU";

/// Takes `job`, and returns every change of its network's rules meanwhile.
fn changes_in(scenario: &Scenario, node: &Node, tcp: &str, reference: &str) -> String {
    let (pid, key) = (first(node), format!("node-{}", node.name()));
    let file = format!("/tmp/rules-{tcp}");
    let script = format!("nsenter -t {pid} -n nft monitor >{file} 2>&1 </dev/null & echo $!");
    let monitor = node.run(&["sh", "-c", &script]).unwrap();
    let told = || fs::read_to_string(node.path(&file)).unwrap();
    // It says what happens from when it says that of these.
    let says = |table: &str| {
        let script = format!("nft add table inet {table} && nft delete table inet {table}");
        let script = ["nsenter", "-t", &pid, "-n", "sh", "-c", &script];
        wait_until(END_LIMIT, || node.run(&script).is_ok() && told().contains(table))
    };
    assert!(says("begin"), "nobody tells of changes: {}", told());
    let words = ["checkpoint", "job", reference, "--plain-http", "--sign-key", &key, "--tcp", tcp];
    let output = scenario.kyb(node, &words).unwrap();
    assert!(output.status.success(), "{tcp}: {}", said(&output));
    assert!(says("end"), "nobody tells of changes any more: {}", told());
    node.run(&["kill", monitor.trim()]).unwrap();
    assert_eq!(locks(node, &pid), "", "{tcp}: it is locked afterwards");
    told()
}

#[test]
fn the_network_is_locked_only_where_connections_are_kept() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        let config = "org.criu.config=/var/lib/kybernate/criu/job.conf";
        scenario.run_workload(node, "job", 64, &["--annotation", config]).unwrap();
        let policies = ["refuse", "keep", "close"];
        let reference = |tcp: &str| scenario.reference(&format!("network/{}:{tcp}", node.name()));
        for tcp in policies {
            let changes = changes_in(&scenario, node, tcp, &reference(tcp));
            // The CRIU of node a cannot be told.
            let is_locked = tcp == "keep" || node.name() == "a";
            assert_eq!(changes.contains(LOCK), is_locked, "{}, {tcp}: {changes}", node.name());
        }
        scenario.remove(node, "job").unwrap();
        // Behind a restore it is open, however it was in the dump.
        for tcp in policies {
            let output = restore(&scenario, b, &reference(tcp), "job", &[]);
            assert!(output.status.success(), "{tcp}: {}", said(&output));
            scenario.wait_for_ticks(b, "job").unwrap();
            assert_eq!(locks(b, &first(b)), "", "{tcp}: it is locked");
            scenario.remove(b, "job").unwrap();
        }
    }
    scenario.end().unwrap();
}
