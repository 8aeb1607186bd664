//! The runnable child: the source image with what the container wrote as its last layer.

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use kybernate_spec::{
    Annotations, Descriptor, Digest, MANIFEST_BYTES_MAX, Manifest, Platform, RepositoryName,
    annotation, media_type,
};
use serde_json::{Map, Value, json};

use super::upload::{BytesSource, FileSource, HashingWriter, Target};
use super::{PackError, PackRequest, Pieces, Runnable, to_json};
use crate::checked;
use crate::store::{BlobSource, StoreError, StoreErrorKind, StoredManifest};
use crate::wanted::{self, Wanted};

/// zstd's fastest real level: on rootfs diffs higher ones cost several times the time for a few
/// per cent (facts measured on CPU heaps and text alike).
const ZSTD_LEVEL: i32 = 1;

/// The container image a process was started from, and where its blobs can be had.
#[derive(Clone, Debug)]
pub struct SourceImage {
    /// Its manifest for the platform it ran on.
    pub manifest: StoredManifest,
    /// Reads its config and layers.
    pub blobs: Arc<dyn BlobSource>,
    /// A repository of the same registry that has them, to be mounted from.
    pub mount_from: Option<RepositoryName>,
}

/// What was pushed.
pub(super) struct Pushed {
    /// The runnable image.
    pub(super) runnable: Descriptor,
    /// The source image, when it is in the same repository now.
    pub(super) source: Option<Descriptor>,
}

