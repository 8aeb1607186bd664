//! Real programs, taken on one node and brought back on the other, with their state proven; then the
//! restored ones are taken and brought back once more. The table in the agent's README is made of
//! what is run here.

pub(crate) mod client;
pub(crate) mod own;
pub(crate) mod programs;
pub(crate) mod proof;
pub(crate) mod servers;
mod table;

use std::process::Stdio;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use self::proof::{Identity, LIMIT, Status, goes_on};
use crate::harness::said;
use crate::pods;

/// A container whose processes say of themselves that nothing about them is wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// Name of the container and of its checkpoints.
    pub(crate) id: &'static str,
    /// What the table calls it.
    name: &'static str,
    /// What the table says is the same afterwards.
    proven: &'static str,
    /// More for `ctr run`.
    options: &'static [&'static str],
    pub(crate) command: &'static [&'static str],
    /// Where it says how it is, in its own root.
    pub(crate) state: &'static str,
    /// More for `kyb restore`.
    allow: &'static [&'static str],
    /// A finding, and when the workload is refused for it.
    unless: Option<(&'static str, &'static str)>,
}

/// A node, its container, and where that says how it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) node: &'a Node,
    /// containerd's namespace.
    pub(crate) namespace: &'a str,
    pub(crate) id: &'a str,
    pub(crate) state: &'a str,
}

/// Waits until a container has what it is refused for: a program that starts takes its time.
fn refuses(scenario: &Scenario, node: &Node, id: &str, finding: &str) {
    let mut last = String::new();
    let refused = wait_until(LIMIT, || {
        let output = scenario.kyb(node, &["preflight", id]).unwrap();
        last = said(&output);
        output.status.code() == Some(2) && last.contains(&format!("refuse {finding}"))
    });
    assert!(refused, "{id} is not refused for {finding}: {last}");
}

impl Workload {
    const fn on<'a>(&'a self, node: &'a Node) -> Place<'a> {
        Place { node, namespace: "default", id: self.id, state: self.state }
    }

    /// Takes it on one node, restores it on another, takes that and restores it again. After each
    /// restore it must be what it was, and `proves` looks for more.
    fn moves(
        &self,
        scenario: &Scenario,
        image: &str,
        [from, to]: [&Node; 2],
        proves: &dyn Fn(Place<'_>),
    ) {
        let words = [&["ctr", "run", "-d"], self.options, &[image, self.id], self.command];
        from.run(&words.concat()).unwrap_or_else(|error| panic!("{}: {error}", self.id));
        let begun = goes_on(self.on(from), None);
        let who = Identity::of(self.on(from));
        self.take(scenario, from, "1");
        // It is not the worse for it.
        goes_on(self.on(from), Some(&begun));
        scenario.remove(from, self.id).unwrap();
        let mut last = begun.clone();
        for (tag, next) in [("1", Some("2")), ("2", None)] {
            self.restore(scenario, to, tag);
            last = goes_on(self.on(to), Some(&last));
            assert_eq!(last.boot, begun.boot, "{}: it was started anew", self.id);
            assert_eq!(last.threads, begun.threads, "{}: threads", self.id);
            assert_eq!(Identity::of(self.on(to)), who, "{}: it may more or less now", self.id);
            proves(self.on(to));
            if let Some(next) = next {
                self.take(scenario, to, next);
                goes_on(self.on(to), Some(&last));
            }
            scenario.remove(to, self.id).unwrap();
        }
    }

    /// What was moved goes on as a container that kybernate-runc creates, on each of these nodes; the
    /// last one is taken, and goes on there once more.
    fn goes_on_in_pods(&self, scenario: &Scenario, [first, last]: [&Node; 2]) {
        let mut who = None;
        let mut before: Option<Status> = None;
        // What an older node took, an older one can have.
        for (node, tag, next) in [(first, "1", None), (last, "2", Some("3")), (last, "3", None)] {
            let reference = self.reference(scenario, tag);
            let digest =
                scenario.testbed.b.run(&["crane", "digest", "--insecure", &reference]).unwrap();
            let pinned = format!("{reference}@{}", digest.trim());
            pods::make_ready(scenario, node, &pinned);
            let wish = format!("restore.kybernate.io/main={pinned}");
            let mut create =
                pods::command_of(node, [&pinned, self.id], &[&wish], self.options, self.command);
            let output = create.stdin(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "{}: {}", self.id, said(&output));
            let now = goes_on(self.on(node), before.as_ref().filter(|_| tag == "3"));
            let boot = before.as_ref().map_or(now.boot, |before| before.boot);
            assert_eq!(now.boot, boot, "{}: it was started anew", self.id);
            let is = Identity::of(self.on(node));
            assert_eq!(*who.get_or_insert_with(|| is.clone()), is, "{}", self.id);
            if let Some(next) = next {
                self.take(scenario, node, next);
            }
            before = Some(now);
            scenario.remove(node, self.id).unwrap();
        }
    }

    /// It is found out before it is paused that it cannot be taken.
    fn is_refused(&self, scenario: &Scenario, image: &str, node: &Node, finding: &str) {
        let words = [&["ctr", "run", "-d"], self.options, &[image, self.id], self.command];
        node.run(&words.concat()).unwrap();
        refuses(scenario, node, self.id, finding);
        scenario.remove(node, self.id).unwrap();
    }

    fn reference(&self, scenario: &Scenario, tag: &str) -> String {
        // One repository: what the image has is in it once.
        scenario.reference(&format!("workloads/all:{}-{tag}", self.id))
    }

    fn take(&self, scenario: &Scenario, node: &Node, tag: &str) {
        let (key, reference) = (format!("node-{}", node.name()), self.reference(scenario, tag));
        let words = ["checkpoint", self.id, &reference, "--plain-http", "--sign-key", &key];
        let output = scenario.kyb(node, &words).unwrap();
        assert!(output.status.success(), "{}: {}", self.id, said(&output));
    }

    fn restore(&self, scenario: &Scenario, node: &Node, tag: &str) {
        let reference = self.reference(scenario, tag);
        let words = ["restore", &reference, "--plain-http", "--name", self.id];
        let output = scenario.kyb(node, &[&words[..], self.allow].concat()).unwrap();
        assert!(output.status.success(), "{}: {}", self.id, said(&output));
    }
}
