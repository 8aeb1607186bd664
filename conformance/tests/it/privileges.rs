//! The least privilege: what each capability that the unit leaves the agent is for. Without it that is
//! lost; with all of them, and no others, nothing is.

use std::collections::BTreeSet;
use std::time::Duration;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{Agent, Scenario, ScenarioError};
use rustix::fs::XattrFlags;
use rustix::process::Signal;

use crate::failures::victims::{processes, signal};
use crate::harness::{at_once, said, start};
use crate::workloads;

const UNIT: &str = include_str!("../../../deploy/agent/kybernate-agent.service");

/// What is captured, and what its copy is to be like.
const DATA: &str = "/srv/data";
const COPY: &str = "/var/lib/kybernate/volumes/default/copy/0";
/// Another user's files that nobody else may read, a group's own directory, and a program that may do
/// more than who runs it.
const FILES: &str = "set -e; mkdir -p $1/own $1/group; cd $1; echo own > own/file; : > program
    chown -R 1234:1234 own; chmod 0700 own; chmod 0600 own/file
    chown 0:1234 group; chmod 2770 group; chmod 0755 program; touch -d @1000 own/file";
/// How everything is, but for the times of the directories and the place.
const LIST: &str = "cd $1 && find . -mindepth 1 -printf '%P %U:%G %m %s\\n' | sort &&
    stat -c %Y own/file";
/// `cap_net_raw+ep` (`vfs_cap_data` of revision 2, with the flag that it is effective).
const FILE_CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CAPABILITY: &str = "security.capability";

/// One that has become another user, and hangs; and one that fails while the source is paused.
const HOOKS: &str = r#"
[[hooks]]
name = "hang"
when = "before"
command = ["/usr/bin/setpriv", "--reuid", "1234", "--clear-groups", "sleep", "4242"]
limit = "1s"
on_request = true
[[hooks]]
name = "spoil"
when = "while_paused"
command = ["/bin/false"]
on_request = true
"#;

/// What CRIU has while it works, and leaves when it is killed.
pub(crate) const LOCK: &str = "iptables -N CRIU && iptables -I INPUT -j CRIU";
/// How long a killed process may take to be gone.
const DEATH_LIMIT: Duration = Duration::from_secs(5);

/// What is asked of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    /// To take a checkpoint, with files of any owner.
    Take,
    /// To restore one, with files as they were.
    Restore,
    /// To end a program that it has started.
    End,
    /// To take away what a killed CRIU has left in a network.
    Unlock,
}
use Task::{End, Restore, Take, Unlock};

/// What is asked for first that is lost without each.
const NEEDED: [(&str, Task); 12] = [
    ("CAP_SYS_ADMIN", Take),
    ("CAP_SYS_PTRACE", Restore),
    ("CAP_CHOWN", Restore),
    ("CAP_DAC_OVERRIDE", Take),
    ("CAP_FOWNER", Restore),
    ("CAP_FSETID", Restore),
    ("CAP_SETFCAP", Restore),
    ("CAP_KILL", End),
    ("CAP_NET_ADMIN", Take),
    ("CAP_NET_RAW", Unlock),
    ("CAP_SETUID", Take),
    ("CAP_SETGID", Take),
];

/// Returns the capabilities that the unit leaves.
fn left() -> BTreeSet<&'static str> {
    let lines = UNIT.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    lines.flat_map(str::split_ascii_whitespace).collect()
}

/// A node with a source whose files are anybody's.
struct Place<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    /// How the files are.
    listed: String,
    /// A checkpoint of it.
    taken: String,
    /// What there is between two agents.
    before: String,
}

impl<'a> Place<'a> {
    fn new(scenario: &'a Scenario, node: &'a Node) -> Self {
        // The other iptables needs less.
        let legacy = ["update-alternatives", "--set", "iptables", "/usr/sbin/iptables-legacy"];
        node.run(&legacy).unwrap();
        node.run(&["sh", "-c", FILES, "sh", DATA]).unwrap();
        let program = node.path(&format!("{DATA}/program"));
        rustix::fs::setxattr(program, CAPABILITY, &FILE_CAPABILITY, XattrFlags::empty()).unwrap();
        let mount = format!("type=bind,src={DATA},dst=/data,options=rbind:rw");
        scenario.run_workload(node, "job", 16, &["--mount", &mount]).unwrap();
        // What it writes to its own root is nobody else's to read either.
        let own = "mkdir -m 0700 /own && echo own > /own/file && chown -R 1234:1234 /own";
        node.told(&["ctr", "task", "exec", "--exec-id", "own", "job", "sh", "-c", own]).unwrap();
        let (listed, taken, before) = (list(node, DATA), String::new(), String::new());
        let mut place = Self { scenario, node, listed, taken, before };
        place.taken = place.scenario.reference(&format!("privileges/{}:whole", node.name()));
        let agent = place.start(&left()).unwrap();
        place.take(&place.taken).unwrap();
        assert_eq!(place.asked(), None, "with all that the unit leaves");
        place.scenario.remove(node, "copy").unwrap();
        drop(agent);
        place.before = place.scenario.traces(node).unwrap();
        place
    }

    /// Starts an agent that has these capabilities, and can get no others.
    fn start(&self, names: &BTreeSet<&str>) -> Result<Agent, ScenarioError> {
        let names = names.iter().map(|name| name.trim_start_matches("CAP_").to_ascii_lowercase());
        let set = names.fold("-all".to_owned(), |set, name| set + ",+" + &name);
        let by = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set", &set];
        self.scenario.start_agent_by(&by, self.node, HOOKS)
    }

