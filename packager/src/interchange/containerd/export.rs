//! An artifact becomes containerd's index, in an image layout that `ctr image import` takes.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::TryStreamExt as _;
use kybernate_spec::{
    Annotations, Descriptor, Digest, Index, MANIFEST_BYTES_MAX, Manifest, Platform, annotation,
    media_type,
};
use prost::Message as _;
use serde::Deserialize;
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::{Any, CONFIG, CRIU, IMAGE_NAME, RUNTIME, SNAPSHOTTER, SPEC_TYPE};
use crate::artifact::Checkpoint;
use crate::interchange::ExportError;
use crate::interchange::output::{LayoutOutput, Slot};
use crate::interchange::spec::{self, ImageRun, Ingredients};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::Store;
use crate::unpack::{BLOCK_BYTES, Limits, TarTarget, unpack_to_tar};

/// Whose format this is, in messages.
const FORMAT: &str = "containerd's index";
/// The runtime that restores it.
const RUNTIME_NAME: &str = "io.containerd.runc.v2";
/// The snapshotter that containerd has by default.
const SNAPSHOTTER_NAME: &str = "overlayfs";

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

/// What becomes of captured mounts, which the other format has no place for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Volumes {
    /// They are a reason to refuse.
    #[default]
    Refuse,
    /// They are left behind.
    Drop,
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

