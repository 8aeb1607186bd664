//! Captured mounts become mounts again: what of the node lay in the source.
//!
//! `/dev/shm` lives in memory beside the container, the others on disk, in directories of the agent's
//! that only root can look into. They go when the container has gone.

use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use fs_err as fs;
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use kybernate_packager::artifact::{Checkpoint, Volume};
use kybernate_packager::store::{Store, StoreError, StoreErrorKind};
use tokio_util::io::{StreamReader, SyncIoBridge};
use tokio_util::sync::CancellationToken;

pub(super) use self::tree::Names;
use self::tree::extract;
use super::AllowedMount;
use super::admission::Admitted;
use crate::app::App;
use crate::operations::Driver;
use crate::stage;
use crate::staging::Use;

mod tree;

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
    #[error("failed to stage the captured mount on {0:?}")]
    Fetch(String, #[source] io::Error),
}

impl VolumeError {
    /// Whether the content is to blame, and not the way to it.
    pub(crate) const fn is_integrity(&self) -> bool {
        match self {
            Self::Store(error) => matches!(error.kind, StoreErrorKind::Mismatch(_)),
            Self::Place(_) | Self::TooMany => true,
            Self::Unpack(..) | Self::Fetch(..) => false,
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

/// Where the tars of captured mounts come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tars<'a> {
    pub(super) store: &'a Store,
    /// The checkpoint, when it is staged.
    pub(super) staged: Option<&'a Use>,
    /// Whose they are unpacked for.
    pub(super) driver: &'a Driver,
}

impl Tars<'_> {
    /// Returns where a staged one is, if it is there.
    fn file(&self, number: usize) -> Option<PathBuf> {
        self.staged.map(|staged| staged.volumes().join(name(number)))
    }
}

/// Returns the name of the file that a captured mount is in, by its place in the checkpoint.
fn name(number: usize) -> String {
    format!("{number}.tar")
}

/// Returns how many bytes the captured mounts have.
pub(crate) fn bytes(checkpoint: &Checkpoint) -> u64 {
    let parts = checkpoint.volumes.iter().flat_map(|volume| &volume.parts);
    parts.fold(0, |sum, part| sum.saturating_add(part.size))
}

/// Fetches the captured mounts, each into a file of `directory`.
pub(crate) async fn fetch(
    admitted: &Admitted,
    directory: &Path,
    driver: &Driver,
) -> Result<(), VolumeError> {
    let Admitted { store, checkpoint } = admitted;
    driver.progress.expect(bytes(checkpoint));
    for (number, volume) in checkpoint.volumes.iter().enumerate() {
        let progress = driver.progress.clone();
        let stream = volume.read(store).inspect_ok(move |chunk| {
            progress.advance(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
        });
        let wanted = CancellationToken::new();
        let _ends = wanted.clone().drop_guard();
        let mut bytes = read(stream, &wanted);
        let directory = directory.to_owned();
        let written = driver.spawn_blocking(move || {
            stage::make(&directory)?;
            let mut file = fs::File::create(directory.join(name(number)))?;
            io::copy(&mut bytes, &mut file).map(drop)
        });
        let written = written.await.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|error| of(error, |error| VolumeError::Fetch(place(volume), error)))?;
    }
    Ok(())
}

fn place(volume: &Volume) -> String {
    volume.destination.clone()
}

/// Returns what went wrong with the store, or else what `otherwise` makes of it.
fn of(error: io::Error, otherwise: impl FnOnce(io::Error) -> VolumeError) -> VolumeError {
    error.downcast::<StoreError>().map_or_else(otherwise, VolumeError::Store)
}

/// Reads a stream from a thread that may block, until it is not wanted any more.
fn read(
    stream: impl Stream<Item = Result<Bytes, StoreError>> + Send + 'static,
    wanted: &CancellationToken,
) -> impl io::Read + Send + 'static {
    let stream = stream.map_err(io::Error::other).take_until(wanted.clone().cancelled_owned());
    While { bytes: SyncIoBridge::new(StreamReader::new(stream.boxed())), wanted: wanted.clone() }
}

/// Bytes that are read as long as somebody wants them.
#[derive(Debug)]
struct While<R> {
    bytes: R,
    wanted: CancellationToken,
}

