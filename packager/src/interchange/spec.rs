//! Runtime specifications: facts out of a foreign one, and one for a runtime that wants it.
//!
//! An artifact of ours holds no specification: a restorer builds it from what the node allows. The
//! foreign formats hold one and their restorers take it as it is.

use std::collections::BTreeMap;

use kybernate_spec::checkpoint::{CheckpointConfig, NeededMount};
use serde_json::{Value, json};

use super::ForeignError;
use crate::runtime_spec::{ImageRun, SourceSpec, defaults};

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

/// Refuses what no agent would take: a terminal does not move with a container.
pub(crate) fn check(spec: &SourceSpec) -> Result<(), ForeignError> {
    if spec.has_terminal() {
        return Err(ForeignError::Content("the container has a terminal".to_owned()));
    }
    Ok(())
}

/// Writes a specification in which the checkpoint can be restored. The processes themselves, their
/// arguments and their rights come out of CRIU's images; this is what is around them.
pub(crate) fn write(from: &Ingredients<'_>) -> Value {
    let (config, run) = (from.config, from.run);
    let identity = &config.needs.identity;
    let known: Vec<&str> = identity.capabilities.iter().map(String::as_str).collect();
    let capabilities = if known.is_empty() { defaults::CAPABILITIES } else { &known };
    let host = &config.needs.host_namespaces;
    let namespaces = ["pid", "ipc", "uts", "mount", "network"]
        .into_iter()
        .filter(|kind| !host.iter().any(|host| host == kind))
        .map(|kind| json!({ "type": kind }));
    let (uid, gid) = user(config, run);
    json!({
        "ociVersion": defaults::OCI_VERSION,
        "process": {
            "user": { "uid": uid, "gid": gid },
            "args": run.arguments(),
            "env": run.environment(),
            "cwd": run.directory(),
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
            "rlimits": defaults::rlimits(),
            "noNewPrivileges": identity.no_new_privileges,
        },
        "root": { "path": "rootfs" },
        "mounts": mounts(from),
        "annotations": from.annotations,
        "linux": {
            "resources": { "devices": defaults::device_rules(), "cpu": { "shares": 1024 } },
            "cgroupsPath": cgroup(config),
            "namespaces": namespaces.collect::<Vec<_>>(),
            "maskedPaths": defaults::MASKED,
            "readonlyPaths": defaults::READ_ONLY,
        },
    })
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
        return defaults::mounts(|_| false).collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use kybernate_spec::checkpoint::{Identity, Needs, Source};

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
        assert_eq!(at(&spec, "/mounts").as_array().unwrap().len(), 7);
        assert_eq!(at(&spec, "/linux/cgroupsPath"), "/default/checkpoint");
        let bounding = at(&spec, "/process/capabilities/bounding").as_array().unwrap();
        assert_eq!(bounding.len(), defaults::CAPABILITIES.len());
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
