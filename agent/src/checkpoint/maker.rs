//! Which runtime made a container. What another than runc made is not dumped: what runc writes beside
//! CRIU's images would be missing, and only runc restores here (`spec/decisions/0063`).

use std::path::{Path, PathBuf};

use containerd_client::services::v1::Container;
use fs_err as fs;
use kybernate_spec::chain;
use serde::Deserialize;

use crate::preflight::{Check, Finding};
use crate::runtime::RuntimeOptions;

/// Where containerd's shim has runtimes keep their containers unless it is told otherwise.
const ROOT: &str = "/run/containerd/runc";

/// What every runc keeps of a container, and nobody else under that name.
const STATE: &str = "state.json";

/// Where a container's runtime should have left its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Maker {
    /// The container's directory.
    place: PathBuf,
    /// What containerd calls the runtime.
    name: String,
}

/// Of runc's record no more than what others do not have in theirs.
#[derive(Debug, Deserialize)]
struct Record {
    #[serde(rename = "init_process_pid")]
    _pid: u32,
}

impl Maker {
    pub(super) fn of(container: &Container, namespace: &str) -> Self {
        let runtime = container.runtime.clone().unwrap_or_default();
        let options = runtime.options.as_ref().and_then(RuntimeOptions::of).unwrap_or_default();
        let root = if options.root.is_empty() { ROOT } else { &*options.root };
        let name = match &*options.binary_name {
            "" => runtime.name,
            binary => format!("{} with {binary}", runtime.name),
        };
        Self { place: Path::new(root).join(namespace).join(&container.id), name }
    }

    /// Says so when it was not runc. Reads a file.
    pub(super) fn finding(&self) -> Option<Finding> {
        let file = self.place.join(STATE);
        let read = fs::read(&file).map_err(|error| chain(&error).to_string());
        let record = read.and_then(|content| {
            serde_json::from_slice::<Record>(&content)
                .map_err(|error| format!("{} is none of runc's: {error}", file.display()))
        });
        let why = record.err()?;
        Some(Finding::new(Check::Runtime, format!("{}: {why}", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use containerd_client::services::v1::container::Runtime;
    use prost_types::Any;

    use super::*;

    fn container(options: &RuntimeOptions) -> Container {
        let value = prost::Message::encode_to_vec(options);
        let options = Any { type_url: "containerd.runc.v1.Options".to_owned(), value };
        let runtime = Runtime { name: "io.containerd.runc.v2".to_owned(), options: Some(options) };
        Container { id: "job".to_owned(), runtime: Some(runtime), ..Container::default() }
    }

    #[test]
    fn a_record_is_where_containerds_shim_has_it_kept() {
        let options = RuntimeOptions::default();
        let usual = Maker::of(&container(&options), "k8s.io");
        assert_eq!(usual.place, Path::new("/run/containerd/runc/k8s.io/job"));
        assert_eq!(usual.name, "io.containerd.runc.v2");
        let (binary_name, root) = ("crun".to_owned(), "/run/docker/runtime-runc".to_owned());
        let other = Maker::of(&container(&RuntimeOptions { binary_name, root }), "moby");
        assert_eq!(other.place, Path::new("/run/docker/runtime-runc/moby/job"));
        assert_eq!(other.name, "io.containerd.runc.v2 with crun");
        let bare = Container { runtime: None, ..container(&options) };
        assert_eq!(
            Maker::of(&bare, "default").place,
            Path::new("/run/containerd/runc/default/job")
        );
    }

    #[test]
    fn only_runc_is_runc() {
        let root = tempfile::tempdir().unwrap();
        let maker = Maker { place: root.path().to_owned(), name: "named".to_owned() };
        let told = || maker.finding().map(|finding| finding.to_string());
        // crun's record is called `status`.
        fs::write(root.path().join("status"), "{\"pid\": 7}").unwrap();
        let missing = told().unwrap();
        assert!(missing.contains("named") && missing.contains("state.json"), "{missing}");
        // youki's has this.
        fs::write(root.path().join(STATE), "{\"ociVersion\": \"v1\", \"pid\": 7}").unwrap();
        assert!(told().unwrap().contains("is none of runc's"));
        fs::write(root.path().join(STATE), "{\"id\": \"job\", \"init_process_pid\": 7}").unwrap();
        assert_eq!(told(), None);
    }
}
