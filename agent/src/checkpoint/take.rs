//! The steps of a checkpoint, in the order of `ARCHITECTURE.md`, "A checkpoint is taken".

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kybernate_packager::pack::{Packed, Pieces, VolumeCapture};
use kybernate_packager::store::{ConnectOptions, Store};
use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

mod early;
mod keep;
mod linked;
mod publish;
mod stop;

use self::early::COPY_LIMIT;
use super::away::Away;
use super::base::{self, Opened};
use super::capture::{Draft, Tree, capture};
use super::error::CheckpointError;
use super::meter::measure;
use super::source::packing_bytes;
use super::{After, Naming, Order, Source};
use crate::app::App;
use crate::container::cgroup_of;
use crate::criu_config::{self, Told};
use crate::gate::{self, Summary};
use crate::gpu::Held;
use crate::guardian::{Charge, Guardian, GuardianError};
use crate::operations::{Conclusion, Driver, Made, OperationsError, Sizes, TagState};
use crate::process;
use crate::revive::{Paused, Revived};
use crate::runtime::{TaskState, TaskStatus};
use crate::stage;
use crate::undo::{DUMP_PATIENCE, Undoing, undo};
use crate::{criu_log, room, vfork, waiting};

/// Time from "the artifact is durable" to "the source is killed": a tag and a signal.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// Why a checkpoint cannot be cancelled any more.
const COMMITTED: &str = "its artifact is stored and is being tagged";

/// What is said where a source was not stopped behind that.
pub(crate) const STORED: &str = "; its checkpoint is stored, and tagged, all the same";

/// How long a killed source may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Where CRIU's images are, and GPU memory beside them.
const IMAGES: &str = "images";

/// Takes a checkpoint. Whatever happens, the source runs on unless it was to be stopped and the
/// artifact is durable. Returns how it went; `None` when the next agent has to see to its end.
pub(crate) async fn run(
    app: &Arc<App>,
    driver: &Driver,
    mut source: Source,
    order: Order,
    cancel: CancellationToken,
) -> Option<Conclusion> {
    let directory = source.stage.place().join(driver.id());
    source.stage.is_for(&directory);
    source.namespace = driver.follow(source.namespace);
    source.gpu.storage = source.gpu_aside.then(|| directory.join(IMAGES));
    let mut taking = Taking {
        app,
        driver,
        directory,
        source: &source,
        order: &order,
        guardian: None,
        base: None,
        draft: None,
        paused_at: None,
        unheard: false,
        stop: Arc::default(),
    };
    let taken = driver.tell_while(Box::pin(taking.guarded(cancel.clone()))).await;
    taking.stop.store(true, Ordering::Relaxed);
    let conclusion = match taken {
        Ok(packed) => conclude(&packed, &order.naming),
        Err(error) => {
            let told = room::explained(app, &order.namespace, &error).await;
            let told = if driver.is_stored() { told + STORED } else { told };
            driver.ends(Conclusion::failed(told, error.refused_by()))
        }
    };
    let (namespace, container) = (&order.namespace, &order.container);
    let undoing = Undoing { namespace, container, conclusion: &conclusion };
    if !undo(app, driver, undoing, &cancel).await {
        // The operation stays open for the next agent. Until the source runs, someone has to
        // stand by: a guardian that is not sent away takes us for dead and does what we could not.
        return None;
    }
    if let Some(began) = taking.paused_at.take() {
        driver.paused(began.elapsed());
    }
    if let Some(guardian) = taking.guardian.take()
        && let Err(error) = guardian.dismiss().await
    {
        tracing::debug!(error = %chain(&error), "the guardian was quicker");
    }
    Some(conclusion)
}

fn conclude(packed: &Packed, naming: &Naming) -> Conclusion {
    let tag = match naming {
        Naming::Signed(..) | Naming::Unsigned(_) => TagState::Tagged,
        Naming::ByClient(_) => TagState::AwaitsSigner,
    };
    Conclusion { tag, ..Conclusion::done(Sizes::of(&packed.sizes)) }
}

