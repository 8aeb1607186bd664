//! Servers whose clients come back: their connections end at the cut, all else goes on.

use std::collections::BTreeSet;
use std::io;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::programs::Programs;
use kybernate_conformance::scenario::Scenario;

use super::client::{Line, Load, inside};
use super::proof::LIMIT;
use super::{Place, programs, refuses};
use crate::harness::{nodes, restore, said};

/// A server, and what the table says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Server {
    pub(crate) id: &'static str,
    pub(super) name: &'static str,
    pub(super) proven: &'static str,
    pub(crate) command: &'static [&'static str],
}

pub(crate) const REDIS: Server = Server {
    id: "redis",
    name: "redis under load",
    proven: "no write is lost that was acknowledged before the cut; clients connect again",
    command: &[
        "redis-server",
        "--port",
        "6379",
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        "/tmp",
    ],
};

pub(crate) const NGINX: Server = Server {
    id: "nginx",
    name: "nginx with two workers",
    proven: "the same processes; the count of requests, which the workers share, goes on",
    command: &[
        "busybox",
        "sh",
        "-c",
        "printf %s \"$1\" >/tmp/conf && exec nginx -e stderr -c /tmp/conf",
        "sh",
        "daemon off; worker_processes 2; user root root; pid /tmp/pid; events {} http { \
         access_log off; client_body_temp_path /tmp/a; proxy_temp_path /tmp/b; \
         fastcgi_temp_path /tmp/c; uwsgi_temp_path /tmp/d; scgi_temp_path /tmp/e; \
         server { listen 127.0.0.1:8080; location / { stub_status; } } }",
    ],
};

pub(crate) const LISTENER: Server = Server {
    id: "listener",
    name: "a listening server with connected clients (Python, asyncio)",
    proven: "its state; clients connect again",
    command: &["python3", "-c", include_str!("server.py")],
};

/// Of these, a table is made.
pub(super) const ALL: [Server; 3] = [REDIS, NGINX, LISTENER];

/// What its checkpoints are called, one after the other.
const TAGS: [&str; 2] = ["1", "2"];

/// Why none of them is taken on node a.
pub(super) const REFUSED: &str = "inet-socket";

impl Server {
    fn on<'a>(&'a self, node: &'a Node) -> Place<'a> {
        Place { node, namespace: "default", id: self.id, state: "" }
    }

    fn start(&self, node: &Node, image: &str) {
        // Only a container with a file of its own can have its connections closed.
        let config = format!("org.criu.config=/var/lib/kybernate/criu/{}.conf", self.id);
        let words = ["ctr", "run", "-d", "--annotation", &config, image, self.id];
        node.run(&[&words[..], self.command].concat()).unwrap();
    }

    /// Takes it, which ends it, and brings it back: what was answered until its end is all there is.
    fn comes_back(&self, scenario: &Scenario, [from, to]: [&Node; 2], tag: &str) {
        let reference = scenario.reference(&format!("workloads/all:{}-{tag}", self.id));
        let key = format!("node-{}", from.name());
        let words = ["checkpoint", self.id, &reference, "--plain-http", "--sign-key", &key];
        let output =
            scenario.kyb(from, &[&words[..], &["--tcp", "close", "--stop"]].concat()).unwrap();
        assert!(output.status.success(), "{}: {}", self.id, said(&output));
        scenario.remove(from, self.id).unwrap();
        let output = restore(scenario, to, &reference, self.id, &[]);
        assert!(output.status.success(), "{}: {}", self.id, said(&output));
    }

    /// Asks it once, on a connection of its own, and returns the first line of the answer.
    fn ask(&self, node: &Node, port: u16, words: String) -> String {
        inside(self.on(node), move || Line::connect(port).ask(&words).unwrap()).join().unwrap()
    }
}

/// Whether Linux changed its netlink interface for sockets since CRIU 4.1.
pub(crate) fn is_refused_on_a() -> bool {
    kernel_is((6, 16))
}

/// Whether this machine's kernel is such a one, or a later one.
pub(crate) fn kernel_is(least: (u32, u32)) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(least.0), Some(least.1))
}

