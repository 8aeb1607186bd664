//! What a checkpoint says about itself, without moving its pages.

use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::{Descriptor, Digest, Location, annotation};
use schemars::JsonSchema;
use serde::Serialize;

use crate::artifact::{ArtifactError, Checkpoint};
use crate::outline::Outline;
use crate::store::Store;
use crate::verify::list_signatures;

/// What a checkpoint says about itself. Claims, until a signature is verified.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Inspected {
    /// The checkpoint's digest: its index's.
    pub digest: Digest,
    /// The source image it hangs under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Digest>,
    /// The facts.
    pub config: CheckpointConfig,
    /// The layers of the checkpoint manifest.
    pub layers: Vec<Part>,
    /// The layers of the runnable image; absent when there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runnable: Option<Vec<Part>>,
    /// Bytes of all layers of the checkpoint manifest.
    pub checkpoint_bytes: u64,
    /// Bytes of all layers of the runnable image.
    pub runnable_bytes: u64,
    /// Manifests that look like signatures. They have **not** been verified.
    pub unverified_signatures: Vec<Digest>,
}

/// One blob.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// Its file name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Its media type.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Reads what the checkpoint at `location` says about itself.
pub async fn inspect(store: &Store, location: &Location) -> Result<Inspected, ArtifactError> {
    let checkpoint = Checkpoint::open(store, location).await?;
    let digest = checkpoint.stored.descriptor.digest.clone();
    let runnable = match &checkpoint.runnable {
        None => None,
        Some(runnable) => {
            let stored = store.manifest(&runnable.digest).await?;
            let outline = Outline::parse(&stored.content, Some(&runnable.media_type))
                .map_err(|error| ArtifactError::Malformed("runnable image", error))?;
            // The first is the config.
            Some(parts(outline.blobs.get(1..).unwrap_or_default()))
        }
    };
    let layers = parts(&checkpoint.manifest.layers);
    Ok(Inspected {
        subject: checkpoint.index.subject.map(|subject| subject.digest),
        config: checkpoint.config,
        checkpoint_bytes: sum(&layers),
        runnable_bytes: runnable.as_deref().map_or(0, sum),
        layers,
        runnable,
        unverified_signatures: list_signatures(store, &digest).await?,
        digest,
    })
}

fn parts(descriptors: &[Descriptor]) -> Vec<Part> {
    let part = |descriptor: &Descriptor| Part {
        title: descriptor.annotations.get(annotation::TITLE).cloned(),
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.clone(),
        bytes: descriptor.size,
    };
    descriptors.iter().map(part).collect()
}

fn sum(parts: &[Part]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
}
