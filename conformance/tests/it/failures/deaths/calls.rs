//! CRIU hangs in one of its calls while it has a process work for it, and is ended there: the source is as it
//! was, to the signals that it has blocked and to its code.

use std::os::unix::fs::{FileExt as _, PermissionsExt};
use std::path::Path;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;

use super::{Place, SLACK, Way, catch};
use crate::harness::{self, library, start};

/// Enough for CRIU to come there on a loaded machine.
const DEADLINE: &str = "5s";

/// Where CRIU stops: behind how many calls after it had the process go on for the third time. Then what it
/// has mapped is there, and the process closes a file for it: how that ends, and how the next one begins.
const CONTINUED: u32 = 3;
const CALLS: std::ops::Range<u32> = 0..11;

/// What CRIU changes of a process's for a moment.
#[derive(Debug, PartialEq, Eq)]
struct State {
    pid: String,
    /// What each thread has blocked.
    blocked: Vec<String>,
    /// Its first code.
    code: [u8; 16],
}

impl State {
    /// Whether a thread has something blocked. This program has not, but for one that begins: it has everything
    /// blocked until it runs (`pthread_create(3)`).
    fn blocks(&self) -> bool {
        self.blocked.iter().any(|signals| !signals.ends_with("\t0000000000000000"))
    }

    /// Of the processes in the node's container.
    fn of(place: &Place<'_>) -> Vec<Self> {
        let processes = place.dump.freezer.directory().join("cgroup.procs");
        let processes = fs::read_to_string(processes).unwrap();
        let mut states: Vec<_> = processes.lines().map(Self::of_process).collect();
        states.sort_by(|one, other| one.pid.cmp(&other.pid));
        states
    }

    fn of_process(pid: &str) -> Self {
        let own = Path::new("/proc").join(pid);
        let threads = fs::read_dir(own.join("task")).unwrap();
        let blocked = threads.map(|thread| {
            let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
            status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
        });
        let blocked = blocked.collect();
        let maps = fs::read_to_string(own.join("maps")).unwrap();
        let is_code = |line: &&str| line.contains(" r-xp ");
        let begin = maps.lines().find(is_code).unwrap().split('-').next().unwrap();
        let mut code = [0; 16];
        let memory = fs::File::open(own.join("mem")).unwrap().into_file();
        memory.read_exact_at(&mut code, u64::from_str_radix(begin, 16).unwrap()).unwrap();
        Self { pid: pid.to_owned(), blocked, code }
    }
}

/// Has a node's CRIU stop where it is told to.
fn install(node: &Node) {
    library("criu/stopper.rs", &node.path("/usr/lib/criu-stopper.so"));
    let own = node.run(&["sh", "-c", "command -v criu"]).unwrap();
    let own = node.path(own.trim());
    fs::create_dir_all(node.path("/usr/lib/stopped")).unwrap();
    fs::rename(&own, node.path("/usr/lib/stopped/criu")).unwrap();
    let script =
        "#!/bin/sh\nLD_PRELOAD=/usr/lib/criu-stopper.so exec /usr/lib/stopped/criu \"$@\"\n";
    fs::write(&own, script).unwrap();
    fs::set_permissions(&own, PermissionsExt::from_mode(0o755)).unwrap();
}

impl Place<'_> {
    /// Takes a checkpoint whose CRIU hangs behind a call.
    fn hangs(&self, calls: u32) {
        let what = format!("behind call {calls} on {}", self.node.name());
        let begun = || !State::of(self).iter().any(State::blocks);
        assert!(wait_until(SLACK, begun), "{what}: {:?}", State::of(self));
        let before = State::of(self);
        let stopped = self.node.path("/run/criu-stopped");
        fs::write(self.node.path("/run/criu-stops"), format!("{CONTINUED} {calls}")).unwrap();
        let tag = format!("deaths/{}:{calls}", self.node.name());
        let mut kyb = self.ask(&tag, &["--pause-deadline", DEADLINE]);
        let mut ended = None;
        let caught = catch(|| {
            ended = kyb.try_wait().unwrap();
            ended.is_some() || stopped.exists()
        });
        assert!(caught && ended.is_none(), "{what}: it did not come to that\n{}", self.told());
        fs::remove_file(stopped).unwrap();
        let counter = self.dump.counter();
        assert!(!kyb.wait().unwrap().success(), "{what}: its pause was not cut short");
        self.ticks(counter, &what);
        self.runs_on(&what);
        let agent = format!("agent-{}.log", self.node.name());
        let agent = self.scenario.testbed.private().join(agent);
        for log in [self.node.path("/var/lib/kybernate/guardian.log"), agent] {
            let log = fs::read_to_string(log).unwrap();
            assert!(!log.contains("bad moment"), "{what}: {log}");
        }
        assert_eq!(State::of(self), before, "{what}\n{}", self.told());
    }
}

#[test]
fn the_source_is_as_it_was_wherever_criu_hangs() {
    let mut scenario = start();
    harness::on_both(&mut scenario, |scenario, node, agent| {
        install(node);
        let place = Place::new(scenario, node, Some(agent), Way::default());
        let half = usize::from(node.name() == "b");
        for calls in CALLS.skip(half).step_by(2) {
            place.hangs(calls);
            // CRIU's own code may have stayed, which no CRIU can dump.
            scenario.remove(node, "job").unwrap();
            place.begin();
        }
    });
    scenario.end().unwrap();
}
