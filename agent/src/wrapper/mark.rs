//! What the wrapper remembers of a container between two calls: that it was restored, so that `start`
//! has nothing to do, or that a restore was begun, so that what a killed one left is ended.

use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::call::Call;
use super::settings::Settings;
use crate::restore::noted::Note;
use crate::stage;

/// One container's mark, a file.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    file: PathBuf,
}

/// What a mark says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    /// Whether it runs; a restore is under way otherwise, or was when the wrapper was killed.
    pub(super) restored: bool,
    /// Where its processes are.
    pub(super) cgroup: Option<String>,
    /// The network namespace that it was given, which outlives it.
    #[serde(default)]
    pub(super) network: Option<PathBuf>,
    /// The note that it was restored, where it has not been started yet: until then nobody has it.
    #[serde(default)]
    pub(super) unstarted: Option<Note>,
    /// Of one that could not be restored, and begins afresh when it is started: what says so then.
    #[serde(default)]
    pub(super) afresh: Option<Note>,
}

impl State {
    /// One that is to be restored, in a cgroup and with a network namespace.
    pub(super) const fn begun(cgroup: Option<String>, network: Option<PathBuf>) -> Self {
        Self { restored: false, cgroup, network, unstarted: None, afresh: None }
    }
}

impl Mark {
    /// Returns the mark of a container; ids are those of one `--root`.
    pub(super) fn of(settings: &Settings, call: &Call<'_>, id: &str) -> Self {
        // A name for each root: as it is, but for the bytes that no name has.
        let mut root = "root".to_owned();
        for byte in call.root.as_os_str().as_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => {
                    root.push(char::from(*byte));
                }
                other => root.extend(["%".to_owned(), format!("{other:02x}")]),
            }
        }
        Self { file: settings.state.join(root).join(id) }
    }

    /// Returns what it says; `None` when there is none.
    pub(super) fn read(&self) -> io::Result<Option<State>> {
        match fs::read(&self.file) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes it, whole.
    pub(super) fn write(&self, state: &State) -> io::Result<()> {
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        stage::make(directory)?;
        // No id ends so: a tilde is no part of one.
        let new = self.file.with_added_extension("~");
        let mut file = fs::File::create(&new)?;
        file.write_all(&serde_json::to_vec(state)?)?;
        fs::rename(new, &self.file)
    }

    /// Removes it, if it is there.
    pub(super) fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn ids_of_two_roots_are_two() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings { state: directory.path().into(), ..Settings::default() };
        let mark = |root: &str| {
            let words = ["--root", root, "start", "c"].map(OsString::from);
            Mark::of(&settings, &Call::parse(&words).unwrap(), "c")
        };
        let (one, other) = (mark("/run/a/b"), mark("/run/a%2fb"));
        let cgroup = Some("/k/c".into());
        let state = State { restored: true, cgroup, network: None, unstarted: None, afresh: None };
        one.write(&state).unwrap();
        // As an earlier version wrote them.
        let earlier = serde_json::from_str::<State>(r#"{"restored":true,"cgroup":"/k/c"}"#);
        assert_eq!(earlier.unwrap(), state);
        assert_eq!(one.read().unwrap(), Some(state));
        assert_eq!(other.read().unwrap(), None);
        one.remove().unwrap();
        one.remove().unwrap();
        assert_eq!(one.read().unwrap(), None);
    }
}
