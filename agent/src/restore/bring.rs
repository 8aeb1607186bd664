//! What a restore, a staging and a provision have in common: the frame around their steps, and how a
//! dump comes onto this node.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kybernate_packager::agent_api as api;
use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use super::Allowances;
use super::admission::{AdmissionError, Admitted};
use super::image::ImageError;
use super::launch::LaunchError;
use super::live::Here;
use super::materialise::{self, MaterialiseError, materialise, on_demand};
use super::memory::{self, Memory};
use super::spec::{self, Device};
use super::user::{self, User};
use crate::app::App;
use crate::cgroup;
use crate::gate::{Expected, Paths, Summary};
use crate::operations::{Cancelled, Conclusion, Driver, Made, OperationsError, RefusedBy, Stopped};
use crate::patience::Patience;
use crate::room;
use crate::rootfs::{Bind, Names, Others};
use crate::runtime::{Mount, Namespace, RuntimeError};
use crate::stage::{self, Promised, StageError};
use crate::staging::Use;
use crate::undo::{Undoing, undo};

/// Where the dump is in an operation's directory.
pub(super) const IMAGES: &str = "images";

/// Why a checkpoint does not get as far as all of them bring it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BringError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Materialise(#[from] MaterialiseError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("{0}: try again when other operations have ended")]
    RoomTaken(StageError),
    #[error("failed to make a place for the dump")]
    Place(#[source] io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// An error that tells the rule that refused, when it was one.
pub(crate) trait Refusing: std::error::Error {
    fn refused_by(&self) -> Option<RefusedBy>;
}

impl Refusing for BringError {
    fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Admission(error) => error.refused_by(),
            Self::Materialise(error) => error.refused_by(),
            Self::Image(error) => error.is_integrity().then_some(RefusedBy::Integrity),
            _ => None,
        }
    }
}

/// Does the steps of an operation, unless it is given up, and takes away what is not to stay; after
/// a failure nothing is left of it. Returns how it went; `None` when the next agent has to see to
/// its end.
pub(crate) async fn see_through<E: From<Stopped> + Refusing + Send + Sync + 'static>(
    app: &App,
    driver: &Driver,
    cancel: &CancellationToken,
    steps: Pin<Box<impl Future<Output = Result<Conclusion, E>>>>,
) -> Option<Conclusion> {
    let steps = driver.unless_stopped(cancel, steps);
    let conclusion = match driver.tell_while(steps).await {
        Ok(conclusion) => conclusion,
        Err(error) => {
            let namespace = driver.to_api().containerd_namespace;
            let told = room::explained(app, &namespace, &error).await;
            driver.ends(Conclusion::failed(told, error.refused_by()))
        }
    };
    let api::Operation { containerd_namespace: namespace, container, .. } = driver.to_api();
    let undoing = Undoing { namespace: &namespace, container: &container, conclusion: &conclusion };
    undo(app, driver, undoing, cancel).await.then_some(conclusion)
}

