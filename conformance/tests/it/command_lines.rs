//! runc's command line, as kybernate-runc has it: whatever runc says and does, it says and does too.

use std::fs::File;
use std::io::{self, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::harness::{at_once, start};

/// Lines of a shell: commands in the lives of three containers, and looks at what they did.
/// `runc` is one or the other, with a root of its own. Those with a `!` must fail.
const CALLS: &[&str] = &[
    "runc --version",
    "runc --help",
    "runc help create",
    "runc features",
    "! runc nonsense",
    "! runc --nonsense state one",
    "! runc create",
    "! runc create --nonsense one",
    "! runc create --bundle /nowhere one",
    "! runc create --bundle /tmp/pauses ../one",
    "! runc state one",
    "! runc start one",
    "! runc delete one",
    "! runc kill one KILL",
    "runc delete --force one",
    "runc list --quiet",
    // In its own directory, or another one.
    "mkdir /tmp/life/spec && cd /tmp/life/spec && runc spec && cat config.json",
    "! cd /tmp/life/spec && runc spec",
    "rm /tmp/life/spec/config.json && runc spec --bundle /tmp/life/spec --rootless",
    "cat /tmp/life/spec/config.json",
    // What goes wrong is written down.
    "! runc --log /tmp/life/log --log-format json state one",
    "! runc --log /tmp/life/log --log-format json create --bundle /nowhere one",
    "! runc --log /tmp/life/log exec one true",
    "cat /tmp/life/log",
    "! runc --log /nowhere/log state one",
    "! runc --systemd-cgroup create --bundle /tmp/pauses one",
    "! runc --systemd-cgroup run --bundle /tmp/ends one",
    "runc list --quiet",
    // One that lives long.
    "runc create --bundle /tmp/pauses --no-pivot --pid-file /tmp/life/pid one",
    "test $(cat /tmp/life/pid) = $(runc state one | jq .pid)",
    "! runc create --bundle /tmp/pauses one",
    "! runc run --bundle /tmp/pauses one",
    "runc state one",
    "runc list",
    "runc list --format json",
    "runc ps --format json one",
    "runc start one",
    "! runc start one",
    "runc exec one busybox true",
    "! runc exec one busybox false",
    "runc exec --env WORD=said --cwd /bin one busybox sh -c 'pwd; busybox echo $WORD'",
    "runc exec --preserve-fds 1 one busybox sh -c 'busybox cat <&3' 3</tmp/kept",
    "! runc exec one busybox sh -c 'busybox cat <&3' 3</tmp/kept",
    // A number shows only in that it is there, so it is held against what is expected.
    "env --block-signal=USR1 runc exec one busybox grep -q '^SigBlk:.*0200$' /proc/self/status",
    "runc exec --detach --pid-file /tmp/life/other one busybox sleep 1000",
    "cd /proc && test $(readlink $(cat /tmp/life/pid)/ns/pid) = \
        $(readlink $(cat /tmp/life/other)/ns/pid) && tr '\\0' ' ' <$(cat /tmp/life/other)/cmdline",
    "! runc exec --tty one busybox tty",
    "! runc exec --tty --detach one busybox tty",
    "! runc exec --console-socket /tmp/life/console one busybox true",
    "runc exec --tty --detach --console-socket /tmp/life/console one busybox tty",
    "script --quiet --return --command 'runc exec --tty one busybox tty' /dev/null",
    "runc update --pids-limit 100 one",
    "runc events --stats one",
    "runc pause one",
    "runc state one",
    "runc resume one",
    "! runc resume one",
    "! runc delete one",
    "runc kill one TERM",
    "runc kill one KILL",
    "runc delete --force one",
    "runc create --bundle /tmp/pauses two",
    "runc delete -f two",
    // It is waited for, and its exit code is handed on.
    "! runc run --bundle /tmp/ends two",
    "! runc run --keep --preserve-fds 1 --bundle /tmp/ends two 3</tmp/kept",
    "runc state two",
    "! runc exec two busybox true",
    "runc delete two",
    "! LISTEN_FDS=1 sh -c 'LISTEN_PID=$$ exec runc run --bundle /tmp/ends two' 3</tmp/kept",
    "! script --quiet --return --command 'runc run --bundle /tmp/speaks two' /dev/null",
    // What has a terminal.
    "! runc create --bundle /tmp/terminal two",
    "! runc create --bundle /tmp/terminal --console-socket /nowhere two",
    "! runc create --bundle /tmp/pauses --console-socket /tmp/life/console two",
    "! runc run --bundle /tmp/terminal two",
    "! runc run --detach --bundle /tmp/terminal two",
    "runc list --quiet",
    "runc create --bundle /tmp/terminal --console-socket /tmp/life/console two",
    "runc start two",
    "runc exec two busybox sh -c 'busybox echo said >/dev/console'",
    "runc delete --force two",
    "runc run --detach --bundle /tmp/terminal --console-socket /tmp/life/console two",
    "runc exec two busybox sh -c 'busybox echo said >/dev/console'",
    "runc delete --force two",
    // What goes on from a dump.
    "runc run --detach --bundle /tmp/pauses three",
    "! runc checkpoint four",
    "runc checkpoint --image-path /tmp/life/images --work-path /tmp/life/work --leave-running three",
    "runc delete --force three",
    "! runc restore --detach --image-path /tmp/life/none --bundle /tmp/pauses three",
    "runc restore --detach --image-path /tmp/life/images --work-path /tmp/life/work \
        --bundle /tmp/pauses --pid-file /tmp/life/pid three",
    "test $(cat /tmp/life/pid) = $(runc state three | jq .pid)",
    "runc exec three busybox true",
    "runc kill --all three KILL",
    "runc delete --force three",
    "runc list --quiet",
];

/// Makes bundles of the workload's image: a container pauses or ends, and has a terminal (`terminal`,
/// `speaks`) or none. (`sleep` would end when CRIU lets go of it: its system call is interrupted.)
const BUNDLES: &str = r#"
mkdir /tmp/rootfs && ctr image mount --rw "$1" /tmp/rootfs
cd /tmp && runc spec && echo kept >kept
make() {
    directory=$1 terminal=$2
    shift 2
    mkdir "$directory"
    jq --argjson terminal "$terminal" '.root.path = "/tmp/rootfs" |
        .process.terminal = $terminal | .process.args = $ARGS.positional' \
        config.json --args -- "$@" >"$directory/config.json"
}
make pauses false /workload pause
make terminal true /workload pause
# runc hands on what comes by either way, in any order.
make ends false busybox sh -c 'exec 2>&1; busybox echo $LISTEN_FDS; busybox cat <&3; exit 3'
make speaks true busybox sh -c 'busybox tty; exit 3'
"#;

fn make_bundles(scenario: &Scenario, node: &Node) {
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    node.run(&["sh", "-euc", BUNDLES, "sh", &image]).unwrap();
}

/// Takes containers through their lives, and returns what was said to each call, and by each console.
/// Numbers and what else differs each time are the same in it.
fn life(node: &Node, runtime: &str) -> Vec<String> {
    node.run(&["sh", "-c", "rm -rf /tmp/life && mkdir -p /tmp/life/runc"]).unwrap();
    let socket = UnixListener::bind(node.path("/tmp/life/console")).unwrap();
    socket.set_nonblocking(true).unwrap();
    let (mut heard, mut consoles) = (Vec::new(), Vec::new());
    for line in CALLS {
        let (fails, words) = match line.strip_prefix("! ") {
            Some(words) => (true, words),
            None => (false, *line),
        };
        let words = words.replace("runc ", &format!("{runtime} --root /tmp/life/runc "));
        let (code, said) = call(node, &words);
        assert_eq!(code != Some(0), fails, "{words}: {said}");
        heard.push(format!("{line}: {code:?} {}", alike(&said)));
        if !fails && line.contains("--console-socket") {
            consoles.push(console(&socket));
        }
    }
    // Whoever had them has ended.
    heard.extend(consoles.into_iter().map(|(name, master)| format!("{name}: {}", told(master))));
    heard
}

/// Runs a line and returns how it ended and what was said by then: what runs on holds the pipe, so it
/// is not read to its end. There is no terminal, wherever the test was started.
fn call(node: &Node, line: &str) -> (Option<i32>, String) {
    let (mut reader, writer) = io::pipe().unwrap();
    let mut command = node.command(&["setsid", "--wait", "sh", "-c", line]);
    command.stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer);
    let status = command.status().unwrap();
    drop(command);
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    let mut said = Vec::new();
    if let Err(error) = reader.read_to_end(&mut said) {
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
    (status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// Takes the console of a call that has succeeded: its name, and our side of it.
fn console(socket: &UnixListener) -> (String, OwnedFd) {
    let (connection, _) = socket.accept().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let (mut rights, mut name) = (RecvAncillaryBuffer::new(&mut space), [0; 4096]);
    let mut into = [IoSliceMut::new(&mut name)];
    let got = recvmsg(&connection, &mut into, &mut rights, RecvFlags::CMSG_CLOEXEC).unwrap();
    let master = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    (String::from_utf8_lossy(&name[..got.bytes]).into_owned(), master.unwrap())
}

/// Returns what was written to a console. It ends with an error, when nobody has it any more.
fn told(master: OwnedFd) -> String {
    let mut told = Vec::new();
    let ended = File::from(master).read_to_end(&mut told).unwrap_err();
    assert_eq!(ended.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    String::from_utf8_lossy(&told).into_owned()
}

/// Returns a text with one `0` for each number in it, and one space between words: a table's columns
/// are as wide as its numbers. How much memory caches files is left out where there is none.
fn alike(text: &str) -> String {
    let mut alike = String::new();
    for letter in text.chars() {
        let letter = if letter.is_ascii_digit() { '0' } else { letter };
        if !(matches!(letter, '0' | ' ') && alike.ends_with(letter)) {
            alike.push(letter);
        }
    }
    // script(1) has nothing to read: its terminal echoes that before or behind what is said.
    alike.replace("\"cache\":0,", "").replace("^@", "")
}

#[test]
fn every_command_is_runcs() {
    let scenario = start();
    at_once(&scenario, |node| {
        make_bundles(&scenario, node);
        let (theirs, ours) = (life(node, "runc"), life(node, "/srv/bin/kybernate-runc"));
        for (theirs, ours) in theirs.iter().zip(&ours) {
            assert_eq!(ours, theirs, "on {}", node.name());
        }
        node.run(&["umount", "/tmp/rootfs"]).unwrap();
    });
    scenario.end().unwrap();
}
