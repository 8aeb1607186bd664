//! The steps of a restore, in the order of `ARCHITECTURE.md`, "A checkpoint is restored".

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::Subject;
use kybernate_packager::node::is_cgroup_v2;
use kybernate_packager::store::Store;
use kybernate_packager::unpack::on_demand::SPOOL_BYTES_MAX;
use tokio_util::sync::CancellationToken;

use super::admission::{Admitted, admit};
use super::bring::{
    BringError, Called, IMAGES, Refusing, choose, dump_for_criu, expected, keep, lease_of, look_up,
    make, make_noted, see_through,
};
use super::gpu::{self, GpuPlan, GpuRestoreError};
use super::image::{self, Brought};
use super::launch::{self, LaunchError, Plan};
use super::layers::Kept;
use super::materialise::MaterialiseError;
use super::memory::Memory;
use super::root;
use super::spec::{self, Ingredients};
use super::volume::{self, VolumeError};
use super::{Order, materialise};
use crate::app::{App, Busy, Rejection};
use crate::container::is_name;
use crate::gate::{Expected, Summary};
use crate::operations::{Conclusion, Driver, Made, RefusedBy, Sizes};
use crate::rootfs::Bind;
use crate::runtime::{Mount, Namespace};
use crate::stage::{MEMORY, Promised};
use crate::staging::Use;
use crate::{connections, criu_config, stage};

/// Where CRIU's log is in an operation's directory.
const WORK: &str = "work";

/// What is in that directory.
const WITHIN: &[&str] = &[IMAGES, WORK, MEMORY];

/// How long the memory waits for the image when all else is there: that is worth it for an image of
/// which containerd has most already.
const IMAGE_FIRST: Duration = Duration::from_millis(300);

/// Why a restore cannot be cancelled any more.
const COMMITTED: &str = "the container runs: end it instead";

/// Why a checkpoint was not restored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    #[error(transparent)]
    Bring(BringError),
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Gpu(#[from] GpuRestoreError),
    #[error("the checkpoint names no container: say how the new one is to be called")]
    NoName,
    #[error(
        "what was staged in the {tier} tier was changed while CRIU read it ({how}): it is not used \
         again, try once more"
    )]
    Changed {
        /// Name of the tier.
        tier: &'static str,
        /// What is not as it was.
        how: io::Error,
        source: LaunchError,
    },
    #[error(
        "the dump has {bytes} bytes, and the new container may have {limit} bytes of memory (--memory-limit), \
         which may be too little"
    )]
    Limit {
        /// Bytes of the dump.
        bytes: u64,
        /// Bytes that the new container may have.
        limit: u64,
        source: LaunchError,
    },
    #[error(
        "what lies in the {tier} tier was not restored: should that go on, `kyb evict` it, and it comes from \
         the registry again"
    )]
    Staged {
        /// Name of the tier.
        tier: &'static str,
        source: LaunchError,
    },
}

impl<E> From<E> for RestoreError
where
    BringError: From<E>,
{
    fn from(error: E) -> Self {
        Self::Bring(error.into())
    }
}

impl Refusing for RestoreError {
    fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Bring(error) => error.refused_by(),
            Self::Gpu(error) => error.refused_by(),
            Self::Volume(error) => error.is_integrity().then_some(RefusedBy::Integrity),
            Self::Rejected(_)
            | Self::NoName
            | Self::Changed { .. }
            | Self::Limit { .. }
            | Self::Staged { .. } => None,
        }
    }
}

/// Restores a checkpoint. After a failure nothing is left of it. Returns how it went; `None` when
/// the next agent has to see to its end.
pub(crate) async fn run(
    app: &Arc<App>,
    driver: &Driver,
    order: Order,
    cancel: CancellationToken,
) -> Option<Conclusion> {
    let mut restoring = Restoring { app, driver, order: &order, busy: None, staged: None };
    see_through(app, driver, &cancel, Box::pin(restoring.steps())).await
}

struct Restoring<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    order: &'a Order,
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

/// What has come onto this node.
struct Fetched {
    /// Where the dump is, what it holds, and its memory when that is read as it comes.
    dump: (PathBuf, Summary, Option<Memory>),
    image: Brought,
    /// The new container's root file system, on top of the image.
    rootfs: Vec<Mount>,
    /// What keeps the image until it has a name.
    leased: Namespace,
}

