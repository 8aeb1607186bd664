//! Who else has what a pod's container is given: its shared memory and its emptyDirs are its pod's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use containerd_client::services::v1::Container;

use crate::app::App;
use crate::container::spec_of;
use crate::runtime::{RuntimeError, TaskState, TaskStatus};

/// Label of the CRI plugin, and what holds a pod's namespaces with it: that one has the shared memory,
/// and never looks at it.
const KIND: (&str, &str) = ("io.cri-containerd.kind", "sandbox");

/// Whether a container of this namespace runs that has one of these directories. One that is being
/// `created` has a task of which nothing is known yet.
pub(super) async fn are_used(
    app: &App,
    namespace: &str,
    directories: &[PathBuf],
    created: Option<&str>,
) -> Result<bool, RuntimeError> {
    if directories.is_empty() {
        return Ok(false);
    }
    let namespace = app.containerd.namespace(namespace);
    let containers = namespace.containers().await?;
    // One that is created between the two looks is not seen.
    let tasks: BTreeMap<String, TaskState> = namespace.all_tasks().await?.into_iter().collect();
    let runs = |container: &Container| {
        Some(&*container.id) != created
            && tasks.get(&container.id).is_some_and(|task| task.status != TaskStatus::Stopped)
    };
    Ok(containers.iter().any(|container| runs(container) && has_one(container, directories)))
}

fn has_one(container: &Container, directories: &[PathBuf]) -> bool {
    if container.labels.get(KIND.0).is_some_and(|kind| kind == KIND.1) {
        return false;
    }
    // One that cannot be read has what it has.
    let Ok(spec) = spec_of(container) else { return true };
    let is_one = |source: &Path| {
        directories.iter().any(|one| {
            source.starts_with(one) || sub_paths(one).is_some_and(|place| source.starts_with(place))
        })
    };
    spec.binds().any(|(_, source)| is_one(source))
}

/// Returns where a kubelet mounts parts of an emptyDir (`subPath`): of `PODS/UID/volumes/KIND/NAME` below
/// `PODS/UID/volume-subpaths/NAME`.
fn sub_paths(directory: &Path) -> Option<PathBuf> {
    let pod =
        directory.parent()?.parent().filter(|volumes| volumes.ends_with("volumes"))?.parent()?;
    Some(pod.join("volume-subpaths").join(directory.file_name()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container(source: &str, labels: &[(&str, &str)]) -> Container {
        let mounts = json!([{ "destination": "/x", "type": "bind", "source": source, "options": ["rbind"] }]);
        let spec = json!({ "mounts": mounts }).to_string().into_bytes();
        let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
        Container {
            spec: Some(prost_types::Any { type_url: String::new(), value: spec }),
            labels: labels.collect(),
            ..Container::default()
        }
    }

    #[test]
    fn what_holds_the_pods_namespaces_uses_nothing() {
        let directories = [PathBuf::from("/pods/1/shm")];
        assert!(has_one(&container("/pods/1/shm", &[]), &directories));
        assert!(has_one(&container("/pods/1/shm/sub", &[]), &directories));
        assert!(!has_one(&container("/pods/1/shm2", &[]), &directories));
        assert!(!has_one(&container("/pods/1/shm", &[KIND]), &directories));
        let directories = [PathBuf::from("/pods/1/volumes/kubernetes.io~empty-dir/scratch")];
        assert!(has_one(&container("/pods/1/volume-subpaths/scratch/side/0", &[]), &directories));
        assert!(!has_one(&container("/pods/1/volume-subpaths/other/side/0", &[]), &directories));
        let odd = Container { spec: None, ..Container::default() };
        assert!(has_one(&odd, &directories));
    }
}
