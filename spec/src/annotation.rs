//! Annotation keys.
//!
//! Never `org.criu.*` nor `io.kubernetes.cri-o.*`: those on the index would send containerd 2.1–2.3
//! and CRI-O into their own importers (`spec/artifact.md`, "Annotations").

/// File name of a layer; oras skips layers without one.
pub const TITLE: &str = "org.opencontainers.image.title";
/// Time of the dump, RFC 3339.
pub const CREATED: &str = "org.opencontainers.image.created";
/// Name of the source image.
pub const BASE_NAME: &str = "org.opencontainers.image.base.name";
/// Digest of the source image's manifest.
pub const BASE_DIGEST: &str = "org.opencontainers.image.base.digest";
/// Name of a manifest in an image layout's `index.json`.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Version of the artifact format, `major.minor`.
pub const FORMAT_VERSION: &str = "io.kybernate.format.version";
/// Name of the source container.
pub const CONTAINER: &str = "io.kybernate.container";
/// Namespace of the source container.
pub const NAMESPACE: &str = "io.kybernate.namespace";
/// What an index entry is: `runnable` or `checkpoint`.
pub const ROLE: &str = "io.kybernate.role";
/// On an index entry whose image has zstd layers: containers/image (skopeo, podman, buildah) looks
/// for it, and adds it when it is not there, which changes the index and so its digest.
pub const ZSTD: &str = "io.github.containers.compression.zstd";
/// Where in the container a volume layer was mounted.
pub const DESTINATION: &str = "io.kybernate.volume.destination";
/// Which part of a volume's tar a layer is, from 0; absent where it is the whole of it.
pub const PART: &str = "io.kybernate.volume.part";

/// The node of whoever has taken a checkpoint for itself.
pub const CLAIM_NODE: &str = "io.kybernate.claim.node";
/// Its namespace in Kubernetes, or containerd's.
pub const CLAIM_NAMESPACE: &str = "io.kybernate.claim.namespace";
/// The UID of its pod, or the container's id without one.
pub const CLAIM_OWNER: &str = "io.kybernate.claim.owner";
/// The container's name.
pub const CLAIM_CONTAINER: &str = "io.kybernate.claim.container";

/// What a Sigstore bundle holds.
pub const BUNDLE_CONTENT: &str = "dev.sigstore.bundle.content";
/// The predicate type within a Sigstore bundle.
pub const BUNDLE_PREDICATE: &str = "dev.sigstore.bundle.predicateType";
