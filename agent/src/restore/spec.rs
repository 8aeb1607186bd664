//! The runtime specification of a restored container.
//!
//! Built from three things only: containerd's defaults, the image's config, and what the request
//! allows. Nothing here comes from what the checkpoint says about its source.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use fs_err as fs;
use kybernate_packager::runtime_spec::{ImageRun, defaults};
use serde_json::{Map, Value, json};

use super::live::Here;
use super::user::User;
use super::{Allowances, AllowedMount, Limits};
use crate::config::Config;
use crate::gate::{self, APPARMOR, Expected, SELINUX};
use crate::rootfs::Names;

/// A device of this node that the request allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    path: String,
    /// `c` or `b`.
    kind: &'static str,
    major: u32,
    minor: u32,
    mode: u32,
    uid: u32,
    gid: u32,
}

/// What a specification is built from.
#[derive(Debug)]
pub(super) struct Ingredients<'a> {
    pub(super) image: &'a ImageRun,
    pub(super) user: &'a User,
    pub(super) allow: &'a Allowances,
    pub(super) devices: &'a [Device],
    pub(super) limits: Limits,
    /// Mounts that the agent itself provides.
    pub(super) volumes: &'a [AllowedMount],
    /// Whether the container sees its cgroups of version 1.
    pub(super) has_cgroups: bool,
    /// Files that are hidden in the dump. They stay so, and the next checkpoint has to know of them.
    pub(super) masked: &'a [String],
    /// Whether the node has cgroups of version 2 alone. A container has a namespace for them then, as
    /// the CRI plugin gives it, which what is run in it later joins.
    pub(super) is_cgroup_v2: bool,
    /// Empty: one beneath containerd's, named after the container.
    pub(super) cgroup: &'a str,
    /// The agent's own options for CRIU, where it is the agent that restores.
    pub(super) criu_config: Option<&'a Path>,
}

/// The kernel's usual one.
const CPU_PERIOD_MICROSECONDS: u64 = 100_000;

/// Builds the specification.
pub(super) fn build(from: &Ingredients<'_>) -> Value {
    let capabilities: Vec<String> = bounding(from.allow).into_iter().collect();
    let user = from.user;
    let cgroup = from.is_cgroup_v2.then_some("cgroup");
    let namespaces = ["pid", "ipc", "uts", "mount", "network"]
        .into_iter()
        .chain(cgroup)
        .filter(|name| !from.allow.host_namespaces.iter().any(|host| host == name))
        .map(|name| match &from.allow.network {
            Some(path) if name == "network" => json!({ "type": name, "path": path }),
            _ => json!({ "type": name }),
        });
    let annotations = match from.criu_config {
        Some(file) => json!({ "org.criu.config": file }),
        None => json!({}),
    };
    json!({
        "ociVersion": defaults::OCI_VERSION,
        "process": {
            "user": { "uid": user.uid, "gid": user.gid, "additionalGids": user.groups },
            "args": from.image.arguments(),
            "env": from.image.environment(),
            "cwd": from.image.directory(),
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
            },
            "rlimits": defaults::rlimits(),
            "noNewPrivileges": !from.allow.new_privileges,
        },
        "root": { "path": "rootfs" },
        "mounts": mounts(from),
        "annotations": annotations,
        "linux": {
            "resources": resources(from),
            "cgroupsPath": from.cgroup,
            "namespaces": namespaces.collect::<Vec<_>>(),
            "devices": from.devices.iter().map(Device::node).collect::<Vec<_>>(),
            "maskedPaths": masked(from.masked),
            "readonlyPaths": defaults::READ_ONLY,
        },
    })
}

/// Returns what the new container may use.
fn resources(from: &Ingredients<'_>) -> Value {
    let mut resources = Map::new();
    resources.insert("devices".to_owned(), device_rules(from.devices).into());
    if let Some(bytes) = from.limits.memory_bytes {
        resources.insert("memory".to_owned(), json!({ "limit": bytes }));
    }
    if let Some(millis) = from.limits.cpu_millis {
        let quota = u64::from(millis.get()) * CPU_PERIOD_MICROSECONDS / 1000;
        let cpu = json!({ "quota": quota, "period": CPU_PERIOD_MICROSECONDS });
        resources.insert("cpu".to_owned(), cpu);
    }
    resources.into()
}

/// Returns what is hidden in the new container: what is in every one, and these.
fn masked(dumped: &[String]) -> Vec<&str> {
    let more = dumped.iter().map(|path| &**path).filter(|path| !defaults::MASKED.contains(path));
    defaults::MASKED.iter().copied().chain(more).collect()
}

/// Returns where the runtime mounts the container's own cgroups of version 1.
pub(super) fn cgroups(hierarchies: &[String]) -> impl Iterator<Item = String> {
    hierarchies.iter().map(|name| format!("{}/{name}", defaults::CGROUPS))
}

/// Returns where every container has something of the runtime's own.
pub(super) fn mounted_always() -> Vec<String> {
    let destination = |mount: Value| mount.get("destination")?.as_str().map(str::to_owned);
    defaults::mounts(|_| false).filter_map(destination).collect()
}

