//! Ends what is at work on a container, so that what it works on can be taken away.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kybernate_spec::chain;

use super::{AnyError, gone};
use crate::cgroup::{self, Freezer};
use crate::operations::{Driver, Made};
use crate::patience::Patience;
use crate::runtime::Namespace;
use crate::{orphan, process};

/// How long a killed task may take to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How often CRIU is killed, and whom it makes meanwhile.
const KILLS_MAX: u32 = 8;

/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Ends every CRIU of a restore: one whose CRIU was killed as it began may stand still for ever, in no
/// cgroup of the container's, and holds the runtime's socket.
pub(super) async fn end_restore(driver: &Driver) -> Result<(), AnyError> {
    for made in driver.made() {
        if let Made::Directory(directory) = made {
            end_criu(directory).await?;
        }
    }
    Ok(())
}

/// Ends every CRIU that works in a directory.
pub(super) async fn end_criu(directory: PathBuf) -> Result<(), AnyError> {
    let ended = tokio::task::spawn_blocking(move || {
        // One of them may make another meanwhile. What does not end at all is looked for again.
        for _ in 0..KILLS_MAX {
            let mut found = process::writers(&directory).peekable();
            if found.peek().is_none() {
                break;
            }
            found.try_for_each(process::kill)?;
        }
        Ok::<_, io::Error>(())
    });
    Ok(ended.await??)
}

/// Ends every process of a cgroup, and removes that.
pub(super) async fn end_processes(cgroup: &str) -> Result<(), AnyError> {
    let mut looks = Patience::new(END_LIMIT, LOOK_EVERY);
    while looks.once_more().await {
        let cgroup = cgroup.to_owned();
        if tokio::task::spawn_blocking(move || kill_all(&cgroup)).await?? {
            break;
        }
    }
    Ok(())
}

/// Kills what is in a cgroup. Returns whether nobody was, and then removes it.
fn kill_all(cgroup: &str) -> io::Result<bool> {
    let freezer = Freezer::at(cgroup)?;
    let processes = freezer.kill()?;
    if processes.is_empty() {
        cgroup::remove(cgroup)?;
    } else if freezer.is_frozen().unwrap_or(false) {
        // Whoever is held back does not die before it may run. It may be gone by now, with its cgroup.
        freezer.thaw().unwrap_or_else(|error| tracing::warn!(%error, cgroup, "not thawed"));
    }
    Ok(processes.is_empty())
}

/// Ends a task that may be half restored: CRIU can hang, and containerd answers nothing about the
/// task until it ends. CRIU is in the task's cgroup, so that is emptied first.
pub(super) async fn end_task(
    namespace: &Namespace,
    container: &str,
    cgroup: &str,
) -> Result<(), AnyError> {
    end_processes(cgroup).await?;
    if namespace.task(container).await?.is_some() {
        // A task that has ended cannot be killed, which is fine.
        if let Err(error) = namespace.kill(container).await {
            tracing::debug!(error = %chain(&error), "failed to kill the task");
        }
        let mut looks = Patience::new(END_LIMIT, LOOK_EVERY);
        let mut deleted = Ok(());
        while looks.once_more().await {
            deleted = gone(namespace.delete_task(container).await);
            if deleted.is_ok() {
                break;
            }
        }
        if deleted.is_err() {
            // A shim that cannot be talked to: containerd clears up after one that is gone.
            orphan::end_shims(namespace, container).await?;
        }
        deleted?;
    }
    orphan::remove(namespace, container).await?;
    let cgroup = cgroup.to_owned();
    Ok(tokio::task::spawn_blocking(move || cgroup::remove(&cgroup)).await??)
}