/// Notes that what remains is what was asked for, and that it ends so: everything was read. Where that
/// cannot be written down, the next agent would take it away, and so do we.
pub(super) async fn keep(driver: &Driver, conclusion: &Conclusion) -> Result<(), OperationsError> {
    let made = driver.made();
    let kept = driver.update(|record| record.keep(is_temporary, conclusion)).await;
    if kept.is_err() {
        let again = driver.update(|record| {
            record.made = made.into_iter().rev().collect();
            record.conclusion = None;
        });
        if let Err(error) = again.await {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
    }
    kept
}

/// Whether something is not needed once everything was read.
pub(super) fn is_temporary(made: &Made) -> bool {
    matches!(made, Made::Directory(_) | Made::Lease(_))
}

/// How long a restore waits for room that other operations are to have.
const ROOM_LIMIT: Duration = Duration::from_secs(30);

/// How often it is looked whether there is room.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Returns where there is room for so many bytes in the operation's directory, and what keeps it. Where
/// others are to have it, they may need less soon. Nothing is made.
pub(super) async fn choose(
    app: &Arc<App>,
    driver: &Driver,
    bytes: u64,
) -> Result<(PathBuf, Arc<Promised>), BringError> {
    let mut looks = Patience::new(ROOM_LIMIT, LOOK_EVERY);
    let mut taken = StageError::Io(io::ErrorKind::TimedOut.into());
    while looks.once_more().await {
        let app = Arc::clone(app);
        let chosen = tokio::task::spawn_blocking(move || {
            let chosen = if bytes == 0 {
                app.promises.little(&app.config)
            } else {
                app.promises.choose(&app.config, bytes)
            };
            // Without others there may be none either.
            chosen.map_err(|error| (error, app.promises.look(&app.config, bytes).is_ok()))
        });
        match chosen.await.map_err(|error| StageError::Io(io::Error::other(error)))? {
            Ok(promised) => {
                let directory = promised.place().join(driver.id());
                promised.is_for(&directory);
                return Ok((directory, Arc::new(promised)));
            }
            Err((error @ StageError::NoSpace { .. }, true)) => taken = error,
            Err((error, _)) => return Err(error.into()),
        }
    }
    Err(BringError::RoomTaken(taken))
}

/// Makes a directory that goes with the operation, with these `within`.
pub(crate) async fn make(
    driver: &Driver,
    directory: PathBuf,
    within: &'static [&'static str],
) -> Result<PathBuf, BringError> {
    driver.will_make(Made::Directory(directory.clone())).await?;
    make_noted(driver, directory.clone(), within).await?;
    Ok(directory)
}

/// Makes a directory that is noted already, with these `within`.
pub(super) async fn make_noted(
    driver: &Driver,
    directory: PathBuf,
    within: &'static [&'static str],
) -> Result<(), BringError> {
    let made = driver.spawn_blocking(move || {
        within.iter().try_for_each(|name| stage::make(&directory.join(name)))
    });
    made.await.map_err(io::Error::other).and_then(|made| made).map_err(BringError::Place)
}

/// How the runtime calls what comes from outside.
#[derive(Clone, Debug)]
pub(super) enum Called {
    /// By the places, as they were told: what a link leads elsewhere is not let in.
    AsTold,
    /// By what it finds in a root file system that is not there yet: it is judged again.
    Later,
    /// By what it finds in this one, in which these are to be mounted.
    In(PathBuf, Vec<Bind>, Paths),
}

/// Returns what restored processes may be at most on this node.
pub(super) async fn expected(
    app: &Arc<App>,
    allow: &Allowances,
    volumes: &[&str],
    called: Called,
) -> Result<Expected, BringError> {
    let facts = app.report().await.facts;
    let (app, allow) = (Arc::clone(app), allow.clone());
    let volumes: Vec<String> = volumes.iter().map(ToString::to_string).collect();
    let looked = tokio::task::spawn_blocking(move || {
        let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
        let hierarchies = cgroup::names()?;
        let names = match called {
            Called::AsTold => Some(Names::default()),
            Called::Later => None,
            Called::In(root, binds, paths) => {
                let others = Others {
                    external: spec::cgroups(&hierarchies).collect(),
                    devices: allow.devices.clone(),
                    mounts: spec::mounted_always(),
                    paths,
                };
                Some(Names::look_up(&root, &binds, &others)?)
            }
        };
        let here = Here { lsm: spec::lsm(&facts.lsm), hierarchies };
        let expected = spec::expected(&allow, &volumes, &app.config, &here, names.as_ref());
        Ok(expected.on(&facts))
    });
    let looked = looked.await.map_err(io::Error::other).and_then(|looked| looked);
    looked.map_err(BringError::Place)
}

