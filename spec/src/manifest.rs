//! Descriptors, manifests and indexes: the JSON documents that tie blobs together.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Digest, media_type};

/// Annotations, ordered so that equal maps have equal bytes.
pub type Annotations = BTreeMap<String, String>;

/// Largest manifest written or accepted, in bytes (distribution specification, "Pushing
/// Manifests": registries accept at least 4 MiB).
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// Points at content by digest (image specification, "OCI Content Descriptors").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the content.
    pub media_type: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Length of the content in bytes.
    pub size: u64,
    /// Media type of the artifact a manifest describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// Where the content runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Free-form facts.
    #[serde(default, skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
    /// The content itself, base64, when it is small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Other places of the content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

/// Where a container image runs (image specification, "Image Index").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// CPU architecture, in Go's words.
    pub architecture: String,
    /// Operating system, in Go's words.
    pub os: String,
    /// Version of the operating system.
    #[serde(default, rename = "os.version", skip_serializing_if = "Option::is_none")]
    pub os_version: Option<String>,
    /// Features of the operating system.
    #[serde(default, rename = "os.features", skip_serializing_if = "Vec::is_empty")]
    pub os_features: Vec<String>,
    /// Variant of the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// An image manifest (image specification, "OCI Image Manifest").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of this document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// What the manifest is, when it is no container image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The configuration.
    pub config: Descriptor,
    /// The layers, lowest first.
    pub layers: Vec<Descriptor>,
    /// What this manifest refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Free-form facts.
    #[serde(default, skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
}

/// An image index (image specification, "OCI Image Index").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of this document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// What the index is, when it is no container image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The children.
    pub manifests: Vec<Descriptor>,
    /// What this index refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Free-form facts.
    #[serde(default, skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
}

impl Descriptor {
    /// Describes `content`, which must be held whole.
    pub fn of(media_type: &str, content: &[u8]) -> Self {
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        Self::new(media_type, Digest::of(content), size)
    }

    /// Describes content by its digest and size.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            platform: None,
            annotations: Annotations::new(),
            data: None,
            urls: Vec::new(),
        }
    }

    /// Adds one annotation.
    #[must_use]
    pub fn with_annotation(mut self, key: &str, value: impl Into<String>) -> Self {
        self.annotations.insert(key.to_owned(), value.into());
        self
    }

    /// Describes the same content with nothing but media type, digest, size and artifact type.
    #[must_use]
    pub fn bare(&self) -> Self {
        let bare = Self::new(&self.media_type, self.digest.clone(), self.size);
        Self { artifact_type: self.artifact_type.clone(), ..bare }
    }

    /// Whether the content is an image index or Docker's manifest list.
    pub fn is_index(&self) -> bool {
        matches!(&*self.media_type, media_type::OCI_INDEX | media_type::DOCKER_MANIFEST_LIST)
    }

    /// Whether the content is an image manifest.
    pub fn is_manifest(&self) -> bool {
        matches!(&*self.media_type, media_type::OCI_MANIFEST | media_type::DOCKER_MANIFEST)
    }
}
