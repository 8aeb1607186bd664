//! An archive becomes what a dump directory is packed from.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::checkpoint::{CheckpointConfig, Source};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{
    CHECKPOINT, CONFIG, CONTAINER_ENV, DELETED, DEV_SHM, PARENT, PRE_CHECKPOINT, ROOTFS_DIFF, SPEC,
    VOLUMES, layer, previous,
};
use crate::interchange::foreign::{ForeignError, Member, Members};
use crate::interchange::spec;
use crate::interchange::{Files, ImportError, Imported, dump, fill};
use crate::pack::{PackRequest, Runnable, SourceImage, VolumeCapture};
use crate::progress::Progress;
use crate::runtime_spec::SourceSpec;
use crate::wanted::{self, Wanted};

/// Largest document: a runtime specification with many mounts has some 100 KB.
const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
/// Most named volumes.
const VOLUMES_MAX: usize = 1024;

/// What to import.
#[derive(Debug)]
pub struct ImportRequest {
    /// The archive: a tar, plain or compressed with gzip or zstd.
    pub archive: PathBuf,
    /// The archive of the pre-checkpoint that it was taken upon, when it was (Podman's
    /// `--with-previous`).
    pub previous: Option<PathBuf>,
    /// What is known beyond what the archive says.
    pub facts: CheckpointConfig,
    /// The container image it was started from: archives hold none.
    pub image: Option<SourceImage>,
    /// A directory for temporary files; the system's when absent.
    pub scratch: Option<PathBuf>,
}

/// The part of `config.dump` that says what it was.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Config {
    name: String,
    rootfs_image: String,
    rootfs_image_name: String,
    checkpointed_time: String,
    named_volumes: Vec<NamedVolume>,
}

/// Where Podman had mounted a volume.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct NamedVolume {
    volume_name: String,
    dest: String,
}

/// CRI-O's name of a container, within an annotation.
#[derive(Debug, Deserialize)]
struct Metadata {
    name: String,
}

/// What was found in an archive.
#[derive(Debug, Default)]
struct Found {
    config: Option<Config>,
    spec: Option<SourceSpec>,
    deleted: Vec<String>,
    has_diff: bool,
    has_dev_shm: bool,
    volumes: BTreeMap<String, PathBuf>,
    /// Whether there are CRIU's images.
    has_dump: bool,
}

/// Reads an archive. What comes back is packed as any dump is, and only that makes an artifact.
pub async fn import(request: ImportRequest, progress: &Progress) -> Result<Imported, ImportError> {
    progress.step("import");
    let files = Files::begin(request.scratch.as_deref())?;
    let (archive, previous) = (request.archive, request.previous);
    let place = files.path().to_owned();
    let read = wanted::spawn(move |wanted| read(&archive, previous.as_deref(), &place, wanted));
    let read = read.end().await;
    let read = read.map_err(|error| ImportError::Io("read", error))?;
    let found = read.map_err(|error| match error {
        ForeignError::Io(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            ImportError::Io("read the archive", error)
        }
        other => other.into(),
    })?;
    let wanted = |what: &str| ForeignError::Content(format!("it has no {what}"));
    let config = found.config.ok_or_else(|| wanted(CONFIG))?;
    let spec = found.spec.ok_or_else(|| wanted(SPEC))?;
    spec::check(&spec)?;
    let volumes = volumes(&config, found.has_dev_shm, found.volumes, files.path())?;
    let mut facts = request.facts;
    facts.needs = fill(facts.needs, spec.needs());
    facts.source = known(facts.source, &config, &spec);
    facts.created = facts.created.or(Some(config.checkpointed_time).filter(|time| is_time(time)));
    if let (Some(image), None) = (&request.image, &facts.source.image_digest) {
        facts.source.image_digest = Some(image.manifest.descriptor.digest.clone());
    }
    let diff = found.has_diff.then(|| files.path().join(ROOTFS_DIFF));
    let request = PackRequest {
        dump: files.path().join("dump"),
        config: facts,
        // A layer goes upon an image. Without one nobody could apply it.
        rootfs_diff: diff.filter(|_| request.image.is_some()).map(Into::into),
        image: request.image,
        volumes,
        runnable: Runnable::Auto,
        subject: true,
        base: None,
        page_hashes: false,
        resend: false,
        scratch: request.scratch,
    };
    Ok(Imported { request, files })
}

