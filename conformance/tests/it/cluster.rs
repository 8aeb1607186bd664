//! Pods that kubelets restore: a real cluster on the two nodes, one for all that is looked at here.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kybernate_conformance::cluster::{Cluster, platform};
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::node::containerd::Serves;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::scenario::{Scenario, counter};
use serde_json::{Value, json};

use crate::harness::{bin, said};
use crate::nodes::Probe;

/// What a pod may take to get where it is wanted, on a machine that compiles meanwhile.
const LIMIT: Duration = Duration::from_mins(2);
const READY: &str = "--timeout=120s";

/// The cluster, and a checkpoint of a pod of node a that is staged on node b.
struct Story {
    scenario: Scenario,
    cluster: Cluster,
    /// `host/name:tag@digest`.
    pinned: String,
    /// What the source said last.
    before: Value,
}

/// A pod in words.
#[derive(Clone, Copy, Debug)]
struct Wanted<'a> {
    name: &'a str,
    namespace: &'a str,
    node: &'a str,
    image: &'a str,
    annotations: &'a [(&'a str, &'a str)],
    memory: &'a str,
    probe: bool,
}

impl Wanted<'_> {
    fn pod(&self) -> Value {
        let annotations: serde_json::Map<String, Value> =
            self.annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let probe = json!({
            "exec": { "command": ["/workload", "status", "--state", "/state"] },
            "periodSeconds": 1,
            "timeoutSeconds": 5,
        });
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name, "namespace": self.namespace, "annotations": annotations,
            },
            "spec": {
                "runtimeClassName": "kybernate",
                "nodeSelector": { "kubernetes.io/hostname": self.node },
                "terminationGracePeriodSeconds": 1,
                "dnsPolicy": "Default",
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "args": ["--mib", "24", "--say", "ticks"],
                    "resources": { "limits": { "memory": self.memory, "cpu": "500m" } },
                    "readinessProbe": if self.probe { probe } else { Value::Null },
                    "volumeMounts": [
                        { "name": "secret", "mountPath": "/secret" },
                        { "name": "scratch", "mountPath": "/scratch" },
                    ],
                }],
                "volumes": [
                    { "name": "secret", "secret": { "secretName": "words" } },
                    { "name": "scratch", "emptyDir": {} },
                ],
            },
        })
    }
}

fn secret(namespace: &str, word: &str) -> Value {
    let metadata = json!({ "name": "words", "namespace": namespace });
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": { "word": word },
    })
}

impl Story {
    /// Starts the cluster and a pod on node a, takes its checkpoint, ends it, stages on b.
    fn begin() -> Self {
        preflight().unwrap();
        let say = |text: &str| println!("{text}");
        let mut scenario = Scenario::start_for(Serves::Kubelet, &bin(), &say).unwrap();
        let b = scenario.agent_b.take();
        drop(b);
        let agent = scenario.start_agent(&scenario.testbed.b, platform::PODS).unwrap();
        scenario.agent_b = Some(agent);
        let cluster = Cluster::start(&scenario.testbed.state(), &say).unwrap();
        let mut story = Self { scenario, cluster, pinned: String::new(), before: Value::Null };
        story.take();
        story
    }

    fn take(&mut self) {
        let (a, b) = (&self.scenario.testbed.a, &self.scenario.testbed.b);
        let image = self.scenario.image();
        let source = Wanted {
            name: "source",
            namespace: "default",
            node: "a",
            image: &image,
            annotations: &[],
            memory: "200Mi",
            probe: false,
        };
        self.cluster.apply(&[secret("default", "old"), source.pod()]).unwrap();
        self.wait_ready("source");
        self.before = self.wait_for(|status| counter(status) > Some(5), "source");
        let began = Instant::now();
        let id = self.container("source");
        let reference = self.scenario.reference("pods/source:v1");
        let words = ["checkpoint", &id, &reference, "--plain-http", "--namespace", "k8s.io"];
        let taken = self.scenario.kyb_json(a, &[&words[..], &["--sign-key", "node-a"]].concat());
        let digest = taken.unwrap()["digest"].as_str().unwrap().to_owned();
        println!("checkpoint of a pod's container: {:.1} s", began.elapsed().as_secs_f64());
        // It has not noticed.
        let seen = counter(&self.before);
        self.wait_for(|status| counter(status) > seen, "source");
        self.cluster.kubectl(&["delete", "pod", "source", "--wait", "--timeout=60s"]).unwrap();
        self.pinned = format!("{reference}@{digest}");
        let output = self
            .scenario
            .kyb(b, &["stage", &self.pinned, "--tier", "ram", "--plain-http"])
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }

    fn end(self) {
        for (name, mib) in self.cluster.memory().unwrap() {
            println!("{name}: {mib} MiB");
        }
        let probe = Probe::new(&self.scenario.testbed.state());
        self.scenario.end().unwrap();
        assert_eq!(probe.traces(), BTreeSet::new());
    }

    fn wait_ready(&self, name: &str) {
        let words = ["wait", "--for=condition=Ready", READY, "pod", name];
        let output = self.cluster.output(&words).unwrap();
        assert!(output.status.success(), "{}\n{}", said(&output), self.describe("default", name));
    }

    fn describe(&self, namespace: &str, name: &str) -> String {
        said(&self.cluster.output(&["describe", "pod", "-n", namespace, name]).unwrap())
    }

    /// Runs a program in a pod of the default namespace.
    fn exec(&self, name: &str, words: &[&str]) -> String {
        self.cluster.kubectl(&[&["exec", name, "--"], words].concat()).unwrap()
    }

    fn wait_for(&self, wanted: impl Fn(&Value) -> bool, name: &str) -> Value {
        let mut last = Value::Null;
        let words = ["exec", name, "--", "/workload", "status", "--state", "/state"];
        let held = wait_until(LIMIT, || {
            let output = self.cluster.output(&words).unwrap();
            last = serde_json::from_slice(&output.stdout).unwrap_or_default();
            output.status.success() && wanted(&last)
        });
        assert!(held, "{name}: {last}\n{}", self.describe("default", name));
        last
    }

    /// Returns containerd's id of a pod's container.
    fn container(&self, name: &str) -> String {
        let pod = self.cluster.get("pod", name).unwrap();
        let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
        id.strip_prefix("containerd://").unwrap().to_owned()
    }

    fn restored<'a>(&'a self, name: &'a str, annotations: &'a [(&'a str, &'a str)]) -> Wanted<'a> {
        Wanted {
            name,
            namespace: "default",
            node: "b",
            image: &self.pinned,
            annotations,
            memory: "256Mi",
            probe: true,
        }
    }
}

/// Returns what limits a container's memory.
fn memory_limit(node: &Node, id: &str) -> String {
    let script = r#"cat $(find /sys/fs/cgroup -path "*$1/memory.limit_in_bytes" \
                    -o -path "*$1/memory.max")"#;
    node.run(&["sh", "-c", script, "sh", id]).unwrap().trim().to_owned()
}

/// The process of the source, in a pod of another node: everything around it is the new pod's.
fn it_goes_on(story: &Story) {
    let wish = [("restore.kybernate.io/main", &*story.pinned)];
    let began = Instant::now();
    let wanted = story.restored("restored", &wish);
    story.cluster.apply(&[secret("default", "new"), wanted.pod()]).unwrap();
    story.wait_ready("restored");
    println!("pod restored and ready: {:.1} s", began.elapsed().as_secs_f64());
    let first = story.wait_for(|status| counter(status) > counter(&story.before), "restored");
    let after = story.wait_for(|status| counter(status) > counter(&first), "restored");
    assert_eq!(after["boot_id_of_process"], story.before["boot_id_of_process"]);
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }

    let pod = story.cluster.get("pod", "restored").unwrap();
    assert_eq!(pod["spec"]["nodeName"], "b");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod}");
    let address = pod["status"]["podIP"].as_str().unwrap();
    assert!(address.starts_with("10.78.2."), "{address}");
    let seen = story.exec("restored", &["busybox", "ip", "-o", "-4", "address"]);
    assert!(seen.contains(address), "{address}: {seen}");
    assert_eq!(story.exec("restored", &["cat", "/secret/word"]), "new");
    story.exec("restored", &["sh", "-c", "echo here >/scratch/file"]);
    let id = story.container("restored");
    assert_eq!(memory_limit(&story.scenario.testbed.b, &id), (256 << 20).to_string());

    // Its standard output is the new container's: it begins where the old one ended.
    let log = story.cluster.kubectl(&["logs", "restored"]).unwrap();
    let lines: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert!(lines.windows(2).all(|two| two[1] == two[0] + 1), "{log}");
    assert!(lines.first() > counter(&story.before).as_ref(), "{log}");
}