/// The container image to be exported, and what goes on it.
struct Images {
    platform: Platform,
    run: ImageRun,
    base: Descriptor,
    base_content: Bytes,
    manifest: Manifest,
    /// What the container had written, when it is not in the base.
    diff: Option<Descriptor>,
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

/// Writes a checkpoint as containerd's index, with the container image that it needs. The layout
/// appears whole or not at all. Every byte of the checkpoint is proven on the way.
pub async fn export(
    request: ExportRequest,
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<Exported, ExportError> {
    progress.step("export");
    check(&request, checkpoint)?;
    let images = images(store, checkpoint).await?;
    let target = request.target.clone();
    let mut out = local("make the layout", move || LayoutOutput::begin(&target)).await?;

    let (criu, moved) = write_criu(out, store, checkpoint, progress).await?;
    out = moved;
    let specification = spec::write(&Ingredients {
        config: &checkpoint.config,
        run: &images.run,
        sources: &request.mounts,
        annotations: BTreeMap::new(),
    });
    let value = serde_json::to_vec(&specification).map_err(io::Error::from);
    let value = value.map_err(|error| ExportError::Io("write the specification", error))?;
    let config = Any { type_url: SPEC_TYPE.to_owned(), value }.encode_to_vec();
    let (config, moved) = local("write the specification", move || {
        let config = out.add(CONFIG, &config)?;
        Ok((config, out))
    })
    .await?;
    let (rw, moved) = write_rw(moved, store, images.diff.as_ref()).await?;
    out = write_image(moved, store, &images, progress).await?;

    let image = image_name(checkpoint, &images.base.digest);
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: None,
        // containerd 1.7 looks at one entry only when it unpacks an index: the first of its own
        // platform has to be the image.
        manifests: [images.base.bare(), criu.clone(), config, rw]
            .into_iter()
            .map(|entry| Descriptor { platform: Some(images.platform.clone()), ..entry })
            .collect(),
        subject: None,
        annotations: Annotations::from([
            (annotation::REF_NAME.to_owned(), image.clone()),
            (RUNTIME.to_owned(), RUNTIME_NAME.to_owned()),
            (SNAPSHOTTER.to_owned(), SNAPSHOTTER_NAME.to_owned()),
        ]),
    };
    let (name, platform) = (request.name.clone(), images.platform);
    let (base, base_name) = (images.base.bare(), image.clone());
    let index = local("finish the layout", move || {
        let content = serde_json::to_vec(&index)?;
        let index = out.add(media_type::OCI_INDEX, &content)?;
        let top = top(&index, &name, base, &base_name, platform);
        out.finish(&top)?;
        Ok(index)
    })
    .await?;
    Ok(Exported { index, name: request.name, image, criu_bytes: criu.size })
}

/// Finds out, before anything is written, what the format has no place for.
fn check(request: &ExportRequest, checkpoint: &Checkpoint) -> Result<(), ExportError> {
    let impossible = |reason: String| Err(ExportError::Impossible { format: FORMAT, reason });
    let needs = &checkpoint.config.needs;
    if let Some(volume) = checkpoint.volumes.first()
        && request.volumes == Volumes::Refuse
    {
        let place = &volume.destination;
        return impossible(format!("it has no place for what was in {place:?}"));
    }
    if let Some(device) = needs.devices.first() {
        return impossible(format!(
            "the processes use {device:?}, whose numbers on the restoring node are not known here"
        ));
    }
    let missing = needs
        .mounts
        .iter()
        .find(|mount| mount.external && !request.mounts.contains_key(&mount.destination));
    if let Some(mount) = missing {
        let place = &mount.destination;
        return impossible(format!(
            "its specification says what to mount on {place:?}, and a checkpoint does not: say it"
        ));
    }
    let given = request.mounts.keys().find(|place| {
        !needs.mounts.iter().any(|mount| mount.external && mount.destination == **place)
    });
    match given {
        Some(place) => impossible(format!("nothing from outside was mounted on {place:?}")),
        None => Ok(()),
    }
}

/// Finds the container image: the source's where the checkpoint leads to it, else the runnable
/// image, which has in its last layer what the container had written.
async fn images(store: &Store, checkpoint: &Checkpoint) -> Result<Images, ExportError> {
    let Some(runnable) = &checkpoint.runnable else {
        let reason = "it names a container image to restore on, and this checkpoint has none";
        return Err(ExportError::Impossible { format: FORMAT, reason: reason.to_owned() });
    };
    let parse = |content: &[u8]| {
        serde_json::from_slice::<Manifest>(content)
            .map_err(|error| ExportError::Image(error.to_string()))
    };
    let whole = store.manifest(&runnable.digest).await?;
    let manifest = parse(&whole.content)?;
    let (mut base, mut diff) = ((whole.descriptor.bare(), whole.content, manifest.clone()), None);
    if let Some(subject) = &checkpoint.index.subject
        && let Ok(source) = store.manifest(&subject.digest).await
    {
        let lower = parse(&source.content)?;
        let added = manifest.layers.get(lower.layers.len()..).unwrap_or_default();
        let mut same = manifest.layers.iter().zip(&lower.layers);
        if added.len() <= 1
            && lower.layers.len() <= manifest.layers.len()
            && same.all(|(ours, theirs)| ours.digest == theirs.digest)
        {
            diff = added.first().cloned();
            base = (source.descriptor.bare(), source.content, lower);
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
    let (base, base_content, manifest) = base;
    let run = config.config.unwrap_or_default();
    Ok(Images { platform, run, base, base_content, manifest, diff })
}

async fn read_small(store: &Store, blob: &Descriptor) -> Result<Vec<u8>, ExportError> {
    if blob.size > MANIFEST_BYTES_MAX {
        return Err(ExportError::Image("its config has more than 4 MiB".to_owned()));
    }
    let parts: Vec<Bytes> = store.blob(blob).await?.try_collect().await?;
    Ok(parts.concat())
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
    local("finish the tar", move || {
        // Two blocks of zeros end a tar.
        let length = end.saturating_sub(slot.base).saturating_add(2 * BLOCK_BYTES);
        slot.file.set_len(slot.base.saturating_add(length))?;
        let criu = out.seal(blob, length, CRIU)?;
        Ok((criu, out))
    })
    .await
}

/// Writes what the container had written, compressed as containerd wants it: it looks for gzip and
/// nothing else. Without anything it is a layer without files, so that `--rw` finds one.
async fn write_rw(
    mut out: LayoutOutput,
    store: &Store,
    diff: Option<&Descriptor>,
) -> Result<(Descriptor, LayoutOutput), ExportError> {
    let source = match diff {
        Some(layer) => {
            let stream = store.blob(layer).await?.map_err(io::Error::other);
            Some((SyncIoBridge::new(StreamReader::new(stream)), layer.media_type.clone()))
        }
        None => None,
    };
    local("write the container's layer", move || {
        let blob = out.blob()?;
        let mut encoder = GzEncoder::new(blob.slot().writer(), Compression::fast());
        match source {
            Some((mut stream, kind)) if kind == media_type::OCI_LAYER_ZSTD => {
                io::copy(&mut zstd::Decoder::new(&mut stream)?, &mut encoder)?;
                // A stream tells at its end whether it was what its digest says.
                io::copy(&mut stream, &mut io::sink())?;
            }
            Some((mut stream, kind)) if kind == media_type::OCI_LAYER_TAR => {
                io::copy(&mut stream, &mut encoder)?;
            }
            Some((_, kind)) => {
                let text = format!("the container's layer is of type {kind:?}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            None => encoder.write_all(&[0; 1024])?,
        }
        let length = encoder.finish()?.position();
        let rw = out.seal(blob, length, media_type::OCI_LAYER_GZIP)?;
        Ok((rw, out))
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
        let stream = store.blob(blob).await?.map_err(io::Error::other);
        let mut stream = SyncIoBridge::new(StreamReader::new(stream));
        let wanted = blob.clone();
        out = local("copy the container image", move || {
            let place = out.blob()?;
            let length = copy(&mut stream, place.slot())?;
            out.seal(place, length, &wanted.media_type)?;
            Ok(out)
        })
        .await?;
        progress.advance(blob.size);
        progress.transfer(blob.size);
    }
    let (content, kind) = (images.base_content.clone(), images.base.media_type.clone());
    local("copy the container image", move || {
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

/// Names the image after its digest, so that no tag of the importing node is moved.
fn image_name(checkpoint: &Checkpoint, base: &Digest) -> String {
    name_at(checkpoint.config.source.image.as_deref().unwrap_or("localhost/checkpoint"), base)
}

fn name_at(source: &str, digest: &Digest) -> String {
    let repository = source.split('@').next().unwrap_or(source);
    let after_host = repository.rfind('/').map_or(0, |slash| slash + 1);
    let tag = repository.get(after_host..).and_then(|name| name.find(':'));
    let end = tag.map_or(repository.len(), |colon| after_host + colon);
    format!("{}@{digest}", repository.get(..end).unwrap_or(repository))
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

/// Runs `work` where blocking is allowed. A store's error that ended a stream is told as itself.
async fn local<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ExportError> {
    blocking(work).await.map_err(|error| match error.downcast() {
        Ok(error) => ExportError::Store(error),
        Err(error) => ExportError::Io(what, error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_by_its_digest_and_not_by_its_tag() {
        let digest = Digest::of(b"x");
        let check = |image: &str, expected: &str| {
            let name = name_at(image, &digest);
            assert_eq!(name, format!("{expected}@{digest}"));
        };
        check("docker.io/library/web:1", "docker.io/library/web");
        check("host:5000/web", "host:5000/web");
        check("host:5000/web:1@sha256:00", "host:5000/web");
        check("web", "web");
    }
}
