//! One node: a root of its own, namespaces of its own, containerd running in it.
//!
//! Needs root: making namespaces, mounts, cgroups and virtual network links is what a node is made
//! of. All of it is done here and in `node/init.sh`, by `unshare`, `nsenter`, `mount` and `ip`.

mod cgroup;
pub mod containerd;
pub mod freezer;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fs_err as fs;

use self::cgroup::{Cgroups, LEAF};
use self::containerd::Serves;
use crate::command::{self, CommandError, wait_until};
use crate::process::{Process, Service, with_log};
use crate::root::{self, Release, RootError};

const INIT: &str = include_str!("node/init.sh");
/// Enters the node's cgroups before anything else, as a process that was started in it would be.
/// From outside, as what is there already: with `nsdelegate`, version 2 lets nobody in who is in the
/// node's cgroup namespace, but not in its cgroup.
const ENTER: &str = r#"node=/proc/$0/root
    while read -r procs; do echo $$ >"$node$procs"; done <"$node/etc/node.cgroups"; exec "$@""#;
/// A killed PID namespace is gone within milliseconds; on a machine that swaps, seconds.
const GONE_TIMEOUT: Duration = Duration::from_secs(30);

/// What a node is made of.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// `a` or `b`.
    pub name: String,
    /// Debian's release.
    pub release: Release,
    /// A directory for the node alone, on a file system that is no overlay.
    pub directory: PathBuf,
    /// Directory of the programs under test, seen as `/srv/bin`.
    pub bin: PathBuf,
    /// Directory shared by all nodes of a testbed, seen as `/srv/share`.
    pub share: PathBuf,
    /// The process that holds the testbed's network.
    pub hub: Process,
    /// Address of the node on the hub's bridge.
    pub address: String,
    /// How long the node lives.
    pub lifetime: Lifetime,
    /// Who its containerd works for.
    pub serves: Serves,
}

/// How long nodes and their network live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// As long as the value in the process that started them, at most.
    Owner,
    /// Until `node down`.
    Kept,
}

/// A running node. Ends when dropped, unless it was told to stay.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    process: Process,
    init: Process,
    stays: bool,
    // Its input is what an owner's node lives by.
    _outer: Service,
}

/// Why a node could not be started or used.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} node {node}")]
pub struct NodeError {
    /// The node's name.
    pub node: String,
    /// What was tried.
    pub operation: &'static str,
    /// What happened.
    #[source]
    pub kind: NodeErrorKind,
}

/// What happened to a node.
#[derive(Debug, thiserror::Error)]
pub enum NodeErrorKind {
    /// Its root could not be made.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Input or output failed.
    #[error("input or output failed")]
    Io(#[from] io::Error),
    /// Something of it is still there.
    #[error("{0} is still there")]
    Left(String),
}

impl Node {
    /// Starts a node and waits until its containerd answers.
    pub fn start(config: NodeConfig, say: &dyn Fn(&str)) -> Result<Self, NodeError> {
        let (name, directory) = (config.name.clone(), config.directory.clone());
        Self::try_start(config, say).map_err(|kind| {
            // Best effort: what made it fail matters more.
            drop(clean(None, &directory));
            NodeError { node: name, operation: "start", kind }
        })
    }

