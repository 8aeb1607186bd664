//! An artifact becomes containerd's index, in an image layout that `ctr image import` takes.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use kybernate_spec::{Annotations, Descriptor, Index, Platform, annotation, media_type};

use super::parts::{Blobs, Parts, specification};
use super::{CONFIG, CRIU, FORMAT, IMAGE_NAME};
use crate::artifact::Checkpoint;
use crate::interchange::image::Images;
use crate::interchange::output::{LayoutOutput, Slot};
use crate::interchange::spec::{self, Ingredients};
use crate::interchange::{ExportError, Volumes, exportable, local};
use crate::progress::Progress;
use crate::store::Store;
use crate::unpack::{BLOCK_BYTES, Limits, TarTarget, unpack_to_tar};

/// What to export.
#[derive(Debug)]
pub struct ExportRequest {
    /// The image layout to make: a tar when its name ends with `.tar`, else a directory.
    pub target: PathBuf,
    /// What the checkpoint is called in containerd.
    pub name: String,
    /// For each mount from outside the directory of the restoring node that takes its place:
    /// destination, source.
    pub mounts: BTreeMap<String, String>,
    /// Whether content of mounts may be left behind, for which the format has no place.
    pub volumes: Volumes,
}

/// What was exported.
#[derive(Clone, Debug)]
pub struct Exported {
    /// containerd's index.
    pub index: Descriptor,
    /// What the checkpoint is called in containerd.
    pub name: String,
    /// What the container image is called in containerd.
    pub image: String,
    /// Bytes of the tar of CRIU's images, holes counted.
    pub criu_bytes: u64,
}

/// Writes a checkpoint as containerd's index, with the container image that it needs. The layout
/// appears whole or not at all. Every byte of the checkpoint is proven on the way.
pub async fn export(
    request: ExportRequest,
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<Exported, ExportError> {
    progress.step("export");
    exportable(FORMAT, checkpoint, &request.mounts, request.volumes)?;
    let parts = Parts::find(store, checkpoint).await?;
    let images = parts.images();
    let target = request.target.clone();
    let mut out = local("make the layout", move |_| LayoutOutput::begin(&target)).await?;

    let (criu, moved) = write_criu(out, store, checkpoint, progress).await?;
    out = moved;
    let (_, config) = specification(&spec::write(&Ingredients {
        config: &checkpoint.config,
        run: &images.run,
        sources: &request.mounts,
        annotations: BTreeMap::new(),
    }));
    let (config, moved) = local("write the specification", move |_| {
        let config = out.add(CONFIG, &config)?;
        Ok((config, out))
    })
    .await?;
    let (layer, moved) = write_layer(moved, store, &parts).await?;
    out = write_image(moved, store, images, progress).await?;

    let source = checkpoint.config.source.image.as_deref().unwrap_or("localhost/checkpoint");
    let image = images.name_by_digest(source);
    let index = parts.index(Blobs { criu: criu.clone(), specification: config, layer }, &image);
    let (name, platform) = (request.name.clone(), images.platform.clone());
    let (base, base_name) = (images.base.bare(), image.clone());
    let index = local("finish the layout", move |_| {
        let content = serde_json::to_vec(&index)?;
        let index = out.add(media_type::OCI_INDEX, &content)?;
        let top = top(&index, &name, base, &base_name, platform);
        out.finish(&top)?;
        Ok(index)
    })
    .await?;
    Ok(Exported { index, name: request.name, image, criu_bytes: criu.size })
}

/// Writes the dump as a tar within the layout.
async fn write_criu(
    mut out: LayoutOutput,
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<(Descriptor, LayoutOutput), ExportError> {
    let blob = out.blob().map_err(|error| ExportError::Io("begin the tar", error))?;
    let slot = blob.slot().clone();
    let target = TarTarget { file: Arc::clone(&slot.file), position: slot.base, prefix: "" };
    let scratch = out.scratch().to_owned();
    let limits = Limits::default();
    let end = unpack_to_tar(store, checkpoint, &scratch, target, limits, progress).await?;
    local("finish the tar", move |wanted| {
        // Two blocks of zeros end a tar.
        let length = end.saturating_sub(slot.base).saturating_add(2 * BLOCK_BYTES);
        slot.file.set_len(slot.base.saturating_add(length))?;
        let criu = out.seal(blob, length, CRIU, wanted)?;
        Ok((criu, out))
    })
    .await
}

/// Writes what the container had written.
async fn write_layer(
    mut out: LayoutOutput,
    store: &Store,
    parts: &Parts,
) -> Result<(Descriptor, LayoutOutput), ExportError> {
    let blob = out.blob().map_err(|error| ExportError::Io("begin the container's layer", error))?;
    let length = parts.write_layer(store, blob.slot().writer()).await?.position();
    local("write the container's layer", move |wanted| {
        let layer = out.seal(blob, length, media_type::OCI_LAYER_GZIP, wanted)?;
        Ok((layer, out))
    })
    .await
}

/// Copies the container image into the layout.
async fn write_image(
    mut out: LayoutOutput,
    store: &Store,
    images: &Images,
    progress: &Progress,
) -> Result<LayoutOutput, ExportError> {
    for blob in images.manifest.layers.iter().chain([&images.manifest.config]) {
        if out.has(&blob.digest) {
            continue;
        }
        progress.expect(blob.size);
        let stream = store.blob(blob).await?;
        let media_type = blob.media_type.clone();
        out = local("copy the container image", move |wanted| {
            let place = out.blob()?;
            let length = copy(&mut wanted.stream(stream), place.slot())?;
            out.seal(place, length, &media_type, wanted)?;
            Ok(out)
        })
        .await?;
        progress.advance(blob.size);
        progress.transfer(blob.size);
    }
    let (content, kind) = (images.content.clone(), images.base.media_type.clone());
    local("copy the container image", move |_| {
        out.add(&kind, &content)?;
        Ok(out)
    })
    .await
}

fn copy(from: &mut impl io::Read, to: &Slot) -> io::Result<u64> {
    let mut writer = to.writer();
    io::copy(from, &mut writer)?;
    Ok(writer.position())
}

/// The layout's list of what it holds: the checkpoint and the image, each with its name.
fn top(
    index: &Descriptor,
    name: &str,
    base: Descriptor,
    base_name: &str,
    platform: Platform,
) -> Index {
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let checkpoint =
        index.clone().with_annotation(IMAGE_NAME, name).with_annotation(annotation::REF_NAME, tag);
    let base = Descriptor { platform: Some(platform), ..base };
    Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: None,
        manifests: vec![checkpoint, base.with_annotation(IMAGE_NAME, base_name)],
        subject: None,
        annotations: Annotations::new(),
    }
}
