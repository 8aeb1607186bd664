//! A checkpoint as it is found in a store: its shape is checked, its facts are read, and nothing
//! large has moved yet.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use kybernate_spec::checkpoint::{
    CONFIG_BYTES_MAX, CheckpointConfig, DeviceStorage, FORMAT_VERSION,
};
use kybernate_spec::page_index::{SHARD_BYTES_MAX, SHARDS_MAX};
use kybernate_spec::{
    Descriptor, Index, Location, Manifest, Reason, annotation, document, media_type,
};

use crate::checked::length;
use crate::criu::device_file;
use crate::store::{BlobStream, Store, StoreError, StoredManifest};

/// Longest destination of a volume: what Linux takes as a path.
const PATH_BYTES_MAX: usize = 4096;

/// A checkpoint artifact.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The index as stored: its digest is the checkpoint's.
    pub stored: StoredManifest,
    /// The index.
    pub index: Index,
    /// The runnable image, when the artifact has one.
    pub runnable: Option<Descriptor>,
    /// The checkpoint manifest's descriptor.
    pub child: Descriptor,
    /// The checkpoint manifest.
    pub manifest: Manifest,
    /// The facts.
    pub config: CheckpointConfig,
    /// The page index.
    pub page_index: Descriptor,
    /// The pack of small files.
    pub images: Descriptor,
    /// The shards, of pages and of device memory, in the page index's order.
    pub shards: Vec<Descriptor>,
    /// Hashes of the stored pages, in the page index's order.
    pub page_hashes: Option<Descriptor>,
    /// Captured mounts.
    pub volumes: Vec<Volume>,
}

/// A captured mount.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Where it was mounted.
    pub destination: String,
    /// The tar of its content, in parts.
    pub parts: Vec<Descriptor>,
}

impl Volume {
    /// Reads the tar. Each part is checked against its digest; the stream ends with an error when
    /// one does not match.
    pub fn read(&self, store: &Store) -> BlobStream {
        let store = store.clone();
        // The next part is asked for while one is read.
        let parts = stream::iter(self.parts.clone()).map(move |part| {
            let store = store.clone();
            async move { store.blob(&part).await }
        });
        parts.buffered(2).try_flatten().boxed()
    }

    /// Whether this part may come next.
    fn goes_on_with(&self, part: usize) -> bool {
        let in_parts = |first: &Descriptor| first.annotations.contains_key(annotation::PART);
        self.parts.first().is_some_and(in_parts) && part == self.parts.len()
    }
}

/// Why something is not opened as a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// It could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is something else, perhaps an ordinary image.
    #[error("{0} is no checkpoint: its type is {1:?}")]
    NotACheckpoint(String, String),
    /// It breaks a rule of the format.
    #[error("the checkpoint breaks the format: {1}")]
    Shape(Reason, String),
    /// It is of a later format.
    #[error("the checkpoint has format version {0:?}, this program reads {FORMAT_VERSION}")]
    Version(String),
    /// One of its documents does not parse.
    #[error("failed to parse the checkpoint's {0}")]
    Malformed(&'static str, #[source] serde_json::Error),
}

impl ArtifactError {
    /// Returns the rule that is broken; `None` when reading failed.
    pub const fn reason(&self) -> Option<Reason> {
        match self {
            Self::Store(error) => error.reason(),
            Self::NotACheckpoint(..) => Some(Reason::NotACheckpoint),
            Self::Shape(reason, _) => Some(*reason),
            Self::Version(_) => Some(Reason::Unsupported),
            Self::Malformed(..) => Some(Reason::Document),
        }
    }
}

impl Checkpoint {
    /// Finds and opens the checkpoint that `location` names.
    pub async fn open(store: &Store, location: &Location) -> Result<Self, ArtifactError> {
        let stored = store.resolve(location).await?;
        Self::of(store, stored, &location.to_string()).await
    }

