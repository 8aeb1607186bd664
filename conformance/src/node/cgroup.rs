//! One cgroup per node in every hierarchy; the node's cgroup namespace makes it the root there.
//!
//! So nodes have the same paths inside, and never share a cgroup: not with the machine, not with
//! each other, not with those of another testbed. Works where the hierarchies are version 1, where
//! the only one is version 2, and where both are mounted.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::Digest;

const MOUNTS: &str = "/sys/fs/cgroup";
/// Where a node's own processes are in version 2: a cgroup that hands on controllers to containers
/// holds no processes itself.
pub(super) const LEAF: &str = "init";

/// The cgroups of a node, one per hierarchy.
#[derive(Debug)]
pub(super) struct Cgroups {
    /// Names of the version 1 hierarchies, below the mount point.
    pub(super) v1: Vec<String>,
    /// The version 2 hierarchy, below the mount point; empty when it is the mount point itself.
    pub(super) v2: Option<String>,
    name: String,
}

impl Cgroups {
    /// Returns the cgroups of the node whose directory this is; they need not exist.
    pub(super) fn of(directory: &Path) -> io::Result<Self> {
        let name = name_of(directory);
        if Path::new(MOUNTS).join("cgroup.controllers").exists() {
            return Ok(Self { v1: Vec::new(), v2: Some(String::new()), name });
        }
        let mut found = Self { v1: Vec::new(), v2: None, name };
        for entry in fs::read_dir(MOUNTS)? {
            let entry = entry?;
            let hierarchy = entry.file_name().to_string_lossy().into_owned();
            // `cpu,cpuacct` is mounted once and linked to twice.
            if !entry.path().join("cgroup.procs").exists() || entry.path().is_symlink() {
                continue;
            }
            if entry.path().join("cgroup.controllers").exists() {
                found.v2 = Some(hierarchy);
            } else {
                found.v1.push(hierarchy);
            }
        }
        found.v1.sort();
        Ok(found)
    }

    /// Makes them.
    pub(super) fn create(&self) -> io::Result<()> {
        if self.is_unified() {
            // systemd hands these on already. Where it does not, containers have no such limits,
            // and what cannot be had shows when one asks for them.
            for controller in ["cpu", "memory", "pids"] {
                let control = Path::new(MOUNTS).join("cgroup.subtree_control");
                drop(fs::write(control, format!("+{controller}")));
            }
        }
        for path in self.paths() {
            fs::create_dir_all(&path)?;
            let Some(hierarchy) = path.parent() else { continue };
            // A version 1 cpuset without processors or memory nodes takes no processes.
            if path.join("cpuset.cpu_exclusive").exists() && path.join("tasks").exists() {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    fs::write(path.join(file), fs::read(hierarchy.join(file))?)?;
                }
                fs::write(path.join("cgroup.clone_children"), "1")?;
            }
        }
        self.leaf().map_or(Ok(()), fs::create_dir_all)
    }

    /// Returns a shell script that moves itself into them, makes them the root of a cgroup
    /// namespace, and becomes its arguments.
    pub(super) fn enter(&self) -> String {
        let enter = |path: &Path| format!("echo $$ >{}/cgroup.procs", path.display());
        let moves: Vec<String> = self.paths().map(|path| enter(&path)).collect();
        let leaf = self.leaf().map_or_else(|| "true".to_owned(), |leaf| enter(&leaf));
        let inner = format!("{leaf} && exec \"$@\"");
        format!("{} && exec unshare --cgroup sh -c '{inner}' sh \"$@\"", moves.join(" && "))
    }

    /// Removes them with all below. Returns the first that is still in use, if any.
    pub(super) fn remove(&self) -> Option<PathBuf> {
        self.paths().find(|path| !remove(path))
    }

    /// Returns where they are.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        let hierarchies = self.v1.iter().chain(&self.v2);
        hierarchies.map(|hierarchy| Path::new(MOUNTS).join(hierarchy).join(&self.name))
    }

    fn is_unified(&self) -> bool {
        self.v2.as_deref() == Some("")
    }

    /// Returns where the node's own processes are in version 2.
    fn leaf(&self) -> Option<PathBuf> {
        let hierarchy = self.v2.as_ref()?;
        Some(Path::new(MOUNTS).join(hierarchy).join(&self.name).join(LEAF))
    }
}

/// The node's directory is its identity, wherever the testbed is kept.
fn name_of(directory: &Path) -> String {
    let digest = Digest::of(directory.as_os_str().as_encoded_bytes());
    let short = digest.hex().get(..12).unwrap_or_default();
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    format!("kybernate-{short}-{name}")
}

/// Removes a cgroup with its children. Returns whether it is gone.
fn remove(path: &Path) -> bool {
    // In version 1, what is frozen does not die.
    let freezer = path.join("freezer.state");
    if freezer.exists() {
        // Of the root there is none; of what is gone meanwhile neither.
        drop(fs::write(freezer, "THAWED"));
    }
    if let Ok(entries) = fs::read_dir(path) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove(&entry.path());
            }
        }
    }
    drop(fs::remove_dir(path));
    !path.exists()
}
