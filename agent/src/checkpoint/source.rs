//! The container that is to be dumped: everything that can be known before it is touched.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use containerd_client::services::v1::Container;
use kybernate_packager::agent_api as api;
use kybernate_packager::runtime_spec::SourceSpec;

use super::capture::{Contents, Tree};
use super::maker::Maker;
use super::mounts::{self, CapturedMount};
use super::size::memory_bytes;
use super::{gpu, policy};
use crate::app::{App, Rejection};
use crate::cgroup::Freezer;
use crate::container::{cgroup_of, is_of_pod, named, namespace_or_default, spec_of};
use crate::gpu::Held;
use crate::node::numbers;
use crate::operations::Kind;
use crate::pre_copy::{self, PreCopyError};
use crate::preflight::{self, Check, CriuOptions, Finding, Findings, Policy};
use crate::rootfs::{self, Names, Others};
use crate::runtime::{Mount, Namespace, TaskState, TaskStatus};
use crate::stage::{Promised, StageError};
use crate::{criu_config, orphan, process, suspend};

/// How many times the memory all rounds before the pause may have, at most: the first has everything,
/// each that is followed by another has less than half of the one before it, and the last may have
/// everything again.
const ROUNDS: u64 = 3;

/// Whom to look at, and how.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(super) container: String,
    pub(super) namespace: String,
    pub(super) policy: Policy,
    /// Places whose content goes along.
    pub(super) capture_mounts: Vec<String>,
    /// Whether memory is copied before the pause.
    pub(super) pre_copy: bool,
}

/// The container, and everything about it that was looked up before anything is touched.
#[derive(Debug)]
pub(crate) struct Source {
    pub(super) namespace: Namespace,
    pub(super) container: Container,
    pub(super) spec: SourceSpec,
    pub(super) pid: u32,
    /// When that process began, which tells it from a later one of the same id.
    pub(super) born: u64,
    pub(super) freezer: Freezer,
    /// Whether this agent suspended it: then it stays so.
    pub(super) suspended: bool,
    /// The upper directory of its root file system.
    pub(super) upper: PathBuf,
    /// Mounts that CRIU leaves alone, whose content goes along.
    pub(super) captured: Vec<CapturedMount>,
    /// Where the dump goes, and room for it there.
    pub(super) stage: Arc<Promised>,
    /// How much there is, about.
    pub(super) estimate: Estimate,
    /// Who of it has memory on a GPU.
    pub(super) gpu: Held,
    /// Whether that goes into files of its own.
    pub(super) gpu_aside: bool,
    /// CRIU's configuration file for it, when that is the agent's to write.
    pub(super) criu_config: Option<PathBuf>,
    /// What its processes have open and CRIU is asked for.
    pub(super) holds: Holds,
    /// Version of CRIU.
    pub(super) criu: Vec<u64>,
}

/// What processes have open that CRIU takes along when it is asked to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holds {
    /// TCP connections go into the dump.
    pub(super) connections: bool,
    /// Files by names that were deleted, so that CRIU has to make others for them.
    pub(super) links: bool,
}

/// How much a checkpoint has, in bytes, about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    /// Of the dump.
    pub(super) memory: u64,
    /// What the container has written.
    pub(super) written: u64,
    /// Everything that lies beside the dump in the end, and itself.
    pub(super) room: u64,
}

/// What a look found.
#[derive(Debug)]
pub(crate) struct Examined {
    pub(crate) findings: Vec<Finding>,
    /// Absent when something refuses.
    pub(crate) source: Option<Source>,
}

/// What a dump has beside the memory of the processes.
struct Place {
    /// The cgroup that the runtime has made.
    cgroup: Option<String>,
    /// What its root file system is made of.
    mounts: Vec<Mount>,
    /// What CRIU is told, when the container has a file of its own.
    told: Option<PathBuf>,
    captured: Vec<CapturedMount>,
    /// What comes from GPUs.
    gpu_bytes: u64,
    maker: Maker,
}

/// What was read of its processes and of the room for them.
struct Measured {
    born: u64,
    freezer: Freezer,
    stage: Result<Promised, StageError>,
    estimate: Estimate,
    findings: Vec<Finding>,
    holds: Holds,
}

impl Wanted {
    fn whom(&self) -> suspend::Wanted {
        let Self { container, namespace, .. } = self.clone();
        suspend::Wanted { container, namespace }
    }