/// Where CRIU and the runtime find things.
struct Place {
    images: PathBuf,
    /// For its log.
    work: PathBuf,
    criu_config: PathBuf,
    summary: Summary,
    rootfs: Vec<Mount>,
    /// Bytes of memory that come while CRIU restores.
    to_come: u64,
}

impl Restoring<'_> {
    async fn steps(&mut self) -> Result<Conclusion, RestoreError> {
        let (app, driver) = (self.app, self.driver);
        let accepted = self.accept().await?;
        let Accepted { admitted, container, .. } = &accepted;
        let checkpoint = &admitted.checkpoint;
        let digest = &checkpoint.stored.descriptor.digest;
        let taken = app.staging.take_proven(digest, driver.id(), &driver.progress).await;
        self.staged = taken.0;
        driver.note(|record| record.warnings.extend(taken.1));
        let staged = self.staged.as_ref();
        let bytes = if staged.is_some() { 0 } else { materialise::bytes(checkpoint) };
        let (mut directory, promised) = choose(app, driver, bytes).await?;
        if staged.is_none() {
            directory = make(driver, directory, WITHIN).await?;
        }
        // What earlier containers left is looked at meanwhile: containerd is asked for each.
        let (fetched, ()) =
            tokio::join!(self.fetch(&accepted, &directory, &promised), volume::sweep(app));
        let Fetched { dump: (images, summary, memory), image, rootfs, leased } = fetched?;
        let criu_config = self.criu_config(container, summary.clone()).await?;
        let to_come = memory.as_ref().map_or(0, Memory::bytes);
        let work = directory.join(WORK);
        let place = Place { images, work, criu_config, summary, rootfs, to_come };
        let launched = self.launch(&accepted, image, &leased, place).await;
        let restored_pid = match memory.as_ref().and_then(Memory::failure) {
            // CRIU's own words would be about its file; and it may not have noticed.
            Some(unread)
                if matches!(&launched, Ok(_) | Err(RestoreError::Bring(BringError::Launch(_)))) =>
            {
                return Err(MaterialiseError::Unpack(unread).into());
            }
            _ => launched?,
        };
        // Everything was read.
        drop((memory, promised));
        driver.commit(COMMITTED)?;
        // Not before: what is undone must not have its connections end.
        if let Err(error) = connections::hand_over(&self.cgroup(&accepted.container)).await {
            let told = format!("its TCP connections are still held in its network: {error}");
            driver.note(|record| record.warnings.push(told));
        }
        let sizes = Sizes::of(&checkpoint.config.sizes);
        let done = Conclusion { restored_pid, ..Conclusion::done(sizes) };
        keep(driver, &done).await?;
        Ok(done)
    }

    /// Everything that is decided before anything large moves.
    async fn accept(&mut self) -> Result<Accepted, RestoreError> {
        let (order, app) = (self.order, self.app);
        let admitted = admit(app, self.driver, order).await?;
        let volumes = Subject::of(&admitted.checkpoint).volumes;
        let expected = expected(app, &order.allow, &volumes, Called::Later).await?;
        let gpu = gpu::plan(app, &admitted.checkpoint).await?;
        let expected = Expected { plugins: gpu.plugins(), ..expected };
        let container = self.name(&admitted.checkpoint).await?;
        Ok(Accepted { admitted, container, expected, gpu })
    }

    /// Decides how the container is called, and makes sure that nobody else is.
    async fn name(&mut self, checkpoint: &Checkpoint) -> Result<String, RestoreError> {
        let namespace = &self.order.namespace;
        if let Some(name) = &self.order.container {
            return Ok(name.clone());
        }
        let name = checkpoint.config.source.container.clone();
        let name = name.filter(|name| is_name(name)).ok_or(RestoreError::NoName)?;
        self.busy = Some(self.app.reserve(namespace, &name)?);
        self.app.free(namespace, &name).await?;
        let written = name.clone();
        self.driver.note(|record| record.container = written);
        Ok(name)
    }

    /// Brings the dump and, as soon as the gate has let it pass, the container's image: neither needs
    /// the other.
    async fn fetch(
        &self,
        accepted: &Accepted,
        directory: &Path,
        promised: &Arc<Promised>,
    ) -> Result<Fetched, RestoreError> {
        let (app, driver, staged) = (self.app, self.driver, self.staged.as_ref());
        let Accepted { admitted, expected, .. } = accepted;
        let (judged, image_there) = (CancellationToken::new(), CancellationToken::new());
        let image = async {
            let _told = image_there.clone().drop_guard();
            let runnable = admitted.checkpoint.runnable.as_ref().ok_or(RestoreError::NoName)?;
            let store = &admitted.store;
            // They are small. What is wrong with them counts less than a refusal.
            // What is made before the verdict is small too, and syncs the disk.
            let documents = image::Documents::read(store, &runnable.digest);
            let (documents, begun) = tokio::join!(documents, self.begin(directory));
            judged.cancelled().await;
            let (documents, leased) = (documents?, begun?);
            let kept = Kept::of(store, &self.order.namespace);
            let noted = driver.will_make_all(self.made(accepted));
            let image = image::bring(store, documents, &leased, driver, kept);
            let (noted, image) = tokio::join!(noted, image);
            noted?;
            let image = image?;
            let rootfs = launch::rootfs(&leased, &accepted.container, image.chain.as_ref(), driver);
            let kept = async { image.keep(&leased).await.map_err(RestoreError::from) };
            let rootfs = async { rootfs.await.map_err(RestoreError::from) };
            let ((), rootfs) = tokio::try_join!(kept, rootfs)?;
            Ok::<_, RestoreError>((image, rootfs, leased))
        };
        let dump = async {
            let dump =
                dump_for_criu(app, admitted, staged, directory, driver, expected, &judged).await?;
            // All else is there, or comes while it is read.
            let (room, to_come) =
                (Arc::clone(promised), dump.2.as_ref().map_or(0, |_| SPOOL_BYTES_MAX));
            drop(tokio::task::spawn_blocking(move || room.needs_only(to_come)));
            tokio::time::timeout(IMAGE_FIRST, image_there.cancelled()).await.unwrap_or_default();
            if let (_, _, Some(memory)) = &dump {
                memory.begin(directory);
            }
            Ok::<_, RestoreError>(dump)
        };
        let (dump, (image, rootfs, leased)) = tokio::try_join!(dump, image)?;
        Ok(Fetched { dump, image, rootfs, leased })
    }

    /// Makes what the rest needs.
    async fn begin(&self, directory: &Path) -> Result<Namespace, BringError> {
        let (app, driver) = (self.app, self.driver);
        let mut made = vec![Made::Lease(lease_of(driver))];
        // The gate reads a staged dump where it lies: nothing needed a directory before.
        let is_new = self.staged.is_some();
        if is_new {
            made.insert(0, Made::Directory(directory.to_owned()));
        }
        driver.will_make_all(made).await?;
        let within: &[&str] = if is_new { WITHIN } else { &[] };
        let plain = driver.follow(app.containerd.namespace(&self.order.namespace));
        let lease = lease_of(driver);
        let lease = async { Ok(plain.lease(&lease).await?) };
        let made = make_noted(driver, directory.to_owned(), within);
        let ((), leased) = tokio::try_join!(made, lease)?;
        Ok(leased)
    }

    async fn launch(
        &self,
        accepted: &Accepted,
        image: Brought,
        leased: &Namespace,
        place: Place,
    ) -> Result<u32, RestoreError> {
        let Place { images, work, criu_config, summary, rootfs, to_come } = place;
        let Accepted { admitted: Admitted { store, checkpoint }, container, .. } = accepted;
        let (driver, order) = (self.driver, self.order);
        let digest = &checkpoint.stored.descriptor.digest;
        let volumes = self.volumes(store, checkpoint, container).await?;
        driver.step("create");
        let image = image.register(order, digest, leased, driver).await?;
        let cgroup = self.cgroup(container);
        let plan = Plan {
            namespace: leased,
            container,
            image: &image,
            checkpoint: digest,
            images: &images,
            work,
            cgroup: &cgroup,
            stall: self.app.config.restore_stall,
        };
        if let Some(mode) = summary.root_mode {
            let rootfs = rootfs.clone();
            let permitted = driver.spawn_blocking(move || root::permit(&rootfs, mode)).await;
            let permitted = permitted.map_err(io::Error::other).and_then(|done| done);
            permitted.map_err(BringError::Place)?;
        }
        let (config, devices) = (&image.config, &order.allow.devices);
        let (user, devices) = look_up(&config.user, rootfs.clone(), devices).await?;
        let spec = spec::build(&Ingredients {
            image: config,
            user: &user,
            allow: &order.allow,
            devices: &devices,
            limits: order.limits,
            volumes: &volumes,
            has_cgroups: summary.has_cgroups(),
            masked: &summary.masked(),
            is_cgroup_v2: is_cgroup_v2(),
            cgroup: &cgroup,
            criu_config: Some(&criu_config),
        });
        plan.create(&spec, driver).await?;
        driver.step("restore");
        driver.progress.expect(to_come);
        let root = plan.mount(rootfs).await?;
        let binds = volumes.iter().chain(&order.allow.mounts).map(Bind::from).collect();
        self.judge(accepted, &summary, Called::In(root, binds, summary.paths())).await?;
        let pid = match plan.start(driver).await {
            Ok(pid) => pid,
            Err(error) => return Err(self.told_of(error, checkpoint).await),
        };
        gpu::bring(self.app, &accepted.gpu, &cgroup, &images).await?;
        Ok(pid)
    }

    /// Says why CRIU failed: it does not know how much memory it may use, nor that what it reads was staged,
    /// and changed since.
    async fn told_of(&self, error: LaunchError, checkpoint: &Checkpoint) -> RestoreError {
        use LaunchError as Error;
        let by_criu =
            matches!(error, Error::Restore { .. } | Error::Abandoned { .. } | Error::Hung { .. });
        let limit = self.order.limits.memory_bytes.map_or(u64::MAX, NonZeroU64::get);
        // Pages that are zero count for the limit, too, and what CRIU needs.
        let bytes = checkpoint.config.sizes.dump_bytes;
        if by_criu && limit < bytes {
            return RestoreError::Limit { bytes, limit, source: error };
        }
        let Some(staged) = self.staged.as_ref().filter(|_| by_criu) else { return error.into() };
        match staged.changed().await {
            Some(how) => RestoreError::Changed { tier: staged.tier.name(), how, source: error },
            // What has rotted there has the length and the times that it had.
            None if matches!(error, Error::Restore { .. }) => {
                RestoreError::Staged { tier: staged.tier.name(), source: error }
            }
            None => error.into(),
        }
    }

    /// Has the gate judge once more, in the root file system: only there the names are found that the
    /// runtime has for what comes from outside.
    async fn judge(
        &self,
        accepted: &Accepted,
        summary: &Summary,
        called: Called,
    ) -> Result<(), RestoreError> {
        let volumes = Subject::of(&accepted.admitted.checkpoint).volumes;
        let expected = expected(self.app, &self.order.allow, &volumes, called).await?;
        let expected = Expected { plugins: accepted.gpu.plugins(), ..expected };
        Ok(materialise::judge(summary, Some(&expected)).map_err(MaterialiseError::from)?)
    }

    /// Returns everything that will be made for the new container once the gate has let the dump pass, in
    /// that order.
    fn made(&self, accepted: &Accepted) -> Vec<Made> {
        let Accepted { admitted, container, .. } = accepted;
        let namespace = &self.order.namespace;
        let volumes = volume::Directories::of(self.app, namespace, container);
        let mut made = vec![Made::Volume(volumes.memory)];
        if !admitted.checkpoint.volumes.is_empty() {
            made.push(Made::Volume(volumes.disk));
        }
        made.extend(launch::made(container, &self.cgroup(container), self.driver));
        made
    }

    /// A name nobody else has: what is killed after a failure is what is in this cgroup.
    fn cgroup(&self, container: &str) -> String {
        format!("/{}/{container}-{}", self.order.namespace, self.driver.id())
    }

    /// Writes what CRIU is told about the new container, beside its volumes.
    async fn criu_config(
        &self,
        container: &str,
        summary: Summary,
    ) -> Result<PathBuf, RestoreError> {
        let directory = volume::directory(self.app, &self.order.namespace, container);
        let file = directory.join("criu.conf");
        let (path, cgroup) = (file.clone(), self.cgroup(container));
        let yard = self.app.config.cgroup_yard();
        let written = self.driver.spawn_blocking(move || {
            // An earlier container of this name may have left its files.
            stage::remove(&directory)?;
            criu_config::write_restored(&path, &summary, Some(&cgroup), &yard)
        });
        let written = written.await;
        written.map_err(io::Error::other).and_then(|done| done).map_err(BringError::Place)?;
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
        let (namespace, app) = (&self.order.namespace, self.app);
        let directories = volume::Directories::of(app, namespace, container);
        let disk = directories.disk.clone();
        // An earlier container of this name may have left its files.
        let removed = self.driver.spawn_blocking(move || stage::remove(&disk)).await;
        removed.map_err(io::Error::other).and_then(|removed| removed).map_err(BringError::Place)?;
        let tars = volume::Tars { store, staged: self.staged.as_ref(), driver: self.driver };
        Ok(volume::unpack(tars, checkpoint, &directories).await?)
    }
}
