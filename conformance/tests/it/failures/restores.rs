//! Who dies in the middle of a restore, and when: the container runs, or nothing is left of it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;
use serde_json::Value;

use super::halt::halt;
use super::victims::{END_LIMIT, catch, dither, running, signal};
use crate::harness::{self, checkpoint, restore, said, start};

/// Enough that the memory comes in more than one look.
const MIB: u32 = 96;
/// Lets CRIU stand still for a shorter time than the half hour that it has.
const STALL: &str = "restore_stall = \"5s\"\n";
/// How the restored container is called.
const NAME: &str = "back";

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// containerd, and it is started again at once.
    Containerd,
    /// containerd, and it is started again when the agent has tried to clean up.
    ContainerdForGood,
    /// The agent, and it is started again at once.
    Agent,
    /// The agent, and it is started again when everybody else has ended.
    AgentForGood,
    /// Both, and both are started again at once.
    Both,
    /// kyb.
    Kyb,
    /// CRIU alone: whom it has made already lives in the container's PID namespace.
    Criu,
}

/// A moment in the life of a restore: what it is called, and how it shows.
type Moment = (&'static str, fn(&Traces) -> bool);

/// In order of appearance. The words are CRIU's, in its log.
const MOMENTS: [Moment; 6] = [
    ("a place is made", |traces| traces.directory().is_some()),
    ("the memory comes", |traces| traces.file("images/pages-1.img").is_some()),
    ("the task is made", |traces| traces.bundle.exists()),
    ("CRIU begins", |traces| traces.file("work/restore.log").is_some()),
    ("CRIU forks", |traces| traces.says("Forking task with")),
    ("CRIU lets go", |traces| traces.says("Restore via sigreturn")),
];

/// A restore under way, looked at from outside.
struct Traces {
    stage: PathBuf,
    bundle: PathBuf,
}

impl Traces {
    fn of(node: &Node) -> Self {
        let bundle = "/run/containerd/io.containerd.runtime.v2.task/default";
        Self {
            stage: node.path("/run/kybernate/stage"),
            bundle: node.path(&format!("{bundle}/{NAME}")),
        }
    }

    fn directory(&self) -> Option<PathBuf> {
        fs::read_dir(&self.stage).ok()?.find_map(Result::ok).map(|entry| entry.path())
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        self.directory().map(|directory| directory.join(name)).filter(|file| file.exists())
    }

    fn says(&self, words: &str) -> bool {
        let log = self.file("work/restore.log").and_then(|log| fs::read(log).ok());
        log.is_some_and(|log| String::from_utf8_lossy(&log).contains(words))
    }
}

/// A node on which a checkpoint is restored again and again.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    agent: Option<Agent>,
    reference: String,
    traces: Traces,
    /// What is there between restores.
    before: String,
    cut: u32,
}

impl<'a> Place<'a> {
    fn new(
        scenario: &'a Scenario,
        node: &'a Node,
        agent: Option<Agent>,
        reference: String,
    ) -> Self {
        let (traces, before) = (Traces::of(node), String::new());
        let mut place = Self { scenario, node, agent, reference, traces, before, cut: 0 };
        // The first one leaves the image and its layers.
        place.restores("first");
        place.before = place.left();
        place
    }

    /// Starts a restore in whose middle someone dies, and looks at what that leaves.
    fn round(&mut self, victim: Victim, moment: Moment) {
        let (name, reached) = moment;
        let what = format!("{victim:?} on {}, when {name}", self.node.name());
        let mut kyb = self.begin();
        let mut ended = false;
        let caught = catch(|| {
            ended = kyb.try_wait().unwrap().is_some();
            ended || reached(&self.traces)
        });
        assert!(caught, "{what}: it did not come to that\n{}", self.told());
        dither();
        self.dies(victim, &mut kyb, &what);
        let done = self.settles(&what);
        wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
        let status = kyb.try_wait().unwrap();
        let status = status.unwrap_or_else(|| panic!("{what}: kyb waits\n{}", self.told()));
        println!("{what}: done: {done}, kyb: {status}");
        self.cut += u32::from(!done);
        if done {
            self.scenario.wait_for_ticks(self.node, NAME).unwrap();
            self.scenario.remove(self.node, NAME).unwrap();
        } else {
            assert!(!status.success(), "{what}: kyb calls it a success");
        }
        self.is_clean(&what);
        self.restores(&what);
        self.is_clean(&what);
    }

