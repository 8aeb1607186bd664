//! Conversion to and from the checkpoints of others.
//!
//! [`containerd`] is containerd's own index of a checkpoint, which `ctr container restore` takes.
//! What comes from others is mistrusted: it is read by [`foreign`], which takes regular files with
//! plain names and nothing else, and what becomes of it is packed as any dump is. What the other
//! format does not say is recorded as not known.

pub mod containerd;
mod dump;
pub mod foreign;
mod output;
mod source;
mod spec;

use std::io;
use std::path::Path;

use kybernate_spec::checkpoint::Needs;

pub use self::foreign::ForeignError;
pub use self::source::{Archive, ForeignSource};
use crate::artifact::ArtifactError;
use crate::leftovers::Scratch;
use crate::pack::PackRequest;
use crate::store::StoreError;
use crate::unpack::UnpackError;

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
