//! `kyb pack`

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::key::SigningKey;
use kybernate_packager::outline::Outline;
use kybernate_packager::pack::{
    Base, PackRequest, Packed, Runnable, SourceImage, VolumeCapture, pack,
};
use kybernate_packager::progress::Progress;
use kybernate_packager::sign::sign;
use kybernate_packager::store::{Store, StoredManifest};
use kybernate_spec::checkpoint::{CONFIG_BYTES_MAX, CheckpointConfig};
use kybernate_spec::{Descriptor, Location, document};
use serde_json::json;

use super::aside::aside;
use super::trust::{Trust, Trusted};
use super::{Connection, Failure, keys, tag_for};
use crate::terminal::{Terminal, bytes, say};

/// Turn a dump directory of CRIU into a checkpoint.
///
/// Without facts nothing is known of the node it was taken on, and it is restored only where that
/// is allowed. The tag comes last, after the signature.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb pack ./dump registry.example.com/team/job:v1 --facts facts.json --sign-key team.key")]
pub(super) struct Pack {
    /// The directory CRIU wrote.
    #[arg(value_name = "DUMP_DIR")]
    dump: PathBuf,
    /// Where to.
    #[arg(value_name = "REF")]
    reference: Location,
    /// The facts, as JSON: the config of a checkpoint, sizes left out.
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
    /// The container image it was started from: makes the checkpoint runnable as an image.
    #[arg(long, value_name = "REF")]
    image: Option<Location>,
    /// What the container wrote to its root file system: an uncompressed tar.
    #[arg(long, value_name = "TAR", requires = "image")]
    rootfs_diff: Option<PathBuf>,
    /// The content of a mount: its path in the container and an uncompressed tar.
    #[arg(long, value_name = "DESTINATION=TAR", value_parser = volume)]
    volume: Vec<VolumeCapture>,
    /// Whether the runnable image is part of it.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    runnable: When,
    /// Do not let it hang under its source image.
    #[arg(long)]
    no_subject: bool,
    #[command(flatten)]
    base: BaseArgs,
    /// Sign it with this private key. Its password comes from `COSIGN_PASSWORD` or is asked for.
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

/// What is known of an earlier checkpoint.
#[derive(Debug, Args)]
struct BaseArgs {
    /// An earlier checkpoint of the same container: what has not changed is not stored again.
    ///
    /// An image layout is compared byte by byte, a registry's by its page hashes. What the new
    /// checkpoint takes from a registry it signs unseen, so that base must be signed: by the key of
    /// --sign-key, unless --base-key or --base-policy name others.
    #[arg(long = "base", id = "base", value_name = "REF")]
    reference: Option<Location>,
    /// A public key that may have signed the base; may be given more than once.
    #[arg(long = "base-key", value_name = "FILE", requires = "base")]
    keys: Vec<PathBuf>,
    /// A policy file that must let the base into the namespace that the facts name.
    #[arg(long = "base-policy", value_name = "FILE", requires = "base", conflicts_with = "keys")]
    policy: Option<PathBuf>,
    /// Take a registry's base without a signature.
    #[arg(long = "insecure-base", requires = "base", conflicts_with_all = ["keys", "policy"])]
    insecure: bool,
    /// Store a hash of each page too (0.4 %), so that a later checkpoint can take this one for its
    /// base without having it here.
    #[arg(long)]
    page_hashes: bool,
}

/// Whether the runnable image is part of a checkpoint.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum When {
    /// When the source image's layers can be had.
    Auto,
    /// Always, or it is an error.
    Always,
    /// Never.
    Never,
}

impl Pack {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let tag = tag_for(&self.reference)?;
        for (number, volume) in self.volume.iter().enumerate() {
            let before = self.volume.iter().take(number);
            if before.into_iter().any(|other| other.destination == volume.destination) {
                let text = format!("--volume names {} twice", volume.destination);
                return Err(Failure::usage(text));
            }
        }
        // Whatever can be wrong with the command line is found before anything is sent.
        let key = match &self.sign_key {
            Some(path) => Some(keys::open(path).await?),
            None => None,
        };
        let config = facts(self.facts.as_deref()).await?;
        let base = self.base.open(&self.connection, key.as_ref(), &config).await?;
        let image = match &self.image {
            Some(image) => {
                Some(source_image(image, &self.reference, &config, &self.connection).await?)
            }
            None => None,
        };
        let request = PackRequest {
            dump: self.dump,
            config,
            image,
            rootfs_diff: self.rootfs_diff.map(Into::into),
            volumes: self.volume,
            runnable: self.runnable.into(),
            subject: !self.no_subject,
            base,
            page_hashes: self.base.page_hashes,
            resend: false,
            scratch: None,
        };
        let store = self.connection.open(&self.reference).await?;
        let progress = Progress::default();
        let work = async {
            let packed = pack(request, &store, &progress).await?;
            if let Some(key) = &key {
                progress.step("sign");
                sign(&store, &packed.index, key).await?;
            }
            progress.step("tag");
            store.tag(&packed.index, &tag).await?;
            Ok::<_, Failure>(packed)
        };
        let packed = terminal.show(&progress, Box::pin(work)).await?;
        let transferred = progress.snapshot().transferred;
        tell(terminal, &self.reference, &packed, key.is_some(), transferred)
    }
}

/// Finds the source image's manifest for the platform of the dump.
pub(super) async fn source_image(
    image: &Location,
    target: &Location,
    config: &CheckpointConfig,
    connection: &Connection,
) -> Result<SourceImage, Failure> {
    let store = connection.open(image).await?;
    let manifest = platform(&store, store.resolve(image).await?, config).await?;
    let mount_from = match (target, image) {
        (Location::Registry(target), Location::Registry(source))
            if target.registry == source.registry =>
        {
            Some(source.repository.clone())
        }
        _ => None,
    };
    Ok(SourceImage { manifest, blobs: Arc::new(store), mount_from })
}

