//! Two nodes and the network between them.

pub mod state;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use fs_err as fs;

use self::state::{HubState, NodeState, State, kept, remove, sweep, testbeds};
use crate::node::containerd::Serves;
use crate::node::{Lifetime, Node, NodeConfig, NodeError, NodeErrorKind};
use crate::process::{Process, Service, with_log};
use crate::root::Release;

/// Address of the hub, where registries listen. Every testbed has its own network namespace, so
/// all use the same addresses.
pub const HUB_ADDRESS: &str = "10.77.0.1";
/// The nodes: name, release, address.
const NODES: [(&str, Release, &str); 2] =
    [("a", Release::Trixie, "10.77.0.11"), ("b", Release::Forky, "10.77.0.12")];

/// Two nodes, a bridge, and a place for registries on it. Ends when it is dropped, or when the
/// process that started it does.
#[derive(Debug)]
pub struct Testbed {
    /// Debian 13: containerd 1.7.
    pub a: Node,
    /// Debian 14: containerd 2.1.
    pub b: Node,
    /// The network.
    pub hub: Hub,
    // Last: nodes clean up below it.
    directory: Directory,
}

/// The network namespace that holds the bridge; programs run in it see all nodes.
#[derive(Debug)]
pub struct Hub {
    outer: Process,
    process: Process,
    lifetime: Lifetime,
    _service: Service,
}

#[derive(Debug)]
struct Directory(PathBuf);

impl Testbed {
    /// Starts both nodes, beside each other. `bin` holds the programs under test.
    pub fn start(bin: &Path, say: &(dyn Fn(&str) + Sync)) -> Result<Self, NodeError> {
        Self::start_for(Serves::Clients, bin, say)
    }

    /// Starts both nodes with a containerd that works for somebody.
    pub fn start_for(
        serves: Serves,
        bin: &Path,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<Self, NodeError> {
        let prepared = prepare();
        let (directory, hub) = prepared.map_err(during("prepare", "a and b"))?;
        let [a, b] =
            NODES.map(|node| NodeConfig { serves, ..config(node, &directory.0, bin, hub.process) });
        let (a, b) = std::thread::scope(|scope| {
            let a = scope.spawn(|| Node::start(a, say));
            let b = Node::start(b, say);
            (a.join(), b)
        });
        // A panic is a bug, and goes on as one.
        let a = a.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let testbed = Self { a, b: b?, hub, directory };
        testbed.state().write().map_err(|error| during("record", "a and b")(error.into()))?;
        Ok(testbed)
    }

    /// Returns a directory that both nodes see as `/srv/share`.
    pub fn share(&self) -> PathBuf {
        self.directory.0.join("share")
    }

    /// Returns a directory of the testbed that the nodes do not see.
    pub fn private(&self) -> PathBuf {
        self.directory.0.clone()
    }

    /// Ends everything and makes sure that nothing is left.
    pub fn end(self) -> Result<(), NodeError> {
        let Self { a, b, hub, directory } = self;
        a.end()?;
        b.end()?;
        drop(hub);
        remove(&directory.0).map_err(|error| during("clean up after", "a and b")(error.into()))
    }

    /// Returns what is written down about it.
    pub fn state(&self) -> State {
        State {
            directory: self.directory.0.clone(),
            owner: Process::own(),
            hub: Some(self.hub.state()),
            nodes: [&self.a, &self.b].map(node_state).into(),
        }
    }
}

impl Hub {
    /// Starts the network. What goes wrong in it is written to `log`.
    pub fn start(lifetime: Lifetime, log: &Path) -> io::Result<Self> {
        let stays = lifetime == Lifetime::Kept;
        let script = format!(
            "set -e; ip link set lo up; ip link add br0 type bridge; \
             ip address add {HUB_ADDRESS}/24 dev br0; ip link set br0 up; echo ready; {}",
            if stays { "exec sleep infinity" } else { "exec cat" }
        );
        let mut unshare = Command::new("unshare");
        unshare.args(["--net", "--kill-child", "--fork", "sh", "-c", &script]);
        unshare.stdin(if stays { Stdio::null() } else { Stdio::piped() });
        // Not inherited: what stays must not keep a pipe of ours open.
        unshare.stderr(fs::File::create(log)?.into_parts().0);
        let mut service = Service::start(&mut unshare)?;
        service.wait_for_line("ready").map_err(|error| with_log(error, log))?;
        let outer = service.process()?;
        let process = outer.child().ok_or_else(|| io::Error::other("the hub has ended"))?;
        if stays {
            service.stay();
        }
        Ok(Self { outer, process, lifetime, _service: service })
    }

