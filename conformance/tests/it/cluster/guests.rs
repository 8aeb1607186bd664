//! The table's workloads in pods: all of them at once, from node to node, with the same proofs as
//! without Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Instant;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use serde_json::{Map, Value, json};

use self::heap::Sums;
use super::story::{LIMIT, PODS, READY, Story, container_of};
use crate::harness::said;
use crate::workloads::Place;
use crate::workloads::client::{Line, Load, inside};
use crate::workloads::own::{self, may_ask_others};
use crate::workloads::programs::{self, NO_IO_URING, commits};
use crate::workloads::proof::{Identity, Status, goes_on as counts_on};
use crate::workloads::servers::{
    Heard, LISTENER, LISTENER_PORT, NGINX, NGINX_PORT, REDIS, REDIS_PORT, held, processes,
    requests, write,
};

mod heap;

/// A pod of one container that runs one of the table's workloads.
#[derive(Clone, Copy, Debug)]
struct Guest {
    /// Of the workload.
    id: &'static str,
    /// The lines of the table that it is a proof for.
    rows: &'static [&'static str],
    /// Where it is taken. It is restored on b.
    from: &'static str,
    /// What its processes may be.
    rights: Rights,
    kind: Kind,
}

/// How it is seen that it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Our own program, or one of other people's, that counts and says what is wrong.
    Counter,
    /// One that has an open transaction as well.
    Database,
    /// Clients have their writes.
    Redis,
    /// The count of requests goes on.
    Nginx,
    /// Its count of lines goes on.
    Listener,
    /// The sums over its memory go on.
    Heap,
}

/// What a pod's security context says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rights {
    /// Nothing.
    Usual,
    /// A seccomp profile of the node's, which forbids `io_uring`: containerd 1.7's own lets it through.
    Seccomp,
    /// As little as can be: no capabilities, no new privileges, nothing of the root can be written.
    Least,
    /// It is not root.
    User,
}

/// Where a kubelet has seccomp profiles, and the one for [`Rights::Seccomp`].
const PROFILES: &str = "/var/lib/kubelet/seccomp";
const PROFILE: &str = "no-io-uring.json";

/// Where [`Rights::Least`] can write.
const SHARED_MEMORY: &str = "/dev/shm/state";
/// A volume of the pod in the node's memory, and a guest that has everything there.
const IN_MEMORY: &[&str] = &["/workload", "keep", "--state", "/ram/state"];
const IN_SHARED_MEMORY: &[&str] = &["/workload", "keep", "--state", SHARED_MEMORY];

const fn guest(id: &'static str, rows: &'static [&'static str], rights: Rights) -> Guest {
    Guest { id, rows, from: "a", rights, kind: Kind::Counter }
}

const GUESTS: &[Guest] = &[
    guest("linux", &["linux"], Rights::Usual),
    guest("links", &["links"], Rights::Usual),
    guest("threads", &["threads"], Rights::Usual),
    guest("bind", &["bind"], Rights::Usual),
    Guest { kind: Kind::Heap, ..guest("heap", &["heap"], Rights::Usual) },
    guest("least", &["tmpfs", "read-only", "capabilities", "seccomp"], Rights::Least),
    guest("memory", &["tmpfs"], Rights::Usual),
    guest("user", &["user"], Rights::User),
    guest("python", &["python"], Rights::Usual),
    guest("node", &["node"], Rights::Seccomp),
    guest("java", &["java"], Rights::Usual),
    Guest { kind: Kind::Database, ..guest("sqlite", &["sqlite"], Rights::Usual) },
    guest("files", &["files"], Rights::Usual),
    Guest { from: "b", kind: Kind::Redis, ..guest("redis", &["redis"], Rights::Usual) },
    Guest { from: "b", kind: Kind::Nginx, ..guest("nginx", &["nginx"], Rights::Usual) },
    Guest { from: "b", kind: Kind::Listener, ..guest("listener", &["listener"], Rights::Usual) },
];

/// Returns what the table says of a workload through pods.
pub(crate) fn through_a_pod(id: &str) -> &'static str {
    match GUESTS.iter().find(|guest| guest.rows.contains(&id)) {
        None => "",
        Some(_) if id == "tmpfs" => "a, b: `/dev/shm`, an emptyDir in memory (`--capture-mount`)",
        // The table is one for all machines, and none that ran this let CRIU ask.
        Some(guest) if guest.rights == Rights::User => {
            "refused where containerd lacks CAP_SYS_RESOURCE (`other-user`); elsewhere without a kubelet"
        }
        Some(guest) if guest.from == "a" => "a, b",
        Some(_) => "b, b",
    }
}

