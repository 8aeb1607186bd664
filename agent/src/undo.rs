//! Takes away what an operation made: after a failure, and for an agent that died.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kybernate_spec::chain;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod end;

use self::end::{end_criu, end_processes, end_restore, end_task};
use crate::app::App;
use crate::cgroup::Freezer;
use crate::checkpoint::{self, STORED};
use crate::container;
use crate::criu_config;
use crate::gpu::{GpuError, Gpus, Held};
use crate::hooks::{Hook, Hooks};
use crate::network;
use crate::operations::{
    Conclusion, Driver, Made, OperationsError, Record, SourceEnd, State, is_id,
};
use crate::patience::Pauses;
use crate::process;
use crate::restore::{self, OPERATION_LABEL};
use crate::revive::{Paused, Revived};
use crate::runtime::{Collect, Namespace, RuntimeError, TaskState, TaskStatus};
use crate::stage;
use crate::suspend::{self, Settled};
use crate::waiting;

/// What is said of an operation that no agent has ended.
pub(crate) const ENDED: &str = "the agent ended in the middle of the operation";

/// How long a pause that was asked for just now may be on its way, before its source is brought back all
/// the same: that must not wait for a containerd that hangs.
const PAUSE_LIMIT: Duration = Duration::from_secs(3);

/// How long an agent that is to end waits for what it has just asked for.
const END_PATIENCE: Duration = Duration::from_secs(3);

/// How long containerd may take to hear that a process has ended.
const HEARD_LIMIT: Duration = Duration::from_secs(2);

/// After this time, a dump that is still under way is cut short.
pub(crate) const DUMP_PATIENCE: Duration = Duration::from_secs(5);

/// How long a new agent cleans up before it serves: what needs longer waits for containerd.
const RECOVER_LIMIT: Duration = Duration::from_secs(30);

/// What is to be undone, and how its operation ends then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Undoing<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) container: &'a str,
    pub(crate) conclusion: &'a Conclusion,
}

/// Undoes everything, last first, however often it takes: containerd may be away, and what an
/// operation made must not outlive it. Meanwhile the operation stays open, and keeps what is left
/// and `conclusion`. Returns whether all is undone; if not, the agent was asked to end, and the
/// next one goes on.
pub(crate) async fn undo(
    app: &App,
    driver: &Driver,
    undoing: Undoing<'_>,
    cancel: &CancellationToken,
) -> bool {
    let undone = Box::pin(undo_all(app, driver, undoing, cancel));
    waiting::for_containerd(&app.containerd, driver, undone).await
}

async fn undo_all(
    app: &App,
    driver: &Driver,
    undoing: Undoing<'_>,
    cancel: &CancellationToken,
) -> bool {
    if !rest(driver, cancel).await {
        keep(driver, undoing.conclusion).await;
        return false;
    }
    let mut pauses = Pauses::default();
    while !try_undo(app, driver, undoing).await {
        if pauses.is_first() {
            keep(driver, undoing.conclusion).await;
        }
        tokio::select! {
            () = pauses.pause() => {}
            () = cancel.cancelled() => return false,
        }
    }
    true
}

/// Keeps how an operation ends that is not undone yet.
async fn keep(driver: &Driver, conclusion: &Conclusion) {
    driver.step("undo");
    let kept = driver.update(|record| record.conclusion = Some(conclusion.clone()));
    if let Err(error) = kept.await {
        tracing::error!(error = %chain(&error), "failed to keep an operation");
    }
}

/// Waits until what was asked for just now is there, or never will be: it could not be taken away before.
/// False when the agent is to end, and that is left to the next one.
async fn rest(driver: &Driver, ends: &CancellationToken) -> bool {
    if driver.made().iter().any(|made| matches!(made, Made::Paused { .. })) {
        tokio::time::timeout(PAUSE_LIMIT, driver.rests()).await.unwrap_or_default();
        return true;
    }
    let ended = async {
        ends.cancelled().await;
        tokio::time::timeout(END_PATIENCE, std::future::pending::<()>()).await
    };
    tokio::select! {
        biased;
        () = driver.rests() => true,
        _late = ended => false,
    }
}

