//! Who dies in the middle of a checkpoint, and when: the source runs on, whatever the moment.

mod abandoned;
mod calls;
pub(crate) mod rounds;

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::node::freezer::Freezer;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;
use serde_json::Value;

use super::victims::{
    END_LIMIT, catch, dither, guards, processes, running, signal, start_containerd,
};
use super::{first, has_tag, is, locks};
use crate::harness::{self, said, start};

/// The longest pause that is asked for.
const DEADLINE: Duration = Duration::from_secs(8);
/// How long a dump that an agent has left may go on.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a tick and its being seen may take on top of it, on a loaded machine.
const SLACK: Duration = Duration::from_secs(4);
/// The workload's memory: long enough to dump that moments can be told apart.
const MIB: u32 = 96;
/// What it has written: enough to be copied before the pause.
const WRITTEN_BYTES: usize = 24 << 20;
/// What is said while containerd is away.
const WAITS: &str = "waits for containerd";
/// How often a moment is waited for.
const TRIES: u32 = 3;

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The agent, and nobody starts it again for now.
    AgentForGood,
    /// The agent, and it is started again at once.
    Agent,
    /// CRIU.
    Criu,
    /// CRIU hangs, and the agent dies for good.
    HungCriu,
    /// Nobody, but CRIU hangs.
    OnlyHungCriu,
    /// containerd, and it is started again when the source runs.
    ContainerdForGood,
    /// containerd, and it is started again at once.
    Containerd,
    /// containerd hangs until the source runs.
    HungContainerd,
    /// Whoever asked for the checkpoint.
    Kyb,
}

impl Victim {
    const fn is_containerd_for_long(self) -> bool {
        matches!(self, Self::ContainerdForGood | Self::HungContainerd)
    }

    const fn is_criu(self) -> bool {
        matches!(self, Self::Criu | Self::HungCriu | Self::OnlyHungCriu)
    }
}

/// A moment in the life of a checkpoint: what it is called, and how it shows.
type Moment = (&'static str, fn(&Dump) -> bool);

/// In order of appearance. The words are CRIU's, in its log.
const MOMENTS: [Moment; 13] = [
    ("a place is made", |dump| dump.directory().is_some()),
    ("the container is frozen", |dump| {
        dump.file("work/dump.log").is_some() || (dump.froze() && dump.file("draft").is_some())
    }),
    ("files are captured", |dump| dump.file("rootfs.tar").is_some()),
    ("CRIU begins", |dump| dump.file("work/dump.log").is_some()),
    ("CRIU has read the freezer", |dump| {
        dump.says("freezer.state=") || dump.says("cgroup.freeze=")
    }),
    ("CRIU seizes", |dump| dump.says("Seized task")),
    ("CRIU locks the network", |dump| dump.says("Lock network")),
    ("CRIU begins to write memory", |dump| dump.written() > 0),
    ("CRIU has written some memory", |dump| dump.written() > u64::from(MIB) << 18),
    ("CRIU unlocks the network", |dump| dump.says("Unlock network")),
    ("CRIU lets go", |dump| dump.says("Unfreezing tasks")),
    ("CRIU is done", |dump| dump.says("Dumping finished")),
    ("the container is resumed", |dump| dump.says("Dumping finished") && !dump.froze()),
];

/// When what the container has written is copied, before it is frozen.
const AHEAD: [Moment; 2] =
    [("everybody is held", Dump::froze), ("files are copied", |dump| dump.file("draft").is_some())];

/// When nothing has been made yet. Whoever asked may not have heard of it.
const BEGINS: Moment = ("an operation has begun", Dump::has_begun);

/// When a process soon runs what CRIU wrote over its code; `calls` has the moments within.
const CURES: Moment =
    ("CRIU has written all memory", |dump| dump.written() >= u64::from(MIB) << 20);

/// A checkpoint under way, looked at from outside: nothing here enters the node, so that a look
/// takes microseconds.
struct Dump {
    stage: PathBuf,
    operations: PathBuf,
    freezer: Freezer,
    state: PathBuf,
}

impl Dump {
    fn of(node: &Node, id: &str) -> Self {
        let state = "/run/containerd/io.containerd.runtime.v2.task/default";
        Self {
            stage: node.path("/run/kybernate/stage"),
            operations: node.path("/var/lib/kybernate/operations"),
            freezer: node.freezer(id),
            state: node.path(&format!("{state}/{id}/rootfs/state/status.json")),
        }
    }

    /// Whether the newest operation goes on, by the last line that the agent has written of it.
    fn has_begun(&self) -> bool {
        let Ok(all) = fs::read_dir(&self.operations) else { return false };
        let newest = all.filter_map(|one| Some(one.ok()?.path())).max();
        let text = newest.and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        text.trim_end().lines().last().is_some_and(|line| line.contains(r#""state":"running""#))
    }

    fn directory(&self) -> Option<PathBuf> {
        fs::read_dir(&self.stage).ok()?.find_map(Result::ok).map(|entry| entry.path())
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        self.directory().map(|directory| directory.join(name)).filter(|file| file.exists())
    }

    fn says(&self, words: &str) -> bool {
        self.file_says("work/dump.log", words)
    }

    /// Whether a log of CRIU's has such words.
    fn file_says(&self, log: &str, words: &str) -> bool {
        let log = self.file(log).and_then(|log| fs::read(log).ok());
        log.is_some_and(|log| String::from_utf8_lossy(&log).contains(words))
    }

    /// Whether CRIU has begun, also in a round before the pause.
    fn criu_runs(&self) -> bool {
        self.file("work/dump.log").is_some() || self.file(rounds::LOG).is_some()
    }

    fn written(&self) -> u64 {
        self.written_to("images")
    }

    /// Returns how much memory of the first process is in a directory.
    fn written_to(&self, images: &str) -> u64 {
        let pages = self.file(&format!("{images}/pages-1.img"));
        pages.and_then(|pages| fs::metadata(pages).ok()).map_or(0, |pages| pages.len())
    }

    fn froze(&self) -> bool {
        self.freezer.state().is_ok() && !self.freezer.is_thawed()
    }

    fn counter(&self) -> Option<u64> {
        let status: Value = serde_json::from_slice(&fs::read(&self.state).ok()?).ok()?;
        status["counter"].as_u64()
    }
}

/// One node with a container that is to outlive everybody.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    agent: Option<Agent>,
    dump: Dump,
    /// Whether CRIU had ended when someone died.
    dumped: bool,
    /// How many moments were tried, and at how many of them nobody died.
    moments: u32,
    missed: u32,
    /// How many checkpoints were begun that somebody was to die in.
    tried: u32,
    /// What containerd and the kernel have besides, between checkpoints.
    besides: String,
    way: Way,
}

/// How the container is started, and taken.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Its memory.
    mib: u32,
    /// More for `ctr run`.
    options: &'static [&'static str],
    /// More for `kyb checkpoint`.
    words: &'static [&'static str],
}

