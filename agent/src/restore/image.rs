//! A container image of a checkpoint becomes a root file system of containerd's.
//!
//! The layers come through the packager's client and go into containerd's content store under a
//! lease; then they are unpacked one on the other. What containerd has already is left as it is
//! (`spec/decisions/0002`).

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use futures::future::{self, BoxFuture};
use futures::stream::{self, StreamExt as _};
use futures::{FutureExt as _, TryStreamExt as _};
use kybernate_packager::runtime_spec::ImageRun;
use kybernate_packager::store::{BlobSource, BlobStream, Store, StoreError};
use kybernate_spec::{Descriptor, Digest, MANIFEST_BYTES_MAX, Manifest, media_type};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::{CHECKPOINT_LABEL, OPERATION_LABEL};
use crate::node;
use crate::operations::{Driver, Made, OperationsError};
use crate::runtime::{Image, Namespace, RuntimeError, WriteContentError};

/// The snapshotter root file systems are made with.
pub(super) const SNAPSHOTTER: &str = "overlayfs";

/// How many layers come at once.
const AT_ONCE: usize = 2;

#[derive(Debug, Deserialize)]
struct ConfigDocument {
    architecture: String,
    os: String,
    #[serde(default)]
    config: Option<ImageRun>,
    rootfs: Rootfs,
}

#[derive(Debug, Deserialize)]
struct Rootfs {
    diff_ids: Vec<Digest>,
}

/// An image that containerd has and has unpacked.
#[derive(Clone, Debug)]
pub(super) struct RuntimeImage {
    pub(super) name: String,
    /// Name of the snapshot with all layers.
    pub(super) chain: Option<Digest>,
    pub(super) config: ImageRun,
}

/// Why an image is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Write(#[from] WriteContentError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error("failed to parse the container image's {0}")]
    Malformed(&'static str, #[source] serde_json::Error),
    #[error("the container image contradicts itself: {0}")]
    Contradiction(String),
}

impl ImageError {
    /// Whether the content is to blame, and not the way to it.
    pub(super) const fn is_integrity(&self) -> bool {
        use kybernate_packager::store::StoreErrorKind;
        match self {
            Self::Store(error) => matches!(error.kind, StoreErrorKind::Mismatch(_)),
            Self::Write(error) => error.is_integrity(),
            Self::Malformed(..) | Self::Contradiction(_) => true,
            Self::Runtime(_) | Self::Operations(_) => false,
        }
    }
}

/// An image whose parts containerd has, unpacked. Nothing but our lease keeps them yet.
#[derive(Clone, Debug)]
pub(super) struct Brought {
    /// Its manifest.
    pub(super) descriptor: Descriptor,
    /// Name of the snapshot with all layers.
    pub(super) chain: Option<Digest>,
    pub(super) config: ImageRun,
}

impl Brought {
    /// Gives it a name, by which containerd keeps it from now on.
    pub(super) async fn register(
        self,
        repository: &str,
        checkpoint: &Digest,
        leased: &Namespace,
        driver: &Driver,
    ) -> Result<RuntimeImage, ImageError> {
        let Self { descriptor, chain, config } = self;
        let name = format!("{repository}@{}", descriptor.digest);
        register(&name, &descriptor, checkpoint, leased, driver).await?;
        Ok(RuntimeImage { name, chain, config })
    }
}

/// Makes sure that containerd has the parts of the image with this manifest, unpacked. `leased` must
/// hold a lease.
pub(super) async fn bring(
    store: &Store,
    manifest: &Digest,
    leased: &Namespace,
    driver: &Driver,
) -> Result<Brought, ImageError> {
    let stored = store.manifest(manifest).await?;
    let manifest: Manifest = serde_json::from_slice(&stored.content)
        .map_err(|error| ImageError::Malformed("manifest", error))?;
    let config_bytes = read_config(store, &manifest.config).await?;
    let config: ConfigDocument = serde_json::from_slice(&config_bytes)
        .map_err(|error| ImageError::Malformed("config", error))?;
    check(&config, &manifest)?;
    driver.progress.expect(manifest.layers.iter().map(|layer| layer.size).sum());
    let chain = bring_layers(store, &manifest, &config, leased, driver).await?;
    leased.write_blob(&manifest.config, &Held(config_bytes)).await?;
    leased.write_blob(&stored.descriptor, &Held(stored.content.clone())).await?;
    let descriptor = stored.descriptor;
    label(&manifest, &descriptor, chain.as_ref(), leased).await?;
    Ok(Brought { descriptor, chain, config: config.config.unwrap_or_default() })
}

