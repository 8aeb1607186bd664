//! The third door: a checkpoint becomes an image of containerd's, from which any client of containerd
//! restores (`ctr container restore`, `WithTaskCheckpoint`) without us.
//!
//! Reading order: [`order`] is what is asked for; here are the steps; [`room`] looks whether it fits,
//! [`local`] reads what lies on this node, [`record`] is the image in containerd. Admission, gate and the way of the bytes are those of a restore. Only then the dump
//! goes into containerd's content store, as a tar and under a lease, with the container image that
//! it needs. containerd's index of a checkpoint names that image by the name of the image it is
//! itself: so one image record keeps everything, and what it kept goes with it
//! (`spec/decisions/0043`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use kybernate_packager::criu::cgroups::{CGROUPS, naming_none};
use kybernate_packager::interchange::ExportError;
use kybernate_packager::interchange::containerd::{self, Blobs, DumpTar, Parts};
use kybernate_packager::node::{self, is_cgroup_v2};
use kybernate_spec::{Descriptor, Digest, media_type};
use tokio_util::sync::CancellationToken;

mod links;
mod local;
mod order;
mod record;
mod room;

use self::local::Local;
pub(crate) use self::order::Order;
use self::record::{Found, look, write_index};
use super::admission::{Admitted, admit};
use super::bring::{
    BringError, Called, IMAGES, Refusing, choose, dump, expected, keep, lease, look_up, make,
    see_through,
};
use super::gpu::{self, GpuPlan, GpuRestoreError};
use super::image::{self, Brought, Held, SNAPSHOTTER};
use super::layers::Kept;
use super::materialise;
use super::rules::Refusal;
use super::spec::{self, Ingredients};
use super::{CHECKPOINT_LABEL, OPERATION_LABEL};
use crate::app::App;
use crate::cgroup;
use crate::gate::{Expected, Paths, Summary};
use crate::operations::{Conclusion, Driver, Made, RefusedBy, Sizes};
use crate::rootfs::{Bind, Others};
use crate::runtime::{Image, Namespace, WriteContentError};
use crate::stage::Promised;
use crate::staging::Use;

/// Why it cannot be cancelled any more.
const COMMITTED: &str = "the image is being given its name: remove that instead (ctr image rm)";

/// Permissions of the root directory of each root file system that containerd makes of layers.
const CONTAINERD_ROOT: u32 = 0o755;

/// First version of runc that names the new container's cgroup to CRIU on a node with version 2 alone.
const TELLING_RUNC: [u64; 2] = [1, 2];

/// Where the container's layer is in an operation's directory.
const LAYER: &str = "layer";

/// Label of an image: what was asked for when it was made.
pub(super) const REQUEST_LABEL: &str = "io.kybernate.provided-as";

/// Label that containerd gives the images of its own checkpoints.
const THEIR_LABEL: &str = "containerd.io/checkpoint";

/// Bytes of an image of CRIU's in which there is nothing: two magic numbers.
const EMPTY_IMAGE_BYTES: u64 = 8;