impl Default for Way {
    fn default() -> Self {
        Self { mib: MIB, options: &[], words: &[] }
    }
}

impl<'a> Place<'a> {
    fn new(scenario: &'a Scenario, node: &'a Node, agent: Option<Agent>, way: Way) -> Self {
        let dump = Dump::of(node, "job");
        let (dumped, besides) = (false, String::new());
        let (moments, missed, tried) = (0, 0, 0);
        let mut place =
            Self { scenario, node, agent, dump, dumped, moments, missed, tried, besides, way };
        place.begin();
        place.besides = place.besides();
        place
    }

    /// Returns leases, mounts and cgroups.
    fn besides(&self) -> String {
        let script = "ctr leases ls -q; awk '$5 ~ /kybernate|default/ { print $5 }' \
            /proc/self/mountinfo; find /sys/fs/cgroup -path '*/default/*' -type d | sort";
        self.node.run(&["sh", "-c", script]).unwrap()
    }

    /// Starts the container.
    fn begin(&self) {
        self.scenario.run_workload(self.node, "job", self.way.mib, self.way.options).unwrap();
        fs::write(self.dump.state.with_file_name("written"), vec![7; WRITTEN_BYTES]).unwrap();
    }

    /// Lets someone die at a moment. Where this machine is too slow for it, or CRIU is busy inside
    /// the source just then, it is tried again.
    fn kills(&mut self, victim: Victim, moment: Moment) {
        self.moments += 1;
        let died = (0..TRIES).any(|_| self.round(victim, moment));
        self.missed += u32::from(!died);
    }

