//! Captured mounts of a pod's container: their content goes into what the new pod has there.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use fs_err as fs;
use kybernate_packager::artifact::{Checkpoint, Volume};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::super::live::Live;
use super::super::rules::Refusal;
use super::super::volume::{self, Names, SHARED_MEMORY, Tars};
use super::{Claim, ClaimError, Driven, uses};
use crate::container::is_empty_dir;
use crate::operations::RefusedBy;

/// A captured mount, its number in the checkpoint, and the directory of the node that it goes into.
pub(super) type Target<'a> = ((usize, &'a Volume), PathBuf);

/// A directory that was filled, and what has to go to make it what it was.
#[derive(Debug)]
pub(super) struct Filled {
    directory: PathBuf,
    /// What was put there. All else is somebody else's: the pod's other containers have it, too.
    names: Names,
    /// Its owner and permissions before.
    had: Had,
}

/// Owner and permissions of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Had {
    user: u32,
    group: u32,
    mode: u32,
}

/// What is to be filled, and what has to be emptied before.
#[derive(Debug, Default)]
pub(super) struct Targets<'a> {
    pub(super) all: Vec<Target<'a>>,
    /// The directories among them into which something is put.
    pub(super) given: Vec<PathBuf>,
    /// What the same container, in the same pod, has there, with the names of it.
    pub(super) used: Vec<(PathBuf, Vec<OsString>)>,
}

/// Finds what is to be filled: the pod's shared memory and its emptyDirs, which must be empty, unless it
/// is the container itself that had them. Where the new pod has another volume, that one is what it wants.
pub(super) async fn targets<'a>(
    driven: Driven<'_>,
    checkpoint: &'a Checkpoint,
    tars: Tars<'_>,
) -> Result<Targets<'a>, ClaimError> {
    let Driven { app, claim: Claim { live, namespace, container, .. }, pod, .. } = driven;
    volume::check(checkpoint)?;
    let mut targets = Targets::default();
    for (number, volume) in checkpoint.volumes.iter().enumerate() {
        let place = &*volume.destination;
        let target = target(live, place).map_err(|reason| refuse(&reason))?;
        let Some(target) = target else {
            tracing::info!(place, "the new pod has a volume of its own there");
            continue;
        };
        let is_bare = volume::is_bare(tars, number).await;
        if target == Path::new(SHARED_MEMORY) {
            if is_bare {
                continue;
            }
            return Err(refuse("the pod has its node's /dev/shm (hostIPC)").into());
        }
        // Before it is looked whose it is: what comes later is somebody else's.
        let names = names_in(&target).await.map_err(ClaimError::Place)?;
        if !names.is_empty() {
            if is_bare {
                // Nothing is missing there.
                continue;
            }
            let directory = [target.clone()];
            let created = Some(&**container);
            if !pod.was_restored().await
                || uses::are_used(app, namespace, &directory, created).await?
            {
                return Err(refuse(&format!("the pod's {place} is in use already")).into());
            }
            targets.used.push((target.clone(), names));
        }
        if !is_bare {
            targets.given.push(target.clone());
        }
        targets.all.push(((number, volume), target));
    }
    Ok(targets)
}

