//! What the demo, the end-to-end tests and the benchmark share: two nodes with agents, a registry
//! between them, keys, and the workload's image.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::process::Signal;
use serde_json::Value;

use crate::command::{self, CommandError, wait_until};
use crate::image::{self, ImageError};
use crate::node::containerd::Serves;
use crate::node::{Node, NodeError};
use crate::process::{Process, Service, with_log};
use crate::testbed::{HUB_ADDRESS, Testbed};

/// Port of our registry on the hub.
const REGISTRY_PORT: u16 = 5000;
/// Port of Debian's docker-registry on the hub.
const PEER_PORT: u16 = 5001;
/// Password of the keys a scenario makes; they live as long as this process.
pub const PASSWORD: &str = "scenario-secret";
/// Starting a program takes milliseconds; a machine that compiles meanwhile needs far longer.
pub(crate) const START_TIMEOUT: Duration = Duration::from_mins(2);

/// Tells everything that an operation could have left: what containerd has, files of the agent's
/// directories, mounts, cgroups and which of them are frozen, CRIU's rules in the node's network and
/// those of its containers, and processes; what only waits for its parent to ask how it ended is none
/// any more. Not what a restored container leaves until the next restore: what its CRIU was told.
const TRACES: &str = r#"
tasks=$(ctr task ls)
echo "$tasks" | sort
for what in "container ls -q" "snapshot ls" "leases ls" "image ls -q" "content ls -q"; do
    ctr $what | sort
done
find /var/lib/kybernate /run/kybernate -mindepth 1 -not -path '*/kybernate/stage' \
    -not -path '*/operations*' -not -name '*.sock' \
    -not '(' -type d -path '*/kybernate/volumes*' ')' -not -name criu.conf \
    -not -name '*.lock' -not -name '*.log'
awk '$5 ~ /kybernate|default/ { print "mount", $5 }' /proc/self/mountinfo | sort
find /sys/fs/cgroup -path '*/default/*' -type d | sort
find /sys/fs/cgroup -path '*/default/*' '(' -name freezer.state -o -name cgroup.freeze ')' \
    -exec grep -H . {} + | sort
for pid in $$ $(echo "$tasks" | awk 'NR > 1 { print $2 }'); do
    nsenter -t $pid -n sh -c '{ iptables -S; ip6tables -S; nft list tables; } |
        grep "CRIU\|kybernate\|0xc114"'
done
ps -e -o stat= -o pid= -o comm= -o args= |
    awk '$1 !~ /^Z/ && $3 ~ /criu|runc|kybernate-agent/ { $1 = ""; print }'
"#;

/// Everything that runs.
#[derive(Debug)]
pub struct Scenario {
    /// Our registry.
    pub registry: Option<Service>,
    /// The agent on node a.
    pub agent_a: Option<Agent>,
    /// The agent on node b.
    pub agent_b: Option<Agent>,
    /// The nodes and the network. Ends last: the others run in it, and write into its directory.
    pub testbed: Testbed,
    /// What our programs have in their environment from now on, as `NAME=value`.
    pub environment: Vec<String>,
    bin: PathBuf,
}

/// An agent running on a node.
#[derive(Debug)]
pub struct Agent {
    /// Enters the node and waits for the agent.
    service: Service,
    process: Process,
}