    fn try_start(config: NodeConfig, say: &dyn Fn(&str)) -> Result<Self, NodeErrorKind> {
        let root = root::ensure(config.release, say)?;
        for part in ["upper", "work", "root", "containerd", "kybernate"] {
            fs::create_dir_all(config.directory.join(part))?;
        }
        let cgroups = Cgroups::of(&config.directory)?;
        cgroups.create()?;
        let stays = config.lifetime == Lifetime::Kept;
        let log = config.directory.join("init.log");
        let mut unshare = Command::new("sh");
        unshare
            .args(["-c", &cgroups.enter(), "sh", "unshare"])
            .args(["--mount", "--pid", "--net", "--uts", "--ipc"])
            .args(["--fork", "--kill-child", "--propagation", "private"])
            .args(["bash", "-c", r#"eval "$NODE_INIT""#, "node-init", &config.name])
            .env("NODE_INIT", INIT)
            .env("NODE_NAME", &config.name)
            .env("NODE_DIR", &config.directory)
            .env("NODE_ROOT", &root)
            .env("NODE_BIN", &config.bin)
            .env("NODE_SHARE", &config.share)
            .env("NODE_CONTAINERD", config.serves.config(config.release))
            .env("NODE_CGROUPS", cgroups.v1.join(" "))
            .env("NODE_CGROUP2", cgroups.v2.as_deref().unwrap_or("none"))
            .env("NODE_CGROUP2_LEAF", LEAF)
            .env("NODE_STAY", if stays { "yes" } else { "" })
            .stdin(if stays { Stdio::null() } else { Stdio::piped() })
            .stderr(fs::File::create(&log)?.into_parts().0);
        let mut outer = Service::start(&mut unshare)?;
        let process = outer.process()?;
        outer.wait_for_line("ready").map_err(|error| with_log(error, &log))?;
        let ended = || io::Error::other("the node's first process is gone");
        let init = process.child().ok_or_else(ended)?;
        if stays {
            outer.stay();
        }
        let mut node = Self { config, process, init, stays: false, _outer: outer };
        node.connect()?;
        node.stays = stays;
        Ok(node)
    }

    /// Links the node to the hub's bridge.
    fn connect(&self) -> Result<(), NodeErrorKind> {
        let (hub, name) = (self.config.hub.pid.to_string(), &self.config.name);
        let init = self.init.pid;
        let script = format!(
            "set -e; ip link add veth-{name} type veth peer name eth0 netns {init}; \
             ip link set veth-{name} master br0 up"
        );
        command::run(Command::new("nsenter").args(["-t", &hub, "-n", "sh", "-c", &script]))?;
        let script =
            format!("ip address add {}/24 dev eth0; ip link set eth0 up", self.config.address);
        command::run(self.command(&["sh", "-c", &script]).stdin(Stdio::null()))?;
        Ok(())
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the process that keeps the node alive, as this machine sees it.
    pub const fn process(&self) -> Process {
        self.process
    }

    /// Returns the node's first process, as this machine sees it.
    pub const fn init(&self) -> Process {
        self.init
    }

    /// Returns who its containerd works for.
    pub const fn serves(&self) -> Serves {
        self.config.serves
    }

    /// Returns the node's address on the hub's bridge.
    pub fn address(&self) -> &str {
        &self.config.address
    }

    /// Prepares a command that runs in the node.
    pub fn command(&self, words: &[&str]) -> Command {
        command_in(self.init, words)
    }

    /// Runs a program in the node and returns its output; it must succeed.
    pub fn run(&self, words: &[&str]) -> Result<String, CommandError> {
        command::run(&mut self.command(words))
    }

    /// Does what [`told`] does, in the node.
    pub fn told(&self, words: &[&str]) -> Result<String, CommandError> {
        told(words, |words| self.run(words))
    }

    /// Runs a program in the node, however it ends.
    pub fn output(&self, words: &[&str]) -> Result<Output, CommandError> {
        command::output(&mut self.command(words))
    }

    /// Returns the first process of a container that has a task, as the node sees it: what containerd's
    /// shim has kept beside its bundle.
    pub fn pid_of(&self, namespace: &str, id: &str) -> Option<u32> {
        let bundle = format!("/run/containerd/io.containerd.runtime.v2.task/{namespace}/{id}");
        fs::read_to_string(self.path(&bundle).join("init.pid")).ok()?.parse().ok()
    }

    /// Returns an absolute path of the node as it is seen from outside, to read and write files
    /// there. Never walk it recursively: it leads into the node's `/proc` and `/sys`.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init.pid))
    }

    /// Ends the node and everything in it, and makes sure that nothing is left.
    pub fn end(mut self) -> Result<(), NodeError> {
        self.stays = true;
        clean(Some(self.process), &self.config.directory).map_err(|kind| NodeError {
            node: self.config.name.clone(),
            operation: "end",
            kind,
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.stays {
            // Best effort: whoever wants to know calls `end`.
            drop(clean(Some(self.process), &self.config.directory));
        }
    }
}

/// Runs `ctr run` or `ctr task exec`, which must succeed, and returns all that the program in the container
/// has written, to either of its outputs. `ctr` closes its ends of the pipes when the program has ended,
/// whatever is in them still (containerd, `Task.Delete`, `Process.Delete`): on a busy machine that is all of
/// it. The shim writes everything to a file.
pub fn told(
    words: &[&str],
    run: impl Fn(&[&str]) -> Result<String, CommandError>,
) -> Result<String, CommandError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let file = format!("/run/told-{}-{count}", std::process::id());
    let to = format!("file://{file}");
    let begin = words.iter().position(|word| matches!(*word, "run" | "exec"));
    let (ctr, rest) = words.split_at(begin.map_or(words.len(), |at| at + 1));
    let ran = run(&[ctr, &["--log-uri", &to], rest].concat());
    let text = run(&["sh", "-c", "cat \"$1\" && rm \"$1\"", "sh", &file]);
    ran.and(text)
}

/// Prepares a command that runs in the node whose first process is `init`.
///
/// Killing it does not kill what it started in the node: that is a child in another PID namespace.
pub fn command_in(init: Process, words: &[&str]) -> Command {
    command_in_network(init, init, words)
}

/// Prepares a command that runs in the node whose first process is `init`, but in the network of
/// `network`.
pub fn command_in_network(init: Process, network: Process, words: &[&str]) -> Command {
    let pid = init.pid.to_string();
    let mut command = Command::new("sh");
    command.args(["-c", ENTER, &pid]);
    command.args(["nsenter", "-t", &pid, "-m", "-u", "-i", "-p", "-C", "-r", "-w"]);
    command.arg(format!("--net=/proc/{}/ns/net", network.pid));
    command.args(["/usr/bin/env", "-i", "HOME=/root"]);
    command.arg("PATH=/srv/bin:/usr/sbin:/usr/bin:/sbin:/bin").args(words);
    command
}

/// Ends a node by the process that keeps it alive, and removes its cgroups and its directory.
/// Safe to repeat, and for nodes that never came up.
pub fn clean(outer: Option<Process>, directory: &Path) -> Result<(), NodeErrorKind> {
    let init = outer.and_then(Process::child);
    for process in [outer, init].into_iter().flatten() {
        // The PID namespace ends with its first process; the kernel waits for all others.
        if !process.kill() {
            return Err(NodeErrorKind::Left(format!("process {}", process.pid)));
        }
    }
    let cgroups = Cgroups::of(directory)?;
    let mut left = None;
    let gone = || {
        left = cgroups.remove();
        left.is_none()
    };
    if !wait_until(GONE_TIMEOUT, gone) {
        let left = left.map(|path| path.display().to_string());
        return Err(NodeErrorKind::Left(left.unwrap_or_default()));
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}
