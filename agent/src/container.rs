//! A source container as containerd describes it.

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