    /// Opens a checkpoint whose index was read already. `name` is for messages.
    pub async fn of(
        store: &Store,
        stored: StoredManifest,
        name: &str,
    ) -> Result<Self, ArtifactError> {
        let index = parse_index(&stored, name)?;
        let (child, runnable) = children(&index)?;
        let manifest = read_manifest(store, &child).await?;
        let config = read_config(store, &manifest.config).await?;
        let layers = Layers::sort(&manifest, config.device.storage)?;
        Ok(Self {
            stored,
            index,
            runnable,
            child,
            config,
            page_index: layers.page_index,
            images: layers.images,
            shards: layers.shards,
            page_hashes: layers.page_hashes,
            volumes: layers.volumes,
            manifest,
        })
    }
}

fn parse_index(stored: &StoredManifest, name: &str) -> Result<Index, ArtifactError> {
    let other = |what: &str| ArtifactError::NotACheckpoint(name.to_owned(), what.to_owned());
    if stored.descriptor.media_type != media_type::OCI_INDEX {
        return Err(other(&stored.descriptor.media_type));
    }
    let index = document::parse_index(&stored.content)
        .map_err(|error| ArtifactError::Malformed("index", error))?;
    match index.artifact_type.as_deref() {
        Some(media_type::CHECKPOINT) => Ok(index),
        Some(artifact) => Err(other(artifact)),
        None => Err(other(media_type::OCI_INDEX)),
    }
}

/// Tells the children apart: one checkpoint, at most one runnable image.
fn children(index: &Index) -> Result<(Descriptor, Option<Descriptor>), ArtifactError> {
    let shape = |text: &str| Err(ArtifactError::Shape(Reason::Children, text.to_owned()));
    let is_checkpoint =
        |child: &&Descriptor| child.artifact_type.as_deref() == Some(media_type::CHECKPOINT);
    let (checkpoints, others): (Vec<&Descriptor>, Vec<_>) =
        index.manifests.iter().partition(is_checkpoint);
    let [checkpoint] = checkpoints.as_slice() else {
        return shape("the index must have exactly one checkpoint child");
    };
    let runnable = match others.as_slice() {
        [] => None,
        [runnable] if runnable.is_manifest() => Some((*runnable).clone()),
        _ => return shape("the index may have one other child, a runnable image"),
    };
    Ok(((*checkpoint).clone(), runnable))
}

async fn read_manifest(store: &Store, child: &Descriptor) -> Result<Manifest, ArtifactError> {
    let wrong = |text: &str| Err(ArtifactError::Shape(Reason::Manifest, text.to_owned()));
    if child.media_type != media_type::OCI_MANIFEST {
        return wrong("the checkpoint child is no OCI image manifest");
    }
    let stored = store.manifest_of(child).await?;
    parse_manifest(&stored.content)
}

fn parse_manifest(content: &[u8]) -> Result<Manifest, ArtifactError> {
    let wrong = |text: &str| Err(ArtifactError::Shape(Reason::Manifest, text.to_owned()));
    let manifest = document::parse_manifest(content)
        .map_err(|error| ArtifactError::Malformed("manifest", error))?;
    let typed = manifest.media_type.as_deref().is_none_or(|own| own == media_type::OCI_MANIFEST)
        && manifest.artifact_type.as_deref() == Some(media_type::CHECKPOINT);
    if !typed {
        return wrong("the checkpoint child's manifest is of another type");
    }
    if manifest.subject.is_some() {
        return wrong("the checkpoint child has a subject; only the index may");
    }
    if manifest.config.media_type != media_type::CHECKPOINT_CONFIG {
        return wrong("its config is of another type");
    }
    Ok(manifest)
}

async fn read_config(
    store: &Store,
    config: &Descriptor,
) -> Result<CheckpointConfig, ArtifactError> {
    check_config_size(config.size)?;
    let parts: Vec<Bytes> = store.blob(config).await?.try_collect().await?;
    parse_config(&parts.concat())
}

fn check_config_size(bytes: u64) -> Result<(), ArtifactError> {
    if bytes <= CONFIG_BYTES_MAX {
        return Ok(());
    }
    let text = "its config is larger than 1 MiB".to_owned();
    Err(ArtifactError::Shape(Reason::DocumentTooLarge, text))
}

/// Reads the facts of a checkpoint that is being made as whoever opens it will.
pub(crate) fn check_config(content: &[u8]) -> Result<(), ArtifactError> {
    check_config_size(length(content))?;
    parse_config(content).map(drop)
}

