//! What is noted about a pod's container, for who creates it again, until its pod is gone. Two files:
//!
//! - kybernate-runc notes for the agent, when the container runs, the identifier of the operation that
//!   restored it, or, when it is started, that it began afresh;
//! - the agent notes for kybernate-runc, before it puts anything into the pod's directories, which operation
//!   does that, and where. It is there for as long as something may be there that no container has begun with:
//!   it goes with what was given, or when kybernate-runc starts the container.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::stage;

/// What the note of a container says that began afresh, since it could not be restored.
pub(crate) const AFRESH: &str = "afresh";

/// How the names of those notes end that say what was given. No id ends so: a tilde is no part of one.
const GIVEN: &str = ".given~";

/// A note: written whole or not at all, and there when the machine comes back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Note {
    pub(crate) file: PathBuf,
    /// Of this one, and of no restore before.
    pub(crate) operation: String,
}

impl Note {
    /// Writes it.
    pub(crate) fn write(&self) -> io::Result<()> {
        write(&self.file, self.operation.as_bytes())
    }

    /// Removes it, unless it is another one's.
    pub(crate) fn remove(&self) -> io::Result<()> {
        match fs::read_to_string(&self.file) {
            Ok(text) if text == self.operation => remove(&self.file),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

/// Returns the file beside a container's note that says that it was given something: nothing starts afresh
/// while it is there.
pub(crate) fn given(note: &Path) -> PathBuf {
    let mut name = note.file_name().unwrap_or_default().to_owned();
    name.push(GIVEN);
    note.with_file_name(name)
}

/// Notes that the container begins with what is there: all of it is its own from now on.
pub(crate) fn is_owned(note: &Path) -> io::Result<()> {
    match remove(&given(note)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns whose a note is by its name, of either kind.
pub(super) fn whose(name: &str) -> &str {
    name.strip_suffix(GIVEN).unwrap_or(name)
}

/// Writes a file whole or not at all, durably.
pub(super) fn write(file: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(directory) = file.parent() {
        stage::make(directory)?;
    }
    let new = file.with_added_extension("~");
    let written = fs::File::create(&new).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    let written = written.and_then(|()| fs::rename(&new, file));
    if written.is_err() {
        // Nobody takes it for one.
        fs::remove_file(&new).unwrap_or_default();
    }
    written.and_then(|()| sync(file))
}

fn remove(file: &Path) -> io::Result<()> {
    fs::remove_file(file)?;
    sync(file)
}

/// Has what was done to a file's name outlive the machine.
fn sync(file: &Path) -> io::Result<()> {
    let directory = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::File::open(directory)?.sync_all()
}

/// Returns the name of such a note; `None` when the words are none of Kubernetes'.
pub(crate) fn name(pod_uid: &str, container: &str) -> Option<String> {
    let all = is_plain(pod_uid) && is_plain(container);
    all.then(|| format!("{pod_uid}.{container}"))
}

/// Whether something can be part of a file's name.
pub(super) fn is_plain(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !text.is_empty() && text.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_in_its_own_directory() {
        assert_eq!(name("0-1", "web").as_deref(), Some("0-1.web"));
        for (uid, container) in
            [("..", "web"), ("", "web"), ("a/b", "web"), ("0-1", "../x"), ("0-1", "")]
        {
            assert_eq!(name(uid, container), None, "{uid:?} {container:?}");
        }
    }

    #[test]
    fn a_note_is_whole_and_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("uid.main");
        let note = |operation: &str| Note { file: file.clone(), operation: operation.to_owned() };
        note("7").write().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "7");
        note("6").remove().unwrap();
        assert!(file.exists(), "another one's");
        note("7").remove().unwrap();
        note("7").remove().unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        // Where it cannot be put in its place, nothing is left that looks like one.
        fs::create_dir(&file).unwrap();
        note("7").write().unwrap_err();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_was_given_is_noted_beside() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("uid.main");
        write(&given(&note), b"7").unwrap();
        let names = fs::read_dir(directory.path()).unwrap().map(|one| one.unwrap().file_name());
        let names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        assert_eq!(names, ["uid.main.given~"]);
        assert_eq!((whose(&names[0]), whose("uid.main")), ("uid.main", "uid.main"));
        is_owned(&note).unwrap();
        is_owned(&note).unwrap();
        assert!(!given(&note).exists());
    }
}
