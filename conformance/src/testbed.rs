//! Two nodes and the network between them.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::command::{self, CommandError};
use crate::node::{Lifetime, Node, NodeConfig, NodeError, NodeErrorKind, clean};
use crate::process::{Service, started};
use crate::root::{self, Release};

/// Address of the hub, where registries listen. Every testbed has its own network namespace, so
/// all use the same addresses.
pub const HUB_ADDRESS: &str = "10.77.0.1";

/// Two nodes, a bridge, and a place for registries on it.
#[derive(Debug)]
pub struct Testbed {
    /// Debian 13: containerd 1.7.
    pub a: Node,
    /// Debian 14: containerd 2.1.
    pub b: Node,
    /// The network.
    pub hub: Hub,
    directory: PathBuf,
}

/// The network namespace that holds the bridge; programs run in it see all nodes.
#[derive(Debug)]
pub struct Hub {
    service: Service,
    stays: bool,
}

/// What `node up` leaves for `node exec` and `node down`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// The testbed's directory.
    pub directory: PathBuf,
    /// The process that owns it; with its time of birth.
    pub owner: (u32, u64),
    /// The hub.
    pub hub: (u32, u64),
    /// The nodes: name, outer process, and its time of birth.
    pub nodes: Vec<(String, u32, u64)>,
}

impl Hub {
    /// Starts the network.
    pub fn start(lifetime: Lifetime) -> io::Result<Self> {
        let stays = lifetime == Lifetime::Kept;
        let script = format!(
            "set -e; ip link set lo up; ip link add br0 type bridge; \
             ip address add {HUB_ADDRESS}/24 dev br0; ip link set br0 up; echo ready; {}",
            if stays { "exec sleep infinity" } else { "exec cat" }
        );
        let mut unshare = Command::new("unshare");
        unshare.args(["--net", "--kill-child", "--fork", "sh", "-c", &script]);
        unshare.stdin(if stays { Stdio::null() } else { Stdio::piped() });
        let mut service = Service::start(&mut unshare)?;
        service.wait_for_line("ready")?;
        if stays {
            service.stay();
        }
        Ok(Self { service, stays })
    }

    /// Returns the process that holds the namespace.
    pub fn pid(&self) -> u32 {
        crate::process::children(self.service.pid()).first().copied().unwrap_or_default()
    }

    /// Prepares a command that runs on this machine's file system, in the testbed's network.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.pid().to_string(), "-n"]).arg(program);
        command
    }
}

impl Testbed {
    /// Starts both nodes, beside each other. `bin` holds the programs under test.
    pub fn start(bin: &Path, say: &(dyn Fn(&str) + Sync)) -> Result<Self, NodeError> {
        Self::start_in(&fresh_directory(), bin, Lifetime::Owner, say)
    }

    /// Starts both nodes in a given directory.
    pub fn start_in(
        directory: &Path,
        bin: &Path,
        lifetime: Lifetime,
        say: &(dyn Fn(&str) + Sync),
    ) -> Result<Self, NodeError> {
        let wrong = |kind| NodeError { node: "a and b".to_owned(), operation: "prepare", kind };
        sweep().map_err(wrong)?;
        let share = directory.join("share");
        fs::create_dir_all(&share).map_err(|error| wrong(error.into()))?;
        let hub = Hub::start(lifetime).map_err(|error| wrong(error.into()))?;
        let config = |name: &str, release, address: &str| NodeConfig {
            name: name.to_owned(),
            release,
            directory: directory.join(name),
            bin: bin.to_owned(),
            share: share.clone(),
            hub: hub.pid(),
            address: address.to_owned(),
            lifetime,
        };
        let a = config("a", Release::Trixie, "10.77.0.11");
        let b = config("b", Release::Forky, "10.77.0.12");
        let (a, b) = std::thread::scope(|scope| {
            let a = scope.spawn(|| Node::start(a, say));
            let b = Node::start(b, say);
            (a.join(), b)
        });
        let a = a.map_err(|_panic| wrong(io::Error::other("a thread panicked").into()))??;
        let testbed = Self { a, b: b?, hub, directory: directory.to_owned() };
        testbed.record().map_err(|error| wrong(error.into()))?;
        Ok(testbed)
    }

