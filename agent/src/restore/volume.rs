//! Captured mounts become mounts again: what of the node lay in the source.
//!
//! `/dev/shm` lives in memory beside the container, the others on disk, in directories of the agent's
//! that only root can look into. They go when the container has gone.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use futures::{StreamExt as _, TryStreamExt as _};
use kybernate_packager::artifact::{Checkpoint, Volume};
use kybernate_packager::store::{Store, StoreError, StoreErrorKind};
use tokio_util::io::{StreamReader, SyncIoBridge};
use tokio_util::sync::CancellationToken;

use super::AllowedMount;
use crate::app::App;
use crate::stage;

/// The mount that every container has, and that is always captured.
pub(super) const SHARED_MEMORY: &str = "/dev/shm";

/// Artifacts with more captured mounts are not restored.
const VOLUMES_MAX: usize = 64;

/// Where runtimes mount what is the kernel's: nothing is put there but shared memory.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Why a captured mount is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the captured mount on {0:?} is at a place where none is restored")]
    Place(String),
    #[error("it has more than {VOLUMES_MAX} captured mounts")]
    TooMany,
    #[error("failed to unpack the captured mount on {0:?}")]
    Unpack(String, #[source] io::Error),
}

impl VolumeError {
    /// Whether the content is to blame, and not the way to it.
    pub(super) const fn is_integrity(&self) -> bool {
        match self {
            Self::Store(error) => matches!(error.kind, StoreErrorKind::Mismatch(_)),
            Self::Place(_) | Self::TooMany => true,
            Self::Unpack(..) => false,
        }
    }
}

/// The directories for the volumes of one restored container: what is small and in memory, and the
/// rest.
#[derive(Debug)]
pub(super) struct Directories {
    pub(super) memory: PathBuf,
    pub(super) disk: PathBuf,
}

impl Directories {
    pub(super) fn of(app: &App, namespace: &str, container: &str) -> Self {
        Self {
            memory: directory(app, namespace, container),
            disk: app.config.disk_volumes().join(namespace).join(container),
        }
    }
}

/// Returns the directory in memory of what belongs to one restored container.
pub(super) fn directory(app: &App, namespace: &str, container: &str) -> PathBuf {
    app.config.volumes().join(namespace).join(container)
}

/// Unpacks the captured mounts and returns them as mounts.
pub(super) async fn unpack(
    store: &Store,
    checkpoint: &Checkpoint,
    directories: &Directories,
) -> Result<Vec<AllowedMount>, VolumeError> {
    check(checkpoint)?;
    let mut mounts = Vec::new();
    for (number, volume) in checkpoint.volumes.iter().enumerate() {
        let target = match &*volume.destination {
            SHARED_MEMORY => directories.memory.join("shm"),
            _ => directories.disk.join(number.to_string()),
        };
        unpack_one(store, volume, &target).await?;
        mounts.push(AllowedMount {
            source: target.display().to_string(),
            destination: volume.destination.clone(),
            read_only: false,
        });
    }
    Ok(mounts)
}

/// Makes sure that each captured mount may be where it was.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), VolumeError> {
    if checkpoint.volumes.len() > VOLUMES_MAX {
        return Err(VolumeError::TooMany);
    }
    let places = checkpoint.volumes.iter().map(|volume| &*volume.destination);
    match places.into_iter().find(|place| !is_place(place)) {
        Some(place) => Err(VolumeError::Place(place.to_owned())),
        None => Ok(()),
    }
}

/// Whether a captured mount may be there. How a destination is written is checked by who reads the
/// artifact; here it must be in the shortest way, so that it is what it looks like.
fn is_place(destination: &str) -> bool {
    let path = Path::new(destination);
    let plain: PathBuf = path.components().collect();
    destination == SHARED_MEMORY
        || (plain.as_os_str() == destination
            && path.is_absolute()
            && !path.components().any(|part| part == Component::ParentDir)
            && path.parent().is_some()
            && !KERNEL.iter().any(|top| path.starts_with(top)))
}

/// Unpacks a captured mount into a directory, which is there or not.
pub(super) async fn unpack_one(
    store: &Store,
    volume: &Volume,
    target: &Path,
) -> Result<(), VolumeError> {
    // Nobody fills a directory that is being removed: dropped, this ends what is read.
    let wanted = CancellationToken::new();
    let _ends = wanted.clone().drop_guard();
    let stream = volume.read(store).map_err(io::Error::other);
    let stream = stream.take_until(wanted.clone().cancelled_owned()).boxed();
    let bytes = SyncIoBridge::new(StreamReader::new(stream));
    let target = target.to_owned();
    let unpacked = tokio::task::spawn_blocking(move || extract(bytes, &target, &wanted)).await;
    let unpacked = unpacked.map_err(io::Error::other).and_then(|unpacked| unpacked);
    unpacked.map_err(|error| match error.downcast::<StoreError>() {
        Ok(error) => VolumeError::Store(error),
        Err(error) => VolumeError::Unpack(volume.destination.clone(), error),
    })
}

