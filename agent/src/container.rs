//! A source container as containerd describes it.

use std::path::{Component, Path, PathBuf};

use containerd_client::services::v1::Container;
use kybernate_packager::runtime_spec::SourceSpec;

use crate::app::Rejection;
use crate::{cgroup, network};

/// Of a pod: `restore-as.kybernate.io/CONTAINER: clone|move`.
pub(crate) const RESTORE_AS: &str = "restore-as.kybernate.io/";

/// Label of Kubernetes with the pod's namespace.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label of Kubernetes with the container's name in its pod.
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Where containers are unless a request says so.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";

/// containerd's bound for ids.
pub(crate) const NAME_BYTES_MAX: usize = 76;

/// Reads a container's specification.
pub(crate) fn spec_of(container: &Container) -> Result<SourceSpec, serde_json::Error> {
    let spec = container.spec.as_ref().map(|spec| &*spec.value).unwrap_or_default();
    serde_json::from_slice(spec)
}

/// Returns the network namespace that a container was given.
pub(crate) fn network_of(container: &Container) -> Option<PathBuf> {
    let spec = container.spec.as_ref().map(|spec| &*spec.value)?;
    network::given(&serde_json::from_slice(spec).ok()?)
}

/// Returns the cgroup that the runtime has made for a container, as a path in the hierarchy.
pub(crate) fn cgroup_of(container: &Container) -> Option<String> {
    let spec = container.spec.as_ref().map(|spec| &*spec.value)?;
    let spec: serde_json::Value = serde_json::from_slice(spec).ok()?;
    cgroup::path(spec.pointer("/linux/cgroupsPath")?.as_str()?)
}

/// Whether a kubelet made it. Such a container's id is no other's, at any time.
pub(crate) fn is_of_pod(container: &Container) -> bool {
    container.labels.contains_key(POD_NAMESPACE)
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

/// Whether a directory is an emptyDir, as kubelets lay them out:
/// `…/pods/UID/volumes/kubernetes.io~empty-dir/NAME`.
pub(crate) fn is_empty_dir(source: &Path) -> bool {
    let mut names = source.components().rev().skip(1).map(Component::as_os_str);
    names.next().is_some_and(|kind| kind == "kubernetes.io~empty-dir")
        && names.next().is_some_and(|name| name == "volumes")
}

/// Whether containerd takes something as the id of a container: words of letters and digits with one
/// of three signs between two of them.
pub(crate) fn is_name(name: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric());
    name.len() <= NAME_BYTES_MAX && name.split(['.', '_', '-']).all(is_word)
}

/// Understands the namespace of a request. Of a Pod's there may be two signs between two words.
pub(crate) fn namespace_or_default(name: String) -> Result<String, Rejection> {
    if name.is_empty() {
        return Ok(DEFAULT_NAMESPACE.to_owned());
    }
    let is_edge = |c: char| c.is_ascii_alphanumeric();
    let is_namespace = name.len() <= NAME_BYTES_MAX
        && name.starts_with(is_edge)
        && name.ends_with(is_edge)
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    let wrong = || Rejection::Invalid(format!("{name:?} is no name for a namespace"));
    if is_namespace { Ok(name) } else { Err(wrong()) }
}

/// Understands the name of a container that is there.
pub(crate) fn named(container: String) -> Result<String, Rejection> {
    if container.is_empty() {
        Err(Rejection::Invalid("no container is named".to_owned()))
    } else if is_name(&container) {
        Ok(container)
    } else {
        Err(Rejection::Invalid(format!("{container:?} is no name for a container")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_dir_is_known_by_its_place() {
        let pod = "/var/lib/kubelet/pods/0b7f/volumes";
        assert!(is_empty_dir(Path::new(&format!("{pod}/kubernetes.io~empty-dir/scratch"))));
        for other in
            ["kubernetes.io~empty-dir", "kubernetes.io~secret/s", "kubernetes.io~empty-dir/a/b"]
        {
            assert!(!is_empty_dir(Path::new(&format!("{pod}/{other}"))), "{other}");
        }
        assert!(!is_empty_dir(Path::new("/kubernetes.io~empty-dir/x")));
    }

    #[test]
    fn names_are_those_containerd_takes() {
        assert!(is_name("web") && is_name("web-1.a_b") && is_name("0"));
        for wrong in ["", "-web", "web-", "a/b", "a..b", "a-_b", "é", "a\0"] {
            assert!(!is_name(wrong), "{wrong:?}");
        }
        assert!(!is_name(&"n".repeat(NAME_BYTES_MAX + 1)));
        assert!(named("../x".to_owned()).is_err() && named(String::new()).is_err());
    }

    #[test]
    fn a_namespace_is_a_name() {
        let check = |name: &str| namespace_or_default(name.to_owned());
        assert_eq!(check("").unwrap(), "default");
        assert_eq!(check("team--a").unwrap(), "team--a");
        let long = "n".repeat(NAME_BYTES_MAX + 1);
        for wrong in ["../x", "a\nb", "a\0b", "-", " ", &long] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("no name for a namespace"), "{error}");
        }
    }
}