/// Returns what restored processes may be at most, in the words of the gate; what comes from outside is
/// judged when its `names` are known.
pub(super) fn expected(
    allow: &Allowances,
    volumes: &[&str],
    config: &Config,
    here: &Here,
    names: Option<&Names>,
) -> Expected {
    let existing = |paths: &[&str]| -> BTreeSet<String> {
        paths.iter().filter(|path| Path::new(path).exists()).map(ToString::to_string).collect()
    };
    let mut read_only = existing(defaults::READ_ONLY);
    read_only.insert("/sys".to_owned());
    let told = given(allow, volumes, &here.hierarchies, names.unwrap_or(&Names::default()));
    let given = match names {
        Some(_) => told,
        // Their rights are by their names too.
        None => Expected {
            names: gate::Names::Later,
            read_only: BTreeSet::new(),
            private: BTreeSet::new(),
            ..told
        },
    };
    read_only.extend(given.read_only.iter().cloned());
    Expected {
        capabilities: bounding(allow),
        no_new_privileges: !allow.new_privileges,
        seccomp: config.require_seccomp && !allow.no_seccomp,
        refused: gate::Refused::ALWAYS,
        lsm: here.lsm,
        // As `build` says: a restored container gets none.
        lsm_profile: None,
        lsm_files: None,
        masked: existing(defaults::MASKED),
        read_only,
        host_namespaces: allow.host_namespaces.iter().cloned().collect(),
        joined_namespaces: allow.network.iter().map(|_| "network".to_owned()).collect(),
        ..given
    }
}

/// Returns what comes from outside.
fn given(allow: &Allowances, volumes: &[&str], hierarchies: &[String], names: &Names) -> Expected {
    let read_only = allow.mounts.iter().filter(|mount| mount.read_only);
    let bound = allow.mounts.iter().map(|mount| &*mount.destination).chain(volumes.iter().copied());
    Expected {
        external_mounts: bound.map(|place| names.of(place)).collect(),
        clashes: names.clashes(),
        // What the caller lends may follow the node, as what it was at home did.
        private: volumes.iter().map(|place| names.of(place)).collect(),
        cgroups: cgroups(hierarchies).map(|place| names.of(&place)).collect(),
        read_only: read_only.map(|mount| names.of(&mount.destination)).collect(),
        ..Expected::default()
    }
}

/// Returns CRIU's number of a security module.
pub(super) fn lsm(name: &str) -> i32 {
    match name {
        "selinux" => SELINUX,
        "apparmor" => APPARMOR,
        _ => 0,
    }
}

/// Looks at the devices a request names.
pub(super) fn devices(paths: &[String]) -> io::Result<Vec<Device>> {
    let look = |path: &String| {
        let found = fs::metadata(path)?;
        let kind = match found.file_type() {
            kind if kind.is_char_device() => "c",
            kind if kind.is_block_device() => "b",
            _ => return Err(io::Error::other(format!("{path:?} is no device"))),
        };
        Ok(Device {
            path: path.clone(),
            kind,
            major: rustix::fs::major(found.rdev()),
            minor: rustix::fs::minor(found.rdev()),
            mode: found.mode() & 0o777,
            uid: found.uid(),
            gid: found.gid(),
        })
    };
    paths.iter().map(look).collect()
}

impl Device {
    fn node(&self) -> Value {
        json!({
            "path": self.path, "type": self.kind, "major": self.major, "minor": self.minor,
            "fileMode": self.mode, "uid": self.uid, "gid": self.gid,
        })
    }
}

fn bounding(allow: &Allowances) -> BTreeSet<String> {
    let defaults = defaults::CAPABILITIES.iter().map(ToString::to_string);
    defaults.chain(allow.capabilities.clone()).collect()
}

fn device_rules(devices: &[Device]) -> Vec<Value> {
    let mut rules = defaults::device_rules();
    rules.extend(devices.iter().map(|device| {
        json!({
            "allow": true, "type": device.kind, "major": device.major, "minor": device.minor,
            "access": "rwm",
        })
    }));
    rules
}

