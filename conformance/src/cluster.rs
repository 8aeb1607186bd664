//! A Kubernetes cluster on the nodes of a testbed: etcd, API server, controller manager and scheduler
//! on the hub's network, a kubelet on each node.
//!
//! The control plane runs in the namespaces of node b, but for the network: so all of it ends with the
//! nodes, however these end, and what cleans up after nodes cleans up after a cluster.
//! No kube-proxy, no DNS: pods reach each other by address. Every node has a cgroup namespace, so
//! kubelets see no pods but their own.

mod identities;
pub mod platform;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use fs_err as fs;
use serde_json::{Value, json};

pub use self::identities::IdentityError;
use crate::command::{self, CommandError};
use crate::image::{self, ImageError};
use crate::node::containerd::{PAUSE, Serves};
use crate::node::{command_in, command_in_network};
use crate::process::Process;
use crate::root;
use crate::testbed::HUB_ADDRESS;
use crate::testbed::state::{NodeState, State};

/// The versions that `kubernetes.sh` builds.
const KUBERNETES: &str = "v1.36.3";
const ETCD: &str = "v3.6.16";
/// The programs, and their versions.
const PROGRAMS: [(&str, &str); 6] = [
    ("etcd", ETCD),
    ("kube-apiserver", KUBERNETES),
    ("kube-controller-manager", KUBERNETES),
    ("kube-scheduler", KUBERNETES),
    ("kubectl", KUBERNETES),
    ("kubelet", KUBERNETES),
];

/// Where nodes see the cluster's programs and identities.
const DIRECTORY: &str = "/srv/share/kube";
/// A file there that says that all of it was started.
const STARTED: &str = "started";
/// Port of the API server on the hub.
const API_PORT: u16 = 6443;
/// The registry that containerd pulls from without TLS.
const REGISTRY: &str = "10.77.0.1:5000";
const CONTROL: &str = include_str!("cluster/control.sh");
const KUBELET: &str = include_str!("cluster/kubelet.sh");
/// A kubelet is ready in 8 s on an idle machine.
const READY_LIMIT: &str = "180s";

/// A running cluster. It ends with its nodes.
#[derive(Clone, Debug)]
pub struct Cluster {
    hub: Process,
    nodes: Vec<NodeState>,
    /// [`DIRECTORY`], as this machine sees it.
    directory: PathBuf,
}

