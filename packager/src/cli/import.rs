//! `kyb import`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kybernate_packager::interchange::containerd::{self, ImportRequest};
use kybernate_packager::interchange::{Archive, ForeignSource, ImportError, Imported, cri};
use kybernate_packager::pack::{PackError, SourceImage, pack};
use kybernate_packager::progress::Progress;
use kybernate_packager::sign::sign;
use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::{Location, ReferenceError, RepositoryName, chain, without_credentials};
use serde_json::json;

use super::export::Format;
use super::failure::Rule;
use super::pack::{facts, source_image};
use super::{Connection, Failure, keys, tag_for};
use crate::terminal::{Terminal, bytes};

/// Turn a checkpoint that another tool made into one of ours.
///
/// What the other format does not say is recorded as not known: a restore wants it to be allowed
/// (`kyb restore --allow-unknown-facts`), unless it is said here. Nobody has signed what comes in;
/// with --sign-key it is you who vouches for it.
///
/// containerd: what `ctr container checkpoint --task --rw --image` made, in a registry after
/// `ctr image push`, in an image layout, or in a tar of one.
///
/// cri: the archive that kubelet's checkpoint API leaves with CRI-O or containerd. podman: the file
/// of `podman container checkpoint --export`; for one taken with --with-previous, name that of its
/// pre-checkpoint with --previous. Neither holds the container image: name it with
/// --image, or the checkpoint is not runnable.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb import registry.example.com/team/ctr-job:v1 registry.example.com/team/job:v1 \\\n    \
    --format containerd --namespace default --sign-key team.key")]
pub(super) struct Import {
    /// What to import: a file, or a reference.
    #[arg(value_name = "FILE")]
    source: String,
    /// Where to.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Whose format.
    #[arg(long)]
    format: Format,
    /// The file of the pre-checkpoint that it was taken upon (`podman container checkpoint
    /// --pre-checkpoint`, then `--with-previous`).
    #[arg(long, value_name = "FILE")]
    previous: Option<PathBuf>,
    /// Which checkpoint of a file that holds several.
    #[arg(long, value_name = "NAME")]
    entry: Option<String>,
    /// The namespace it was taken in, which trust policies ask for: the pod's, or containerd's.
    #[arg(long)]
    namespace: Option<String>,
    /// The name of the container it was taken of.
    #[arg(long)]
    container: Option<String>,
    /// What else is known, as JSON: the config of a checkpoint, sizes left out.
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
    /// The container image it was started from, when it does not come with it.
    #[arg(long, value_name = "REF")]
    image: Option<Location>,
    /// A directory for temporary files: as much as the checkpoint has is written there.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Sign it with this private key. Its password comes from `COSIGN_PASSWORD` or is asked for.
    #[arg(long, value_name = "FILE")]
    sign_key: Option<PathBuf>,
    #[command(flatten)]
    connection: Connection,
}

impl Import {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let tag = tag_for(&self.reference)?;
        let key = match &self.sign_key {
            Some(path) => Some(keys::open(path).await?),
            None => None,
        };
        let config = self.config().await?;
        let image = match &self.image {
            Some(image) => {
                Some(source_image(image, &self.reference, &config, &self.connection).await?)
            }
            None => None,
        };
        let store = self.connection.open(&self.reference).await?;
        let progress = Progress::default();
        let work = async {
            let imported = self.import(config, image, &progress).await?;
            let packed = pack(imported.request, &store, &progress).await.map_err(of_foreign)?;
            drop(imported.files);
            if let Some(key) = &key {
                progress.step("sign");
                sign(&store, &packed.index, key).await?;
            }
            progress.step("tag");
            store.tag(&packed.index, &tag).await?;
            Ok::<_, Failure>(packed)
        };
        let packed = terminal.show(&progress, Box::pin(work)).await?;
        let digest = &packed.index.digest;
        let facts = json!({
            "reference": self.reference.to_string(),
            "digest": digest,
            "signed": key.is_some(),
            "runnable": packed.runnable,
            "sizes": packed.sizes,
        });
        let text = format!(
            "imported {digest}\n         {} of dump, {} of pages; {}, {}",
            bytes(packed.sizes.dump_bytes),
            bytes(packed.sizes.page_bytes),
            if key.is_some() { "signed" } else { "not signed" },
            if packed.runnable { "runnable" } else { "not runnable" },
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }

