//! The bundle of a container that is being created: what its pod wishes (runtime specification,
//! `config.json`).

use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde_json::{Map, Value};

use super::oom::Adjustment;
use crate::container::RESTORE_AS;
use crate::restore::noted;
use crate::{cgroup, network};

/// Set by containerd's CRI plugin: whether it is the pod's sandbox or one of its containers.
const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
/// Set by containerd's CRI plugin: the container's name in the pod.
const CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
/// Set by containerd's CRI plugin: the pod's UID.
const POD_UID: &str = "io.kubernetes.cri.sandbox-uid";

/// Of a pod: `restore.kybernate.io/CONTAINER: REPOSITORY@DIGEST`.
const RESTORE: &str = "restore.kybernate.io/";
/// Of a pod: `on-failure.kybernate.io/CONTAINER: fail|cold`.
const ON_FAILURE: &str = "on-failure.kybernate.io/";

/// What runc hands to CRIU.
const CRIU_CONFIG: &str = "org.criu.config";

/// A container's specification.
#[derive(Clone, Debug)]
pub(super) struct Bundle {
    file: PathBuf,
    text: Vec<u8>,
    spec: Value,
}

/// A container that shall go on where a checkpoint was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) reference: String,
    pub(super) on_failure: OnFailure,
}

/// What happens when the restore does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnFailure {
    /// The container fails, as one whose image is not there.
    Fail,
    /// It is started afresh.
    Cold,
}

