//! What a checkpoint says about itself and what is inside, without moving its pages: all but the
//! few KB in which the first process has its arguments.

mod command;

use std::io;

use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::{Descriptor, Digest, Location, annotation, chain, media_type};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::command::Arguments;
pub use self::command::{KnownFrom, Ran};
use crate::artifact::{ArtifactError, Checkpoint};
use crate::checked::collect;
use crate::inside::{Inside, Problem, secret};
use crate::outline::Outline;
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::Store;
use crate::stored::StoredPages;
use crate::unpack::{UnpackError, unpack_for_a_look};
use crate::verify::list_signatures;

/// Largest config of a container image that is read. Real ones have a few KB.
const IMAGE_CONFIG_BYTES_MAX: u64 = 4 << 20;

/// How much is looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// Only the facts and the parts: a few KB are moved, whatever the size of the checkpoint.
    pub facts_only: bool,
    /// Show what looks like a secret, too.
    pub show_secrets: bool,
}

/// Why a checkpoint could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// It could not be opened.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Its images could not be read.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

/// What a checkpoint says about itself. Claims, until a signature is verified.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Inspected {
    /// The checkpoint's digest: its index's.
    pub digest: Digest,
    /// The source image it hangs under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Digest>,
    /// The facts.
    pub config: CheckpointConfig,
    /// The layers of the checkpoint manifest.
    pub layers: Vec<Part>,
    /// The layers of the runnable image; absent when there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runnable: Option<Vec<Part>>,
    /// What the container ran, and how that is known; absent when nothing is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran: Option<Ran>,
    /// How the runnable image starts, from its config; absent when there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub starts: Option<Starts>,
    /// Bytes of all layers of the checkpoint manifest.
    pub checkpoint_bytes: u64,
    /// Bytes of all layers of the runnable image.
    pub runnable_bytes: u64,
    /// Manifests that look like signatures. They have **not** been verified.
    pub unverified_signatures: Vec<Digest>,
    /// What CRIU's images say; absent when only the facts were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
}

/// How a container image starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Starts {
    /// Program and arguments; what looks like a secret is masked.
    pub command: Vec<String>,
    /// The environment.
    pub environment: Vec<Variable>,
    /// The directory it starts in.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub working_directory: String,
    /// The user it starts as.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
}

/// A variable of an environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value, or `********`.
    pub value: String,
    /// Whether the value is masked because it looks like a secret.
    pub masked: bool,
}

/// One blob.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Part {
    /// Its file name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// Its media type.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Reads what the checkpoint at `location` says about itself, and what is inside.
pub async fn inspect(
    store: &Store,
    location: &Location,
    look: Look,
) -> Result<Inspected, InspectError> {
    let checkpoint = Checkpoint::open(store, location).await?;
    let digest = checkpoint.stored.descriptor.digest.clone();
    let (runnable, starts) = match &checkpoint.runnable {
        None => (None, None),
        Some(runnable) => {
            let outline = runnable_image(store, runnable).await?;
            // The first is the config.
            let layers = parts(outline.blobs.get(1..).unwrap_or_default());
            (Some(layers), starts(store, &outline, look).await?)
        }
    };
    let (inside, arguments) = if look.facts_only {
        (None, Vec::new())
    } else {
        let (mut inside, arguments) = look_inside(store, &checkpoint).await?;
        let arguments = fetch(arguments, store, &checkpoint, &mut inside).await;
        (Some(inside), arguments)
    };
    let layers = parts(&checkpoint.manifest.layers);
    Ok(Inspected {
        subject: checkpoint.index.subject.map(|subject| subject.digest),
        config: checkpoint.config,
        checkpoint_bytes: sum(&layers),
        runnable_bytes: runnable.as_deref().map_or(0, sum),
        layers,
        runnable,
        ran: command::ran(arguments, inside.as_ref(), starts.as_ref(), look),
        starts,
        unverified_signatures: list_signatures(store, &digest)
            .await
            .map_err(ArtifactError::from)?,
        inside,
        digest,
    })
}

