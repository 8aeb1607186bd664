//! Who dies while a container is suspended or resumed, and when: what was asked for is done in the
//! end, whoever is left, and written down as it is.

use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::node::freezer::Freezer;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::process::Signal;

use super::is;
use super::victims::{END_LIMIT, running, signal, start_containerd};
use crate::harness::{on_both, said, start};

/// Stands in for runc, and waits once where `/run/hold` says: before or after what it does. Killed
/// there, it leaves what a runc leaves that is killed just then.
const RUNC: &str = r#"#!/bin/sh
real=/usr/sbin/runc.real
hold=$(cat /run/hold 2>/dev/null)
[ -n "$hold" ] || exec $real "$@"
case " $* " in *" ${hold#* } "*) ;; *) exec $real "$@" ;; esac
rm /run/hold
case $hold in
before*) : >/run/held; read -r _ </run/gate; exec $real "$@" ;;
*) $real "$@"; status=$?; : >/run/held; read -r _ </run/gate; exit $status ;;
esac
"#;

/// Moments of a suspension and of its end, as `/run/hold` has them.
const MOMENTS: [&str; 4] = ["before pause", "after pause", "before resume", "after resume"];

/// Who is killed. Whoever is not kyb is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Kyb,
    Agent,
    /// It takes the runc along that its shim has started.
    Containerd,
    AgentAndContainerd,
    /// The agent, and until the next one serves, nobody can say how the container is.
    AgentOfHungShim,
}

/// One node with a container that is suspended and resumed.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    agent: Option<Agent>,
    freezer: Freezer,
    /// What is there while it runs.
    before: String,
}

impl<'a> Place<'a> {
    fn new(scenario: &'a Scenario, node: &'a Node, agent: Option<Agent>) -> Self {
        let script = "mv /usr/sbin/runc /usr/sbin/runc.real && mkfifo /run/gate";
        node.run(&["sh", "-c", script]).unwrap();
        fs::write(node.path("/usr/sbin/runc"), RUNC).unwrap();
        node.run(&["chmod", "755", "/usr/sbin/runc"]).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let freezer = node.freezer("job");
        let mut place = Self { scenario, node, agent, freezer, before: String::new() };
        place.asks("suspend");
        place.asks("resume");
        place.before = place.left();
        place
    }

    /// Suspends or resumes it, and looks at that.
    fn asks(&self, word: &str) {
        let output = self.scenario.kyb(self.node, &[word, "job"]).unwrap();
        assert!(output.status.success(), "{word}: {}\n{}", said(&output), self.told());
        assert!(self.is_done(word), "{word}: {}", self.told());
    }

    /// Has someone die at a moment, and looks at what that leaves.
    fn round(&mut self, victim: Victim, moment: &str) {
        let what = format!("{victim:?} on {}, {moment}", self.node.name());
        let word = if moment.ends_with("resume") { "resume" } else { "suspend" };
        if word == "resume" {
            self.asks("suspend");
        }
        let held = self.node.path("/run/held");
        let shims = running(self.node, "containerd-shim");
        let mut kyb = self.reaches(&what, moment, &[word, "job"]);
        if victim == Victim::AgentOfHungShim {
            signal(&shims, Signal::STOP);
        }
        self.dies(victim);
        signal(&shims, Signal::CONT);
        fs::remove_file(&held).unwrap();
        self.let_go();
        let ended = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
        assert!(ended, "{what}: kyb waits\n{}", self.told());
        let done = wait_until(END_LIMIT, || self.is_done(word));
        assert!(done, "{what}: it is not done\n{}", self.told());
        let told = kyb.wait().unwrap();
        assert!(told.success() || victim == Victim::Kyb, "{what}: {told}\n{}", self.told());
        if word == "suspend" {
            // Nobody who comes late changes anything.
            self.asks("suspend");
            self.asks("resume");
        }
        self.scenario.wait_for_ticks(self.node, "job").unwrap();
        let clean = wait_until(END_LIMIT, || self.left() == self.before);
        assert!(clean, "{what}: before\n{}\nafter\n{}", self.before, self.left());
    }

