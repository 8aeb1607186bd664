//! Two network namespaces on a node with a cable between them: a container in one, and in the other a
//! process of the node that it talks to. Or two for the container, which has the same address in both, as
//! on two nodes, one after the other.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::image::WORKLOAD;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Service;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::END_LIMIT;

/// Name of the container.
pub(crate) const ID: &str = "talker";
/// Its network namespace, and one that has loopback and nothing else.
pub(crate) const INNER: &str = "inner";
pub(crate) const ELSEWHERE: &str = "elsewhere";
/// Who listens in the other one, on a cable to the inner network and on another to the node's own.
const LISTENS: &str = "[::]:7000";
const ADDRESS: &str = "10.99.0.1:7000";
const ADDRESS_6: &str = "[fd99::1]:7000";
const FROM_NODE: &str = "10.98.0.1:7000";
/// How far both ends are to come before they are believed: more than what lies in their buffers.
const ENOUGH: u64 = 200_000;

const NETWORKS: &str = "set -e; ip netns add inner; ip netns add outer; ip netns add elsewhere; \
    ip link add in0 netns inner type veth peer name out0 netns outer; \
    ip -n inner addr add 10.99.0.2/24 dev in0; ip -n outer addr add 10.99.0.1/24 dev out0; \
    ip -n inner addr add fd99::2/64 dev in0 nodad; ip -n outer addr add fd99::1/64 dev out0 nodad; \
    ip link add node0 type veth peer name out1 netns outer; \
    ip addr add 10.98.0.2/24 dev node0; ip -n outer addr add 10.98.0.1/24 dev out1; \
    ip link set node0 up; ip -n outer link set out1 up; \
    for net in inner outer elsewhere; do ip -n $net link set lo up; done; \
    ip -n inner link set in0 up; ip -n outer link set out0 up";

/// Two networks in which a container has the same address, as on two nodes: of what is sent to that, the
/// node leads all to the first. Its own address is that of both their gateways.
const ROAMS: &str = "set -e; for net in inner second; do ip netns add $net; \
    ip link add in0 netns $net type veth peer name out-$net; \
    ip -n $net addr add 10.99.0.2/24 dev in0; ip addr add 10.99.0.1/32 dev out-$net; \
    ip -n $net link set lo up; ip -n $net link set in0 up; ip link set out-$net up; \
    done; ip netns add outer; ip route add 10.99.0.2/32 dev out-inner";
/// The second of them.
pub(crate) const SECOND: &str = "second";
/// Leads everything to the second.
const MOVES: &str = "ip route replace 10.99.0.2/32 dev out-second";

/// The networks, and who listens.
pub(crate) struct Site<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) node: &'a Node,
    speaker: Option<Service>,
}

impl<'a> Site<'a> {
    pub(crate) fn new(scenario: &'a Scenario, node: &'a Node) -> Self {
        Self::with(scenario, node, NETWORKS)
    }

    /// The same for a container whose address comes into another network with it.
    pub(crate) fn roaming(scenario: &'a Scenario, node: &'a Node) -> Self {
        Self::with(scenario, node, ROAMS)
    }

    fn with(scenario: &'a Scenario, node: &'a Node, networks: &str) -> Self {
        node.run(&["sh", "-c", networks]).unwrap();
        fs::write(node.path("/root/workload"), WORKLOAD).unwrap();
        node.run(&["chmod", "+x", "/root/workload"]).unwrap();
        node.run(&["ctr", "image", "pull", "--plain-http", &scenario.image()]).unwrap();
        Self { scenario, node, speaker: None }
    }

    /// Begins in the first network, with somebody who listens in the node's own.
    pub(crate) fn start_roaming(&mut self) {
        self.listens(&["/root/workload", "speak", LISTENS]);
        self.start_with(&["talk", ADDRESS, "--state", "/state", "--mib", "16"], "");
    }

    /// Leads the container's address into the second.
    pub(crate) fn comes_to_second(&self) {
        self.node.run(&["sh", "-c", MOVES]).unwrap();
    }

