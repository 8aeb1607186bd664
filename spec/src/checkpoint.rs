//! The facts of a checkpoint: the config of the checkpoint manifest (`spec/artifact.md`, "Config").

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Digest;

/// Version of the artifact format that this crate reads and writes, `major.minor`.
pub const FORMAT_VERSION: &str = "1.0";

/// Largest config accepted, in bytes. Facts are a few KB; mounts and CPU features are what grows.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The facts of a checkpoint. They are claims of whoever packed it, proven by the signature; what
/// CRIU would act on is decoded again from its images before a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointConfig {
    /// Version of the artifact format, `major.minor`. Another major is refused.
    pub version: String,
    /// Time of the dump, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// What was captured.
    #[serde(default)]
    pub source: Source,
    /// Restores after this time are refused, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_after: Option<String>,
    /// Where in a chain of checkpoints this one stands.
    #[serde(default)]
    pub lineage: Lineage,
    /// The node of the dump. Absent when packed from a bare directory: then a restore needs
    /// `unknown facts` to be allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeFacts>,
    /// What the process needs around it.
    #[serde(default)]
    pub needs: Needs,
    /// What device memory the dump holds, and where.
    #[serde(default)]
    pub device: DeviceFacts,
    /// What is inside, and how large.
    #[serde(default)]
    pub sizes: Sizes,
}

/// What was captured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Source {
    /// Name of the cluster, as the node's configuration has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Namespace: the pod's, or containerd's without Kubernetes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Service account of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account: Option<String>,
    /// Hash of the pod's template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_template_hash: Option<String>,
    /// Name of the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Name of the container image it was started from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Digest of that image's manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<Digest>,
}

/// Where in a chain of checkpoints one stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Lineage {
    /// 0 for a full checkpoint.
    pub generation: u32,
    /// Digest of the index it was compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
}

/// What a node is, as far as it decides a restore. An empty text, and a page size of 0, are facts
/// that could not be found out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeFacts {
    /// CPU architecture, in Go's words (`amd64`).
    pub architecture: String,
    /// Kernel release, as uname(2) has it.
    pub kernel: String,
    /// Size of a memory page in bytes.
    pub page_bytes: u32,
    /// `v1` or `v2`.
    pub cgroup: String,
    /// `none`, `apparmor` or `selinux`.
    pub lsm: String,
    /// The CPU.
    pub cpu: CpuFacts,
    /// Version of CRIU, as `4.1.1`.
    pub criu: String,
    /// Name and version of the OCI runtime, as `runc 1.1.15`.
    pub runtime: String,
    /// Version of containerd.
    pub containerd: String,
    /// Name and version of the operating system.
    #[serde(default)]
    pub os: String,
    /// Whether the kernel has seccomp filters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<bool>,
    /// Character devices that containers can be given, by path; terminals and what every container
    /// has are left out. Not part of a checkpoint: the source's are in `needs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<BTreeSet<String>>,
    /// The GPUs; an empty list when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuFacts>,
}

/// The CPU of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CpuFacts {
    /// Vendor, as cpuid has it.
    pub vendor: String,
    /// Model name.
    pub model: String,
    /// Features a program may have chosen its code by, as /proc/cpuinfo names them.
    pub features: BTreeSet<String>,
    /// How it saves the registers of its extensions; absent where it has no XSAVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xsave: Option<XsaveFacts>,
}

/// How an x86 CPU saves the registers of its extensions, as cpuid's leaf 13 has it. A frame that
/// one CPU has written can be read only by one that lays it out alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct XsaveFacts {
    /// State components that user code can have, one bit each, as in XCR0.
    pub features: u64,
    /// Bytes of a frame with what is switched on.
    pub bytes: u32,
    /// Bytes of a frame with everything the CPU has.
    pub bytes_max: u32,
}

/// The GPUs of a node, and what drives them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuFacts {
    /// Version of the driver, as `580.105.08`.
    pub driver: String,
    /// Newest version of CUDA that the driver serves, as `13.0`.
    pub cuda: String,
    /// The GPUs, in the driver's order.
    pub devices: Vec<Gpu>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// Its UUID, as `GPU-5a17…`.
    pub uuid: String,
    /// Name of the product.
    pub model: String,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// Compute capability, as `9.0`.
    pub compute_capability: String,
}

/// What the process needs around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Needs {
    /// Mounts of the container, in order.
    pub mounts: Vec<NeededMount>,
    /// Host devices, by path in the container.
    pub devices: Vec<String>,
    /// Host namespaces the container shared: network, pid, ipc, uts.
    pub host_namespaces: Vec<String>,
    /// Who the processes were.
    pub identity: Identity,
}

/// One mount of the source container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NeededMount {
    /// Where in the container.
    pub destination: String,
    /// File system type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Mount options.
    #[serde(default)]
    pub options: Vec<String>,
    /// Whether it came from the host, so that CRIU does not restore it.
    #[serde(default)]
    pub external: bool,
}

/// Who the processes were, over all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Identity {
    /// User ids.
    pub uids: BTreeSet<u32>,
    /// Group ids.
    pub gids: BTreeSet<u32>,
    /// Capabilities any process could use or regain, as `CAP_CHOWN`.
    pub capabilities: BTreeSet<String>,
    /// Whether every process had `no_new_privs`.
    pub no_new_privileges: bool,
    /// Whether every process had a seccomp filter.
    pub seccomp: bool,
}

/// What device memory the dump holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceFacts {
    /// Where device memory is.
    pub storage: DeviceStorage,
    /// UUIDs of the GPUs the processes used, which are described in the node's facts. All of the
    /// node's when empty although there is device memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// The files that hold device memory: only with [`DeviceStorage::Device`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<DeviceStream>,
}

/// What one process had on one GPU: a file of the dump.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStream {
    /// Name of the file, which `pid` and `gpu` make.
    pub file: String,
    /// Id of the process in its innermost namespace.
    pub pid: u32,
    /// UUID of the GPU, as `GPU-5a17…`.
    pub gpu: String,
    /// Length of the file in bytes.
    pub bytes: u64,
}

/// Where device memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceStorage {
    /// There is none.
    #[default]
    None,
    /// In host memory, so in the page shards.
    Pages,
    /// In files of its own, so in device shards.
    Device,
}

/// What is inside a checkpoint, and how large.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Sizes {
    /// Processes of the dump.
    pub processes: u32,
    /// Threads of all processes.
    pub threads: u32,
    /// Apparent size of all files of the dump, in bytes.
    pub dump_bytes: u64,
    /// Apparent size of the files in page shards, in bytes.
    pub bulk_bytes: u64,
    /// Bytes stored in page shards: `bulk_bytes` without zero pages.
    pub page_bytes: u64,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            version: FORMAT_VERSION.to_owned(),
            created: None,
            source: Source::default(),
            not_after: None,
            lineage: Lineage::default(),
            node: None,
            needs: Needs::default(),
            device: DeviceFacts::default(),
            sizes: Sizes::default(),
        }
    }
}

#[cfg(test)]
mod tests;