/// Why a checkpoint is not provided.
#[derive(Debug, thiserror::Error)]
enum ProvideError {
    #[error(transparent)]
    Bring(BringError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("failed to read the dump")]
    Dump(#[source] io::Error),
    #[error(transparent)]
    Write(#[from] WriteContentError),
    #[error(
        "image {0:?} exists already and is another one: take another name (--name), or remove it \
         first (ctr image rm)"
    )]
    Taken(String),
    #[error("failed to write containerd's index")]
    Index(#[from] serde_json::Error),
}

impl<E> From<E> for ProvideError
where
    BringError: From<E>,
{
    fn from(error: E) -> Self {
        Self::Bring(error.into())
    }
}

impl Refusing for ProvideError {
    fn refused_by(&self) -> Option<RefusedBy> {
        let integrity = |yes: bool| yes.then_some(RefusedBy::Integrity);
        match self {
            Self::Bring(error) => error.refused_by(),
            Self::Refused(refusal) => Some(refusal.by),
            Self::Export(ExportError::Impossible { .. }) => Some(RefusedBy::Compatibility),
            Self::Export(ExportError::Store(error)) => integrity(error.kind.is_about_content()),
            Self::Write(error) => integrity(error.is_integrity()),
            Self::Export(_) | Self::Dump(_) | Self::Taken(_) | Self::Index(_) => None,
        }
    }
}

/// Provides a checkpoint. After a failure nothing is left of it. Returns how it went; `None` when the
/// next agent has to see to its end.
pub(crate) async fn run(
    app: &Arc<App>,
    driver: &Driver,
    order: Order,
    cancel: CancellationToken,
) -> Option<Conclusion> {
    let mut providing = Providing { app, driver, order: &order, staged: None };
    see_through(app, driver, &cancel, Box::pin(providing.steps())).await
}

struct Providing<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    order: &'a Order,
    /// The dump, when it was staged: it stays until it was read.
    staged: Option<Use>,
}

/// A dump on this node.
struct Dump {
    images: PathBuf,
    /// What `cgroup.img` is to be for containerd's own restore, when it is not as it was.
    cgroups: Option<Vec<u8>>,
}

/// What the specification has of the dump.
struct Seen {
    /// Whether the container saw its cgroups.
    has_cgroups: bool,
    /// Files that were hidden.
    masked: Vec<String>,
    /// By which paths CRIU goes.
    paths: Paths,
}

