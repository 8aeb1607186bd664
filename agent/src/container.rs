//! A source container as containerd describes it.

use std::collections::BTreeMap;
use std::path::Path;

use containerd_client::services::v1::Container;
use kybernate_spec::checkpoint::{NeededMount, Needs};
use serde::Deserialize;

/// Label of Kubernetes with the pod's namespace.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label of Kubernetes with the container's name in its pod.
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Annotation of a container with CRIU's configuration file (runc, "checkpoint").
const CRIU_CONFIG: &str = "org.criu.config";

/// Devices every container gets from its runtime.
const DEFAULT_DEVICES: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/console",
    "/dev/ptmx",
];

/// What we read of a runtime specification. Only facts: nothing of it is handed to a runtime.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SourceSpec {
    annotations: BTreeMap<String, String>,
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

impl SourceSpec {
    /// Reads a container's specification.
    pub(crate) fn of(container: &Container) -> Result<Self, serde_json::Error> {
        let spec = container.spec.as_ref().map(|spec| &*spec.value).unwrap_or_default();
        serde_json::from_slice(spec)
    }

    /// Whether its processes have ids that others have too.
    pub(crate) fn shares_pid_namespace(&self) -> bool {
        let pid = self.linux.namespaces.iter().find(|namespace| namespace.kind == "pid");
        pid.is_none_or(|namespace| !namespace.path.is_empty())
    }

    /// Whether it has a terminal.
    pub(crate) const fn has_terminal(&self) -> bool {
        self.process.terminal
    }

    /// Returns where something is mounted.
    pub(crate) fn mount_points(&self) -> Vec<String> {
        self.mounts.iter().map(|mount| mount.destination.clone()).collect()
    }

    /// Returns the file that runc makes CRIU read for this container, when it names one.
    pub(crate) fn criu_config(&self) -> Option<&Path> {
        self.annotations.get(CRIU_CONFIG).map(Path::new)
    }

    /// Returns what the container has around it.
    pub(crate) fn needs(&self) -> Needs {
        let has = |kind: &str| self.linux.namespaces.iter().any(|namespace| namespace.kind == kind);
        let host = ["network", "pid", "ipc", "uts"].into_iter().filter(|kind| !has(kind));
        let devices = self.linux.devices.iter().map(|device| device.path.clone());
        Needs {
            mounts: self.mounts.iter().map(SpecMount::needed).collect(),
            devices: devices.filter(|path| !DEFAULT_DEVICES.contains(&&**path)).collect(),
            host_namespaces: host.map(str::to_owned).collect(),
            ..Needs::default()
        }
    }

    /// Returns the directory on this node that is mounted on /dev/shm, when it comes from outside:
    /// CRIU dumps only what is the container's own.
    pub(crate) fn shared_memory(&self) -> Option<&Path> {
        // A later one covers those before it.
        let mount = self.mounts.iter().rev().find(|mount| mount.destination == "/dev/shm")?;
        mount.is_external().then(|| Path::new(&*mount.source))
    }
}

impl SpecMount {
    fn is_external(&self) -> bool {
        self.kind == "bind"
            || self.options.iter().any(|option| option == "bind" || option == "rbind")
    }

    fn needed(&self) -> NeededMount {
        NeededMount {
            destination: self.destination.clone(),
            kind: if self.is_external() { "bind".to_owned() } else { self.kind.clone() },
            options: self.options.clone(),
            external: self.is_external(),
        }
    }
}

/// Returns the namespace a container belongs to: its pod's, else containerd's.
pub(crate) fn namespace_of(container: &Container, containerd_namespace: &str) -> String {
    let label = container.labels.get(POD_NAMESPACE);
    label.cloned().unwrap_or_else(|| containerd_namespace.to_owned())
}

/// Returns the name a container is known by: in its pod, else containerd's id.
pub(crate) fn name_of(container: &Container) -> String {
    container.labels.get(CONTAINER_NAME).cloned().unwrap_or_else(|| container.id.clone())
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
        let more = spec(
            r#"{"process":{"terminal":true},"annotations":{"org.criu.config":"/x"},
                "mounts":[{"destination":"/data"}]}"#,
        );
        assert!(more.has_terminal() && more.mount_points() == ["/data"]);
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
