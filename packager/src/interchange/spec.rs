//! Runtime specifications: facts out of a foreign one, and one for a runtime that wants it.
//!
//! An artifact of ours holds no specification: a restorer builds it from what the node allows. The
//! foreign formats hold one and their restorers take it as it is.

use std::collections::BTreeMap;

use kybernate_spec::checkpoint::{CheckpointConfig, NeededMount, Needs};
use serde::Deserialize;
use serde_json::{Value, json};

use super::ForeignError;

/// Version of the runtime specification that every runc of this decade reads.
const OCI_VERSION: &str = "1.0.2";

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

/// Devices every container may use: type, major, minor (any, when absent).
const ALLOWED_DEVICES: &[(u32, Option<u32>)] = &[
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
];

/// Capabilities of a container for which nothing is said.
const CAPABILITIES: &[&str] = &[
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// What containerd hides from containers.
const MASKED: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/proc/scsi",
];

/// What containers may look at but not change.
const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// What the facts are read from. All else of a foreign specification is left where it is.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SourceSpec {
    pub(crate) annotations: BTreeMap<String, String>,
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
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SpecDevice {
    path: String,
}

/// The part of an image's config that says how it is run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct ImageRun {
    user: String,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: String,
}

/// What a specification is written from.
#[derive(Debug)]
pub(crate) struct Ingredients<'a> {
    pub(crate) config: &'a CheckpointConfig,
    pub(crate) run: &'a ImageRun,
    /// For each mount from outside what is mounted there: destination, source.
    pub(crate) sources: &'a BTreeMap<String, String>,
    /// Annotations by which other tools know the container.
    pub(crate) annotations: BTreeMap<String, String>,
}

impl SourceSpec {
    /// Refuses what no agent would take: a terminal does not move with a container.
    pub(crate) fn check(&self) -> Result<(), ForeignError> {
        if self.process.terminal {
            return Err(ForeignError::Content("the container has a terminal".to_owned()));
        }
        Ok(())
    }

    /// Whether something of the node was mounted here.
    pub(crate) fn is_mounted_on(&self, destination: &str) -> bool {
        let mut needed = self.mounts.iter().map(SpecMount::needed);
        needed.any(|mount| mount.external && mount.destination == destination)
    }

    /// Returns what the container had around it.
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
}

impl SpecMount {
    fn needed(&self) -> NeededMount {
        let external = self.kind == "bind"
            || self.options.iter().any(|option| option == "bind" || option == "rbind");
        NeededMount {
            destination: self.destination.clone(),
            kind: if external { "bind".to_owned() } else { self.kind.clone() },
            options: self.options.clone(),
            external,
        }
    }
}

/// Writes a specification in which the checkpoint can be restored. The processes themselves, their
/// arguments and their rights come out of CRIU's images; this is what is around them.
pub(crate) fn write(from: &Ingredients<'_>) -> Value {
    let (config, run) = (from.config, from.run);
    let identity = &config.needs.identity;
    let known: Vec<&str> = identity.capabilities.iter().map(String::as_str).collect();
    let capabilities = if known.is_empty() { CAPABILITIES } else { &known };
    let host = &config.needs.host_namespaces;
    let namespaces = ["pid", "ipc", "uts", "mount", "network"]
        .into_iter()
        .filter(|kind| !host.iter().any(|host| host == kind))
        .map(|kind| json!({ "type": kind }));
    let (uid, gid) = user(config, run);
    json!({
        "ociVersion": OCI_VERSION,
        "process": {
            "user": { "uid": uid, "gid": gid },
            "args": run.arguments(),
            "env": run.environment(),
            "cwd": Some(&*run.working_dir).filter(|cwd| cwd.starts_with('/')).unwrap_or("/"),
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024 }],
            "noNewPrivileges": identity.no_new_privileges,
        },
        "root": { "path": "rootfs" },
        "mounts": mounts(from),
        "annotations": from.annotations,
        "linux": {
            "resources": { "devices": device_rules(), "cpu": { "shares": 1024 } },
            "cgroupsPath": cgroup(config),
            "namespaces": namespaces.collect::<Vec<_>>(),
            "maskedPaths": MASKED,
            "readonlyPaths": READ_ONLY,
        },
    })
}

impl ImageRun {
    fn arguments(&self) -> Vec<String> {
        let parts = self.entrypoint.iter().flatten().chain(self.cmd.iter().flatten());
        let arguments: Vec<String> = parts.cloned().collect();
        // A runtime wants one, and a restored container never runs it.
        if arguments.is_empty() { vec!["/".to_owned()] } else { arguments }
    }

    fn environment(&self) -> Vec<String> {
        const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let mut environment = self.env.clone().unwrap_or_default();
        if !environment.iter().any(|entry| entry.starts_with("PATH=")) {
            environment.push(PATH.to_owned());
        }
        environment
    }
}

/// Returns whom a later `exec` runs as: the image's user where it is a number, else the first that
/// the processes had.
fn user(config: &CheckpointConfig, run: &ImageRun) -> (u32, u32) {
    let identity = &config.needs.identity;
    let mut parts = run.user.split(':').map(str::parse::<u32>);
    let uid = parts.next().and_then(Result::ok);
    let gid = parts.next().and_then(Result::ok);
    let first = identity.uids.first().copied();
    let group = identity.gids.first().copied();
    (uid.or(first).unwrap_or_default(), gid.or(group).unwrap_or_default())
}