impl Providing<'_> {
    async fn steps(&mut self) -> Result<Conclusion, ProvideError> {
        let (app, driver, order) = (self.app, self.driver, self.order);
        let admitted = admit(app, driver, &order.admission).await?;
        let Admitted { store, checkpoint } = &admitted;
        let gpu = self.fits(&admitted)?;
        let parts = Parts::find(store, checkpoint).await?;
        let digest = &checkpoint.stored.descriptor.digest;
        let image = self.image(digest);
        let name = image.name.clone();
        driver.note(|record| record.image = name);
        let plain = driver.follow(app.containerd.namespace(&order.admission.namespace));
        let done = Conclusion::done(Sizes::of(&checkpoint.config.sizes));
        match look(&plain, &image).await? {
            Found::Same => return Ok(done),
            Found::Other => return Err(ProvideError::Taken(image.name)),
            Found::Nothing => {}
        }
        let taken = app.staging.take_proven(digest, driver.id(), &driver.progress).await;
        self.staged = taken.0;
        driver.note(|record| record.warnings.extend(taken.1));
        self.has_room(&admitted, &parts, &plain).await?;
        let (directory, _promised) = self.place(&admitted, &parts).await?;
        let (dump, seen) = self.dump(&admitted, &gpu, &directory).await?;
        let leased = lease(&plain, driver).await?;
        driver.step("pull");
        let documents = image::Documents::read(store, &parts.image().digest).await?;
        let brought = image::bring(store, documents, &leased, driver, Kept::All).await?;
        brought.keep(&leased).await?;
        let layer = self.layer(&admitted, &parts, &directory).await?;
        driver.step("write");
        let criu = self.write_dump(dump, &leased).await?;
        leased.write_blob(&layer, &self.file(directory.join(LAYER))).await?;
        let layer_file = directory.join(LAYER);
        let specification = self.write_specification(&brought, &seen, layer_file, &leased).await?;
        let index = parts.index(Blobs { criu, specification, layer }, &image.name);
        let target = write_index(&index, serde_json::to_vec(&index)?, &leased).await?;
        self.publish(Image { target, ..image }, &leased).await?;
        keep(driver, &done).await?;
        Ok(done)
    }

    /// Returns how GPU memory comes back, unless containerd's index has no place for something.
    fn fits(&self, admitted: &Admitted) -> Result<GpuPlan, Refusal> {
        let asked =
            |error: GpuRestoreError| Refusal::one(RefusedBy::Compatibility, error.to_string());
        let gpu = gpu::unasked(self.app, &admitted.checkpoint).map_err(asked)?;
        let allowed = &self.order.admission.allow.mounts;
        let placeless =
            admitted.checkpoint.volumes.iter().find(|volume| {
                !allowed.iter().any(|mount| mount.destination == volume.destination)
            });
        let Some(volume) = placeless else { return Ok(gpu) };
        let (format, place) = (containerd::FORMAT, &volume.destination);
        Err(Refusal::one(
            RefusedBy::Compatibility,
            format!(
                "{format} has no place for what was in {place:?}: a directory of this node can take \
                 its place, without that (allow.mounts, --allow-mount SOURCE:{place})"
            ),
        ))
    }

    /// Returns the image's record, but for what it leads to.
    fn image(&self, checkpoint: &Digest) -> Image {
        let labels = [
            (CHECKPOINT_LABEL, checkpoint.to_string()),
            (OPERATION_LABEL, self.driver.id().to_owned()),
            (REQUEST_LABEL, self.order.fingerprint().to_string()),
            (THEIR_LABEL, "true".to_owned()),
        ];
        Image {
            name: self.order.image(checkpoint),
            target: Descriptor::of(media_type::OCI_INDEX, b""),
            labels: labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        }
    }

    /// Makes sure that containerd's content store has room for all of it.
    async fn has_room(
        &self,
        admitted: &Admitted,
        parts: &Parts,
        namespace: &Namespace,
    ) -> Result<(), ProvideError> {
        let Admitted { store, checkpoint } = admitted;
        let staged = if self.staged.is_some() { 0 } else { materialise::bytes(checkpoint) };
        let load = room::Load {
            store,
            checkpoint,
            image: &parts.image().digest,
            layer_bytes: parts.layer_bytes().saturating_mul(2),
            staged_bytes: staged,
        };
        room::look(&self.app.config, namespace, load).await
    }

    /// Makes a directory for the dump, unless that is staged, and for the container's layer. Also
    /// returns what keeps room for both.
    async fn place(
        &self,
        admitted: &Admitted,
        parts: &Parts,
    ) -> Result<(PathBuf, Arc<Promised>), ProvideError> {
        let dump = if self.staged.is_some() { 0 } else { materialise::bytes(&admitted.checkpoint) };
        // gzip packs not quite as well as zstd.
        let bytes = dump.saturating_add(parts.layer_bytes().saturating_mul(2));
        let (directory, promised) = choose(self.app, self.driver, bytes).await?;
        Ok((make(self.driver, directory, &[IMAGES]).await?, promised))
    }

    /// Puts the dump on this node, unless it is staged, and lets the gate judge it as for a restore.
    async fn dump(
        &self,
        admitted: &Admitted,
        gpu: &GpuPlan,
        directory: &Path,
    ) -> Result<(Dump, Seen), ProvideError> {
        let (app, driver) = (self.app, self.driver);
        let expected = expected(app, &self.order.admission.allow, &[], Called::AsTold).await?;
        let expected = Expected { plugins: gpu.plugins(), ..expected };
        let staged = self.staged.as_ref();
        let (images, summary) = dump(admitted, staged, directory, driver, &expected).await?;
        // What the dump says of cgroups, containerd's own restore would follow, wherever that leads,
        // but for a form that is known and a runtime that puts the new container's in its place.
        let kept = is_cgroup_v2()
            && summary.own_cgroup.is_some()
            && tells_its_cgroup(&app.report().await.facts.runtime);
        // Whatever is in it: without a set, CRIU writes into what the hierarchies name all the same.
        let cgroups = (!kept && summary.names.contains(CGROUPS))
            .then(|| naming_none(&summary.cgroup_sets))
            .transpose();
        let cgroups = cgroups.map_err(ProvideError::Dump)?;
        let seen = Seen {
            has_cgroups: summary.has_cgroups(),
            masked: summary.masked(),
            paths: summary.paths(),
        };
        let looks = images.clone();
        let looked = tokio::task::spawn_blocking(move || lost(&summary, &looks)).await;
        let warnings = looked.map_err(|error| ProvideError::Dump(io::Error::other(error)))?;
        if !warnings.is_empty() {
            driver.note(|record| record.warnings.extend(warnings));
        }
        Ok((Dump { images, cgroups }, seen))
    }

    /// Writes what the container had written into a file.
    async fn layer(
        &self,
        admitted: &Admitted,
        parts: &Parts,
        directory: &Path,
    ) -> Result<Descriptor, ProvideError> {
        Ok(parts.layer_file(&admitted.store, directory.join(LAYER)).await?)
    }

    fn file(&self, path: PathBuf) -> Local {
        Local::new(move || fs::File::open(&path), &self.driver.progress)
    }

    /// Writes the dump into the content store. It is read twice: first for its digest, by which
    /// containerd knows whether it has it, and proves it when it has not.
    async fn write_dump(&self, dump: Dump, leased: &Namespace) -> Result<Descriptor, ProvideError> {
        let progress = self.driver.progress.clone();
        // Ends the reading when nobody waits for it any more.
        let given_up = CancellationToken::new();
        let _waits = given_up.clone().drop_guard();
        let read = tokio::task::spawn_blocking(move || {
            let tar = DumpTar::of(&dump.images)?;
            let tar = match dump.cgroups {
                Some(cgroups) => tar.with(CGROUPS, cgroups),
                None => tar,
            };
            progress.expect(tar.bytes().saturating_mul(2));
            let advance = |bytes| {
                progress.advance(bytes);
                if given_up.is_cancelled() { Err(io::Error::other("given up")) } else { Ok(()) }
            };
            let criu = tar.describe(advance)?;
            Ok((tar, criu))
        });
        let read = read.await.map_err(io::Error::other).and_then(|read| read);
        let (tar, criu) = read.map_err(ProvideError::Dump)?;
        let source = Local::new(move || Ok(tar.reader()), &self.driver.progress);
        leased.write_blob(&criu, &source).await?;
        Ok(criu)
    }

    /// Writes the specification that a restore here would make: of containerd's defaults, the image's
    /// config and what the request allows, and of nothing that the checkpoint says but what it hides.
    async fn write_specification(
        &self,
        brought: &Brought,
        seen: &Seen,
        layer: PathBuf,
        leased: &Namespace,
    ) -> Result<Descriptor, ProvideError> {
        let (driver, order) = (self.driver, &self.order.admission);
        let key = format!("kybernate-{}-user", driver.id());
        let (snapshotter, snapshot) = (SNAPSHOTTER.to_owned(), key.clone());
        driver.will_make(Made::Snapshot { snapshotter, key: snapshot }).await?;
        let rootfs = leased.prepare(SNAPSHOTTER, &key, brought.chain.as_ref()).await?;
        let looked = rootfs.clone();
        let binds: Vec<Bind> = order.allow.mounts.iter().map(Bind::from).collect();
        let hierarchies = if seen.has_cgroups { cgroup::names() } else { Ok(Vec::new()) };
        let others = Others {
            external: spec::cgroups(&hierarchies.map_err(ProvideError::Dump)?).collect(),
            devices: order.allow.devices.clone(),
            mounts: spec::mounted_always(),
            paths: seen.paths.clone(),
        };
        let looked = tokio::task::spawn_blocking(move || {
            links::lead_nowhere(&looked, &layer, &binds, &others)
        });
        let looked = looked.await;
        let looked = looked.map_err(io::Error::other).and_then(|looked| looked);
        looked.map_err(ProvideError::Dump)??;
        let (config, devices) = (&brought.config, &order.allow.devices);
        let (user, devices) = look_up(&config.user, rootfs, devices).await?;
        leased.remove_snapshot(SNAPSHOTTER, &key).await?;
        let (specification, content) = containerd::specification(&spec::build(&Ingredients {
            image: config,
            user: &user,
            allow: &order.allow,
            devices: &devices,
            limits: order.limits,
            volumes: &[],
            has_cgroups: seen.has_cgroups,
            masked: &seen.masked,
            is_cgroup_v2: is_cgroup_v2(),
            // None, so that runc names it after the container, whose name is not known yet: two in one
            // cgroup, the source or another one restored of the image, would be frozen and ended as one.
            cgroup: "",
            criu_config: None,
        }));
        leased.write_blob(&specification, &Held(content)).await?;
        Ok(specification)
    }

    /// Gives everything the one name that keeps it.
    async fn publish(&self, image: Image, leased: &Namespace) -> Result<(), ProvideError> {
        let driver = self.driver;
        driver.step("publish");
        driver.will_make(Made::Image(image.name.clone())).await?;
        driver.commit(COMMITTED)?;
        // Another request for the same may have been quicker: then it is that one's.
        if leased.create_image(&image).await? || look(leased, &image).await? == Found::Same {
            return Ok(());
        }
        Err(ProvideError::Taken(image.name))
    }
}

