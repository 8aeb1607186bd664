//! What goes wrong: the source runs on, nothing is named, nothing is left, and the next try works.

use std::process::{Command, Output};
use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Service;
use kybernate_conformance::scenario::{PASSWORD, Scenario};
use rustix::process::Signal;

pub(crate) mod cancels;
pub(crate) mod claims;
pub(crate) mod deaths;
pub(crate) mod halt;
mod liars;
mod linked;
mod memory;
mod network;
pub(crate) mod pods;
mod pushes;
mod restores;
mod room;
mod short;
mod slow;
mod stops;
mod suspends;
pub(crate) mod victims;
mod watching;

use self::halt::{hold, let_go, start_holding};
use self::victims::{END_LIMIT, running, signal};
use crate::harness::{checkpoint, nodes, restore, said, start};

/// A checkpoint that must fail with `reason`; the source runs on, and nothing is named or left.
fn fails(scenario: &Scenario, node: &Node, id: &str, reference: &str, reason: &str) -> Output {
    let before = scenario.traces(node).unwrap();
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", id, reference, "--plain-http", "--sign-key", &key];
    let output = scenario.kyb(node, &words).unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(reason), "{text:?} does not mention {reason:?}");
    scenario.wait_for_ticks(node, id).unwrap();
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    output
}

/// Returns the first process of a node's `job`, in words. While CRIU is at work on it, nobody says.
fn first(node: &Node) -> String {
    let script = "ctr task ls | awk '$1 == \"job\" { print $2 }'";
    node.run(&["sh", "-c", script]).unwrap().trim().to_owned()
}

/// Returns CRIU's rules in the network of a process of a node.
fn locks(node: &Node, pid: &str) -> String {
    let script = "{ iptables -S; ip6tables -S; nft list tables; } | grep CRIU";
    said(&node.output(&["nsenter", "-t", pid, "-n", "sh", "-c", script]).unwrap())
}

fn has_tag(scenario: &Scenario, reference: &str) -> bool {
    scenario.testbed.b.run(&["crane", "digest", "--insecure", reference]).is_ok()
}

#[test]
fn an_agent_whose_program_was_replaced_takes_checkpoints() {
    let mut scenario = start();
    scenario.agent_a.take();
    let a = &scenario.testbed.a;
    a.run(&["cp", "/srv/bin/kybernate-agent", "/root/kybernate-agent"]).unwrap();
    let agent = Service::start(&mut a.command(&["/root/kybernate-agent", "serve"])).unwrap();
    let answers = || a.run(&["kyb", "ps", "--json"]).is_ok();
    assert!(wait_until(END_LIMIT, answers), "the agent does not answer");
    a.run(&["rm", "/root/kybernate-agent"]).unwrap();
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    checkpoint(&scenario, a, "job", &scenario.reference("replaced/job:v1"));
    scenario.wait_for_ticks(a, "job").unwrap();
    agent.stop().unwrap();
    scenario.end().unwrap();
}

#[test]
fn a_registry_that_is_away_or_full_harms_nothing() {
    let mut scenario = start();
    let reference = |scenario: &Scenario, node: &Node| {
        scenario.reference(&format!("failure/job:{}", node.name()))
    };
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 32, &[]).unwrap();
    }

    scenario.registry.take().unwrap().stop().unwrap();
    for node in nodes(&scenario) {
        fails(&scenario, node, "job", &reference(&scenario, node), "10.77.0.1:5000");
    }

    // A registry with room for a tenth of the pages.
    let full = scenario.testbed.private().join("full");
    fs::create_dir(&full).unwrap();
    let mount = |words: &[&str]| {
        assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success());
    };
    let place = full.to_str().unwrap().to_owned();
    mount(&["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", &place]);
    let registry = scenario.start_registry_at(&full).unwrap();
    for node in nodes(&scenario) {
        fails(&scenario, node, "job", &reference(&scenario, node), "full");
        assert!(!has_tag(&scenario, &reference(&scenario, node)));
    }
    registry.stop().unwrap();
    mount(&["umount", &place]);

    scenario.registry = Some(scenario.start_registry().unwrap());
    for node in nodes(&scenario) {
        let reference = reference(&scenario, node);
        assert!(!has_tag(&scenario, &reference));
        checkpoint(&scenario, node, "job", &reference);
        assert!(has_tag(&scenario, &reference));
    }
    scenario.end().unwrap();
}

fn is(node: &Node, id: &str, status: &str) -> bool {
    let tasks = node.run(&["ctr", "task", "ls"]).unwrap();
    tasks.lines().any(|line| line.starts_with(id) && line.contains(status))
}

