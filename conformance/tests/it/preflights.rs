//! What a checkpoint cannot take is found before anything is frozen.

use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::FileExt as _;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use crate::harness::{at_once, checkpoint, restore, said, start};
use crate::workloads::servers::{is_refused_on_a, kernel_is};

/// How long a container may take to have what it is to hold.
const HOLD_LIMIT: Duration = Duration::from_mins(1);

/// Starts a container that holds something.
fn hold(scenario: &Scenario, node: &Node, options: &[&str], words: &[&str]) {
    let command = [&["/workload", "hold"], words].concat();
    run(scenario, node, options, &command);
    is_held(node);
}

/// Waits until it says so.
#[track_caller]
fn is_held(node: &Node) {
    let task = "/run/containerd/io.containerd.runtime.v2.task/default/odd";
    let mark = node.path(&format!("{task}/rootfs/held"));
    assert!(wait_until(HOLD_LIMIT, || mark.exists()), "it is not held");
}

fn run(scenario: &Scenario, node: &Node, options: &[&str], command: &[&str]) {
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    node.run(&[&["ctr", "run", "-d"], options, &[&image, "odd"], command].concat()).unwrap();
}

/// Returns the findings, as `SEVERITY ID`.
fn findings(scenario: &Scenario, node: &Node, more: &[&str]) -> Vec<String> {
    let output = scenario.kyb(node, &[&["preflight", "odd"], more].concat()).unwrap();
    let text = said(&output);
    let lines = text.lines().filter_map(|line| line.split_once(':').map(|(id, _)| id.to_owned()));
    let mut found: Vec<String> =
        lines.filter(|id| id.starts_with("refuse ") || id.starts_with("warn ")).collect();
    let refused = found.iter().any(|id| id.starts_with("refuse "));
    assert_eq!(output.status.code(), Some(if refused { 2 } else { 0 }), "{text}");
    found.dedup();
    found
}

/// Returns how often the container was frozen: CRIU and runc count nothing, but containerd tells of
/// each pause. It does so a moment later, so something else has to happen first that it tells too.
fn pauses(scenario: &Scenario, node: &Node) -> usize {
    static LOOKS: AtomicU32 = AtomicU32::new(0);
    let mark = format!("looked-{}-times", LOOKS.fetch_add(1, Ordering::Relaxed));
    let (image, label) = (scenario.image(), format!("look={mark}"));
    let mut events = String::new();
    let told = wait_until(HOLD_LIMIT, || {
        node.run(&["ctr", "image", "label", &image, &label]).unwrap();
        events = fs::read_to_string(node.path("/tmp/events")).unwrap();
        events.contains(&mark)
    });
    assert!(told, "containerd tells nothing: {events}");
    events.lines().filter(|line| line.contains("/tasks/paused")).count()
}

/// A checkpoint is refused for a reason, and the container was never paused.
fn refuses(scenario: &Scenario, node: &Node, finding: &str, more: &[&str]) {
    assert_eq!(findings(scenario, node, more), [format!("refuse {finding}")]);
    let before = (pauses(scenario, node), scenario.traces(node).unwrap());
    let reference = scenario.reference(&format!("preflight/odd:{}", node.name()));
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "odd", &reference, "--plain-http", "--sign-key", &key];
    let output = scenario.kyb(node, &[&words[..], more].concat()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains(&format!("{finding}: ")), "{}", said(&output));
    assert_eq!(
        (pauses(scenario, node), scenario.traces(node).unwrap()),
        before,
        "{finding}: it was touched"
    );
}

/// A checkpoint is taken, and restored where it was.
fn takes(scenario: &Scenario, node: &Node, warnings: &[&str], more: &[&str]) -> Value {
    assert_eq!(findings(scenario, node, more), warnings);
    let before = pauses(scenario, node);
    let reference = scenario.reference(&format!("preflight/odd:{}", node.name()));
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "odd", &reference, "--plain-http", "--sign-key", &key];
    let taken = scenario.kyb_json(node, &[&words[..], more].concat()).unwrap();
    assert_eq!(pauses(scenario, node), before + 1, "a pause shows");
    scenario.remove(node, "odd").unwrap();
    let output = restore(scenario, node, &reference, "odd", &[]);
    assert!(output.status.success(), "{}", said(&output));
    taken
}