    /// Has a suspension cancelled while runc is held, and looks at what that leaves.
    fn cancelled(&self, moment: &str, more: &[&str]) {
        let what = format!("cancelled on {}, {moment}, {more:?}", self.node.name());
        let kyb = self.reaches(&what, moment, &[&["suspend", "job"], more].concat());
        if more.is_empty() {
            signal(&running(self.node, "kyb"), Signal::INT);
        }
        let under_way = ["ps", "--operations", "--state", "running"];
        let cancelling = || {
            let list = self.scenario.kyb_json(self.node, &under_way).unwrap();
            list["operations"][0]["cancelling"] == true
        };
        let told = wait_until(END_LIMIT, cancelling);
        assert!(told, "{what}: it is not cancelled\n{}", self.told());
        let told = self.fails(&what, kyb);
        assert!(told.contains("cancelled") && told.contains("the container runs"), "{told}");
        assert!(self.is_done("resume"), "{what}: {told}");
        self.scenario.wait_for_ticks(self.node, "job").unwrap();
        assert_eq!(self.left(), self.before, "{what}");
    }

    /// Fails a suspension when runc has paused the container: it is not to be known who is in its cgroup. It
    /// runs again.
    fn fails_when_paused(&self) {
        let what = format!("failed on {}", self.node.name());
        let kyb = self.reaches(&what, "after pause", &["suspend", "job"]);
        let members = self.freezer.directory().join("cgroup.procs");
        let members = members.strip_prefix(self.node.path("/")).unwrap();
        let members = format!("/{}", members.display());
        // Nothing is at the beginning of a process's memory.
        self.node.run(&["mount", "--bind", "/proc/1/mem", &members]).unwrap();
        let told = self.fails(&what, kyb);
        assert!(told.contains("failed to freeze the container"), "{told}");
        assert!(self.is_done("resume"), "{what}: {told}");
        self.node.run(&["umount", &members]).unwrap();
        self.scenario.wait_for_ticks(self.node, "job").unwrap();
        assert_eq!(self.left(), self.before, "{what}");
    }

    /// Has kyb ask for something, and runc be held at a moment of it.
    fn reaches(&self, what: &str, moment: &str, words: &[&str]) -> Child {
        fs::write(self.node.path("/run/hold"), moment).unwrap();
        let kyb = self.begin(words);
        let reached = wait_until(END_LIMIT, || self.node.path("/run/held").exists());
        assert!(reached, "{what}: it does not come to that\n{}", self.told());
        kyb
    }

    /// Lets runc go on, and waits until kyb has failed. Returns what is told of it.
    fn fails(&self, what: &str, mut kyb: Child) -> String {
        fs::remove_file(self.node.path("/run/held")).unwrap();
        self.let_go();
        let ended = wait_until(END_LIMIT, || kyb.try_wait().unwrap().is_some());
        assert!(ended, "{what}: kyb waits\n{}", self.told());
        let told = self.told();
        assert_eq!(kyb.wait().unwrap().code(), Some(1), "{what}\n{told}");
        told
    }

