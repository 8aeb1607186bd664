//! What a manifest refers to, as far as a registry has to know.

use kybernate_spec::{Annotations, Digest, media_type};
use serde::Deserialize;

/// What a manifest refers to. Of a media type this registry does not know it is empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct References {
    /// Blobs that must be in the repository.
    pub blobs: Vec<Digest>,
    /// Manifests that must be in the repository.
    pub manifests: Vec<Digest>,
    /// What an index lists by a media type that is no manifest's, which must be in the repository, too:
    /// as a blob, or as a manifest of a kind that is not read here (image specification, "Image Index").
    pub others: Vec<Digest>,
    /// What the manifest is attached to; it need not be there.
    pub subject: Option<Digest>,
    /// The type shown and filtered by in lists of referrers.
    pub artifact_type: Option<String>,
    /// The annotations shown in lists of referrers.
    pub annotations: Annotations,
}

/// Why a manifest is refused.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is not JSON of the right shape.
    #[error("the manifest is not valid JSON for its media type")]
    Json(#[source] serde_json::Error),
    /// Header and document disagree, so two clients could read it as two things.
    #[error("the manifest says it is {document:?} but was pushed as {header:?}")]
    MediaType {
        /// What the request says.
        header: String,
        /// What the document says.
        document: String,
    },
    /// It has both layers and manifests, or neither a config nor children.
    #[error("the manifest is neither clearly an image nor clearly an index")]
    Ambiguous,
    /// No media type in the request and none in the document.
    #[error("the request has no Content-Type and the manifest no mediaType")]
    NoMediaType,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: Option<String>,
    artifact_type: Option<String>,
    config: Option<Target>,
    layers: Option<Vec<Target>>,
    manifests: Option<Vec<Target>>,
    subject: Option<Target>,
    annotations: Option<Annotations>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Target {
    media_type: String,
    digest: Digest,
}

/// Kinds of documents that are read; everything else is kept as it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Image,
    Index,
}

impl References {
    /// Reads a manifest pushed as `header`, the `Content-Type` without parameters. Returns its media
    /// type and what it refers to.
    pub fn parse(header: Option<&str>, content: &[u8]) -> Result<(String, Self), ManifestError> {
        let Some(header) = header else {
            let document = read(content)?;
            let media_type = document.media_type.clone().ok_or(ManifestError::NoMediaType)?;
            let references = match kind_of(&media_type) {
                Some(kind) => references(document, kind)?,
                None => Self::default(),
            };
            return Ok((media_type, references));
        };
        let differs = |said: &str| {
            let (header, document) = (header.to_owned(), said.to_owned());
            Err(ManifestError::MediaType { header, document })
        };
        let Some(kind) = kind_of(header) else {
            // What is one of ours must not be stored as something that refers to nothing.
            return match said(content).filter(|said| kind_of(said).is_some()) {
                Some(said) => differs(&said),
                None => Ok((header.to_owned(), Self::default())),
            };
        };
        let document = read(content)?;
        if let Some(said) = document.media_type.as_deref().filter(|said| *said != header) {
            return differs(said);
        }
        Ok((header.to_owned(), references(document, kind)?))
    }
}

fn kind_of(media_type: &str) -> Option<Kind> {
    match media_type {
        media_type::OCI_MANIFEST | media_type::DOCKER_MANIFEST => Some(Kind::Image),
        media_type::OCI_INDEX | media_type::DOCKER_MANIFEST_LIST => Some(Kind::Index),
        _ => None,
    }
}

fn read(content: &[u8]) -> Result<Document, ManifestError> {
    serde_json::from_slice(content).map_err(ManifestError::Json)
}

/// Returns the media type that a document of any kind says it is of.
fn said(content: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Said {
        media_type: String,
    }
    serde_json::from_slice::<Said>(content).ok().map(|said| said.media_type)
}

fn references(document: Document, kind: Kind) -> Result<References, ManifestError> {
    let Document { artifact_type, config, layers, manifests, subject, annotations, .. } = document;
    let (blobs, children, fallback) = match (kind, config, layers, manifests) {
        (Kind::Image, Some(config), layers, None) => {
            let stored = layers.unwrap_or_default().into_iter().filter(is_stored);
            let blobs = std::iter::once(config.digest).chain(stored.map(|layer| layer.digest));
            (blobs.collect(), Vec::new(), Some(config.media_type))
        }
        (Kind::Index, None, None, manifests) => (Vec::new(), manifests.unwrap_or_default(), None),
        _ => return Err(ManifestError::Ambiguous),
    };
    let is_manifest = |child: &Target| kind_of(&child.media_type).is_some();
    let (manifests, others): (Vec<_>, Vec<_>) = children.into_iter().partition(is_manifest);
    let digests = |children: Vec<Target>| children.into_iter().map(|child| child.digest).collect();
    Ok(References {
        blobs,
        manifests: digests(manifests),
        others: digests(others),
        subject: subject.map(|subject| subject.digest),
        // Distribution specification, "Listing Referrers": the config's type stands in.
        artifact_type: artifact_type.filter(|text| !text.is_empty()).or(fallback),
        annotations: annotations.unwrap_or_default(),
    })
}

/// Non-distributable layers need not be pushed (image specification, "Non-distributable layers").
fn is_stored(layer: &Target) -> bool {
    let media_type = &layer.media_type;
    !media_type.starts_with("application/vnd.oci.image.layer.nondistributable.")
        && !media_type.starts_with("application/vnd.docker.image.rootfs.foreign.")
}

#[cfg(test)]
mod tests;
