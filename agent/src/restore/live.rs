//! A container that exists already: what its own specification gives to restored processes, for
//! kybernate-runc. Nothing here comes from what the checkpoint says about its source.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Allowances, AllowedMount};
use crate::gate::{
    APPARMOR, Expected, Fixed, HANDED_OVER, MountFact, Paths, Refused, SELINUX, Summary,
    URGENT_LIMITS,
};
use crate::rootfs::{Bind, Names, Others};
use crate::{cgroup, process};

/// Namespaces that a container may share with the host or with its pod.
const NAMESPACES: [&str; 4] = ["network", "pid", "ipc", "uts"];

/// Options of mounts that follow none, and of all of a container's.
const PRIVATE: [&str; 4] = ["private", "rprivate", "unbindable", "runbindable"];

/// What a container's specification meets on this node.
#[derive(Clone, Debug, Default)]
pub(super) struct Here {
    /// The security module, as CRIU numbers them.
    pub(super) lsm: i32,
    /// The cgroups of version 1, by their names in containers.
    pub(super) hierarchies: Vec<String>,
}

impl Here {
    fn has_cgroups(&self, mount: &Value) -> bool {
        !self.hierarchies.is_empty() && text(mount, "type").is_some_and(|kind| kind == "cgroup")
    }

    /// Returns where each hierarchy is, when those are at `top`.
    fn below<'a>(&'a self, top: &'a str) -> impl Iterator<Item = String> + 'a {
        self.hierarchies.iter().map(move |name| format!("{top}/{name}"))
    }
}

/// A container's specification (OCI runtime specification, `config.json`).
#[derive(Clone, Debug)]
pub(super) struct Live {
    spec: Value,
}

