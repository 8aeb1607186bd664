//! Whose network a restored container is in: what its own specification says, and never another one.

use std::process::{Output, Stdio};

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::running;
use crate::harness::{at_once, checkpoint, next_agents, refused, restore, said, start};
use crate::pods::{CONFIG, command_of, make_ready};
use crate::workloads::Place;

const GIVEN: &str = "/run/netns/given";
const OTHER: &str = "/run/netns/other";
/// As containerd's CRI plugin says it for a pod with hostNetwork: the node's own, by its path.
const HOST: [&str; 2] = ["--with-ns", "network:/proc/1/ns/net"];

/// Makes network namespaces on a node that outlive containers, as pods' do.
fn give(node: &Node, names: &[&str]) {
    for name in names {
        node.run(&["ip", "netns", "add", name]).unwrap();
    }
}

/// Returns the number of the network namespace that a container's first process is in.
fn network(node: &Node, id: &str) -> u64 {
    let place = Place { node, namespace: "default", id, state: "/state" };
    at(node, &format!("/proc/{}/ns/net", place.pid().unwrap()))
}

/// Returns the number of a namespace by its path in a node.
fn at(node: &Node, path: &str) -> u64 {
    let text = node.run(&["stat", "-L", "-c", "%i", path]).unwrap();
    text.trim().parse().unwrap()
}

/// The node's own: that of its first process.
fn own(node: &Node) -> u64 {
    at(node, "/proc/1/ns/net")
}

#[test]
fn a_network_that_was_given_is_given_again() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    give(a, &["given"]);
    give(b, &["other"]);
    let with = format!("network:{GIVEN}");
    scenario.run_workload(a, "job", 16, &["--with-ns", &with]).unwrap();
    assert_eq!(network(a, "job"), at(a, GIVEN));
    let reference = scenario.reference("networks/given:v1");
    checkpoint(&scenario, a, "job", &reference);
    refused(&scenario, b, &reference, &[], "--allow-host-namespace network:PATH");
    refused(&scenario, b, &reference, &["--allow-host-namespace", "network"], "network");
    let allow = format!("network:{OTHER}");
    let output = restore(&scenario, b, &reference, "job", &["--allow-host-namespace", &allow]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(b, "job").unwrap();
    assert_eq!(network(b, "job"), at(b, OTHER));

    // What had its own has its own again, and is not put into another's.
    scenario.remove(a, "job").unwrap();
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("networks/own:v1");
    checkpoint(&scenario, a, "job", &reference);
    let allow = ["--allow-host-namespace", &allow];
    refused(&scenario, b, &reference, &allow, "its network namespace was its own");
    let output = restore(&scenario, b, &reference, "own", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let found = network(b, "own");
    assert!(found != at(b, OTHER) && found != own(b));
    scenario.end().unwrap();
}

/// Creates a container with a wish as containerd's CRI plugin does, in a network.
fn create(node: &Node, pinned: &str, network: &[&str]) -> Output {
    let wish = format!("restore.kybernate.io/main={pinned}");
    let program = ["/workload", "run", "--state", "/state", "--mib", "16"];
    let mut command = command_of(node, [pinned, "main"], &[&wish], network, &program);
    command.stdin(Stdio::null()).output().unwrap()
}

/// Takes what runs in node a's own network, and stages it on both nodes. Returns its name.
fn stage_host(scenario: &Scenario) -> String {
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &HOST).unwrap();
    assert_eq!(network(a, "job"), own(a));
    let reference = scenario.reference("networks/host:v1");
    let digest = checkpoint(scenario, a, "job", &reference);
    scenario.remove(a, "job").unwrap();
    let pinned = format!("{reference}@{digest}");
    at_once(scenario, |node| make_ready(scenario, node, &pinned));
    pinned
}

#[test]
fn the_nodes_own_network_comes_to_those_alone_that_have_it() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    let pinned = stage_host(&scenario);
    at_once(&scenario, |node| {
        give(node, &["other"]);
        // A pod with a network of its own, and a container with one that nobody else has.
        for network in [&["--with-ns", "network:/run/netns/other"][..], &[]] {
            let output = create(node, &pinned, network);
            let text = said(&output);
            assert!(!output.status.success(), "{network:?}: {text}");
            assert!(text.contains("were in the host's network namespace"), "{network:?}: {text}");
            assert_eq!(running(node, "criu"), []);
            node.output(&["ctr", "container", "rm", "main"]).unwrap();
        }
        let output = create(node, &pinned, &HOST);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(network(node, "main"), own(node));
    });
    scenario.end().unwrap();
}

/// What CRIU changes rules with: it tells each time that it was called.
const TELLS: &str = r#"
set -e
for tool in iptables-restore ip6tables-restore; do
    rm "/usr/sbin/$tool"
    printf '#!/bin/sh\necho %s >>/root/rules\nexec xtables-nft-multi %s "$@"\n' $tool $tool \
        >"/usr/sbin/$tool"
    chmod 0755 "/usr/sbin/$tool"
done
: >/root/rules
"#;

/// Returns what has changed rules since the last look.
fn changed(node: &Node) -> String {
    node.run(&["sh", "-c", "cat /root/rules && : >/root/rules"]).unwrap()
}

/// A lock drops the packets of all who are in that network.
#[test]
fn a_restore_locks_nobody_out() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    at_once(&scenario, |node| {
        node.run(&["sh", "-c", TELLS]).unwrap();
        give(node, &["given", "other"]);
        let with = format!("network:{GIVEN}");
        scenario.run_workload(node, "job", 16, &["--with-ns", &with]).unwrap();
        let reference = scenario.reference(&format!("networks/{}:v1", node.name()));
        // It has no options of its own, and CRIU was told nothing.
        let pinned = format!("{reference}@{}", checkpoint(&scenario, node, "job", &reference));
        assert_ne!(changed(node), "", "its network was not locked");

        let allow = format!("network:{OTHER}");
        let allow = ["--allow-host-namespace", &allow];
        let output = restore(&scenario, node, &reference, "back", &allow);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "back").unwrap();
        assert_eq!(changed(node), "", "its network was locked");
        // The same from what is staged, by kybernate-runc.
        make_ready(&scenario, node, &pinned);
        let output = create(node, &pinned, &["--with-ns", &format!("network:{OTHER}")]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(changed(node), "", "its network was locked");
    });
    scenario.end().unwrap();
}