#[test]
fn servers_come_back_and_their_clients_too() {
    let (scenario, image) = programs::start(Programs::Servers);
    let [a, b] = nodes(&scenario);
    for server in ALL {
        if !is_refused_on_a() {
            println!("skipped: here CRIU 4.1 takes internet sockets too");
            break;
        }
        server.start(a, &image);
        refuses(&scenario, a, server.id, REFUSED);
        scenario.remove(a, server.id).unwrap();
    }
    come_back(&scenario, &[[b, b], [b, b]], &image);
    scenario.end().unwrap();
}

/// Where the kernel still lets CRIU 4.1 take internet sockets, as the emulated machine's does
/// (`emulated`).
pub(crate) fn servers_go_from_an_older_node_to_a_newer_one(scenario: &Scenario, image: &str) {
    assert!(!is_refused_on_a(), "this kernel is too new for CRIU 4.1");
    // Once: that what was restored is taken and restored again is shown on b, without this machine.
    come_back(scenario, &[nodes(scenario)], image);
}

/// Takes each on one node and brings it back on another, and takes that on the next way.
fn come_back(scenario: &Scenario, ways: &[[&Node; 2]], image: &str) {
    redis(scenario, ways, image);
    nginx(scenario, ways, image);
    listener(scenario, ways, image);
}

/// Returns where a server is started, and where it is in the end.
fn ends<'a>(ways: &[[&'a Node; 2]]) -> [&'a Node; 2] {
    [ways[0][0], ways[ways.len() - 1][1]]
}

/// One write, which counts when it was answered.
pub(crate) fn write(line: &mut Line, client: usize, number: u64) -> io::Result<()> {
    let answer = line.ask(&format!("SET {client}:{number} {number}\r\n"))?;
    if answer == "+OK" { Ok(()) } else { Err(io::Error::other(answer)) }
}

/// Returns how many of a client's first writes are there.
pub(crate) fn held(client: usize, acknowledged: u64) -> u64 {
    let mut line = Line::connect(REDIS_PORT);
    let keys: Vec<String> = (1..=acknowledged).map(|number| format!("{client}:{number}")).collect();
    // A line has 64 KiB at most.
    let asked = keys.chunks(1000).map(|keys| format!("EXISTS {}\r\n", keys.join(" ")));
    asked.map(|words| line.ask(&words).unwrap()[1..].parse::<u64>().unwrap()).sum()
}

pub(crate) const REDIS_PORT: u16 = 6379;

fn redis(scenario: &Scenario, ways: &[[&Node; 2]], image: &str) {
    const CLIENTS: usize = 4;
    let [first, last] = ends(ways);
    REDIS.start(first, image);
    for (tag, &[from, to]) in TAGS.into_iter().zip(ways) {
        assert_eq!(REDIS.ask(from, REDIS_PORT, "FLUSHALL\r\n".to_owned()), "+OK");
        let load = Load::start(REDIS.on(from), REDIS_PORT, CLIENTS, write);
        let wanted = format!("EXISTS {}\r\n", ["0:50", "1:50", "2:50", "3:50"].join(" "));
        let under_load = || REDIS.ask(from, REDIS_PORT, wanted.clone()) == ":4";
        assert!(wait_until(LIMIT, under_load));
        REDIS.comes_back(scenario, [from, to], tag);
        for (client, acknowledged) in load.end().into_iter().enumerate() {
            let held = inside(REDIS.on(to), move || held(client, acknowledged));
            assert_eq!(held.join().unwrap(), acknowledged, "of client {client}");
        }
    }
    scenario.remove(last, REDIS.id).unwrap();
}

/// Returns the ids that the processes of a container have in it.
pub(crate) fn processes(place: Place<'_>) -> BTreeSet<u32> {
    let directory = place.node.path(&format!("/proc/{}/root/proc", place.pid().unwrap()));
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).collect()
}

pub(crate) const NGINX_PORT: u16 = 8080;