impl Guest {
    /// Returns what runs, and where it says how it is.
    fn command(&self) -> (Vec<String>, &'static str) {
        let (words, state) = match self.kind {
            Kind::Redis => (REDIS.command, ""),
            Kind::Nginx => (NGINX.command, ""),
            Kind::Listener => (LISTENER.command, ""),
            Kind::Heap => (heap::COMMAND, ""),
            Kind::Counter | Kind::Database if self.rights == Rights::Least => {
                (IN_SHARED_MEMORY, "/dev/shm/state/keep")
            }
            Kind::Counter | Kind::Database if self.id == "memory" => (IN_MEMORY, "/ram/state/keep"),
            Kind::Counter | Kind::Database => {
                let mut all = own::WORKLOADS.iter().chain(programs::WORKLOADS);
                let workload = all.find(|workload| self.rows.contains(&workload.id)).unwrap();
                (workload.command, workload.state)
            }
        };
        // A kubelet asks servers from outside.
        (words.iter().map(|word| word.replace("127.0.0.1", "0.0.0.0")).collect(), state)
    }

    /// Whether it is a container of our own image.
    fn is_own(&self) -> bool {
        self.kind == Kind::Heap
            || own::WORKLOADS.iter().any(|workload| self.rows.contains(&workload.id))
    }

    /// Returns what is mounted from the node, and where.
    fn volumes(&self) -> [Value; 2] {
        if self.id == "memory" {
            let volume = json!({ "name": "ram", "emptyDir": { "medium": "Memory" } });
            return [json!([volume]), json!([{ "name": "ram", "mountPath": "/ram" }])];
        }
        if self.id != "bind" {
            return [json!([]), json!([])];
        }
        let host = json!({ "path": "/srv/share/bound", "type": "DirectoryOrCreate" });
        let mount = json!([{ "name": "bound", "mountPath": "/bound" }]);
        [json!([{ "name": "bound", "hostPath": host }]), mount]
    }

    fn security(&self) -> Value {
        match self.rights {
            Rights::Usual => json!({}),
            Rights::Seccomp => json!({
                "seccompProfile": { "type": "Localhost", "localhostProfile": PROFILE },
            }),
            Rights::Least => json!({
                "seccompProfile": { "type": "RuntimeDefault" },
                "readOnlyRootFilesystem": true,
                "allowPrivilegeEscalation": false,
                "capabilities": { "drop": ["ALL"] },
            }),
            Rights::User => json!({ "runAsUser": 1000, "runAsGroup": 1000 }),
        }
    }

    /// A kubelet asks servers whether they are alive: by TCP, or by HTTP.
    fn probe(&self) -> Value {
        let mut probe = match self.kind {
            Kind::Redis => json!({ "tcpSocket": { "port": REDIS_PORT } }),
            Kind::Nginx => json!({ "httpGet": { "path": "/", "port": NGINX_PORT } }),
            Kind::Listener => json!({ "tcpSocket": { "port": LISTENER_PORT } }),
            Kind::Counter | Kind::Database | Kind::Heap => return Value::Null,
        };
        probe["periodSeconds"] = json!(1);
        probe["timeoutSeconds"] = json!(20);
        probe
    }

    fn pod(&self, generation: &str, node: &str, image: &str, restored: bool) -> Value {
        let mut annotations = Map::new();
        if restored {
            annotations.insert("restore.kybernate.io/main".to_owned(), image.into());
        }
        let labels = json!({ "generation": generation });
        // On a busy machine Python needs seconds until it listens.
        let mut startup = self.probe();
        if startup.is_object() {
            startup["failureThreshold"] = json!(STARTUP_SECONDS);
        }
        let [volumes, mounts] = self.volumes();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": format!("{}-{generation}", self.id),
                "labels": labels,
                "annotations": annotations,
            },
            "spec": {
                "runtimeClassName": "kybernate",
                "nodeSelector": { "kubernetes.io/hostname": node },
                "terminationGracePeriodSeconds": 0,
                "restartPolicy": "Never",
                "dnsPolicy": "Default",
                "enableServiceLinks": false,
                "containers": [{
                    "name": "main",
                    "image": image,
                    "command": self.command().0,
                    "securityContext": self.security(),
                    "startupProbe": startup,
                    "readinessProbe": self.probe(),
                    "livenessProbe": self.probe(),
                    "volumeMounts": mounts,
                }],
                "volumes": volumes,
            },
        })
    }

    fn reference(&self, story: &Story, tag: &str) -> String {
        // One repository: what the image has is in it once.
        story.scenario.reference(&format!("workloads/all:pod-{}-{tag}", self.id))
    }
}

/// A guest whose container runs.
struct Running<'a> {
    guest: &'a Guest,
    node: &'a Node,
    container: String,
}

/// What is compared with what comes back.
enum Before {
    Counts { said: Status, who: Identity },
    Redis(Load),
    Nginx { requests: u64, processes: BTreeSet<u32> },
    Listener(Heard, Load),
    Heap(Sums),
}