impl Live {
    pub(super) fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        Ok(Self { spec: serde_json::from_slice(text)? })
    }

    /// Returns one of its annotations.
    pub(super) fn annotation(&self, key: &str) -> Option<&str> {
        self.spec.get("annotations")?.get(key)?.as_str()
    }

    /// Returns what it has beyond the defaults, in the words of a request.
    pub(super) fn allowances(&self) -> Allowances {
        Allowances {
            mounts: self.binds().collect(),
            devices: self.strings("/linux/devices", Some("path")).collect(),
            capabilities: self.strings("/process/capabilities/bounding", None).collect(),
            host_namespaces: self.namespaces(|found| found.is_none()).collect(),
            ..Allowances::default()
        }
    }

    /// Returns the names that the runtime has for what comes from outside, and looks at the `paths` by which
    /// CRIU goes.
    pub(super) fn names(&self, root: &Path, here: &Here, paths: &Paths) -> io::Result<Names> {
        let binds: Vec<Bind> = self.binds().map(|mount| Bind::from(&mount)).collect();
        let cgroups = self.list("/mounts").filter(|mount| here.has_cgroups(mount));
        let tops = cgroups.filter_map(|mount| text(mount, "destination"));
        let cgroups = tops.flat_map(|top| here.below(&top).collect::<Vec<_>>());
        let mounts = self.list("/mounts").filter(|mount| !is_bind(mount));
        let others = Others {
            external: cgroups.collect(),
            devices: self.strings("/linux/devices", Some("path")).collect(),
            mounts: mounts.filter_map(|mount| text(mount, "destination")).collect(),
            paths: paths.clone(),
        };
        Names::look_up(root, &binds, &others)
    }

    /// Returns what restored processes may be at most, in the words of the gate. `names` are those of
    /// [`Live::names`].
    pub(super) fn expected(&self, summary: &Summary, here: &Here, names: &Names) -> Expected {
        let exists = |path: &String| Path::new(path).exists();
        let mut read_only: BTreeSet<String> =
            self.strings("/linux/readonlyPaths", None).filter(exists).collect();
        let mounts = self.list("/mounts").filter(|mount| is_read_only(mount));
        read_only.extend(mounts.filter_map(|mount| name_of(mount, names)));
        if self.flag("/root/readonly") {
            read_only.insert("/".to_owned());
        }
        let is_privileged = |mount: &&Value| {
            let kind = text(mount, "type").unwrap_or_default();
            matches!(&*kind, "sysfs" | "cgroup" | "cgroup2") && !is_read_only(mount)
        };
        let writable = self.list("/mounts").filter(is_privileged);
        let writable = writable.filter_map(|mount| text(mount, "destination")).collect();
        let mut private = self.private(names);
        let mut external_mounts: BTreeSet<String> =
            self.binds().map(|mount| names.of(&mount.destination)).collect();
        // In version 1 a cgroup mount is a tmpfs, on which the runtime itself mounts the container's
        // own directory of each hierarchy. Only these are read-only then.
        for mount in self.list("/mounts").filter(|mount| here.has_cgroups(mount)) {
            let Some(top) = text(mount, "destination") else { continue };
            let is_dumped = |place: &String| {
                let is_it =
                    |one: &MountFact| one.path == *place || one.external.as_ref() == Some(place);
                summary.mounts.iter().any(is_it)
            };
            let places: Vec<String> =
                here.below(&top).map(|place| names.of(&place)).filter(is_dumped).collect();
            if read_only.remove(&top) {
                read_only.extend(places.iter().cloned());
            }
            if private.contains(&top) {
                private.extend(places.iter().cloned());
            }
            external_mounts.extend(places);
        }
        // In those of its pod it may or may not have been at home: CRIU joins them itself, but for two
        // kinds. Of these it stays where it is, in the node's, when the dump was there, and a pod may
        // have that by its path.
        let is_joined = |path: Option<&str>| path.is_some_and(|path| !path.is_empty());
        let is_handed = |name: &String| HANDED_OVER.iter().any(|(handed, _)| handed == name);
        let nodes: BTreeSet<String> =
            self.namespaces(|path| path.is_some_and(process::is_the_nodes)).collect();
        let joined = self.namespaces(is_joined);
        let joined = joined.filter(|name| {
            summary.host_namespaces.contains(name) && (!is_handed(name) || nodes.contains(name))
        });
        // runc takes one that says nothing for none.
        let seccomp = self.spec.pointer("/linux/seccomp").filter(|profile| {
            ["defaultAction", "syscalls"].iter().any(|key| profile.get(key).is_some())
        });
        Expected {
            capabilities: self.strings("/process/capabilities/bounding", None).collect(),
            user: self.user(),
            no_new_privileges: self.flag("/process/noNewPrivileges"),
            seccomp: seccomp.is_some(),
            refused: seccomp.map(Refused::by_profile).unwrap_or_default(),
            limits: self.urgent_limits(),
            lsm: here.lsm,
            lsm_profile: self.profile(here.lsm),
            lsm_files: self.label("/linux/mountLabel").filter(|_| here.lsm == SELINUX),
            external_mounts,
            clashes: names.clashes(),
            private,
            masked: self.strings("/linux/maskedPaths", None).filter(exists).collect(),
            read_only,
            writable,
            host_namespaces: self.namespaces(|found| found.is_none()).chain(joined).collect(),
            joined_namespaces: self.namespaces(is_joined).filter(is_handed).collect(),
            ..Expected::default()
        }
    }

    /// Returns its limits that let its processes go before others of the node.
    fn urgent_limits(&self) -> BTreeSet<String> {
        let urgent = self.list("/process/rlimits").filter_map(|limit| {
            let name = text(limit, "type")?;
            let most = limit.get("hard")?.as_u64()?;
            let is_it = |(one, _, usual): &(&str, usize, u64)| *one == name && most > *usual;
            URGENT_LIMITS.iter().any(is_it).then_some(name)
        });
        urgent.collect()
    }

    /// Returns who its processes are, where they stay that: no program that they start gives them more.
    fn user(&self) -> Option<Fixed> {
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let id = |key: &str| {
            let found = self.spec.pointer(&format!("/process/user/{key}"));
            found.and_then(number).unwrap_or_default()
        };
        let uid = Some(id("uid")).filter(|uid| *uid != 0)?;
        let more = self.list("/process/user/additionalGids").filter_map(number);
        let held = ["permitted", "effective", "ambient"].map(|set| {
            self.strings(&format!("/process/capabilities/{set}"), None).collect::<Vec<_>>()
        });
        self.flag("/process/noNewPrivileges").then(|| Fixed {
            uid,
            gids: more.chain([id("gid")]).collect(),
            capabilities: held.into_iter().flatten().collect(),
        })
    }

    /// Returns where it follows no mount of this node.
    fn private(&self, names: &Names) -> BTreeSet<String> {
        let root = self.spec.pointer("/linux/rootfsPropagation").and_then(Value::as_str);
        let is_root = root.is_some_and(|option| PRIVATE.contains(&option));
        let all = is_root && root.is_some_and(|option| option.starts_with('r'));
        let is_so = |mount: &&Value| all || PRIVATE.iter().any(|option| has_option(mount, option));
        let mounts = self.list("/mounts").filter(is_so);
        let places = mounts.filter_map(|mount| name_of(mount, names));
        places.chain(is_root.then(|| "/".to_owned())).collect()
    }

    /// Returns what this node's security module gives to its processes.
    fn profile(&self, lsm: i32) -> Option<String> {
        match lsm {
            SELINUX => self.label("/process/selinuxLabel"),
            APPARMOR => {
                self.label("/process/apparmorProfile").filter(|profile| profile != "unconfined")
            }
            _ => None,
        }
    }

    /// Returns the container's cgroup, as a path in the hierarchy, when its cgroup namespace begins
    /// there.
    pub(super) fn cgroup(&self) -> Option<String> {
        let is_own = |found: &Value| {
            text(found, "type").as_deref() == Some("cgroup") && found.get("path").is_none()
        };
        let mut namespaces = self.list("/linux/namespaces");
        let path = self.spec.pointer("/linux/cgroupsPath").and_then(Value::as_str)?;
        namespaces.any(is_own).then(|| cgroup::path(path)).flatten()
    }

    fn label(&self, pointer: &str) -> Option<String> {
        let found = self.spec.pointer(pointer)?.as_str()?;
        (!found.is_empty()).then(|| found.to_owned())
    }

    /// Returns the directory on this node that is mounted here in it.
    pub(super) fn bound(&self, destination: &str) -> Option<PathBuf> {
        let found = self.binds().filter(|mount| mount.destination == destination);
        found.last().map(|mount| mount.source.into())
    }

    /// Returns what of this node is mounted in it.
    fn binds(&self) -> impl Iterator<Item = AllowedMount> {
        self.list("/mounts").filter_map(|mount| {
            is_bind(mount).then_some(AllowedMount {
                source: text(mount, "source")?,
                destination: text(mount, "destination")?,
                read_only: is_read_only(mount),
            })
        })
    }

    /// Returns the namespaces of which `wanted` holds; it is given `None` for one that is the host's,
    /// else the path of one that is joined, which is empty for one of the container's own.
    fn namespaces(&self, wanted: impl Fn(Option<&str>) -> bool) -> impl Iterator<Item = String> {
        let listed: Vec<(String, String)> = self
            .list("/linux/namespaces")
            .filter_map(|one| Some((text(one, "type")?, text(one, "path").unwrap_or_default())))
            .collect();
        NAMESPACES.into_iter().filter_map(move |name| {
            let found = listed.iter().find(|(listed, _)| listed == name);
            wanted(found.map(|(_, path)| &**path)).then(|| name.to_owned())
        })
    }

    fn list(&self, pointer: &str) -> impl Iterator<Item = &Value> {
        self.spec.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
    }

    fn strings(&self, pointer: &str, key: Option<&'static str>) -> impl Iterator<Item = String> {
        self.list(pointer).filter_map(move |item| match key {
            Some(key) => text(item, key),
            None => item.as_str().map(str::to_owned),
        })
    }

    fn flag(&self, pointer: &str) -> bool {
        self.spec.pointer(pointer).and_then(Value::as_bool).unwrap_or_default()
    }
}

