//! Somebody who is not root listens where the agent or containerd should: nobody talks to them.

use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Service;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use rustix::thread::{Uid, set_thread_res_uid};

use crate::failures::victims::END_LIMIT;
use crate::harness::{said, start};
use crate::pods::{CONFIG, command_of};

/// Nobody in particular.
const STRANGER: u32 = 65534;
const AGENT: &str = "/run/kybernate/agent.sock";
const CONTAINERD: &str = "/run/containerd/containerd.sock";
/// What each of them says of it.
const REASON: &str = "whoever listens there is user 65534, and neither root nor you";

/// Listens as somebody who is not root: the kernel keeps who called listen(2), a thread here.
fn listen_as_a_stranger(path: &Path) -> UnixListener {
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let socket = std::thread::spawn(move || {
        let stranger = Uid::from_raw(STRANGER);
        set_thread_res_uid(stranger, stranger, stranger).unwrap();
        listen(&socket, 16).unwrap();
        socket
    });
    let listener = UnixListener::from(socket.join().unwrap());
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Puts a stranger in a socket's place, has `work` be done, and returns how many came to it. They must
/// have told nothing.
fn with_a_stranger(node: &Node, place: &str, work: impl FnOnce()) -> usize {
    let (path, away) = (node.path(place), node.path(&format!("{place}.away")));
    let had = path.exists();
    if had {
        fs::rename(&path, &away).unwrap();
    }
    let listener = listen_as_a_stranger(&path);
    work();
    let mut came = 0;
    loop {
        let mut stream: UnixStream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => panic!("{place}: {error}"),
        };
        stream.set_nonblocking(false).unwrap();
        let mut told = Vec::new();
        stream.read_to_end(&mut told).unwrap();
        assert_eq!(told, b"", "{place}: a stranger was told something");
        came += 1;
    }
    fs::remove_file(&path).unwrap();
    if had {
        fs::rename(away, path).unwrap();
    }
    came
}

#[test]
fn whoever_is_not_root_is_told_nothing() {
    let mut scenario = start();
    for name in ["a", "b"] {
        scenario.next_agent(name, CONFIG).unwrap();
        let node = scenario.node(name);
        let image = scenario.image();
        node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
        let came = with_a_stranger(node, AGENT, || {
            let output = scenario.kyb(node, &["ps"]).unwrap();
            assert_eq!(output.status.code(), Some(1), "{}", said(&output));
            assert!(said(&output).contains(REASON), "{}", said(&output));
            let wish = format!("restore.kybernate.io/main={image}@sha256:{}", "0".repeat(64));
            let mut create = command_of(node, [&image, "main"], &[&wish], &[], &["/workload"]);
            let output = create.stdin(Stdio::null()).output().unwrap();
            assert!(
                !output.status.success() && said(&output).contains(REASON),
                "{}",
                said(&output)
            );
            node.run(&["ctr", "container", "rm", "main"]).unwrap();
        });
        assert!(came >= 2, "they did not ask: {came}");

        drop(scenario.agent(name).take());
        let node = scenario.node(name);
        let came = with_a_stranger(node, CONTAINERD, || {
            let mut agent = node.command(&["kybernate-agent", "serve"]);
            let agent = Service::start(&mut agent).unwrap();
            let told = || said(&scenario.kyb(node, &["ps"]).unwrap());
            assert!(wait_until(END_LIMIT, || told().contains(REASON)), "{}", told());
            agent.stop().unwrap();
        });
        assert!(came > 0, "it did not ask");
    }
    scenario.end().unwrap();
}

/// A rule opens the socket to everybody. Who has none comes in, up to a bound, and root is answered.
#[test]
fn who_has_no_rule_cannot_hold_the_agent() {
    const MANY: usize = 200;
    let mut scenario = start();
    let rule = "[[caller]]\nwho = \"uid:1000\"\nnamespaces = [\"*\"]\nmay = [\"read\"]\n";
    scenario.next_agent("a", rule).unwrap();
    let node = scenario.node("a");
    node.run(&["chmod", "711", "/run/kybernate"]).unwrap();
    // Nobody but root looks into a node from outside.
    let directory = fs::File::open(node.path("/run/kybernate")).unwrap();
    let path = format!("/proc/self/fd/{}/agent.sock", directory.as_raw_fd());
    let connect = move || -> Vec<UnixStream> {
        let stranger = Uid::from_raw(STRANGER);
        set_thread_res_uid(stranger, stranger, stranger).unwrap();
        (0..MANY).map(|_| UnixStream::connect(&path).unwrap()).collect()
    };
    let held = std::thread::spawn(connect).join().unwrap();
    let closed = || {
        let is_closed = |stream: &&UnixStream| {
            stream.set_nonblocking(true).unwrap();
            matches!((&mut &**stream).read(&mut [0; 64]), Ok(0))
        };
        held.iter().filter(is_closed).count()
    };
    let bounded = wait_until(END_LIMIT, || closed() == MANY - 64);
    assert!(bounded, "{} of {MANY} are closed", closed());
    let output = scenario.kyb(node, &["ps"]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    drop(held);
    scenario.end().unwrap();
}