    /// Returns the process that holds the namespace.
    pub const fn process(&self) -> Process {
        self.process
    }

    /// Prepares a command that runs on this machine's file system, in the testbed's network. It is
    /// killed when the thread that starts it ends: so it never outlives a test that was killed.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.process.pid.to_string(), "-n"]);
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]).arg(program);
        command
    }

    fn state(&self) -> HubState {
        HubState { outer: self.outer, process: self.process }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if self.lifetime == Lifetime::Owner {
            // It would end soon by itself; nobody shall have to wait for that.
            self.process.kill();
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Best effort: whoever wants to know calls `Testbed::end`.
        drop(remove(&self.0));
    }
}

/// Starts those of the named nodes that are not up, until `State::end`.
pub fn keep(
    serves: Serves,
    names: &[&str],
    bin: &Path,
    say: &(dyn Fn(&str) + Sync),
) -> Result<State, NodeError> {
    let wrong = during("prepare", "a and b");
    let directory = kept();
    let running = State::kept().and_then(|state| Some((state.running_hub()?, state)));
    let (hub, mut state) = match running {
        Some(found) => found,
        None => prepare_kept(&directory).map_err(&wrong)?,
    };
    for node in NODES.into_iter().filter(|(name, ..)| names.contains(name)) {
        if state.node(node.0).is_some() {
            continue;
        }
        say(&format!("starting node {}", node.0));
        let config = NodeConfig {
            serves,
            lifetime: Lifetime::Kept,
            ..config(node, &directory, bin, hub.process)
        };
        let node = Node::start(config, say)?;
        state.nodes.retain(|old| old.name != node.name());
        state.nodes.push(node_state(&node));
        state.write().map_err(|error| wrong(error.into()))?;
    }
    Ok(state)
}

fn prepare_kept(directory: &Path) -> Result<(HubState, State), NodeErrorKind> {
    sweep()?;
    if let Some(old) = State::kept() {
        // A testbed without a hub is left from before the machine started anew.
        old.end(None)?;
    }
    fs::create_dir_all(directory.join("share"))?;
    let hub = Hub::start(Lifetime::Kept, &directory.join("hub.log"))?.state();
    let directory = directory.to_owned();
    let state = State { directory, owner: None, hub: Some(hub), nodes: Vec::new() };
    state.write()?;
    Ok((hub, state))
}

fn prepare() -> Result<(Directory, Hub), NodeErrorKind> {
    sweep()?;
    let directory = Directory(fresh_directory());
    fs::create_dir_all(directory.0.join("share"))?;
    // Written before anything is started, so that whatever is left can be found.
    let path = directory.0.clone();
    State { directory: path, owner: Process::own(), hub: None, nodes: Vec::new() }.write()?;
    let hub = Hub::start(Lifetime::Owner, &directory.0.join("hub.log"))?;
    Ok((directory, hub))
}

fn config(
    (name, release, address): (&str, Release, &str),
    directory: &Path,
    bin: &Path,
    hub: Process,
) -> NodeConfig {
    NodeConfig {
        name: name.to_owned(),
        release,
        directory: directory.join(name),
        bin: bin.to_owned(),
        share: directory.join("share"),
        hub,
        address: address.to_owned(),
        lifetime: Lifetime::Owner,
        serves: Serves::Clients,
    }
}

fn node_state(node: &Node) -> NodeState {
    NodeState {
        name: node.name().to_owned(),
        address: node.address().to_owned(),
        serves: node.serves(),
        outer: node.process(),
        init: node.init(),
    }
}

fn during(operation: &'static str, node: &str) -> impl Fn(NodeErrorKind) -> NodeError {
    let node = node.to_owned();
    move |kind| NodeError { node: node.clone(), operation, kind }
}

fn fresh_directory() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    testbeds().join(format!("{}-{number}", std::process::id()))
}
