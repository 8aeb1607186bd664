//! Conversion to and from the checkpoints of others.
//!
//! [`containerd`] is containerd's own index of a checkpoint, which `ctr container restore` takes;
//! [`cri`] is the archive of kubelet's checkpoint API, and Podman's export.
//! What comes from others is mistrusted: it is read by [`foreign`], which takes regular files with
//! plain names and nothing else, and what becomes of it is packed as any dump is. What the other
//! format does not say is recorded as not known.

pub mod containerd;
pub mod cri;
mod dump;
pub mod foreign;
mod image;
mod output;
mod source;
mod spec;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use kybernate_spec::checkpoint::{DeviceStorage, Needs};

pub use self::foreign::ForeignError;
pub use self::source::{Archive, ForeignSource};
use crate::artifact::{ArtifactError, Checkpoint};
use crate::leftovers::Scratch;
use crate::pack::PackRequest;
use crate::store::StoreError;
use crate::unpack::UnpackError;
use crate::wanted::{self, Wanted};

/// A foreign checkpoint that was read, and can be packed.
#[derive(Debug)]
pub struct Imported {
    /// What to pack.
    pub request: PackRequest,
    /// What it is packed from. To be kept until that is done.
    pub files: Files,
}

/// Temporary files. They go when this is dropped.
#[derive(Debug)]
pub struct Files(Scratch);

impl Files {
    fn begin(directory: Option<&Path>) -> Result<Self, ImportError> {
        let system = std::env::temp_dir();
        let scratch = Scratch::begin(directory.unwrap_or(&system), "kybernate-import-");
        let error = |error| ImportError::Io("make a directory for temporary files", error);
        Ok(Self(scratch.map_err(error)?))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
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

/// Finds out, before anything is written, what a format has no place for. `mounts` says for each
/// mount from outside what is mounted there: destination, source.
pub(crate) fn exportable(
    format: &'static str,
    checkpoint: &Checkpoint,
    mounts: &BTreeMap<String, String>,
    volumes: Volumes,
) -> Result<(), ExportError> {
    let impossible = |reason: String| Err(ExportError::Impossible { format, reason });
    if checkpoint.config.device.storage == DeviceStorage::Device {
        return impossible(
            "it has no place for device memory, and whoever restores it asks no driver".to_owned(),
        );
    }
    let needs = &checkpoint.config.needs;
    if let Some(volume) = checkpoint.volumes.first()
        && volumes == Volumes::Refuse
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
        .find(|mount| mount.external && !mounts.contains_key(&mount.destination));
    if let Some(mount) = missing {
        let place = &mount.destination;
        return impossible(format!(
            "its specification says what to mount on {place:?}, and a checkpoint does not: say it"
        ));
    }
    let given = mounts.keys().find(|place| {
        !needs.mounts.iter().any(|mount| mount.external && mount.destination == **place)
    });
    match given {
        Some(place) => impossible(format!("nothing from outside was mounted on {place:?}")),
        None => Ok(()),
    }
}

/// Runs `work` where blocking is allowed. A store's error that ended a stream is told as itself.
async fn local<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce(&Wanted) -> io::Result<T> + Send + 'static,
) -> Result<T, ExportError> {
    wanted::blocking(work).await.map_err(|error| match error.downcast() {
        Ok(error) => ExportError::Store(error),
        Err(error) => ExportError::Io(what, error),
    })
}

/// Takes what is said of the surroundings, and for what is not what was found.
fn fill(said: Needs, found: Needs) -> Needs {
    let or = |said: Vec<String>, found| if said.is_empty() { found } else { said };
    Needs {
        mounts: if said.mounts.is_empty() { found.mounts } else { said.mounts },
        devices: or(said.devices, found.devices),
        host_namespaces: or(said.host_namespaces, found.host_namespaces),
        identity: said.identity,
    }
}

/// Why a checkpoint was not exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Something could not be read from where it is stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The checkpoint breaks a rule of the format.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The checkpoint breaks a rule of the format.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// The other format has no place for something that is needed.
    #[error("{format} cannot hold this checkpoint: {reason}")]
    Impossible {
        /// Whose format.
        format: &'static str,
        /// What it cannot hold, and what can be done.
        reason: String,
    },
    /// An image's manifest or config cannot be read.
    #[error("failed to read the container image: {0}")]
    Image(String),
    /// A local file could not be written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

/// Why a foreign checkpoint was not imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Something could not be read from where it is stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is not what it should be, or something hostile.
    #[error(transparent)]
    Foreign(#[from] ForeignError),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

impl ImportError {
    /// Whether the content is to blame, and not the way to it: then it is refused.
    pub const fn is_integrity(&self) -> bool {
        match self {
            Self::Foreign(_) => true,
            Self::Store(error) => error.kind.is_about_content(),
            Self::Io(..) => false,
        }
    }
}