    /// Begins anew: another container, and another one that it talks to.
    pub(crate) fn start(&mut self, mib: &str) {
        self.speaks();
        self.start_with(&["talk", ADDRESS, "--state", "/state", "--mib", mib], "");
    }

    /// The same with one in the same network, by IPv6.
    pub(crate) fn start_6(&mut self, mib: &str) {
        self.speaks();
        self.start_with(&["talk", ADDRESS_6, "--state", "/state", "--mib", mib], "");
    }

    /// The same with one in the node's own network.
    pub(crate) fn start_on_node(&mut self, mib: &str) {
        self.speaks();
        let words = ["talk", FROM_NODE, "--state", "/state", "--mib", mib];
        self.run(&["--net-host"], &words, "");
    }

    fn speaks(&mut self) {
        if self.speaker.take().is_some() {
            self.scenario.remove(self.node, ID).unwrap();
        }
        self.node.run(&["rm", "-rf", "/root/speaker"]).unwrap();
        self.listens(&["ip", "netns", "exec", "outer", "/root/workload", "speak", LISTENS]);
    }

    fn listens(&mut self, words: &[&str]) {
        let mut command: Command = self.node.command(words);
        command.args(["--state", "/root/speaker"]).stderr(Stdio::null());
        self.speaker = Some(Service::start(&mut command).unwrap());
    }

    /// Runs a container in the inner network, and waits until one of it talks.
    pub(crate) fn start_with(&self, words: &[&str], place: &str) {
        self.run(&["--with-ns", &format!("network:/run/netns/{INNER}")], words, place);
    }

    fn run(&self, options: &[&str], words: &[&str], place: &str) {
        let image = self.scenario.image();
        let run = [&["ctr", "run", "-d"], options, &[&image, ID, "/workload"], words];
        self.node.run(&run.concat()).unwrap();
        assert!(wait_until(END_LIMIT, || self.spoken(place) > 0), "they do not talk");
    }

    /// A file of one of them: of the container's, or of who it talks to.
    fn file(&self, name: &str) -> PathBuf {
        let own =
            format!("/run/containerd/io.containerd.runtime.v2.task/default/{ID}/rootfs/state");
        let place = if name.starts_with("speaker/") { "/root" } else { &own };
        self.node.path(&format!("{place}/{name}"))
    }

    /// How far one of them is.
    fn spoken(&self, place: &str) -> u64 {
        let text = fs::read_to_string(self.file(&format!("{place}spoken")));
        text.ok().and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Both ends hear each other, one number after the other, beyond what was on its way.
    pub(crate) fn talks(&self, [one, other]: [&str; 2], what: &str, told: &dyn Fn() -> String) {
        let before = [self.spoken(one), self.spoken(other)];
        let on = |place, before| self.spoken(place) > before + ENOUGH;
        let talk = wait_until(END_LIMIT, || on(one, before[0]) && on(other, before[1]));
        for place in [one, other] {
            let wrong = fs::read_to_string(self.file(&format!("{place}wrong"))).ok();
            assert_eq!(wrong, None, "{what}, {place:?}\n{}", told());
        }
        let now = [self.spoken(one), self.spoken(other)];
        assert!(talk, "{what}: they do not talk: {before:?}, then {now:?}\n{}", told());
    }

    /// Whether the container was denied a read.
    pub(crate) fn was_denied(&self) -> bool {
        self.file("denied").exists()
    }

    /// Rules that drop packets in the inner network and the node's.
    pub(crate) fn locks(&self) -> String {
        let script = "list() { $1 iptables -S; $1 ip6tables -S; $1 nft list tables; }; { list; \
            for net in inner second; do list \"ip netns exec $net\"; done; } 2>/dev/null | \
            grep -i 'CRIU\\|kybernate\\|0xc114'";
        let found = self.node.output(&["sh", "-c", script]).unwrap();
        String::from_utf8_lossy(&found.stdout).into_owned()
    }
}

/// The container, and who it talks to.
pub(crate) const BOTH: [&str; 2] = ["", "speaker/"];
