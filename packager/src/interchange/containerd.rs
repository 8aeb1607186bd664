//! containerd's own index of a checkpoint.
//!
//! It is an OCI image index whose entries are not manifests but the blobs themselves: a tar of
//! CRIU's images, the runtime specification, the layer that the container had written, perhaps
//! options; and the container image, which has to be on the node that restores. Its annotations say
//! which image, runtime and snapshotter.

mod dump_tar;
mod export;
mod import;
mod parts;

use prost::Message;

pub use self::dump_tar::{DumpTar, TarReader};
pub use self::export::{ExportRequest, Exported, export};
pub use self::import::{ImportRequest, import};
pub use self::parts::{Blobs, Parts, specification};

/// Whose format this is, in messages.
pub const FORMAT: &str = "containerd's index";

/// CRIU's images, an uncompressed tar.
const CRIU: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";
/// The runtime specification, JSON in an [`Any`].
const CONFIG: &str = "application/vnd.containerd.container.checkpoint.config.v1+proto";

/// Annotation with the name that an importing containerd gives an image.
const IMAGE_NAME: &str = "io.containerd.image.name";
/// Annotation with the name of the runtime.
const RUNTIME: &str = "io.containerd.checkpoint.runtime";
/// Annotation with the name of the snapshotter.
const SNAPSHOTTER: &str = "io.containerd.checkpoint.snapshotter";

/// The type that containerd writes a runtime specification with.
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// A message of any type (`google.protobuf.Any`).
#[derive(Clone, PartialEq, Eq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}
