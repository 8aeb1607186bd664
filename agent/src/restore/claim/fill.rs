//! Captured mounts of a pod's container: their content goes into what the new pod has there.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::artifact::{Checkpoint, Volume};
use tokio_util::sync::CancellationToken;

use super::super::live::Live;
use super::super::rules::Refusal;
use super::super::volume::{self, SHARED_MEMORY, Tars};
use super::ClaimError;
use crate::container::is_empty_dir;
use crate::operations::RefusedBy;

/// A captured mount, its number in the checkpoint, and the directory of the node that it goes into.
pub(super) type Target<'a> = ((usize, &'a Volume), PathBuf);

/// Finds what is to be filled: the pod's shared memory and its emptyDirs, which must be empty. Where
/// the new pod has another volume, that one is what it wants.
pub(super) async fn targets<'a>(
    checkpoint: &'a Checkpoint,
    live: &Live,
) -> Result<Vec<Target<'a>>, ClaimError> {
    volume::check(checkpoint)?;
    let mut targets = Vec::new();
    for (number, volume) in checkpoint.volumes.iter().enumerate() {
        let place = &*volume.destination;
        let target = target(live, place).map_err(|reason| refuse(&reason))?;
        let Some(target) = target else {
            tracing::info!(place, "the new pod has a volume of its own there");
            continue;
        };
        let looked = target.clone();
        let count = tokio::task::spawn_blocking(move || Ok(fs::read_dir(looked)?.count())).await;
        if count.map_err(io::Error::other).and_then(|count| count).map_err(ClaimError::Place)? > 0 {
            return Err(refuse(&format!("the pod's {place} is in use already")).into());
        }
        targets.push(((number, volume), target));
    }
    Ok(targets)
}

/// Returns the directories of the node.
pub(super) fn directories(targets: &[Target<'_>]) -> Vec<PathBuf> {
    targets.iter().map(|(_, directory)| directory.clone()).collect()
}

/// Fills them, and returns what was filled; nothing of it stays after an error, as when it is not
/// `wanted` any more.
pub(super) async fn fill(
    tars: Tars<'_>,
    targets: Vec<Target<'_>>,
    wanted: &CancellationToken,
) -> Result<Vec<PathBuf>, ClaimError> {
    let mut filled = Vec::new();
    for (volume, target) in targets {
        filled.push(target.clone());
        if let Err(error) = volume::unpack_one(tars, volume, &target, wanted).await {
            empty_again(filled).await;
            return Err(error.into());
        }
    }
    Ok(filled)
}

/// Returns the directory of the node that is to be filled, if any, or why there is none.
fn target(live: &Live, place: &str) -> Result<Option<PathBuf>, String> {
    match live.bound(place) {
        Some(bound) if place == SHARED_MEMORY || is_empty_dir(&bound) => Ok(Some(bound)),
        Some(_) => Ok(None),
        None if place == SHARED_MEMORY => {
            Err("its /dev/shm was its pod's, and the new container has its own".to_owned())
        }
        None => {
            Err(format!("the new container has nothing mounted on {place}: give it an emptyDir"))
        }
    }
}

fn refuse(reason: &str) -> Refusal {
    Refusal::one(RefusedBy::Policy, reason)
}

/// Takes away what directories were filled with: another attempt wants them empty.
pub(super) async fn empty_again(filled: Vec<PathBuf>) {
    let empty_all = move || filled.iter().try_for_each(|directory| empty(directory));
    let emptied = tokio::task::spawn_blocking(empty_all).await;
    if let Err(error) = emptied.map_err(io::Error::other).and_then(|emptied| emptied) {
        tracing::warn!(%error, "failed to empty what the pod's container was given");
    }
}

fn empty(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let removed = if fs::symlink_metadata(&path)?.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removed?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bind(destination: &str, source: &str) -> serde_json::Value {
        json!({ "destination": destination, "type": "bind", "source": source })
    }

    #[test]
    fn what_the_new_pod_has_there_decides() {
        let empty_dir = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/scratch";
        let mounts = [
            bind("/dev/shm", "/run/sandbox/shm"),
            bind("/scratch", empty_dir),
            bind("/claim", "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount"),
        ];
        let live = Live::parse(json!({ "mounts": mounts }).to_string().as_bytes()).unwrap();
        assert_eq!(target(&live, "/dev/shm"), Ok(Some("/run/sandbox/shm".into())));
        assert_eq!(target(&live, "/scratch"), Ok(Some(empty_dir.into())));
        assert_eq!(target(&live, "/claim"), Ok(None));
        assert!(target(&live, "/other").unwrap_err().contains("on /other"));
        let bare = Live::parse(b"{}").unwrap();
        assert!(target(&bare, "/dev/shm").unwrap_err().contains("has its own"));
    }
}