    fn begin(&self) -> Child {
        let words = ["kyb", "restore", &self.reference, "--plain-http", "--name", NAME];
        let log = fs::File::create(self.words()).unwrap().into_parts().0;
        let mut kyb = self.node.command(&words);
        kyb.stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn dies(&mut self, victim: Victim, kyb: &mut Child, what: &str) {
        match victim {
            Victim::Containerd => {
                signal(&running(self.node, "containerd"), Signal::KILL);
                self.start_containerd();
            }
            Victim::ContainerdForGood => {
                signal(&running(self.node, "containerd"), Signal::KILL);
                // It stays open, and says what it is at, until containerd is there again; unless it was
                // done just before.
                let mut last = None;
                let undoing = wait_until(END_LIMIT, || {
                    last = self.operations().pop();
                    last.as_ref()
                        .is_some_and(|last| last["state"] != "running" || last["step"] == "undo")
                });
                let state = last.as_ref().map(|last| &last["state"]);
                let fits = undoing && state.is_some_and(|it| *it == "running" || *it == "done");
                assert!(fits, "{what}: without containerd: {last:?}\n{}", self.told());
                self.start_containerd();
            }
            Victim::Agent => {
                self.agent.take().unwrap().kill();
                self.start_agent();
            }
            Victim::AgentForGood => {
                self.agent.take().unwrap().kill();
                let ends = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
                assert!(ends, "{what}: kyb waits for a dead agent");
                let idle = || running(self.node, "criu").is_empty();
                assert!(wait_until(END_LIMIT, idle), "{what}: a CRIU is left");
                self.start_agent();
            }
            Victim::Both => {
                self.agent.take().unwrap().kill();
                signal(&running(self.node, "containerd"), Signal::KILL);
                self.start_containerd();
                self.start_agent();
            }
            Victim::Kyb => signal(&running(self.node, "kyb"), Signal::KILL),
            Victim::Criu => signal(&running(self.node, "criu"), Signal::KILL),
        }
    }

    /// Has CRIU hang, stopped or with its whole cgroup frozen: it is ended when it has stood still for
    /// as long as it may, and leaves nothing.
    fn hangs(&mut self, frozen: bool) {
        let what = format!("CRIU hangs on {}, frozen: {frozen}", self.node.name());
        let mut kyb = self.begin();
        let begun = || self.traces.file("work/restore.log").is_some();
        let criu = halt(self.node, begun, begun);
        if frozen {
            // Its name has the operation's in it.
            let all = self.node.path("/sys/fs/cgroup/freezer/default");
            let own = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(NAME);
            let cgroup = fs::read_dir(all).unwrap().map(Result::unwrap).find(own).unwrap();
            fs::write(cgroup.path().join("freezer.state"), "FROZEN").unwrap();
            signal(&criu, Signal::CONT);
        }
        let ends = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
        assert!(ends, "{what}: kyb waits\n{}", self.told());
        let told = fs::read_to_string(self.words()).unwrap();
        assert_eq!(kyb.wait().unwrap().code(), Some(1), "{what}: {told}");
        assert!(told.contains("stood still for 5s") && told.contains("restore_stall"), "{told}");
        assert!(!self.settles(&what), "{what}: it is done");
        assert!(criu.iter().all(|process| !process.runs()), "{what}: CRIU outlives it");
        self.is_clean(&what);
        self.restores(&what);
        self.is_clean(&what);
    }

    /// Waits until no operation is open. Returns whether the last one is done.
    fn settles(&self, what: &str) -> bool {
        let mut last = Vec::new();
        let closed = wait_until(END_LIMIT, || {
            last = self.operations();
            !last.is_empty() && last.iter().all(|one| one["state"] != "running")
        });
        assert!(closed, "{what}: operations stay open: {last:?}\n{}", self.told());
        last.pop().is_some_and(|last| last["state"] == "done")
    }

    fn operations(&self) -> Vec<Value> {
        // Told also while containerd is away.
        let output = self.node.output(&["kyb", "ps", "--json"]).unwrap();
        let list: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        list.and_then(|list| list["operations"].as_array().cloned()).unwrap_or_default()
    }

    /// Restores it under the same name, which must work.
    fn restores(&self, what: &str) {
        let output = restore(self.scenario, self.node, &self.reference, NAME, &[]);
        let told = fmt::from_fn(|f| write!(f, "{}\n{}", said(&output), self.told()));
        assert!(output.status.success(), "{what}: the next one fails: {told}");
        self.scenario.wait_for_ticks(self.node, NAME).unwrap();
        self.scenario.remove(self.node, NAME).unwrap();
    }

    /// Restores it when a containerd was killed in the middle of making a snapshot: a directory has the
    /// next number, and is in no database.
    fn restores_beside_half_a_snapshot(&self) {
        // Else containerd's collector takes it away with what was removed before.
        self.node.run(&["ctr", "content", "prune", "references"]).unwrap();
        self.node.run(&["ctr", "snapshot", "prepare", "last"]).unwrap();
        let mount = self.node.run(&["ctr", "snapshot", "mounts", "/mnt", "last"]).unwrap();
        let path = mount.split(' ').find(|word| word.contains("/snapshots/")).unwrap();
        let last = Path::new(path).parent().unwrap();
        let number: u32 = last.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let half = self.node.path(last.with_file_name((number + 1).to_string()).to_str().unwrap());
        fs::create_dir_all(half.join("fs")).unwrap();
        self.restores("half a snapshot");
        self.node.run(&["ctr", "snapshot", "rm", "last"]).unwrap();
        self.is_clean("half a snapshot");
    }

    fn is_clean(&self, what: &str) {
        let mut left = String::new();
        // containerd's collector takes its time.
        let clean = wait_until(END_LIMIT, || {
            left = self.left();
            left == self.before
        });
        let before = &self.before;
        assert!(clean, "{what}: before\n{before}\nafter\n{left}\n{}", self.told());
    }

    /// Returns everything that a restore may leave, but for logs.
    fn left(&self) -> String {
        let script = "ctr container ls -q; ctr task ls; ctr snapshot ls | sort; ctr leases ls; \
            ctr image ls -q; find /var/lib/kybernate /run/kybernate -mindepth 1 \
            -not -path '*/operations*' -not -name '*.sock' -not -name '*.lock' -not -name '*.log' \
            -not '(' -type d -path '*/kybernate/volumes*' ')' -not -name criu.conf; \
            ls /run/containerd/io.containerd.runtime.v2.task/default /run/containerd/runc/default; \
            find /sys/fs/cgroup -path '*/default/*' -type d; grep -c rootfs /proc/self/mountinfo; \
            ps -e -o stat= -o comm= | awk '$1 !~ /^Z/ && $2 ~ /criu|runc|shim|workload/ { print $2 }'";
        said(&self.node.output(&["sh", "-c", script]).unwrap())
    }

    fn start_agent(&mut self) {
        self.agent = Some(self.scenario.start_agent(self.node, "").unwrap());
    }

    /// One that was killed while it deleted a task leaves `.NAME`, its own name for what is to go, and no
    /// containerd can delete the next task of that name then. So that goes first.
    fn start_containerd(&self) {
        let script = "rm -rf /run/containerd/io.containerd.runtime.v2.task/default/.[!.]*; \
            containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &";
        self.node.run(&["sh", "-c", script]).unwrap();
        let answers = || self.node.run(&["ctr", "--connect-timeout", "1s", "version"]).is_ok();
        assert!(wait_until(END_LIMIT, answers), "containerd does not start again");
    }

    /// Where kyb's words go.
    fn words(&self) -> PathBuf {
        self.scenario.testbed.private().join(format!("kyb-{}.log", self.node.name()))
    }

    fn told(&self) -> String {
        let log = format!("agent-{}.log", self.node.name());
        let log = self.scenario.testbed.private().join(log);
        let containerd = self.node.path("/var/lib/kybernate/containerd.log");
        let restored = self.traces.file("work/restore.log").unwrap_or_default();
        let tail = |path: &Path| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        [&*self.words(), &log, &containerd, &restored].map(tail).join("\n\n")
    }
}

/// Runs `rounds` in which something is to be cut short.
fn cut_on_both(rounds: impl Fn(&mut Place<'_>) + Sync) {
    on_both(|place| {
        rounds(place);
        assert!(place.cut > 0, "nothing was ever cut short");
    });
}

/// Runs `rounds` on both nodes at a time, with a checkpoint that was taken on the older one.
fn on_both(rounds: impl Fn(&mut Place<'_>) + Sync) {
    let mut scenario = start();
    scenario.run_workload(&scenario.testbed.a, "job", MIB, &[]).unwrap();
    let reference = scenario.reference("restores/job:v1");
    checkpoint(&scenario, &scenario.testbed.a, "job", &reference);
    scenario.remove(&scenario.testbed.a, "job").unwrap();
    harness::on_both(&mut scenario, |scenario, node, agent| {
        let mut place = Place::new(scenario, node, Some(agent), reference.clone());
        rounds(&mut place);
    });
    scenario.end().unwrap();
}

#[test]
fn nothing_half_made_is_left_when_containerd_dies_in_a_restore() {
    cut_on_both(|place| {
        for moment in MOMENTS {
            for victim in [Victim::Containerd, Victim::ContainerdForGood] {
                place.round(victim, moment);
            }
        }
        place.restores_beside_half_a_snapshot();
    });
}

#[test]
fn nothing_half_made_is_left_when_the_agent_dies_in_a_restore() {
    cut_on_both(|place| {
        for moment in MOMENTS {
            for victim in [Victim::Agent, Victim::AgentForGood, Victim::Both] {
                place.round(victim, moment);
            }
        }
    });
}

#[test]
fn nothing_half_made_is_left_when_criu_is_killed_or_hangs_in_a_restore() {
    cut_on_both(|place| {
        for moment in &MOMENTS[3..] {
            place.round(Victim::Criu, *moment);
        }
        drop(place.agent.take());
        place.agent = Some(place.scenario.start_agent(place.node, STALL).unwrap());
        for frozen in [false, true] {
            place.hangs(frozen);
        }
    });
}

#[test]
fn a_restore_goes_on_when_kyb_is_killed() {
    on_both(|place| {
        for moment in MOMENTS {
            place.round(Victim::Kyb, moment);
            assert_eq!(place.cut, 0, "a restore ended with its client");
        }
    });
}
