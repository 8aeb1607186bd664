//! The archive that kubelet's checkpoint API leaves, made by CRI-O or containerd, and Podman's export.
//!
//! All three are one tar: CRIU's images in `checkpoint/`, what the container had written as
//! `rootfs-diff.tar` beside them, and JSON documents that say what it was (checkpointctl's library
//! is the nearest thing to a specification). They differ in what else there is.

mod export;
mod import;
mod layer;
mod previous;

pub use self::export::{ExportRequest, Exported, export};
pub use self::import::{ImportRequest, import};

/// Directory of CRIU's images.
const CHECKPOINT: &str = "checkpoint/";
/// Directory of an earlier dump that the images need.
const PRE_CHECKPOINT: &str = "pre-checkpoint/";
/// What makes a dump need an earlier one: a link to its directory.
const PARENT: &str = "checkpoint/parent";
/// What the container is called, and what it was started from.
const CONFIG: &str = "config.dump";
/// The runtime specification.
const SPEC: &str = "spec.dump";
/// The status that CRI shows, which containerd reads.
const STATUS: &str = "status.dump";
/// What the container had written: a tar, which containerd compresses.
const ROOTFS_DIFF: &str = "rootfs-diff.tar";
/// JSON list of what it had deleted, where the tar does not say so.
const DELETED: &str = "deleted.files";
/// JSON list of what was mounted from the node.
const BIND_MOUNTS: &str = "bind.mounts";
/// Content of `/dev/shm`, which Podman mounts from outside.
const DEV_SHM: &str = "devshm-checkpoint.tar";
/// A file that Podman mounts into each container, and leaves out of what the container had written.
const CONTAINER_ENV: &str = "/run/.containerenv";
/// Directory of the content of Podman's named volumes.
const VOLUMES: &str = "volumes/";
