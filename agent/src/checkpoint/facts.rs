//! The facts of a checkpoint, and the container image it grew from.

use std::sync::Arc;

use kybernate_packager::pack::SourceImage;
use kybernate_packager::store::{StoreError, StoreErrorKind, StoredManifest};
use kybernate_spec::checkpoint::{CheckpointConfig, Needs, NodeFacts};
use kybernate_spec::{
    Descriptor, Index, Location, MANIFEST_BYTES_MAX, Reference, RepositoryName, checkpoint,
};

use super::origin::Parts;
use super::{Order, Source};
use crate::app::App;
use crate::container::{name_of, namespace_of};
use crate::gate::Summary;
use crate::node;
use crate::runtime::Namespace;

/// Returns everything the artifact says about where it comes from.
pub(super) async fn of(
    app: &App,
    source: &Source,
    order: &Order,
    summary: &Summary,
    image: Option<&SourceImage>,
) -> CheckpointConfig {
    let now = jiff::Timestamp::now();
    let told = |time: jiff::Timestamp| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    CheckpointConfig {
        created: Some(told(now)),
        not_after: order.valid.and_then(|valid| now.checked_add(valid).ok()).map(told),
        source: checkpoint::Source {
            cluster: app.config.cluster.clone(),
            namespace: Some(namespace_of(&source.container, &order.namespace)),
            container: Some(name_of(&source.container)),
            image: Some(source.container.image.clone()).filter(|name| !name.is_empty()),
            image_digest: image.map(|image| image.manifest.descriptor.digest.clone()),
            ..checkpoint::Source::default()
        },
        // What devices the source had is among its needs; its node may have had many more.
        node: Some(NodeFacts { devices: None, ..app.report().await.facts }),
        needs: Needs { identity: summary.identity(), ..source.spec.needs() },
        ..CheckpointConfig::default()
    }
}

/// Finds the manifest of the image a container was started from, for this node's platform.
/// `None` when the image or its manifest is gone.
pub(super) async fn image(
    source: &Source,
    order: &Order,
) -> Result<Option<SourceImage>, StoreError> {
    let name = &source.container.image;
    let image = match source.namespace.image(name).await {
        Ok(image) => image,
        Err(error) if error.is_not_found() => {
            tracing::warn!(image = name, "the container's image is gone");
            return Ok(None);
        }
        // Without it nobody could restore the checkpoint: that is not to be made of an answer that is late.
        Err(error) => {
            return Err(StoreError {
                operation: "read image",
                subject: name.clone(),
                kind: StoreErrorKind::Io(std::io::Error::other(error)),
            });
        }
    };
    let manifest = match platform_manifest(&source.namespace, &image.target).await {
        Ok(manifest) => manifest,
        Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(manifest.map(|manifest| SourceImage {
        manifest,
        blobs: Arc::new(Parts::of(&image, &source.namespace)),
        mount_from: mount_from(name, &order.location),
    }))
}

async fn platform_manifest(
    namespace: &Namespace,
    target: &Descriptor,
) -> Result<Option<StoredManifest>, StoreError> {
    let content = namespace.read_small(target, MANIFEST_BYTES_MAX).await?;
    if target.is_manifest() {
        return Ok(Some(StoredManifest { descriptor: target.bare(), content }));
    }
    let index: Index = serde_json::from_slice(&content).map_err(|error| StoreError {
        operation: "read image",
        subject: target.digest.to_string(),
        kind: StoreErrorKind::Malformed(error),
    })?;
    // The first that fits, as containerd does for an architecture without variants.
    let ours = index.manifests.iter().find(|child| {
        let platform = child.platform.as_ref();
        child.is_manifest()
            && platform.is_some_and(|platform| {
                platform.os == "linux" && platform.architecture == node::architecture()
            })
    });
    let Some(ours) = ours else { return Ok(None) };
    let content = namespace.read_small(ours, MANIFEST_BYTES_MAX).await?;
    Ok(Some(StoredManifest { descriptor: ours.bare(), content }))
}

/// Returns the image's repository when it is in the registry the artifact goes to.
fn mount_from(image: &str, target: &Location) -> Option<RepositoryName> {
    let image: Reference = image.parse().ok()?;
    match target {
        Location::Registry(target) => (target.registry == image.registry
            && target.repository != image.repository)
            .then_some(image.repository),
        Location::Layout(_) => None,
    }
}
