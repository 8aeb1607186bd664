//! Connections that move with a container which ends: from one network namespace into the same again.

use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::MIB;
use super::site::{BOTH, ELSEWHERE, ID, INNER, SECOND, Site};
use crate::failures::cancels;
use crate::failures::halt::halt;
use crate::failures::victims::{END_LIMIT, catch, running, signal};
use crate::harness::{restore, said, start};
use crate::pods::{CONFIG, command_of, make_ready};
use crate::workloads::servers::is_refused_on_a;

/// Both ends in one container.
const WITHIN: [&str; 2] = ["one/", "other/"];

impl Site<'_> {
    fn reference(&self, tag: &str) -> String {
        self.scenario.reference(&format!("connections/moved:{tag}"))
    }

    /// Takes the container with its connections.
    fn take(&self, tag: &str, more: &[&str]) {
        let reference = self.reference(tag);
        let key = format!("node-{}", self.node.name());
        let words = ["checkpoint", ID, &reference, "--plain-http", "--sign-key", &key];
        self.kyb(&[&words[..], &["--tcp", "keep"], more].concat());
    }

    /// Restores it into a network. Returns what was said when that failed.
    fn restored(&self, tag: &str, network: &str) -> Result<(), String> {
        let allow = format!("network:/run/netns/{network}");
        let more = ["--allow-host-namespace", &allow];
        let output = restore(self.scenario, self.node, &self.reference(tag), ID, &more);
        if output.status.success() { Ok(()) } else { Err(said(&output)) }
    }

    /// Begins to restore it into its network, and stops its CRIU when that has made the connection's
    /// socket, which is in repair mode.
    fn socket_is_made(&self, tag: &str) -> Child {
        let reference = self.reference(tag);
        let allow = format!("network:/run/netns/{INNER}");
        let words = ["kyb", "restore", &reference, "--plain-http", "--name", ID];
        let mut kyb = self.node.command(&words);
        kyb.args(["--allow-host-namespace", &allow]).stdout(Stdio::null());
        let told = fs::File::create(self.scenario.testbed.private().join("kyb.log")).unwrap();
        let kyb = kyb.stderr(told.into_parts().0).spawn().unwrap();
        let log = "work/restore.log";
        let begun = || cancels::says(self.node, log, "Restoring TCP connection");
        halt(self.node, begun, || !self.sockets().is_empty());
        kyb
    }

    /// TCP sockets in the inner network, of which only the container has any.
    fn sockets(&self) -> String {
        let script = "cat /proc/net/tcp /proc/net/tcp6 | grep -v local_address || true";
        self.node.run(&["ip", "netns", "exec", INNER, "sh", "-c", script]).unwrap()
    }

    /// Lets the registry stand still, so that nothing is pushed to its end, or go on.
    fn registry(&self, to: Signal) {
        let registry = self.scenario.registry.as_ref().unwrap().process().unwrap();
        signal(&[registry], to);
    }

    /// Begins to take and end it, and returns when its dump is over and it is held. The registry stands
    /// still then.
    fn held(&self) -> Child {
        let kyb = self.taking(&self.reference("never"), &["--stop"]);
        let stage = self.node.path("/run/kybernate/stage");
        let is_over = || {
            let Ok(mut dumps) = fs::read_dir(&stage) else { return false };
            dumps.any(|dump| {
                let log = dump.map(|dump| fs::read(dump.path().join("work/dump.log")));
                let log = log.and_then(|log| log).unwrap_or_default();
                String::from_utf8_lossy(&log).contains("Dumping finished")
            })
        };
        let over = catch(is_over);
        self.registry(Signal::STOP);
        assert!(over, "the dump does not end\n{}", self.told());
        assert!(self.locks().contains("kybernate-"), "nothing is held\n{}", self.told());
        kyb
    }
}