/// Returns where something is mounted: by the runtime's name where it comes from this node.
fn name_of(mount: &Value, names: &Names) -> Option<String> {
    let place = text(mount, "destination")?;
    Some(if is_bind(mount) { names.of(&place) } else { place })
}

/// Whether it is for reading only; of a directory with mounts in it, all of them may be (`rro`).
fn is_read_only(mount: &Value) -> bool {
    ["ro", "rro"].iter().any(|option| has_option(mount, option))
}

fn is_bind(mount: &Value) -> bool {
    text(mount, "type").is_some_and(|kind| kind == "bind")
        || has_option(mount, "bind")
        || has_option(mount, "rbind")
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(str::to_owned)
}

fn has_option(mount: &Value, wanted: &str) -> bool {
    let options = mount.get("options").and_then(Value::as_array);
    options.is_some_and(|options| options.iter().any(|option| option == wanted))
}

#[cfg(test)]
mod tests {
    use fs_err as fs;
    use serde_json::json;

    use super::*;

    /// In a root file system without links.
    fn offered(live: &Live, summary: &Summary, here: &Here) -> Expected {
        live.expected(summary, here, &Names::default())
    }

    /// As containerd's CRI plugin writes them, shortened.
    fn pod() -> Live {
        let spec = json!({
            "process": {
                "capabilities": { "bounding": ["CAP_KILL"], "effective": ["CAP_KILL"] },
                "noNewPrivileges": true,
                "rlimits": [
                    { "type": "RLIMIT_RTPRIO", "soft": 0, "hard": 1 },
                    { "type": "RLIMIT_NICE", "soft": 20, "hard": 20 },
                    { "type": "RLIMIT_NOFILE", "soft": 1024, "hard": 1024 },
                ],
            },
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "proc" },
                { "destination": "/sys", "type": "sysfs", "options": ["nosuid", "ro"] },
                { "destination": "/dev/shm", "type": "bind", "source": "/run/sandbox/shm",
                  "options": ["rbind", "rw"] },
                { "destination": "/etc/hosts", "source": "/var/hosts", "options": ["rbind", "rprivate", "ro"] },
            ],
            "annotations": { "io.kubernetes.cri.container-name": "web" },
            "linux": {
                "namespaces": [
                    { "type": "pid" }, { "type": "mount" },
                    { "type": "network", "path": "/run/netns/none-such" },
                    { "type": "ipc", "path": "/proc/7/ns/ipc" },
                ],
                "maskedPaths": ["/proc/version", "/proc/none-such"],
                "readonlyPaths": ["/proc/sys"],
                "seccomp": { "defaultAction": "SCMP_ACT_ERRNO" },
                "devices": [{ "path": "/dev/fuse" }],
            },
        });
        Live::parse(spec.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn a_pods_container_gives_what_its_specification_says() {
        let live = pod();
        let summary = Summary {
            host_namespaces: ["network", "ipc", "user"].map(str::to_owned).into(),
            ..Summary::default()
        };
        let expected = offered(&live, &summary, &Here::default());
        let names = |found: &BTreeSet<String>| found.iter().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(names(&expected.capabilities), "CAP_KILL");
        assert!(expected.no_new_privileges && expected.seccomp);
        assert_eq!(names(&expected.limits), "RLIMIT_RTPRIO");
        assert_eq!(expected.refused, Refused::by_profile(&live.spec["linux"]["seccomp"]));
        assert_eq!(names(&expected.external_mounts), "/dev/shm /etc/hosts");
        assert_eq!(names(&expected.private), "/etc/hosts");
        assert_eq!(names(&expected.masked), "/proc/version");
        assert_eq!(names(&expected.read_only), "/etc/hosts /proc/sys /sys");
        let spec = json!({ "root": { "path": "rootfs", "readonly": true } });
        let locked = Live::parse(spec.to_string().as_bytes()).unwrap();
        assert_eq!(names(&offered(&locked, &summary, &Here::default()).read_only), "/");
        // uts is not listed, so it is the host's; ipc is its pod's, which CRIU joins. The network is its
        // pod's, in which CRIU would not put what was in the host's.
        assert_eq!(names(&expected.host_namespaces), "ipc uts");
        assert_eq!(names(&expected.joined_namespaces), "network");

        let allowed = live.allowances();
        assert_eq!(allowed.devices, ["/dev/fuse"]);
        assert_eq!(allowed.host_namespaces, ["uts"]);
        assert_eq!(live.bound("/dev/shm"), Some("/run/sandbox/shm".into()));
        assert_eq!(live.annotation("io.kubernetes.cri.container-name"), Some("web"));
    }

    #[test]
    fn who_can_become_nobody_else_is_known() {
        let of = |uid: u32, fixed: bool| {
            let user = json!({ "uid": uid, "gid": 7, "additionalGids": [8] });
            let held = json!({ "bounding": ["CAP_KILL", "CAP_CHOWN"], "permitted": ["CAP_KILL"] });
            let process = json!({ "user": user, "noNewPrivileges": fixed, "capabilities": held });
            let live = Live::parse(json!({ "process": process }).to_string().as_bytes()).unwrap();
            offered(&live, &Summary::default(), &Here::default()).user
        };
        let capabilities = ["CAP_KILL".to_owned()].into();
        let user = Fixed { uid: 1000, gids: [7, 8].into(), capabilities };
        assert_eq!(of(1000, true), Some(user));
        // A program that root owns may make it root, and root may become anybody.
        assert_eq!((of(1000, false), of(0, true)), (None, None));
    }

    #[test]
    fn a_pod_may_have_the_nodes_own_network() {
        let expected = |path: &str, dumped: &[&str]| {
            let network = json!({ "type": "network", "path": path });
            let spec = json!({ "linux": { "namespaces": [network, { "type": "pid" }] } });
            let host_namespaces = dumped.iter().map(ToString::to_string).collect();
            let summary = Summary { host_namespaces, ..Summary::default() };
            let live = Live::parse(spec.to_string().as_bytes()).unwrap();
            live.expected(&summary, &Here::default(), &Names::default())
        };
        let is_given = |found: &Expected| {
            let has = |names: &BTreeSet<String>| names.contains("network");
            (has(&found.host_namespaces), has(&found.joined_namespaces))
        };
        // As containerd's CRI plugin writes it for a pod with hostNetwork.
        let own = "/proc/self/ns/net";
        assert_eq!(is_given(&expected(own, &["network"])), (true, true));
        assert_eq!(is_given(&expected(own, &[])), (false, true));
        for other in ["/proc/self/ns/uts", "/nowhere"] {
            assert_eq!(is_given(&expected(other, &["network"])), (false, true), "{other}");
        }
    }

    #[test]
    fn cgroups_of_version_1_are_mounted_by_the_runtime() {
        let options = ["nosuid", "ro"];
        let mount =
            json!({ "destination": "/sys/fs/cgroup", "type": "cgroup", "options": options });
        let live = Live::parse(json!({ "mounts": [mount] }).to_string().as_bytes()).unwrap();
        let dumped = |path: &str| MountFact { path: path.to_owned(), ..MountFact::default() };
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/other"].map(dumped);
        let summary = Summary { mounts: mounts.into(), ..Summary::default() };
        let here = ["cpu", "memory"].map(str::to_owned);
        let first = offered(&live, &summary, &Here { hierarchies: here.into(), lsm: 0 });
        assert_eq!(first.external_mounts, ["/sys/fs/cgroup/cpu".to_owned()].into());
        assert_eq!(first.read_only, first.external_mounts);
        let second = offered(&live, &summary, &Here::default());
        assert!(second.external_mounts.is_empty());
        assert_eq!(second.read_only, ["/sys/fs/cgroup".to_owned()].into());
    }

    #[test]
    fn what_comes_from_outside_has_the_names_of_the_root_file_system() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("var")).unwrap();
        fs::create_dir_all(root.path().join("sys/fs")).unwrap();
        for (link, target) in [("var/run", "/run"), ("sys/fs/cgroup", "/groups")] {
            std::os::unix::fs::symlink(target, root.path().join(link)).unwrap();
        }
        let bind = |destination: &str, options: &[&str]| json!({ "type": "bind", "source": "/none", "destination": destination, "options": options });
        let mounts = [
            bind("/var/run/token", &["rbind", "rprivate", "ro"]),
            bind("/var/run/all", &["rbind", "rro"]),
            bind("/var/run/data", &["rbind", "rslave", "rw"]),
            // No link leads what is no bind.
            json!({ "type": "tmpfs", "destination": "/var/run/tmp", "options": ["ro", "private"] }),
            json!({ "type": "cgroup", "destination": "/sys/fs/cgroup", "options": ["ro"] }),
        ];
        let live = Live::parse(json!({ "mounts": mounts }).to_string().as_bytes()).unwrap();
        let here = Here { lsm: 0, hierarchies: vec!["cpu".to_owned()] };
        let names = live.names(root.path(), &here, &Paths::default()).unwrap();
        let dumped = |path: &str| MountFact { path: path.to_owned(), ..MountFact::default() };
        let summary = Summary { mounts: vec![dumped("/groups/cpu")], ..Summary::default() };
        let expected = live.expected(&summary, &here, &names);
        let set = |all: &[&str]| all.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
        let given = set(&["/run/token", "/run/all", "/run/data", "/groups/cpu"]);
        assert_eq!(expected.external_mounts, given);
        let read_only = set(&["/run/token", "/run/all", "/var/run/tmp", "/groups/cpu"]);
        assert_eq!(expected.read_only, read_only);
        assert_eq!(expected.private, set(&["/run/token", "/var/run/tmp"]));
        assert_eq!(expected.clashes, set(&[]));
    }

    #[test]
    fn what_a_privileged_container_may_write_to_is_known() {
        let mount = |kind: &str, destination: &str, options: &[&str]| json!({ "type": kind, "destination": destination, "options": options });
        let mounts = [
            mount("sysfs", "/sys", &["nosuid", "rw"]),
            mount("cgroup", "/sys/fs/cgroup", &["rw"]),
            mount("tmpfs", "/tmp", &["rw"]),
            mount("sysfs", "/other", &["ro"]),
        ];
        let live = Live::parse(json!({ "mounts": mounts }).to_string().as_bytes()).unwrap();
        let expected = offered(&live, &Summary::default(), &Here::default());
        assert_eq!(expected.writable, ["/sys", "/sys/fs/cgroup"].map(str::to_owned).into());
        assert!(offered(&pod(), &Summary::default(), &Here::default()).writable.is_empty());
    }

    #[test]
    fn the_profile_is_that_of_the_nodes_security_module() {
        let of = |profile: &str| {
            let process = json!({ "apparmorProfile": profile, "selinuxLabel": "a:b:c:s0:c1,c2" });
            let spec = json!({ "process": process, "linux": { "mountLabel": "a:b:files:s0" } });
            Live::parse(spec.to_string().as_bytes()).unwrap()
        };
        let live = of("cri-containerd.apparmor.d");
        let given = |live: &Live, lsm| {
            let here = Here { lsm, ..Here::default() };
            let expected = offered(live, &Summary::default(), &here);
            (expected.lsm_profile, expected.lsm_files)
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(given(&live, APPARMOR), (text("cri-containerd.apparmor.d"), None));
        assert_eq!(given(&live, SELINUX), (text("a:b:c:s0:c1,c2"), text("a:b:files:s0")));
        assert_eq!(given(&live, 0), (None, None));
        for none in ["", "unconfined"] {
            assert_eq!(given(&of(none), APPARMOR), (None, None));
        }
        assert_eq!(given(&pod(), SELINUX), (None, None));
    }

    #[test]
    fn a_cgroup_namespace_begins_where_the_specification_says() {
        let of = |namespaces: Value| {
            let spec =
                json!({ "linux": { "cgroupsPath": "k.slice:c:1", "namespaces": namespaces } });
            Live::parse(spec.to_string().as_bytes()).unwrap().cgroup()
        };
        let own = json!([{ "type": "pid" }, { "type": "cgroup" }]);
        assert_eq!(of(own).as_deref(), Some("/k.slice/c-1.scope"));
        assert_eq!(of(json!([{ "type": "pid" }])), None, "it is the node's");
        assert_eq!(of(json!([{ "type": "cgroup", "path": "/proc/7/ns/cgroup" }])), None);
    }

    #[test]
    fn an_empty_specification_gives_nothing() {
        let live = Live::parse(b"{}").unwrap();
        let expected = offered(&live, &Summary::default(), &Here::default());
        assert!(expected.capabilities.is_empty() && expected.external_mounts.is_empty());
        assert!(!expected.no_new_privileges && !expected.seccomp);
        assert_eq!(expected.host_namespaces.len(), 4);
        assert!(Live::parse(b"[").is_err());
    }
}
