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

pub(crate) const METRICS: &str = "/run/kybernate/metrics.sock";
pub(crate) const POLICY: &str = "/etc/kybernate/trust.toml";
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

/// A rule for a repository that only warns, and one for another that does not look.
const RULES: &str = r#"
[[rule]]
name = "scratch"
repositories = ["10.77.0.1:5000/trust/scratch"]
mode = "warn"
keys = ["/srv/share/node-b.pub"]
[[rule]]
name = "lab"
repositories = ["10.77.0.1:5000/trust/lab"]
mode = "off"
"#;

/// Returns the line of a node's agent that has these words.
fn logged(scenario: &Scenario, node: &Node, words: &str) -> Option<String> {
    let log = log(scenario, &format!("agent-{}.log", node.name()));
    log.lines().find(|line| line.contains(words)).map(str::to_owned)
}

/// A refusal is in the log of a node's agent, and was counted once for each of these kinds of operations.
pub(crate) fn are_told(scenario: &Scenario, node: &Node, reason: &str, kinds: &[&str]) {
    let figure = |kind: &&str| format!(r#"refusals_total{{kind="{kind}",reason="{reason}"}}"#);
    let figures: Vec<_> = kinds.iter().map(figure).collect();
    are_counted(node, &figures.iter().map(String::as_str).collect::<Vec<_>>());
    let typed = format!("operation.state=Refused operation.refused_by=\"{reason}\"");
    assert!(logged(scenario, node, &typed).is_some(), "{typed} is not in the log");
}

/// Whether each of these was counted once.
pub(crate) fn are_counted(node: &Node, figures: &[&str]) {
    let page = ["curl", "-s", "--unix-socket", METRICS, "http://x/metrics"];
    let page = node.run(&page).unwrap();
    for figure in figures {
        let line = format!("kybernate_agent_{figure} 1");
        assert!(page.lines().any(|one| one == line), "{line}: {page}");
    }
}

#[test]
fn what_a_rule_lets_in_unsigned_is_said_and_counted() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        fs::write(node.path(POLICY), RULES).unwrap();
        let config = format!("trust_policy = \"{POLICY}\"\nmetrics = \"unix:{METRICS}\"\n");
        let _agent = scenario.start_agent(node, &config).unwrap();
        // More than a container has that nobody asked anything for.
        scenario.run_workload(node, "job", 16, &["--cap-add", "CAP_SYS_PTRACE"]).unwrap();
        let references = ["scratch", "lab", "strict"]
            .map(|name| scenario.reference(&format!("trust/{name}:{}", node.name())));
        for reference in &references {
            unsigned(scenario, node, "job", reference);
        }
        let [warned, unseen, strict] = references;
        let allow = ["--allow-cap", "CAP_SYS_PTRACE"];
        refused(scenario, node, &strict, &allow, "is not signed");
        let (tolerated, ignored) =
            ("not trusted, but the rule only warns", "the rule does not look at signatures");
        for words in [tolerated, ignored] {
            assert_eq!(logged(scenario, node, words), None);
        }
        for (reference, words, told) in [
            (&warned, tolerated, &["WARN", "scratch", "not-signed"][..]),
            (&unseen, ignored, &["WARN", "lab"]),
        ] {
            let output = restore(scenario, node, reference, "again", &allow);
            assert!(output.status.success(), "{}", said(&output));
            scenario.wait_for_ticks(node, "again").unwrap();
            scenario.remove(node, "again").unwrap();
            let line = logged(scenario, node, words).unwrap();
            assert!(told.iter().all(|word| line.contains(word)), "{line}");
        }
        let line = logged(scenario, node, "operation.state=Refused").unwrap();
        assert!(line.contains(&strict) && line.contains("is not signed"), "{line}");
        are_counted(
            node,
            &[
                r#"trust_decisions_total{kind="restore",outcome="refused",reason="not-signed"}"#,
                r#"trust_decisions_total{kind="restore",outcome="tolerated",reason="not-signed"}"#,
                r#"trust_decisions_total{kind="restore",outcome="not-looked",reason=""}"#,
                r#"refusals_total{kind="restore",reason="signature"}"#,
            ],
        );
        are_refused(scenario, node, &unseen);
    });
    scenario.end().unwrap();
}

