//! Runtime specifications: what is read of foreign ones, and what containerd puts into its own.
//!
//! The reader is lenient on purpose. It takes what we decide by and leaves the rest, also what a
//! later version of the specification adds, where it is: a strict one would refuse a container for
//! a field that is none of our business.

pub mod defaults;

use std::collections::BTreeMap;
use std::path::Path;

use kybernate_spec::checkpoint::{NeededMount, Needs};
use serde::Deserialize;

use self::defaults::DEVICES;

/// Annotation of a container with CRIU's configuration file (runc, "checkpoint").
const CRIU_CONFIG: &str = "org.criu.config";

/// Where POSIX shared memory is.
const SHARED_MEMORY: &str = "/dev/shm";

/// What is read of a runtime specification. Only facts: nothing of it is handed to a runtime.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SourceSpec {
    /// The annotations, of which only those with a known name mean anything.
    pub annotations: BTreeMap<String, String>,
    process: SpecProcess,
    mounts: Vec<SpecMount>,
    linux: SpecLinux,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecProcess {
    terminal: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecMount {
    destination: String,
    #[serde(rename = "type")]
    kind: String,
    source: String,
    options: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecLinux {
    namespaces: Vec<SpecNamespace>,
    devices: Vec<SpecDevice>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecNamespace {
    #[serde(rename = "type")]
    kind: String,
    path: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecDevice {
    path: String,
}

/// The part of a container image's config that says how it is run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct ImageRun {
    /// Who runs it: names or numbers of user and group, with a `:` between them.
    pub user: String,
    /// The environment, as `NAME=VALUE`.
    pub env: Option<Vec<String>>,
    /// What comes first in the command.
    pub entrypoint: Option<Vec<String>>,
    /// The rest of the command.
    pub cmd: Option<Vec<String>>,
    /// Where it starts; nothing for the root directory.
    pub working_dir: String,
}

impl SourceSpec {
    /// Whether its processes have ids that others have too.
    pub fn shares_pid_namespace(&self) -> bool {
        let pid = self.linux.namespaces.iter().find(|namespace| namespace.kind == "pid");
        pid.is_none_or(|namespace| !namespace.path.is_empty())
    }

    /// Whether a network namespace is made for it, in which nothing is up before it starts.
    pub fn has_own_network(&self) -> bool {
        let mut own = self.linux.namespaces.iter().filter(|namespace| namespace.path.is_empty());
        own.any(|namespace| namespace.kind == "network")
    }

    /// Whether it has a terminal, which does not move with a container.
    pub const fn has_terminal(&self) -> bool {
        self.process.terminal
    }

    /// Returns where something is mounted.
    pub fn mount_points(&self) -> Vec<String> {
        self.mounts.iter().map(|mount| mount.destination.clone()).collect()
    }

    /// Returns the file that runc makes CRIU read for this container, when it names one.
    pub fn criu_config(&self) -> Option<&Path> {
        self.annotations.get(CRIU_CONFIG).map(Path::new)
    }

    /// Whether something of the node is mounted here.
    pub fn is_mounted_on(&self, destination: &str) -> bool {
        let mut bound = self.mounts.iter().filter(|mount| mount.is_external());
        bound.any(|mount| mount.destination == destination)
    }

    /// Returns the directory of the node that is mounted on /dev/shm, when it comes from outside:
    /// CRIU dumps only what is the container's own.
    pub fn shared_memory(&self) -> Option<&Path> {
        self.bound(SHARED_MEMORY)
    }

    /// Returns what of the node is mounted here.
    pub fn bound(&self, destination: &str) -> Option<&Path> {
        // A later one covers those before it.
        let mount = self.mounts.iter().rev().find(|mount| mount.destination == destination)?;
        mount.is_external().then(|| Path::new(&*mount.source))
    }

    /// Returns what of the node is mounted in it, and where, first things first.
    pub fn binds(&self) -> impl Iterator<Item = (&str, &Path)> {
        let external = self.mounts.iter().filter(|mount| mount.is_external());
        external.map(|mount| (&*mount.destination, Path::new(&*mount.source)))
    }

    /// Returns what the container has around it.
    pub fn needs(&self) -> Needs {
        let has = |kind: &str| self.linux.namespaces.iter().any(|namespace| namespace.kind == kind);
        let host = ["network", "pid", "ipc", "uts"].into_iter().filter(|kind| !has(kind));
        let devices = self.linux.devices.iter().map(|device| device.path.clone());
        Needs {
            mounts: self.mounts.iter().map(SpecMount::needed).collect(),
            devices: devices.filter(|path| !DEVICES.contains(&&**path)).collect(),
            host_namespaces: host.map(str::to_owned).collect(),
            ..Needs::default()
        }
    }
}

impl SpecMount {
    fn is_external(&self) -> bool {
        self.kind == "bind"
            || self.options.iter().any(|option| option == "bind" || option == "rbind")
    }

    fn needed(&self) -> NeededMount {
        let external = self.is_external();
        NeededMount {
            destination: self.destination.clone(),
            kind: if external { "bind".to_owned() } else { self.kind.clone() },
            options: self.options.clone(),
            external,
        }
    }
}

impl ImageRun {
    /// Returns the command.
    pub fn arguments(&self) -> Vec<String> {
        let parts = self.entrypoint.iter().flatten().chain(self.cmd.iter().flatten());
        let arguments: Vec<String> = parts.cloned().collect();
        // A runtime wants one, and a restored container never runs it.
        if arguments.is_empty() { vec!["/".to_owned()] } else { arguments }
    }

    /// Returns the environment, with a search path.
    pub fn environment(&self) -> Vec<String> {
        const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let mut environment = self.env.clone().unwrap_or_default();
        if !environment.iter().any(|entry| entry.starts_with("PATH=")) {
            environment.push(PATH.to_owned());
        }
        environment
    }

    /// Returns the directory it starts in.
    pub fn directory(&self) -> &str {
        Some(&*self.working_dir).filter(|cwd| cwd.starts_with('/')).unwrap_or("/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> SourceSpec {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_cannot_be_given_back_is_known() {
        let own = spec(r#"{"linux":{"namespaces":[{"type":"pid"}]}}"#);
        assert!(!own.shares_pid_namespace() && !own.has_terminal());
        assert_eq!(own.criu_config(), None);
        let joined = spec(r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#);
        assert!(joined.shares_pid_namespace() && spec("{}").shares_pid_namespace());
        let own = spec(r#"{"linux":{"namespaces":[{"type":"network"}]}}"#);
        let joined = spec(r#"{"linux":{"namespaces":[{"type":"network","path":"/run/netns/x"}]}}"#);
        assert!(own.has_own_network() && !joined.has_own_network());
        assert!(!spec("{}").has_own_network());
        let more = spec(
            r#"{"process":{"terminal":true},"annotations":{"org.criu.config":"/x"},
                "mounts":[{"destination":"/data"}]}"#,
        );
        assert!(more.has_terminal() && more.mount_points() == ["/data"]);
        assert!(!more.is_mounted_on("/data"));
        assert_eq!(more.criu_config(), Some(Path::new("/x")));
    }

    #[test]
    fn only_a_bound_shared_memory_is_captured() {
        let own = spec(r#"{"mounts":[{"destination":"/dev/shm","type":"tmpfs","source":"shm"}]}"#);
        assert_eq!(own.shared_memory(), None);
        let bound = spec(
            r#"{"mounts":[{"destination":"/dev/shm","type":"bind","source":"/run/x/shm",
                "options":["rbind","ro"]}]}"#,
        );
        assert_eq!(bound.shared_memory(), Some(Path::new("/run/x/shm")));
        assert!(bound.is_mounted_on("/dev/shm"));
        let covered = spec(
            r#"{"mounts":[{"destination":"/dev/shm","type":"tmpfs","source":"shm"},
                {"destination":"/dev/shm","type":"bind","source":"/run/x/shm"}]}"#,
        );
        assert_eq!(covered.shared_memory(), Some(Path::new("/run/x/shm")));
        assert!(bound.needs().mounts[0].external);
    }

    #[test]
    fn needs_name_what_is_beyond_the_defaults() {
        let needs = spec(
            r#"{"linux":{"namespaces":[{"type":"pid"},{"type":"ipc"},{"type":"uts"}],
                "devices":[{"path":"/dev/null"},{"path":"/dev/kvm"}]}}"#,
        )
        .needs();
        assert_eq!(needs.host_namespaces, ["network"]);
        assert_eq!(needs.devices, ["/dev/kvm"]);
    }
}