/// Makes sure that containerd has the layers, unpacked one on the other: while one is, others come.
/// Returns the name of the snapshot with all of them.
async fn bring_layers(
    store: &Store,
    manifest: &Manifest,
    config: &ConfigDocument,
    leased: &Namespace,
    driver: &Driver,
) -> Result<Option<Digest>, ImageError> {
    let source = Counted { store, driver };
    let (tell, mut there) = mpsc::channel(manifest.layers.len().max(1));
    let (mut known, mut writes) = (HashSet::new(), Vec::new());
    for layer in &manifest.layers {
        writes.push(if known.insert(&layer.digest) {
            leased.write_blob(layer, &source).boxed()
        } else {
            // It comes before this one, and containerd takes one write of a blob at a time.
            future::ready(Ok(())).boxed()
        });
    }
    let come = async move {
        let mut writes = stream::iter(writes).buffered(AT_ONCE);
        while let Some(written) = writes.next().await {
            written?;
            // There is room for all.
            tell.try_send(()).unwrap_or_default();
        }
        Ok::<_, ImageError>(())
    };
    let chains = chains(&config.rootfs.diff_ids);
    let be_unpacked = async {
        let mut parent = None;
        for ((layer, diff_id), chain) in
            manifest.layers.iter().zip(&config.rootfs.diff_ids).zip(&chains)
        {
            if there.recv().await.is_none() {
                break;
            }
            if !leased.has_snapshot(SNAPSHOTTER, &chain.to_string()).await? {
                let step = Step { layer, diff_id, parent, chain };
                unpack(&step, leased, driver).await?;
            }
            parent = Some(chain);
        }
        Ok(parent.cloned())
    };
    let ((), chain) = tokio::try_join!(come, be_unpacked)?;
    Ok(chain)
}

async fn read_config(store: &Store, config: &Descriptor) -> Result<Bytes, ImageError> {
    if config.size > MANIFEST_BYTES_MAX {
        return Err(ImageError::Contradiction("its config has more than 4 MiB".to_owned()));
    }
    let parts: Vec<Bytes> = store.blob(config).await?.try_collect().await?;
    Ok(parts.concat().into())
}

fn check(config: &ConfigDocument, manifest: &Manifest) -> Result<(), ImageError> {
    let contradiction = |text: String| Err(ImageError::Contradiction(text));
    if config.os != "linux" || config.architecture != node::architecture() {
        return contradiction(format!("it is for {}/{}", config.os, config.architecture));
    }
    let (layers, ids) = (manifest.layers.len(), config.rootfs.diff_ids.len());
    if layers != ids {
        return contradiction(format!("it has {layers} layers, but its config names {ids}"));
    }
    let strange = manifest.layers.iter().find(|layer| !is_layer(&layer.media_type));
    match strange {
        Some(layer) => contradiction(format!("{:?} is no kind of layer", layer.media_type)),
        None => Ok(()),
    }
}

fn is_layer(media_type: &str) -> bool {
    matches!(
        media_type,
        media_type::OCI_LAYER_TAR | media_type::OCI_LAYER_GZIP | media_type::OCI_LAYER_ZSTD
    ) || media_type.starts_with("application/vnd.docker.image.rootfs.diff.tar")
}

/// Returns the name of the snapshot with the first layer, the first two, and so on (image
/// specification, "Layer `ChainID`").
fn chains(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chains: Vec<Digest> = Vec::new();
    for diff_id in diff_ids {
        let chain = match chains.last() {
            None => diff_id.clone(),
            Some(parent) => Digest::of(format!("{parent} {diff_id}").as_bytes()),
        };
        chains.push(chain);
    }
    chains
}

struct Step<'a> {
    layer: &'a Descriptor,
    diff_id: &'a Digest,
    parent: Option<&'a Digest>,
    chain: &'a Digest,
}

async fn unpack(step: &Step<'_>, leased: &Namespace, driver: &Driver) -> Result<(), ImageError> {
    let key = format!("kybernate-{}-{}", driver.id(), step.chain);
    let made = Made::Snapshot { snapshotter: SNAPSHOTTER.to_owned(), key: key.clone() };
    driver.will_make(made).await?;
    let mounts = leased.prepare(SNAPSHOTTER, &key, step.parent).await?;
    leased.apply(step.layer, mounts, step.diff_id).await?;
    match leased.commit(SNAPSHOTTER, &key, step.chain).await {
        // Somebody else unpacked the same layers meanwhile.
        Err(error) if error.already_exists() => {
            leased.remove_snapshot(SNAPSHOTTER, &key).await?;
            Ok(())
        }
        done => Ok(done?),
    }
}