/// Returns the cgroup that containerd gives a container of this name.
fn cgroup(config: &CheckpointConfig) -> String {
    let part = |text: &Option<String>, other: &str| {
        let plain = |text: &&String| {
            !text.starts_with('.')
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        text.as_ref().filter(plain).map_or_else(|| other.to_owned(), Clone::clone)
    };
    let source = &config.source;
    format!("/{}/{}", part(&source.namespace, "default"), part(&source.container, "checkpoint"))
}

fn mounts(from: &Ingredients<'_>) -> Vec<Value> {
    let known = &from.config.needs.mounts;
    if known.is_empty() {
        return DEFAULT_MOUNTS.iter().map(default_mount).collect();
    }
    let one = |mount: &NeededMount| {
        let source = match from.sources.get(&mount.destination) {
            Some(source) => source.as_str(),
            None if mount.destination == "/dev/shm" => "shm",
            None => mount.kind.as_str(),
        };
        json!({
            "destination": mount.destination, "type": mount.kind, "source": source,
            "options": mount.options,
        })
    };
    known.iter().map(one).collect()
}

/// What containerd mounts into every container: destination, type, source, options.
const DEFAULT_MOUNTS: &[(&str, &str, &str, &str)] = &[
    ("/proc", "proc", "proc", "nosuid,noexec,nodev"),
    ("/dev", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k"),
    ("/dev/pts", "devpts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5"),
    ("/dev/shm", "tmpfs", "shm", "nosuid,noexec,nodev,mode=1777,size=65536k"),
    ("/dev/mqueue", "mqueue", "mqueue", "nosuid,noexec,nodev"),
    ("/sys", "sysfs", "sysfs", "nosuid,noexec,nodev,ro"),
    ("/run", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k"),
];

fn default_mount((destination, kind, source, options): &(&str, &str, &str, &str)) -> Value {
    json!({
        "destination": destination, "type": kind, "source": source,
        "options": options.split(',').collect::<Vec<_>>(),
    })
}

fn device_rules() -> Vec<Value> {
    let mut rules = vec![json!({ "allow": false, "access": "rwm" })];
    for (major, minor) in ALLOWED_DEVICES {
        let mut rule = json!({ "allow": true, "type": "c", "major": major, "access": "rwm" });
        if let (Some(minor), Some(fields)) = (minor, rule.as_object_mut()) {
            fields.insert("minor".to_owned(), json!(minor));
        }
        rules.push(rule);
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;
    use kybernate_spec::checkpoint::{Identity, Source};

    fn at<'a>(spec: &'a Value, pointer: &str) -> &'a Value {
        spec.pointer(pointer).unwrap_or(&Value::Null)
    }

    fn written(config: &CheckpointConfig, sources: &BTreeMap<String, String>) -> Value {
        let run = ImageRun {
            entrypoint: Some(vec!["/app".to_owned()]),
            user: "7".to_owned(),
            ..ImageRun::default()
        };
        write(&Ingredients { config, run: &run, sources, annotations: BTreeMap::new() })
    }

    #[test]
    fn what_is_read_from_a_specification_is_written_into_the_next() {
        let text = r#"{"mounts":[{"destination":"/proc","type":"proc","options":["nodev"]},
            {"destination":"/data","type":"none","options":["rbind","ro"]}],
            "linux":{"namespaces":[{"type":"pid"},{"type":"ipc"},{"type":"uts"}],
                "devices":[{"path":"/dev/null"},{"path":"/dev/kvm"}]}}"#;
        let read: SourceSpec = serde_json::from_str(text).unwrap();
        let config = CheckpointConfig { needs: read.needs(), ..CheckpointConfig::default() };
        assert_eq!(config.needs.devices, ["/dev/kvm"]);
        assert_eq!(config.needs.host_namespaces, ["network"]);
        let sources = BTreeMap::from([("/data".to_owned(), "/srv/data".to_owned())]);
        let spec = written(&config, &sources);
        let again: SourceSpec = serde_json::from_value(spec.clone()).unwrap();
        assert_eq!(again.needs().mounts, config.needs.mounts);
        assert_eq!(again.needs().host_namespaces, config.needs.host_namespaces);
        assert_eq!(at(&spec, "/mounts/1/source"), "/srv/data");
        assert_eq!(at(&spec, "/process/user/uid"), 7);
    }

    #[test]
    fn what_is_not_known_is_as_containerd_has_it() {
        let spec = written(&CheckpointConfig::default(), &BTreeMap::new());
        assert_eq!(at(&spec, "/mounts").as_array().unwrap().len(), DEFAULT_MOUNTS.len());
        assert_eq!(at(&spec, "/linux/cgroupsPath"), "/default/checkpoint");
        let bounding = at(&spec, "/process/capabilities/bounding").as_array().unwrap();
        assert_eq!(bounding.len(), CAPABILITIES.len());
    }

    #[test]
    fn names_of_the_source_do_not_lead_out_of_its_cgroup() {
        let source = |container: &str| CheckpointConfig {
            source: Source { container: Some(container.to_owned()), ..Source::default() },
            needs: Needs {
                identity: Identity {
                    capabilities: ["CAP_KILL".to_owned()].into(),
                    ..Identity::default()
                },
                ..Needs::default()
            },
            ..CheckpointConfig::default()
        };
        assert_eq!(
            at(&written(&source("job-1"), &BTreeMap::new()), "/linux/cgroupsPath"),
            "/default/job-1"
        );
        for hostile in ["..", "../x", "a/b", "."] {
            let spec = written(&source(hostile), &BTreeMap::new());
            assert_eq!(at(&spec, "/linux/cgroupsPath"), "/default/checkpoint");
            assert_eq!(at(&spec, "/process/capabilities/bounding"), &json!(["CAP_KILL"]));
        }
    }
}