/// Reads the whole archive once, in order, and what it was taken upon.
fn read(
    archive: &Path,
    previous: Option<&Path>,
    place: &Path,
    wanted: &Wanted,
) -> Result<Found, ForeignError> {
    let dump = place.join("dump");
    fs::create_dir(&dump)?;
    let archive = fs::File::open(archive)?;
    let members = Members::new(wanted.reader(dump::plain_reader(archive)?));
    let mut members = members.noting_link(PARENT);
    let mut found = Found::default();
    while let Some(member) = members.next_file()? {
        if let Some(name) = member.name.strip_prefix(CHECKPOINT) {
            let name = name.to_owned();
            dump::take(&mut members, &member, &name, &dump)?;
            found.has_dump = true;
        } else if let Some(name) = member.name.strip_prefix(PRE_CHECKPOINT) {
            let name = name.to_owned();
            dump::take(&mut members, &member, &name, &previous::directory(place)?)?;
        } else {
            read_other(&mut members, &member, place, &mut found)?;
        }
    }
    previous::join(place, members.noted_link(), found.has_dump, previous, wanted)?;
    // A runtime that mounts a tmpfs on /run makes no mount point below it: CRIU looks for one.
    let env = found.spec.as_ref().is_some_and(|spec| spec.is_mounted_on(CONTAINER_ENV));
    let places: &[&str] = if env { &[CONTAINER_ENV] } else { &[] };
    if found.has_diff || !found.deleted.is_empty() || env {
        layer::complete(&place.join(ROOTFS_DIFF), &found.deleted, places)?;
        found.has_diff = true;
    }
    Ok(found)
}

/// Reads what is not CRIU's. What no restore of ours needs (logs, statistics, states) is left.
fn read_other<R: Read>(
    members: &mut Members<R>,
    member: &Member,
    place: &Path,
    found: &mut Found,
) -> Result<(), ForeignError> {
    match &*member.name {
        CONFIG => found.config = Some(document(members, member)?),
        SPEC => found.spec = Some(document(members, member)?),
        DELETED => found.deleted = document(members, member)?,
        ROOTFS_DIFF => {
            dump::decompress_any(members, &place.join(ROOTFS_DIFF))?;
            found.has_diff = true;
        }
        DEV_SHM => {
            dump::decompress_any(members, &place.join(DEV_SHM))?;
            found.has_dev_shm = true;
        }
        name => {
            let volume = name.strip_prefix(VOLUMES).and_then(|name| name.strip_suffix(".tar"));
            let Some(volume) = volume else { return Ok(()) };
            if found.volumes.len() >= VOLUMES_MAX {
                return Err(ForeignError::TooMany);
            }
            let path = place.join(format!("volume-{}", found.volumes.len()));
            dump::decompress_any(members, &path)?;
            found.volumes.insert(volume.to_owned(), path);
        }
    }
    Ok(())
}

fn document<T: DeserializeOwned, R: Read>(
    members: &mut Members<R>,
    member: &Member,
) -> Result<T, ForeignError> {
    let content = members.small_content(member, DOCUMENT_BYTES_MAX)?;
    serde_json::from_slice(&content)
        .map_err(|error| ForeignError::Content(format!("{:?}: {error}", member.name)))
}

/// Returns the content of mounts, each with where it was mounted.
fn volumes(
    config: &Config,
    has_dev_shm: bool,
    mut found: BTreeMap<String, PathBuf>,
    place: &Path,
) -> Result<Vec<VolumeCapture>, ForeignError> {
    let mut volumes = Vec::new();
    if has_dev_shm {
        let destination = "/dev/shm".to_owned();
        volumes.push(VolumeCapture { destination, tar: place.join(DEV_SHM) });
    }
    for named in &config.named_volumes {
        let Some(tar) = found.remove(&named.volume_name) else { continue };
        let plain = named.dest.starts_with('/') && named.dest.split('/').all(|part| part != "..");
        let twice = volumes.iter().any(|volume| volume.destination == named.dest);
        if !plain || twice {
            let text = format!("a volume was mounted on {:?}", named.dest);
            return Err(ForeignError::Content(text));
        }
        volumes.push(VolumeCapture { destination: named.dest.clone(), tar });
    }
    match found.into_keys().next() {
        Some(name) => {
            let text = format!("{CONFIG:?} does not say where the volume {name:?} was mounted");
            Err(ForeignError::Content(text))
        }
        None => Ok(volumes),
    }
}

/// Adds to what is said of the source what the archive says, by the words of who made it.
fn known(said: Source, config: &Config, spec: &SourceSpec) -> Source {
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let note = |key: &str| spec.annotations.get(key).and_then(|value| text(value));
    let crio = note("io.kubernetes.cri-o.Metadata")
        .and_then(|metadata| serde_json::from_str::<Metadata>(&metadata).ok())
        .and_then(|metadata| text(&metadata.name));
    Source {
        namespace: said
            .namespace
            .or_else(|| note("io.kubernetes.pod.namespace"))
            .or_else(|| note("io.kubernetes.cri.sandbox-namespace")),
        container: said
            .container
            .or_else(|| note("io.kubernetes.cri.container-name"))
            .or(crio)
            .or_else(|| text(&config.name)),
        image: said
            .image
            .or_else(|| text(&config.rootfs_image_name))
            .or_else(|| text(&config.rootfs_image)),
        ..said
    }
}

/// Whether a text is a time, and not Go's for none.
fn is_time(text: &str) -> bool {
    text.parse::<jiff::Timestamp>().is_ok() && !text.starts_with("0001-")
}
