//! What becomes of a container's network while it is dumped.

use kybernate_conformance::node::Node;
use rustix::process::Signal;

use super::cancels::{begin, in_memory};
use super::victims::signal;
use super::{first, locks};
use crate::harness::{restore, said, start};

/// How CRIU locks it, in the words of `iptables -S`.
const LOCK: &str = "-A CRIU -j DROP";

/// Takes `job` and holds CRIU in the midst of it. Returns the rules that are there then.
fn rules_in(node: &Node, tcp: &str, reference: &str) -> String {
    let key = format!("node-{}", node.name());
    let pid = first(node);
    let words = ["checkpoint", "job", reference, "--sign-key", &key, "--tcp", tcp];
    let kyb = begin(node, &words);
    let criu = in_memory(node);
    let rules = locks(node, &pid);
    signal(&criu, Signal::CONT);
    let output = kyb.wait_with_output().unwrap();
    assert!(output.status.success(), "{tcp}: {}", said(&output));
    assert_eq!(locks(node, &pid), "", "{tcp}: it is locked afterwards");
    rules
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
            let rules = rules_in(node, tcp, &reference(tcp));
            // The CRIU of node a cannot be told.
            let is_locked = tcp == "keep" || node.name() == "a";
            assert_eq!(rules.contains(LOCK), is_locked, "{}, {tcp}: {rules}", node.name());
        }
        scenario.remove(node, "job").unwrap();
        // A restore believes the dump: it unlocks what was locked, and nothing else.
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