struct Taking<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    source: &'a Source,
    order: &'a Order,
    /// Where the dump lies, with all that belongs to it.
    directory: PathBuf,
    guardian: Option<Guardian>,
    /// The checkpoint that this one is an increment of.
    base: Option<Opened>,
    /// What was copied of its files before the pause.
    draft: Option<Arc<Draft>>,
    /// When the pause began, until it ends.
    paused_at: Option<Instant>,
    /// Whether the source runs, and containerd believes in its pause.
    unheard: bool,
    /// Ends what runs on threads of its own.
    stop: Arc<AtomicBool>,
}

/// What was captured while the source was paused.
struct Captured {
    rootfs: Pieces,
    volumes: Vec<VolumeCapture>,
}

impl Taking<'_> {
    /// Does everything, unless it is cancelled, the agent ends or the guardian has had enough.
    async fn guarded(&mut self, ends: CancellationToken) -> Result<Packed, CheckpointError> {
        self.driver.step("preflight");
        let mut stopped = std::pin::pin!(self.driver.stopped(ends));
        let store = tokio::select! {
            store = self.prepared() => store?,
            why = &mut stopped => return Err(why.into()),
        };
        // Not given up half-way: a guardian without an agent resumes the container, and might find
        // it in the next checkpoint's pause.
        if !self.source.suspended {
            self.guardian = Some(self.guard().await?);
        }
        tokio::select! {
            taken = self.steps(&store) => taken,
            why = stopped => Err(why.into()),
        }
    }

    /// Returns when the guardian has brought the source back by itself, or nobody would any more.
    fn expired(&self) -> impl Future<Output = CheckpointError> + use<> {
        let expired = self.guardian.as_ref().map(Guardian::expired);
        let metrics = self.driver.metrics().clone();
        async move {
            let Some(expired) = expired else { return std::future::pending().await };
            let error = expired.await;
            if matches!(error, GuardianError::Expired) {
                metrics.guardian_resumed();
            }
            error.into()
        }
    }

    /// Prepares everything, here and in what the node's hooks look after.
    async fn prepared(&mut self) -> Result<Store, CheckpointError> {
        let store = self.prepare().await?;
        let hooked = self.order.hooks.before(self.driver, self.source.pid).await;
        hooked.map_err(CheckpointError::Before)?;
        Ok(store)
    }

    /// Starts who brings the source back when we cannot. What is suspended needs nobody: it is not
    /// to come back.
    async fn guard(&self) -> Result<Guardian, CheckpointError> {
        let charge = Charge {
            containerd: self.app.config.containerd.clone(),
            namespace: self.order.namespace.clone(),
            container: self.order.container.clone(),
            pid: self.source.pid,
            cgroup: cgroup_of(&self.source.container),
            directory: self.directory.clone(),
            deadline: self.order.deadline,
            gpu: self.gpu().clone(),
            gpus: self.app.config.gpu.clone(),
        };
        let guardian = Guardian::start(&charge, &self.app.config.root, &self.app.tasks).await;
        // It has nobody to bring back when the container has just ended.
        let (pid, born) = (self.source.pid, self.source.born);
        let told = |error: GuardianError| {
            let is_there = process::is_there(pid, born);
            if is_there { error.into() } else { CheckpointError::StartedAnew }
        };
        guardian.map_err(told)
    }

    /// Makes sure, before anything is touched, that there is a place for everything.
    async fn prepare(&mut self) -> Result<Store, CheckpointError> {
        let connect = ConnectOptions { plain_http: self.order.plain_http, notes: None };
        let store = Store::open(&self.order.location, &connect).await?;
        // One that cannot be used costs no pause.
        self.base = base::open(self.order, self.source, self.app, self.driver).await?;
        self.driver.will_make(Made::Directory(self.directory.clone())).await?;
        let directory = self.directory.clone();
        let made = self.driver.spawn_blocking(move || {
            stage::make(&directory.join(IMAGES))?;
            stage::make(&directory.join("work"))
        });
        let made = made.await.map_err(io::Error::other).and_then(|made| made);
        made.map_err(CheckpointError::Stage)?;
        Ok(store)
    }

    async fn steps(&mut self, store: &Store) -> Result<Packed, CheckpointError> {
        let expired = self.expired();
        let captured = tokio::select! {
            captured = self.paused_steps() => captured?,
            error = expired => return Err(error),
        };
        let (stage, estimate) = (Arc::clone(&self.source.stage), self.source.estimate);
        let to_come = estimate.written.saturating_add(packing_bytes(estimate.memory));
        // It is looked at beside what follows, which takes longer.
        drop(tokio::task::spawn_blocking(move || stage.needs_only(to_come)));
        if self.order.after == After::LeaveRunning {
            return Box::pin(self.publish_running(store, captured)).await;
        }
        let expired = self.expired();
        let stopped = tokio::select! {
            stopped = self.publish_and_stop(store, captured) => stopped,
            error = expired => Err(error),
        };
        stopped.map_err(|error| error.behind_the_dump(self.driver, self.order.deadline))
    }

    /// Captures everything. A source that is to run on runs then, but for its GPU memory.
    async fn paused_steps(&mut self) -> Result<Captured, CheckpointError> {
        self.draft = self.copy_ahead().await?.map(Arc::new);
        let round = self.copy_memory().await?;
        self.driver.step("dump");
        self.tell_criu(round.as_deref()).await?;
        self.is_the_same().await?;
        if self.source.suspended {
            let cgroup = cgroup_of(&self.source.container);
            let (pid, directory) = (self.source.pid, self.directory.clone());
            self.driver.will_make(Made::Dumped { pid, cgroup, directory }).await?;
        } else {
            self.take_gpu().await?;
            self.driver.will_make(self.pause()).await?;
            self.paused_at.get_or_insert_with(Instant::now);
            self.in_containerd(self.source.namespace.pause(&self.order.container)).await?;
            let waits = vfork::settle(&self.source.freezer).await;
            if let Some(pid) = waits.map_err(CheckpointError::Freezer)? {
                return Err(CheckpointError::Waits(pid));
            }
        }
        self.note_connections().await?;
        let captured = if self.source.suspended {
            // Without a guardian, a CRIU that hangs has to be noticed here.
            let captured = tokio::time::timeout(self.order.deadline, self.capture()).await;
            captured.map_err(|_elapsed| CheckpointError::Late)??
        } else {
            self.capture().await?
        };
        if round.is_some() {
            // The source may be dumped by others, who have no such round. What fails is tried again.
            self.forget_round().await;
        }
        self.order.hooks.while_paused(self.driver, self.source.pid).await?;
        self.stands_still().await?;
        if self.order.after == After::LeaveRunning {
            self.driver.step("resume");
            if !self.source.suspended {
                // A suspended one stays, and Made::Dumped with it: at the end it is looked at once more.
                let paused = self.paused();
                let revived = paused.revive(Instant::now() + DUMP_PATIENCE);
                // containerd is to hear of it yet.
                self.unheard = self.in_containerd(revived).await? == Revived::Thawed;
            }
        }
        Ok(captured)
    }

    /// Publishes what was captured of a source that runs on. That it cannot have its GPU memory back is
    /// no reason not to: the checkpoint may be all that is left of it.
    async fn publish_running(
        &mut self,
        store: &Store,
        captured: Captured,
    ) -> Result<Packed, CheckpointError> {
        let away = if self.source.suspended { None } else { self.let_go().await? };
        let (app, driver, order) = (self.app, self.driver, self.order);
        let published = CancellationToken::new();
        let publish = async {
            let packed = self.publish(store, captured).await;
            published.cancel();
            packed
        };
        // Whatever they bring back to work does not wait for registries.
        let hooks = order.hooks.after(driver);
        let regain = async {
            match &away {
                Some(away) => away.regain(&app.gpus, driver, &published).await,
                None => false,
            }
        };
        let (packed, (), settled) = tokio::join!(publish, hooks, regain);
        if settled {
            self.paused_at = None;
            if let Err(error) = self.running().await {
                // It is looked at once more at the end. What is published stays so.
                tracing::error!(error = %chain(&error), "failed to keep an operation");
            }
        }
        packed
    }

    /// Returns whose GPU memory the agent itself moves.
    fn gpu(&self) -> &Held {
        const NOBODY: &Held = &Held { processes: Vec::new(), uses: Vec::new(), storage: None };
        if self.app.gpus.is_asked() && !self.source.suspended { &self.source.gpu } else { NOBODY }
    }

    /// Moves GPU memory into the processes, which have to run for that. From then on they get as far as
    /// their next work on a GPU, so that this is when the pause begins.
    async fn take_gpu(&mut self) -> Result<(), CheckpointError> {
        if self.gpu().is_empty() {
            return Ok(());
        }
        self.driver.step("gpu");
        self.driver.will_make(Made::Gpu(self.gpu().clone())).await?;
        self.paused_at = Some(Instant::now());
        self.app.gpus.take(self.gpu()).await?;
        self.driver.step("dump");
        Ok(())
    }

    /// Makes sure that the container is the one that was looked at: a registry may have kept us
    /// waiting for long, and nobody would bring another one back.
    async fn is_the_same(&self) -> Result<(), CheckpointError> {
        let task = self.source.namespace.task(&self.order.container).await?;
        let expected = if self.source.suspended { TaskStatus::Paused } else { TaskStatus::Running };
        let is_same = |task: &TaskState| {
            task.pid == self.source.pid && process::is_there(task.pid, self.source.born)
        };
        match task.filter(is_same).map(|task| task.status) {
            Some(status) if status == expected => Ok(()),
            Some(TaskStatus::Paused) => Err(CheckpointError::PausedElsewhere),
            _ => Err(CheckpointError::StartedAnew),
        }
    }

    /// Writes what containerd cannot tell CRIU, where the container has a file for that. `round` is the
    /// last that memory was copied in.
    async fn tell_criu(&self, round: Option<&str>) -> Result<(), CheckpointError> {
        let Some(file) = self.source.criu_config.clone() else { return Ok(()) };
        if round.is_some() {
            // No other dump is to look for it.
            self.driver.will_make(Made::Told(file.clone())).await?;
        }
        let told = Told {
            tcp: self.order.policy.tcp,
            criu: self.source.criu.clone(),
            parent: round.map(early::beside),
            links: self.source.holds.links,
        };
        let written = self.driver.spawn_blocking(move || criu_config::prepare(&file, &told));
        let written = written.await;
        written.map_err(io::Error::other).and_then(|done| done).map_err(CheckpointError::CriuConfig)
    }

    /// Dumps the processes and captures what belongs to them, at the same time: CRIU keeps one core
    /// busy. They are frozen all the while, and CRIU changes no file of theirs.
    async fn capture(&self) -> Result<Captured, CheckpointError> {
        let dump = async {
            let dumped = self.dump().await;
            match &dumped {
                Ok(()) => self.driver.step("capture"),
                Err(_) => self.stop.store(true, Ordering::Relaxed),
            }
            dumped
        };
        // Whatever becomes of the files: a dump that comes to its end leaves the processes whole.
        let (dumped, captured) = tokio::join!(dump, self.files());
        dumped?;
        self.linked(captured?).await
    }

    async fn dump(&self) -> Result<(), CheckpointError> {
        let (images, work) = (self.images(), self.directory.join("work"));
        let container = &self.order.container;
        let dump = self.source.namespace.dump(container, &images, &work, self.order.policy.tcp);
        let dump = self.in_containerd(dump);
        let dumped =
            measure(&images, self.source.estimate.memory, &self.driver.progress, dump).await;
        let Err(source) = dumped else { return Ok(()) };
        let log = work.join("dump.log");
        let log = tokio::task::spawn_blocking(move || criu_log::telling(&log)).await;
        Err(CheckpointError::Dump { log: log.unwrap_or_default(), source })
    }

    /// Captures what the container has written, and the mounts that CRIU leaves alone.
    async fn files(&self) -> Result<Captured, CheckpointError> {
        let rootfs = self.directory.join("rootfs.tar");
        let rootfs = self.tar(&self.source.upper, Tree::Upper, rootfs).await?;
        let mut volumes = Vec::new();
        for (number, mount) in self.source.captured.iter().enumerate() {
            let tar = self.directory.join(format!("mount-{number}.tar"));
            self.tar(&mount.source, Tree::Mount, tar.clone()).await?;
            volumes.push(VolumeCapture { destination: mount.destination.clone(), tar });
        }
        Ok(Captured { rootfs, volumes })
    }

    /// Where CRIU's images are.
    fn images(&self) -> PathBuf {
        self.directory.join(IMAGES)
    }

    async fn tar(&self, from: &Path, tree: Tree, to: PathBuf) -> Result<Pieces, CheckpointError> {
        let (from, stop) = (from.to_owned(), Arc::clone(&self.stop));
        let draft = self.draft.clone().filter(|_| tree == Tree::Upper);
        let captured =
            tokio::task::spawn_blocking(move || capture(&from, tree, draft.as_deref(), &to, &stop));
        Ok(captured.await.map_err(|_ended| CheckpointError::CaptureInterrupted)??)
    }

    /// Gives a source that runs its GPU memory back, and sends the guardian away. What does not come
    /// back is returned: whoever stands by goes on standing by then.
    async fn let_go(&mut self) -> Result<Option<Away>, CheckpointError> {
        // Not before it runs: the driver works in its threads.
        if let Err(error) = self.app.gpus.bring_back(self.gpu()).await {
            let away = Away::note(self.driver, self.gpu(), self.paused_at, &error).await?;
            if let Some(guardian) = &mut self.guardian
                && let Err(error) = guardian.extend(COPY_LIMIT).await
            {
                tracing::warn!(error = %chain(&error), "only an agent brings GPU memory back now");
            }
            return Ok(Some(away));
        }
        self.running().await?;
        match self.guardian.take().map(Guardian::dismiss) {
            None => {}
            Some(dismissed) if self.gpu().is_empty() => dismissed.await?,
            Some(dismissed) => {
                // It was too slow, and all of it is there.
                if let Err(error) = dismissed.await {
                    tracing::warn!(error = %chain(&error), "GPU memory came back late");
                }
            }
        }
        Ok(None)
    }

    /// Has containerd do something, and tells when it does not answer meanwhile.
    fn in_containerd<T>(&self, work: impl Future<Output = T>) -> impl Future<Output = T> {
        waiting::for_containerd(&self.app.containerd, self.driver, Box::pin(work))
    }

    /// Returns the source as someone to be brought back, after a dump that came to its end.
    fn paused(&self) -> Paused {
        Paused {
            namespace: self.source.namespace.clone(),
            container: self.order.container.clone(),
            pid: self.source.pid,
            freezer: self.source.freezer.clone(),
            directory: self.directory.clone(),
            is_looked_for: true,
            cut_short: false,
        }
    }

    /// Returns the pause of the source as something to be undone.
    fn pause(&self) -> Made {
        Made::Paused {
            pid: self.source.pid,
            born: self.source.born,
            cgroup: cgroup_of(&self.source.container),
            directory: self.directory.clone(),
        }
    }

    /// Notes that nobody has to bring the source back any more.
    async fn running(&mut self) -> Result<(), OperationsError> {
        if let Some(began) = self.paused_at.take() {
            self.driver.paused(began.elapsed());
        }
        let unheard = self.unheard;
        let is_left = |made: &Made| match made {
            // At the end it is made sure that containerd knows.
            Made::Paused { .. } => unheard,
            Made::Gpu(_) => false,
            _ => true,
        };
        self.driver.update(|record| record.made.retain(is_left)).await
    }

    /// Decodes the dump, and makes sure that some container may be restored from it: the preflight
    /// looked at a container that ran on, and nobody may stop a source for what the gate refuses.
    async fn restorable(&self) -> Result<Summary, CheckpointError> {
        let images = self.images();
        let summary = gate::amended(&images).await?;
        if let Some(link) = summary.links.first().filter(|_| !self.source.holds.links) {
            // CRIU was told by somebody else, and nobody has looked where it is.
            return Err(CheckpointError::Linked(link.name.clone()));
        }
        let mut reasons = gate::judge_alone(&summary);
        reasons.extend(gate::lacking(&summary, &images, BTreeMap::new()).await?);
        if reasons.is_empty() { Ok(summary) } else { Err(CheckpointError::Unrestorable(reasons)) }
    }
}