/// A container that ends is started afresh by its kubelet, not from the checkpoint again.
fn it_starts_afresh_after_its_end(story: &Story) {
    let b = &story.scenario.testbed.b;
    let script = "kill -9 $(ctr -n k8s.io task ls | awk -v id=\"$1\" '$1 == id { print $2 }')";
    b.run(&["sh", "-c", script, "sh", &story.container("restored")]).unwrap();
    let restarts = || {
        let pod = story.cluster.get("pod", "restored").unwrap();
        pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)
    };
    assert!(wait_until(LIMIT, restarts), "{}", story.describe("default", "restored"));
    story.wait_ready("restored");
    let fresh = story.wait_for(|status| counter(status) > Some(1), "restored");
    assert_ne!(fresh["boot_id_of_process"], story.before["boot_id_of_process"]);
    story.cluster.kubectl(&["delete", "pod", "restored", "--timeout=60s"]).unwrap();
}

/// What a rule refuses is no crash without a word: the reason is where people look for it.
fn a_refusal_is_told(story: &Story) {
    let namespace =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "other" } });
    story.cluster.apply(&[namespace, secret("other", "new")]).unwrap();
    let account = ["wait", "--for=create", READY, "-n", "other", "serviceaccount/default"];
    story.cluster.kubectl(&account).unwrap();
    let wish = [("restore.kybernate.io/main", &*story.pinned)];
    let wanted = Wanted { namespace: "other", ..story.restored("refused", &wish) };
    story.cluster.apply(&[wanted.pod()]).unwrap();
    let mut told = String::new();
    let refused = || {
        told = story.describe("other", "refused");
        told.contains("kybernate-runc: failed to restore from") && told.contains("refused (")
    };
    assert!(wait_until(LIMIT, refused), "{told}");
    assert!(told.contains("taken in namespace \"default\", into namespace \"other\""), "{told}");
    story.cluster.kubectl(&["delete", "pod", "-n", "other", "refused", "--timeout=60s"]).unwrap();
}

/// A pod that says so starts without the checkpoint that is not there.
fn a_pod_starts_cold_when_it_says_so(story: &Story) {
    let (name, _) = story.pinned.split_once('@').unwrap();
    let none = format!("{name}@sha256:{}", "0".repeat(64));
    let wishes = [("restore.kybernate.io/main", &*none), ("on-failure.kybernate.io/main", "cold")];
    let wanted = story.restored("cold", &wishes);
    story.cluster.apply(&[wanted.pod()]).unwrap();
    story.wait_ready("cold");
    let fresh = story.wait_for(|status| counter(status) > Some(1), "cold");
    assert_ne!(fresh["boot_id_of_process"], story.before["boot_id_of_process"]);
    story.cluster.kubectl(&["delete", "pod", "cold", "--timeout=60s"]).unwrap();
}

#[test]
fn pods_go_on_under_kubelets() {
    if let Err(missing) = Cluster::look() {
        println!("SKIPPED: {missing}");
        return;
    }
    let story = Story::begin();
    it_goes_on(&story);
    it_starts_afresh_after_its_end(&story);
    a_refusal_is_told(&story);
    a_pod_starts_cold_when_it_says_so(&story);
    story.end();
}
