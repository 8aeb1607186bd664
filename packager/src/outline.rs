//! What any manifest or index names, without caring which of the two it is.

use kybernate_spec::{Annotations, Descriptor, media_type};
use serde::Deserialize;

/// Docker's image configuration.
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// The parts of a manifest or index that lead somewhere else, and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Media type of the document itself.
    pub media_type: String,
    /// What it is: `artifactType`, else the media type of its config.
    pub artifact_type: Option<String>,
    /// What it refers to.
    pub subject: Option<Descriptor>,
    /// Its children, when it is an index.
    pub manifests: Vec<Descriptor>,
    /// Its config, if it has one, then its layers.
    pub blobs: Vec<Descriptor>,
    /// Its annotations.
    pub annotations: Annotations,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: Option<String>,
    artifact_type: Option<String>,
    subject: Option<Descriptor>,
    config: Option<Descriptor>,
    manifests: Option<Vec<Descriptor>>,
    layers: Option<Vec<Descriptor>>,
    annotations: Option<Annotations>,
}

impl Outline {
    /// Reads a manifest or index. `declared` is the media type that whoever sent it says it has,
    /// for documents that do not say themselves.
    pub fn parse(content: &[u8], declared: Option<&str>) -> Result<Self, serde_json::Error> {
        let document: Document = serde_json::from_slice(content)?;
        let shape = match (&document.manifests, &document.config) {
            (Some(_), None) => media_type::OCI_INDEX,
            _ => media_type::OCI_MANIFEST,
        };
        let media_type = document
            .media_type
            .or_else(|| declared.filter(|t| t.contains("json")).map(ToOwned::to_owned))
            .unwrap_or_else(|| shape.to_owned());
        let config_type = document.config.as_ref().map(|config| config.media_type.clone());
        Ok(Self {
            media_type,
            artifact_type: document.artifact_type.or(config_type),
            subject: document.subject,
            manifests: document.manifests.unwrap_or_default(),
            blobs: document.config.into_iter().chain(document.layers.unwrap_or_default()).collect(),
            annotations: document.annotations.unwrap_or_default(),
        })
    }

    /// Returns the artifact type unless it is that of an ordinary container image, or none.
    pub fn own_artifact_type(&self) -> Option<String> {
        let ordinary = [media_type::OCI_CONFIG, media_type::OCI_EMPTY, DOCKER_CONFIG];
        self.artifact_type.clone().filter(|own| !ordinary.contains(&own.as_str()))
    }

    /// Describes the document as a list of referrers does: with artifact type and annotations.
    #[must_use]
    pub fn referrer(&self, descriptor: &Descriptor) -> Descriptor {
        let mut referrer = descriptor.bare();
        referrer.artifact_type.clone_from(&self.artifact_type);
        referrer.annotations.clone_from(&self.annotations);
        referrer
    }
}

/// Whether a referrer may be of `wanted` type. An entry without a type is kept, as is one with the
/// type of the empty config: cosign writes both into fallback indexes, and reading the manifest
/// decides.
pub(crate) fn may_be(referrer: &Descriptor, wanted: Option<&str>) -> bool {
    match (wanted, referrer.artifact_type.as_deref()) {
        (None, _) | (_, None | Some(media_type::OCI_EMPTY)) => true,
        (Some(wanted), Some(artifact_type)) => wanted == artifact_type,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_does_not_say_what_it_is_goes_by_its_shape() {
        let index = Outline::parse(br#"{"schemaVersion":2,"manifests":[]}"#, None).unwrap();
        assert_eq!(index.media_type, media_type::OCI_INDEX);
        let declared = Outline::parse(
            br#"{"schemaVersion":2,"manifests":[]}"#,
            Some(media_type::DOCKER_MANIFEST_LIST),
        );
        assert_eq!(declared.unwrap().media_type, media_type::DOCKER_MANIFEST_LIST);
    }

    #[test]
    fn null_lists_are_empty_lists() {
        let outline = Outline::parse(br#"{"manifests":null,"layers":null}"#, None).unwrap();
        assert!(outline.manifests.is_empty() && outline.blobs.is_empty());
    }

    #[test]
    fn an_entry_of_cosigns_fallback_index_is_kept() {
        let entry = Descriptor::of(media_type::OCI_MANIFEST, b"{}");
        let quirk =
            Descriptor { artifact_type: Some(media_type::OCI_EMPTY.to_owned()), ..entry.clone() };
        let other = Descriptor { artifact_type: Some("text/plain".to_owned()), ..entry.clone() };
        let wanted = Some(media_type::SIGSTORE_BUNDLE);
        assert!(may_be(&entry, wanted) && may_be(&quirk, wanted) && !may_be(&other, wanted));
    }
}