    /// Asks an agent for one thing after the other, and returns what is not done as it should be.
    fn asked(&self) -> Option<Task> {
        let reference = self.scenario.reference(&format!("privileges/{}:less", self.node.name()));
        [Take, Restore, End, Unlock].into_iter().find(|task| {
            let done = match task {
                Take => self.take(&reference),
                Restore => self.restores(),
                End => self.ends(),
                Unlock => self.unlocks(),
            };
            done.is_err_and(|why| {
                println!("{task:?}: {why}");
                true
            })
        })
    }

    fn kyb(&self, words: &[&str]) -> Result<(), String> {
        let output = self.scenario.kyb(self.node, words).map_err(|error| error.to_string())?;
        if output.status.success() { Ok(()) } else { Err(said(&output)) }
    }

    fn take(&self, reference: &str) -> Result<(), String> {
        let key = format!("node-{}", self.node.name());
        let words = ["checkpoint", "job", reference, "--plain-http", "--sign-key", &key];
        self.kyb(&[&words[..], &["--capture-mount", "/data"]].concat())
    }

    fn restores(&self) -> Result<(), String> {
        self.kyb(&["restore", &self.taken, "--plain-http", "--name", "copy"])?;
        let listed = list(self.node, COPY);
        if listed != self.listed {
            return Err(listed);
        }
        let mut held = [0; 32];
        let program = self.node.path(&format!("{COPY}/program"));
        let length = rustix::fs::getxattr(program, CAPABILITY, &mut held[..]).unwrap_or_default();
        if held[..length] != FILE_CAPABILITY {
            return Err("the file capability is not what it was".to_owned());
        }
        Ok(())
    }

    fn ends(&self) -> Result<(), String> {
        drop(self.kyb(&self.fails("hang")));
        // The agent has killed it before it answers.
        let is_ended = wait_until(DEATH_LIMIT, || self.hung().is_empty());
        if is_ended { Ok(()) } else { Err("the hook of another user is left".to_owned()) }
    }

    fn unlocks(&self) -> Result<(), String> {
        if self.rules().contains("CRIU") {
            return Err("it was locked before".to_owned());
        }
        self.inside(LOCK);
        drop(self.kyb(&self.fails("spoil")));
        let rules = self.rules();
        if rules.contains("CRIU") { Err(rules) } else { Ok(()) }
    }

    /// Runs a script in the source's network.
    fn inside(&self, script: &str) -> String {
        let job =
            workloads::Place { node: self.node, namespace: "default", id: "job", state: "/state" };
        let pid = job.pid().unwrap().to_string();
        self.node.run(&["nsenter", "-t", &pid, "-n", "sh", "-c", script]).unwrap()
    }

    fn rules(&self) -> String {
        self.inside("iptables -S")
    }

    /// Returns the words of a checkpoint that a hook lets fail.
    fn fails(&self, hook: &'static str) -> [&str; 7] {
        ["checkpoint", "job", &self.taken, "--plain-http", "--unsigned", "--hook", hook]
    }

    /// Returns the hooks that hang.
    fn hung(&self) -> Vec<Process> {
        let line = |pid| fs_err::read_to_string(format!("/proc/{pid}/cmdline"));
        processes(self.node, |pid| line(pid).is_ok_and(|line| line == "sleep\x004242\0"))
    }

    /// Asks an agent that lacks one capability; one with all of them puts right what that leaves.
    fn without(&self, name: &str) -> Task {
        let mut names = left();
        assert!(names.remove(name), "the unit leaves no {name}");
        println!("without {name} on {}", self.node.name());
        let agent = self.start(&names).unwrap();
        let lost = self.asked();
        // It may be at what it cannot do.
        agent.kill();
        self.put_right();
        lost.unwrap_or_else(|| panic!("{name} is not missed on {}", self.node.name()))
    }

    fn put_right(&self) {
        signal(&self.hung(), Signal::KILL);
        let agent = self.start(&left()).unwrap();
        if has_task(self.node, "copy") {
            self.scenario.remove(self.node, "copy").unwrap();
        }
        drop(self.kyb(&self.fails("spoil")));
        assert!(!self.rules().contains("CRIU"));
        self.scenario.wait_for_ticks(self.node, "job").unwrap();
        drop(agent);
        let traces = self.scenario.traces(self.node).unwrap();
        let new: Vec<_> = traces.lines().filter(|line| !self.before.contains(line)).collect();
        assert!(new.is_empty(), "{new:#?}");
    }
}

/// Tells how files are, and whose.
fn list(node: &Node, place: &str) -> String {
    node.run(&["sh", "-c", LIST, "sh", place]).unwrap()
}

fn has_task(node: &Node, id: &str) -> bool {
    let tasks = node.run(&["ctr", "task", "ls", "-q"]).unwrap();
    tasks.lines().any(|line| line == id)
}

#[test]
fn nothing_is_left_to_the_agent_that_it_does_not_need() {
    let mut scenario = start();
    drop((scenario.agent_a.take(), scenario.agent_b.take()));
    let needed: BTreeSet<&str> = NEEDED.iter().map(|(name, _)| *name).collect();
    assert_eq!(left(), needed);
    at_once(&scenario, |node| {
        let place = Place::new(&scenario, node);
        let lost = NEEDED.map(|(name, _)| (name, place.without(name)));
        assert_eq!(lost, NEEDED, "on {}", node.name());
    });
    scenario.end().unwrap();
}
