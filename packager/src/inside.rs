//! What a container was doing when it was dumped, read from CRIU's images: processes, threads,
//! memory, open files, sockets, and what was around them.
//!
//! The images are claims of whoever wrote them, and may be anything. What cannot be read is told as
//! a [`Problem`] beside the rest; nothing is followed further than the bounds of `source`.

mod around;
mod files;
mod images;
pub(crate) mod memory;
mod names;
mod process;
pub mod secret;
mod sockets;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use schemars::JsonSchema;
use serde::Serialize;

pub use self::around::{
    Cgroup, IpcKind, IpcObject, Lock, Mount, Namespace, NamespaceKind, UserMap,
};
pub use self::files::{Access, FileKind, OpenFile};
pub use self::memory::{KindBytes, MappedRegion, MemoryKind};
pub use self::process::{Credentials, Process, ProcessState, Seccomp, Thread};
pub use self::sockets::{Socket, SocketState};
use self::source::Source;
use crate::stored::StoredPages;

/// What is inside a checkpoint. Claims of whoever took it; CRIU acts on the same images.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Inside {
    /// Version of CRIU's images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_version: Option<u32>,
    /// Security module that processes had profiles of: `selinux` or `apparmor`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_module: Option<String>,
    /// Plugins of CRIU that took part; each must be there on restore.
    pub plugins: Vec<String>,
    /// Processes: parents before their children, these in the order of the dump.
    pub processes: Vec<Process>,
    /// Memory of all processes by kind; what several share is counted once.
    pub memory: Vec<KindBytes>,
    /// Sockets, each once however many processes hold it.
    pub sockets: Vec<HeldSocket>,
    /// Namespaces that processes live in.
    pub namespaces: Vec<Namespace>,
    /// Mounts of the processes' own mount namespaces.
    pub mounts: Vec<Mount>,
    /// Device files that are open or mapped.
    pub devices: Vec<String>,
    /// Where in the hierarchies of cgroups the processes were.
    pub cgroups: Vec<Cgroup>,
    /// Locks on files.
    pub locks: Vec<Lock>,
    /// Objects of System V in the processes' own IPC namespaces.
    pub ipc: Vec<IpcObject>,
    /// What could not be read.
    pub problems: Vec<Problem>,
}

/// A socket and who holds it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeldSocket {
    /// The socket.
    #[serde(flatten)]
    pub socket: Socket,
    /// Descriptors that it is open as.
    pub held_by: Vec<Holder>,
}

/// A descriptor of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The process.
    pub pid: u32,
    /// The descriptor.
    pub fd: u32,
}

/// Something that could not be read, or is more than is looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// The image.
    pub image: String,
    /// What is wrong with it.
    pub message: String,
}

impl Inside {
    /// Reads a directory with all images of a dump, without its pages. `stored` knows which pages
    /// have content. Blocks.
    pub(crate) fn read(directory: &Path, stored: &StoredPages) -> std::io::Result<Self> {
        let mut source = Source::open(directory)?;
        let mut inside = Self::default();
        let inventory: crate::criu::Inventory =
            source.one("inventory.img", crate::criu::Magic::INVENTORY).unwrap_or_default();
        inside.image_version = Some(inventory.img_version).filter(|version| *version != 0);
        inside.security_module = match inventory.lsm {
            Some(1) => Some("selinux".to_owned()),
            Some(2) => Some("apparmor".to_owned()),
            _ => None,
        };
        inside.plugins = inventory.plugins.map(|plugins| plugins.names).unwrap_or_default();
        let files = files::Table::read(&mut source);
        let tree = process::Tree::read(&mut source);
        let mut accounts = memory::Accounts::new(stored);
        inside.processes = tree.processes(&mut source, &files, &mut accounts);
        inside.memory = accounts.total();
        inside.devices = devices(&inside.processes);
        inside.sockets = sockets(&inside.processes);
        let host = inventory.root_ids.unwrap_or_default();
        inside.namespaces = around::namespaces(&mut source, tree.ids(), host);
        inside.mounts = around::mounts(&mut source);
        inside.cgroups = around::cgroups(&mut source);
        inside.locks = around::locks(&mut source);
        inside.ipc = around::ipc(&mut source);
        inside.problems = source.problems();
        Ok(inside)
    }
}

fn devices(processes: &[Process]) -> Vec<String> {
    let mut found = BTreeSet::new();
    for process in processes {
        let open = process.files.iter().filter_map(|file| match &file.kind {
            FileKind::Device { path, .. } => Some(path),
            _ => None,
        });
        let mapped = process.regions.iter().filter_map(|region| region.path.as_ref());
        found.extend(open.chain(mapped.filter(|path| path.starts_with("/dev/"))).cloned());
    }
    // Shared memory is not a device, though it has a name there.
    found.retain(|path| !path.starts_with("/dev/shm/"));
    found.into_iter().collect()
}

fn sockets(processes: &[Process]) -> Vec<HeldSocket> {
    let mut found: BTreeMap<u32, HeldSocket> = BTreeMap::new();
    for process in processes {
        for file in &process.files {
            let FileKind::Socket(socket) = &file.kind else { continue };
            let held = found
                .entry(file.id)
                .or_insert_with(|| HeldSocket { socket: socket.clone(), held_by: Vec::new() });
            held.held_by.push(Holder { pid: process.pid, fd: file.fd });
        }
    }
    found.into_values().collect()
}

#[cfg(test)]
mod tests;