/// Why a scenario could not go on.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// A node failed.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The workload's image could not be built.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Input or output failed.
    #[error("input or output failed")]
    Io(#[from] io::Error),
    /// A program printed something else than JSON.
    #[error("failed to read what was printed: {0:?}")]
    Json(String, #[source] serde_json::Error),
    /// A container has no task.
    #[error("{0} has no task")]
    NoTask(String),
    /// Something did not happen in time.
    #[error("{0} did not happen in time")]
    Timeout(String),
}

impl Scenario {
    /// Starts the testbed, the registry and both agents, makes keys and pushes the workload's image.
    pub fn start(bin: &Path, say: &(dyn Fn(&str) + Sync)) -> Result<Self, ScenarioError> {
        Self::start_for(Serves::Clients, bin, say)
    }

    /// Does so with nodes whose containerd works for somebody.
    pub fn start_for(
        serves: Serves,
        bin: &Path,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<Self, ScenarioError> {
        let mut scenario = Self::bare_for(serves, bin, say)?;
        let share = scenario.testbed.share();
        for name in ["node-a", "node-b", "stranger"] {
            keygen(bin, &share.join(name))?;
        }
        fs::write(share.join("password"), PASSWORD)?;
        scenario.registry = Some(scenario.start_registry()?);
        scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "")?);
        scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, "")?);
        scenario.push_image(&scenario.image())?;
        Ok(scenario)
    }

    /// Starts the testbed alone and builds the workload's image: none of our programs is needed.
    pub fn bare(bin: &Path, say: &(dyn Fn(&str) + Sync)) -> Result<Self, ScenarioError> {
        Self::bare_for(Serves::Clients, bin, say)
    }

    fn bare_for(
        serves: Serves,
        bin: &Path,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<Self, ScenarioError> {
        let testbed = Testbed::start_for(serves, bin, say)?;
        let busybox = testbed.b.path("/usr/bin/busybox");
        image::build(&testbed.share().join("image"), &busybox, "base")?;
        let (registry, agent_a, agent_b) = (None, None, None);
        let (environment, bin) = (Vec::new(), bin.to_owned());
        Ok(Self { registry, agent_a, agent_b, testbed, environment, bin })
    }

    /// Ends everything and makes sure that nothing is left.
    pub fn end(mut self) -> Result<(), ScenarioError> {
        self.registry.take();
        self.agent_a.take();
        self.agent_b.take();
        Ok(self.testbed.end()?)
    }

    /// Returns `host:port/` of our registry and a path in it.
    pub fn reference(&self, path: &str) -> String {
        format!("{HUB_ADDRESS}:{REGISTRY_PORT}/{path}")
    }

    /// Returns `host:port/` of docker-registry and a path in it.
    pub fn peer_reference(&self, path: &str) -> String {
        format!("{HUB_ADDRESS}:{PEER_PORT}/{path}")
    }

    /// Returns the workload's image in our registry.
    pub fn image(&self) -> String {
        self.reference("demo/counter:base")
    }

    /// Returns the directory our registry keeps everything in.
    pub fn registry_root(&self) -> PathBuf {
        self.testbed.private().join("registry")
    }

    /// Returns the directory docker-registry keeps everything in.
    pub fn peer_root(&self) -> PathBuf {
        self.testbed.private().join("peer")
    }

    /// Starts our registry.
    pub fn start_registry(&self) -> Result<Service, ScenarioError> {
        self.start_registry_at(&self.registry_root())
    }

    /// Starts our registry on another directory.
    pub fn start_registry_at(&self, root: &Path) -> Result<Service, ScenarioError> {
        fs::create_dir_all(root)?;
        let mut command = self.testbed.hub.command(&self.bin.join("kybernate-registry"));
        command.args(["serve", "--listen", &format!("{HUB_ADDRESS}:{REGISTRY_PORT}"), "--root"]);
        command.arg(root).stderr(self.log("registry.log")?);
        // Nobody here looks whether it is about to end.
        command.env("KYBERNATE_REGISTRY_CONNECTIONS_ANNOUNCE", "0s");
        command.envs(self.environment.iter().filter_map(|one| one.split_once('=')));
        let mut service = Service::start(&mut command)?;
        service.wait_for_line("listening on")?;
        Ok(service)
    }

    /// Starts Debian's docker-registry beside ours.
    pub fn start_peer(&self) -> Result<Service, ScenarioError> {
        let root = self.peer_root();
        fs::create_dir_all(&root)?;
        let address = format!("{HUB_ADDRESS}:{PEER_PORT}");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nhttp: {{addr: \"{address}\"}}\n\
             storage: {{filesystem: {{rootdirectory: \"{}\"}}, delete: {{enabled: true}}}}\n",
            root.display()
        );
        let file = self.testbed.private().join("peer.yml");
        fs::write(&file, config)?;
        let mut command = self.testbed.hub.command(Path::new("docker-registry"));
        command.arg("serve").arg(&file).stderr(self.log("peer.log")?);
        let service = Service::start(&mut command)?;
        let url = format!("http://{address}/v2/");
        let answers = || self.testbed.b.run(&["curl", "-sf", "-m", "2", &url]).is_ok();
        if wait_until(START_TIMEOUT, answers) {
            return Ok(service);
        }
        Err(ScenarioError::Timeout("an answer of docker-registry".to_owned()))
    }

    /// Starts an agent with this scenario's keys; `more` is added to its configuration. A node
    /// signs with its own key and trusts both nodes' keys.
    pub fn start_agent(&self, node: &Node, more: &str) -> Result<Agent, ScenarioError> {
        self.start_agent_by(&[], node, more)
    }

    /// Does so by a program that becomes the agent, as one that takes privileges away.
    pub fn start_agent_by(
        &self,
        by: &[&str],
        node: &Node,
        more: &str,
    ) -> Result<Agent, ScenarioError> {
        let name = node.name();
        fs::create_dir_all(node.path("/etc/kybernate"))?;
        fs::write(node.path("/etc/kybernate/agent.toml"), agent_config(name, more))?;
        let words = [by, &["kybernate-agent", "serve"]].concat();
        let mut command = node.command(&self.with_environment(&words));
        command.stderr(self.log(&format!("agent-{name}.log"))?);
        let service = Service::start(&mut command)?;
        let answers = || service.process().is_err() || node.run(&["kyb", "ps", "--json"]).is_ok();
        if !wait_until(START_TIMEOUT, answers) {
            return Err(ScenarioError::Timeout(format!("an answer of the agent on {name}")));
        }
        let log = self.testbed.private().join(format!("agent-{name}.log"));
        let entered = service.process().map_err(|error| with_log(error, &log))?;
        let process = entered.child().ok_or_else(|| io::Error::other("the agent has ended"))?;
        Ok(Agent { service, process })
    }

    /// Returns a node, by its name.
    pub fn node(&self, name: &str) -> &Node {
        if name == self.testbed.a.name() { &self.testbed.a } else { &self.testbed.b }
    }

    /// Returns the agent of a node.
    pub fn agent(&mut self, name: &str) -> &mut Option<Agent> {
        if name == self.testbed.a.name() { &mut self.agent_a } else { &mut self.agent_b }
    }

    /// Ends the agent of a node if there is one, and starts the next, with `more` in its configuration.
    pub fn next_agent(&mut self, name: &str, more: &str) -> Result<(), ScenarioError> {
        drop(self.agent(name).take());
        let agent = self.start_agent(self.node(name), more)?;
        *self.agent(name) = Some(agent);
        Ok(())
    }

    /// Pushes the workload's image.
    pub fn push_image(&self, reference: &str) -> Result<(), ScenarioError> {
        let words =
            ["oras", "copy", "--from-oci-layout", "--to-plain-http", "/srv/share/image:base"];
        self.testbed.b.run(&[&words[..], &[reference]].concat())?;
        Ok(())
    }

    /// Pulls the workload's image on a node and starts a container of it.
    pub fn run_workload(
        &self,
        node: &Node,
        id: &str,
        mib: u32,
        options: &[&str],
    ) -> Result<(), ScenarioError> {
        self.run_image(node, &self.image(), id, mib, options)
    }

    /// Pulls an image that holds the workload, from any registry of the testbed, and starts a
    /// container of it.
    pub fn run_image(
        &self,
        node: &Node,
        image: &str,
        id: &str,
        mib: u32,
        options: &[&str],
    ) -> Result<(), ScenarioError> {
        let mib = mib.to_string();
        node.run(&["ctr", "image", "pull", "--plain-http", image])?;
        let workload = ["/workload", "run", "--state", "/state", "--mib", &mib];
        // No weight, which needs a controller that a hierarchy of version 2 may not have.
        let run = ["ctr", "run", "-d", "--cpu-shares", "0"];
        node.run(&[&run[..], options, &[image, id], &workload[..]].concat())?;
        self.wait_for(node, id, |status| counter(status) > Some(0))?;
        Ok(())
    }

    /// Returns what the workload says of itself, checked by itself.
    pub fn status(&self, node: &Node, id: &str) -> Result<Value, ScenarioError> {
        let pid = node.pid_of("default", id).ok_or_else(|| ScenarioError::NoTask(id.to_owned()))?;
        // Not by containerd, which needs ten times as long, and it is asked a thousand times.
        let words = ["nsenter", "-t", &pid.to_string(), "-m", "-r", "/workload", "status"];
        let text = node.run(&[&words[..], &["--state", "/state"]].concat())?;
        serde_json::from_str(&text).map_err(|error| ScenarioError::Json(text, error))
    }

    /// Waits until the workload's status is as wanted, and returns it.
    pub fn wait_for(
        &self,
        node: &Node,
        id: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value, ScenarioError> {
        let mut last = Err(ScenarioError::Timeout(format!("a status of {id}")));
        wait_until(START_TIMEOUT, || {
            last = self.status(node, id);
            last.as_ref().is_ok_and(&wanted)
        });
        match last {
            Ok(status) if wanted(&status) => Ok(status),
            Ok(status) => Err(ScenarioError::Timeout(format!("progress of {id}: {status}"))),
            Err(error) => Err(error),
        }
    }

    /// Waits until the workload has ticked on, so that it runs, and returns its status.
    pub fn wait_for_ticks(&self, node: &Node, id: &str) -> Result<Value, ScenarioError> {
        let now = self.wait_for(node, id, |status| counter(status).is_some())?;
        let next = counter(&now).map(|counter| counter + 2);
        self.wait_for(node, id, |status| counter(status) >= next)
    }

    /// Runs `kyb` on a node, however it ends.
    pub fn kyb(&self, node: &Node, words: &[&str]) -> Result<Output, ScenarioError> {
        let password = format!("COSIGN_PASSWORD={PASSWORD}");
        Ok(node.output(&self.with_environment(&[&[&password, "kyb"], words].concat()))?)
    }

    /// Runs `kyb … --json` on a node; it must succeed.
    pub fn kyb_json(&self, node: &Node, words: &[&str]) -> Result<Value, ScenarioError> {
        let password = format!("COSIGN_PASSWORD={PASSWORD}");
        let words = [&[&password, "kyb"], words, &["--json"]].concat();
        let text = node.run(&self.with_environment(&words))?;
        serde_json::from_str(&text).map_err(|error| ScenarioError::Json(text, error))
    }

    /// Returns the words of a command that runs with the environment of our programs.
    fn with_environment<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        let environment = self.environment.iter().map(String::as_str);
        ["env"].into_iter().chain(environment).chain(words.iter().copied()).collect()
    }

    /// Ends a container and forgets it.
    pub fn remove(&self, node: &Node, id: &str) -> Result<(), ScenarioError> {
        let gone = || node.run(&["ctr", "task", "rm", "-f", id]).is_ok() || !has_task(node, id);
        if !wait_until(START_TIMEOUT, gone) {
            return Err(ScenarioError::Timeout(format!("the end of {id}")));
        }
        node.run(&["ctr", "container", "rm", id])?;
        Ok(())
    }

    /// Returns everything on a node that an operation could have left (`TRACES`).
    pub fn traces(&self, node: &Node) -> Result<String, ScenarioError> {
        let output = node.output(&["sh", "-c", TRACES])?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn log(&self, name: &str) -> io::Result<std::fs::File> {
        let path = self.testbed.private().join(name);
        let file = fs::OpenOptions::new().create(true).append(true).open(path)?;
        Ok(file.into_parts().0)
    }
}

impl Agent {
    /// Returns the agent, as this machine sees it.
    pub const fn process(&self) -> Process {
        self.process
    }

    /// Kills the agent, as the kernel would when memory runs out.
    pub fn kill(self) {
        self.process.kill();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.process.signal(Signal::TERM);
        if !wait_until(START_TIMEOUT, || !self.process.runs()) {
            self.process.kill();
        }
        // What entered the node takes the agent out of its process table. Killed before that, it
        // leaves an entry to the node's first process, which a test then sees come or go.
        self.service.ends();
    }
}

/// Returns the configuration of the agent on the node `name`.
pub(crate) fn agent_config(name: &str, more: &str) -> String {
    let mut config = format!(
        "node = \"{name}\"\n{more}\n[[sign_keys]]\nname = \"node-{name}\"\n\
         file = \"/srv/share/node-{name}.key\"\npassword_file = \"/srv/share/password\"\n"
    );
    for signer in ["a", "b"] {
        config += "[[trust]]\nrepository = \"*\"\n";
        config += &["key = \"/srv/share/node-", signer, ".pub\"\n"].concat();
    }
    config
}

/// Returns the counter in a workload's status.
pub fn counter(status: &Value) -> Option<u64> {
    status.get("counter").and_then(Value::as_u64)
}

fn has_task(node: &Node, id: &str) -> bool {
    let tasks = node.run(&["ctr", "task", "ls", "-q"]);
    tasks.is_ok_and(|tasks| tasks.lines().any(|line| line == id))
}

/// Pairs of keys, by their names: private, and public.
type Pairs = BTreeMap<PathBuf, [Vec<u8>; 2]>;

/// What scenarios of this process have made. A private key is slow to make by design (scrypt).
static PAIRS: Mutex<Pairs> = Mutex::new(BTreeMap::new());

/// Makes a pair of keys, or gives again the one that has been made by that name.
pub(crate) fn keygen(bin: &Path, prefix: &Path) -> Result<(), ScenarioError> {
    let name = PathBuf::from(prefix.file_name().unwrap_or_default());
    let files = ["key", "pub"].map(|end| prefix.with_extension(end));
    let mut pairs = PAIRS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pair) = pairs.get(&name) {
        for (file, content) in files.iter().zip(pair) {
            let mut options = fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(file)?;
            file.write_all(content)?;
        }
        return Ok(());
    }
    let mut kyb = Command::new(bin.join("kyb"));
    kyb.arg("keygen").arg(prefix).env("COSIGN_PASSWORD", PASSWORD);
    command::run(&mut kyb)?;
    let [private, public] = files;
    pairs.insert(name, [fs::read(private)?, fs::read(public)?]);
    Ok(())
}
