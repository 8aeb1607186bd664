//! The testbed itself, with nothing of ours on its nodes.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::process::{Process, Service};
use kybernate_conformance::root;
use kybernate_conformance::scenario::{Scenario, counter};
use kybernate_conformance::testbed::state::{State, sweep};
use kybernate_conformance::testbed::{HUB_ADDRESS, Testbed};
use serde_json::Value;

use crate::harness::{said, target};

const CLI: &str = env!("CARGO_BIN_EXE_kybernate-conformance");
/// Killed namespaces are gone within milliseconds; on a loaded machine, seconds.
const GONE_TIMEOUT: Duration = Duration::from_secs(30);

/// How a testbed shows on this machine.
#[derive(Debug)]
pub(crate) struct Probe {
    directory: String,
    /// Names of the nodes' cgroups, which everything that runs in a node is in.
    cgroups: BTreeSet<String>,
    /// Whatever ran in its namespaces. The kernel gives a namespace's number to the next one, so
    /// they tell nothing later.
    processes: Vec<Process>,
}

impl Probe {
    pub(crate) fn new(state: &State) -> Self {
        let cgroup = |outer: Process| {
            let paths = fs::read_to_string(format!("/proc/{}/cgroup", outer.pid)).unwrap();
            let name = paths.split(['/', '\n']).find(|part| part.starts_with("kybernate-"));
            name.unwrap().to_owned()
        };
        let hub = state.hub.unwrap().process;
        let known = state.nodes.iter().map(|node| node.init).chain([hub]);
        let own = namespaces(Process::own().unwrap());
        let theirs: BTreeSet<_> =
            known.flat_map(namespaces).filter(|ns| !own.contains(ns)).collect();
        let inside = |process: &Process| !theirs.is_disjoint(&namespaces(*process));
        Self {
            directory: state.directory.display().to_string(),
            cgroups: state.nodes.iter().map(|node| cgroup(node.outer)).collect(),
            processes: processes().filter(inside).collect(),
        }
    }

    /// Returns everything on this machine that belongs to the testbed: mounts, cgroups, processes
    /// and its directory.
    pub(crate) fn traces(&self) -> BTreeSet<String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = mounts.lines().filter(|line| line.contains(&self.directory));
        let mut found: BTreeSet<String> = mounts.map(str::to_owned).collect();
        let hierarchies =
            fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
        for hierarchy in hierarchies.chain(["/sys/fs/cgroup".into()]) {
            let paths = self.cgroups.iter().map(|name| hierarchy.join(name));
            found.extend(paths.filter(|path| path.exists()).map(|path| path.display().to_string()));
        }
        if Path::new(&self.directory).exists() {
            found.insert(self.directory.clone());
        }
        let inside = |process: &Process| {
            let paths = fs::read_to_string(format!("/proc/{}/cgroup", process.pid));
            let paths = paths.unwrap_or_default();
            process.runs() && self.cgroups.iter().any(|name| paths.contains(name))
        };
        let known = self.processes.iter().copied().filter(|process| process.runs());
        let left = known.chain(processes().filter(inside));
        found.extend(left.map(|process| format!("process {}", process.pid)));
        found
    }

    /// Makes sure that there is something to leave behind.
    fn expect_traces(&self) {
        let seen = self.traces();
        let processes = seen.iter().filter(|trace| trace.starts_with("process")).count();
        assert!(seen.contains(&self.directory) && processes > 3, "the probe sees only {seen:?}");
        assert!(seen.iter().any(|trace| trace.starts_with("/sys/fs/cgroup")), "{seen:?}");
    }
}

fn processes() -> impl Iterator<Item = Process> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| Process::find(entry.file_name().to_str()?.parse().ok()?))
}

fn namespaces(process: Process) -> BTreeSet<String> {
    let link = |kind| fs::read_link(format!("/proc/{}/ns/{kind}", process.pid)).ok();
    let links = ["net", "mnt", "pid", "ipc", "uts", "cgroup"].into_iter().filter_map(link);
    links.map(|link| link.display().to_string()).collect()
}

