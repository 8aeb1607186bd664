//! What the kernel says of a container's processes: whether they may run.

use std::io;
use std::path::PathBuf;

use fs_err as fs;

use super::Node;

/// The freezer of a container's cgroup, of whichever version the node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Freezer {
    directory: PathBuf,
    is_v2: bool,
}

impl Node {
    /// Returns the freezer of a container in the namespace `default`; it need not exist.
    pub fn freezer(&self, container: &str) -> Freezer {
        let cgroups = self.path("/sys/fs/cgroup");
        let is_v2 = cgroups.join("cgroup.controllers").exists();
        let hierarchy = if is_v2 { "default" } else { "freezer/default" };
        Freezer { directory: cgroups.join(hierarchy).join(container), is_v2 }
    }
}

impl Freezer {
    /// Returns the cgroup's directory.
    pub fn directory(&self) -> &PathBuf {
        &self.directory
    }

    /// Whether all of it is held back.
    pub fn is_frozen(&self) -> bool {
        if self.is_v2 {
            let events = fs::read_to_string(self.directory.join("cgroup.events"));
            return events.is_ok_and(|events| events.lines().any(|line| line == "frozen 1"));
        }
        self.state().is_ok_and(|state| state.trim() == "FROZEN")
    }

    /// Whether it is there, and nothing of it is to be held back.
    pub fn is_thawed(&self) -> bool {
        self.state().is_ok_and(|state| state.trim() == if self.is_v2 { "0" } else { "THAWED" })
    }

    /// Has the kernel hold it back, or let it go.
    pub fn set(&self, frozen: bool) -> io::Result<()> {
        let word = match (self.is_v2, frozen) {
            (true, true) => "1",
            (true, false) => "0",
            (false, true) => "FROZEN",
            (false, false) => "THAWED",
        };
        fs::write(self.file(), word)
    }

    /// Returns what is asked of the kernel, in its words.
    pub fn state(&self) -> io::Result<String> {
        fs::read_to_string(self.file())
    }

    fn file(&self) -> PathBuf {
        self.directory.join(if self.is_v2 { "cgroup.freeze" } else { "freezer.state" })
    }
}
