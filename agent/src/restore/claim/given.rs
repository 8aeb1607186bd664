//! What an operation puts into a pod's directories is noted for as long as no container has begun with it: nothing
//! starts afresh beside that (`spec/decisions/0078`).

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::super::noted::{self, Note};
use super::super::pod::Pod;
use super::fill::{self, Had};
use super::{Claim, ClaimError, Driven, uses};
use crate::app::{App, Rejection};

/// What was given to a container that has not begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Given {
    operation: String,
    places: Vec<Place>,
}

/// Where something of it may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Place {
    directory: PathBuf,
    /// Before it was given anything.
    had: Had,
}

impl Given {
    /// Reads what is noted beside a container's note.
    fn read(note: &Path) -> io::Result<Option<Self>> {
        match fs::read(noted::given(note)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => Ok(Some(serde_json::from_slice(&read?)?)),
        }
    }

    /// Writes it there.
    fn write(&self, note: &Path) -> io::Result<()> {
        noted::write(&noted::given(note), &serde_json::to_vec(self)?)
    }
}

/// Notes that this operation may put something into these directories from now on.
pub(super) async fn note(driven: Driven<'_>, directories: Vec<PathBuf>) -> Result<(), ClaimError> {
    let Driven { app, driver, claim, pod, .. } = driven;
    if directories.is_empty() {
        return Ok(());
    }
    let own = app.config.restored();
    if claim.restored != own {
        let own = own.display();
        let text = format!(
            "kybernate-runc would not know that the pod's directories are given something: it is older \
             than the agent, or {own} is to be `restored` in /etc/kybernate/runc.toml"
        );
        return Err(Rejection::Invalid(text).into());
    }
    let (operation, note) = (driver.id().to_owned(), pod.note().to_owned());
    let noted = in_background(move || {
        let place = |directory: PathBuf| Ok(Place { had: Had::of(&directory)?, directory });
        let places = directories.into_iter().map(place).collect::<io::Result<_>>()?;
        Given { operation, places }.write(&note)
    });
    noted.await.map_err(ClaimError::Place)
}

/// Notes that all that an operation has put there is gone again.
pub(super) async fn is_gone(note: &Path, operation: &str) {
    if let Err(error) = forget(note, operation).await {
        // The container fails rather than start afresh, and the next try finds nothing there.
        tracing::error!(%error, "failed to note that nothing of a restore is left");
    }
}

/// Forgets what an operation has given, unless that is known no more. Nobody has begun with it: the container was
/// not restored either, whatever its note says.
async fn forget(note: &Path, operation: &str) -> io::Result<()> {
    let (file, operation) = (note.to_owned(), operation.to_owned());
    in_background(move || {
        if Given::read(&file)?.is_none_or(|given| given.operation != operation) {
            return Ok(());
        }
        // First: one without the other would be one that has begun.
        Note { file: file.clone(), operation }.remove()?;
        noted::is_owned(&file)
    })
    .await
}

/// Takes away what an earlier try has given to a pod's container that has not begun with it. Where a container runs
/// that has it, nothing is restored there, nor started afresh.
pub(super) async fn take_back(app: &App, claim: &Claim, pod: &Pod) -> Result<(), ClaimError> {
    let note = pod.note();
    let Some(given) = read(note).await.map_err(ClaimError::Place)? else { return Ok(()) };
    // Without a pod, the same id may be another container, and what is there somebody else's by now.
    let whose = Whose {
        namespace: &claim.namespace,
        created: Some(&claim.container),
        is_ours: pod.starts_again(),
    };
    let left = whose.taken_back(app, note, given).await?;
    if left.is_empty() { Ok(()) } else { Err(ClaimError::Earlier(left)) }
}

/// Takes away what an operation has given that an earlier agent has left. Returns where it stays.
pub(super) async fn take_back_of(
    app: &App,
    (namespace, note, operation): (&str, &Path, &str),
) -> Result<Vec<PathBuf>, ClaimError> {
    match read(note).await.map_err(ClaimError::Place)? {
        Some(given) if given.operation == operation => {
            let whose = Whose { namespace, created: None, is_ours: true };
            whose.taken_back(app, note, given).await
        }
        _ => Ok(Vec::new()),
    }
}

async fn read(note: &Path) -> io::Result<Option<Given>> {
    let note = note.to_owned();
    in_background(move || Given::read(&note)).await
}

/// Whose directories are looked at.
#[derive(Clone, Copy, Debug)]
struct Whose<'a> {
    namespace: &'a str,
    /// Who is being created, and has begun with nothing.
    created: Option<&'a str>,
    /// Whether what is there is known to be of a restore.
    is_ours: bool,
}

impl Whose<'_> {
    /// Takes away what nobody has, and notes what stays. Returns where that is.
    async fn taken_back(
        self,
        app: &App,
        note: &Path,
        given: Given,
    ) -> Result<Vec<PathBuf>, ClaimError> {
        let Given { operation, places } = given;
        let (before, mut left) = (places.len(), Vec::new());
        for place in places {
            if !self.is_taken_back(app, &place).await? {
                left.push(place);
            }
        }
        let directories: Vec<PathBuf> = left.iter().map(|place| place.directory.clone()).collect();
        let noted = if left.is_empty() {
            forget(note, &operation).await
        } else if left.len() < before {
            // What others put there from now on is theirs.
            let (given, note) = (Given { operation, places: left }, note.to_owned());
            in_background(move || given.write(&note)).await
        } else {
            Ok(())
        };
        noted.map_err(ClaimError::Place)?;
        Ok(directories)
    }

    /// Takes away what is in one directory, unless a container runs that has it. Returns whether nothing is there.
    async fn is_taken_back(self, app: &App, place: &Place) -> Result<bool, ClaimError> {
        let Place { directory, had } = place.clone();
        // Before it is looked who has it: what comes later is somebody else's.
        let names = fill::names_in(&directory).await.map_err(ClaimError::Place)?;
        if !names.is_empty() {
            let used = [directory.clone()];
            if !self.is_ours || uses::are_used(app, self.namespace, &used, self.created).await? {
                return Ok(false);
            }
            if !fill::empty_all(vec![(directory.clone(), names)]).await {
                return Ok(false);
            }
        }
        let back = in_background(move || match had.back(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            back => back,
        });
        back.await.map_err(ClaimError::Place)?;
        Ok(true)
    }
}

async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_given_is_forgotten_with_its_operation() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("uid.main");
        let had = Had::of(directory.path()).unwrap();
        let by = |operation: &str| {
            let places = vec![Place { directory: "/shm".into(), had }];
            Given { operation: operation.to_owned(), places }
        };
        assert_eq!(read(&note).await.unwrap(), None);
        by("7").write(&note).unwrap();
        assert_eq!(read(&note).await.unwrap(), Some(by("7")));
        forget(&note, "6").await.unwrap();
        assert!(read(&note).await.unwrap().is_some(), "another one's");
        // It was created, and never started.
        let restored = || Note { file: note.clone(), operation: "7".to_owned() };
        restored().write().unwrap();
        forget(&note, "7").await.unwrap();
        assert!(!noted::given(&note).exists() && !note.exists());
        // What was restored before is not forgotten, nor what has begun.
        restored().write().unwrap();
        by("8").write(&note).unwrap();
        forget(&note, "8").await.unwrap();
        assert!(!noted::given(&note).exists() && note.exists());
        forget(&note, "7").await.unwrap();
        assert!(note.exists());
        fs::write(noted::given(&note), "{").unwrap();
        read(&note).await.unwrap_err();
    }
}