/// Reads the manifest of a checkpoint that is being made as whoever opens it will.
pub(crate) fn check_manifest(content: &[u8], device: DeviceStorage) -> Result<(), ArtifactError> {
    Layers::sort(&parse_manifest(content)?, device).map(drop)
}

fn parse_config(content: &[u8]) -> Result<CheckpointConfig, ArtifactError> {
    let config: CheckpointConfig =
        document::parse(content).map_err(|error| ArtifactError::Malformed("config", error))?;
    let major = |version: &str| version.split('.').next().map(str::to_owned);
    if major(&config.version) != major(FORMAT_VERSION) {
        return Err(ArtifactError::Version(config.version));
    }
    check_device(&config)?;
    Ok(config)
}

/// What the facts say of device memory must agree with itself.
fn check_device(config: &CheckpointConfig) -> Result<(), ArtifactError> {
    let wrong = |text: String| Err(ArtifactError::Shape(Reason::Device, text));
    let device = &config.device;
    if device.storage != DeviceStorage::Device && !device.streams.is_empty() {
        return wrong(
            "files with device memory are named, which is said to be elsewhere".to_owned(),
        );
    }
    let node = config.node.as_ref().and_then(|node| node.gpu.as_ref());
    let is_used = |gpu: &String| match node {
        _ if device.gpus.contains(gpu) => true,
        Some(node) if device.gpus.is_empty() => node.devices.iter().any(|one| one.uuid == *gpu),
        _ => false,
    };
    let mut files = BTreeSet::new();
    for stream in &device.streams {
        let (file, gpu) = (&stream.file, &stream.gpu);
        if device_file(stream.pid, gpu).as_ref() != Some(file) {
            let pid = stream.pid;
            return wrong(format!("{file:?} is not what process {pid} had on GPU {gpu:?}"));
        }
        if !is_used(gpu) {
            return wrong(format!("{file:?} is of GPU {gpu:?}, which is not among those used"));
        }
        if !files.insert(file) {
            return wrong(format!("{file:?} is named twice"));
        }
    }
    Ok(())
}

struct Layers {
    page_index: Descriptor,
    images: Descriptor,
    shards: Vec<Descriptor>,
    page_hashes: Option<Descriptor>,
    volumes: Vec<Volume>,
}

impl Layers {
    /// Shards of device memory are layers that only a checkpoint with such memory may have.
    fn sort(manifest: &Manifest, device: DeviceStorage) -> Result<Self, ArtifactError> {
        let shape = |text: String| ArtifactError::Shape(Reason::Layers, text);
        let (mut page_index, mut images, mut page_hashes) = (None, None, None);
        let (mut shards, mut volumes) = (Vec::new(), Vec::new());
        for layer in &manifest.layers {
            let again = match &*layer.media_type {
                media_type::PAGE_INDEX => page_index.replace(layer.clone()).is_some(),
                media_type::IMAGES_PACK => images.replace(within(layer)?).is_some(),
                media_type::PAGE_HASHES => page_hashes.replace(layer.clone()).is_some(),
                media_type::PAGES => {
                    shards.push(within(layer)?);
                    false
                }
                media_type::DEVICE if device == DeviceStorage::Device => {
                    shards.push(within(layer)?);
                    false
                }
                media_type::VOLUME => {
                    add_volume(layer, &mut volumes)?;
                    false
                }
                other => return Err(shape(format!("layers of type {other:?} are not known"))),
            };
            if again {
                return Err(shape(format!("it has two layers of type {:?}", layer.media_type)));
            }
        }
        if u32::try_from(shards.len()).is_ok_and(|count| count > SHARDS_MAX) {
            return Err(shape(format!("it has more than {SHARDS_MAX} shards")));
        }
        let missing = |what| move || shape(format!("it has no {what}"));
        Ok(Self {
            page_index: page_index.ok_or_else(missing("page index"))?,
            images: images.ok_or_else(missing("pack of images"))?,
            shards,
            page_hashes,
            volumes,
        })
    }
}

/// Returns the layer when it is not larger than a blob of ours may be.
pub(crate) fn within(layer: &Descriptor) -> Result<Descriptor, ArtifactError> {
    if layer.size <= SHARD_BYTES_MAX {
        return Ok(layer.clone());
    }
    let text = format!("a layer of type {:?} is larger than 256 MiB", layer.media_type);
    Err(ArtifactError::Shape(Reason::BlobTooLarge, text))
}