    /// Takes a checkpoint in whose middle someone is to die, and looks at what that left. Returns
    /// whether someone died.
    fn round(&mut self, victim: Victim, (name, reached): Moment) -> bool {
        let what = format!("{victim:?} on {}, when {name}", self.node.name());
        self.tried += 1;
        let tag = format!("deaths/{}:cut-{}", self.node.name(), self.tried);
        let reference = self.scenario.reference(&tag);
        let key = format!("node-{}", self.node.name());
        let deadline = format!("{}s", DEADLINE.as_secs());
        let asked = Instant::now();
        let mut kyb = self.ask(&tag, &[self.way.words, &["--pause-deadline", &deadline]].concat());
        let program = self.program(victim, &what);
        let mut ended = false;
        let caught = catch(|| {
            ended = kyb.try_wait().unwrap().is_some();
            ended || reached(&self.dump)
        });
        assert!(caught, "{what}: it did not come to that\n{}", self.told());
        let waited = asked.elapsed();
        let before = self.dump.counter();
        let began = Instant::now();
        self.dumped = ended || self.dump.says("Dumping finished");
        // Before that, containerd may be there again in time.
        let dumps = self.dump.criu_runs();
        let died = !ended && self.dies(victim, &program);
        self.dumped |= victim.is_criu() && (!died || self.dump.says("Dumping finished"));
        self.ticks(before, &what);
        let took = began.elapsed();
        println!("{what}: ran on after {took:?}, died: {died}");
        if died && victim.is_containerd_for_long() && kyb.try_wait().unwrap().is_none() {
            self.waits(&what);
        }
        self.comes_back(victim, &program);
        let mut status = None;
        wait_until(END_LIMIT, || {
            status = kyb.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap_or_else(|| panic!("{what}: kyb waits\n{}", self.told()));
        let cut = dumps && !self.dumped;
        assert!(!cut || !status.success(), "{what}: a dump that did not end is a success");
        // It is the agent's, and goes on.
        let goes_on = died && victim == Victim::Kyb;
        assert!(!goes_on || wait_until(END_LIMIT, || self.is_idle()), "{what}: {}", self.told());
        self.runs_on(&what);
        assert_eq!(self.dump.directory(), None, "{what}: a dump is left\n{}", self.told());
        let (tagged, done) = (has_tag(self.scenario, &reference), status.success() || goes_on);
        assert_eq!(tagged, done, "{what}: a failure has a name, or a success has none");
        let clean = wait_until(END_LIMIT, || self.besides() == self.besides);
        assert!(clean, "{what}: before {}, now {}", self.besides, self.besides());
        let reference = self.scenario.reference(&format!("deaths/{}:next", self.node.name()));
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let words = [&words[..], self.way.words].concat();
        let next = self.scenario.kyb(self.node, &words).unwrap();
        self.ticks(self.dump.counter(), &what);
        self.runs_on(&what);
        // Decision 0040: what was cut short may be dumped without a thread's number, which is refused.
        let spoiled = ["left its code", "the images cannot be judged"];
        // On a machine that is too slow for it, a dump is cut short whoever dies, or by its deadline.
        let late = ended && !status.success() && waited >= DEADLINE;
        let cut_short = victim.is_criu() || took >= PATIENCE || late;
        if cut_short && spoiled.iter().any(|why| said(&next).contains(why)) {
            println!("{what}: no checkpoint any more: {}", said(&next));
            self.scenario.remove(self.node, "job").unwrap();
            self.begin();
        } else {
            assert!(next.status.success(), "{what}: the next one fails: {}", said(&next));
        }
        died
    }

    /// Asks for a checkpoint with such a tag. What is said of it goes to [`Self::words`].
    fn ask(&self, tag: &str, more: &[&str]) -> Child {
        let (reference, key) = (self.scenario.reference(tag), format!("node-{}", self.node.name()));
        let words = ["kyb", "checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let told = fs::File::create(self.words()).unwrap().into_parts().0;
        let mut kyb = self.node.command(&[&words[..], more].concat());
        kyb.stdout(Stdio::null()).stderr(told).spawn().unwrap()
    }

    /// Whether no operation is under way.
    fn is_idle(&self) -> bool {
        let words = ["ps", "--operations", "--state", "running"];
        let list = self.scenario.kyb_json(self.node, &words).unwrap();
        list["operations"].as_array().is_some_and(Vec::is_empty)
    }

    /// Makes sure that everybody is told what is waited for.
    fn waits(&self, what: &str) {
        let told = || fs::read_to_string(self.words()).is_ok_and(|kyb| kyb.contains(WAITS));
        assert!(wait_until(SLACK * 2, told), "{what}: kyb does not say so\n{}", self.told());
        let words = ["ps", "--operations", "--state", "running"];
        let list = self.scenario.kyb_json(self.node, &words).unwrap();
        let waits = list["operations"][0]["waitsFor"].as_str().unwrap_or_default();
        assert!(waits.starts_with("containerd ("), "{what}: {list}");
        assert!(self.told().contains(&format!("operation {WAITS}")), "{what}\n{}", self.told());
    }

    /// Returns the processes that are to die, but for the agent.
    fn program(&self, victim: Victim, what: &str) -> Vec<Process> {
        match victim {
            Victim::Agent | Victim::AgentForGood | Victim::Kyb => Vec::new(),
            Victim::ContainerdForGood | Victim::Containerd | Victim::HungContainerd => {
                running(self.node, "containerd")
            }
            Victim::Criu | Victim::HungCriu | Victim::OnlyHungCriu => {
                // Not one of those that only say their version.
                let begun = catch(|| self.dump.criu_runs());
                assert!(begun, "{what}: CRIU does not begin\n{}", self.told());
                running(self.node, "criu")
            }
        }
    }

    /// Lets someone die. Returns whether that was possible.
    fn dies(&mut self, victim: Victim, program: &[Process]) -> bool {
        if victim.is_criu() && !self.holds(victim, program) {
            signal(program, Signal::CONT);
            return false;
        }
        if !victim.is_criu() {
            dither();
        }
        match victim {
            Victim::Agent | Victim::AgentForGood | Victim::HungCriu => {
                self.agent.take().unwrap().kill();
            }
            Victim::Criu | Victim::ContainerdForGood | Victim::Containerd => {
                signal(program, Signal::KILL);
            }
            Victim::Kyb => signal(&running(self.node, "kyb"), Signal::KILL),
            Victim::OnlyHungCriu => {}
            Victim::HungContainerd => signal(program, Signal::STOP),
        }
        // What had ended by then may be a success.
        self.dumped |= self.dump.says("Dumping finished");
        match victim {
            Victim::Agent => self.start_agent(),
            Victim::Containerd => start_containerd(self.node),
            _ => {}
        }
        true
    }

    /// Stops CRIU, and returns whether it can die without taking the source along, which decision
    /// 0015 is about: not while a process runs code that CRIU wrote over its own. That begins soon
    /// after CRIU says whom it dumps, rests while memory is written, and ends before the network.
    /// One that hangs is ended by the guardian, which is to look for such a moment itself.
    fn holds(&self, victim: Victim, criu: &[Process]) -> bool {
        signal(criu, Signal::STOP);
        let stopped = |process: &Process| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid));
            stat.is_ok_and(|stat| stat.contains(") T "))
        };
        let holds =
            wait_until(SLACK, || criu.iter().all(|process| stopped(process) || !process.runs()));
        let written = self.dump.written();
        holds
            && criu.iter().any(|process| process.runs())
            && (victim != Victim::Criu
                || !self.dump.says("Dumping task (pid")
                || (written > 0 && written < u64::from(MIB) << 20)
                || self.dump.says("Unlock network"))
    }

