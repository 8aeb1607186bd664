//! Workloads of other people's programs.

use std::process::Command;

use fs_err as fs;
use kybernate_conformance::command::{run, wait_until};
use kybernate_conformance::node::Node;
use kybernate_conformance::programs::{self, Programs};
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use super::proof::{LIMIT, goes_on, is_checked};
use super::{Place, Workload};
use crate::harness::{at_once, said, start as start_bare};

/// A seccomp profile of little use but for this: programs then do without.
pub(crate) const NO_IO_URING: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
    {"names": ["io_uring_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]}"#;

/// How often somebody who starts programs is taken.
const ROUNDS: u32 = 8;

/// Pushes an image of programs, and returns its reference.
pub(crate) fn push(scenario: &Scenario, what: Programs) -> String {
    let layout = programs::ensure(what, &|text| println!("{text}")).unwrap();
    let shared = scenario.testbed.share().join("programs");
    run(Command::new("cp").arg("-r").arg(layout).arg(shared)).unwrap();
    let image = scenario.reference("workloads/all:base");
    let words = ["oras", "copy", "--from-oci-layout", "--to-plain-http"];
    let words = [&words[..], &["/srv/share/programs:base", &image]].concat();
    scenario.testbed.b.run(&words).unwrap();
    image
}

/// Starts everything, with an image of programs pulled on both nodes.
pub(crate) fn start(what: Programs) -> (Scenario, String) {
    let scenario = start_bare();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    fs::write(scenario.testbed.share().join("no-io-uring.json"), NO_IO_URING).unwrap();
    let image = push(&scenario, what);
    std::thread::scope(|scope| {
        for node in [a, b] {
            let pull = ["ctr", "image", "pull", "--plain-http", &image];
            scope.spawn(move || node.run(&pull).unwrap());
        }
    });
    (scenario, image)
}

pub(crate) const WORKLOADS: &[Workload] = &[
    Workload {
        id: "python",
        name: "Python",
        proven: "threads, a generator, a child behind pipes, objects, an open file",
        options: &[],
        command: &["python3", "-c", include_str!("python.py")],
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "node",
        name: "Node.js",
        proven: "timers, promises, a worker thread, the thread pool, objects",
        options: &["--seccomp", "--seccomp-profile", "/srv/share/no-io-uring.json"],
        command: &["node", "-e", include_str!("node.js")],
        state: "/state/keep",
        allow: &[],
        unless: Some(("io-uring", "unless its seccomp profile forbids io_uring_setup")),
    },
    Workload {
        id: "java",
        name: "Java (OpenJDK 21)",
        proven: "a thread pool, a blocking queue, objects across collections",
        options: &[],
        command: &[
            "/usr/lib/jvm/java-21-openjdk-amd64/bin/java",
            "-Xmx128m",
            "-cp",
            "/usr/share/java/rhino.jar",
            "org.mozilla.javascript.tools.shell.Main",
            "-e",
            include_str!("java.js"),
        ],
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    SQLITE,
    Workload {
        id: "files",
        name: "files that are written to all the time",
        proven: "each is what memory knows of it: written in place, appended to, mapped, replaced, \
                 and some with their time of modification set back",
        options: &[],
        command: &["python3", "-c", include_str!("files.py")],
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
];

const SQLITE: Workload = Workload {
    id: "sqlite",
    name: "SQLite in the middle of a transaction",
    proven: "the transaction is committed on the other node, whole; for the next one the program \
             opens the file anew, since its inode is another one",
    options: &[],
    command: &["python3", "-c", include_str!("sqlite.py")],
    state: "/state/keep",
    allow: &[],
    unless: None,
};

#[test]
fn languages_and_databases_move() {
    let (scenario, image) = start(Programs::All);
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let io_uring = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    for workload in WORKLOADS {
        if let Some((finding, _)) = workload.unless
            && io_uring.as_ref().is_ok_and(|disabled| disabled.trim() == "0")
        {
            Workload { options: &[], ..*workload }.is_refused(&scenario, &image, a, finding);
        }
        workload.moves(&scenario, &image, [a, b], &|place| {
            if place.id == SQLITE.id {
                commits(place);
            } else {
                is_checked(place);
            }
        });
    }
    scenario.end().unwrap();
}

/// Who waits in vfork(2) for a child that stands still is not stopped by CRIU. Python starts programs so.
#[test]
fn who_starts_programs_all_the_time_is_taken() {
    const STARTS: &str = "import subprocess\nwhile True: subprocess.run(['busybox', 'true'])";
    let (scenario, image) = start(Programs::Servers);
    at_once(&scenario, |node| {
        let (key, name) = (format!("node-{}", node.name()), node.name());
        node.run(&["ctr", "run", "-d", &image, "starts", "python3", "-c", STARTS]).unwrap();
        for round in 1..=ROUNDS {
            let reference = scenario.reference(&format!("workloads/starts:{name}-{round}"));
            let words = ["checkpoint", "starts", &reference, "--plain-http", "--sign-key", &key];
            let output = scenario.kyb(node, &words).unwrap();
            assert!(output.status.success(), "{name}, {round}: {}", said(&output));
        }
        scenario.remove(node, "starts").unwrap();
        is_refused_that_waits(&scenario, node, &image);
    });
    scenario.end().unwrap();
}

/// CRIU would wait for it in the pause, and then say that something is unseizable.
fn is_refused_that_waits(scenario: &Scenario, node: &Node, image: &str) {
    // The child never executes a program: clone(2) with CLONE_VFORK.
    const WAITS: &str = "import ctypes, platform, time\n\
        clone = 220 if platform.machine() == 'aarch64' else 56\n\
        ctypes.CDLL(None).syscall(clone, 0x4011, 0, 0, 0, 0)\n\
        time.sleep(10**6)";
    let (key, name) = (format!("node-{}", node.name()), node.name());
    node.run(&["ctr", "run", "-d", image, "waits", "python3", "-c", WAITS]).unwrap();
    let lines = || node.run(&["ctr", "task", "ps", "waits"]).unwrap().lines().count();
    assert!(wait_until(LIMIT, || lines() == 3), "{name}: it has no child");
    let reference = scenario.reference(&format!("workloads/waits:{name}"));
    let words = ["checkpoint", "waits", &reference, "--plain-http", "--sign-key", &key];
    let output = scenario.kyb(node, &words).unwrap();
    let text = said(&output);
    assert!(!output.status.success() && text.contains("waits in vfork(2)"), "{name}: {text}");
    let tasks = node.run(&["ctr", "task", "ls"]).unwrap();
    assert!(tasks.contains("RUNNING") && !tasks.contains("PAUSED"), "{name}: {tasks}");
    scenario.remove(node, "waits").unwrap();
}

/// The transaction that was begun on the other node ends here.
pub(crate) fn commits(place: Place<'_>) {
    let begun = goes_on(place, None).count;
    let path = format!("/proc/{}/root/state/commit", place.pid().unwrap());
    fs::write(place.node.path(&path), "").unwrap();
    let committed = || {
        let said = place.read(place.state).unwrap_or_default();
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        said["committed"].as_u64() > Some(begun)
    };
    assert!(wait_until(LIMIT, committed), "nothing is committed");
}
