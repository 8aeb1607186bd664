//! A cluster, a checkpoint that was taken of one of its pods, and what is asked of others.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kybernate_conformance::cluster::{Cluster, platform};
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::node::containerd::Serves;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::programs::Programs;
use kybernate_conformance::scenario::{Scenario, counter};
use serde_json::{Value, json};

use super::pod::{Wanted, secret};
use super::{WAY, left};
use crate::harness::{at_once, bin, said};
use crate::nodes::Probe;
use crate::workloads::programs;

/// What a pod may take to get where it is wanted, on a machine that compiles meanwhile.
pub(super) const LIMIT: Duration = Duration::from_mins(2);
pub(super) const READY: &str = "--timeout=120s";

/// Has what lies in pods' emptyDirs go along with what is taken: on node b always, on a once.
const EMPTY_DIRS: &str = "[pods]\ncapture_empty_dirs = true\n";

/// containerd's namespace for kubelets.
pub(super) const PODS: &str = "k8s.io";

/// The cluster, and a checkpoint of a pod of node a that is staged on both nodes.
pub(super) struct Story {
    pub(super) scenario: Scenario,
    pub(super) cluster: Cluster,
    /// `host/name:tag@digest`.
    pub(super) pinned: String,
    /// The same source, taken when node a had its emptyDir go along.
    pub(super) with_scratch: String,
    /// What the source said last.
    pub(super) before: Value,
    /// The image of other people's programs.
    pub(super) programs: String,
}