fn remove(scenario: &Scenario, node: &Node) {
    scenario.remove(node, "odd").unwrap();
}

fn watch_events(node: &Node) {
    let script = "ctr events >/tmp/events 2>/dev/null </dev/null &";
    node.run(&["sh", "-c", script]).unwrap();
}

/// Newer kernels let CRIU 4.1, node a's, dump no internet sockets, which is a finding of its own.
fn dumps_sockets(node: &Node) -> bool {
    node.name() == "b" || !is_refused_on_a()
}

#[test]
fn what_criu_cannot_take_is_refused_without_a_pause() {
    let mut scenario = start();
    at_once(&scenario, |node| {
        watch_events(node);
        for (finding, options, words) in [
            ("inotify", &[][..], &["inotify", "/bin"][..]),
            ("device", &["--device", "/dev/fuse"], &["device", "/dev/fuse"]),
            ("gpu", &["--mount", GPU], &["device", "/dev/nvidia0"]),
            ("hidden-mount", &["--mount", MOUNT, "--mount", COVER], &["lock"]),
            ("deleted-file", &[], &["deleted"]),
            ("open-link", &[], &["link"]),
            ("tcp-established", &[], &["tcp"]),
            ("external-unix-socket", &["--mount", MOUNT], &["unix", "/containerd/containerd.sock"]),
        ] {
            if finding == "tcp-established" && !dumps_sockets(node) {
                continue;
            }
            hold(&scenario, node, options, words);
            refuses(&scenario, node, finding, &[]);
            remove(&scenario, node);
        }
        has_an_old_driver(&scenario, node);
        for (finding, script) in PRIVILEGED {
            run(&scenario, node, &["--privileged"], &["sh", "-c", script]);
            let expected = [format!("refuse {finding}")];
            let found = || findings(&scenario, node, &[]) == expected;
            assert!(wait_until(HOLD_LIMIT, found), "{:?}", findings(&scenario, node, &[]));
            refuses(&scenario, node, finding, &[]);
            remove(&scenario, node);
        }
        has_a_terminal(&scenario, node);
        is_stopped_by_somebody(&scenario, node);
        // Where seccomp or the kernel forbids it, there is nothing to find.
        let off = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
        if off.is_ok_and(|off| off.trim() == "0") {
            hold(&scenario, node, &[], &["io-uring"]);
            refuses(&scenario, node, "io-uring", &[]);
            remove(&scenario, node);
        }
    });
    // A dump of all that memory would not fit.
    for name in ["a", "b"] {
        let mount = "mount -t tmpfs -o mode=0700,size=8m small /var/lib/kybernate/stage";
        scenario.node(name).run(&["sh", "-c", mount]).unwrap();
        scenario.next_agent(name, "[staging]\nmemory_share = 0.0\n").unwrap();
        let node = scenario.node(name);
        scenario.run_workload(node, "odd", 48, &[]).unwrap();
        refuses(&scenario, node, "staging-room", &[]);
    }
    scenario.end().unwrap();
}

/// A name that a GPU has, of the null device: this machine has no driver for it.
const GPU: &str = "type=bind,src=/dev/null,dst=/dev/nvidia0,options=bind:rw";