    /// Returns what is known before anything is read.
    async fn config(&self) -> Result<CheckpointConfig, Failure> {
        let mut config = facts(self.facts.as_deref()).await?;
        let source = &mut config.source;
        source.namespace = self.namespace.clone().or(source.namespace.take());
        source.container = self.container.clone().or(source.container.take());
        Ok(config)
    }

    async fn import(
        &self,
        facts: CheckpointConfig,
        image: Option<SourceImage>,
        progress: &Progress,
    ) -> Result<Imported, Failure> {
        if self.format == Format::Containerd {
            if self.previous.is_some() {
                return Err(Failure::usage("--previous is for --format podman"));
            }
            let request = self.request(facts, image).await?;
            let imported = containerd::import(request, progress).await;
            return imported.map_err(|error| self.failure(error));
        }
        let archive = PathBuf::from(&self.source);
        let (previous, scratch) = (self.previous.clone(), self.scratch.clone());
        let request = cri::ImportRequest { archive, previous, facts, image, scratch };
        cri::import(request, progress).await.map_err(|error| self.failure(error))
    }

    /// Names what could not be imported.
    fn failure(&self, error: ImportError) -> Failure {
        if let ImportError::Store(error) = error {
            return error.into();
        }
        let is_integrity = error.is_integrity();
        let name = without_credentials(&self.source).into_owned();
        let named = NotImported { name, source: error };
        if is_integrity {
            Failure::Refused(Rule::Integrity, named.into())
        } else {
            Failure::failed(named)
        }
    }

    async fn request(
        &self,
        facts: CheckpointConfig,
        image: Option<SourceImage>,
    ) -> Result<ImportRequest, Failure> {
        let path = Path::new(&self.source);
        let (source, location) = if path.is_file() {
            let path = path.to_owned();
            let opened = tokio::task::spawn_blocking(move || Archive::open(&path)).await;
            let archive = opened.map_err(Failure::failed)?;
            let archive = archive.map_err(|error| self.failure(error.into()))?;
            (ForeignSource::Archive(Arc::new(archive)), None)
        } else {
            let location: Location = self.source.parse().map_err(|error: ReferenceError| {
                let (source, why) = (without_credentials(&self.source), chain(&error));
                Failure::usage(format!("{source:?} is no file, and no reference either: {why}"))
            })?;
            let store = self.connection.open(&location).await?;
            (ForeignSource::Store(store), Some(location))
        };
        Ok(ImportRequest {
            mount_from: location.as_ref().and_then(|from| mount_from(from, &self.reference)),
            source,
            location,
            name: self.entry.clone(),
            facts,
            image,
            scratch: self.scratch.clone(),
        })
    }
}

/// What was to be imported, and could not be.
#[derive(Debug, thiserror::Error)]
#[error("failed to import {name:?}")]
struct NotImported {
    name: String,
    source: ImportError,
}

/// Returns the repository that blobs can be linked from.
fn mount_from(from: &Location, to: &Location) -> Option<RepositoryName> {
    match (from, to) {
        (Location::Registry(from), Location::Registry(to)) if from.registry == to.registry => {
            Some(from.repository.clone())
        }
        _ => None,
    }
}

/// What is wrong with a dump is wrong with what was imported.
fn of_foreign(error: PackError) -> Failure {
    match error {
        error @ (PackError::Dump(_) | PackError::Tar { .. } | PackError::Image(_)) => {
            Failure::Refused(Rule::Integrity, error.into())
        }
        error => error.into(),
    }
}
