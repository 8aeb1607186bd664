//! Established TCP connections that are kept: nothing on them is lost, and nothing comes twice, whoever
//! dies in the middle.

use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use rustix::process::Signal;

use self::site::{BOTH, ID, Site};
use crate::failures::victims::{END_LIMIT, catch, guards, processes, running, signal};
use crate::harness::{said, start};

pub(crate) mod moves;
mod site;

/// Of a container whose dump must last long enough to be caught.
const MIB: &str = "192";

impl Site<'_> {
    /// Whether CRIU has every socket in its hands, and writes memory: until then what it has run in a
    /// process may take that along (`spec/decisions/0015`).
    fn is_written(&self) -> bool {
        let stage = self.node.path("/run/kybernate/stage");
        let Ok(dumps) = fs::read_dir(stage) else { return false };
        dumps.flatten().any(|dump| {
            let pages = fs::metadata(dump.path().join("images/pages-1.img"));
            pages.is_ok_and(|pages| pages.len() > 1 << 20)
        })
    }

    /// Begins to take the container with its connections.
    fn taking(&self, reference: &str, more: &[&str]) -> Child {
        let key = format!("node-{}", self.node.name());
        let words = ["kyb", "checkpoint", ID, reference, "--plain-http", "--sign-key", &key];
        let mut kyb = self.node.command(&[&words[..], &["--tcp", "keep"], more].concat());
        let told = fs::File::create(self.scenario.testbed.private().join("kyb.log")).unwrap();
        kyb.stdout(Stdio::null()).stderr(told.into_parts().0).spawn().unwrap()
    }

    /// Begins a checkpoint that keeps connections, and stops its CRIU when that has them in its hands.
    fn caught(&self, more: &[&str]) -> Child {
        let kyb = self.taking(&self.scenario.reference("connections/cut:v1"), more);
        assert!(catch(|| self.is_written()), "no memory is written: {}", self.told());
        let criu = running(self.node, "criu");
        signal(&criu, Signal::STOP);
        assert!(!criu.is_empty() && self.is_written(), "it was over: {}", self.told());
        kyb
    }

    /// The checkpoint fails, nothing is left of it, and both ends hear each other.
    fn goes_on(&self, mut kyb: Child, what: &str) {
        assert_eq!(kyb.wait().unwrap().code(), Some(1), "{what}: {}", self.told());
        let over =
            || running(self.node, "criu").is_empty() && processes(self.node, guards).is_empty();
        assert!(wait_until(END_LIMIT, over), "{what}: somebody is left\n{}", self.told());
        self.talks(BOTH, what, &|| self.told());
        assert_eq!(self.locks(), "", "{what}: its network is locked");
    }

    fn told(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.scenario.testbed.private().join(name));
        let agent = format!("agent-{}.log", self.node.name());
        ["kyb.log", &agent].map(|name| read(name).unwrap_or_default()).join("\n")
    }

    fn kyb(&self, words: &[&str]) {
        let output = self.scenario.kyb(self.node, words).unwrap();
        assert!(output.status.success(), "{}", said(&output));
    }
}

#[test]
fn kept_connections_go_on_when_a_dump_is_cut_short() {
    let mut scenario = start();
    let agent = scenario.agent_b.take().unwrap();
    let mut site = Site::new(&scenario, &scenario.testbed.b);
    let node = site.node;

    // Somebody kills CRIU: what runs until the agent has seen that may be denied a read.
    site.start(MIB);
    let taken = site.caught(&[]);
    signal(&running(node, "criu"), Signal::KILL);
    site.goes_on(taken, "CRIU is killed");

    // It hangs, and is ended when the deadline has passed: nobody notices.
    site.start(MIB);
    let taken = site.caught(&["--pause-deadline", "2s"]);
    site.goes_on(taken, "CRIU hangs");
    assert!(!site.was_denied(), "a read was denied");

    // The same in the node's own network, where CRIU locks each connection.
    site.start_on_node(MIB);
    let taken = site.caught(&["--pause-deadline", "2s"]);
    assert!(site.locks().contains("0xc114"), "nothing is locked: {}", site.locks());
    site.goes_on(taken, "CRIU hangs on the node");
    assert!(!site.was_denied(), "a read was denied");

    // The same while it is suspended, when nobody lets it run.
    site.start(MIB);
    site.talks(BOTH, "before it is suspended", &|| site.told());
    site.kyb(&["suspend", ID]);
    let mut taken = site.caught(&["--pause-deadline", "2s"]);
    assert_eq!(taken.wait().unwrap().code(), Some(1), "{}", site.told());
    site.kyb(&["resume", ID]);
    site.goes_on(taken, "CRIU hangs, and it is suspended");
    assert!(!site.was_denied(), "a read was denied");

    // It hangs, and no agent is there any more.
    site.start(MIB);
    let taken = site.caught(&[]);
    agent.kill();
    site.goes_on(taken, "CRIU hangs, and the agent is dead");
    assert!(!site.was_denied(), "a read was denied");
    drop(site);
    scenario.end().unwrap();
}