#[test]
fn two_nodes_see_each_other_and_leave_nothing_behind() {
    preflight().unwrap();
    let testbed = Testbed::start(&target(), &|text| println!("{text}")).unwrap();
    for (node, version) in [(&testbed.a, "1.7."), (&testbed.b, "2.1.")] {
        let found = node.run(&["ctr", "version"]).unwrap();
        assert!(found.contains(version), "{found}");
        // It says "Looks good" on standard error.
        let checked = node.output(&["criu", "check"]).unwrap();
        assert!(checked.status.success(), "{}", said(&checked));
        let routes = node.run(&["ip", "-4", "route"]).unwrap();
        assert!(routes.contains("10.77.0.0/24"), "{routes}");
        // Nothing listens, so the hub refuses; an unreachable hub would time out (28).
        let url = format!("http://{HUB_ADDRESS}:9/");
        let output = node.output(&["curl", "-s", "-m", "5", &url]).unwrap();
        assert_eq!(output.status.code(), Some(7));
    }
    // Something that nothing but the end of the node ends.
    testbed.a.run(&["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &"]).unwrap();
    let probe = Probe::new(&testbed.state());
    probe.expect_traces();
    testbed.end().unwrap();
    assert_eq!(probe.traces(), BTreeSet::new());
}

#[test]
fn nodes_end_with_their_owner_and_the_next_one_cleans_up() {
    let mut command = Command::new(CLI);
    let mut owner =
        Service::start(command.args(["node", "up", "--hold", "--json"]).stdin(Stdio::piped()))
            .unwrap();
    let text = owner.wait_for_line("{").unwrap();
    let state: State = serde_json::from_str(&format!("{{{text}")).unwrap();
    let probe = Probe::new(&state);
    probe.expect_traces();

    // As a crash would, and at once: no code of the owner runs.
    owner.kill().unwrap();
    let alive = || probe.traces().iter().any(|trace| trace.starts_with("process"));
    assert!(wait_until(GONE_TIMEOUT, || !alive()), "{:?}", probe.traces());
    sweep().unwrap();
    assert_eq!(probe.traces(), BTreeSet::new());
}