/// Has the gate refuse a checkpoint, and the look before one another: each is counted by its reason.
fn are_refused(scenario: &Scenario, node: &Node, reference: &str) {
    refused(scenario, node, reference, &[], "CAP_SYS_PTRACE");
    let busybox = "nsenter -t $(ctr task ls | awk '$1 == \"job\" { print $2 }') -m \
        busybox mount --bind /proc/sys /tmp";
    node.run(&["sh", "-c", busybox]).unwrap();
    let reference = scenario.reference(&format!("trust/mounted:{}", node.name()));
    let words = ["checkpoint", "job", &reference, "--plain-http", "--unsigned"];
    let output = scenario.kyb(node, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    are_told(scenario, node, "identity", &["restore"]);
    are_counted(node, &[r#"refusals_total{kind="checkpoint",reason="mount"}"#]);
    let line = logged(scenario, node, "a checkpoint is refused").unwrap();
    assert!(line.contains("check=\"mount\""), "{line}");
}

/// Digests of what a checkpoint consists of: its documents' configs, and everything else.
pub(crate) fn parts(
    node: &Node,
    repository: &str,
    digest: &str,
) -> (BTreeSet<String>, BTreeSet<String>) {
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

/// Stands in for node b's CRIU, and says that it is as old as node a's.
const CRIU: &str = "#!/bin/sh\n[ \"$1\" = --version ] && exec echo Version: 4.1\n\
                    exec /usr/sbin/criu.real \"$@\"\n";

/// Notes whenever CRIU is told to take or to restore something.
const NOTES: &str = "#!/bin/sh\n[ \"$1\" = swrk ] && echo \"$@\" >>/run/criu-ran\n\
                     exec /usr/sbin/criu.real \"$@\"\n";
const NOTED: &str = "/run/criu-ran";

/// Has a script stand in for a node's CRIU.
pub(crate) fn replace_criu(node: &Node, script: &str) {
    node.run(&["mv", "/usr/sbin/criu", "/usr/sbin/criu.real"]).unwrap();
    fs::write(node.path("/usr/sbin/criu"), script).unwrap();
    node.run(&["chmod", "755", "/usr/sbin/criu"]).unwrap();
}

/// Has a node refuse a checkpoint of node b's for `reason`, and looks at what was fetched for that.
pub(crate) fn costs_no_payload(
    scenario: &Scenario,
    node: &Node,
    path: &str,
    digest: &str,
    reason: &str,
) {
    let repository = scenario.reference(path);
    let (configs, payload) = parts(&scenario.testbed.b, &repository, digest);
    assert!(payload.len() > 3, "{payload:?}");
    let from = log(scenario, "registry.log").len();
    let reference = format!("{repository}:v1");
    refused(scenario, node, &reference, &[], reason);
    // Its facts are read, so the log tells what is.
    assert!(!fetched(scenario, from, &configs).is_empty(), "{reason}");
    assert_eq!(fetched(scenario, from, &payload), BTreeSet::new(), "{reason}");
    let words = ["stage", &reference, "--tier", "ram", "--plain-http"];
    let output = scenario.kyb(node, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert_eq!(fetched(scenario, from, &payload), BTreeSet::new(), "{reason}: staged");
}

#[test]
fn what_a_signature_or_a_fact_refuses_costs_no_payload() {
    const STRANGE: &str = "trust/strange";
    const YOUNG: &str = "trust/young";
    let mut scenario = start();
    let b = &scenario.testbed.b;
    scenario.run_workload(b, "job", 16, &[]).unwrap();
    let (strange, young) = (format!("{STRANGE}:v1"), scenario.reference(&format!("{YOUNG}:v1")));
    let strange = unsigned(&scenario, b, "job", &scenario.reference(&strange));
    let digest = checkpoint(&scenario, b, "job", &young);
    for node in nodes(&scenario) {
        costs_no_payload(&scenario, node, STRANGE, &strange, "is not signed");
    }
    costs_no_payload(&scenario, &scenario.testbed.a, YOUNG, &digest, "older than CRIU");
    // What is let in is fetched, and that is seen.
    let (_, payload) = parts(b, &scenario.reference(YOUNG), &digest);
    let from = log(&scenario, "registry.log").len();
    let output = restore(&scenario, b, &young, "again", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(fetched(&scenario, from, &payload).len() > 2);

    replace_criu(b, CRIU);
    // The agent believes what it saw for a minute.
    scenario.next_agent("b", &format!("metrics = \"unix:{METRICS}\"\n")).unwrap();
    costs_no_payload(&scenario, &scenario.testbed.b, YOUNG, &digest, "older than CRIU");
    are_told(&scenario, &scenario.testbed.b, "compatibility", &["restore", "stage"]);
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
    next_agents(&mut scenario, &format!("metrics = \"unix:{METRICS}\"\n{CONFIG}"));
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("trust/job:v1");
    let digest = checkpoint(&scenario, a, "job", &reference);
    let pinned = format!("{reference}@{digest}");
    let (_, payload) = parts(&scenario.testbed.b, &scenario.reference("trust/job"), &digest);
    // It is trusted and in the registry, but nobody pulls it for a Pod. containerd does its image.
    let pull = ["ctr", "image", "pull", "--plain-http", &pinned];
    at_once(&scenario, |node| drop(node.run(&pull).unwrap()));
    let from = log(&scenario, "registry.log").len();
    at_once(&scenario, |node| {
        let (created, text) = create(&scenario, node, &pinned, ["default", "main", "0-1"]);
        assert!(!created && text.contains("is not staged on this node"), "{text}");
    });
    assert_eq!(fetched(&scenario, from, &payload), BTreeSet::new(), "somebody pulls");
    at_once(&scenario, |node| make_ready(&scenario, node, &pinned));
    assert!(!fetched(&scenario, from, &payload).is_empty(), "nobody stages");
    let from = log(&scenario, "registry.log").len();
    at_once(&scenario, |node| {
        replace_criu(node, NOTES);
        let create = |pod: [&str; 3]| create(&scenario, node, &pinned, pod);
        let (created, text) = create(["default", "other", "0-1"]);
        let reason = "calls the container \"main\", and containerd \"other\"";
        assert!(!created && text.contains(reason), "{text}");
        assert!(text.contains("refused (policy)"), "{text}");
        are_told(&scenario, node, "policy", &["restore"]);
        // Its own word for its namespace is not taken either.
        let (created, text) = create(["stranger", "main", "0-1"]);
        assert!(!created && text.contains("into namespace \"stranger\""), "{text}");
        assert!(!node.path(NOTED).exists(), "CRIU ran for a refused one");
        let (created, text) = create(["default", "main", "0-1"]);
        assert!(created && node.path(NOTED).exists(), "{text}");
        // Who was restored before is that Pod, whatever it is called: another one of the same name is
        // not, and its own word for its UID is not taken.
        let (created, text) = create(["default", "main", "0-1"]);
        assert!(!created && text.contains("it was restored before"), "{text}");
        let (created, text) = create(["default", "main", "0-2"]);
        assert!(created, "{text}");
    });
    // What is staged is all that a restore needs.
    assert_eq!(fetched(&scenario, from, &payload), BTreeSet::new(), "somebody pulls");
    scenario.end().unwrap();
}

#[test]
fn a_container_that_shares_its_processes_is_refused() {
    let scenario = start();
    at_once(&scenario, |node| {
        scenario.run_workload(node, "first", 16, &[]).unwrap();
        let tasks = node.run(&["ctr", "task", "ls"]).unwrap();
        let pid = tasks.lines().find_map(|line| line.strip_prefix("first")).unwrap();
        let pid = pid.split_whitespace().next().unwrap();
        let with = format!("pid:/proc/{pid}/ns/pid");
        scenario.run_workload(node, "second", 16, &["--with-ns", &with]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("trust/second:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "second", &reference, "--plain-http", "--sign-key", &key];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("shared-pid-namespace"), "{}", said(&output));
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        scenario.wait_for_ticks(node, "second").unwrap();
    });
    scenario.end().unwrap();
}