/// Pushes the source image and the runnable image, as far as the request wants them.
pub(super) async fn push(
    request: &PackRequest,
    scratch: &Path,
    target: Target<'_>,
) -> Result<Option<Pushed>, PackError> {
    let image = match (&request.image, request.runnable) {
        (_, Runnable::Never) | (None, Runnable::Auto) => return Ok(None),
        (None, Runnable::Always) => {
            return Err(PackError::Image("no source image was given".to_owned()));
        }
        (Some(image), _) => image,
    };
    match push_source(image, target).await {
        Ok((manifest, config)) => {
            let source = image.manifest.descriptor.bare();
            let runnable =
                push_runnable(request, &source, manifest, &config, scratch, target).await?;
            Ok(Some(Pushed { runnable, source: Some(source) }))
        }
        // containerd may have dropped the compressed layers after unpacking them.
        Err(PackError::Store(StoreError { kind: StoreErrorKind::NotFound, .. }))
            if request.runnable == Runnable::Auto && is_incomplete(image).await =>
        {
            tracing::warn!(
                "the source image's layers are gone: packing without the runnable image"
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

async fn push_source(
    image: &SourceImage,
    target: Target<'_>,
) -> Result<(Manifest, Bytes), PackError> {
    let manifest: Manifest = serde_json::from_slice(&image.manifest.content)
        .map_err(|error| PackError::Image(format!("the source image's manifest: {error}")))?;
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        target.progress.expect(blob.size);
        target.store_image(blob, image).await?;
    }
    let config = read_config(&*image.blobs, &manifest.config).await?;
    target.store.put_manifest(&image.manifest.descriptor, image.manifest.content.clone()).await?;
    Ok((manifest, config))
}

/// Whether the source lacks a blob of the image: what was not found may be the target's repository.
pub(super) async fn is_incomplete(image: &SourceImage) -> bool {
    let Ok(manifest) = serde_json::from_slice::<Manifest>(&image.manifest.content) else {
        return false;
    };
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        let opened = image.blobs.open(blob).await;
        if matches!(opened, Err(StoreError { kind: StoreErrorKind::NotFound, .. })) {
            return true;
        }
    }
    false
}

/// Reads the config, which whoever gives it out need not have checked.
async fn read_config(blobs: &dyn BlobSource, config: &Descriptor) -> Result<Bytes, PackError> {
    let stream = blobs.open(config).await?;
    Ok(checked::collect(stream, config, MANIFEST_BYTES_MAX).await?)
}

async fn push_runnable(
    request: &PackRequest,
    source: &Descriptor,
    source_manifest: Manifest,
    source_config: &[u8],
    scratch: &Path,
    target: Target<'_>,
) -> Result<Descriptor, PackError> {
    let mut config: Value = serde_json::from_slice(source_config)
        .map_err(|error| PackError::Image(format!("the source image's config: {error}")))?;
    let platform = platform_of(&config)?;
    let is_zstd = |layer: &Descriptor| layer.media_type.ends_with("+zstd");
    let has_zstd = request.rootfs_diff.is_some() || source_manifest.layers.iter().any(is_zstd);
    let runnable = match &request.rootfs_diff {
        None => source.clone(),
        Some(diff) => {
            let (layer, diff_id) = push_diff(diff, scratch, target).await?;
            append(&mut config, &diff_id, request.config.created.as_deref())?;
            let content = to_json("runnable image's config", &sorted(config))?;
            let described = Descriptor::of(media_type::OCI_CONFIG, &content);
            target.store(&described, &BytesSource(content)).await?;
            let layers = source_manifest.layers.into_iter().map(as_oci).chain([layer]);
            let manifest = Manifest {
                schema_version: 2,
                media_type: Some(media_type::OCI_MANIFEST.to_owned()),
                artifact_type: None,
                config: described,
                layers: layers.collect(),
                subject: None,
                annotations: Annotations::new(),
            };
            let content = to_json("runnable image", &manifest)?;
            let described = Descriptor::of(media_type::OCI_MANIFEST, &content);
            target.store.put_manifest(&described, content).await?;
            described
        }
    };
    let runnable = Descriptor { platform: Some(platform), ..runnable };
    let runnable = runnable.with_annotation(annotation::ROLE, "runnable");
    Ok(if has_zstd { runnable.with_annotation(annotation::ZSTD, "true") } else { runnable })
}

/// Compresses the rootfs diff; returns the layer and the digest of the plain tar.
async fn push_diff(
    diff: &Pieces,
    scratch: &Path,
    target: Target<'_>,
) -> Result<(Descriptor, Digest), PackError> {
    let (plain, path) = (diff.clone(), scratch.join("rootfs-diff.zst"));
    let compressed = {
        let path = path.clone();
        wanted::blocking(move |wanted| compress(&plain, &path, wanted))
    };
    let (layer, diff_id) =
        compressed.await.map_err(|kind| PackError::Io("compress the rootfs diff", kind))?;
    target.progress.expect(layer.size);
    target.store(&layer, &FileSource { path, offset: 0 }).await?;
    Ok((layer.with_annotation(annotation::TITLE, "rootfs-diff.tar.zst"), diff_id))
}

fn compress(
    plain: &Pieces,
    compressed: &Path,
    wanted: &Wanted,
) -> io::Result<(Descriptor, Digest)> {
    let file = io::BufWriter::new(fs_err::File::create(compressed)?);
    let encoder = zstd::Encoder::new(HashingWriter::new(file), ZSTD_LEVEL)?;
    let mut writer = HashingWriter::new(encoder);
    io::copy(&mut wanted.reader(plain.open()?), &mut writer)?;
    let (encoder, diff_id, _) = writer.into_parts();
    let mut out = encoder.finish()?;
    out.flush()?;
    Ok((out.describe(media_type::OCI_LAYER_ZSTD), diff_id))
}

/// Adds a layer to an image configuration, keeping everything else as it is, known or not.
fn append(config: &mut Value, diff_id: &Digest, created: Option<&str>) -> Result<(), PackError> {
    let malformed = || PackError::Image("the source image's config has no rootfs".to_owned());
    let diff_ids = config.pointer_mut("/rootfs/diff_ids").and_then(Value::as_array_mut);
    diff_ids.ok_or_else(malformed)?.push(json!(diff_id));
    let mut entry = Map::new();
    entry.insert("created_by".to_owned(), json!("kybernate checkpoint"));
    entry.insert("comment".to_owned(), json!("what the container had written"));
    if let Some(created) = created {
        entry.insert("created".to_owned(), json!(created));
    }
    let fields = config.as_object_mut().ok_or_else(malformed)?;
    if let Some(history) = fields.entry("history").or_insert_with(|| json!([])).as_array_mut() {
        history.push(entry.into());
    }
    Ok(())
}

fn platform_of(config: &Value) -> Result<Platform, PackError> {
    let text = |key: &str| config.get(key).and_then(Value::as_str).map(str::to_owned);
    let (Some(architecture), Some(os)) = (text("architecture"), text("os")) else {
        return Err(PackError::Image("the source image's config names no platform".to_owned()));
    };
    Ok(Platform {
        architecture,
        os,
        os_version: text("os.version"),
        os_features: Vec::new(),
        variant: text("variant"),
    })
}

/// Orders the keys of all objects, so that equal configs have equal bytes whatever built us.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> =
                fields.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::Object(fields.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// Docker's layer types are the same bytes under another name.
fn as_oci(layer: Descriptor) -> Descriptor {
    let media_type = match &*layer.media_type {
        "application/vnd.docker.image.rootfs.diff.tar.gzip" => media_type::OCI_LAYER_GZIP,
        "application/vnd.docker.image.rootfs.diff.tar" => media_type::OCI_LAYER_TAR,
        other => other,
    };
    Descriptor { media_type: media_type.to_owned(), ..layer }
}
