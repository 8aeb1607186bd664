//! containerd's index becomes what a dump directory is packed from.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};
use kybernate_spec::{
    Descriptor, Index, Location, RepositoryName, annotation, document, media_type,
};
use prost::Message as _;

use super::{Any, CONFIG, CRIU};
use crate::interchange::foreign::{ForeignError, Members};
use crate::interchange::source::ForeignSource;
use crate::interchange::spec;
use crate::interchange::{Files, ImportError, Imported, dump, fill};
use crate::pack::{PackRequest, Runnable, SourceImage};
use crate::progress::Progress;
use crate::runtime_spec::SourceSpec;
use crate::store::{BlobStream, StoredManifest};
use crate::wanted;

/// How the types of containerd's own parts begin. Those that are not needed are left.
const OWN_TYPES: &str = "application/vnd.containerd.container.";
/// Layers as the container may have written one.
const LAYERS: &[&str] =
    &[media_type::OCI_LAYER_GZIP, media_type::OCI_LAYER_ZSTD, media_type::OCI_LAYER_TAR];

/// What to import.
#[derive(Debug)]
pub struct ImportRequest {
    /// Where it is.
    pub source: ForeignSource,
    /// What it is called there, unless it is in a tar.
    pub location: Option<Location>,
    /// Which one of a tar; not needed when there is only one.
    pub name: Option<String>,
    /// What is known beyond what the index says.
    pub facts: CheckpointConfig,
    /// The container image, when the index does not hold it.
    pub image: Option<SourceImage>,
    /// A repository of the target's registry that has the index's blobs.
    pub mount_from: Option<RepositoryName>,
    /// A directory for temporary files; the system's when absent.
    pub scratch: Option<PathBuf>,
}

/// The parts of an index.
struct Parts<'a> {
    criu: &'a Descriptor,
    config: &'a Descriptor,
    layer: Option<&'a Descriptor>,
    image: Option<&'a Descriptor>,
}

/// Reads containerd's index. What comes back is packed as any dump is, and only that makes an
/// artifact.
pub async fn import(request: ImportRequest, progress: &Progress) -> Result<Imported, ImportError> {
    progress.step("import");
    let source = &request.source;
    let index = choose(source.indexes(request.location.as_ref()).await?, request.name.as_deref())?;
    let parts = Parts::of(&index)?;
    let spec = read_spec(source, parts.config).await?;
    let image = match request.image {
        Some(image) => Some(image),
        None => find_image(source, &parts, request.mount_from).await?,
    };
    let files = Files::begin(request.scratch.as_deref())?;
    let dump = files.path().join("dump");
    fs::create_dir(&dump).map_err(|error| ImportError::Io("make a directory", error))?;
    progress.expect(parts.criu.size);
    let stream = source.blob(parts.criu).await?;
    {
        let dump = dump.clone();
        read(stream, move |input| read_criu(input, &dump)).await?;
    }
    progress.advance(parts.criu.size);
    let rootfs_diff = match parts.layer {
        Some(layer) => {
            let (path, kind) = (files.path().join("rootfs-diff.tar"), layer.media_type.clone());
            let stream = source.blob(layer).await?;
            let to = path.clone();
            read(stream, move |input| {
                dump::decompress(input, &kind, &to)?;
                dump::check_layer(&to).map(drop)
            })
            .await?;
            Some(path)
        }
        None => None,
    };
    let mut config = request.facts;
    config.needs = fill(config.needs, spec.needs());
    let known = index.annotations.get(annotation::REF_NAME);
    config.source.image = config.source.image.or_else(|| known.cloned());
    if let Some(image) = &image {
        let digest = image.manifest.descriptor.digest.clone();
        config.source.image_digest = config.source.image_digest.or(Some(digest));
    }
    let platform = parts.criu.platform.as_ref();
    config.node = config.node.or_else(|| {
        let architecture = platform?.architecture.clone();
        Some(NodeFacts { architecture, ..NodeFacts::default() })
    });
    let request = PackRequest {
        dump,
        config,
        // A layer goes upon an image. Without one nobody could apply it.
        rootfs_diff: rootfs_diff.filter(|_| image.is_some()).map(Into::into),
        image,
        volumes: Vec::new(),
        runnable: Runnable::Auto,
        subject: true,
        base: None,
        page_hashes: false,
        resend: false,
        scratch: request.scratch,
    };
    Ok(Imported { request, files })
}

