//! One node: a root of its own, namespaces of its own, containerd running in it.
//!
//! Needs root: making namespaces, mounts, cgroups and virtual network links is what a node is made
//! of. All of it is done here and in `node/init.sh`, by `unshare`, `nsenter`, `mount` and `ip`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fs_err as fs;
use rustix::process::Signal;

use crate::command::{self, CommandError, wait_until};
use crate::process::{Service, children, signal, started};
use crate::root::{self, Release, RootError};

const INIT: &str = include_str!("node/init.sh");
const CGROUPS: &str = "/sys/fs/cgroup";
/// Enters the node's cgroup before anything else, as a process that was started in it would.
const ENTER: &str =
    r#"for procs in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >"$procs"; done; exec "$@""#;
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
    /// Process id of the testbed's network hub.
    pub hub: u32,
    /// Address of the node on the hub's bridge.
    pub address: String,
    /// How long the node lives.
    pub lifetime: Lifetime,
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
    outer: Service,
    init: u32,
    stays: bool,
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
        let name = config.name.clone();
        Self::try_start(config, say).map_err(|kind| NodeError {
            node: name,
            operation: "start",
            kind,
        })
    }

    fn try_start(config: NodeConfig, say: &dyn Fn(&str)) -> Result<Self, NodeErrorKind> {
        let root = root::ensure(config.release, say)?;
        for part in ["upper", "work", "root", "containerd", "kybernate"] {
            fs::create_dir_all(config.directory.join(part))?;
        }
        let stays = config.lifetime == Lifetime::Kept;
        let cgroup = cgroup_name(&config.directory);
        let hierarchies = make_cgroups(&cgroup)?;
        let mut unshare = Command::new("sh");
        unshare
            .args(["-c", &enter_cgroup(&cgroup, &hierarchies), "sh", "unshare"])
            .args(["--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"])
            .args(["--fork", "--kill-child", "--propagation", "private", "bash", "-c", INIT])
            .env("NODE_NAME", &config.name)
            .env("NODE_DIR", &config.directory)
            .env("NODE_ROOT", &root)
            .env("NODE_BIN", &config.bin)
            .env("NODE_SHARE", &config.share)
            .env("NODE_CGROUPS", hierarchies.v1.join(" "))
            .env("NODE_CGROUP2", hierarchies.v2.as_deref().unwrap_or_default())
            .env("NODE_STAY", if stays { "yes" } else { "" })
            .stdin(if stays { Stdio::null() } else { Stdio::piped() })
            .stderr(fs::File::create(config.directory.join("init.log"))?.into_parts().0);
        let mut outer = Service::start(&mut unshare)?;
        let ready = outer.wait_for_line("ready");
        ready.map_err(|error| with_log(error, &config.directory.join("init.log")))?;
        let init = *children(outer.pid())
            .first()
            .ok_or_else(|| io::Error::other("the node's first process is gone"))?;
        if stays {
            outer.stay();
        }
        let node = Self { config, outer, init, stays };
        node.connect()?;
        Ok(node)
    }

    /// Links the node to the hub's bridge.
    fn connect(&self) -> Result<(), NodeErrorKind> {
        let (hub, name, init) = (self.config.hub.to_string(), &self.config.name, self.init);
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

    /// Returns the process id of the process that keeps the node alive, seen from outside.
    pub fn pid(&self) -> u32 {
        self.outer.pid()
    }

    /// Returns the process id of the node's first process, seen from outside.
    pub const fn init(&self) -> u32 {
        self.init
    }

    /// Prepares a command that runs in the node.
    pub fn command(&self, words: &[&str]) -> Command {
        command_in(self.init, words)
    }

    /// Runs a program in the node and returns its output; it must succeed.
    pub fn run(&self, words: &[&str]) -> Result<String, CommandError> {
        command::run(&mut self.command(words))
    }

    /// Runs a program in the node, however it ends.
    pub fn output(&self, words: &[&str]) -> Result<Output, CommandError> {
        command::output(&mut self.command(words))
    }

    /// Returns a path of the node as it is seen from outside.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Ends the node and everything in it, and makes sure that nothing is left.
    pub fn end(mut self) -> Result<(), NodeError> {
        self.stays = false;
        let (name, outer, directory) =
            (self.config.name.clone(), self.outer.pid(), self.config.directory.clone());
        drop(self);
        clean(outer, &directory).map_err(|kind| NodeError { node: name, operation: "end", kind })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.stays {
            // Best effort: whoever wants to know calls `end`.
            drop(clean(self.outer.pid(), &self.config.directory));
        }
    }
}

