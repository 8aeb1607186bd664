//! What is pushed: bytes nobody else has, and manifests around them.

use bytes::Bytes;
use kybernate_spec::{Algorithm, Descriptor, Digest, media_type};
use serde_json::{Value, json};

use super::reply::digest_of;

/// A manifest as it goes over the wire.
#[derive(Clone, Debug)]
pub struct Doc {
    /// What it is pushed as.
    pub media_type: String,
    /// Its bytes.
    pub content: Bytes,
}

impl Doc {
    /// Makes a manifest of exactly these bytes.
    pub fn raw(media_type: &str, content: impl Into<Bytes>) -> Self {
        Self { media_type: media_type.to_owned(), content: content.into() }
    }

    /// Makes a manifest of a JSON value.
    pub fn new(media_type: &str, value: &Value) -> Self {
        Self::raw(media_type, value.to_string())
    }

    /// Makes an OCI image manifest; `more` is added to its fields and replaces them.
    pub fn image(config: &Descriptor, layers: &[Descriptor], more: Value) -> Self {
        let value = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_MANIFEST,
            "config": config,
            "layers": layers,
        });
        Self::new(media_type::OCI_MANIFEST, &merged(value, more))
    }

    /// Makes an OCI image index; `more` is added to its fields and replaces them.
    pub fn index(manifests: &[Descriptor], more: Value) -> Self {
        let value = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_INDEX,
            "manifests": manifests,
        });
        Self::new(media_type::OCI_INDEX, &merged(value, more))
    }

    /// Makes an image manifest or manifest list of Docker's, from one of OCI's.
    #[must_use]
    pub fn docker(&self) -> Self {
        let ours = String::from_utf8_lossy(&self.content);
        let pairs = [
            (media_type::OCI_MANIFEST, media_type::DOCKER_MANIFEST),
            (media_type::OCI_INDEX, media_type::DOCKER_MANIFEST_LIST),
            (media_type::OCI_CONFIG, "application/vnd.docker.container.image.v1+json"),
            (media_type::OCI_LAYER_TAR, "application/vnd.docker.image.rootfs.diff.tar"),
        ];
        let swap = |text: String| {
            pairs.iter().fold(text, |text, (oci, docker)| {
                text.replace(&format!("\"{oci}\""), &format!("\"{docker}\""))
            })
        };
        let quoted = swap(format!("\"{}\"", self.media_type));
        Self::raw(quoted.trim_matches('"'), swap(ours.into_owned()))
    }

    /// Returns the digest.
    pub fn digest(&self) -> Digest {
        digest_of(Algorithm::Sha256, &self.content)
    }

    /// Returns a descriptor of it.
    pub fn descriptor(&self) -> Descriptor {
        Descriptor::of(&self.media_type, &self.content)
    }
}

/// Returns `length` bytes that follow from `seed` and look random.
pub fn bytes(seed: &str, length: usize) -> Bytes {
    let mut content = vec![0; length];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut content);
    content.into()
}

/// Adds the fields of `more` to `value`; a null takes a field away.
fn merged(mut value: Value, more: Value) -> Value {
    if let (Value::Object(fields), Value::Object(more)) = (&mut value, more) {
        for (name, value) in more {
            if value.is_null() {
                fields.remove(&name);
            } else {
                fields.insert(name, value);
            }
        }
    }
    value
}