/// Picks the checkpoint out of what a source holds.
fn choose(found: Vec<(String, Index)>, name: Option<&str>) -> Result<Index, ForeignError> {
    let is_checkpoint =
        |index: &Index| index.manifests.iter().any(|entry| entry.media_type == CRIU);
    let mut found: Vec<(String, Index)> = found
        .into_iter()
        .filter(|(called, index)| is_checkpoint(index) && name.is_none_or(|name| name == called))
        .collect();
    match (found.pop(), found.is_empty()) {
        (Some((_, index)), true) => Ok(index),
        (None, _) => Err(ForeignError::Content("there is no checkpoint of containerd".to_owned())),
        (Some((last, _)), false) => {
            let names: Vec<String> =
                found.into_iter().map(|(name, _)| name).chain([last]).collect();
            let text = format!("there is more than one checkpoint, name one: {}", names.join(", "));
            Err(ForeignError::Content(text))
        }
    }
}

impl<'a> Parts<'a> {
    fn of(index: &'a Index) -> Result<Self, ForeignError> {
        let (mut criu, mut config, mut layer, mut image) = (None, None, None, None);
        for entry in &index.manifests {
            let again = match &*entry.media_type {
                CRIU => criu.replace(entry),
                CONFIG => config.replace(entry),
                kind if LAYERS.contains(&kind) => layer.replace(entry),
                _ if entry.is_manifest() || entry.is_index() => image.replace(entry),
                kind if kind.starts_with(OWN_TYPES) => None,
                kind => {
                    let text = format!("an entry of type {kind:?} is not known");
                    return Err(ForeignError::Content(text));
                }
            };
            if again.is_some() {
                let text = format!("it has two entries of type {:?}", entry.media_type);
                return Err(ForeignError::Content(text));
            }
        }
        let missing = |what: &str| ForeignError::Content(format!("it has no {what}"));
        Ok(Self {
            criu: criu.ok_or_else(|| missing("images of CRIU"))?,
            config: config.ok_or_else(|| missing("specification"))?,
            layer,
            image,
        })
    }
}

async fn read_spec(source: &ForeignSource, config: &Descriptor) -> Result<SourceSpec, ImportError> {
    let content = source.small(config).await?;
    let wrong = |error: &dyn std::fmt::Display| {
        ForeignError::Content(format!("the specification cannot be read: {error}"))
    };
    let any = Any::decode(content).map_err(|error| wrong(&error))?;
    let spec: SourceSpec = serde_json::from_slice(&any.value).map_err(|error| wrong(&error))?;
    spec::check(&spec)?;
    Ok(spec)
}

/// Finds the container image's manifest for the platform of the dump.
async fn find_image(
    source: &ForeignSource,
    parts: &Parts<'_>,
    mount_from: Option<RepositoryName>,
) -> Result<Option<SourceImage>, ImportError> {
    let Some(entry) = parts.image else { return Ok(None) };
    let Some(mut content) = source.find(entry).await? else { return Ok(None) };
    let mut descriptor = entry.bare();
    if entry.is_index() {
        let index = document::parse::<Index>(&content)
            .map_err(|error| ForeignError::Content(format!("the image's index: {error}")))?;
        let wanted = parts.criu.platform.as_ref();
        let fits = |child: &&Descriptor| {
            child.is_manifest()
                && child.platform.as_ref().is_some_and(|platform| {
                    wanted.is_none_or(|wanted| {
                        (&platform.os, &platform.architecture) == (&wanted.os, &wanted.architecture)
                    })
                })
        };
        let Some(child) = index.manifests.iter().find(fits) else { return Ok(None) };
        let Some(manifest) = source.find(child).await? else { return Ok(None) };
        (descriptor, content) = (child.bare(), manifest);
    }
    let manifest = StoredManifest { descriptor, content };
    Ok(Some(SourceImage { manifest, blobs: Arc::new(source.clone()), mount_from }))
}

/// Makes a dump directory of the tar of CRIU's images.
fn read_criu(input: &mut dyn io::Read, directory: &Path) -> Result<(), ForeignError> {
    let mut members = Members::new(input);
    while let Some(member) = members.next_file()? {
        let name = member.name.clone();
        dump::take(&mut members, &member, &name, directory)?;
    }
    Ok(())
}

/// Reads a stream where blocking is allowed, to its end: only there it is known to be right.
async fn read(
    stream: BlobStream,
    work: impl FnOnce(&mut dyn io::Read) -> Result<(), ForeignError> + Send + 'static,
) -> Result<(), ImportError> {
    let done = wanted::spawn(move |wanted| {
        let mut input = wanted.stream(stream);
        work(&mut input)?;
        io::copy(&mut input, &mut io::sink())?;
        Ok(())
    });
    let done = done.end().await.map_err(|error| ImportError::Io("read", error))?;
    done.map_err(|error| match error {
        ForeignError::Io(error) => match error.downcast() {
            Ok(error) => ImportError::Store(error),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                ForeignError::Io(error).into()
            }
            Err(error) => ImportError::Io("read what is imported", error),
        },
        other => other.into(),
    })
}