/// What the containers do that may everything.
const PRIVILEGED: [(&str, &str); 13] = [
    ("user-namespace", "busybox unshare -U busybox sleep 1000; busybox true"),
    // What is open on a mount that is gone is nowhere in the container.
    (
        "stdio-file",
        "busybox mkdir /w; busybox mount -t tmpfs x /w; exec >/w/out; busybox umount -l /w; \
         busybox sleep 1000",
    ),
    (
        "external-file",
        "busybox mkdir /w; busybox mount -t tmpfs x /w; exec 9>/w/out; busybox umount -l /w; \
         busybox sleep 1000",
    ),
    ("nested-pid-namespace", "busybox unshare -p -f busybox sleep 1000"),
    ("nested-namespace", "busybox unshare -m busybox sleep 1000; busybox true"),
    ("namespace-file", "exec 9</proc/self/ns/uts; busybox sleep 1000"),
    ("mount", "busybox mkdir /w; busybox mount -t ramfs x /w; busybox sleep 1000"),
    ("descriptor-limit", "ulimit -n 1024; exec /workload hold files 1018"),
    ("file-name", "exec 9>/tmp/$(busybox printf 'x\\351'); exec busybox sleep 1000"),
    ("unfit-file", "busybox touch /.wh.file; busybox sleep 1000"),
    ("linked-file", "exec 9>/one; busybox ln /one /two; busybox rm /one; busybox sleep 1000"),
    (
        "link-remap",
        "cd /dev/shm; exec 9>one; busybox ln one two; busybox rm one; busybox sleep 9999",
    ),
    ("link-remap", "exec 9</etc/passwd; busybox rm /etc/passwd; busybox sleep 1000"),
];

/// A GPU is open, and the module of NVIDIA's driver says that it is too old.
fn has_an_old_driver(scenario: &Scenario, node: &Node) {
    node.run(&["mount", "-t", "tmpfs", "module", "/proc/driver"]).unwrap();
    fs::create_dir(node.path("/proc/driver/nvidia")).unwrap();
    fs::write(node.path("/proc/driver/nvidia/version"), MODULE).unwrap();
    hold(scenario, node, &["--mount", GPU], &["device", "/dev/nvidia0"]);
    refuses(scenario, node, "gpu-driver", &[]);
    remove(scenario, node);
    node.run(&["umount", "/proc/driver"]).unwrap();
}

/// What the module says of itself there.
const MODULE: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  565.57.01  \
    Thu Oct 10 12:29:05 UTC 2024\nGCC version:  gcc version 14.2.0\n";

/// A container that somebody else has paused, or in which a process is stopped: with cgroups of version 2 CRIU
/// takes the latter.
fn is_stopped_by_somebody(scenario: &Scenario, node: &Node) {
    let stops = "busybox sleep 1000 & kill -STOP $!; : >/held; wait";
    run(scenario, node, &[], &["sh", "-c", stops]);
    is_held(node);
    if fs::metadata("/sys/fs/cgroup/cgroup.controllers").is_ok() {
        takes(scenario, node, &[], &[]);
    } else {
        refuses(scenario, node, "stopped-process", &[]);
    }
    remove(scenario, node);
    hold(scenario, node, &[], &["lock"]);
    node.run(&["ctr", "task", "pause", "odd"]).unwrap();
    refuses(scenario, node, "not-running", &[]);
    node.run(&["ctr", "task", "resume", "odd"]).unwrap();
    remove(scenario, node);
}

/// A container whose standard streams are a terminal, as `ctr run -t` and `kubectl run -t` make it.
fn has_a_terminal(scenario: &Scenario, node: &Node) {
    let ctr = format!("exec ctr run -t {} odd busybox sleep 1000", scenario.image());
    let mut ctr = node.command(&["script", "--quiet", "--return", "--command", &ctr, "/dev/null"]);
    let mut ctr = ctr.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let runs = || node.run(&["ctr", "task", "ls"]).unwrap().contains("RUNNING");
    assert!(wait_until(HOLD_LIMIT, runs), "it does not run");
    refuses(scenario, node, "terminal", &[]);
    node.run(&["ctr", "task", "kill", "-s", "KILL", "odd"]).unwrap();
    // It deletes the task.
    ctr.wait().unwrap();
    node.run(&["ctr", "container", "rm", "odd"]).unwrap();
}

/// Lets a restored container have the network of its node.
const HOST: [&str; 6] = [
    "--allow-host-namespace",
    "network",
    "--allow-mount",
    "/etc/hosts:/etc/hosts",
    "--allow-mount",
    "/etc/resolv.conf:/etc/resolv.conf",
];

