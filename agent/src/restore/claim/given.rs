//! What an operation puts into a pod's directories is noted for as long as no container has begun with it: nothing
//! starts afresh beside that (`spec/decisions/0078`).

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::super::noted::Given;
use super::super::pod::Pod;
use super::{Claim, ClaimError, Driven, fill, uses};
use crate::app::{App, Rejection};

/// Notes that this operation may put something into these directories from now on.
pub(super) async fn note(driven: Driven<'_>, directories: Vec<PathBuf>) -> Result<(), ClaimError> {
    let Driven { driver, claim, pod, .. } = driven;
    if directories.is_empty() {
        return Ok(());
    }
    if !claim.heeds_given {
        let text = "kybernate-runc is older than the agent, and could start afresh beside what the \
                    pod's directories are given";
        return Err(Rejection::Invalid(text.to_owned()).into());
    }
    let given = Given { operation: driver.id().to_owned(), directories };
    let note = pod.note().to_owned();
    in_background(move || given.write(&note)).await.map_err(ClaimError::Place)
}

/// Notes that all that an operation has put there is gone again.
pub(super) async fn is_gone(note: &Path, operation: &str) {
    let given = Given { operation: operation.to_owned(), directories: Vec::new() };
    let note = note.to_owned();
    if let Err(error) = in_background(move || given.is_gone(&note)).await {
        // The container fails rather than start afresh.
        tracing::error!(%error, "failed to note that nothing of a restore is left");
    }
}

/// Returns where an operation that an earlier agent has left has put something that no container has begun with.
pub(super) async fn by(note: &Path, operation: &str) -> io::Result<Vec<PathBuf>> {
    let note = note.to_owned();
    let given = in_background(move || Given::read(&note)).await?;
    let given = given.filter(|given| given.operation == operation);
    Ok(given.map(|given| given.directories).unwrap_or_default())
}

/// Takes away what an earlier operation has given to a pod's container that has not begun with it, where no
/// container runs that has it. Where it stays, nothing can be restored there either.
pub(super) async fn take_back(app: &App, claim: &Claim, pod: &Pod) -> Result<(), ClaimError> {
    let note = pod.note().to_owned();
    let given = in_background(move || Given::read(&note)).await.map_err(ClaimError::Place)?;
    let Some(Given { operation, directories }) = given else { return Ok(()) };
    let created = Some(&*claim.container);
    let is_clear = if pod.starts_again() {
        !uses::are_used(app, &claim.namespace, &directories, created).await?
            && fill::empty_all(directories.clone()).await
    } else {
        // The same id may be another container, and what is there somebody else's by now.
        let looked = directories.clone();
        in_background(move || are_empty(&looked)).await.map_err(ClaimError::Place)?
    };
    if is_clear {
        is_gone(pod.note(), &operation).await;
    } else {
        let container = &claim.container;
        tracing::warn!(container, ?directories, "what an earlier restore was given is still there");
    }
    Ok(())
}

/// Whether nothing is in any of these directories.
fn are_empty(directories: &[PathBuf]) -> io::Result<bool> {
    let mut empty = true;
    for directory in directories {
        match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            entries => empty &= entries?.next().is_none(),
        }
    }
    Ok(empty)
}

async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_empty() {
        let top = tempfile::tempdir().unwrap();
        let [gone, there] = ["gone", "there"].map(|name| top.path().join(name));
        fs::create_dir(&there).unwrap();
        assert!(are_empty(&[gone.clone(), there.clone()]).unwrap());
        assert!(!are_empty(&[gone, there, top.path().to_owned()]).unwrap());
    }
}