async fn runnable_image(store: &Store, runnable: &Descriptor) -> Result<Outline, ArtifactError> {
    let stored = store.manifest_of(runnable).await?;
    Outline::parse(&stored.content, Some(&runnable.media_type))
        .map_err(|error| ArtifactError::Malformed("runnable image", error))
}

/// Fetches the arguments of the first process. What else there is is shown also without them.
async fn fetch(
    arguments: Option<Arguments>,
    store: &Store,
    checkpoint: &Checkpoint,
    inside: &mut Inside,
) -> Vec<String> {
    let Some(arguments) = arguments else { return Vec::new() };
    arguments.fetch(store, checkpoint).await.unwrap_or_else(|error| {
        let message = format!("the arguments of the first process: {}", chain(&error));
        inside.problems.push(Problem { image: "pages".to_owned(), message });
        Vec::new()
    })
}

/// Fetches the images, without pages, and decodes them.
async fn look_inside(
    store: &Store,
    checkpoint: &Checkpoint,
) -> Result<(Inside, Option<Arguments>), InspectError> {
    let failed = |what| move |error| InspectError::Io(what, error);
    let made = || {
        let scratch = tempfile::tempdir()?;
        let images = scratch.path().join("images");
        fs_err::create_dir(&images)?;
        Ok((scratch, images))
    };
    let (scratch, images) = blocking(made).await.map_err(failed("make a directory"))?;
    let index = unpack_for_a_look(store, checkpoint, &images, &Progress::default()).await?;
    let read = move || {
        let stored = StoredPages::scan(&images, index).map_err(io::Error::other)?;
        let inside = Inside::read(&images, &stored)?;
        let arguments = Arguments::find(&inside, &stored).map_err(io::Error::other)?;
        scratch.close()?;
        Ok((inside, arguments))
    };
    blocking(read).await.map_err(failed("read the images"))
}

/// Reads how an image starts; `None` when its config is of another kind.
async fn starts(
    store: &Store,
    outline: &Outline,
    look: Look,
) -> Result<Option<Starts>, ArtifactError> {
    #[derive(Deserialize)]
    struct Document {
        config: Option<Config>,
    }
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Config {
        entrypoint: Option<Vec<String>>,
        cmd: Option<Vec<String>>,
        env: Option<Vec<String>>,
        working_dir: Option<String>,
        user: Option<String>,
    }
    let config = outline.blobs.first().filter(|blob| blob.media_type == media_type::OCI_CONFIG);
    let Some(config) = config else { return Ok(None) };
    let content = collect(store.blob(config).await?, config, IMAGE_CONFIG_BYTES_MAX).await?;
    let document: Document = serde_json::from_slice(&content)
        .map_err(|error| ArtifactError::Malformed("runnable image's config", error))?;
    let config = document.config.unwrap_or_default();
    let mut command = config.entrypoint.unwrap_or_default();
    command.extend(config.cmd.unwrap_or_default());
    let environment = config.env.unwrap_or_default();
    Ok(Some(Starts {
        command: if look.show_secrets { command } else { secret::arguments(&command) },
        environment: environment.iter().map(|text| variable(text, look)).collect(),
        working_directory: config.working_dir.unwrap_or_default(),
        user: config.user.unwrap_or_default(),
    }))
}

fn variable(text: &str, look: Look) -> Variable {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    let shown = if look.show_secrets { value } else { secret::value(name, value) };
    Variable { name: name.to_owned(), value: shown.to_owned(), masked: shown != value }
}

fn parts(descriptors: &[Descriptor]) -> Vec<Part> {
    let part = |descriptor: &Descriptor| Part {
        title: descriptor.annotations.get(annotation::TITLE).cloned(),
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.clone(),
        bytes: descriptor.size,
    };
    descriptors.iter().map(part).collect()
}

fn sum(parts: &[Part]) -> u64 {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes))
}