impl<R: io::Read> io::Read for While<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(into)?;
        // Also when it ends: it may end for that.
        if self.wanted.is_cancelled() {
            return Err(io::Error::other("nobody waits for it any more"));
        }
        Ok(count)
    }
}

/// Unpacks the captured mounts and returns them as mounts.
pub(super) async fn unpack(
    tars: Tars<'_>,
    checkpoint: &Checkpoint,
    directories: &Directories,
) -> Result<Vec<AllowedMount>, VolumeError> {
    check(checkpoint)?;
    // Nobody fills a directory that is being removed: dropped, this ends what is read.
    let wanted = CancellationToken::new();
    let _ends = wanted.clone().drop_guard();
    let mut mounts = Vec::new();
    for (number, volume) in checkpoint.volumes.iter().enumerate() {
        let target = match &*volume.destination {
            SHARED_MEMORY => directories.memory.join("shm"),
            _ => directories.disk.join(number.to_string()),
        };
        unpack_one(tars, (number, volume), (&target, Names::default()), &wanted).await?;
        mounts.push(AllowedMount {
            source: target.display().to_string(),
            destination: volume.destination.clone(),
            read_only: false,
        });
    }
    Ok(mounts)
}

/// Makes sure that each captured mount may be where it was.
pub(crate) fn check(checkpoint: &Checkpoint) -> Result<(), VolumeError> {
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

/// Whether nothing was in a captured mount, as far as that is known here without asking a registry.
pub(super) async fn is_bare(tars: Tars<'_>, number: usize) -> bool {
    let Some(staged) = tars.file(number) else { return false };
    let looked = tokio::task::spawn_blocking(move || {
        tree::is_bare(io::BufReader::new(fs::File::open(staged)?))
    });
    looked.await.ok().and_then(Result::ok).unwrap_or(false)
}

/// Unpacks a captured mount, and its number in the checkpoint, into a directory, which is there or not,
/// and tells what it makes at the top of it.
/// Ends with an error when it is not wanted any more, and not before nobody writes there.
pub(super) async fn unpack_one(
    tars: Tars<'_>,
    (number, volume): (usize, &Volume),
    (target, made): (&Path, Names),
    wanted: &CancellationToken,
) -> Result<(), VolumeError> {
    let staged = tars.file(number);
    let bytes = read(volume.read(tars.store), wanted);
    let (target, wanted) = (target.to_owned(), wanted.clone());
    let unpacked = tars.driver.spawn_blocking(move || match staged.map(fs::File::open) {
        None => extract(bytes, &target, &made),
        // An earlier agent has staged the dump alone.
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            extract(bytes, &target, &made)
        }
        Some(file) => extract(While { bytes: io::BufReader::new(file?), wanted }, &target, &made),
    });
    let unpacked = unpacked.await.map_err(io::Error::other).and_then(|unpacked| unpacked);
    unpacked.map_err(|error| of(error, |error| VolumeError::Unpack(place(volume), error)))
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
        // What somebody has put there by hand keeps nothing else.
        let Ok(containers) = fs::read_dir(namespace.path()) else { continue };
        for container in containers {
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

    /// Zeros, of which the last is read when nobody wants them.
    struct Zeros(CancellationToken, usize);

    impl io::Read for Zeros {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.1 += into.len();
            if self.1 > 1 << 20 {
                self.0.cancel();
            }
            into.fill(0);
            Ok(into.len())
        }
    }

    #[test]
    fn a_large_file_is_given_up_in_its_middle() {
        use std::io::Read as _;
        let top = tempfile::tempdir().unwrap();
        let wanted = CancellationToken::new();
        let mut header = tar::Header::new_gnu();
        header.set_path("large").unwrap();
        header.set_size(1 << 40);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_cksum();
        let bytes = header.as_bytes().chain(Zeros(wanted.clone(), 0));
        let target = top.path().join("volume");
        let error = extract(While { bytes, wanted }, &target, &Names::default()).unwrap_err();
        assert!(kybernate_spec::chain(&error).to_string().contains("nobody waits"), "{error}");
        assert!(fs::metadata(target.join("large")).unwrap().len() < 4 << 20);
    }
}
