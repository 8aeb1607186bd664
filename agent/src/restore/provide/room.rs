//! Room for what is to be written into containerd's content store, before a byte of it comes.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::store::Store;
use kybernate_spec::{Digest, Manifest};

use super::super::image::ImageError;
use super::ProvideError;
use crate::config::Config;
use crate::runtime::Namespace;
use crate::stage::{self, StageError};

/// What the tar adds to the dump's files, the specification, the index and what containerd notes.
const MARGIN_BYTES: u64 = 16 << 20;

/// What is to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load<'a> {
    pub(super) store: &'a Store,
    pub(super) checkpoint: &'a Checkpoint,
    /// The container image.
    pub(super) image: &'a Digest,
    /// Bytes of the layer with what the container had written, as containerd gets it.
    pub(super) layer_bytes: u64,
    /// Bytes that are put on this node's disk or memory first.
    pub(super) staged_bytes: u64,
}

/// Makes sure that the content store has room for all of it. Where containerd does not say where that
/// is, nothing is known, and a full disk is found later.
pub(super) async fn look(
    config: &Config,
    namespace: &Namespace,
    load: Load<'_>,
) -> Result<(), ProvideError> {
    let Some(directory) = namespace.content_directory().await? else {
        tracing::warn!("containerd does not say where its content store is");
        return Ok(());
    };
    let mut needed = load.dump_bytes();
    let stored = load.store.manifest(load.image).await.map_err(ImageError::from)?;
    let manifest: Manifest = serde_json::from_slice(&stored.content)
        .map_err(|error| ImageError::Malformed("manifest", error))?;
    for blob in manifest.layers.iter().chain([&manifest.config]) {
        if !namespace.has_content(&blob.digest).await? {
            needed = needed.saturating_add(blob.size);
        }
    }
    let (stage, bytes) = (config.disk_stage(), load.staged_bytes);
    let looked = tokio::task::spawn_blocking(move || fits(&directory, needed, (&stage, bytes)));
    Ok(looked.await.map_err(|error| StageError::Io(io::Error::other(error)))??)
}

impl Load<'_> {
    /// Returns about how many bytes the dump's tar and the layer are: in a tar, zero pages take as
    /// much as others.
    fn dump_bytes(&self) -> u64 {
        let sizes = &self.checkpoint.config.sizes;
        let dump = sizes.dump_bytes.max(self.checkpoint.images.size);
        dump.saturating_add(self.layer_bytes).saturating_add(MARGIN_BYTES)
    }
}

/// Compares what is needed with what is left. What is staged on the same disk at the same time counts.
fn fits(directory: &Path, needed: u64, beside: (&Path, u64)) -> Result<(), StageError> {
    let (place, bytes) = beside;
    let same = match (fs::metadata(directory), fs::metadata(nearest(place))) {
        (Ok(one), Ok(other)) => one.dev() == other.dev(),
        _ => false,
    };
    let needed = if same { needed.saturating_add(bytes) } else { needed };
    let available = stage::space(directory)?;
    if available < needed {
        let directory = directory.to_owned();
        return Err(StageError::NoSpace { directory, available, promised: 0, needed });
    }
    Ok(())
}

/// Returns what there is of a path.
fn nearest(path: &Path) -> PathBuf {
    path.ancestors().find(|above| above.exists()).unwrap_or(path).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_staged_on_the_same_disk_counts_too() {
        let top = tempfile::tempdir().unwrap();
        let stages = top.path().join("not/yet/there");
        let left = stage::space(top.path()).unwrap();
        let fits = |needed, bytes| fits(top.path(), needed, (&stages, bytes));
        fits(left / 4, left / 4).unwrap();
        for (needed, bytes) in [(left / 4 * 3, left / 2), (left.saturating_mul(2), 0)] {
            let error = fits(needed, bytes).unwrap_err();
            assert!(matches!(error, StageError::NoSpace { .. }), "{error}");
            assert!(error.to_string().contains("are needed"), "{error}");
        }
        assert!(super::fits(top.path(), left / 4 * 3, (Path::new("/proc/x"), left)).is_ok());
    }
}