/// Tells containerd's garbage collector what the image is made of.
async fn label(
    manifest: &Manifest,
    descriptor: &Descriptor,
    chain: Option<&Digest>,
    leased: &Namespace,
) -> Result<(), RuntimeError> {
    let layers = manifest.layers.iter().enumerate().map(|(number, layer)| {
        (format!("containerd.io/gc.ref.content.l.{number}"), layer.digest.to_string())
    });
    let config =
        ("containerd.io/gc.ref.content.config".to_owned(), manifest.config.digest.to_string());
    leased.label_content(&descriptor.digest, layers.chain([config]).collect()).await?;
    if let Some(chain) = chain {
        let key = format!("containerd.io/gc.ref.snapshot.{SNAPSHOTTER}");
        let labels = HashMap::from([(key, chain.to_string())]);
        leased.label_content(&manifest.config.digest, labels).await?;
    }
    Ok(())
}

async fn register(
    name: &str,
    target: &Descriptor,
    checkpoint: &Digest,
    leased: &Namespace,
    driver: &Driver,
) -> Result<(), ImageError> {
    match leased.image(name).await {
        Ok(_) => return Ok(()),
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    driver.will_make(Made::Image(name.to_owned())).await?;
    let image = Image {
        name: name.to_owned(),
        target: target.bare(),
        labels: HashMap::from([
            (CHECKPOINT_LABEL.to_owned(), checkpoint.to_string()),
            (OPERATION_LABEL.to_owned(), driver.id().to_owned()),
        ]),
    };
    // Another restore of the same checkpoint may have been quicker: then it is that one's.
    leased.create_image(&image).await?;
    Ok(())
}

/// Reads from a store and counts what comes.
struct Counted<'a> {
    store: &'a Store,
    driver: &'a Driver,
}

impl std::fmt::Debug for Counted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Counted")
    }
}

impl BlobSource for Counted<'_> {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async move {
            let progress = self.driver.progress.clone();
            let stream = self.store.blob(descriptor).await?;
            Ok(stream
                .inspect_ok(move |bytes| {
                    let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                    progress.advance(length);
                    progress.transfer(length);
                })
                .boxed())
        })
    }
}

/// A small document that was read already.
#[derive(Debug)]
pub(super) struct Held(pub(super) Bytes);

impl BlobSource for Held {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let content = self.0.clone();
        Box::pin(async move { Ok(stream::iter([Ok(content)]).boxed()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_named_by_all_layers_below() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let found = chains(&[a.clone(), b.clone()]);
        assert_eq!(found, [a.clone(), Digest::of(format!("{a} {b}").as_bytes())]);
        assert!(chains(&[]).is_empty());
    }

    #[test]
    fn an_image_for_elsewhere_or_with_too_few_layers_is_refused() {
        let config = |architecture: &str, layers: usize| ConfigDocument {
            architecture: architecture.to_owned(),
            os: "linux".to_owned(),
            config: None,
            rootfs: Rootfs { diff_ids: vec![Digest::of(b"a"); layers] },
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: None,
            artifact_type: None,
            config: Descriptor::of(media_type::OCI_CONFIG, b"{}"),
            layers: vec![Descriptor::of(media_type::OCI_LAYER_ZSTD, b"")],
            subject: None,
            annotations: kybernate_spec::Annotations::new(),
        };
        check(&config(node::architecture(), 1), &manifest).unwrap();
        check(&config(node::architecture(), 2), &manifest).unwrap_err();
        check(&config("pdp11", 1), &manifest).unwrap_err();
    }

    #[test]
    fn the_command_line_is_entrypoint_and_command() {
        let config: ImageRun = serde_json::from_str(
            r#"{"Entrypoint":["/app"],"Cmd":["-x"],"Env":["A=1"],"User":"7","Labels":{}}"#,
        )
        .unwrap();
        assert_eq!(config.arguments(), ["/app", "-x"]);
        assert_eq!(config.environment().len(), 2);
        assert_eq!(ImageRun::default().arguments(), ["/"]);
    }
}