/// Whether something may be mounted there.
pub(crate) fn is_destination(destination: &str) -> bool {
    destination.starts_with('/')
        && destination.len() <= PATH_BYTES_MAX
        && !destination.contains('\0')
        && destination.split('/').all(|component| component != "..")
}

/// Returns the directories that lead to a destination: `/a/` and `/./a` are one place.
pub(crate) fn places(destination: &str) -> impl Iterator<Item = &str> {
    destination.split('/').filter(|component| !matches!(*component, "" | "."))
}

/// Adds a volume, or the next part of the last one.
fn add_volume(layer: &Descriptor, volumes: &mut Vec<Volume>) -> Result<(), ArtifactError> {
    let wrong = |text: String| Err(ArtifactError::Shape(Reason::Volume, text));
    let Some(destination) = layer.annotations.get(annotation::DESTINATION) else {
        return wrong("a volume has no destination".to_owned());
    };
    if !is_destination(destination) {
        return wrong(format!("a volume's destination is {destination:?}"));
    }
    let part = match layer.annotations.get(annotation::PART) {
        None => None,
        Some(text) => match text.parse::<usize>() {
            // Only as it is written: neither `+1` nor `01`.
            Ok(number) if number.to_string() == *text => Some(number),
            _ => return wrong(format!("a part of a volume has the number {text:?}")),
        },
    };
    let layer = within(layer)?;
    let last = volumes.len().wrapping_sub(1);
    let same = |other: &Volume| places(&other.destination).eq(places(destination));
    let known = volumes.iter().position(same);
    match (part, known, volumes.last_mut()) {
        (None | Some(0), None, _) => {
            volumes.push(Volume { destination: destination.clone(), parts: vec![layer] });
        }
        (None, Some(_), _) => {
            return wrong(format!("two volumes have the destination {destination:?}"));
        }
        (Some(part), Some(known), Some(volume)) if known == last && volume.goes_on_with(part) => {
            volume.parts.push(layer);
        }
        (Some(part), ..) => {
            return wrong(format!("part {part} on {destination:?} is not where it should be"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes(layers: &[(&str, Option<&str>)]) -> Result<Vec<usize>, String> {
        let mut found = Vec::new();
        for (destination, part) in layers {
            let layer = Descriptor::of(media_type::VOLUME, b"");
            let mut layer = layer.with_annotation(annotation::DESTINATION, *destination);
            if let Some(part) = part {
                layer = layer.with_annotation(annotation::PART, *part);
            }
            add_volume(&layer, &mut found).map_err(|error| {
                assert_eq!(error.reason(), Some(Reason::Volume));
                error.to_string()
            })?;
        }
        Ok(found.iter().map(|volume| volume.parts.len()).collect())
    }

    #[test]
    fn parts_of_a_volume_follow_one_another() {
        let (zero, one, two) = (Some("0"), Some("1"), Some("2"));
        assert_eq!(
            volumes(&[("/a", None), ("/b", zero), ("/b", one), ("/b", two)]),
            Ok(vec![1, 3])
        );
        for wrong in [
            &[("/a", None), ("/a", None)][..],
            &[("/a", None), ("/a", one)],
            &[("/a", zero), ("/a", None)],
            &[("/a", zero), ("/a", zero)],
            &[("/a", zero), ("/a", two)],
            &[("/a", one)],
            &[("/a", zero), ("/b", None), ("/a", one)],
            &[("/a", Some("x"))],
            &[("/a", Some("+0"))],
            &[("/a", zero), ("/a", Some("01"))],
            &[("/a", None), ("/a/", None)],
            &[("/a/b", None), ("//a/./b", None)],
            &[("/a/../b", None)],
        ] {
            assert!(volumes(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_volume_that_is_too_large_is_refused() {
        let mut layer = Descriptor::of(media_type::VOLUME, b"");
        layer = layer.with_annotation(annotation::DESTINATION, "/a");
        layer.size = SHARD_BYTES_MAX + 1;
        let error = add_volume(&layer, &mut Vec::new()).unwrap_err();
        assert_eq!(error.reason(), Some(Reason::BlobTooLarge));
    }
}
