//! The steps of a restore, in the order of `ARCHITECTURE.md`, "A checkpoint is restored".

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::Subject;
use kybernate_packager::policy::repository;
use kybernate_packager::store::Store;
use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use super::admission::{AdmissionError, Admitted, admit};
use super::gpu::{self, GpuPlan, GpuRestoreError};
use super::image::{ImageError, Wanted, ensure};
use super::launch::{LaunchError, Plan};
use super::materialise::{self, MaterialiseError, materialise};
use super::spec::{self, Ingredients};
use super::volume::{self, VolumeError};
use super::{Order, user};
use crate::app::{App, Busy, Rejection};
use crate::criu_config;
use crate::gate::{Expected, Summary};
use crate::operations::{
    Cancelled, Conclusion, Driver, Made, OperationsError, RefusedBy, Sizes, Stopped,
};
use crate::runtime::{Namespace, RuntimeError};
use crate::stage::{self, StageError};
use crate::staging::Use;
use crate::undo::{Undoing, undo};

/// Why a restore cannot be cancelled any more.
const COMMITTED: &str = "the container runs: end it instead";

/// Why a checkpoint was not restored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Materialise(#[from] MaterialiseError),
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("failed to make a place for the dump")]
    Place(#[source] io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Gpu(#[from] GpuRestoreError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error("the checkpoint names no container: say how the new one is to be called")]
    NoName,
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl RestoreError {
    /// Returns the rule that refused, when it was one.
    fn refused_by(&self) -> Option<RefusedBy> {
        let integrity = |yes: bool| yes.then_some(RefusedBy::Integrity);
        match self {
            Self::Admission(error) => error.refused_by(),
            Self::Gpu(error) => error.refused_by(),
            Self::Materialise(error) => error.refused_by(),
            Self::Volume(error) => integrity(error.is_integrity()),
            Self::Image(error) => integrity(error.is_integrity()),
            _ => None,
        }
    }
}

/// What a restore ends with.
struct Restored {
    pid: u32,
    sizes: Sizes,
}

/// Restores a checkpoint. After a failure nothing is left of it. Returns how it went; `None` when
/// the next agent has to see to its end.
pub(crate) async fn run(
    app: &Arc<App>,
    driver: &Driver,
    order: Order,
    cancel: CancellationToken,
) -> Option<Conclusion> {
    let mut restoring =
        Restoring { app, driver, order: &order, container: None, busy: None, staged: None };
    let steps = driver.unless_stopped(&cancel, restoring.steps());
    let restored = match driver.tell_while(Box::pin(steps)).await {
        Ok(restored) => keep(driver).await.map(|()| restored).map_err(RestoreError::from),
        Err(error) => Err(error),
    };
    let conclusion = driver.ends(conclude(restored));
    let container = restoring.container.clone().unwrap_or_default();
    let (namespace, container) = (&order.namespace, &container);
    let undoing = Undoing { namespace, container, conclusion: &conclusion };
    undo(app, driver, undoing, &cancel).await.then_some(conclusion)
}

/// Notes that what remains is the container: CRIU has read everything. Where that cannot be written
/// down, the next agent would take the container away, and so do we.
pub(super) async fn keep(driver: &Driver) -> Result<(), OperationsError> {
    let made = driver.made();
    let kept = driver.update(|record| record.made.retain(is_temporary)).await;
    if kept.is_err() {
        let again = driver.update(|record| record.made = made.into_iter().rev().collect());
        if let Err(error) = again.await {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
    }
    kept
}

/// Whether something is not needed once the container runs.
pub(super) fn is_temporary(made: &Made) -> bool {
    matches!(made, Made::Directory(_) | Made::Lease(_))
}

fn conclude(restored: Result<Restored, RestoreError>) -> Conclusion {
    match restored {
        Ok(Restored { pid: restored_pid, sizes }) => {
            Conclusion { restored_pid, ..Conclusion::done(sizes) }
        }
        Err(error) => Conclusion::failed(chain(&error).to_string(), error.refused_by()),
    }
}

struct Restoring<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    order: &'a Order,
    container: Option<String>,
    busy: Option<Busy>,
    /// The dump, when it was staged: it stays until everything is undone that reads it.
    staged: Option<Use>,
}

/// A checkpoint that may be restored, as far as its facts tell.
struct Accepted {
    admitted: Admitted,
    container: String,
    expected: Expected,
    gpu: GpuPlan,
}

/// Where CRIU finds things.
struct Place {
    images: PathBuf,
    /// For its log.
    work: PathBuf,
    criu_config: PathBuf,
}

impl Restoring<'_> {
    async fn steps(&mut self) -> Result<Restored, RestoreError> {
        let accepted = self.accept().await?;
        let Accepted { admitted, expected, .. } = &accepted;
        let digest = &admitted.checkpoint.stored.descriptor.digest;
        self.staged = self.app.staging.take(digest, self.driver.id()).await;
        let directory = self.stage(&admitted.checkpoint).await?;
        let (images, summary) = if let Some(staged) = &self.staged {
            let tier = staged.tier;
            self.driver.update(|record| record.tier = Some(tier)).await?;
            self.driver.step("gate");
            let images = staged.images();
            let summary = materialise::inspect(&images, Some(expected)).await?;
            (images, summary)
        } else {
            let images = directory.join("images");
            let summary = materialise(admitted, &images, self.driver, Some(expected)).await?;
            (images, summary)
        };
        let plain = self.app.containerd.namespace(&self.order.namespace);
        let lease = format!("kybernate-{}", self.driver.id());
        self.driver.will_make(Made::Lease(lease.clone())).await?;
        let leased = plain.lease(&lease).await?;
        let container = &accepted.container;
        let criu_config = self.criu_config(container, summary).await?;
        let place = Place { images, work: directory.join("work"), criu_config };
        let pid = self.launch(&accepted, &leased, place).await?;
        self.driver.commit(COMMITTED)?;
        let sizes = Sizes::of(&accepted.admitted.checkpoint.config.sizes);
        Ok(Restored { pid, sizes })
    }

    /// Everything that is decided before anything large moves.
    async fn accept(&mut self) -> Result<Accepted, RestoreError> {
        let (order, app) = (self.order, self.app);
        let admitted = admit(app, self.driver, order).await?;
        let report = app.report().await;
        let volumes = Subject::of(&admitted.checkpoint).volumes;
        let expected = spec::expected(&order.allow, &volumes, &app.config, &report.facts.lsm);
        let gpu = gpu::plan(app, &admitted.checkpoint).await?;
        let container = self.name(&admitted.checkpoint).await?;
        Ok(Accepted { admitted, container, expected, gpu })
    }

    /// Decides how the container is called, and makes sure that nobody else is.
    async fn name(&mut self, checkpoint: &Checkpoint) -> Result<String, RestoreError> {
        let namespace = &self.order.namespace;
        if let Some(name) = &self.order.container {
            self.container = Some(name.clone());
            return Ok(name.clone());
        }
        let name = checkpoint.config.source.container.clone();
        let name = name.filter(|name| super::is_name(name)).ok_or(RestoreError::NoName)?;
        self.busy = Some(self.app.reserve(namespace, &name)?);
        self.app.free(namespace, &name).await?;
        self.container = Some(name.clone());
        let written = name.clone();
        self.driver.update(|record| record.container = written).await?;
        Ok(name)
    }

    async fn stage(&self, checkpoint: &Checkpoint) -> Result<PathBuf, RestoreError> {
        let bytes = if self.staged.is_some() { 0 } else { materialise::bytes(checkpoint) };
        let app = Arc::clone(self.app);
        let chosen = tokio::task::spawn_blocking(move || stage::choose(&app.config, bytes)).await;
        let directory = chosen.map_err(|error| StageError::Io(io::Error::other(error)))??;
        let directory = directory.join(self.driver.id());
        self.driver.will_make(Made::Directory(directory.clone())).await?;
        let made = directory.clone();
        let made = tokio::task::spawn_blocking(move || {
            stage::make(&made.join("images"))?;
            stage::make(&made.join("work"))
        });
        made.await.map_err(io::Error::other).and_then(|made| made).map_err(RestoreError::Place)?;
        Ok(directory)
    }

    async fn launch(
        &self,
        accepted: &Accepted,
        leased: &Namespace,
        place: Place,
    ) -> Result<u32, RestoreError> {
        let Place { images, work, criu_config } = place;
        let Accepted { admitted: Admitted { store, checkpoint }, container, .. } = accepted;
        let (driver, order) = (self.driver, self.order);
        let digest = &checkpoint.stored.descriptor.digest;
        driver.step("pull");
        let runnable = checkpoint.runnable.as_ref().ok_or(RestoreError::NoName)?;
        let repository = repository(&order.location);
        let wanted = Wanted { store, runnable, repository: &repository, checkpoint: digest };
        let image = ensure(&wanted, leased, driver).await?;
        let volumes = self.volumes(store, checkpoint, container).await?;
        driver.step("create");
        let plan = Plan {
            namespace: leased,
            container,
            image: &image,
            checkpoint: digest,
            images: &images,
            work,
        };
        let rootfs = plan.rootfs(driver).await?;
        let (user, devices) = {
            let (text, rootfs) = (image.config.user.clone(), rootfs.clone());
            let paths = order.allow.devices.clone();
            let looked = tokio::task::spawn_blocking(move || {
                let user = user::resolve(&text, &rootfs)?;
                let devices = spec::devices(&paths).map_err(LaunchError::Devices)?;
                Ok::<_, LaunchError>((user, devices))
            });
            looked.await.map_err(|error| LaunchError::Devices(io::Error::other(error)))??
        };
        // A name nobody else has: what is killed after a failure is what is in this cgroup.
        let cgroup = format!("/{}/{container}-{}", order.namespace, driver.id());
        let spec = spec::build(&Ingredients {
            image: &image.config,
            user: &user,
            allow: &order.allow,
            devices: &devices,
            volumes: &volumes,
            cgroup: &cgroup,
            criu_config: Some(&criu_config),
        });
        plan.create(&spec, driver).await?;
        driver.step("restore");
        let pid = plan.start(rootfs, &cgroup, driver).await?;
        gpu::bring(self.app, &accepted.gpu, &cgroup).await?;
        Ok(pid)
    }

    /// Writes what CRIU is told about the new container, beside its volumes.
    async fn criu_config(
        &self,
        container: &str,
        summary: Summary,
    ) -> Result<PathBuf, RestoreError> {
        volume::sweep(self.app).await;
        let directory = volume::directory(self.app, &self.order.namespace, container);
        self.driver.will_make(Made::Volume(directory.clone())).await?;
        let file = directory.join("criu.conf");
        let path = file.clone();
        let written = tokio::task::spawn_blocking(move || {
            // An earlier container of this name may have left its files.
            stage::remove(&directory)?;
            criu_config::write_restored(&path, &summary)
        });
        let written = written.await;
        written.map_err(io::Error::other).and_then(|done| done).map_err(RestoreError::Place)?;
        Ok(file)
    }

    async fn volumes(
        &self,
        store: &Store,
        checkpoint: &Checkpoint,
        container: &str,
    ) -> Result<Vec<super::AllowedMount>, RestoreError> {
        if checkpoint.volumes.is_empty() {
            return Ok(Vec::new());
        }
        let directory = volume::directory(self.app, &self.order.namespace, container);
        Ok(volume::unpack(store, checkpoint, &directory).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::{Kind, Operations, Subject};

    #[tokio::test]
    async fn a_container_that_cannot_be_noted_does_not_stay() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("operations");
        let operations = Operations::open(&place).unwrap();
        let subject = Subject {
            kind: Kind::Restore,
            container: "web".to_owned(),
            namespace: "default".to_owned(),
            reference: "localhost:5000/web:1".to_owned(),
            time_out: None,
        };
        let driver = operations.begin(subject).await.unwrap();
        let made = [Made::Lease("one".to_owned()), Made::Container("web".to_owned())];
        for made in made.clone() {
            driver.will_make(made).await.unwrap();
        }
        fs_err::rename(&place, root.path().join("elsewhere")).unwrap();
        keep(&driver).await.unwrap_err();
        assert_eq!(driver.made().len(), 2, "it is not undone");
        fs_err::rename(root.path().join("elsewhere"), &place).unwrap();
        keep(&driver).await.unwrap();
        assert_eq!(driver.made(), made[..1]);
    }
}