impl BaseArgs {
    /// Opens the base and makes sure that it can be trusted.
    async fn open(
        &self,
        connection: &Connection,
        own: Option<&SigningKey>,
        facts: &CheckpointConfig,
    ) -> Result<Option<Base>, Failure> {
        let Some(location) = &self.reference else { return Ok(None) };
        // What is wrong with a policy is told even where nobody asks it.
        let namespace = facts.source.namespace.clone();
        let trust = Trust::of(self.keys.clone(), self.policy.clone(), namespace);
        let mut trusted = trust.read().await?;
        let store = connection.open(location).await?;
        let stored = store.resolve(location).await?;
        let is_compared = matches!(store, Store::Layout(_)) && self.policy.is_none();
        if !is_compared && !self.insecure {
            if let Trusted::Keys(keys) = &mut trusted
                && keys.is_empty()
            {
                keys.extend(own.map(|key| key.public().clone()));
                if keys.is_empty() {
                    let text = "a base in a registry must be signed: say by whom with --base-key \
                                or --base-policy, or allow it with --insecure-base";
                    return Err(Failure::usage(text));
                }
            }
            let found = trusted.check(&store, &stored, location).await?;
            if !found.is_signed() {
                say(&found.tell());
            }
        }
        let checkpoint = Checkpoint::of(&store, stored, &location.to_string()).await?;
        Ok(Some(Base { store, checkpoint }))
    }
}

impl From<When> for Runnable {
    fn from(when: When) -> Self {
        match when {
            When::Auto => Self::Auto,
            When::Always => Self::Always,
            When::Never => Self::Never,
        }
    }
}

fn tell(
    terminal: &Terminal,
    reference: &Location,
    packed: &Packed,
    signed: bool,
    transferred: u64,
) -> Result<(), Failure> {
    let digest = &packed.index.digest;
    let sizes = &packed.sizes;
    let facts = json!({
        "reference": reference.to_string(),
        "digest": digest,
        "signed": signed,
        "runnable": packed.runnable,
        "sizes": sizes,
        "lineage": packed.lineage,
        "bytesAdded": packed.added_bytes,
        "bytesSent": transferred,
    });
    let added = match (&packed.lineage.base, packed.lineage.generation) {
        (None, _) => String::new(),
        (Some(_), 0) => ", all stored anew".to_owned(),
        (Some(_), number) => {
            format!(", {} of them new in generation {number}", bytes(packed.added_bytes))
        }
    };
    let text = format!(
        "packed {digest}\n       {} of dump, {} of pages{added}, {} sent; {}, {}",
        bytes(sizes.dump_bytes),
        bytes(sizes.page_bytes),
        bytes(transferred),
        if signed { "signed" } else { "not signed" },
        if packed.runnable { "runnable" } else { "not runnable" },
    );
    terminal.print(&facts, &text).map_err(Failure::failed)
}

/// Follows an index to the image for the platform that the facts name, else for this machine's.
async fn platform(
    store: &Store,
    stored: StoredManifest,
    config: &CheckpointConfig,
) -> Result<StoredManifest, Failure> {
    if stored.descriptor.is_manifest() {
        return Ok(stored);
    }
    let here = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let wanted = config.node.as_ref().map_or(here, |node| node.architecture.as_str());
    let outline = Outline::parse(&stored.content, None).map_err(Failure::failed)?;
    let fits = |child: &&Descriptor| {
        child.platform.as_ref().is_some_and(|p| p.os == "linux" && p.architecture == wanted)
    };
    let child = outline.manifests.iter().find(fits).ok_or_else(|| {
        Failure::failed(format!("the source image has no variant for linux/{wanted}"))
    })?;
    Ok(store.manifest(&child.digest).await?)
}

pub(super) async fn facts(path: Option<&Path>) -> Result<CheckpointConfig, Failure> {
    let Some(path) = path.map(Path::to_owned) else { return Ok(CheckpointConfig::default()) };
    aside(move || read_facts(&path)).await.map_err(Failure::failed)?
}

fn read_facts(path: &Path) -> Result<CheckpointConfig, Failure> {
    let mut text = Vec::new();
    let file = fs_err::File::open(path).map_err(Failure::failed)?;
    // Devices and pipes tell no size.
    file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut text).map_err(Failure::failed)?;
    if u64::try_from(text.len()).map_or(true, |length| length > CONFIG_BYTES_MAX) {
        return Err(Failure::failed(format!("{} is too large to be facts", path.display())));
    }
    document::parse(&text).map_err(|error| {
        Failure::failed(format!("failed to read facts from {}: {error}", path.display()))
    })
}

fn volume(text: &str) -> Result<VolumeCapture, String> {
    match text.split_once('=') {
        Some((destination, _)) if !is_plain(destination) => {
            Err(format!("{destination:?} must be an absolute path without \"..\""))
        }
        Some((_, tar)) if !Path::new(tar).is_file() => Err(format!("{tar:?} is no regular file")),
        Some((destination, tar)) => {
            Ok(VolumeCapture { destination: destination.to_owned(), tar: tar.into() })
        }
        None => Err("it must be /path/in/container=file.tar".to_owned()),
    }
}

/// Whether a volume may have this destination.
fn is_plain(destination: &str) -> bool {
    destination.starts_with('/') && destination.split('/').all(|part| part != "..")
}