    /// Understands a request.
    pub(crate) fn parse(request: api::PreflightRequest) -> Result<Self, Rejection> {
        let policy = policy(request.tcp(), request.file_locks());
        Ok(Self {
            container: named(request.container)?,
            namespace: namespace_or_default(request.containerd_namespace)?,
            policy,
            capture_mounts: request.capture_mounts,
            pre_copy: request.pre_copy,
        })
    }
}

impl Source {
    /// Looks at the container. Everything that can be known to fail, fails here.
    pub(crate) async fn find(app: &Arc<App>, wanted: &Wanted) -> Result<Self, Rejection> {
        let Examined { findings, source } = examine(app, wanted).await?;
        for finding in &findings {
            let (container, check) = (&wanted.container, finding.check.words().id);
            if finding.refuses() {
                tracing::info!(container, check, %finding, "a checkpoint is refused");
            } else {
                tracing::warn!(container, check, %finding, "a checkpoint may miss something");
            }
        }
        if source.is_none() {
            let reasons: BTreeSet<Check> =
                findings.iter().filter(|one| one.refuses()).map(|one| one.check).collect();
            for check in reasons {
                app.operations.metrics.refused(Kind::Checkpoint, check.words().id);
            }
        }
        let mut source = source.ok_or_else(|| Rejection::Preflight {
            container: wanted.container.clone(),
            findings: Findings::new(findings.into_iter().filter(Finding::refuses).collect()),
        })?;
        let looked = source.stage.place().to_owned();
        // There was room without others a moment ago.
        let taken = |error| match error {
            StageError::NoSpace { .. } => Rejection::RoomTaken(error),
            StageError::Io(_) => error.into(),
        };
        source.stage = Arc::new(room(app, source.estimate.room).await.map_err(taken)?);
        if source.stage.place() != looked {
            let place = source.stage.place();
            tracing::warn!(?place, ?looked, "others are to have that room: the pause is longer");
        }
        Ok(source)
    }

    /// Makes sure that the dump can be told about rounds before it.
    fn takes_rounds(&self) -> Result<(), PreCopyError> {
        // It stands still anyway, and has nothing on a GPU.
        if self.suspended {
            return Ok(());
        }
        if !self.gpu.is_empty() {
            return Err(PreCopyError::Gpu);
        }
        if process::is_filtered(std::process::id()) && process::is_filtered(self.pid) {
            return Err(PreCopyError::Filtered);
        }
        let told = self.criu_config.is_some();
        if told { Ok(()) } else { Err(PreCopyError::Untold(self.container.id.clone())) }
    }
}

/// Returns how much packing writes beside a dump of so many bytes, at most: its page index and hashes, and
/// those of what it is an increment of.
pub(super) const fn packing_bytes(memory: u64) -> u64 {
    memory / 64
}

/// Has room kept for a checkpoint.
async fn room(app: &Arc<App>, bytes: u64) -> Result<Promised, StageError> {
    let app = Arc::clone(app);
    let chosen = tokio::task::spawn_blocking(move || app.promises.choose(&app.config, bytes)).await;
    chosen.map_err(|error| StageError::Io(io::Error::other(error)))?
}

/// Looks at a container without touching it, and whether what is wished for is possible at all.
pub(crate) async fn examine(app: &Arc<App>, wanted: &Wanted) -> Result<Examined, Rejection> {
    if wanted.pre_copy {
        pre_copy::is_tracked()?;
    }
    let examined = look(app, wanted).await?;
    if wanted.pre_copy
        && let Some(source) = &examined.source
    {
        source.takes_rounds()?;
    }
    Ok(examined)
}