    fn begin(&self, words: &[&str]) -> Child {
        let log = self.scenario.testbed.private().join(format!("kyb-{}.log", self.node.name()));
        let log = fs::File::create(log).unwrap().into_parts().0;
        let mut kyb = self.node.command(&[&["kyb"], words].concat());
        kyb.stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn dies(&mut self, victim: Victim) {
        match victim {
            Victim::Kyb => signal(&running(self.node, "kyb"), Signal::KILL),
            Victim::Agent | Victim::AgentOfHungShim => {
                self.agent.take().unwrap().kill();
                self.start_agent();
            }
            Victim::Containerd => {
                signal(&running(self.node, "containerd"), Signal::KILL);
                start_containerd(self.node);
            }
            Victim::AgentAndContainerd => {
                self.agent.take().unwrap().kill();
                signal(&running(self.node, "containerd"), Signal::KILL);
                start_containerd(self.node);
                self.start_agent();
            }
        }
    }

    fn start_agent(&mut self) {
        self.agent = Some(self.scenario.start_agent(self.node, "").unwrap());
    }

    /// Lets the runc go on that is held, if it is still there.
    fn let_go(&self) {
        let gate = self.node.path("/run/gate");
        let open = || {
            let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
            rustix::fs::open(&gate, flags, rustix::fs::Mode::empty())
        };
        let mut opened = Err(rustix::io::Errno::NXIO);
        // It may be about to read, or nobody is there any more.
        let held = || running(self.node, "runc").iter().any(|runc| runc.runs());
        wait_until(END_LIMIT, || {
            opened = open();
            opened.is_ok() || !held()
        });
        if let Ok(gate) = opened {
            // Who was about to end may be gone by now.
            let written = rustix::io::write(gate, b"\n");
            assert!(matches!(written, Ok(1) | Err(rustix::io::Errno::PIPE)), "{written:?}");
        }
    }

    /// Whether containerd, the kernel and what is written down agree that it is done.
    fn is_done(&self, word: &str) -> bool {
        let (frozen, thawed) = (self.freezer.is_frozen(), self.freezer.is_thawed());
        let list = self.scenario.kyb_json(self.node, &["ps", "--container", "job"]).unwrap();
        let known = list["containers"][0]["suspendedSince"].is_string();
        match word {
            "suspend" => {
                let written = self.phase().is_some_and(|phase| phase == "suspended");
                frozen && known && written && is(self.node, "job", "PAUSED")
            }
            _ => thawed && !known && self.phase().is_none() && is(self.node, "job", "RUNNING"),
        }
    }

    /// Returns how far it is, as it is written down.
    fn phase(&self) -> Option<String> {
        let file = self.node.path("/var/lib/kybernate/suspended/default/job.json");
        let text = fs::read_to_string(file).ok()?;
        let record: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some(record["phase"].as_str()?.to_owned())
    }

    fn left(&self) -> String {
        let script = "ctr container ls -q; ctr task ls; ctr leases ls -q; \
            find /var/lib/kybernate/suspended /run/kybernate -type f -not -name '*.lock' \
            -not -name criu.conf -not -path '*/stage*'; \
            ps -e -o stat= -o comm= | awk '$1 !~ /^Z/ && $2 ~ /runc|criu/ { print $2 }'";
        said(&self.node.output(&["sh", "-c", script]).unwrap())
    }

    fn told(&self) -> String {
        let script = "ctr task ls; tail -n 15 /var/lib/kybernate/containerd.log; \
            cat /var/lib/kybernate/suspended/default/*.json";
        let node = said(&self.node.output(&["sh", "-c", script]).unwrap());
        let tail = |name: &str| {
            let log =
                self.scenario.testbed.private().join(format!("{name}-{}.log", self.node.name()));
            let log = fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            lines[lines.len().saturating_sub(25)..].join("\n")
        };
        let freezer = self.freezer.state().unwrap_or_default();
        format!("{freezer}{node}\n{}\n{}", tail("kyb"), tail("agent"))
    }
}

#[test]
fn what_was_asked_for_is_done_whoever_dies_while_it_is_suspended_or_resumed() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        let mut place = Place::new(scenario, node, Some(agent));
        for moment in MOMENTS {
            for victim in
                [Victim::Kyb, Victim::Agent, Victim::Containerd, Victim::AgentAndContainerd]
            {
                place.round(victim, moment);
            }
        }
        for moment in ["before pause", "before resume"] {
            place.round(Victim::AgentOfHungShim, moment);
        }
        place.cancelled("before pause", &["--timeout", "1s"]);
        place.cancelled("after pause", &[]);
        place.fails_when_paused();
    });
    scenario.end().unwrap();
}

/// What nobody here has written down is somebody else's, also where containerd knows nothing of it.
#[test]
fn a_container_that_somebody_else_froze_is_left_alone() {
    let mut scenario = start();
    scenario.run_workload(&scenario.testbed.a, "job", 16, &[]).unwrap();
    let freezer = scenario.testbed.a.freezer("job");
    freezer.set(true).unwrap();
    let frozen = || freezer.is_frozen();
    assert!(wait_until(END_LIMIT, frozen));
    let refused = |scenario: &Scenario| {
        for word in ["suspend", "resume"] {
            let output = scenario.kyb(&scenario.testbed.a, &[word, "job"]).unwrap();
            assert_eq!(output.status.code(), Some(1), "{}", said(&output));
            assert!(said(&output).contains("paused by somebody else"), "{}", said(&output));
        }
        assert!(frozen(), "it was thawed");
    };
    refused(&scenario);
    scenario.agent_a.take().unwrap().kill();
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "").unwrap());
    refused(&scenario);
    freezer.set(false).unwrap();
    scenario.wait_for_ticks(&scenario.testbed.a, "job").unwrap();
    scenario.end().unwrap();
}