impl Story {
    /// Starts the cluster and a pod on node a, takes its checkpoint, ends it, stages on both nodes.
    pub(super) fn begin() -> Self {
        preflight().unwrap();
        let say = |text: &str| println!("{text}");
        let mut scenario = Scenario::start_for(Serves::Kubelet, &bin(), &say).unwrap();
        drop((scenario.agent_a.take(), scenario.agent_b.take()));
        let config = format!("{}{EMPTY_DIRS}", platform::PODS);
        scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, &config).unwrap());
        scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, &config).unwrap());
        let state = scenario.testbed.state();
        let (cluster, programs) = std::thread::scope(|scope| {
            let pushed = scope.spawn(|| programs::push(&scenario, Programs::All));
            (Cluster::start(&state, &say).unwrap(), pushed.join().unwrap())
        });
        let (pinned, with_scratch, before) = (String::new(), String::new(), Value::Null);
        let mut story = Self { scenario, cluster, pinned, with_scratch, before, programs };
        story.take_source();
        story
    }

    /// Its kubelet asks it how it is all the time, and somebody has a session in it.
    fn take_source(&mut self) {
        let image = self.scenario.image();
        // Nearly always there is a probe in it.
        let slow = ["sh", "-c", "sleep 5; /workload status --state /state"];
        let liveness = json!({
            "exec": { "command": slow }, "periodSeconds": 1, "timeoutSeconds": 20,
        });
        let limits = Wanted { memory: "200Mi", cpu: "600m", ..Wanted::new("source", &image) };
        let source = Wanted { node: WAY[0], liveness, ..limits };
        self.cluster.apply(&[secret("default", "old"), source.pod()]).unwrap();
        self.wait_ready("source");
        self.before = self.wait_for("source", |status| counter(status) > Some(5));
        self.exec("source", &["sh", "-c", "echo left >/scratch/file; echo kept >/dev/shm/note"]);
        self.take_with_scratch();
        let session = self.open_session("source");
        let is_probed = || self.programs_of("source").contains(&"sleep".to_owned());
        assert!(wait_until(LIMIT, is_probed), "nobody asks how it is");
        let began = Instant::now();
        let a = &self.scenario.testbed.a;
        self.pinned = self.take(a, &self.container("source"), "pods/source:v1", &[]);
        println!("checkpoint of a pod's container: {:.1} s", began.elapsed().as_secs_f64());
        // It has not noticed, and nor has whoever was in it.
        let seen = counter(&self.before);
        self.wait_for("source", |status| counter(status) > seen);
        assert!(self.programs_of("source").contains(&"tail".to_owned()));
        let source = self.cluster.get("pod", "source").unwrap();
        assert_eq!(source["status"]["containerStatuses"][0]["restartCount"], 0, "{source}");
        self.delete("default", &["source"]);
        end_session(session);
        for node in [a, &self.scenario.testbed.b] {
            self.stage(node, &self.pinned);
        }
        self.stage(a, &self.with_scratch);
    }

    /// Takes the source as node a's policy says, and has an agent without it from here on.
    fn take_with_scratch(&mut self) {
        let a = &self.scenario.testbed.a;
        self.with_scratch = self.take(a, &self.container("source"), "pods/scratch:v1", &[]);
        drop(self.scenario.agent_a.take());
        let a = &self.scenario.testbed.a;
        self.scenario.agent_a = Some(self.scenario.start_agent(a, platform::PODS).unwrap());
    }

    /// Begins `kubectl exec`, and waits until the preflight says what becomes of it.
    fn open_session(&self, name: &str) -> Child {
        let mut session = self.cluster.command(&["exec", name, "--", "tail", "-f", "/secret/word"]);
        let session = session.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let (a, id) = (&self.scenario.testbed.a, self.container(name));
        let mut told = String::new();
        let warned = wait_until(LIMIT, || {
            let words = ["preflight", &id, "--namespace", PODS];
            let output = self.scenario.kyb(a, &words).unwrap();
            told = said(&output);
            output.status.success()
                && told.contains("warn exec-session")
                && self.programs_of(name).contains(&"tail".to_owned())
        });
        assert!(warned, "{told}");
        session
    }

    pub(super) fn end(self) {
        for (name, mib) in self.cluster.memory().unwrap() {
            println!("{name}: {mib} MiB");
        }
        at_once(&self.scenario, |node| left::nothing_is(&self, node));
        let probe = Probe::new(&self.scenario.testbed.state());
        self.scenario.end().unwrap();
        assert_eq!(probe.traces(), BTreeSet::new());
    }

    /// Takes a checkpoint of a container, and returns `host/name:tag@digest`.
    pub(super) fn take(&self, node: &Node, id: &str, path: &str, more: &[&str]) -> String {
        let (reference, key) = (self.scenario.reference(path), format!("node-{}", node.name()));
        let words = ["checkpoint", id, &reference, "--plain-http", "--namespace", PODS];
        // Sixteen guests are taken side by side, and some are large.
        let signed = ["--sign-key", &key, "--pause-deadline", "5m"];
        let words = [&words[..], &signed, more].concat();
        let taken = self.scenario.kyb_json(node, &words).unwrap();
        format!("{reference}@{}", taken["digest"].as_str().unwrap())
    }

    pub(super) fn stage(&self, node: &Node, pinned: &str) {
        let words = ["stage", pinned, "--tier", "ram", "--plain-http"];
        let output = self.scenario.kyb(node, &words).unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }

    pub(super) fn apply(&self, pods: &[Wanted<'_>]) {
        let pods: Vec<Value> = pods.iter().map(Wanted::pod).collect();
        self.cluster.apply(&pods).unwrap();
    }

    /// Has pods deleted, and does not wait for it.
    pub(super) fn delete(&self, namespace: &str, names: &[&str]) {
        let words = ["delete", "pod", "--wait=false", "-n", namespace];
        self.cluster.kubectl(&[&words[..], names].concat()).unwrap();
    }

    pub(super) fn wait_ready(&self, name: &str) {
        let words = ["wait", "--for=condition=Ready", READY, "pod", name];
        let output = self.cluster.output(&words).unwrap();
        assert!(output.status.success(), "{}\n{}", said(&output), self.describe("default", name));
    }

    pub(super) fn describe(&self, namespace: &str, name: &str) -> String {
        said(&self.cluster.output(&["describe", "pod", "-n", namespace, name]).unwrap())
    }

    /// Waits until `kubectl describe` tells all of this about a pod, and returns what it tells.
    pub(super) fn wait_told(&self, namespace: &str, name: &str, wanted: &[&str]) -> String {
        let mut told = String::new();
        let is_told = wait_until(LIMIT, || {
            told = self.describe(namespace, name);
            wanted.iter().all(|words| told.contains(words))
        });
        assert!(is_told, "{wanted:?}: {told}");
        told
    }

    /// Runs a program in a pod of the default namespace.
    pub(super) fn exec(&self, name: &str, words: &[&str]) -> String {
        self.cluster.kubectl(&[&["exec", name, "--"], words].concat()).unwrap()
    }

    /// Returns the names of the programs that run in a pod's container.
    pub(super) fn programs_of(&self, name: &str) -> Vec<String> {
        // Probes come and go: one that has gone since it was listed is no failure.
        let found = self.exec(name, &["sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null; true"]);
        found.lines().map(str::to_owned).collect()
    }

    pub(super) fn wait_for(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
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

    /// A pod counts on from where `before` was said, is the same process, and has lost nothing.
    pub(super) fn goes_on(&self, name: &str, before: &Value) -> Value {
        self.wait_ready(name);
        let first = self.wait_for(name, |status| counter(status) > counter(before));
        let after = self.wait_for(name, |status| counter(status) > counter(&first));
        assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"], "{name}");
        for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
            assert_eq!(after[fact], true, "{name}: {after}");
        }
        after
    }

    /// A pod's container is another process than the source was.
    pub(super) fn is_fresh(&self, name: &str) {
        self.wait_ready(name);
        let fresh = self.wait_for(name, |status| counter(status) > Some(1));
        assert_ne!(fresh["boot_id_of_process"], self.before["boot_id_of_process"], "{name}");
    }

    /// Waits until a pod's container was started again.
    pub(super) fn wait_restarted(&self, name: &str) {
        let restarts = || {
            let pod = self.cluster.get("pod", name).unwrap();
            pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)
        };
        assert!(wait_until(LIMIT, restarts), "{}", self.describe("default", name));
    }

    /// Ends a container of a pod as a fault of its own would.
    pub(super) fn kill(&self, name: &str) {
        let script = "kill -9 $(ctr -n k8s.io task ls | awk -v id=\"$1\" '$1 == id { print $2 }')";
        let pod = self.cluster.get("pod", name).unwrap();
        let node = self.scenario.node(pod["spec"]["nodeName"].as_str().unwrap());
        node.run(&["sh", "-c", script, "sh", &container_of(&pod)]).unwrap();
    }

    /// Returns containerd's id of a pod's container.
    pub(super) fn container(&self, name: &str) -> String {
        let pod = self.cluster.get("pod", name).unwrap();
        container_of(&pod)
    }
}

/// Returns containerd's id of a pod's container.
pub(super) fn container_of(pod: &Value) -> String {
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str();
    id.and_then(|id| id.strip_prefix("containerd://")).unwrap().to_owned()
}

/// The pod is gone, so it ends by itself.
fn end_session(mut session: Child) {
    let ended = wait_until(LIMIT, || session.try_wait().unwrap().is_some());
    assert!(ended, "kubectl exec goes on");
}
