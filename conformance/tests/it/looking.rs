//! What `kyb` says of a checkpoint, beside what the live process had.

use std::collections::BTreeMap;

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::counter;
use serde_json::Value;

use crate::harness::{checkpoint, start};

/// Returns what the descriptors of a process lead to.
fn descriptors(node: &Node, pid: &str) -> BTreeMap<u64, String> {
    let script = format!("cd /proc/{pid}/fd && for fd in *; do echo $fd $(readlink $fd); done");
    let listed = node.run(&["sh", "-c", &script]).unwrap();
    let split = |line: &str| {
        let (fd, target) = line.split_once(' ')?;
        Some((fd.parse().ok()?, target.to_owned()))
    };
    listed.lines().filter_map(split).collect()
}

/// Compares a file that `kyb` shows with what its descriptor led to.
fn same_file(shown: &Value, target: &str) {
    match shown["type"].as_str().unwrap() {
        "file" | "directory" | "device" => {
            let path = shown["path"].as_str().unwrap();
            assert_eq!(path, target.trim_end_matches(" (deleted)"), "{shown}");
        }
        "pipe" => assert!(target.starts_with("pipe:["), "{shown} {target}"),
        "fifo" => assert!(target.starts_with('/'), "{shown} {target}"),
        "socket" => assert!(target.starts_with("socket:["), "{shown} {target}"),
        "eventfd" | "epoll" | "signalfd" | "timerfd" | "inotify" | "pidfd" => {
            assert!(target.starts_with("anon_inode:"), "{shown} {target}");
        }
        _ => {}
    }
}

/// A workload with threads, a child, files and pipes, and beside it a process that listens.
#[test]
fn inspect_says_what_the_live_processes_had() {
    let scenario = start();
    // CRIU 4.1 dumps no internet socket on newer kernels; node b has 4.2.
    let b = &scenario.testbed.b;
    b.run(&["ctr", "image", "pull", "--plain-http", &scenario.image()]).unwrap();
    let script = "busybox nc -l -p 7777 </dev/null & exec /workload run --state /state --mib 24";
    let image = scenario.image();
    b.run(&["ctr", "run", "-d", &image, "look", "sh", "-c", script]).unwrap();
    scenario.wait_for(b, "look", |status| counter(status) > Some(0)).unwrap();
    let tasks = b.run(&["ctr", "task", "ls"]).unwrap();
    let task = tasks.lines().find(|line| line.starts_with("look ")).unwrap();
    let pid = task.split_whitespace().nth(1).unwrap();
    let read = |file: &str| b.run(&["cat", &format!("/proc/{pid}/{file}")]).unwrap();

    let before = descriptors(b, pid);
    let reference = scenario.reference("look/job:v1");
    checkpoint(&scenario, b, "look", &reference);
    let after = descriptors(b, pid);
    let status = read("status");
    let line = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name));
        found.unwrap().trim().to_owned()
    };

    let shown = scenario.kyb_json(b, &["inspect", &reference, "--plain-http"]).unwrap();
    let inside = &shown["inside"];
    assert_eq!(inside["problems"], serde_json::json!([]));
    let processes = inside["processes"].as_array().unwrap();
    let first = &processes[0];
    assert_eq!((&first["pid"], &first["state"]), (&1.into(), &"alive".into()));
    assert_eq!(first["name"], read("comm").trim());
    let threads = first["threads"].as_array().unwrap();
    assert_eq!(threads.len().to_string(), line("Threads:"));
    assert_eq!(threads[0]["credentials"]["noNewPrivileges"], line("NoNewPrivs:") == "1");
    assert_eq!(threads[0]["seccomp"] == "filter", line("Seccomp:") == "2");

    // What was open before and after was open when it was dumped.
    let open: BTreeMap<u64, &Value> = first["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| (file["fd"].as_u64().unwrap(), file))
        .collect();
    let stable = before.iter().filter(|(fd, target)| after.get(fd) == Some(target));
    let mut compared = 0;
    for (fd, target) in stable {
        same_file(open[fd], target);
        compared += 1;
    }
    assert!(compared >= 5, "only {compared} descriptors: {before:?}");

    // The listener, as the kernel and as the checkpoint have it: port 7777 is 0x1E61.
    let tables = [read("net/tcp"), read("net/tcp6")].concat();
    assert!(
        tables.lines().any(|line| line.contains(":1E61 ") && line.contains(" 0A ")),
        "{tables}"
    );
    let sockets = inside["sockets"].as_array().unwrap();
    let listens = |socket: &&Value| {
        socket["state"] == "listen" && socket["local"].as_str().unwrap().ends_with(":7777")
    };
    let listener = sockets.iter().find(listens).unwrap();
    let holder = &listener["heldBy"][0]["pid"];
    assert!(processes.iter().any(|process| process["pid"] == *holder), "{listener}");

    // A third of the 24 MiB are zero pages, which are not stored; the mounts are its own.
    let stored = inside["memory"].as_array().unwrap().iter();
    let stored: u64 = stored.map(|kind| kind["storedBytes"].as_u64().unwrap()).sum();
    assert!(stored >= 14 << 20, "{}", inside["memory"]);
    let mounts = inside["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["type"] == "proc"), "{mounts:?}");
    scenario.end().unwrap();
}