fn mounts(from: &Ingredients<'_>) -> Vec<Value> {
    let bound = || from.volumes.iter().chain(&from.allow.mounts);
    let taken = |place: &str| bound().any(|mount| mount.destination == place);
    let bind = |mount: &AllowedMount, options: &[&str]| {
        let rights = if mount.read_only { "ro" } else { "rw" };
        let options = [&["rbind", rights], options].concat();
        json!({
            "destination": mount.destination, "type": "bind", "source": mount.source,
            "options": options,
        })
    };
    let volumes = from.volumes.iter().map(|mount| bind(mount, &["rprivate"]));
    // Whether it follows the node is as it was at home.
    let bound = volumes.chain(from.allow.mounts.iter().map(|mount| bind(mount, &[])));
    let cgroups = from.has_cgroups.then(defaults::cgroups);
    defaults::mounts(taken).chain(cgroups).chain(bound).collect()
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU32, NonZeroU64};

    use super::*;

    fn check(allow: &Allowances, devices: &[Device]) -> Value {
        let image = ImageRun {
            entrypoint: Some(vec!["/app".to_owned()]),
            cmd: Some(vec!["-v".to_owned()]),
            ..ImageRun::default()
        };
        let user = User { uid: 7, gid: 8, groups: vec![8] };
        build(&Ingredients {
            image: &image,
            user: &user,
            allow,
            devices,
            limits: Limits {
                memory_bytes: NonZeroU64::new(64 << 20),
                cpu_millis: NonZeroU32::new(1500),
            },
            volumes: &[],
            has_cgroups: false,
            masked: &["/proc/interrupts".to_owned(), "/proc/keys".to_owned()],
            is_cgroup_v2: true,
            cgroup: "/default/web",
            criu_config: Some(Path::new("/var/lib/kybernate/criu.conf")),
        })
    }

    fn at<'a>(spec: &'a Value, pointer: &str) -> &'a Value {
        spec.pointer(pointer).unwrap_or(&Value::Null)
    }

    #[test]
    fn without_allowances_a_container_has_containerds_defaults() {
        let spec = check(&Allowances::default(), &[]);
        assert_eq!(at(&spec, "/process/args"), &json!(["/app", "-v"]));
        assert_eq!(at(&spec, "/process/user/uid"), 7);
        assert_eq!(at(&spec, "/process/noNewPrivileges"), true);
        let bounding = at(&spec, "/process/capabilities/bounding").as_array().unwrap();
        assert_eq!(bounding.len(), defaults::CAPABILITIES.len());
        assert_eq!(at(&spec, "/linux/namespaces").as_array().unwrap().len(), 6);
        assert_eq!(at(&spec, "/linux/devices"), &json!([]));
        assert_eq!(at(&spec, "/linux/resources/memory"), &json!({ "limit": 64 << 20 }));
        assert_eq!(at(&spec, "/linux/resources/cpu/quota"), 150_000);
        let masked = at(&spec, "/linux/maskedPaths").as_array().unwrap();
        let count = |path: &str| masked.iter().filter(|masked| *masked == path).count();
        assert_eq!(["/proc/interrupts", "/proc/keys", "/proc/kcore"].map(count), [1, 1, 1]);
        let mounts = at(&spec, "/mounts").as_array().unwrap();
        assert!(mounts.iter().all(|mount| at(mount, "/type") != "bind"));
    }

    #[test]
    fn allowances_and_nothing_else_are_added() {
        let allow = Allowances {
            mounts: vec![AllowedMount {
                source: "/srv".to_owned(),
                destination: "/run".to_owned(),
                read_only: true,
            }],
            capabilities: vec!["CAP_SYS_PTRACE".to_owned()],
            host_namespaces: vec!["network".to_owned()],
            new_privileges: true,
            ..Allowances::default()
        };
        let device = Device {
            path: "/dev/kvm".to_owned(),
            kind: "c",
            major: 10,
            minor: 232,
            mode: 0o660,
            uid: 0,
            gid: 104,
        };
        let spec = check(&allow, &[device]);
        assert_eq!(at(&spec, "/process/noNewPrivileges"), false);
        assert!(spec.to_string().contains("CAP_SYS_PTRACE"));
        assert!(!at(&spec, "/linux/namespaces").to_string().contains("network"));
        assert_eq!(at(&spec, "/linux/devices/0/path"), "/dev/kvm");
        let mounts = at(&spec, "/mounts").as_array().unwrap();
        let runs: Vec<&Value> =
            mounts.iter().filter(|mount| at(mount, "/destination") == "/run").collect();
        assert_eq!(runs.len(), 1, "an allowed mount takes the place of a default one");
        let network = Some("/run/netns/pod".to_owned());
        let joins = check(&Allowances { network, ..Allowances::default() }, &[]);
        let namespaces = at(&joins, "/linux/namespaces").to_string();
        assert!(
            namespaces.contains(r#"{"path":"/run/netns/pod","type":"network"}"#),
            "{namespaces}"
        );
        assert_eq!(at(runs[0], "/options/1"), "ro");
    }

    #[test]
    fn the_gate_expects_what_the_specification_says() {
        let config = crate::config::ServeArgs::default().validate().unwrap();
        let (allow, here) = (Allowances::default(), Here::default());
        let later = expected(&allow, &["/dev/shm"], &config, &here, None);
        assert_eq!((later.names, later.private.len()), (gate::Names::Later, 0));
        let names = Names::default();
        let expected = expected(&allow, &["/dev/shm"], &config, &here, Some(&names));
        assert_eq!(expected.names, gate::Names::Known);
        assert!(expected.no_new_privileges && !expected.seccomp);
        assert_eq!(expected.external_mounts, ["/dev/shm".to_owned()].into());
        assert!(expected.read_only.contains("/sys") && expected.read_only.contains("/proc/sys"));
    }

    #[test]
    fn only_devices_are_devices() {
        let found = devices(&["/dev/null".to_owned()]).unwrap();
        assert_eq!((found[0].kind, found[0].major, found[0].minor), ("c", 1, 3));
        devices(&["/etc/passwd".to_owned()]).unwrap_err();
    }
}