/// Prepares a command that runs in the node whose first process is `init`.
pub fn command_in(init: u32, words: &[&str]) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["-t", &init.to_string(), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]);
    command.args([
        "/usr/bin/env",
        "-i",
        "PATH=/srv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME=/root",
    ]);
    command.args(["sh", "-c", ENTER, "sh"]).args(words);
    command
}

/// Kills a node by the process that keeps it alive, and removes its cgroups and its directory.
pub fn clean(outer: u32, directory: &Path) -> Result<(), NodeErrorKind> {
    let init = children(outer).first().copied();
    let birth = init.and_then(started);
    signal(outer, Signal::KILL);
    if let Some(init) = init {
        // The PID namespace ends with its first process; the kernel waits for all others.
        signal(init, Signal::KILL);
        if !wait_until(GONE_TIMEOUT, || started(init).is_none() || started(init) != birth) {
            return Err(NodeErrorKind::Left(format!("process {init}")));
        }
    }
    let cgroup = cgroup_name(directory);
    for hierarchy in fs::read_dir(CGROUPS)?.flatten() {
        let path = hierarchy.path().join(&cgroup);
        if !wait_until(GONE_TIMEOUT, || remove_cgroup(&path)) {
            return Err(NodeErrorKind::Left(path.display().to_string()));
        }
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

struct Hierarchies {
    v1: Vec<String>,
    v2: Option<String>,
}

/// One cgroup per node in every hierarchy; the node's cgroup namespace makes it the root there.
fn make_cgroups(name: &str) -> io::Result<Hierarchies> {
    let mut hierarchies = Hierarchies { v1: Vec::new(), v2: None };
    for entry in fs::read_dir(CGROUPS)? {
        let entry = entry?;
        let hierarchy = entry.file_name().to_string_lossy().into_owned();
        if !entry.path().join("cgroup.procs").exists() || entry.path().is_symlink() {
            continue;
        }
        let path = entry.path().join(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        // A cpuset without processors or memory nodes takes no processes.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if path.join(file).exists() && hierarchy == "cpuset" {
                fs::write(path.join(file), fs::read(entry.path().join(file))?)?;
            }
        }
        if path.join("cgroup.clone_children").exists() && hierarchy == "cpuset" {
            fs::write(path.join("cgroup.clone_children"), "1")?;
        }
        if path.join("cgroup.controllers").exists() {
            hierarchies.v2 = Some(hierarchy);
        } else {
            hierarchies.v1.push(hierarchy);
        }
    }
    hierarchies.v1.sort();
    Ok(hierarchies)
}

fn enter_cgroup(name: &str, hierarchies: &Hierarchies) -> String {
    let all = hierarchies.v1.iter().chain(&hierarchies.v2);
    let moves =
        all.map(|hierarchy| format!("echo $$ >{CGROUPS}/{hierarchy}/{name}/cgroup.procs\n"));
    format!("set -e\n{}exec \"$@\"", moves.collect::<String>())
}

fn cgroup_name(directory: &Path) -> String {
    let parts = directory.components().rev().take(2).map(|part| part.as_os_str().to_string_lossy());
    let mut parts: Vec<_> = parts.collect();
    parts.push("kybernate".into());
    parts.reverse();
    parts.join("-")
}

/// Removes a cgroup with its children. Returns whether it is gone.
fn remove_cgroup(path: &Path) -> bool {
    if let Ok(entries) = fs::read_dir(path) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove_cgroup(&entry.path());
            }
        }
    }
    drop(fs::remove_dir(path));
    !path.exists()
}

fn with_log(error: io::Error, log: &Path) -> io::Error {
    let text = fs::read_to_string(log).unwrap_or_default();
    io::Error::new(error.kind(), format!("{error}; {}", text.trim()))
}