/// Puts the dump into an operation's directory, unless it is staged, and lets the gate judge it.
/// Returns where it is.
pub(super) async fn dump(
    admitted: &Admitted,
    staged: Option<&Use>,
    directory: &Path,
    driver: &Driver,
    expected: &Expected,
) -> Result<(PathBuf, Summary), BringError> {
    let Some(staged) = staged else {
        let images = directory.join(IMAGES);
        let summary = materialise(admitted, &images, driver, Some(expected)).await?;
        return Ok((images, summary));
    };
    let tier = staged.tier;
    driver.note(|record| record.tier = Some(tier));
    driver.step("gate");
    let images = staged.images();
    let summary = materialise::inspect(&images, expected).await?;
    Ok((images, summary))
}

/// Does the same for CRIU, which may read the memory while it comes. Returns it when it does. `judged`
/// is told when the gate has let the dump pass.
pub(super) async fn dump_for_criu(
    app: &App,
    admitted: &Admitted,
    staged: Option<&Use>,
    directory: &Path,
    driver: &Driver,
    expected: &Expected,
    judged: &CancellationToken,
) -> Result<(PathBuf, Summary, Option<Memory>), BringError> {
    if staged.is_some() || !app.config.pages_on_demand || !memory::is_possible() {
        let (images, summary) = dump(admitted, staged, directory, driver, expected).await?;
        driver.step("pull");
        judged.cancel();
        return Ok((images, summary, None));
    }
    let (summary, memory) = on_demand(admitted, directory, driver, expected, judged).await?;
    Ok((directory.join(IMAGES), summary, memory))
}

/// Takes a lease that goes with the operation.
pub(super) async fn lease(plain: &Namespace, driver: &Driver) -> Result<Namespace, BringError> {
    let lease = lease_of(driver);
    driver.will_make(Made::Lease(lease.clone())).await?;
    Ok(plain.lease(&lease).await?)
}

/// Returns the name of an operation's lease.
pub(super) fn lease_of(driver: &Driver) -> String {
    format!("kybernate-{}", driver.id())
}

/// Looks who the image's user is in its root file system, and at devices of this node.
pub(super) async fn look_up(
    user: &str,
    rootfs: Vec<Mount>,
    devices: &[String],
) -> Result<(User, Vec<Device>), LaunchError> {
    let (user, devices) = (user.to_owned(), devices.to_vec());
    let looked = tokio::task::spawn_blocking(move || {
        let devices = spec::devices(&devices).map_err(LaunchError::Devices)?;
        Ok((user::resolve(&user, &rootfs)?, devices))
    });
    looked.await.map_err(|error| LaunchError::Devices(io::Error::other(error)))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::{Operations, Sizes, Subject};

    #[tokio::test]
    async fn a_container_that_cannot_be_noted_does_not_stay() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("operations");
        let operations = Operations::open(&place).unwrap();
        let driver = operations.begin(Subject::example()).await.unwrap();
        let made = [Made::Lease("one".to_owned()), Made::Container("web".to_owned())];
        for made in made.clone() {
            driver.will_make(made).await.unwrap();
        }
        // What its file has no room for needs another one, and there is no place for that.
        fs_err::rename(&place, root.path().join("elsewhere")).unwrap();
        let much = "w".repeat(100_000);
        driver.update(|record| record.warnings.push(much)).await.unwrap_err();
        let done = Conclusion::done(Sizes::default());
        keep(&driver, &done).await.unwrap_err();
        assert_eq!(driver.made().len(), 2, "it is not undone");
        fs_err::rename(root.path().join("elsewhere"), &place).unwrap();
        driver.update(|_| {}).await.unwrap();
        let next = Operations::open(&place).unwrap();
        let (record, _) = &next.interrupted(|_| true)[0];
        assert_eq!((&*record.made, &record.conclusion), (&made[..], &None));
        keep(&driver, &done).await.unwrap();
        assert_eq!(driver.made(), made[..1]);
        let next = Operations::open(&place).unwrap();
        let (record, _) = &next.interrupted(|_| true)[0];
        assert_eq!((&*record.made, &record.conclusion), (&made[..1], &Some(done)));
    }
}