impl Bundle {
    /// Reads a bundle.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let file = directory.join("config.json");
        let text = fs::read(&file)?;
        let spec = serde_json::from_slice(&text).map_err(io::Error::other)?;
        Ok(Self { file, text, spec })
    }

    /// Returns `config.json`.
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Returns what the pod wishes for this container, if anything. An error names the annotation.
    pub(super) fn wish(&self) -> Result<Option<Wish>, String> {
        if !self.is_container() {
            return Ok(None);
        }
        let Some(name) = self.annotation(CONTAINER_NAME) else { return Ok(None) };
        let Some(reference) = self.annotation(&format!("{RESTORE}{name}")) else {
            return Ok(None);
        };
        let key = format!("{ON_FAILURE}{name}");
        let on_failure = match self.annotation(&key) {
            None | Some("fail") => OnFailure::Fail,
            Some("cold") => OnFailure::Cold,
            Some(other) => {
                return Err(format!("the annotation {key} is {other:?}: it is fail or cold"));
            }
        };
        // A fresh start beside a workload that was moved is what a pod that moves does not want, nor one
        // whose word for it cannot be understood.
        let how = self.annotation(&format!("{RESTORE_AS}{name}"));
        let moves = how.is_some_and(|how| how != "clone");
        let on_failure = if moves { OnFailure::Fail } else { on_failure };
        Ok(Some(Wish { reference: reference.to_owned(), on_failure }))
    }

    /// Returns the name of what is noted about this container of its pod, whatever id it has.
    pub(super) fn note(&self) -> Option<String> {
        let [uid, name] = [POD_UID, CONTAINER_NAME].map(|key| self.annotation(key));
        noted::name(uid?, name?)
    }

    /// Whether it is one of a pod's containers, and not what holds the pod's namespaces.
    pub(super) fn is_container(&self) -> bool {
        self.annotation(CONTAINER_TYPE) == Some("container")
    }

    /// Whether CRIU has a configuration file for it already that is not this one.
    pub(super) fn has_criu_config_but(&self, file: &Path) -> bool {
        self.annotation(CRIU_CONFIG).is_some_and(|named| Path::new(named) != file)
    }

    /// Returns the container's cgroup, as a path in the hierarchy.
    pub(super) fn cgroup(&self) -> Option<String> {
        cgroup::path(self.spec.pointer("/linux/cgroupsPath")?.as_str()?)
    }

    /// Returns how readily the kernel ends the container's processes, where that is told.
    pub(super) fn oom(&self) -> Option<Adjustment> {
        let wanted = self.spec.pointer("/process/oomScoreAdj")?.as_i64()?;
        let capabilities = self.spec.pointer("/process/capabilities/bounding");
        let mut all = capabilities.and_then(Value::as_array).into_iter().flatten();
        let may_lower = all.any(|name| name == "CAP_SYS_RESOURCE");
        Some(Adjustment { wanted: wanted.try_into().ok()?, may_lower })
    }

    /// Returns the network namespace that the container is given.
    pub(super) fn network(&self) -> Option<PathBuf> {
        network::given(&self.spec)
    }

    /// Gives CRIU a configuration file. `config.json` is replaced whole.
    pub(super) fn set_criu_config(&mut self, criu_config: &str) -> io::Result<()> {
        let annotations = self.spec.as_object_mut().and_then(|spec| {
            spec.entry("annotations").or_insert_with(|| Value::Object(Map::default()));
            spec.get_mut("annotations")?.as_object_mut()
        });
        let shape = || io::Error::other("config.json breaks the runtime specification");
        annotations.ok_or_else(shape)?.insert(CRIU_CONFIG.to_owned(), criu_config.into());
        let new = self.file.with_extension("json.new");
        let mut written = fs::File::create(&new)?;
        written.write_all(self.spec.to_string().as_bytes())?;
        fs::rename(new, &self.file)
    }

    /// Returns the directory of the root file system.
    pub(super) fn root(&self) -> io::Result<PathBuf> {
        let shape = || io::Error::other("config.json names no root directory");
        let path = self.spec.pointer("/root/path").and_then(Value::as_str).ok_or_else(shape)?;
        // One that is not absolute is the bundle's.
        std::path::absolute(self.file.with_file_name(path))
    }

    /// Gives the root file system, which is mounted by now, the permissions of the one that was
    /// dumped: CRIU opens no directory that has others. Returns those it had.
    pub(super) fn permit_root(&self, mode: u32) -> io::Result<u32> {
        let directory = self.root()?;
        let had = fs::metadata(&directory)?.permissions().mode() & 0o7777;
        fs::set_permissions(directory, Permissions::from_mode(mode))?;
        Ok(had)
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.spec.get("annotations")?.get(key)?.as_str()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bundle(annotations: Value) -> (tempfile::TempDir, Bundle) {
        let directory = tempfile::tempdir().unwrap();
        let spec = json!({
            "annotations": annotations,
            "linux": { "cgroupsPath": "/k/c" },
            "root": { "path": "rootfs" },
        });
        fs::write(directory.path().join("config.json"), spec.to_string()).unwrap();
        let bundle = Bundle::read(directory.path()).unwrap();
        (directory, bundle)
    }

    #[test]
    fn the_specification_tells_whom_the_kernel_ends_first() {
        let (_directory, mut bundle) = bundle(json!({}));
        assert_eq!(bundle.oom(), None);
        let capabilities = |names: &[&str]| json!({ "bounding": names });
        for (names, may_lower) in [(&["CAP_CHOWN"][..], false), (&["CAP_SYS_RESOURCE"], true)] {
            let process = json!({ "oomScoreAdj": -997, "capabilities": capabilities(names) });
            bundle.spec["process"] = process;
            assert_eq!(bundle.oom(), Some(Adjustment { wanted: -997, may_lower }));
        }
    }

    #[test]
    fn only_the_named_container_of_a_pod_is_restored() {
        let mut annotations = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "web",
            "restore.kybernate.io/web": "host/app@sha256:0",
            "on-failure.kybernate.io/web": "cold",
        });
        let wish = bundle(annotations.clone()).1.wish().unwrap().unwrap();
        let expected = Wish { reference: "host/app@sha256:0".into(), on_failure: OnFailure::Cold };
        assert_eq!(wish, expected);

        annotations["restore-as.kybernate.io/web"] = json!("move");
        let wish = bundle(annotations.clone()).1.wish().unwrap().unwrap();
        assert_eq!(wish.on_failure, OnFailure::Fail, "it starts beside what was moved");

        annotations["on-failure.kybernate.io/web"] = json!("maybe");
        let wrong = bundle(annotations.clone()).1.wish().unwrap_err();
        assert!(wrong.contains("on-failure.kybernate.io/web"), "{wrong}");

        annotations["io.kubernetes.cri.container-name"] = json!("sidecar");
        assert_eq!(bundle(annotations.clone()).1.wish(), Ok(None));
        annotations["io.kubernetes.cri.container-name"] = json!("web");
        annotations["io.kubernetes.cri.container-type"] = json!("sandbox");
        assert_eq!(bundle(annotations).1.wish(), Ok(None));
    }

    #[test]
    fn the_configuration_of_criu_is_added_to_what_is_there() {
        let (directory, mut bundle) = bundle(json!({ "kept": "yes" }));
        bundle.set_criu_config("/run/x.conf").unwrap();
        let again = Bundle::read(directory.path()).unwrap();
        assert_eq!(again.annotation("org.criu.config"), Some("/run/x.conf"));
        assert!(again.has_criu_config_but(Path::new("/run/y.conf")) && !again.is_container());
        assert!(!again.has_criu_config_but(Path::new("/run/x.conf")));
        assert_eq!(again.annotation("kept"), Some("yes"));
        assert_eq!(again.cgroup().as_deref(), Some("/k/c"));
    }

    #[test]
    fn the_root_directory_of_the_bundle_gets_the_permissions() {
        let (directory, bundle) = bundle(json!({}));
        let root = directory.path().join("rootfs");
        bundle.permit_root(0o1555).unwrap_err();
        fs::create_dir(&root).unwrap();
        assert_eq!(bundle.root().unwrap(), root);
        fs::set_permissions(&root, Permissions::from_mode(0o750)).unwrap();
        assert_eq!(bundle.permit_root(0o1555).unwrap(), 0o750);
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o7777, 0o1555);
    }
}