async fn look(app: &Arc<App>, wanted: &Wanted) -> Result<Examined, Rejection> {
    let namespace = app.containerd.namespace(&wanted.namespace);
    let container = namespace.container(&wanted.container).await?;
    let cannot =
        |reason: String| Rejection::Container { container: wanted.container.clone(), reason };
    let unread = |error| cannot(format!("its specification cannot be read: {error}"));
    let spec = spec_of(&container).map_err(unread)?;
    let mut findings = of_spec(&spec);
    let task = namespace.task(&wanted.container).await?;
    let whom = wanted.whom();
    let is_suspended =
        |task: TaskState| task.status == TaskStatus::Paused && app.suspended.is(&whom, task.pid);
    let suspended = task.is_some_and(is_suspended);
    let Some(task) = task.filter(|task| suspended || task.status == TaskStatus::Running) else {
        let status = task.map_or("without a task", |task| task.status.name());
        findings.insert(0, Finding::new(Check::NotRunning, format!("it is {status}")));
        return Ok(Examined { findings, source: None });
    };
    let mounts = namespace.mounts(&container.snapshotter, &container.snapshot_key).await?;
    let upper = upper_of(&mounts);
    if upper.is_none() {
        findings.push(Finding::new(Check::Snapshotter, container.snapshotter.clone()));
    }
    let gpu::Found { held: gpu, aside: gpu_aside, lack } =
        match app.suspended.get(&whom).filter(|_| suspended) {
            // It is frozen, and has nothing on a GPU any more.
            Some(known) => gpu::Found { held: known.gpu, ..gpu::Found::default() },
            None => {
                gpu::find_for_dump(app, task.pid, cgroup_of(&container)).await.map_err(&cannot)?
            }
        };
    findings.extend(of_gpu(app, &container, &gpu, lack));
    let told = criu_config_of(app, wanted, &container, &spec).await;
    let captured = mounts::captured(&spec, is_of_pod(&container), wanted, &app.config)?;
    let from = Place {
        cgroup: cgroup_of(&container),
        mounts,
        captured: captured.clone(),
        gpu_bytes: gpu::bytes(&gpu),
        told: told.clone(),
        maker: Maker::of(&container, &wanted.namespace),
    };
    let unseen = |error| cannot(format!("its processes cannot be looked at: {error}"));
    let measured = measure(app, wanted, &spec, task, &namespace, from).await?.map_err(unseen)?;
    let Measured { born, freezer, stage, estimate, findings: more, holds } = measured;
    findings.extend(more);
    let stage = found_room(app, stage, estimate, &mut findings)?;
    findings.sort();
    let source = match (upper, stage) {
        (Some(upper), Some(stage)) if !findings.iter().any(Finding::refuses) => Some(Source {
            holds,
            criu_config: told.filter(|file| criu_config::is_own(&app.config, file)),
            criu: numbers(&app.report().await.facts.criu),
            namespace,
            container,
            spec,
            pid: task.pid,
            born,
            freezer,
            suspended,
            gpu,
            gpu_aside,
            upper,
            captured,
            stage: Arc::new(stage),
            estimate,
        }),
        _ => None,
    };
    Ok(Examined { findings, source })
}

