//! Media types of the artifact and of the OCI specifications.

/// An OCI image index.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// An OCI image manifest.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An OCI image configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The empty descriptor's content, `{}` (image specification, "Guidance for an empty descriptor").
pub const OCI_EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// A file system layer, tar compressed with zstd.
pub const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// A file system layer, tar compressed with gzip.
pub const OCI_LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// A file system layer, uncompressed tar.
pub const OCI_LAYER_TAR: &str = "application/vnd.oci.image.layer.v1.tar";
/// Docker's manifest list, schema 2.
pub const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Docker's image manifest, schema 2.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

/// The artifact type of a checkpoint index.
pub const CHECKPOINT: &str = "application/vnd.kybernate.checkpoint.v1+json";
/// The facts of a checkpoint: config of the checkpoint manifest.
pub const CHECKPOINT_CONFIG: &str = "application/vnd.kybernate.checkpoint.config.v1+json";
/// The page index.
pub const PAGE_INDEX: &str = "application/vnd.kybernate.checkpoint.index.v1";
/// All small files of the dump.
pub const IMAGES_PACK: &str = "application/vnd.kybernate.checkpoint.images.v1";
/// A page shard.
pub const PAGES: &str = "application/vnd.kybernate.checkpoint.pages.v1";
/// A shard of device memory.
pub const DEVICE: &str = "application/vnd.kybernate.checkpoint.device.v1";
/// A hash of each stored page, for increments against a base that is elsewhere.
pub const PAGE_HASHES: &str = "application/vnd.kybernate.checkpoint.pagehash.v1";
/// The content of one captured mount.
pub const VOLUME: &str = "application/vnd.kybernate.checkpoint.volume.v1.tar";

/// The artifact type of what says who has taken a checkpoint for itself.
pub const CLAIM: &str = "application/vnd.kybernate.claim.v1+json";

/// A Sigstore bundle, as cosign 3 writes it.
pub const SIGSTORE_BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// The payload of the bundle's DSSE envelope.
pub const IN_TOTO: &str = "application/vnd.in-toto+json";