/// Unpacks files, directories and links; nothing leads out of `target`, and devices are left out.
fn extract(bytes: impl io::Read, target: &Path, wanted: &CancellationToken) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    stage::make(target)?;
    // As containerd makes its own /dev/shm.
    fs::set_permissions(target, std::fs::Permissions::from_mode(0o1777))?;
    let mut archive = tar::Archive::new(bytes);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    for entry in archive.entries()? {
        let mut entry = entry?;
        if wanted.is_cancelled() {
            return Err(io::Error::other("nobody waits for it any more"));
        }
        let kind = entry.header().entry_type();
        if kind.is_dir() && entry.path_bytes().iter().all(|byte| b"./".contains(byte)) {
            top(target, entry.header())?;
            continue;
        }
        if kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link() {
            entry.unpack_in(target)?;
        }
    }
    // To its end, where the digest is compared.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(())
}

/// Gives a volume's own directory the owner and the permissions that it had.
fn top(target: &Path, header: &tar::Header) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let id = |id: u64| u32::try_from(id).map_err(io::Error::other);
    std::os::unix::fs::chown(target, Some(id(header.uid()?)?), Some(id(header.gid()?)?))?;
    fs::set_permissions(target, std::fs::Permissions::from_mode(header.mode()? & 0o7777))
}

/// Removes the volumes of containers that are gone.
pub(crate) async fn sweep(app: &Arc<App>) {
    let tops = [app.config.volumes(), app.config.disk_volumes()];
    let list_all = move || tops.iter().flat_map(|top| list(top).unwrap_or_default()).collect();
    let listed: Vec<_> = tokio::task::spawn_blocking(list_all).await.unwrap_or_default();
    for (namespace, container, directory) in listed {
        if !is_gone(app, &namespace, &container).await {
            continue;
        }
        // Whoever restores it has not made it yet. Looked at again: it may have, meanwhile.
        let Ok(busy) = app.reserve(&namespace, &container) else { continue };
        if is_gone(app, &namespace, &container).await {
            let removed = tokio::task::spawn_blocking(move || stage::remove(&directory)).await;
            if let Err(error) = removed.map_err(io::Error::other).and_then(|removed| removed) {
                tracing::warn!(%error, container, "failed to remove a volume");
            }
        }
        drop(busy);
    }
}

async fn is_gone(app: &App, namespace: &str, container: &str) -> bool {
    let found = app.containerd.namespace(namespace).container(container).await;
    found.is_err_and(|error| error.is_not_found())
}

fn list(top: &Path) -> io::Result<Vec<(String, String, PathBuf)>> {
    let mut found = Vec::new();
    for namespace in fs::read_dir(top)? {
        let namespace = namespace?;
        for container in fs::read_dir(namespace.path())? {
            let container = container?;
            let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
            found.push((name(&namespace), name(&container), container.path()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::fake::Fake;

    #[tokio::test]
    async fn volumes_of_a_restore_under_way_stay() {
        let fake = Fake::start(|_, _| Err(tonic::Status::not_found("no container")));
        let app = fake.app();
        let tops = [app.config.volumes(), app.config.disk_volumes()];
        for (top, container) in tops.iter().flat_map(|top| [(top, "gone"), (top, "coming")]) {
            stage::make(&top.join("default").join(container).join("shm")).unwrap();
        }
        let busy = app.reserve("default", "coming").unwrap();
        sweep(&app).await;
        for top in &tops {
            assert!(!top.join("default/gone").exists());
            assert!(top.join("default/coming/shm").exists());
        }
        drop(busy);
        app.reserve("default", "gone").unwrap();
    }

    #[test]
    fn the_kernels_places_are_nobody_elses() {
        for place in ["/dev/shm", "/data", "/var/lib/data", "/device"] {
            assert!(is_place(place), "{place}");
        }
        for place in [
            "/",
            "",
            "data",
            "/proc",
            "/proc/sys",
            "/sys/fs",
            "/dev",
            "/dev/null",
            "//proc",
            "/a/",
            "/a/../proc",
            "/./proc",
            "/dev/shm/",
        ] {
            assert!(!is_place(place), "{place}");
        }
    }

    #[test]
    fn nothing_leads_out_of_the_volume() {
        let top = tempfile::tempdir().unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        let mut link = tar::Header::new_gnu();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        link.set_uid(0);
        builder.append_link(&mut link, "out", top.path()).unwrap();
        let mut file = tar::Header::new_gnu();
        file.set_size(1);
        file.set_mode(0o644);
        builder.append_data(&mut file.clone(), "out/escaped", &b"x"[..]).unwrap();
        builder.append_data(&mut file, "kept", &b"y"[..]).unwrap();
        let tar = builder.into_inner().unwrap();

        let target = top.path().join("volume");
        // Either way out is fine, as long as nothing escapes.
        let _outcome = extract(&*tar, &target, &CancellationToken::new());
        assert!(!top.path().join("escaped").exists());
    }
}