    /// Whoever died for good comes back in the end.
    fn comes_back(&mut self, victim: Victim, program: &[Process]) {
        match victim {
            _ if self.agent.is_none() => self.start_agent(),
            Victim::ContainerdForGood if program.iter().all(|process| !process.runs()) => {
                start_containerd(self.node);
            }
            Victim::HungContainerd => signal(program, Signal::CONT),
            _ => {}
        }
    }

    /// It runs in the end, and most of those who were to die did.
    fn ends(&self) {
        self.scenario.wait_for_ticks(self.node, "job").unwrap();
        let (name, moments, missed) = (self.node.name(), self.moments, self.missed);
        println!("{name}: nobody died at {missed} of {moments} moments");
        assert!(missed * 4 <= moments, "nobody died at {missed} of {moments} moments");
    }

    fn start_agent(&mut self) {
        self.agent = Some(self.scenario.start_agent(self.node, "").unwrap());
    }

    /// Waits until the source runs, which it must within its deadline.
    fn ticks(&self, before: Option<u64>, what: &str) {
        assert!(before.is_some(), "{what}: it says nothing\n{}", self.told());
        let next = before.map(|counter| counter + 2);
        let ticks = wait_until(DEADLINE + SLACK, || self.dump.counter() >= next);
        assert!(ticks, "{what}: it does not run\n{}", self.told());
    }

    /// Waits until everybody who brings the source back has done so, and looks for traces.
    fn runs_on(&self, what: &str) {
        let gone = wait_until(END_LIMIT, || processes(self.node, guards).is_empty());
        assert!(gone, "{what}: its guardian does not end\n{}", self.told());
        // Whoever would have frozen it again has ended by now.
        assert_eq!(running(self.node, "criu"), [], "{what}: a CRIU is left\n{}", self.told());
        assert!(!self.dump.froze(), "{what}: it is frozen\n{}", self.told());
        let agrees = is(self.node, "job", "RUNNING");
        assert!(agrees, "{what}: containerd disagrees\n{}", self.told());
        assert_eq!(
            locks(self.node, &first(self.node)),
            "",
            "{what}: its network is locked\n{}",
            self.told()
        );
    }