/// Tells what containerd's own restore loses, or does not do, unless CRIU is told on the node.
fn lost(summary: &Summary, images: &Path) -> Vec<String> {
    let locks = fs::metadata(images.join("filelocks.img"));
    let mut told = Vec::new();
    if summary.tcp_close || summary.keeps_connections() {
        let option = if summary.tcp_close { "tcp-close" } else { "tcp-established" };
        told.push(format!(
            "it has TCP connections: containerd's own restore wants {option} in /etc/criu/runc.conf"
        ));
    }
    if locks.is_ok_and(|found| found.len() > EMPTY_IMAGE_BYTES) {
        let text = "it holds file locks: containerd's own restore loses them unless \
                    /etc/criu/runc.conf says file-locks";
        told.push(text.to_owned());
    }
    if let Some(mode) = summary.root_mode.filter(|mode| *mode != CONTAINERD_ROOT) {
        told.push(format!(
            "its root directory has the permissions {mode:04o}, those of a new one are \
             {CONTAINERD_ROOT:04o}, and CRIU opens none with others: containerd's own restore fails"
        ));
    }
    told
}

/// Whether a runtime tells CRIU which cgroup of version 2 is the new container's.
fn tells_its_cgroup(runtime: &str) -> bool {
    let version = runtime.strip_prefix("runc ").map(node::version).unwrap_or_default();
    version.as_slice() >= TELLING_RUNC.as_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_or_unknown_runtime_tells_no_cgroup() {
        assert!(["runc 1.2.0", "runc 1.3.6+ds1", "runc 2.0.0"].into_iter().all(tells_its_cgroup));
        assert!(!["runc 1.1.15+ds1", "crun 1.20", ""].into_iter().any(tells_its_cgroup));
    }

    #[test]
    fn people_are_told_what_containerd_loses() {
        let images = tempfile::tempdir().unwrap();
        let locks = images.path().join("filelocks.img");
        let of = |names: &[&str], tcp_close: bool| {
            let names = names.iter().map(ToString::to_string).collect();
            lost(&Summary { tcp_close, names, ..Summary::default() }, images.path())
        };
        assert!(of(&["core-1.img"], false).is_empty());
        fs::write(&locks, [0; 8]).unwrap();
        assert!(of(&["filelocks.img"], false).is_empty(), "there are none in it");
        fs::write(&locks, [0; 9]).unwrap();
        assert!(of(&["filelocks.img"], false)[0].contains("says file-locks"));
        fs::remove_file(&locks).unwrap();
        assert!(of(&["tcp-stream-1.img"], false)[0].contains("tcp-established"));
        assert!(of(&["tcp-stream-1.img"], true)[0].contains("tcp-close"));
        let rooted = |mode| Summary { root_mode: Some(mode), ..Summary::default() };
        assert!(lost(&rooted(0o755), images.path()).is_empty());
        assert!(lost(&rooted(0o555), images.path())[0].contains("permissions 0555, "));
    }
}
