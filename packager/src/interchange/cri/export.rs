//! An artifact becomes an archive, as kubelet's checkpoint API leaves one.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use kybernate_spec::{Descriptor, media_type};
use serde_json::{Value, json};

use super::{BIND_MOUNTS, CHECKPOINT, CONFIG, DELETED, ROOTFS_DIFF, SPEC, STATUS, layer};
use crate::artifact::Checkpoint;
use crate::interchange::image::Images;
use crate::interchange::output::TarOutput;
use crate::interchange::spec::{self, Ingredients};
use crate::interchange::{ExportError, Volumes, exportable, local};
use crate::progress::Progress;
use crate::store::Store;
use crate::unpack::{Limits, TarTarget, unpack_to_tar};

/// Whose format this is, in messages.
const FORMAT: &str = "the archive of CRI";
/// Time that is not known, as Go writes it.
const NO_TIME: &str = "0001-01-01T00:00:00Z";

/// What to export.
#[derive(Debug)]
pub struct ExportRequest {
    /// The archive to make.
    pub target: PathBuf,
    /// What the checkpoint is called where it is: the image that the archive names when the source
    /// image is not known.
    pub reference: String,
    /// For each mount from outside what is mounted there: destination, source.
    pub mounts: BTreeMap<String, String>,
    /// Whether content of mounts may be left behind, for which the format has no place.
    pub volumes: Volumes,
}

/// What was exported.
#[derive(Clone, Debug)]
pub struct Exported {
    /// The image that whoever restores it needs.
    pub image: String,
    /// Bytes of the archive, holes counted.
    pub bytes: u64,
}

/// Writes a checkpoint as an archive. It appears whole or not at all. Every byte of the checkpoint
/// is proven on the way.
pub async fn export(
    request: ExportRequest,
    store: &Store,
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<Exported, ExportError> {
    progress.step("export");
    exportable(FORMAT, checkpoint, &request.mounts, request.volumes)?;
    let images = Images::find(FORMAT, store, checkpoint).await?;
    let image = image_name(&request, checkpoint, &images);
    let documents = documents(&request, checkpoint, &images, &image);
    let target = request.target;
    let mut out = local("begin the archive", move |_| {
        let mut out = TarOutput::begin(&target)?;
        for (name, content) in documents {
            out.add(name, &serde_json::to_vec(&content)?)?;
        }
        out.add_directory(CHECKPOINT)?;
        Ok(out)
    })
    .await?;
    let raw = out.raw();
    let target = TarTarget { file: raw.file, position: raw.base, prefix: CHECKPOINT };
    let scratch = out.scratch().to_owned();
    let limits = Limits::default();
    let end = unpack_to_tar(store, checkpoint, &scratch, target, limits, progress).await?;
    out.end_at(end);
    let out = write_diff(out, store, images.diff.as_ref()).await?;
    let bytes = local("finish the archive", move |_| {
        let bytes = out.position();
        out.finish()?;
        Ok(bytes)
    })
    .await?;
    Ok(Exported { image, bytes })
}

/// Writes what the container had written as a plain tar, and beside it the list of what it had
/// deleted.
async fn write_diff(
    mut out: TarOutput,
    store: &Store,
    diff: Option<&Descriptor>,
) -> Result<TarOutput, ExportError> {
    let Some(diff) = diff else { return Ok(out) };
    let stream = store.blob(diff).await?;
    let kind = diff.media_type.clone();
    let written = local("write the container's layer", move |wanted| {
        let mut stream = wanted.stream(stream);
        let mut writer = out.slot().writer();
        let deleted = if kind == media_type::OCI_LAYER_ZSTD {
            layer::without_whiteouts(zstd::Decoder::new(&mut stream)?, &mut writer)?
        } else {
            layer::without_whiteouts(&mut stream, &mut writer)?
        };
        // A stream tells at its end whether it was what its digest says.
        io::copy(&mut stream, &mut io::sink())?;
        let Some(deleted) = deleted else { return Ok(None) };
        out.seal(ROOTFS_DIFF, writer.position())?;
        if !deleted.is_empty() {
            out.add(DELETED, &serde_json::to_vec(&deleted)?)?;
        }
        Ok(Some(out))
    })
    .await?;
    written.ok_or_else(|| {
        let reason = "it cannot say that a directory was replaced as a whole, as one was";
        ExportError::Impossible { format: FORMAT, reason: reason.to_owned() }
    })
}

/// Names the image that the processes' files are in.
fn image_name(request: &ExportRequest, checkpoint: &Checkpoint, images: &Images) -> String {
    let source = checkpoint.config.source.image.as_ref().filter(|_| images.is_source);
    source.map_or_else(|| request.reference.clone(), Clone::clone)
}

fn documents(
    request: &ExportRequest,
    checkpoint: &Checkpoint,
    images: &Images,
    image: &str,
) -> [(&'static str, Value); 4] {
    let facts = &checkpoint.config;
    let name = facts.source.container.as_deref().unwrap_or("checkpoint");
    let namespace = facts.source.namespace.as_deref().unwrap_or("default");
    let digest = &checkpoint.stored.descriptor.digest;
    let repository = images.name_by_digest(image);
    let created = facts.created.as_deref().unwrap_or(NO_TIME);
    let config = json!({
        // Nobody's id any more, but one is shown.
        "id": digest.hex(),
        "name": name,
        "rootfsImage": image,
        "rootfsImageRef": repository,
        "rootfsImageName": image,
        "runtime": "runc",
        "createdTime": NO_TIME,
        "checkpointedTime": created,
        "restoredTime": NO_TIME,
        "restored": false,
    });
    let metadata = json!({ "name": name });
    let annotations = [
        ("io.container.manager", "cri-o"),
        ("io.kubernetes.cri-o.ContainerName", name),
        ("io.kubernetes.cri-o.ContainerType", "container"),
        ("io.kubernetes.cri-o.Created", created),
        ("io.kubernetes.cri-o.Metadata", &metadata.to_string()),
        ("io.kubernetes.cri-o.Annotations", "{}"),
        ("io.kubernetes.cri-o.Labels", "{}"),
        ("io.kubernetes.cri-o.ImageName", image),
        ("io.kubernetes.container.name", name),
        ("io.kubernetes.pod.namespace", namespace),
    ];
    let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let specification = spec::write(&Ingredients {
        config: facts,
        run: &images.run,
        sources: &request.mounts,
        annotations,
    });
    let status = json!({
        "metadata": metadata,
        "image": { "image": image },
        "image_ref": repository,
        "labels": {},
        "annotations": {},
    });
    let binds: Vec<Value> = request
        .mounts
        .iter()
        .map(|(destination, source)| json!({ "source": source, "destination": destination }))
        .collect();
    [(CONFIG, config), (SPEC, specification), (STATUS, status), (BIND_MOUNTS, binds.into())]
}