/// Ways to start a container with its connection: by IPv4, and by IPv6.
const STARTS: [fn(&mut Site<'_>); 2] = [|site| site.start("16"), |site| site.start_6("16")];

/// Takes a container with its connection, ends it and restores it into its network, twice, and looks at
/// both ends.
fn goes_on_where_it_is_restored(scenario: &Scenario, node: &Node, starts: &[fn(&mut Site<'_>)]) {
    let mut site = Site::new(scenario, node);
    for (start, tags) in starts.iter().zip([["1", "2"], ["3", "4"]]) {
        start(&mut site);
        site.talks(BOTH, "before", &|| site.told());
        for tag in tags {
            site.take(tag, &["--stop"]);
            assert!(site.locks().contains("kybernate-"), "{tag}: nothing is held");
            scenario.remove(site.node, ID).unwrap();
            if tag == tags[0] {
                // As on another node, where a pod has another address.
                let why = site.restored(tag, ELSEWHERE).unwrap_err();
                assert!(why.contains("bind inet"), "{why}");
                assert!(site.locks().contains("kybernate-"), "{tag}: it is not held any more");
            }
            site.restored(tag, INNER).unwrap();
            assert_eq!(site.locks(), "", "{tag}: it is still held");
            site.talks(BOTH, tag, &|| site.told());
        }
    }
    assert!(!site.was_denied(), "a read was denied");
}

#[test]
fn a_connection_goes_on_where_its_container_is_restored() {
    let scenario = start();
    goes_on_where_it_is_restored(&scenario, &scenario.testbed.b, &STARTS);
    scenario.end().unwrap();
}

/// By IPv4 alone: where this is shown it is slow (`emulated`).
pub(crate) fn a_connection_goes_on_on_an_older_node(scenario: &Scenario) {
    assert!(!is_refused_on_a(), "this kernel is too new for CRIU 4.1");
    let a = &scenario.testbed.a;
    goes_on_where_it_is_restored(scenario, a, &STARTS[..1]);
    scenario.remove(a, ID).unwrap();
}

#[test]
fn a_restore_that_is_cut_short_leaves_no_socket() {
    let scenario = start();
    let mut site = Site::new(&scenario, &scenario.testbed.b);
    let node = site.node;
    site.start(MIB);
    site.talks(BOTH, "before", &|| site.told());
    site.take("cut", &["--stop"]);
    scenario.remove(node, ID).unwrap();
    let before = scenario.traces(node).unwrap();
    let cuts: [(&str, &str, Signal); 2] =
        [("CRIU is killed", "criu", Signal::KILL), ("it is cancelled", "kyb", Signal::INT)];
    for (what, whom, how) in cuts {
        let mut kyb = site.socket_is_made("cut");
        signal(&running(node, whom), how);
        assert!(!kyb.wait().unwrap().success(), "{what}: {}", site.told());
        let over = || site.sockets().is_empty() && running(node, "criu").is_empty();
        assert!(wait_until(END_LIMIT, over), "{what}: {}\n{}", site.sockets(), site.told());
        assert!(site.locks().contains("kybernate-"), "{what}: it is not held any more");
        assert_eq!(scenario.traces(node).unwrap(), before, "{what}: something is left");
    }
    site.restored("cut", INNER).unwrap();
    site.talks(BOTH, "restored", &|| site.told());
    assert!(!site.was_denied(), "a read was denied");
    drop(site);
    scenario.end().unwrap();
}

/// As on another node, which has the address by then: whoever moves it leads it there when the restore is
/// through, and until then what is sent to it is dropped where the container was.
#[test]
fn a_connection_goes_on_where_its_address_has_moved() {
    let scenario = start();
    let mut site = Site::roaming(&scenario, &scenario.testbed.b);
    site.start_roaming();
    site.talks(BOTH, "before", &|| site.told());
    site.take("roams", &["--stop"]);
    let held = site.locks();
    assert!(held.contains("kybernate-"), "nothing is held");
    scenario.remove(site.node, ID).unwrap();
    site.restored("roams", SECOND).unwrap();
    site.comes_to_second();
    site.talks(BOTH, "with its address", &|| site.told());
    // Where it was nobody may answer, and in the second nobody has held anything.
    assert_eq!(site.locks(), held);
    assert!(!site.was_denied(), "a read was denied");
    drop(site);
    scenario.end().unwrap();
}

/// As in a Pod whose sandbox stays when its container is made anew.
#[test]
fn a_connection_goes_on_where_kybernate_runc_restores_its_container() {
    let mut scenario = start();
    scenario.agent_b.take().unwrap().kill();
    scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, CONFIG).unwrap());
    let mut site = Site::new(&scenario, &scenario.testbed.b);
    let node = site.node;
    site.start("16");
    site.talks(BOTH, "before", &|| site.told());
    site.take("pod", &["--stop"]);
    scenario.remove(node, ID).unwrap();
    let reference = site.reference("pod");
    let digest = node.run(&["crane", "digest", "--insecure", &reference]).unwrap();
    let pinned = format!("{reference}@{}", digest.trim());
    make_ready(&scenario, node, &pinned);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let network = format!("network:/run/netns/{INNER}");
    let (network, program) = (["--with-ns", &network], ["/workload", "pause"]);
    let mut command = command_of(node, [&pinned, ID], &[&wish], &network, &program);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(site.locks(), "", "it is still held");
    site.talks(BOTH, "as a pod's container", &|| site.told());
    drop(site);
    scenario.end().unwrap();
}

#[test]
fn connections_within_a_container_come_back_with_what_is_on_its_way() {
    let scenario = start();
    let site = Site::new(&scenario, &scenario.testbed.b);
    site.start_with(&["converse", "--state", "/state", "--mib", "16"], "one/");
    site.talks(WITHIN, "before", &|| site.told());
    site.take("within", &[]);
    site.talks(WITHIN, "while it runs on", &|| site.told());
    scenario.remove(site.node, ID).unwrap();
    // Loopback has the same address everywhere.
    for (tag, network) in [("within", ELSEWHERE), ("ended", ELSEWHERE)] {
        site.restored(tag, network).unwrap();
        site.talks(WITHIN, tag, &|| site.told());
        if tag == "within" {
            site.take("ended", &["--stop"]);
            scenario.remove(site.node, ID).unwrap();
        }
    }
    assert!(!site.was_denied(), "a read was denied");
    drop(site);
    scenario.end().unwrap();
}

#[test]
fn a_source_that_does_not_end_after_all_has_its_connections() {
    let mut scenario = start();
    let agent = scenario.agent_b.take().unwrap();
    let mut site = Site::new(&scenario, &scenario.testbed.b);

    // It is cancelled while it is pushed.
    site.start(MIB);
    let taken = site.held();
    signal(&running(site.node, "kyb"), Signal::INT);
    site.goes_on(taken, "it is cancelled");
    site.registry(Signal::CONT);

    // The agent dies then, and nobody starts it again.
    site.start(MIB);
    let taken = site.held();
    agent.kill();
    site.goes_on(taken, "the agent is dead");
    site.registry(Signal::CONT);
    drop(site);
    scenario.end().unwrap();
}
