//! Notes of uploads under way, so that the next run goes on where a killed one stopped.
//!
//! One small file per blob and place, only for its owner, since what it holds lets anybody write to
//! the upload. It is locked while somebody works on that upload; another who wants to send the same
//! blob begins an upload of its own.

use std::fmt;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use kybernate_spec::Digest;
use reqwest::Url;
use rustix::fs::FlockOperation;

use crate::pack::upload::blocking;

/// Longest address kept. docker-registry's have some 500 bytes.
const BYTES_MAX: u64 = 16 << 10;

/// Registries forget an upload after a week at most.
const LIFE: Duration = Duration::from_hours(7 * 24);

/// Where notes are.
#[derive(Clone, Debug)]
pub(super) struct Notes {
    directory: PathBuf,
}

/// The note of one upload, ours alone until it is dropped.
pub(super) struct Note {
    file: fs::File,
    session: Option<Url>,
}

impl fmt::Debug for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Note").field("path", &self.file.path()).finish_non_exhaustive()
    }
}

impl Notes {
    pub(super) fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Takes the note of an upload; nothing when somebody else has it, or notes cannot be kept:
    /// then the upload is begun from its beginning.
    pub(super) async fn take(&self, upload: &str) -> Option<Note> {
        let (directory, name) = (self.directory.clone(), Digest::of(upload.as_bytes()));
        match blocking(move || take(&directory, name.hex())).await {
            Ok(note) => note,
            Err(error) => {
                tracing::debug!(%error, "uploads are not noted");
                None
            }
        }
    }
}

impl Note {
    /// Returns where the upload goes on, when it was begun before.
    pub(super) fn session(&self) -> Option<Url> {
        self.session.clone()
    }

    /// Notes where the upload goes on.
    pub(super) async fn write(&mut self, session: &Url) {
        self.session = Some(session.clone());
        let text = session.to_string();
        let file = self.file.try_clone();
        let written = blocking(move || {
            let mut file = file?;
            file.set_len(0)?;
            file.rewind()?;
            file.write_all(text.as_bytes())
        });
        if let Err(error) = written.await {
            tracing::debug!(%error, "an upload is not noted");
        }
    }

    /// Removes the note of an upload that has ended.
    pub(super) async fn forget(self) {
        let removed = blocking(move || fs::remove_file(self.file.path())).await;
        if let Err(error) = removed {
            tracing::debug!(%error, "a note of an upload stays");
        }
    }
}

fn take(directory: &Path, name: &str) -> io::Result<Option<Note>> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    forget_old(directory)?;
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.options_mut().mode(0o600).custom_flags(no_follow());
    let mut file = options.open(directory.join(name))?;
    match rustix::fs::flock(file.file(), FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let mut text = String::new();
    io::Read::by_ref(&mut file).take(BYTES_MAX).read_to_string(&mut text)?;
    let session = Url::parse(&text).ok();
    Ok(Some(Note { file, session }))
}

/// Removes notes of uploads that no registry knows any more.
fn forget_old(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let modified = entry.metadata()?.modified()?;
        if modified.elapsed().is_ok_and(|age| age > LIFE) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn no_follow() -> i32 {
    i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn a_note_is_its_takers_and_survives() {
        let scratch = tempfile::tempdir().unwrap();
        let notes = Notes::at(&scratch.path().join("notes"));
        let url = Url::parse("http://localhost/v2/a/b/blobs/uploads/secret?_state=x").unwrap();
        let mut note = notes.take("upload").await.unwrap();
        assert_eq!(note.session(), None);
        note.write(&url).await;
        assert!(!format!("{note:?}").contains("secret"));
        assert!(notes.take("upload").await.is_none(), "somebody else has it");
        assert!(notes.take("other").await.is_some());
        drop(note);
        let note = notes.take("upload").await.unwrap();
        assert_eq!(note.session(), Some(url));
        let path = note.file.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        note.forget().await;
        assert!(!path.exists());
    }
}