/// Runs our command with testbeds of its own, beside those that a person may have up.
fn cli(cache: &Path, words: &[&str], input: &str) -> Output {
    let mut command = Command::new(CLI);
    command.args(words).env("KYBERNATE_CACHE", cache);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

#[test]
fn the_command_starts_enters_and_ends_nodes() {
    let cache = tempfile::tempdir().unwrap();
    // The roots are there once a testbed was.
    root::ensure(root::Release::Trixie, &|text| println!("{text}")).unwrap();
    root::ensure(root::Release::Forky, &|text| println!("{text}")).unwrap();
    symlink(root::cache().join("roots"), cache.path().join("roots")).unwrap();
    let cli = |words: &[&str], input: &str| cli(cache.path(), words, input);

    assert_eq!(cli(&["node", "exec", "a", "--", "true"], "").status.code(), Some(1));
    assert_eq!(cli(&["node", "exec", "c", "--", "true"], "").status.code(), Some(64));
    assert_eq!(cli(&["node", "up", "c"], "").status.code(), Some(64));
    assert!(cli(&["node", "down"], "").status.success(), "nothing to end is no failure");

    let up = cli(&["node", "up", "a", "--json"], "");
    assert!(up.status.success(), "{}", said(&up));
    let state: State = serde_json::from_slice(&up.stdout).unwrap();
    assert_eq!(state.nodes.len(), 1);
    let output = cli(&["node", "exec", "a", "--", "sh", "-c", "cat; exit 7"], "words\n");
    assert_eq!((output.status.code(), said(&output).as_str()), (Some(7), "words\n"));
    let killed = cli(&["node", "exec", "a", "--", "sh", "-c", "kill -9 $$"], "");
    assert_eq!(killed.status.code(), Some(137));

    // The other joins the first.
    let up = cli(&["node", "up"], "");
    assert!(up.status.success(), "{}", said(&up));
    let ping = ["node", "exec", "b", "--", "busybox", "ping", "-c", "1", "-W", "5", "10.77.0.11"];
    let output = cli(&ping, "");
    assert!(output.status.success(), "{}", said(&output));
    let text = fs::read(state.directory.join("state.json")).unwrap();
    let state: State = serde_json::from_slice(&text).unwrap();
    assert_eq!(state.nodes.len(), 2);
    let probe = Probe::new(&state);
    probe.expect_traces();

    let down = cli(&["node", "down", "a"], "");
    assert!(down.status.success(), "{}", said(&down));
    assert_eq!(cli(&["node", "exec", "a", "--", "true"], "").status.code(), Some(1));
    assert!(cli(&["node", "exec", "b", "--", "true"], "").status.success());
    let down = cli(&["node", "down"], "");
    assert!(down.status.success(), "{}", said(&down));
    assert_eq!(probe.traces(), BTreeSet::new());
}

/// Nothing here is ours but the workload: what fails is the testbed, containerd, runc or CRIU.
#[test]
fn a_dumped_workload_goes_on_on_its_own_node_and_on_a_newer_one() {
    preflight().unwrap();
    let scenario = Scenario::bare(&target(), &|text| println!("{text}")).unwrap();
    let registry = scenario.start_peer().unwrap();
    let image = scenario.peer_reference("demo/counter:base");
    scenario.push_image(&image).unwrap();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        scenario.run_image(node, &image, "job", 24, &[]).unwrap();
        let before = scenario.wait_for_ticks(node, "job").unwrap();
        let reference = format!("checkpoint/job-{}:v1", node.name());
        let take = ["ctr", "container", "checkpoint", "--rw", "--task", "--image"];
        node.run(&[&take[..], &["job", &reference]].concat()).unwrap();
        // It restores into the cgroup of the one that was taken.
        scenario.remove(node, "job").unwrap();
        let bring = ["ctr", "container", "restore", "--rw", "--live", "again", &reference];
        node.run(&bring).unwrap();
        goes_on(&before, &scenario.wait_for_ticks(node, "again").unwrap());
    }
    let before = scenario.wait_for_ticks(a, "again").unwrap();
    let task = "/run/containerd/io.containerd.runtime.v2.task/default/again";
    let take = format!(
        "set -e; ctr task checkpoint --exit --image-path /srv/share/dump again
         mkdir /srv/share/bundle
         tar --one-file-system -C {task} -c config.json rootfs | tar -C /srv/share/bundle -x"
    );
    a.run(&["sh", "-c", &take]).unwrap();
    // What is restored would keep an output that is ours open.
    let bring = "cd /srv/share/bundle && \
                 sed -i s,/default/job,/default/moved, config.json && \
                 runc restore --detach --image-path /srv/share/dump moved >log 2>&1 </dev/null || \
                 { cat log; exit 1; }";
    b.run(&["sh", "-c", bring]).unwrap();
    let status = || b.run(&["runc", "exec", "moved", "/workload", "status", "--state", "/state"]);
    let next = counter(&before).map(|counter| counter + 5);
    let mut after = Value::Null;
    assert!(wait_until(GONE_TIMEOUT, || {
        after = serde_json::from_str(&status().unwrap()).unwrap();
        counter(&after) > next
    }));
    goes_on(&before, &after);
    registry.stop().unwrap();
    scenario.end().unwrap();
}

/// It is the same process, and nothing about it is wrong.
fn goes_on(before: &Value, after: &Value) {
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    assert!(counter(after) > counter(before), "{before} became {after}");
    for fact in ["checksum_ok", "pipe_ok", "shm_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
}
