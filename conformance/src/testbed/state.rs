//! What a testbed writes down, so that others can enter it, and clean up after it when its owner
//! was killed.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::NODES;
use crate::node::containerd::Serves;
use crate::node::{NodeErrorKind, clean};
use crate::process::Process;
use crate::root;

const FILE: &str = "state.json";

/// A recorded testbed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Its directory.
    pub directory: PathBuf,
    /// Who owns it, and ends it. `None` when it stays until `node down`.
    pub owner: Option<Process>,
    /// The process that holds the network namespace.
    pub hub: Option<HubState>,
    /// The nodes that have come up.
    pub nodes: Vec<NodeState>,
}

/// A recorded hub.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct HubState {
    /// The process to kill.
    pub outer: Process,
    /// The process whose network namespace it is.
    pub process: Process,
}

/// A recorded node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeState {
    /// `a` or `b`.
    pub name: String,
    /// Address on the hub's bridge.
    pub address: String,
    /// Who its containerd works for.
    #[serde(default)]
    pub serves: Serves,
    /// The process to kill.
    pub outer: Process,
    /// The node's first process.
    pub init: Process,
}

impl State {
    /// Returns the testbed of `node up`, if there is one.
    pub fn kept() -> Option<Self> {
        Self::read(&kept())
    }

    /// Returns a node that runs.
    pub fn node(&self, name: &str) -> Option<&NodeState> {
        self.nodes.iter().find(|node| node.name == name && node.init.runs())
    }

    /// Returns the hub, when it runs.
    pub fn running_hub(&self) -> Option<HubState> {
        self.hub.filter(|hub| hub.process.runs())
    }

    /// Ends the nodes of this testbed, all or one, and what nobody needs then.
    pub fn end(mut self, only: Option<&str>) -> Result<(), NodeErrorKind> {
        // Also those that are not recorded: they may have been killed while they came up.
        for name in NODES.map(|(name, ..)| name) {
            if only.is_none_or(|only| only == name) {
                let recorded = self.nodes.iter().find(|node| node.name == name);
                clean(recorded.map(|node| node.outer), &self.directory.join(name))?;
            }
        }
        self.nodes.retain(|node| node.init.runs());
        if !self.nodes.is_empty() {
            return Ok(self.write()?);
        }
        if let Some(hub) = self.hub {
            for process in [hub.outer, hub.process] {
                if !process.kill() {
                    return Err(NodeErrorKind::Left(format!("process {}", process.pid)));
                }
            }
        }
        Ok(remove(&self.directory)?)
    }

    /// Writes it down. Replaced whole, so that no reader sees half of it.
    pub(super) fn write(&self) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        let new = self.directory.join("state.json.new");
        fs::write(&new, text)?;
        fs::rename(new, self.directory.join(FILE))
    }

    fn read(directory: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(directory.join(FILE)).ok()?).ok()
    }

    fn is_abandoned(&self) -> bool {
        self.owner.is_some_and(|owner| !owner.runs())
    }
}

/// Returns where running testbeds are kept.
pub(super) fn testbeds() -> PathBuf {
    root::cache().join("testbeds")
}

/// Returns where the testbed of `node up` is kept.
pub(super) fn kept() -> PathBuf {
    testbeds().join("up")
}

/// Removes what testbeds have left whose owner was killed: their nodes die with the pipe to their
/// owner, but cgroups and directories stay.
pub fn sweep() -> Result<(), NodeErrorKind> {
    fs::create_dir_all(testbeds())?;
    let lock = fs::File::create(testbeds().join("sweep.lock"))?;
    flock(lock.file(), FlockOperation::LockExclusive).map_err(io::Error::from)?;
    for entry in fs::read_dir(testbeds())?.flatten() {
        if let Some(state) = State::read(&entry.path()).filter(State::is_abandoned) {
            state.end(None)?;
        }
    }
    Ok(())
}

/// Removes a directory that may be gone already.
pub(super) fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