/// Tries to undo everything once. What does not work is logged and, but for what it depends on,
/// does not stop the rest; returns whether all did.
async fn try_undo(app: &App, driver: &Driver, undoing: Undoing<'_>) -> bool {
    let namespace = &app.containerd.namespace(undoing.namespace);
    let container = undoing.container;
    let mut left = Vec::new();
    for made in driver.made() {
        // Whoever reads or writes there, or has it as a root, may not have ended.
        let waits = left.iter().any(Made::has_processes);
        let undone = async {
            if waits {
                return Ok(Undone::NotYet);
            }
            match &made {
                Made::Hooked(hooks) => Ok(after_hooks(hooks, driver, undoing).await),
                Made::Gpu(held) => bring_back(&app.gpus, held, driver).await,
                Made::Lease(id) => {
                    // What a success wrote is referred to; what a failure wrote may be large.
                    let done = undoing.conclusion.state == State::Done;
                    let when = if done { Collect::Later } else { Collect::Now };
                    Ok(namespace.end_lease(id, when).await.map(|()| Undone::Gone)?)
                }
                made => {
                    if let Made::Task { .. } = made {
                        end_restore(driver).await?;
                    }
                    undo_one(namespace, container, driver.id(), made).await
                }
            }
        };
        match undone.await {
            // What a success leaves is not worth a word.
            Ok(Undone::Gone | Undone::Ended(_)) if undoing.conclusion.state == State::Done => {}
            Ok(Undone::Gone) => driver.undone(made.undone()),
            Ok(Undone::Ended(end)) => driver.undone(end.to_string()),
            Ok(Undone::NeverWas) => {}
            Ok(Undone::NotYet) => left.push(made),
            Err(error) => {
                tracing::error!(
                    operation.id = driver.id(),
                    container,
                    ?made,
                    error = %chain(&*error),
                    "failed to clean up after an operation"
                );
                left.push(made);
            }
        }
    }
    left.reverse();
    left.is_empty() || {
        if let Err(error) = driver.update(|record| record.made = left).await {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
        false
    }
}

/// Runs the hooks of a checkpoint that failed, or those behind one that is done which an earlier agent did
/// not come to. One that fails is told in the operation, and not run again.
async fn after_hooks(hooks: &[Hook], driver: &Driver, undoing: Undoing<'_>) -> Undone {
    let hooks = Hooks::again(hooks.to_vec(), undoing.namespace, undoing.container);
    if undoing.conclusion.state == State::Done {
        hooks.after(driver).await;
        return Undone::NeverWas;
    }
    hooks.after_failure(driver).await;
    Undone::Gone
}

/// Finishes what an earlier agent had begun, but for what changes containers in place
/// ([`crate::suspend::recover`]). What cannot be undone within a moment is undone in
/// the background; its container is busy until then.
pub(crate) async fn recover(app: &Arc<App>) {
    let interrupted = app.operations.interrupted(|record| !record.kind.is_in_place());
    let open: BTreeSet<_> = interrupted.iter().map(|(record, _)| record.id.clone()).collect();
    for directory in [app.config.disk_stage(), app.config.staging.tmpfs.clone()] {
        let open = open.clone();
        let emptied = tokio::task::spawn_blocking(move || empty(&directory, &open)).await;
        if let Err(error) = emptied.map_err(io::Error::other).and_then(|emptied| emptied) {
            tracing::error!(%error, "failed to empty a staging directory");
        }
    }
    let recovered = TaskTracker::new();
    for (record, driver) in interrupted {
        tracing::warn!(
            operation.id = record.id,
            container = record.container,
            "an earlier agent ended in the middle of an operation"
        );
        let busy = app.reserve(&record.namespace, &record.container).ok();
        let alone = restore::reserve_claimed(app, &record);
        let (app, token) = (Arc::clone(app), recovered.token());
        app.tasks.clone().spawn(move |cancel| async move {
            let conclusion = recover_one(&app, &record, &driver, &cancel).await;
            drop((busy, alone));
            driver.close(conclusion).await;
            drop(token);
        });
    }
    recovered.close();
    if tokio::time::timeout(RECOVER_LIMIT, recovered.wait()).await.is_err() {
        tracing::warn!("what an earlier agent left is cleaned up in the background");
    }
}

async fn recover_one(
    app: &Arc<App>,
    record: &Record,
    driver: &Driver,
    cancel: &CancellationToken,
) -> Option<Conclusion> {
    let finished = async {
        match checkpoint::finish_tag(driver, record).await {
            None => restore::finish_claim(app, driver, record).await,
            known => known,
        }
    };
    let known = match record.conclusion.clone() {
        None => tokio::select! {
            found = finished => found,
            () = cancel.cancelled() => return None,
        },
        known => known,
    };
    let conclusion = known.unwrap_or_else(|| {
        let told = if record.stored.is_some() { STORED } else { "" };
        driver.ends(Conclusion::failed(format!("{ENDED}{told}"), None))
    });
    let Record { namespace, container, .. } = record;
    let undoing = Undoing { namespace, container, conclusion: &conclusion };
    undo(app, driver, undoing, cancel).await.then_some(conclusion)
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// What became of one thing.
enum Undone {
    Gone,
    /// The source does not come back.
    Ended(SourceEnd),
    /// What has its name is somebody else's.
    NeverWas,
    /// It is not known to be gone.
    NotYet,
}

impl Undone {
    const fn when(gone: bool) -> Self {
        if gone { Self::Gone } else { Self::NotYet }
    }
}

/// Brings GPU memory back. What the driver has lost nobody can: it is said, and not tried for ever.
async fn bring_back(gpus: &Gpus, held: &Held, driver: &Driver) -> Result<Undone, AnyError> {
    match gpus.bring_back(held).await {
        Ok(()) => Ok(Undone::Gone),
        Err(error) if error.is_lost() => {
            gpu_is_lost(driver, &error).await?;
            Ok(Undone::NeverWas)
        }
        Err(error) => Err(error.into()),
    }
}

/// Tells in the operation that GPU memory does not come back.
pub(crate) async fn gpu_is_lost(driver: &Driver, error: &GpuError) -> Result<(), OperationsError> {
    let error = chain(error).to_string();
    tracing::error!(operation.id = driver.id(), error, "GPU memory does not come back");
    let told = format!("the source does not get its GPU memory back: {error}");
    driver.update(|record| record.warnings.push(told)).await
}

/// Brings back what an operation left paused, and undoes nothing else of it. Returns whether it runs,
/// or has ended.
pub(crate) async fn bring_back_source(namespace: &Namespace, record: &Record) -> bool {
    for made in record.made.iter().filter(|made| matches!(made, Made::Paused { .. })) {
        match undo_one(namespace, &record.container, &record.id, made).await {
            Ok(Undone::Gone | Undone::Ended(_) | Undone::NeverWas) => {}
            Ok(Undone::NotYet) => return false,
            Err(error) => {
                tracing::error!(container = record.container, error = %chain(&*error), "still paused");
                return false;
            }
        }
    }
    true
}

/// Undoes one thing.
async fn undo_one(
    namespace: &Namespace,
    container: &str,
    operation: &str,
    made: &Made,
) -> Result<Undone, AnyError> {
    match made {
        Made::Directory(directory) | Made::Volume(directory) => {
            let directory = directory.clone();
            let removed = tokio::task::spawn_blocking(move || remove(&directory)).await??;
            return Ok(Undone::when(removed));
        }
        Made::Paused { pid, born, cgroup, directory } => {
            let (pid, born) = (*pid, *born);
            let same = move || born == 0 || process::is_there(pid, born);
            if !tokio::task::spawn_blocking(same).await? {
                // Its id may be somebody else's. Nothing is left to be dumped.
                end_criu(directory.clone()).await?;
                return Ok(Undone::Ended(end_of(namespace, container, pid).await));
            }
            return revive(namespace, container, (pid, cgroup.clone()), directory).await;
        }
        Made::Dumped { pid, cgroup, directory } => {
            let patience = Instant::now() + DUMP_PATIENCE;
            let first = (*pid, cgroup.as_deref());
            let settled = suspend::settle(namespace, container, first, directory, patience).await?;
            return Ok(match settled {
                Settled::Suspended => Undone::Gone,
                // Whoever resumed it has said so.
                Settled::Runs => Undone::NeverWas,
                Settled::Ended => {
                    end_criu(directory.clone()).await?;
                    Undone::Ended(end_of(namespace, container, *pid).await)
                }
                Settled::Unknown => Undone::NotYet,
            });
        }
        Made::Told(file) => {
            let file = file.clone();
            tokio::task::spawn_blocking(move || criu_config::forget(&file)).await??;
        }
        // They are undone by what is known of the operation.
        Made::Hooked(_) | Made::Gpu(_) | Made::Lease(_) => {}
        // Whoever made it, or the next agent, has seen to it by now.
        Made::Claimed { .. } | Made::Taken { .. } => return Ok(Undone::NeverWas),
        Made::Image(name) => {
            let labels = found(namespace.image(name).await)?.map(|image| image.labels);
            if !is_ours(labels.as_ref(), operation) || is_used(namespace, name, operation).await? {
                return Ok(Undone::NeverWas);
            }
            gone(namespace.delete_image(name).await)?;
        }
        Made::Snapshot { snapshotter, key } => {
            gone(namespace.remove_snapshot(snapshotter, key).await)?;
        }
        Made::Container(id) => {
            let labels = found(namespace.container(id).await)?.map(|container| container.labels);
            if !is_ours(labels.as_ref(), operation) {
                return Ok(Undone::NeverWas);
            }
            gone(namespace.delete_container(id).await)?;
        }
        Made::Task { container, cgroup } => {
            let found = found(namespace.container(container).await)?;
            if is_ours(found.as_ref().map(|found| &found.labels), operation) {
                end_task(namespace, container, cgroup).await?;
                // It outlives the container, and CRIU may have left its lock on it.
                let given = found.as_ref().and_then(container::network_of);
                if let Some(network) = given {
                    network::unlock_given(&network).await?;
                }
            } else {
                end_processes(cgroup).await?;
            }
        }
    }
    Ok(Undone::Gone)
}

/// Whether what has these labels was made by this operation, or is not there any more.
fn is_ours(labels: Option<&HashMap<String, String>>, operation: &str) -> bool {
    labels.is_none_or(|labels| labels.get(OPERATION_LABEL).is_some_and(|id| id == operation))
}

fn found<T>(looked: Result<T, RuntimeError>) -> Result<Option<T>, RuntimeError> {
    match looked {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a container of anybody else's has an image, as one that was restored from the same checkpoint
/// meanwhile.
async fn is_used(
    namespace: &Namespace,
    image: &str,
    operation: &str,
) -> Result<bool, RuntimeError> {
    let containers = namespace.containers().await?;
    let mut having = containers.iter().filter(|container| container.image == image);
    Ok(having.any(|container| !is_ours(Some(&container.labels), operation)))
}

/// Brings a source back. Done when containerd knows that it runs: one that was away still believes
/// in the pause, and would call the source paused for ever.
async fn revive(
    namespace: &Namespace,
    container: &str,
    (pid, cgroup): (u32, Option<String>),
    directory: &Path,
) -> Result<Undone, AnyError> {
    // After a restart of the machine the process id is somebody else's. While a dump goes on,
    // containerd knows no process id at all.
    let is_other =
        |task: TaskState| task.status == TaskStatus::Stopped || (task.pid != 0 && task.pid != pid);
    match namespace.task(container).await {
        Ok(task) if task.is_none_or(is_other) => {
            end_criu(directory.to_owned()).await?;
            return Ok(Undone::Ended(end_of(namespace, container, pid).await));
        }
        Ok(_) => {}
        // Not known to be another one's: what the dump lies in must stay until CRIU has ended.
        Err(error) => tracing::warn!(error = %chain(&error), container, "reviving unasked"),
    }
    let found = tokio::task::spawn_blocking(move || Freezer::of(pid, cgroup.as_deref())).await?;
    let freezer = match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Nothing is left to be dumped.
            end_criu(directory.to_owned()).await?;
            return Ok(Undone::Ended(end_of(namespace, container, pid).await));
        }
        found => found?,
    };
    let paused = Paused {
        namespace: namespace.clone(),
        container: container.to_owned(),
        pid,
        freezer,
        directory: directory.to_owned(),
        is_looked_for: true,
        cut_short: true,
    };
    Ok(match paused.revive(Instant::now() + DUMP_PATIENCE).await? {
        Revived::Running => Undone::Gone,
        Revived::Thawed => Undone::NotYet,
        Revived::Gone => {
            end_criu(directory.to_owned()).await?;
            Undone::Ended(end_of(namespace, container, pid).await)
        }
    })
}

/// Returns what containerd knows of the end of a source.
async fn end_of(namespace: &Namespace, container: &str, pid: u32) -> SourceEnd {
    let task = namespace.task(container).await.ok().flatten();
    let status = match task.filter(|task| task.pid == 0 || task.pid == pid) {
        None => None,
        Some(task) if task.status == TaskStatus::Stopped => Some(task.exit_status),
        // It is about to hear of it.
        Some(_) => namespace.wait(container, HEARD_LIMIT).await.ok(),
    };
    SourceEnd { status }
}

fn gone(done: Result<(), RuntimeError>) -> Result<(), RuntimeError> {
    match done {
        Err(error) if !error.is_not_found() => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Removes a directory in which no CRIU is at work. Returns whether it is gone.
fn remove(directory: &Path) -> io::Result<bool> {
    if let Some(pid) = process::writer(directory) {
        tracing::warn!(pid, ?directory, "a CRIU is still at work there");
        return Ok(false);
    }
    stage::remove(directory)?;
    Ok(true)
}

/// Removes the directories of operations that lie in a staging directory and are not `open`.
fn empty(directory: &Path, open: &BTreeSet<String>) -> io::Result<()> {
    let entries = match fs_err::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut emptied = Ok(());
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| is_id(name) && !open.contains(name)) {
            // One that cannot be removed does not keep the rest.
            emptied = emptied.and(remove(&entry.path()).map(drop));
        }
    }
    emptied
}

#[cfg(test)]
mod tests;
