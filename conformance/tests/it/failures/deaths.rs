//! Who dies in the middle of a checkpoint, and when: the source runs on, whatever the moment.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::{Process, Service};
use kybernate_conformance::scenario::{Agent, Scenario};
use serde_json::Value;

use super::is;
use crate::harness::{checkpoint, said, start};

/// The longest pause that is asked for.
const DEADLINE: Duration = Duration::from_secs(8);
/// What a tick and its being seen may take on top of it, on a loaded machine.
const SLACK: Duration = Duration::from_secs(4);
/// After a moment is seen, at most this passes before someone dies.
const JITTER_MICROS: u64 = 4000;
/// The workload's memory: long enough to dump that moments can be told apart.
const MIB: u32 = 96;

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The agent, and nobody starts it again for now.
    AgentForGood,
    /// The agent, and it is started again at once.
    Agent,
}

/// A moment in the life of a checkpoint: what it is called, and how it shows.
type Moment = (&'static str, fn(&Dump) -> bool);

/// In order of appearance. The words are CRIU's, in its log.
const MOMENTS: [Moment; 13] = [
    ("a place is made", |dump| dump.directory().is_some()),
    ("the container is frozen", |dump| dump.froze()),
    ("CRIU begins", |dump| dump.file("work/dump.log").is_some()),
    ("CRIU has read the freezer", |dump| dump.says("freezer.state=")),
    ("CRIU seizes", |dump| dump.says("Seized task")),
    ("CRIU locks the network", |dump| dump.says("Lock network")),
    ("CRIU begins to write memory", |dump| dump.written() > 0),
    ("CRIU has written some memory", |dump| dump.written() > u64::from(MIB) << 18),
    ("CRIU unlocks the network", |dump| dump.says("Unlock network")),
    ("CRIU lets go", |dump| dump.says("Unfreezing tasks")),
    ("CRIU is done", |dump| dump.says("Dumping finished")),
    ("files are captured", |dump| dump.file("rootfs.tar").is_some()),
    ("the container is resumed", |dump| dump.file("rootfs.tar").is_some() && !dump.froze()),
];

/// A checkpoint under way, looked at from outside: nothing here enters the node, so that a look
/// takes microseconds.
struct Dump {
    stage: PathBuf,
    freezer: PathBuf,
    state: PathBuf,
}

impl Dump {
    fn of(node: &Node, id: &str) -> Self {
        let state = "/run/containerd/io.containerd.runtime.v2.task/default";
        Self {
            stage: node.path("/run/kybernate/stage"),
            freezer: node.path(&format!("/sys/fs/cgroup/freezer/default/{id}/freezer.state")),
            state: node.path(&format!("{state}/{id}/rootfs/state/status.json")),
        }
    }

    fn directory(&self) -> Option<PathBuf> {
        fs::read_dir(&self.stage).ok()?.find_map(Result::ok).map(|entry| entry.path())
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        self.directory().map(|directory| directory.join(name)).filter(|file| file.exists())
    }

    fn says(&self, words: &str) -> bool {
        let log = self.file("work/dump.log").and_then(|log| fs::read(log).ok());
        log.is_some_and(|log| String::from_utf8_lossy(&log).contains(words))
    }

    fn written(&self) -> u64 {
        let pages = self.file("images/pages-1.img").and_then(|pages| fs::metadata(pages).ok());
        pages.map_or(0, |pages| pages.len())
    }

    fn froze(&self) -> bool {
        fs::read_to_string(&self.freezer).is_ok_and(|state| state.trim() != "THAWED")
    }

    fn counter(&self) -> Option<u64> {
        let status: Value = serde_json::from_slice(&fs::read(&self.state).ok()?).ok()?;
        status["counter"].as_u64()
    }
}

/// Waits for a moment as closely as this machine can, and a random instant longer.
fn catch(what: impl Fn() -> bool) -> bool {
    let end = Instant::now() + DEADLINE;
    while !what() {
        if Instant::now() > end {
            return false;
        }
        std::thread::yield_now();
    }
    let random = RandomState::new().hash_one(0);
    let end = Instant::now() + Duration::from_micros(random % JITTER_MICROS);
    while Instant::now() < end {
        std::hint::spin_loop();
    }
    true
}

/// Returns the processes in a node whose command line `fits`.
fn processes(node: &Node, fits: impl Fn(&str) -> bool) -> Vec<Process> {
    let space = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = space(node.init().pid);
    let pids = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| space(*pid) == own)
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            fits(&String::from_utf8_lossy(&line).replace('\0', " "))
        })
        .filter_map(Process::find)
        .collect()
}

fn is_criu(line: &str) -> bool {
    let program = line.split(' ').next().unwrap_or_default();
    Path::new(program).file_name().is_some_and(|name| name == "criu")
}