/// Asks a few times, and returns what a worker says of all at last: `ACCEPTED HANDLED REQUESTS`, on
/// the third line of four.
pub(crate) fn requests(place: Place<'_>, times: u32) -> u64 {
    let answer = inside(place, move || {
        let ask = |_| {
            let mut line = Line::connect(NGINX_PORT);
            line.ask("GET / HTTP/1.0\r\n\r\n").map(|_| line.rest()).unwrap()
        };
        (0..times).fold(Vec::new(), |_, at| ask(at))
    });
    let lines = answer.join().unwrap();
    let counts = lines.iter().rev().nth(1).unwrap();
    counts.split_whitespace().nth(2).unwrap().parse().unwrap()
}

fn nginx(scenario: &Scenario, ways: &[[&Node; 2]], image: &str) {
    let [first, last] = ends(ways);
    NGINX.start(first, image);
    requests(NGINX.on(first), 20);
    // One worker may answer before the other one is there.
    assert!(wait_until(LIMIT, || processes(NGINX.on(first)).len() == 3));
    for (tag, &[from, to]) in TAGS.into_iter().zip(ways) {
        // A connection that is kept open, and that the cut ends.
        let kept = inside(NGINX.on(from), || {
            let mut line = Line::connect(NGINX_PORT);
            line.ask("GET / HTTP/1.1\r\nHost: x\r\n\r\n").map(|_| line)
        });
        let kept = kept.join().unwrap().unwrap();
        let (before, had) = (requests(NGINX.on(from), 1), processes(NGINX.on(from)));
        assert_eq!(had.len(), 3, "{had:?}");
        NGINX.comes_back(scenario, [from, to], tag);
        drop(kept);
        assert_eq!(requests(NGINX.on(to), 1), before + 1);
        assert_eq!(processes(NGINX.on(to)), had);
    }
    scenario.remove(last, NGINX.id).unwrap();
}

pub(crate) const LISTENER_PORT: u16 = 7000;

/// What the listener says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Heard {
    /// A number that it drew when it began.
    pub(crate) boot: String,
    /// How many lines it was sent in all.
    pub(crate) count: u64,
}

impl Heard {
    /// Sends it one more line.
    pub(crate) fn from(place: Place<'_>) -> Self {
        let ask = || Line::connect(LISTENER_PORT).ask("heard\n").unwrap();
        let answer = inside(place, ask).join().unwrap();
        let mut words = answer.split(' ');
        let mut next = || words.next().unwrap();
        Self { boot: next().to_owned(), count: next().parse().unwrap() }
    }

    /// Lets clients begin, and waits until it is busy with them.
    pub(crate) fn under_load(place: Place<'_>) -> (Self, Load) {
        let load = Load::start(place, LISTENER_PORT, 3, |line, client, number| {
            let answer = line.ask(&format!("{client}-{number}\n"))?;
            let own = answer.ends_with(&format!(" {client}-{number}"));
            if own { Ok(()) } else { Err(io::Error::other(answer)) }
        });
        let begun = Self::from(place);
        let busy = || Self::from(place).count > begun.count + 100;
        assert!(wait_until(LIMIT, busy), "the listener is not busy");
        (begun, load)
    }

    /// It goes on, and nothing is missing of what was answered to those who connected to it.
    pub(crate) fn goes_on(place: Place<'_>, (begun, load): (Self, Load)) -> Self {
        let answered: u64 = load.end().into_iter().sum();
        let after = Self::from(place);
        assert_eq!(after.boot, begun.boot, "the listener was started anew");
        assert!(after.count > answered, "{after:?}: {answered} were answered");
        after
    }
}

fn listener(scenario: &Scenario, ways: &[[&Node; 2]], image: &str) {
    let [first, last] = ends(ways);
    LISTENER.start(first, image);
    for (tag, &[from, to]) in TAGS.into_iter().zip(ways) {
        let before = Heard::under_load(LISTENER.on(from));
        LISTENER.comes_back(scenario, [from, to], tag);
        Heard::goes_on(LISTENER.on(to), before);
    }
    scenario.remove(last, LISTENER.id).unwrap();
}