#[test]
fn the_source_runs_on_when_the_agent_dies_for_good() {
    let mut scenario = start_holding();
    scenario.run_workload(&scenario.testbed.a, "job", 64, &[]).unwrap();
    let reference = scenario.reference("failure/killed:v1");
    // Its guardian must not wait for that deadline.
    let kyb = hold(&scenario.testbed.a, &reference, &["--pause-deadline", "50s"]);
    scenario.agent_a.take().unwrap().kill();
    drop(kyb);
    let a = &scenario.testbed.a;
    assert!(wait_until(Duration::from_secs(25), || is(a, "job", "RUNNING")), "still paused");
    scenario.wait_for_ticks(a, "job").unwrap();
    assert!(!has_tag(&scenario, &reference));

    scenario.agent_a = Some(scenario.start_agent(a, "").unwrap());
    let a = &scenario.testbed.a;
    checkpoint(&scenario, a, "job", &reference);
    let output = restore(&scenario, &scenario.testbed.b, &reference, "job", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(&scenario.testbed.b, "job").unwrap();
    scenario.end().unwrap();
}

#[test]
fn the_source_runs_on_when_kyb_is_killed() {
    let scenario = start_holding();
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 64, &[]).unwrap();
        let path = format!("failure/interrupted-{}", node.name());
        let reference = scenario.reference(&format!("{path}:v1"));
        let kyb = hold(node, &reference, &[]);
        let victims = running(node, "kyb");
        assert_eq!(victims.len(), 1);
        signal(&victims, Signal::KILL);
        drop(kyb);
        let_go(node);
        scenario.wait_for_ticks(node, "job").unwrap();
        // The operation is the agent's and goes on without its client. Tagging is its last step but
        // one, so a second may still be told that the container is busy.
        assert!(wait_until(END_LIMIT, || has_tag(&scenario, &reference)));
        let (again, key) =
            (scenario.reference(&format!("{path}:v2")), format!("node-{}", node.name()));
        let words = ["checkpoint", "job", &again, "--plain-http", "--sign-key", &key];
        let mut second = scenario.kyb(node, &words).unwrap();
        assert!(wait_until(END_LIMIT, || {
            let busy = said(&second).contains("is busy");
            if busy {
                second = scenario.kyb(node, &words).unwrap();
            }
            !busy
        }));
        assert!(second.status.success(), "{}", said(&second));
        assert!(has_tag(&scenario, &again));
    }
    scenario.end().unwrap();
}

#[test]
fn what_does_not_exist_is_named() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let reference = scenario.reference("failure/nothing:v1");
    let words = ["checkpoint", "nobody", &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("nobody"), "{}", said(&output));

    let before = scenario.traces(b).unwrap();
    let output = restore(&scenario, b, &reference, "nothing", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("failure/nothing"), "{}", said(&output));
    // An ordinary image is no checkpoint.
    let output = restore(&scenario, b, &scenario.image(), "nothing", &[]);
    assert_ne!(output.status.code(), Some(0));
    assert!(said(&output).contains("is no checkpoint"), "{}", said(&output));
    assert_eq!(scenario.traces(b).unwrap(), before);

    let target = "oci:/tmp/layout:v1";
    let output = scenario.kyb(a, &["pack", "/etc", target]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("/etc"), "{}", said(&output));
    scenario.end().unwrap();
}

#[test]
fn a_truncated_dump_is_named_and_nothing_is_made() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    a.run(&["ctr", "task", "checkpoint", "--image-path", "/srv/share/dump", "job"]).unwrap();
    let packed = scenario.kyb(a, &["pack", "/srv/share/dump", "oci:/tmp/whole:v1"]).unwrap();
    assert!(packed.status.success(), "{}", said(&packed));
    let unpack = ["unpack", "oci:/tmp/whole:v1", "/tmp/again", "--insecure-no-signature"];
    let unpacked = scenario.kyb(a, &unpack).unwrap();
    assert!(unpacked.status.success(), "{}", said(&unpacked));
    let same = "cd /tmp/again && for f in *; do cmp $f /srv/share/dump/$f || exit 1; done";
    a.run(&["sh", "-c", same]).unwrap();

    a.run(&["truncate", "-s", "-4096", "/srv/share/dump/pages-1.img"]).unwrap();
    let output = scenario.kyb(a, &["pack", "/srv/share/dump", "oci:/tmp/cut:v1"]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("pages-1.img"), "{}", said(&output));
    assert!(!a.path("/tmp/cut/index.json").exists());
    scenario.end().unwrap();
}

#[test]
fn a_node_without_criu_says_so_before_anything_is_touched() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    a.run(&["mv", "/usr/sbin/criu", "/usr/sbin/criu.away"]).unwrap();
    let reference = scenario.reference("failure/no-criu:v1");
    fails(&scenario, a, "job", &reference, "CRIU");
    a.run(&["mv", "/usr/sbin/criu.away", "/usr/sbin/criu"]).unwrap();
    checkpoint(&scenario, a, "job", &reference);
    scenario.end().unwrap();
}

#[test]
fn an_agent_without_root_or_beside_another_says_so() {
    let scenario = start();
    let a = &scenario.testbed.a;
    let words = ["setpriv", "--reuid=65534", "--clear-groups", "kybernate-agent", "serve"];
    let output = a.output(&[&words[..], &["--socket", "/tmp/agent.sock"]].concat()).unwrap();
    assert!(!output.status.success());
    assert!(said(&output).contains("root"), "{}", said(&output));

    // One with a root of its own would take the first one's socket, dumps and volumes.
    let serve = ["kybernate-agent", "serve", "--root", "/var/lib/second"];
    for own in [&[][..], &["--socket", "/tmp/second.sock"]] {
        let output = a.output(&[&serve[..], own].concat()).unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("another agent"), "{}", said(&output));
    }
    scenario.kyb_json(a, &["ps"]).unwrap();
    scenario.end().unwrap();
}

