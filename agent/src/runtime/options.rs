//! The messages that containerd passes on to its runc shim (`api/types/runc/options/oci.proto`),
//! which containerd-client does not compile.

use prost_types::Any;

/// What containerd calls a runtime specification in an `Any`.
pub(crate) const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

const CHECKPOINT_TYPE: &str = "containerd.runc.v1.CheckpointOptions";
const OPTIONS_TYPE: &str = "containerd.runc.v1.Options";

/// Options of a task.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RuncOptions {
    /// Directory with CRIU's images: the task is restored from it.
    #[prost(string, tag = "10")]
    pub(crate) criu_image_path: String,
    /// Where CRIU writes its log.
    #[prost(string, tag = "11")]
    pub(crate) criu_work_path: String,
}

/// What a container's runtime was told when it was made.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RuntimeOptions {
    /// The runtime's program, when it is not runc.
    #[prost(string, tag = "6")]
    pub(crate) binary_name: String,
    /// Where it keeps containers, a directory for each namespace.
    #[prost(string, tag = "7")]
    pub(crate) root: String,
}

/// Options of a dump.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CheckpointOptions {
    /// Whether the container ends with the dump. Never set: what failed later would be lost.
    #[prost(bool, tag = "1")]
    pub(crate) exit: bool,
    /// Whether established TCP connections are dumped.
    #[prost(bool, tag = "2")]
    pub(crate) open_tcp: bool,
    /// Whether file locks are dumped.
    #[prost(bool, tag = "5")]
    pub(crate) file_locks: bool,
    /// The directory for the images. With it, nothing goes through the content store.
    #[prost(string, tag = "8")]
    pub(crate) image_path: String,
    /// Where CRIU writes its log.
    #[prost(string, tag = "9")]
    pub(crate) work_path: String,
}

/// What the shim tells of a process.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessDetails {
    #[prost(string, tag = "1")]
    exec_id: String,
}

/// Returns the name of the exec session that a process was started by, if it was.
pub(crate) fn exec_name(details: &Any) -> Option<String> {
    let details = <ProcessDetails as prost::Message>::decode(&*details.value).ok()?;
    Some(details.exec_id).filter(|name| !name.is_empty())
}

impl RuntimeOptions {
    /// Reads them; `None` when they are another shim's.
    pub(crate) fn of(options: &Any) -> Option<Self> {
        let ours = options.type_url.ends_with(OPTIONS_TYPE);
        ours.then(|| <Self as prost::Message>::decode(&*options.value).ok()).flatten()
    }
}

impl RuncOptions {
    pub(crate) fn to_any(&self) -> Any {
        any(OPTIONS_TYPE, self)
    }
}

impl CheckpointOptions {
    pub(crate) fn to_any(&self) -> Any {
        any(CHECKPOINT_TYPE, self)
    }
}

// containerd wants the bare name, without `type.googleapis.com/`.
fn any(name: &str, message: &impl prost::Message) -> Any {
    Any { type_url: name.to_owned(), value: message.encode_to_vec() }
}