    /// Where kyb's words go.
    fn words(&self) -> PathBuf {
        self.scenario.testbed.private().join(format!("kyb-{}.log", self.node.name()))
    }

    fn told(&self) -> String {
        let script = "tail -n 20 /var/lib/kybernate/guardian.log; ctr task ls; \
            find /run/kybernate/stage -name dump.log -exec tail -n 5 {} +";
        let node = said(&self.node.output(&["sh", "-c", script]).unwrap());
        let log = format!("agent-{}.log", self.node.name());
        let log = fs::read_to_string(self.scenario.testbed.private().join(log)).unwrap();
        let lines: Vec<_> = log.lines().collect();
        let kyb = fs::read_to_string(self.words()).unwrap();
        format!("{node}\n{kyb}\n{}", lines[lines.len().saturating_sub(30)..].join("\n"))
    }
}

/// Runs `rounds` on both nodes at a time.
fn on_both(mut scenario: Scenario, rounds: impl Fn(&mut Place<'_>) + Sync) {
    harness::on_both(&mut scenario, |scenario, node, agent| {
        let mut place = Place::new(scenario, node, Some(agent), Way::default());
        rounds(&mut place);
        place.ends();
    });
    scenario.end().unwrap();
}

#[test]
fn the_source_runs_on_whenever_the_agent_dies() {
    on_both(start(), |place| {
        for moment in [BEGINS].into_iter().chain(AHEAD).chain(MOMENTS) {
            for victim in [Victim::AgentForGood, Victim::Agent] {
                place.kills(victim, moment);
            }
        }
    });
}

#[test]
fn a_checkpoint_goes_on_whenever_kyb_is_killed() {
    on_both(start(), |place| {
        for moment in AHEAD.into_iter().chain(MOMENTS) {
            place.kills(Victim::Kyb, moment);
        }
    });
}

#[test]
fn the_source_runs_on_whenever_criu_is_killed() {
    on_both(start(), |place| {
        place.kills(Victim::HungCriu, MOMENTS[3]);
        place.kills(Victim::HungCriu, CURES);
        // Once it lets go, it ends too soon to be caught.
        for moment in &MOMENTS[3..10] {
            place.kills(Victim::Criu, *moment);
        }
        // The other way to lock a network; told to, CRIU 4.1 ends at once.
        if place.node.name() == "b" {
            fs::create_dir_all(place.node.path("/etc/criu")).unwrap();
            fs::write(place.node.path("/etc/criu/runc.conf"), "network-lock nftables\n").unwrap();
            for moment in &MOMENTS[7..9] {
                place.kills(Victim::Criu, *moment);
            }
        }
    });
}

#[test]
fn the_source_runs_on_whenever_containerd_dies() {
    on_both(start(), |place| {
        place.kills(Victim::HungContainerd, MOMENTS[5]);
        for moment in &MOMENTS[7..9] {
            place.kills(Victim::ContainerdForGood, *moment);
        }
        for moment in AHEAD.into_iter().chain(MOMENTS) {
            place.kills(Victim::Containerd, moment);
        }
    });
}

#[test]
fn kyb_does_not_wait_for_containerd_when_the_time_is_over() {
    let mut scenario = start();
    harness::on_both(&mut scenario, |scenario, node, agent| {
        let place = Place::new(scenario, node, Some(agent), Way::default());
        let mut kyb = place.ask(&format!("deaths/late:{}", node.name()), &["--timeout", "8s"]);
        assert!(catch(|| MOMENTS[6].1(&place.dump)), "no memory is written\n{}", place.told());
        let (before, program) = (place.dump.counter(), running(node, "containerd"));
        signal(&program, Signal::KILL);
        place.ticks(before, "while containerd is away");
        let mut status = None;
        wait_until(END_LIMIT, || {
            status = kyb.try_wait().unwrap();
            status.is_some()
        });
        let told = fs::read_to_string(place.words()).unwrap();
        assert_eq!(status.expect("kyb waits").code(), Some(1), "{told}");
        assert!(told.contains(WAITS) && told.contains("kyb ps --operations"), "{told}");
        // It is the agent's to see to.
        let words = ["ps", "--operations", "--state", "running"];
        let list = || scenario.kyb_json(node, &words).unwrap();
        assert_eq!(list()["operations"].as_array().map(Vec::len), Some(1), "{}", list());
        start_containerd(node);
        let ended =
            wait_until(END_LIMIT, || list()["operations"].as_array().is_none_or(Vec::is_empty));
        assert!(ended, "{}", list());
        place.runs_on("when containerd is back");
        assert_eq!(place.dump.directory(), None, "a dump is left");
    });
    scenario.end().unwrap();
}
