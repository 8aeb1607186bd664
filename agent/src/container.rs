//! A source container as containerd describes it.

use std::path::{Component, Path};

use containerd_client::services::v1::Container;
use kybernate_packager::runtime_spec::SourceSpec;

/// Label of Kubernetes with the pod's namespace.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label of Kubernetes with the container's name in its pod.
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Reads a container's specification.
pub(crate) fn spec_of(container: &Container) -> Result<SourceSpec, serde_json::Error> {
    let spec = container.spec.as_ref().map(|spec| &*spec.value).unwrap_or_default();
    serde_json::from_slice(spec)
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
}