/// Containerd's own socket, whose other end is outside.
const MOUNT: &str = "type=bind,src=/run/containerd,dst=/containerd,options=bind:ro";

/// Something on top of it.
const COVER: &str = "type=bind,src=/run,dst=/containerd,options=bind:ro";

#[test]
fn what_depends_on_a_choice_is_taken_when_it_is_made() {
    let scenario = start();
    at_once(&scenario, |node| {
        watch_events(node);

        hold(&scenario, node, &[], &["lock"]);
        refuses(&scenario, node, "file-lock", &["--file-locks", "refuse"]);
        takes(&scenario, node, &[], &[]);
        remove(&scenario, node);

        hold(&scenario, node, &[], &["inotify", "/dev/shm"]);
        takes(&scenario, node, &[], &[]);
        remove(&scenario, node);

        // As few descriptors as CRIU needs are left. The kernel counts what is under way between all processes
        // of a user against the limit, too (unix(7)): a low one would be met by what others send.
        let enough = "ulimit -n 1024; exec /workload hold files 1017";
        run(&scenario, node, &[], &["sh", "-c", enough]);
        is_held(node);
        takes(&scenario, node, &[], &[]);
        remove(&scenario, node);

        if dumps_sockets(node) {
            closes(&scenario, node);
        }

        leaves_a_session(&scenario, node);
    });
    scenario.end().unwrap();
}