#[test]
fn a_stopped_source_is_found_by_its_tag_when_its_signer_dies() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 32, &[]).unwrap();
    let reference = scenario.reference("failure/stopped:v1");
    let password = format!("COSIGN_PASSWORD={PASSWORD}");
    let words = ["env", &password, "kyb", "checkpoint", "job", &reference, "--plain-http"];
    let key = ["--stop", "--sign-key", "/srv/share/node-a.key"];
    let mut kyb = a.command(&[&words[..], &key].concat()).spawn().unwrap();
    let stopped = wait_until(END_LIMIT, || is(a, "job", "STOPPED"));
    signal(&running(a, "kyb"), Signal::KILL);
    kyb.wait().unwrap();
    assert!(stopped && has_tag(&scenario, &reference));
    scenario.end().unwrap();
}

/// While there is a dump, nobody but root finds a file of the agent's to read.
fn nobody_reads(node: &Node) {
    let find = ["find", "/var/lib/kybernate", "/run/kybernate", "-type", "f", "-readable"];
    let all = node.run(&find).unwrap();
    for part in ["/run/kybernate/stage/", "/pages-1.img", "/var/lib/kybernate/operations/"] {
        assert!(all.contains(part), "{part} is not among {all}");
    }
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let seen = node.output(&[&nobody[..], &find].concat()).unwrap();
    assert_eq!(String::from_utf8_lossy(&seen.stdout), "", "others may read it");
}

#[test]
fn a_name_that_is_taken_and_a_container_that_is_busy_are_left_alone() {
    let scenario = start_holding();
    let taken = scenario.reference("failure/taken-a:v1");
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 64, &[]).unwrap();
        let path = format!("failure/taken-{}", node.name());
        let reference = scenario.reference(&format!("{path}:v1"));
        let kyb = hold(node, &reference, &[]);
        let second = scenario.reference(&format!("{path}:v2"));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &second, "--plain-http", "--sign-key", &key];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("busy"), "{}", said(&output));
        let elsewhere = ["restore", &second, "--plain-http", "--name", "job"];
        for words in [&["suspend", "job"][..], &elsewhere] {
            let output = scenario.kyb(node, words).unwrap();
            assert_eq!(output.status.code(), Some(1), "{words:?}: {}", said(&output));
            assert!(said(&output).contains("busy"), "{words:?}: {}", said(&output));
        }
        nobody_reads(node);
        let_go(node);
        assert!(wait_until(END_LIMIT, || has_tag(&scenario, &reference)));
        assert!(!has_tag(&scenario, &second));
        drop(kyb);

        let first = restore(&scenario, node, &taken, "taken", &[]);
        assert!(first.status.success(), "{}", said(&first));
        let before = scenario.traces(node).unwrap();
        let again = restore(&scenario, node, &taken, "taken", &[]);
        assert_eq!(again.status.code(), Some(1), "{}", said(&again));
        assert!(said(&again).contains("taken"), "{}", said(&again));
        assert_eq!(scenario.traces(node).unwrap(), before);
        scenario.wait_for_ticks(node, "taken").unwrap();
    }
    scenario.end().unwrap();
}

#[test]
fn a_source_that_is_killed_while_it_is_paused_can_be_restored() {
    let scenario = start_holding();
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 32, &[]).unwrap();
        for stop in [false, true] {
            let what = format!("on {}, stop: {stop}", node.name());
            let before = scenario.wait_for_ticks(node, "job").unwrap();
            let tag = format!("failure/killed-{stop}:{}", node.name());
            let reference = scenario.reference(&tag);
            let pid = first(node);
            let mut kyb = hold(node, &reference, if stop { &["--stop"] } else { &[] });
            // It dies when it may run again, as one does that the kernel kills for want of memory.
            node.run(&["kill", "-KILL", &pid]).unwrap();
            let_go(node);
            assert!(wait_until(END_LIMIT, || kyb.ends()), "{what}: kyb waits");
            let told = scenario.kyb_json(node, &["ps", "--operations"]).unwrap();
            let last = told["operations"].as_array().unwrap().last().unwrap();
            assert_eq!(last["state"], "done", "{what}: {last}");
            let ended = || !is(node, "job", "RUNNING") && !is(node, "job", "PAUSED");
            assert!(wait_until(END_LIMIT, ended), "{what}: it runs, or is frozen");
            scenario.remove(node, "job").unwrap();
            let output = restore(&scenario, node, &reference, "job", &[]);
            assert!(output.status.success(), "{what}: {}", said(&output));
            let after = scenario.wait_for_ticks(node, "job").unwrap();
            assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"], "{what}");
            assert_eq!(running(node, "criu"), [], "{what}");
        }
    }
    scenario.end().unwrap();
}