/// What is there again of it.
enum After {
    Counts(Status),
    /// How many writes of each client.
    Redis(Vec<u64>),
    Nginx,
    Listener(Heard),
    Heap(Sums),
}

const CLIENTS: usize = 4;

/// How long a guest may take until it answers.
const STARTUP_SECONDS: u32 = 120;

impl Running<'_> {
    fn place(&self) -> Place<'_> {
        let (_, state) = self.guest.command();
        Place { node: self.node, namespace: PODS, id: &self.container, state }
    }

    /// Sees how it is, and lets clients of servers begin.
    fn begin(&self) -> Before {
        let place = self.place();
        match self.guest.kind {
            Kind::Counter | Kind::Database => {
                Before::Counts { said: counts_on(place, None), who: Identity::of(place) }
            }
            Kind::Redis => {
                let load = Load::start(place, REDIS_PORT, CLIENTS, write);
                let busy = || {
                    let wanted = "EXISTS 0:50 1:50 2:50 3:50\r\n";
                    let ask = || Line::connect(REDIS_PORT).ask(wanted).unwrap();
                    inside(place, ask).join().unwrap() == ":4"
                };
                assert!(wait_until(LIMIT, busy), "redis is not busy");
                Before::Redis(load)
            }
            Kind::Nginx => {
                let asked = requests(place, 100);
                Before::Nginx { requests: asked, processes: processes(place) }
            }
            Kind::Listener => {
                let (begun, load) = Heard::under_load(place);
                Before::Listener(begun, load)
            }
            Kind::Heap => Before::Heap(Sums::after(place, None)),
        }
    }

    fn take(&self, story: &Story, tag: &str) -> String {
        let path = self.guest.reference(story, tag);
        let path = path.split_once('/').unwrap().1;
        let more: &[&str] = match (self.guest.kind, tag) {
            _ if self.guest.id == "memory" => &["--capture-mount", "/ram"],
            (Kind::Counter | Kind::Database | Kind::Heap, _) => &[],
            // What is acknowledged after the cut would be lost: there must be nothing.
            (Kind::Redis | Kind::Listener, "1") => &["--tcp", "close", "--stop"],
            (Kind::Redis | Kind::Nginx | Kind::Listener, _) => &["--tcp", "close"],
        };
        story.take(self.node, &self.container, path, more)
    }

    /// It is what it was when it was taken.
    fn goes_on(&self, before: Before) -> After {
        let (place, id) = (self.place(), self.guest.id);
        match before {
            Before::Counts { said: begun, who } => {
                let now = counts_on(place, Some(&begun));
                assert_eq!(now.boot, begun.boot, "{id}: it was started anew");
                assert_eq!(now.threads, begun.threads, "{id}: threads");
                assert_eq!(Identity::of(place), who, "{id}: it may more or less now");
                if self.guest.kind == Kind::Database {
                    commits(place);
                }
                // It is below /var/run, which is a link to /run in our image.
                let run = if self.guest.is_own() { "run" } else { "var/run" };
                let token = "secrets/kubernetes.io/serviceaccount/token";
                let token = format!("/proc/{}/root/{run}/{token}", place.pid().unwrap());
                let token = self.node.run(&["cat", &token]);
                assert!(token.is_ok_and(|token| token.contains('.')), "{id}: it has no token");
                After::Counts(counts_on(place, Some(&now)))
            }
            Before::Redis(load) => {
                let acknowledged = load.end();
                has_writes(place, &acknowledged);
                After::Redis(acknowledged)
            }
            Before::Nginx { requests: asked, processes: had } => {
                assert!(requests(place, 1) > asked, "nginx was started anew");
                assert_eq!(processes(place), had);
                After::Nginx
            }
            Before::Listener(begun, load) => After::Listener(Heard::goes_on(place, (begun, load))),
            Before::Heap(begun) => After::Heap(Sums::after(place, Some(&begun))),
        }
    }

    /// It is not the worse for having been taken.
    fn is_well(&self, after: &After) {
        let place = self.place();
        match after {
            After::Counts(last) => drop(counts_on(place, Some(last))),
            After::Redis(acknowledged) => has_writes(place, acknowledged),
            After::Nginx => assert!(requests(place, 1) > 100),
            After::Listener(last) => {
                let now = Heard::from(place);
                assert_eq!(now.boot, last.boot);
                assert!(now.count > last.count, "{now:?}: {last:?}");
            }
            After::Heap(last) => drop(Sums::after(place, Some(last))),
        }
    }
}

fn has_writes(place: Place<'_>, acknowledged: &[u64]) {
    for (client, writes) in acknowledged.iter().copied().enumerate() {
        let held = inside(place, move || held(client, writes)).join().unwrap();
        assert_eq!(held, writes, "of client {client}");
    }
}

