//! The container image under a checkpoint that is exported.

use bytes::Bytes;
use futures::TryStreamExt as _;
use kybernate_spec::{Descriptor, MANIFEST_BYTES_MAX, Manifest, Platform};
use serde::Deserialize;

use super::ExportError;
use crate::artifact::Checkpoint;
use crate::runtime_spec::ImageRun;
use crate::store::Store;

/// The container image, and what goes on it.
#[derive(Debug)]
pub(crate) struct Images {
    /// What it runs on.
    pub(crate) platform: Platform,
    /// How it is run.
    pub(crate) run: ImageRun,
    /// Its manifest.
    pub(crate) base: Descriptor,
    /// That manifest's bytes.
    pub(crate) content: Bytes,
    /// The same, parsed.
    pub(crate) manifest: Manifest,
    /// What the container had written, when it is not in the image.
    pub(crate) diff: Option<Descriptor>,
    /// Whether it is the source's image, and not the runnable one.
    pub(crate) is_source: bool,
}

#[derive(Deserialize)]
struct ConfigDocument {
    architecture: String,
    os: String,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    config: Option<ImageRun>,
}

impl Images {
    /// Finds the container image: the source's where the checkpoint leads to it, else the runnable
    /// image, which has in its last layer what the container had written.
    pub(crate) async fn find(
        format: &'static str,
        store: &Store,
        checkpoint: &Checkpoint,
    ) -> Result<Self, ExportError> {
        let Some(runnable) = &checkpoint.runnable else {
            let reason = "it names a container image to restore on, and this checkpoint has none";
            return Err(ExportError::Impossible { format, reason: reason.to_owned() });
        };
        let parse = |content: &[u8]| {
            serde_json::from_slice::<Manifest>(content)
                .map_err(|error| ExportError::Image(error.to_string()))
        };
        let whole = store.manifest(&runnable.digest).await?;
        let manifest = parse(&whole.content)?;
        let (mut base, mut diff) =
            ((whole.descriptor.bare(), whole.content, manifest.clone()), None);
        let mut is_source = false;
        if let Some(subject) = &checkpoint.index.subject
            && let Ok(source) = store.manifest(&subject.digest).await
        {
            let lower = parse(&source.content)?;
            let added = manifest.layers.get(lower.layers.len()..);
            let mut same = manifest.layers.iter().zip(&lower.layers);
            if let Some(added) = added.filter(|added| added.len() <= 1)
                && same.all(|(ours, theirs)| ours.digest == theirs.digest)
            {
                diff = added.first().cloned();
                base = (source.descriptor.bare(), source.content, lower);
                is_source = true;
            }
        }
        let config = read_small(store, &base.2.config).await?;
        let config: ConfigDocument = serde_json::from_slice(&config)
            .map_err(|error| ExportError::Image(format!("its config: {error}")))?;
        let platform = Platform {
            architecture: config.architecture,
            os: config.os,
            os_version: None,
            os_features: Vec::new(),
            variant: config.variant,
        };
        let (base, content, manifest) = base;
        let run = config.config.unwrap_or_default();
        Ok(Self { platform, run, base, content, manifest, diff, is_source })
    }

    /// Names the image after its digest, so that no tag of whoever takes it is moved.
    pub(crate) fn name_by_digest(&self, source: &str) -> String {
        name_at(source, &self.base.digest.to_string())
    }
}

async fn read_small(store: &Store, blob: &Descriptor) -> Result<Vec<u8>, ExportError> {
    if blob.size > MANIFEST_BYTES_MAX {
        return Err(ExportError::Image("its config has more than 4 MiB".to_owned()));
    }
    let parts: Vec<Bytes> = store.blob(blob).await?.try_collect().await?;
    Ok(parts.concat())
}

/// Puts a digest in the place of a name's tag and digest.
fn name_at(source: &str, digest: &str) -> String {
    let repository = source.split('@').next().unwrap_or(source);
    let after_host = repository.rfind('/').map_or(0, |slash| slash + 1);
    let tag = repository.get(after_host..).and_then(|name| name.find(':'));
    let end = tag.map_or(repository.len(), |colon| after_host + colon);
    format!("{}@{digest}", repository.get(..end).unwrap_or(repository))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_by_its_digest_and_not_by_its_tag() {
        let check = |image: &str, expected: &str| {
            assert_eq!(name_at(image, "sha256:1"), format!("{expected}@sha256:1"));
        };
        check("docker.io/library/web:1", "docker.io/library/web");
        check("host:5000/web", "host:5000/web");
        check("host:5000/web:1@sha256:00", "host:5000/web");
        check("web", "web");
    }
}
