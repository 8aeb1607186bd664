//! A container image of a checkpoint becomes a root file system of containerd's.
//!
//! What containerd has already is left as it is (`spec/decisions/0002`).

use std::collections::HashMap;

use bytes::Bytes;
use futures::TryStreamExt as _;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt as _};
use kybernate_packager::policy::repository;
use kybernate_packager::runtime_spec::ImageRun;
use kybernate_packager::store::{BlobSource, BlobStream, Store, StoreError, StoredManifest};
use kybernate_spec::{Descriptor, Digest, MANIFEST_BYTES_MAX, Manifest, media_type};
use serde::Deserialize;

use super::layers::{Kept, Layers};
use super::{CHECKPOINT_LABEL, OPERATION_LABEL, ORIGIN_LABEL, Order, PLAIN_HTTP_LABEL};
use crate::layer::LayerError;
use crate::node;
use crate::operations::{Driver, Made, OperationsError};
use crate::runtime::{Image, Namespace, RuntimeError, WriteContentError};

/// The snapshotter root file systems are made with.
pub(super) const SNAPSHOTTER: &str = "overlayfs";

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

/// An image that containerd has by its name.
#[derive(Clone, Debug)]
pub(super) struct RuntimeImage {
    pub(super) name: String,
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
    #[error("failed to unpack layer {0}")]
    Layer(Digest, #[source] LayerError),
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
            Self::Runtime(_) | Self::Operations(_) | Self::Layer(..) => false,
        }
    }
}

/// An image whose layers containerd has, unpacked. Nothing but our lease keeps them yet.
#[derive(Debug)]
pub(super) struct Brought {
    stored: StoredManifest,
    manifest: Manifest,
    config_bytes: Bytes,
    /// Name of the snapshot with all layers.
    pub(super) chain: Option<Digest>,
    pub(super) config: ImageRun,
}

impl Brought {
    /// Makes sure that containerd has its documents too, and knows what they are made of: only then it
    /// can have a name. `leased` must hold a lease.
    pub(super) async fn keep(&self, leased: &Namespace) -> Result<(), ImageError> {
        let Self { stored, manifest, config_bytes, chain, .. } = self;
        let (config, document) = (Held(config_bytes.clone()), Held(stored.content.clone()));
        tokio::try_join!(
            leased.write_blob(&manifest.config, &config),
            leased.write_blob(&stored.descriptor, &document),
        )?;
        Ok(label(manifest, &stored.descriptor, chain.as_ref(), leased).await?)
    }

    /// Gives it a name, by which containerd keeps it from now on.
    pub(super) async fn register(
        self,
        order: &Order,
        checkpoint: &Digest,
        leased: &Namespace,
        driver: &Driver,
    ) -> Result<RuntimeImage, ImageError> {
        let Self { stored: StoredManifest { descriptor, .. }, config, .. } = self;
        let name = format!("{}@{}", repository(&order.location), descriptor.digest);
        let mut labels = HashMap::from([
            (CHECKPOINT_LABEL.to_owned(), checkpoint.to_string()),
            (OPERATION_LABEL.to_owned(), driver.id().to_owned()),
            (ORIGIN_LABEL.to_owned(), name.clone()),
        ]);
        if order.plain_http {
            labels.insert(PLAIN_HTTP_LABEL.to_owned(), "true".to_owned());
        }
        let image = Image { name: name.clone(), target: descriptor.bare(), labels };
        register(&image, leased, driver).await?;
        Ok(RuntimeImage { name, config })
    }
}

/// The documents of an image: what it is made of, and how it is run.
#[derive(Debug)]
pub(super) struct Documents {
    stored: StoredManifest,
    manifest: Manifest,
    config_bytes: Bytes,
    config: ConfigDocument,
}

impl Documents {
    /// Reads those of the image with this manifest, and nothing else of it.
    pub(super) async fn read(store: &Store, manifest: &Digest) -> Result<Self, ImageError> {
        let stored = store.manifest(manifest).await?;
        let manifest: Manifest = serde_json::from_slice(&stored.content)
            .map_err(|error| ImageError::Malformed("manifest", error))?;
        let config_bytes = read_config(store, &manifest.config).await?;
        let config: ConfigDocument = serde_json::from_slice(&config_bytes)
            .map_err(|error| ImageError::Malformed("config", error))?;
        check(&config, &manifest)?;
        Ok(Self { stored, manifest, config_bytes, config })
    }
}

/// Makes sure that containerd has an image's layers unpacked, and those that are to be kept. `leased`
/// must hold a lease.
pub(super) async fn bring(
    store: &Store,
    documents: Documents,
    leased: &Namespace,
    driver: &Driver,
    kept: Kept,
) -> Result<Brought, ImageError> {
    let Documents { stored, manifest, config_bytes, config } = documents;
    driver.progress.expect(manifest.layers.iter().map(|layer| layer.size).sum());
    let layers = Layers { store, leased, driver, kept };
    let chain = layers.bring(&manifest.layers, &config.rootfs.diff_ids).await?;
    let config = config.config.unwrap_or_default();
    Ok(Brought { stored, manifest, config_bytes, chain, config })
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
    let parts = leased.label_content(&descriptor.digest, layers.chain([config]).collect());
    let unpacked = async {
        let Some(chain) = chain else { return Ok(()) };
        let key = format!("containerd.io/gc.ref.snapshot.{SNAPSHOTTER}");
        let labels = HashMap::from([(key, chain.to_string())]);
        leased.label_content(&manifest.config.digest, labels).await
    };
    tokio::try_join!(parts, unpacked).map(|((), ())| ())
}

async fn register(image: &Image, leased: &Namespace, driver: &Driver) -> Result<(), ImageError> {
    match leased.image(&image.name).await {
        Ok(_) => return Ok(()),
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    driver.will_make(Made::Image(image.name.clone())).await?;
    // Another restore of the same checkpoint may have been quicker: then it is that one's.
    leased.create_image(image).await?;
    Ok(())
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