/// Starts pods and waits until all of them are ready.
fn start<'a>(story: &'a Story, generation: &str, pods: &[Value]) -> Vec<Running<'a>> {
    story.cluster.apply(pods).unwrap();
    let label = format!("generation={generation}");
    let words = ["wait", "--for=condition=Ready", READY, "pod", "-l", &label];
    let output = story.cluster.output(&words).unwrap();
    assert!(output.status.success(), "{}\n{}", said(&output), unready(story, &label));
    let listed = story.cluster.kubectl(&["get", "pod", "-l", &label, "-o", "json"]).unwrap();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let testbed = &story.scenario.testbed;
    let running = |pod: &Value| {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let guest = GUESTS.iter().find(|guest| name == format!("{}-{generation}", guest.id));
        let node = if pod["spec"]["nodeName"] == "a" { &testbed.a } else { &testbed.b };
        Running { guest: guest.unwrap(), node, container: container_of(pod) }
    };
    listed["items"].as_array().unwrap().iter().map(running).collect()
}

/// Tells of those that are not ready, and how all of them are, last what is shortest.
fn unready(story: &Story, label: &str) -> String {
    let listed = story.cluster.kubectl(&["get", "pod", "-l", label, "-o", "json"]).unwrap();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let is_ready = |pod: &&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    let pods = listed["items"].as_array().unwrap().iter();
    let names = pods.filter(|pod| !is_ready(pod)).map(|pod| pod["metadata"]["name"].as_str());
    let describe = |name| story.describe("default", name);
    let described: String = names.flatten().map(describe).collect();
    let words = ["get", "pod", "-l", label, "-o", "wide"];
    format!("{described}\n{}", said(&story.cluster.output(&words).unwrap()))
}

/// Does something with each, on two threads.
fn each<T: Send>(all: Vec<T>, work: impl Fn(T) + Sync) {
    let left = Mutex::new(all);
    let next = || left.lock().unwrap().pop();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(one) = next() {
                    work(one);
                }
            });
        }
    });
}

/// Every guest is taken and restored as another pod, and that one taken again.
pub(super) fn go_on(story: &Story) {
    let began = Instant::now();
    let (a, b) = (&story.scenario.testbed.a, &story.scenario.testbed.b);
    for node in [a, b] {
        fs::create_dir_all(node.path(PROFILES)).unwrap();
        fs::write(node.path(PROFILES).join(PROFILE), NO_IO_URING).unwrap();
    }
    let (own, other) = (story.scenario.image(), &story.programs);
    let image = |guest: &Guest| if guest.is_own() { own.clone() } else { other.clone() };
    let first = |guest: &Guest| guest.pod("1", guest.from, &image(guest), false);
    let mut sources = start(story, "1", &GUESTS.iter().map(first).collect::<Vec<_>>());
    let say = |what: &str| println!("guests: {what} after {:.1} s", began.elapsed().as_secs_f64());
    say("started");
    if !may_ask_others(a) {
        let at = sources.iter().position(|one| one.guest.rights == Rights::User).unwrap();
        is_refused(story, &sources.swap_remove(at), "other-user");
    }
    let taken = Mutex::new(BTreeMap::new());
    each(sources, |source| {
        let before = source.begin();
        let pinned = source.take(story, "1");
        story.stage(b, &pinned);
        say(&format!("{} taken and staged", source.guest.id));
        taken.lock().unwrap().insert(source.guest.id, (pinned, before));
    });
    story.cluster.kubectl(&["delete", "pod", "--wait=false", "-l", "generation=1"]).unwrap();
    let mut taken = taken.into_inner().unwrap();
    let second = |guest: &Guest| Some(guest.pod("2", "b", &taken.get(guest.id)?.0, true));
    let restored = start(story, "2", &GUESTS.iter().filter_map(second).collect::<Vec<_>>());
    say("restored");
    assert_eq!(restored.len(), taken.len());
    let restored = restored.into_iter().map(|one| {
        let (_, before) = taken.remove(one.guest.id).unwrap();
        (one, before)
    });
    each(restored.collect(), |(one, before)| {
        let after = one.goes_on(before);
        one.take(story, "2");
        one.is_well(&after);
        say(&format!("{} gone on and taken again", one.guest.id));
    });
    story.cluster.kubectl(&["delete", "pod", "--wait=false", "-l", "generation=2"]).unwrap();
}

/// It is found out before it is paused that it cannot be taken.
fn is_refused(story: &Story, one: &Running<'_>, finding: &str) {
    let words = ["preflight", &one.container, "--namespace", PODS];
    let mut told = String::new();
    let refused = wait_until(LIMIT, || {
        let output = story.scenario.kyb(one.node, &words).unwrap();
        told = said(&output);
        output.status.code() == Some(2) && told.contains(&format!("refuse {finding}"))
    });
    assert!(refused, "{}: {told}", one.guest.id);
}
