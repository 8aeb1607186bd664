//! How a container is, as it says itself and as the kernel says.

use std::collections::BTreeMap;
use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use serde::Deserialize;
use serde_json::Value;

use super::Place;

/// How long a container may take to count on: two cores run many of them.
pub(crate) const LIMIT: Duration = Duration::from_mins(1);

/// Lines of `/proc/PID/status` that say what a process may do.
const FIELDS: [&str; 13] = [
    "Uid",
    "Gid",
    "Groups",
    "NSpid",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Threads",
];

/// What a workload says of itself.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Status {
    /// Made when it began.
    pub(crate) boot: u64,
    pub(crate) count: u64,
    pub(crate) threads: u64,
    /// Nothing, or what it found to be wrong first.
    wrong: String,
}

/// What the kernel says of a container's first process: its rights, and what it sees mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    rights: BTreeMap<String, String>,
    mounts: Vec<String>,
}

impl Place<'_> {
    /// Returns the first process, as the node sees it.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.node.pid_of(self.namespace, self.id)
    }

    /// Reads a file of the container.
    pub(crate) fn read(&self, path: &str) -> Option<String> {
        let path = self.node.path(&format!("/proc/{}/root{path}", self.pid()?));
        fs::read_to_string(path).ok()
    }
}

/// Waits until a workload counts on, and returns what it says: it must be as far as `before`, and
/// nothing about it wrong.
pub(crate) fn goes_on(place: Place<'_>, before: Option<&Status>) -> Status {
    let Some(pid) = place.pid() else { panic!("{}: there is no such task", place.id) };
    let file = place.node.path(&format!("/proc/{pid}/root{}", place.state));
    let mut last = String::new();
    let mut wait_for = |count: u64| {
        let mut found: Option<Status> = None;
        wait_until(LIMIT, || {
            last = fs::read_to_string(&file).unwrap_or_else(|error| error.to_string());
            found = serde_json::from_str(&last).ok();
            found.as_ref().is_some_and(|status| status.count > count)
        });
        match found {
            Some(status) if status.count > count && status.wrong.is_empty() => status,
            _ => panic!("{}: it was to count on from {count}, and says {last}", place.id),
        }
    };
    // What it says now may be from before whatever happened to it.
    let now = wait_for(0);
    let before = before.map_or(0, |before| before.count);
    assert!(now.count >= before, "{}: it was at {before}, and is at {}", place.id, now.count);
    wait_for(now.count + 2)
}

/// Waits until a script has looked at all it has, which it does every 20 ticks.
pub(super) fn is_checked(place: Place<'_>) {
    let begun = goes_on(place, None).count;
    let checked = || goes_on(place, None).count > begun + 20;
    assert!(wait_until(LIMIT, checked), "{}: it does not go on from {begun}", place.id);
}

/// Waits until each thread of a workload has counted on.
pub(super) fn all_count(place: Place<'_>) {
    let slowest = || {
        let said = place.read(place.state).unwrap_or_default();
        serde_json::from_str::<Value>(&said).ok()?["slowest"].as_u64()
    };
    let mut begun = None;
    let on = || {
        let now = slowest();
        begun = begun.or(now);
        now > begun
    };
    assert!(wait_until(LIMIT, on), "{}: a thread has stopped", place.id);
}

impl Identity {
    pub(crate) fn of(place: Place<'_>) -> Self {
        let pid = place.pid().unwrap();
        let read = |name: &str| {
            fs::read_to_string(place.node.path(&format!("/proc/{pid}/{name}"))).unwrap()
        };
        let status = read("status");
        let fields = status.lines().filter_map(|line| line.split_once(":\t"));
        let rights = fields
            .filter(|(name, _)| FIELDS.contains(name))
            // Ids of the node are others each time; the container's own is the last.
            .map(|(name, value)| match name {
                "NSpid" => (name, value.rsplit('\t').next().unwrap_or_default()),
                _ => (name, value),
            })
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        let mut mounts: Vec<String> = read("mountinfo").lines().filter_map(mount).collect();
        mounts.sort_unstable();
        Self { rights, mounts }
    }
}

/// Returns where something is mounted, what it is, and whether it can be written to. What hides files
/// of /proc is one of two file systems that are both empty there.
fn mount(line: &str) -> Option<String> {
    let (mount, rest) = line.split_once(" - ")?;
    let mut words = mount.split(' ').skip(4);
    let (place, options) = (words.next()?, words.next()?);
    let kind = Some(rest.split(' ').next()?).filter(|_| !place.starts_with("/proc/"));
    Some(format!("{place} {} {}", kind.unwrap_or("hidden"), options.split(',').next()?))
}