/// Fills them, and returns what was filled; nothing of it stays after an error but [`ClaimError::Left`], as
/// when it is not `wanted` any more.
pub(super) async fn fill(
    tars: Tars<'_>,
    targets: Vec<Target<'_>>,
    wanted: &CancellationToken,
) -> Result<Vec<Filled>, ClaimError> {
    let mut filled = Vec::new();
    for (volume, directory) in targets {
        let names = Names::default();
        let looked = directory.clone();
        let had = tokio::task::spawn_blocking(move || Had::of(&looked)).await;
        let had = match had.map_err(io::Error::other).and_then(|had| had) {
            Ok(had) => had,
            Err(error) => {
                return Err(undone(filled, ClaimError::Place(error)).await);
            }
        };
        filled.push(Filled { directory: directory.clone(), names: Arc::clone(&names), had });
        if let Err(error) = volume::unpack_one(tars, volume, (&directory, names), wanted).await {
            return Err(undone(filled, error.into()).await);
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

impl Had {
    pub(super) fn of(directory: &Path) -> io::Result<Self> {
        let had = fs::metadata(directory)?;
        Ok(Self { user: had.uid(), group: had.gid(), mode: had.mode() & 0o7777 })
    }

    /// Gives a directory these again.
    pub(super) fn back(self, directory: &Path) -> io::Result<()> {
        let Self { user, group, mode } = self;
        let owned = std::os::unix::fs::chown(directory, Some(user), Some(group));
        owned.and(fs::set_permissions(directory, Permissions::from_mode(mode)))
    }
}

impl Filled {
    /// Makes it what it was, as far as it can be.
    fn empty(&self) -> io::Result<()> {
        let names = std::mem::take(&mut *self.names.lock().unwrap_or_else(PoisonError::into_inner));
        remove_all(&self.directory, names).and(self.had.back(&self.directory))
    }
}

/// Takes away what directories were filled with, after an error, and returns what is told.
pub(super) async fn undone(filled: Vec<Filled>, error: ClaimError) -> ClaimError {
    if empty_again(filled).await { error } else { ClaimError::Left(Box::new(error)) }
}

/// Takes away what directories were filled with: another attempt wants them empty, and who starts afresh
/// wants them as they were. Returns whether they are.
pub(super) async fn empty_again(filled: Vec<Filled>) -> bool {
    let empty = move || filled.iter().map(Filled::empty).fold(Ok(()), io::Result::and);
    in_background(empty).await
}

/// Takes away what lies in directories that nobody has, by its names. Returns whether it is gone.
pub(super) async fn empty_all(used: Vec<(PathBuf, Vec<OsString>)>) -> bool {
    let remove = |(directory, names): (PathBuf, Vec<_>)| remove_all(&directory, names);
    in_background(move || used.into_iter().map(remove).fold(Ok(()), io::Result::and)).await
}

/// Returns the names of what lies in a directory; nothing lies in one that is not there.
pub(super) async fn names_in(directory: &Path) -> io::Result<Vec<OsString>> {
    let directory = directory.to_owned();
    let names = tokio::task::spawn_blocking(move || match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.file_name())).collect(),
    });
    names.await.map_err(io::Error::other)?
}

/// Removes what has these names in a directory, durably.
fn remove_all(directory: &Path, names: impl IntoIterator<Item = OsString>) -> io::Result<()> {
    let removed =
        names.into_iter().map(|name| remove(&directory.join(name))).fold(Ok(()), io::Result::and);
    removed.and_then(|()| fs::File::open(directory)?.sync_all())
}

async fn in_background(empty: impl FnOnce() -> io::Result<()> + Send + 'static) -> bool {
    let emptied = tokio::task::spawn_blocking(empty).await;
    let emptied = emptied.map_err(io::Error::other).and_then(|emptied| emptied);
    if let Err(error) = &emptied {
        tracing::warn!(%error, "failed to empty what the pod's container was given");
    }
    emptied.is_ok()
}

/// How often a directory is removed into which somebody else writes meanwhile.
const TRIES: u32 = 5;

/// Removes something, and all below it. What is not there, or not any more, is removed.
fn remove(path: &Path) -> io::Result<()> {
    let mut removed = Ok(());
    for _ in 0..TRIES {
        removed = match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(error) => Err(error),
        };
        match &removed {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            _ => break,
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use kybernate_packager::agent_api::NEVER_FRESH;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn what_others_have_put_there_stays() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("shared");
        fs::create_dir_all(directory.join("ours/deep")).unwrap();
        fs::write(directory.join("theirs"), "").unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o750)).unwrap();
        let had = Had { mode: 0o1777, ..Had::of(&directory).unwrap() };
        let names = Names::default();
        names.lock().unwrap().extend(["ours", "never-made"].map(Into::into));
        let emptied = empty_again(vec![Filled { directory: directory.clone(), names, had }]).await;
        assert!(emptied);
        let left: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|one| one.unwrap().file_name()).collect();
        assert_eq!(left, ["theirs"]);
        assert_eq!(Had::of(&directory).unwrap().mode, 0o1777);
    }

    #[tokio::test]
    async fn nothing_starts_afresh_beside_what_is_left() {
        let top = tempfile::tempdir().unwrap();
        let had = Had::of(top.path()).unwrap();
        let filled = |directory: &str| {
            let directory = top.path().join(directory);
            vec![Filled { directory, names: Names::default(), had }]
        };
        let failed = || ClaimError::Place(io::Error::other("full"));
        let told = undone(filled(""), failed()).await;
        assert!(!told.forbids_fresh() && matches!(told, ClaimError::Place(_)), "{told}");
        // It cannot be made what it was.
        let told = undone(filled("gone"), failed()).await;
        assert!(told.forbids_fresh(), "{told}");
        let status = tonic::Status::from(told);
        assert!(status.metadata().contains_key(NEVER_FRESH), "{status}");
        assert!(status.message().ends_with(": full"), "{status}");
    }

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
