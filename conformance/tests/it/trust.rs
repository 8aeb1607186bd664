//! Whose word counts on a node, and what those are told whose word does not.

use std::collections::BTreeSet;
use std::process::Stdio;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Service;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use crate::failures::victims::END_LIMIT;
use crate::harness::{
    at_once, checkpoint, next_agents, nodes, on_both, refused, restore, said, start,
};
use crate::pods::{CONFIG, command_of, make_ready};

const METRICS: &str = "/run/kybernate/metrics.sock";
const POLICY: &str = "/etc/kybernate/trust.toml";
/// Has a pod's container that was restored before fail.
const FAIL: &str = "on-restart.kybernate.io/main=fail";

/// Takes a checkpoint that nobody signs, and returns its digest.
fn unsigned(scenario: &Scenario, node: &Node, id: &str, reference: &str) -> String {
    let words = ["checkpoint", id, reference, "--plain-http", "--unsigned"];
    let taken = scenario.kyb_json(node, &words).unwrap();
    taken["digest"].as_str().unwrap().to_owned()
}

fn log(scenario: &Scenario, name: &str) -> String {
    fs::read_to_string(scenario.testbed.private().join(name)).unwrap()
}

/// A node whose policy only warns lets one in, and refuses the other.
fn warns(scenario: &Scenario, node: &Node, [warned, strict]: [&str; 2]) {
    refused(scenario, node, strict, &[], "is not signed");
    let tolerated = "not trusted, but the rule only warns";
    let agents = format!("agent-{}.log", node.name());
    assert!(!log(scenario, &agents).contains(tolerated));
    let output = restore(scenario, node, warned, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(node, "job").unwrap();
    let said = log(scenario, &agents);
    let line = said.lines().find(|line| line.contains(tolerated)).unwrap();
    assert!(line.contains("scratch") && line.contains("not-signed"), "{line}");
    let page = ["curl", "-s", "--unix-socket", METRICS, "http://x/metrics"];
    let page = node.run(&page).unwrap();
    let counted = |outcome: &str| {
        let of = format!("outcome=\"{outcome}\",reason=\"not-signed\"}} 1");
        page.lines().any(|line| {
            line.starts_with("kybernate_agent_trust_decisions_total{kind=\"restore\",")
                && line.ends_with(&of)
        })
    };
    assert!(counted("tolerated") && counted("refused"), "{page}");
}

#[test]
fn a_rule_that_only_warns_lets_unsigned_checkpoints_in_and_says_so() {
    let mut scenario = start();
    let rule = "[[rule]]\nname = \"scratch\"\nrepositories = [\"10.77.0.1:5000/trust/scratch\"]\n\
                mode = \"warn\"\nkeys = [\"/srv/share/node-b.pub\"]\n";
    for node in nodes(&scenario) {
        fs::write(node.path(POLICY), rule).unwrap();
    }
    let config = format!("trust_policy = \"{POLICY}\"\nmetrics = \"unix:{METRICS}\"\n");
    next_agents(&mut scenario, &config);
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let (warned, strict) =
        (scenario.reference("trust/scratch:v1"), scenario.reference("trust/strict:v1"));
    for reference in [&warned, &strict] {
        unsigned(&scenario, a, "job", reference);
    }
    scenario.remove(a, "job").unwrap();
    at_once(&scenario, |node| warns(&scenario, node, [&warned, &strict]));
    scenario.end().unwrap();
}

/// Digests of what a checkpoint consists of: its documents' configs, and everything else.
fn parts(node: &Node, repository: &str, digest: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let read = |digest: &str| -> Value {
        let name = format!("{repository}@{digest}");
        let text = node.run(&["crane", "manifest", "--insecure", &name]).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let of = |one: &Value| one["digest"].as_str().unwrap().to_owned();
    let index = read(digest);
    let children = index["manifests"].as_array().unwrap().iter().map(|child| read(&of(child)));
    let (mut configs, mut payload) = (BTreeSet::new(), BTreeSet::new());
    for child in children {
        configs.insert(of(&child["config"]));
        payload.extend(child["layers"].as_array().unwrap().iter().map(of));
    }
    (configs, payload)
}

/// Which blobs of these somebody has fetched, or begun to, since the registry's log had `from` bytes.
fn fetched(scenario: &Scenario, from: usize, blobs: &BTreeSet<String>) -> BTreeSet<String> {
    let log = log(scenario, "registry.log");
    let gets: Vec<&str> = log[from..].lines().filter(|line| line.contains("GET")).collect();
    let is_fetched = |blob: &&String| gets.iter().any(|line| line.contains(&***blob));
    blobs.iter().filter(is_fetched).cloned().collect()
}

#[test]
fn what_a_signature_or_a_fact_refuses_costs_no_payload() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(b, "job", 16, &[]).unwrap();
    let strange = scenario.reference("trust/strange:v1");
    let young = scenario.reference("trust/young:v1");
    let digests = [
        (a, &strange, unsigned(&scenario, b, "job", &strange), "is not signed", "trust/strange"),
        (a, &young, checkpoint(&scenario, b, "job", &young), "older than CRIU", "trust/young"),
    ];
    for (node, reference, digest, reason, repository) in digests {
        let (configs, payload) = parts(b, &scenario.reference(repository), &digest);
        assert!(payload.len() > 3, "{payload:?}");
        let from = log(&scenario, "registry.log").len();
        refused(&scenario, node, reference, &[], reason);
        // Its facts are read, so the log tells what is.
        assert!(!fetched(&scenario, from, &configs).is_empty(), "{reason}");
        assert_eq!(fetched(&scenario, from, &payload), BTreeSet::new(), "{reason}");
        let words = ["stage", reference, "--tier", "ram", "--plain-http"];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert_eq!(fetched(&scenario, from, &payload), BTreeSet::new(), "{reason}: staged");
    }
    // What is let in is fetched, and that is seen.
    let (_, payload) = parts(b, &scenario.reference("trust/young"), &{
        let told = scenario.kyb_json(b, &["inspect", &young, "--plain-http"]).unwrap();
        told["digest"].as_str().unwrap().to_owned()
    });
    let from = log(&scenario, "registry.log").len();
    let output = restore(&scenario, b, &young, "again", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(fetched(&scenario, from, &payload).len() > 2);
    scenario.end().unwrap();
}

/// The agent of a node, which has none yet, refuses a caller without a rule.
fn refuses_by_name(node: &Node) {
    let socket = format!("/srv/share/agent-{}.sock", node.name());
    let asked = |words: &[&str]| {
        let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "kyb"];
        node.output(&[&nobody[..], words, &["--agent-socket", &socket]].concat()).unwrap()
    };
    let write = |more: &str| {
        let text = format!("node = \"{}\"\nsocket = \"{socket}\"\n{more}", node.name());
        fs::write(node.path("/etc/kybernate/agent.toml"), text).unwrap();
    };
    write("");
    let agent = Service::start(&mut node.command(&["kybernate-agent", "serve"])).unwrap();
    let answers = || node.run(&["kyb", "ps", "--json", "--agent-socket", &socket]).is_ok();
    assert!(wait_until(END_LIMIT, answers), "the agent does not answer");
    // Without a rule nobody but root gets as far as the agent.
    let output = asked(&["ps"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("Permission denied"), "{}", said(&output));

    // Rules are read again while it runs.
    write("[[caller]]\nwho = \"uid:65534\"\nmay = [\"read\"]\nnamespaces = [\"default\"]\n");
    let is_let_in = || asked(&["ps", "--json"]).status.success();
    assert!(wait_until(END_LIMIT, is_let_in), "{}", said(&asked(&["ps"])));
    for words in [
        &["suspend", "job"][..],
        &["restore", "10.77.0.1:5000/trust/x:v1", "--plain-http"],
        &["checkpoint", "job", "10.77.0.1:5000/trust/x:v1", "--plain-http", "--unsigned"],
    ] {
        let output = asked(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", said(&output));
        let text = said(&output);
        assert!(text.contains("refused (policy)") && text.contains("uid"), "{words:?}: {text}");
    }
    agent.stop().unwrap();
}

#[test]
fn callers_without_a_rule_are_refused_by_name() {
    let mut scenario = start();
    on_both(&mut scenario, |_, node, agent| {
        agent.kill();
        refuses_by_name(node);
    });
    scenario.end().unwrap();
}

/// Creates a container on a node as a Pod's, which containerd calls so, and returns whether that
/// succeeded and what was said. What the specification says of itself is the same each time.
fn create(scenario: &Scenario, node: &Node, pinned: &str, pod: [&str; 3]) -> (bool, String) {
    let [namespace, name, uid] = pod;
    let namespace = format!("io.kubernetes.pod.namespace={namespace}");
    let name = format!("io.kubernetes.container.name={name}");
    let uid = format!("io.kubernetes.pod.uid={uid}");
    let labels = ["--label", &namespace, "--label", &uid, "--label", &name];
    let wish = format!("restore.kybernate.io/main={pinned}");
    let told = ["io.kubernetes.cri.sandbox-namespace=default", "io.kubernetes.cri.sandbox-uid=0-1"];
    let annotations = [&told[..], &[&wish, FAIL]].concat();
    let program = ["/workload", "run", "--state", "/state", "--mib", "16"];
    let mut command = command_of(node, [pinned, "pod"], &annotations, &labels, &program);
    let output = command.stdin(Stdio::null()).output().unwrap();
    if output.status.success() {
        scenario.wait_for_ticks(node, "pod").unwrap();
        scenario.remove(node, "pod").unwrap();
    } else {
        node.output(&["ctr", "container", "rm", "pod"]).unwrap();
    }
    (output.status.success(), said(&output))
}

#[test]
fn a_pod_is_who_containerd_says_it_is() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("trust/job:v1");
    let digest = checkpoint(&scenario, a, "job", &reference);
    let pinned = format!("{reference}@{digest}");
    at_once(&scenario, |node| {
        make_ready(&scenario, node, &pinned);
        let create = |pod: [&str; 3]| create(&scenario, node, &pinned, pod);
        let (created, text) = create(["default", "other", "0-1"]);
        let reason = "calls the container \"main\", and containerd \"other\"";
        assert!(!created && text.contains(reason), "{text}");
        assert!(text.contains("refused (policy)"), "{text}");
        // Its own word for its namespace is not taken either.
        let (created, text) = create(["stranger", "main", "0-1"]);
        assert!(!created && text.contains("into namespace \"stranger\""), "{text}");
        let (created, text) = create(["default", "main", "0-1"]);
        assert!(created, "{text}");
        // Who was restored before is that Pod, whatever it is called: another one of the same name is
        // not, and its own word for its UID is not taken.
        let (created, text) = create(["default", "main", "0-1"]);
        assert!(!created && text.contains("it was restored before"), "{text}");
        let (created, text) = create(["default", "main", "0-2"]);
        assert!(created, "{text}");
    });
    scenario.end().unwrap();
}

#[test]
fn a_container_that_shares_its_processes_is_refused() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "first", 16, &[]).unwrap();
    let tasks = a.run(&["ctr", "task", "ls"]).unwrap();
    let pid = tasks.lines().find_map(|line| line.strip_prefix("first")).unwrap();
    let pid = pid.split_whitespace().next().unwrap();
    let with = format!("pid:/proc/{pid}/ns/pid");
    scenario.run_workload(a, "second", 16, &["--with-ns", &with]).unwrap();
    let before = scenario.traces(a).unwrap();
    let reference = scenario.reference("trust/second:v1");
    let words = ["checkpoint", "second", &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("shared-pid-namespace"), "{}", said(&output));
    assert_eq!(scenario.traces(a).unwrap(), before, "something is left");
    scenario.wait_for_ticks(a, "second").unwrap();
    scenario.end().unwrap();
}