/// Why a cluster could not be started or used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The programs were not built.
    #[error("{0:?} is missing: `sh conformance/kubernetes.sh` builds it, which needs Go")]
    Missing(PathBuf),
    /// The nodes are not such that a kubelet can work on them.
    #[error("{0}: end the nodes with `node down` first")]
    Nodes(&'static str),
    /// Certificates or tokens could not be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The image of pods' first container could not be built.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A file could not be read or written.
    #[error("failed to prepare the cluster")]
    Io(#[from] std::io::Error),
    /// kubectl printed something else than JSON.
    #[error("failed to read what kubectl printed: {0:?}")]
    Json(String, #[source] serde_json::Error),
}

impl Cluster {
    /// Makes sure that the programs are there.
    pub fn look() -> Result<(), ClusterError> {
        let missing = PROGRAMS.into_iter().map(program).find(|file| !file.exists());
        missing.map_or(Ok(()), |file| Err(ClusterError::Missing(file)))
    }

    /// Starts a cluster on nodes whose containerd serves a kubelet, and waits until they are ready.
    pub fn start(state: &State, say: &dyn Fn(&str)) -> Result<Self, ClusterError> {
        Self::look()?;
        let hub = state.running_hub().ok_or(ClusterError::Nodes("there is no network"))?.process;
        if state.nodes.iter().any(|node| node.serves != Serves::Kubelet) {
            return Err(ClusterError::Nodes("a node's containerd serves no kubelet"));
        }
        let directory = state.directory.join("share/kube");
        let cluster = Self { hub, nodes: state.nodes.clone(), directory };
        if cluster.directory.exists() {
            return Err(ClusterError::Nodes("a start of the cluster did not come to its end"));
        }
        let began = Instant::now();
        cluster.prepare()?;
        cluster.start_control()?;
        say(&format!("the control plane answers after {:.1} s", began.elapsed().as_secs_f64()));
        for node in 0..cluster.nodes.len() {
            cluster.start_kubelet(node)?;
        }
        cluster.wait()?;
        fs::write(cluster.directory.join(STARTED), "")?;
        say(&format!("the nodes are ready after {:.1} s", began.elapsed().as_secs_f64()));
        Ok(cluster)
    }

    /// Returns the cluster that `cluster up` has started.
    pub fn of(state: &State) -> Result<Self, ClusterError> {
        let directory = state.directory.join("share/kube");
        let hub = state.running_hub().filter(|_| directory.join(STARTED).exists());
        let hub = hub.ok_or(ClusterError::Nodes("no cluster is up"))?.process;
        Ok(Self { hub, nodes: state.nodes.clone(), directory })
    }

    /// Prepares a call of kubectl as administrator. It runs on node b, in the hub's network.
    pub fn command(&self, words: &[&str]) -> Command {
        let program = format!("{DIRECTORY}/bin/kubectl");
        let config = format!("{DIRECTORY}/admin.conf");
        let own = [&*program, "--kubeconfig", &config, "--cache-dir", "/tmp/kubectl"];
        self.on_hub(&[&own, words].concat())
    }

    /// Calls kubectl, which must succeed, and returns what it printed.
    pub fn kubectl(&self, words: &[&str]) -> Result<String, ClusterError> {
        Ok(command::run(&mut self.command(words))?)
    }

    /// Calls kubectl, however it ends.
    pub fn output(&self, words: &[&str]) -> Result<Output, ClusterError> {
        Ok(command::output(&mut self.command(words))?)
    }

    /// Returns an object.
    pub fn get(&self, kind: &str, name: &str) -> Result<Value, ClusterError> {
        let text = self.kubectl(&["get", kind, name, "-o", "json"])?;
        serde_json::from_str(&text).map_err(|error| ClusterError::Json(text, error))
    }

    /// Creates objects, or changes those that are there.
    pub fn apply(&self, objects: &[Value]) -> Result<(), ClusterError> {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
        std::io::Write::write_all(&mut file, list.to_string().as_bytes())?;
        let name = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.kubectl(&["apply", "-f", &format!("{DIRECTORY}/{name}")]).map(drop)
    }

    /// Returns the most memory that each program of the cluster had so far, in MiB.
    pub fn memory(&self) -> Result<Vec<(String, u64)>, ClusterError> {
        let mut found = Vec::new();
        for node in &self.nodes {
            let script = "for program in etcd kube-apiserver kube-controller kube-scheduler kubelet; do \
                          for pid in $(pgrep -o \"^$program\"); do echo \"$program $(awk \
                          '/^VmHWM/ { print int($2 / 1024) }' /proc/$pid/status)\"; done; done";
            let text = command::run(&mut command_in(node.init, &["sh", "-c", script]))?;
            found.extend(text.lines().filter_map(|line| {
                let (program, mib) = line.split_once(' ')?;
                Some((format!("{program} on {}", node.name), mib.parse().ok()?))
            }));
        }
        Ok(found)
    }

    /// Puts programs, identities and the pause image where nodes see them.
    fn prepare(&self) -> Result<(), ClusterError> {
        let bin = self.directory.join("bin");
        fs::create_dir_all(&bin)?;
        for (name, version) in PROGRAMS {
            link(&program((name, version)), &bin.join(name))?;
        }
        let names: Vec<&str> = self.nodes.iter().map(|node| &*node.name).collect();
        identities::write(&self.directory, HUB_ADDRESS, &names)?;
        let layout = self.directory.join("pause");
        let built = image::build_pause(&layout, PAUSE)?;
        Ok(image::archive(&layout, &built, &self.directory.join("pause.tar"))?)
    }

    fn start_control(&self) -> Result<(), ClusterError> {
        let port = API_PORT.to_string();
        let routes: Vec<String> = (0..self.nodes.len()).filter_map(|one| self.route(one)).collect();
        let words = ["sh", "-c", CONTROL, "control", DIRECTORY, HUB_ADDRESS, &port];
        let routes: Vec<&str> = routes.iter().map(String::as_str).collect();
        command::run(&mut self.on_hub(&[&words[..], &routes].concat()))?;
        Ok(())
    }

    fn start_kubelet(&self, index: usize) -> Result<(), ClusterError> {
        let Some(node) = self.nodes.get(index) else { return Ok(()) };
        let others = (0..self.nodes.len()).filter(|other| *other != index);
        let routes: Vec<String> = others.filter_map(|other| self.route(other)).collect();
        let routes: Vec<&str> = routes.iter().map(String::as_str).collect();
        let (name, address, pods) = (&*node.name, &*node.address, subnet(index));
        let words = ["sh", "-c", KUBELET, "kubelet", DIRECTORY, name, address, &pods, REGISTRY];
        command::run(&mut command_in(node.init, &[&words[..], &routes].concat()))?;
        Ok(())
    }

    /// Waits until pods can be created, and creates the runtime class.
    fn wait(&self) -> Result<(), ClusterError> {
        let limit = format!("--timeout={READY_LIMIT}");
        let nodes: Vec<String> =
            self.nodes.iter().map(|node| format!("node/{}", node.name)).collect();
        let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
        // One by one: with several, kubectl 1.36 does not wait for those that are not there.
        for there in ["serviceaccount/default"].iter().chain(&nodes) {
            self.kubectl(&["wait", "--for=create", &limit, there])?;
        }
        self.kubectl(&[&["wait", "--for=condition=Ready", &*limit][..], &nodes].concat())?;
        self.apply(&[json!({
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": { "name": "kybernate" },
            "handler": "kybernate",
        })])
    }

    /// Returns `SUBNET=NODE`: where a node's pods are.
    fn route(&self, index: usize) -> Option<String> {
        Some(format!("{}={}", subnet(index), self.nodes.get(index)?.address))
    }

    /// Prepares a command that lives as long as the last node, in the hub's network.
    fn on_hub(&self, words: &[&str]) -> Command {
        let home = self.nodes.last().map_or(self.hub, |node| node.init);
        command_in_network(home, self.hub, words)
    }
}

/// The pods of the first node have 10.78.1.0/24, and so on.
fn subnet(index: usize) -> String {
    format!("10.78.{}.0/24", index + 1)
}

/// Returns where a program is kept.
fn program((name, version): (&str, &str)) -> PathBuf {
    root::cache().join("tools/bin").join(format!("{name}-{version}"))
}

/// Puts a file to another place: testbeds and programs are mostly on one file system.
fn link(from: &Path, to: &Path) -> std::io::Result<()> {
    if to.exists() {
        return Ok(());
    }
    fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
}

#[cfg(test)]
mod tests {
    use super::{ETCD, KUBERNETES, PROGRAMS};

    #[test]
    fn what_is_started_is_what_is_built() {
        let script = include_str!("../kubernetes.sh");
        for line in [format!("kubernetes={KUBERNETES}\n"), format!("etcd={ETCD}\n")] {
            assert!(script.contains(&line), "{line}");
        }
        assert!(PROGRAMS.iter().all(|(name, _)| script.contains(name)));
    }
}