/// Says what follows from where the dump goes.
fn found_room(
    app: &App,
    stage: Result<Promised, StageError>,
    estimate: Estimate,
    findings: &mut Vec<Finding>,
) -> Result<Option<Promised>, Rejection> {
    match stage {
        Ok(stage) => {
            if stage.place() != app.config.staging.tmpfs {
                let text = format!("about {} bytes", estimate.memory);
                findings.push(Finding::new(Check::Memory, text));
            }
            Ok(Some(stage))
        }
        Err(error @ StageError::NoSpace { .. }) => {
            findings.push(Finding::new(Check::StagingRoom, error.to_string()));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Finds what nobody saves, and what a pod would not get back, since kybernate-runc says that it runs before
/// anybody could ask the driver.
fn of_gpu(
    app: &App,
    container: &Container,
    gpu: &Held,
    lack: Option<String>,
) -> impl Iterator<Item = Finding> {
    let is_lost = is_of_pod(container) && !gpu.is_empty() && !app.gpus.is_plugin();
    let lost = is_lost.then(|| Finding::new(Check::GpuPod, format!("{} bytes", gpu::bytes(gpu))));
    lack.map(|lack| Finding::new(Check::GpuDriver, lack)).into_iter().chain(lost)
}

fn of_spec(spec: &SourceSpec) -> Vec<Finding> {
    let mut findings = Vec::new();
    if spec.shares_pid_namespace() {
        findings.push(Finding::new(Check::SharedPidNamespace, "its specification says so"));
    }
    if spec.has_terminal() {
        findings.push(Finding::new(Check::Terminal, "its specification says so"));
    }
    findings
}

/// Reads what /proc and the file systems tell.
async fn measure(
    app: &Arc<App>,
    wanted: &Wanted,
    spec: &SourceSpec,
    task: TaskState,
    namespace: &Namespace,
    from: Place,
) -> Result<io::Result<Measured>, Rejection> {
    let report = app.report().await;
    let Place { cgroup, mounts, told, captured, gpu_bytes, maker } = from;
    let (upper, usual) = (upper_of(&mounts), orphan::root(namespace, &wanted.container));
    let own_options = told.as_ref().is_some_and(|file| criu_config::is_own(&app.config, file));
    let directories =
        captured.iter().map(|mount| (mount.destination.clone(), mount.source.clone()));
    let mut bound = spec.mount_points();
    bound.retain(|destination| spec.is_mounted_on(destination));
    let mut subject = preflight::Subject {
        init: task.pid,
        pids: Vec::new(),
        policy: wanted.policy,
        bound,
        captured: directories.collect(),
        upper: upper.clone(),
        criu_config: told.unwrap_or_else(|| preflight::DEFAULT_FILE.into()),
        own_options,
        own_network: spec.has_own_network(),
        kernel: numbers(&report.facts.kernel),
        criu: numbers(&report.facts.criu),
        execs: namespace.execs(&wanted.container).await?,
        gpus: app.gpus.clone(),
    };
    let (app, pre_copy) = (Arc::clone(app), wanted.pre_copy);
    let measured = tokio::task::spawn_blocking(move || {
        let born = process::started(task.pid)?.ok_or(io::ErrorKind::NotFound)?;
        let freezer = Freezer::of(task.pid, cgroup.as_deref())?;
        subject.pids = freezer.processes()?;
        match led(&mounts, &usual, &subject.bound) {
            Ok(led) => subject.bound.extend(led),
            Err(error) => tracing::debug!(%error, "its links are not known"),
        }
        let memory = memory_bytes(&subject.pids).saturating_add(gpu_bytes);
        let upper = upper.map(|upper| Contents::of(&upper, Tree::Upper)).unwrap_or_default();
        let in_memory = mounts::memory_bytes(task.pid, &subject.bound);
        let mounts = captured.iter().map(|mount| Contents::of(&mount.source, Tree::Mount));
        let mounts: Vec<Contents> = mounts.collect();
        let written = upper.bytes;
        // What it has written is there twice in the end: as a tar, and compressed.
        let more = [written, written, packing_bytes(memory)];
        let room = mounts.iter().map(|mount| mount.bytes).chain(more);
        let rounds = if pre_copy { memory.saturating_mul(ROUNDS) } else { 0 };
        let memory = memory.saturating_add(in_memory);
        let room = room.fold(memory.saturating_add(rounds), u64::saturating_add);
        let stage = app.promises.look(&app.config, room);
        let preflight::Looked { mut findings, links } = preflight::look(&subject);
        findings.extend(maker.finding());
        let unfit = mounts.into_iter().chain([upper]).filter_map(|contents| contents.unfit);
        findings.extend(unfit.map(|subject| Finding::new(Check::UnfitFile, subject)));
        let estimate = Estimate { memory, written, room };
        let connections = subject.policy.tcp.keeps(&CriuOptions::of(&subject.criu_config));
        let holds = Holds { connections, links };
        Ok(Measured { born, freezer, stage, estimate, findings, holds })
    });
    Ok(measured.await.map_err(io::Error::other).and_then(|found| found))
}

/// Returns the upper directory of a root file system.
fn upper_of(mounts: &[Mount]) -> Option<PathBuf> {
    mounts.iter().find_map(|mount| mount.option("upperdir")).map(PathBuf::from)
}

/// Returns where links in the root file system lead what is mounted from the node.
fn led(mounts: &[Mount], usual: &Path, bound: &[String]) -> io::Result<Vec<String>> {
    let root = rootfs::mounted(mounts, usual)?;
    let others = Others { external: bound.to_owned(), ..Others::default() };
    let names = Names::look_up(&root, &[], &others)?;
    Ok(names.all().cloned().collect())
}

/// Returns the file that runc makes CRIU read for this container alone, if there is one.
async fn criu_config_of(
    app: &App,
    wanted: &Wanted,
    container: &Container,
    spec: &SourceSpec,
) -> Option<PathBuf> {
    if let Some(named) = spec.criu_config() {
        return Some(named.to_owned());
    }
    // What lies there for others may be of one that had the same id.
    if !is_of_pod(container) {
        return None;
    }
    let given = criu_config::given(&app.config.volumes(), &wanted.namespace, &wanted.container);
    let looked = given.clone();
    let exists = tokio::task::spawn_blocking(move || looked.is_file()).await;
    exists.unwrap_or_default().then_some(given)
}