/// One node with a container that is to outlive everybody.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    agent: Option<Agent>,
    dump: Dump,
}

impl<'a> Place<'a> {
    fn new(scenario: &'a Scenario, node: &'a Node, agent: Option<Agent>) -> Self {
        scenario.run_workload(node, "job", MIB, &[]).unwrap();
        Self { scenario, node, agent, dump: Dump::of(node, "job") }
    }

    /// Takes a checkpoint in whose middle someone dies, and looks at what that left.
    fn round(&mut self, victim: Victim, (name, reached): Moment) {
        let what = format!("{victim:?} on {}, when {name}", self.node.name());
        let reference = self.scenario.reference(&format!("deaths/{}:cut", self.node.name()));
        let key = format!("node-{}", self.node.name());
        let deadline = format!("{}s", DEADLINE.as_secs());
        let words = ["kyb", "checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let mut kyb = self.node.command(&[&words[..], &["--pause-deadline", &deadline]].concat());
        let kyb = Service::start(kyb.stderr(std::process::Stdio::null())).unwrap();
        assert!(catch(|| reached(&self.dump)), "{what}: it did not come to that");
        let before = self.dump.counter();
        let began = Instant::now();
        self.agent.take().unwrap().kill();
        if victim == Victim::Agent {
            self.start_agent();
        }
        self.runs_on(before, &what);
        println!("{what}: ran on after {:?}", began.elapsed());
        drop(kyb);
        if victim == Victim::AgentForGood {
            self.start_agent();
        }
        assert_eq!(self.dump.directory(), None, "{what}: a dump is left");
        let reference = self.scenario.reference(&format!("deaths/{}:next", self.node.name()));
        checkpoint(self.scenario, self.node, "job", &reference);
        self.runs_on(self.dump.counter(), &what);
    }

    fn start_agent(&mut self) {
        self.agent = Some(self.scenario.start_agent(self.node, "").unwrap());
    }

    /// Waits until everybody who brings the container back has done so, and looks for traces.
    fn runs_on(&self, before: Option<u64>, what: &str) {
        let next = before.map(|counter| counter + 2);
        let ticks = wait_until(DEADLINE + SLACK, || self.dump.counter() >= next);
        let told = || self.told(what);
        assert!(ticks, "{what}: it does not run\n{}", told());
        let guards = |line: &str| line.contains(" guardian ");
        let gone = wait_until(DEADLINE + SLACK, || processes(self.node, guards).is_empty());
        assert!(gone, "{what}: its guardian does not end\n{}", told());
        // Whoever would have frozen it again has ended by now.
        assert_eq!(processes(self.node, is_criu), [], "{what}: a CRIU is left\n{}", told());
        assert!(!self.dump.froze(), "{what}: it is frozen\n{}", told());
        assert!(is(self.node, "job", "RUNNING"), "{what}: containerd disagrees\n{}", told());
        assert_eq!(self.locks(), "", "{what}: its network is locked\n{}", told());
    }

    /// Returns CRIU's rules in the container's network.
    fn locks(&self) -> String {
        let script = "pid=$(ctr task ls | awk '$1 == \"job\" { print $2 }'); \
            nsenter -t \"$pid\" -n sh -c 'iptables -S; ip6tables -S; nft list tables' | grep CRIU";
        said(&self.node.output(&["sh", "-c", script]).unwrap())
    }

    fn told(&self, what: &str) -> String {
        let script = "tail -n 20 /var/lib/kybernate/guardian.log; ctr task ls; \
            find /run/kybernate/stage -name dump.log -exec tail -n 5 {} +";
        format!("{what}:\n{}", said(&self.node.output(&["sh", "-c", script]).unwrap()))
    }
}

/// Runs `rounds` on both nodes at a time.
fn on_both(mut scenario: Scenario, rounds: impl Fn(&mut Place<'_>) + Sync) {
    let (a, b) = (scenario.agent_a.take(), scenario.agent_b.take());
    std::thread::scope(|scope| {
        let (scenario, rounds) = (&scenario, &rounds);
        for (node, agent) in [(&scenario.testbed.a, a), (&scenario.testbed.b, b)] {
            scope.spawn(move || {
                let mut place = Place::new(scenario, node, agent);
                rounds(&mut place);
                place.scenario.wait_for_ticks(node, "job").unwrap();
            });
        }
    });
    scenario.end().unwrap();
}

#[test]
fn the_source_runs_on_whenever_the_agent_dies() {
    on_both(start(), |place| {
        for moment in MOMENTS {
            for victim in [Victim::AgentForGood, Victim::Agent] {
                place.round(victim, moment);
            }
        }
    });
}