/// A session of `ctr task exec` or `kubectl exec` goes on, and is not in the dump.
fn leaves_a_session(scenario: &Scenario, node: &Node) {
    scenario.run_workload(node, "odd", 16, &[]).unwrap();
    let more = ["ctr", "task", "exec", "-d", "--exec-id", "more", "odd", "sleep", "1000"];
    node.run(&more).unwrap();
    assert_eq!(findings(scenario, node, &[]), ["warn exec-session"]);
    let reference = scenario.reference(&format!("preflight/exec:{}", node.name()));
    checkpoint(scenario, node, "odd", &reference);
    let members = || node.run(&["ctr", "task", "ps", "odd"]).unwrap();
    let sleeps = || {
        let comm = |pid: &str| fs::read_to_string(node.path(&format!("/proc/{pid}/comm")));
        let pids = members();
        let mut pids = pids.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        pids.any(|pid| comm(pid).is_ok_and(|comm| comm.trim() == "sleep"))
    };
    assert!(sleeps(), "the session has ended: {}", members());
    scenario.remove(node, "odd").unwrap();
    let output = restore(scenario, node, &reference, "odd", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(node, "odd").unwrap();
    assert!(!sleeps(), "{}", members());
    assert_eq!(findings(scenario, node, &[]), Vec::<String>::new());
}

/// Only a container with a file of its own can have its connections closed.
fn closes(scenario: &Scenario, node: &Node) {
    hold(scenario, node, &[], &["tcp"]);
    refuses(scenario, node, "tcp-close", &["--tcp", "close"]);
    remove(scenario, node);
    let config = "org.criu.config=/var/lib/kybernate/criu/odd.conf";
    hold(scenario, node, &["--annotation", config], &["tcp"]);
    refuses(scenario, node, "tcp-established", &[]);
    takes(scenario, node, &[], &["--tcp", "close"]);
    // What is restored has a file of its own, and no connection any more.
    takes(scenario, node, &[], &[]);
    remove(scenario, node);

    // An address that the node has no more when it is restored.
    let reference = scenario.reference(&format!("preflight/bound:{}", node.name()));
    let address = |what: &str| {
        node.run(&["ip", "address", what, "10.77.9.1/32", "dev", "lo"]).unwrap();
    };
    for kind in ["listen", "udp"] {
        address("add");
        hold(scenario, node, &["--net-host"], &[kind, "10.77.9.1:4000"]);
        assert_eq!(findings(scenario, node, &[]), ["warn listener-address"]);
        checkpoint(scenario, node, "odd", &reference);
        remove(scenario, node);
        address("delete");
        let output = restore(scenario, node, &reference, "odd", &HOST);
        assert!(said(&output).contains("bind"), "{kind}: {}", said(&output));
    }
}

#[test]
fn connections_over_loopback_that_cannot_come_back_are_not_kept() {
    let scenario = start();
    // CRIU 4.1 dumps no internet socket on newer kernels; node b has 4.2.
    let b = &scenario.testbed.b;
    watch_events(b);
    // Both ends are its own, and so is the network, where nothing is up when CRIU connects them again.
    hold(&scenario, b, &[], &["tcp"]);
    refuses(&scenario, b, "tcp-loopback", &["--tcp", "keep"]);
    remove(&scenario, b);

    // The other end is another process of the node.
    let listens = "busybox nc -ll -p 4001 -e busybox cat >/dev/null 2>&1 </dev/null &";
    b.run(&["sh", "-c", listens]).unwrap();
    let connects = "busybox sleep 1000 | busybox nc 127.0.0.1 4001";
    run(&scenario, b, &["--net-host"], &["sh", "-c", connects]);
    let found =
        || findings(&scenario, b, &["--tcp", "keep"]).contains(&"refuse tcp-loopback".into());
    assert!(wait_until(HOLD_LIMIT, found), "{:?}", findings(&scenario, b, &["--tcp", "keep"]));
    refuses(&scenario, b, "tcp-loopback", &["--tcp", "keep"]);
    scenario.end().unwrap();
}

#[test]
fn an_old_criu_on_a_new_kernel_takes_no_internet_sockets() {
    let scenario = start();
    let a = &scenario.testbed.a;
    if !is_refused_on_a() {
        println!("skipped: this kernel lets every CRIU dump internet sockets");
        return;
    }
    watch_events(a);
    hold(&scenario, a, &[], &["listen", "127.0.0.1:4000"]);
    refuses(&scenario, a, "inet-socket", &[]);
    scenario.end().unwrap();
}

/// Returns how many pages of a container's first process are guards.
fn guards(node: &Node) -> usize {
    let tasks = node.run(&["ctr", "task", "ls"]).unwrap();
    let task = tasks.lines().find(|line| line.starts_with("odd ")).unwrap();
    let process = node.path(&format!("/proc/{}", task.split_whitespace().nth(1).unwrap()));
    let maps = fs::read_to_string(process.join("maps")).unwrap();
    let pagemap = fs::File::open(process.join("pagemap")).unwrap();
    let page = |address: &str| u64::from_str_radix(address, 16).unwrap() / 4096;
    let ranges = maps.lines().filter(|line| line.contains(" rw-p ") && !line.contains("[v"));
    let entries = ranges.flat_map(|line| {
        let (begin, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let (begin, end) = (page(begin), page(end));
        let mut entries = vec![0; usize::try_from((end - begin) * 8).unwrap()];
        pagemap.read_exact_at(&mut entries, begin * 8).unwrap();
        entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect::<Vec<_>>()
    });
    entries.filter(|entry| entry & (1 << 58) != 0).count()
}

/// Threads have them with glibc 2.42 and later.
#[test]
fn guard_pages_are_taken_by_a_criu_that_knows_them() {
    if !kernel_is((6, 16)) {
        println!("SKIPPED: before Linux 6.16 there are none, or no CRIU can ask where");
        return;
    }
    let scenario = start();
    at_once(&scenario, |node| {
        watch_events(node);
        hold(&scenario, node, &[], &["guard"]);
        assert_eq!(guards(node), 16, "on {}", node.name());
        if node.name() == "a" {
            refuses(&scenario, node, "guard-pages", &[]);
            // Nothing is refused that CRIU would take.
            let output = node.output(&["ctr", "task", "checkpoint", "odd"]).unwrap();
            assert!(!output.status.success(), "{}", said(&output));
        } else {
            takes(&scenario, node, &[], &[]);
            assert_eq!(guards(node), 16, "when restored");
            takes(&scenario, node, &[], &[]);
        }
        remove(&scenario, node);
    });
    scenario.end().unwrap();
}
