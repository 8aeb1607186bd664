//! Takes away what an operation made: after a failure, and for an agent that died.

use std::path::Path;
use std::time::Duration;

use kybernate_spec::chain;
use tokio::time::Instant;

use crate::app::App;
use crate::cgroup::{self, Freezer};
use crate::operations::{Driver, Made, Record, State};
use crate::patience::Patience;
use crate::process;
use crate::revive::Paused;
use crate::runtime::{Namespace, RuntimeError, TaskState, TaskStatus};
use crate::stage;

/// How long a killed task may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// After this time, a dump that is still under way is cut short.
pub(crate) const DUMP_PATIENCE: Duration = Duration::from_secs(5);

/// Undoes everything, last first. What does not work is logged and does not stop the rest;
/// returns whether all did.
pub(crate) async fn undo(app: &App, driver: &Driver, namespace: &str, container: &str) -> bool {
    let mut all = true;
    let namespace = app.containerd.namespace(namespace);
    for made in driver.made() {
        if let Err(error) = undo_one(&namespace, container, &made).await {
            tracing::error!(
                operation.id = driver.id(),
                container,
                ?made,
                error = %chain(&*error),
                "failed to clean up after an operation"
            );
            all = false;
        }
    }
    all
}

/// Finishes what an earlier agent had begun: cleans up and marks it as failed.
pub(crate) async fn recover(app: &App) {
    for (record, driver) in app.operations.interrupted() {
        let Record { namespace, container, .. } = &record;
        tracing::warn!(
            operation.id = record.id,
            container,
            "an earlier agent ended in the middle of an operation"
        );
        undo(app, &driver, namespace, container).await;
        let finished = driver.finish(|record| {
            record.state = State::Failed;
            "the agent ended in the middle of the operation".clone_into(&mut record.error);
        });
        if let Err(error) = finished.await {
            tracing::error!(error = %chain(&error), "failed to close an interrupted operation");
        }
    }
    for directory in [app.config.disk_stage(), app.config.staging.tmpfs.clone()] {
        let emptied = tokio::task::spawn_blocking(move || empty(&directory)).await;
        if let Err(error) = emptied.map_err(std::io::Error::other).and_then(|emptied| emptied) {
            tracing::error!(%error, "failed to empty a staging directory");
        }
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn undo_one(namespace: &Namespace, container: &str, made: &Made) -> Result<(), AnyError> {
    match made {
        Made::Directory(directory) | Made::Volume(directory) => {
            let directory = directory.clone();
            tokio::task::spawn_blocking(move || stage::remove(&directory)).await??;
        }
        Made::Paused { pid, directory } => revive(namespace, container, *pid, directory).await?,
        Made::Lease(id) => namespace.end_lease(id).await?,
        Made::Image(name) => gone(namespace.delete_image(name).await)?,
        Made::Snapshot { snapshotter, key } => {
            gone(namespace.remove_snapshot(snapshotter, key).await)?;
        }
        Made::Container(id) => gone(namespace.delete_container(id).await)?,
        Made::Task { container, cgroup } => end_task(namespace, container, cgroup).await?,
    }
    Ok(())
}

async fn revive(
    namespace: &Namespace,
    container: &str,
    pid: u32,
    directory: &Path,
) -> Result<(), AnyError> {
    // After a restart of the machine the process id is somebody else's. While a dump goes on,
    // containerd knows no process id at all.
    let is_other =
        |task: TaskState| task.status == TaskStatus::Stopped || (task.pid != 0 && task.pid != pid);
    match namespace.task(container).await {
        Ok(task) if task.is_none_or(is_other) => return Ok(()),
        Ok(_) => {}
        // Not known to be another one's: what the dump lies in must stay until CRIU has ended.
        Err(error) => tracing::warn!(error = %chain(&error), container, "reviving unasked"),
    }
    let paused = Paused {
        namespace: namespace.clone(),
        container: container.to_owned(),
        pid,
        freezer: Freezer::of(pid)?,
        directory: directory.to_owned(),
        cut_short: true,
    };
    paused.revive(Instant::now() + DUMP_PATIENCE).await?;
    Ok(())
}

/// Ends a task that may be half restored: CRIU can hang, and containerd answers nothing about the
/// task until it ends. CRIU is in the task's cgroup, so that is emptied first.
async fn end_task(namespace: &Namespace, container: &str, cgroup: &str) -> Result<(), AnyError> {
    let freezer = Freezer::at(cgroup)?;
    let mut looks = Patience::new(END_LIMIT, LOOK_EVERY);
    while looks.once_more().await {
        let processes = freezer.processes()?;
        if processes.is_empty() {
            break;
        }
        for pid in processes {
            process::kill(pid)?;
        }
    }
    if namespace.task(container).await?.is_some() {
        // A task that has ended cannot be killed, which is fine.
        if let Err(error) = namespace.kill(container).await {
            tracing::debug!(error = %chain(&error), "failed to kill the task");
        }
        let mut looks = Patience::new(END_LIMIT, LOOK_EVERY);
        while looks.once_more().await && namespace.delete_task(container).await.is_err() {}
    }
    cgroup::remove(cgroup)?;
    Ok(())
}

fn gone(done: Result<(), RuntimeError>) -> Result<(), RuntimeError> {
    match done {
        Err(error) if !error.is_not_found() => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Removes what lies in a staging directory: nothing there outlives its operation.
fn empty(directory: &Path) -> std::io::Result<()> {
    let entries = match fs_err::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        stage::remove(&entry?.path())?;
    }
    Ok(())
}