    /// Returns a directory that both nodes see as `/srv/share`.
    pub fn share(&self) -> PathBuf {
        self.directory.join("share")
    }

    /// Returns a directory of the testbed that the nodes do not see.
    pub fn private(&self) -> PathBuf {
        self.directory.clone()
    }

    /// Ends everything and makes sure that nothing is left.
    pub fn end(self) -> Result<(), NodeError> {
        let Self { a, b, hub, directory } = self;
        a.end()?;
        b.end()?;
        drop(hub);
        remove(&directory).map_err(|error| NodeError {
            node: "a and b".to_owned(),
            operation: "clean up after",
            kind: error.into(),
        })
    }

    fn record(&self) -> io::Result<()> {
        let born = |pid| (pid, started(pid).unwrap_or_default());
        let node = |node: &Node| {
            let (pid, birth) = born(node.pid());
            (node.name().to_owned(), pid, birth)
        };
        let state = State {
            directory: self.directory.clone(),
            owner: born(std::process::id()),
            hub: born(self.hub.service.pid()),
            nodes: vec![node(&self.a), node(&self.b)],
        };
        let text = serde_json::to_vec_pretty(&state).map_err(io::Error::other)?;
        fs::write(self.directory.join("state.json"), text)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if !self.stays {
            crate::process::signal(self.pid(), rustix::process::Signal::KILL);
        }
    }
}

impl State {
    /// Returns all testbeds that are recorded on this machine.
    pub fn all() -> Vec<Self> {
        let Ok(entries) = fs::read_dir(testbeds()) else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| fs::read(entry.path().join("state.json")).ok())
            .filter_map(|text| serde_json::from_slice(&text).ok())
            .collect()
    }

    /// Whether the process that started the testbed still runs.
    pub fn is_owned(&self) -> bool {
        started(self.owner.0) == Some(self.owner.1)
    }

    /// Ends the nodes of this testbed, all or one, and what nobody needs then.
    pub fn end(mut self, only: Option<&str>) -> Result<(), NodeErrorKind> {
        let (ending, staying): (Vec<_>, Vec<_>) =
            self.nodes.drain(..).partition(|(name, ..)| only.is_none_or(|only| only == name));
        for (name, pid, birth) in &ending {
            let pid = if started(*pid) == Some(*birth) { *pid } else { 0 };
            clean(pid, &self.directory.join(name))?;
        }
        self.nodes = staying;
        if !self.nodes.is_empty() {
            let text = serde_json::to_vec_pretty(&self).map_err(io::Error::other)?;
            fs::write(self.directory.join("state.json"), text)?;
            return Ok(());
        }
        if started(self.hub.0) == Some(self.hub.1) {
            for child in crate::process::children(self.hub.0) {
                crate::process::signal(child, rustix::process::Signal::KILL);
            }
            crate::process::signal(self.hub.0, rustix::process::Signal::KILL);
        }
        Ok(remove(&self.directory)?)
    }
}

/// Returns where running testbeds are kept.
pub fn testbeds() -> PathBuf {
    root::cache().join("testbeds")
}

/// Removes what testbeds have left whose owner died before it could: their nodes are dead already,
/// since they live no longer than the pipe to their owner, but cgroups and directories stay.
fn sweep() -> Result<(), NodeErrorKind> {
    for state in State::all() {
        let alive = state.nodes.iter().any(|(_, pid, birth)| started(*pid) == Some(*birth));
        if !state.is_owned() && !alive {
            state.end(None)?;
        }
    }
    Ok(())
}

fn fresh_directory() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    testbeds().join(format!("{}-{number}", std::process::id()))
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Says what this machine lacks for a testbed, before anything is touched.
pub fn preflight() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            "nodes need root: namespaces, mounts and cgroups are what they are made of".to_owned()
        );
    }
    for program in ["unshare", "nsenter", "ip", "debootstrap"] {
        let found: Result<_, CommandError> =
            command::output(Command::new("sh").args(["-c", "command -v \"$1\"", "sh", program]));
        if !found.is_ok_and(|output| output.status.success()) {
            return Err(format!("{program} is missing: run `make setup`, or install it"));
        }
    }
    Ok(())
}
