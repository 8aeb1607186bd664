//! Memory or disk that becomes full in the middle: whoever asks learns what is full and what helps,
//! the source runs on, nothing is left, and with room it works.

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rustix::process::Signal;

use super::cancels::{at_step, begin, fails, registry, stage};
use super::is;
use super::victims::{catch, running, signal, start_containerd};
use crate::harness::{at_once, checkpoint, restore, said, start};

/// What the place for dumps holds: more than any dump here takes.
const MIB: u32 = 160;
/// Fills it, but for some MiB, before a dump.
const FILL: &str = r#"
[[hooks]]
name = "fill"
when = "before"
command = ["/bin/sh", "-c", "head -c 145M /dev/zero >PLACE/fill"]
on_request = true
"#;

/// A node's place for dumps.
#[derive(Clone, Copy, Debug)]
struct Place {
    directory: &'static str,
    /// What the agent's configuration says besides.
    config: &'static str,
    /// What is said to help.
    helps: &'static str,
}

const MEMORY: Place = Place {
    directory: "/run/kybernate/stage",
    config: "",
    helps: "make what is mounted there larger",
};
/// Another file system than the node's, as a disk for it alone.
const DISK: Place = Place {
    directory: "/var/lib/kybernate/stage",
    config: "memory_share = 0.0",
    helps: "free room on its file system",
};

impl Place {
    /// Gives a node a small one, and an agent that uses it.
    fn give(self, scenario: &mut Scenario, name: &str) {
        drop(scenario.agent(name).take());
        let Self { directory, config, .. } = self;
        let script = format!(
            "umount {directory}; mkdir -p {directory} && \
             mount -t tmpfs -o mode=0700,size={MIB}m small {directory}"
        );
        scenario.node(name).run(&["sh", "-c", &script]).unwrap();
        let hook = FILL.replace("PLACE", directory);
        let more = format!("pages_on_demand = false\n[staging]\n{config}\n{hook}");
        scenario.next_agent(name, &more).unwrap();
    }

    /// Makes room again.
    fn tidy(self, node: &Node) {
        fs::remove_file(node.path(&format!("{}/fill", self.directory))).unwrap();
    }

    fn tells(self, text: &str) {
        let full = format!("{} is full (", self.directory);
        assert!(text.contains(&full) && text.contains(self.helps), "{text}");
    }
}

/// Takes a checkpoint for which there is no room once it is under way, and then one with room.
fn takes(scenario: &mut Scenario, name: &str, place: Place, (mib, written): (u32, usize)) {
    let tag = format!("{}-{mib}-{name}", place.directory.replace('/', "-"));
    place.give(scenario, name);
    let node = scenario.node(name);
    scenario.run_workload(node, "job", mib, &[]).unwrap();
    let state = "/run/containerd/io.containerd.runtime.v2.task/default/job/rootfs/state";
    fs::write(node.path(state).join("written"), vec![7; written]).unwrap();
    let before = scenario.traces(node).unwrap();
    let reference = scenario.reference(&format!("room/job:of{tag}"));
    let key = format!("node-{name}");
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
    let output = scenario.kyb(node, &[&words[..], &["--hook", "fill"]].concat()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{tag}: {}", said(&output));
    place.tells(&said(&output));
    scenario.wait_for_ticks(node, "job").unwrap();
    place.tidy(node);
    assert_eq!(scenario.traces(node).unwrap(), before, "{tag}: something is left");
    checkpoint(scenario, node, "job", &reference);
    scenario.wait_for_ticks(node, "job").unwrap();
    scenario.remove(node, "job").unwrap();
}

#[test]
fn a_dump_or_capture_without_room_harms_nothing() {
    let mut scenario = start();
    let (dump, capture) = ((64, 0), (8, 48 << 20));
    takes(&mut scenario, "a", MEMORY, dump);
    takes(&mut scenario, "b", MEMORY, capture);
    takes(&mut scenario, "a", DISK, capture);
    takes(&mut scenario, "b", DISK, dump);
    scenario.end().unwrap();
}

/// Two at once, and room for one of them.
#[test]
fn what_one_was_promised_is_not_anothers() {
    let mut scenario = start();
    for name in ["a", "b"] {
        DISK.give(&mut scenario, name);
        let node = scenario.node(name);
        for id in ["one", "other"] {
            scenario.run_workload(node, id, 64, &[]).unwrap();
        }
        let (one, other) = (format!("room/one:{name}"), format!("room/other:{name}"));
        let (one, other) = (scenario.reference(&one), scenario.reference(&other));
        let key = format!("node-{name}");
        // The first has written nothing yet: it waits for the registry.
        registry(&scenario).signal(Signal::STOP);
        let first = begin(node, &["checkpoint", "one", &one, "--sign-key", &key]);
        at_step(&scenario, node, &["preflight"]);
        let words = ["checkpoint", "other", &other, "--plain-http", "--sign-key", &key];
        let second = scenario.kyb(node, &words).unwrap();
        let looked = scenario.kyb(node, &["preflight", "other"]).unwrap();
        registry(&scenario).signal(Signal::CONT);
        let text = said(&second);
        assert_eq!(second.status.code(), Some(1), "{name}: {text}");
        for told in ["operations that are under way will write", "ask again when"] {
            assert!(text.contains(told), "{name}: {text}");
        }
        assert!(looked.status.success(), "{name}: {}", said(&looked));
        let first = first.wait_with_output().unwrap();
        assert!(first.status.success(), "{name}: {}", said(&first));
        checkpoint(&scenario, node, "other", &other);
        for id in ["one", "other"] {
            scenario.wait_for_ticks(node, id).unwrap();
            scenario.remove(node, id).unwrap();
        }
    }
    scenario.end().unwrap();
}

/// Fills a node's place in the middle of a restore, and restores once there is room. The image and its
/// layers are there already.
fn comes(scenario: &mut Scenario, name: &str, place: Place, reference: &str) {
    let what = format!("{name}, {}", place.directory);
    place.give(scenario, name);
    let node = scenario.node(name);
    let before = scenario.traces(node).unwrap();
    let kyb = begin(node, &["restore", reference, "--name", "job"]);
    let comes = || match place.directory {
        "/run/kybernate/stage" => stage(node, "images/pages-1.img") > 0,
        directory => {
            let entries = fs::read_dir(node.path(directory)).unwrap().flatten();
            let mut files = entries.map(|entry| entry.path().join("images/pages-1.img"));
            files.any(|file| fs::metadata(file).is_ok_and(|file| file.len() > 0))
        }
    };
    assert!(catch(comes), "{what}: no memory comes");
    registry(scenario).signal(Signal::STOP);
    let fill = format!("cat /dev/zero >{}/fill", place.directory);
    assert!(!node.output(&["sh", "-c", &fill]).unwrap().status.success(), "it has no end");
    registry(scenario).signal(Signal::CONT);
    place.tells(&fails(kyb));
    place.tidy(node);
    assert_eq!(scenario.traces(node).unwrap(), before, "{what}: something is left");
    let output = restore(scenario, node, reference, "job", &[]);
    assert!(output.status.success(), "{what}: {}", said(&output));
    scenario.wait_for_ticks(node, "job").unwrap();
    scenario.remove(node, "job").unwrap();
}

#[test]
fn a_restore_without_room_leaves_nothing() {
    let mut scenario = start();
    scenario.run_workload(&scenario.testbed.a, "job", 96, &[]).unwrap();
    let reference = scenario.reference("room/job:back");
    checkpoint(&scenario, &scenario.testbed.a, "job", &reference);
    scenario.remove(&scenario.testbed.a, "job").unwrap();
    // The first one leaves the image and its layers.
    at_once(&scenario, |node| {
        let output = restore(&scenario, node, &reference, "job", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.remove(node, "job").unwrap();
    });
    // One after the other: the registry stands still for each.
    for name in ["a", "b"] {
        for place in [DISK, MEMORY] {
            comes(&mut scenario, name, place, &reference);
        }
    }
    scenario.end().unwrap();
}

/// containerd's own directory, which is a file system of its own here.
const CONTAINERD: &str = "/var/lib/containerd";

/// Fills it, but for some MiB.
fn fill(node: &Node, left: u32) {
    let script = format!(
        "cd {CONTAINERD}; cat /dev/zero >fill; truncate -s $(($(stat -c %s fill) - ({left} << 20))) fill"
    );
    node.run(&["sh", "-c", &script]).unwrap();
}

/// Makes room in it again.
fn empty(node: &Node) {
    fs::remove_file(node.path(&format!("{CONTAINERD}/fill"))).unwrap();
}

/// Gives containerd a small file system, and fills it again and again.
fn is_full(scenario: &Scenario, node: &Node, reference: &str) {
    signal(&running(node, "containerd"), Signal::KILL);
    node.run(&["mount", "-t", "tmpfs", "-o", "size=512m", "small", CONTAINERD]).unwrap();
    start_containerd(node);
    let fails = |left: u32| {
        let before = scenario.traces(node).unwrap();
        fill(node, left);
        let output = restore(scenario, node, reference, "job", &[]);
        let told = format!("{}, {left} MiB left: {}", node.name(), said(&output));
        println!("{told}");
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(&format!("{CONTAINERD} is full (")), "{told}");
        assert!(told.contains("free room there"), "{told}");
        assert_eq!(scenario.traces(node).unwrap(), before, "{told}: something is left");
    };
    // No room for the image.
    fails(0);
    fails(1);
    empty(node);
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    node.run(&["ctr", "run", "-d", &image, "other", "/workload", "pause"]).unwrap();
    // For what the container had written, and for nothing at all.
    fails(32);
    empty(node);
    fails(0);
    // What runs there is taken all the same.
    let other = scenario.reference(&format!("room/other:{}", node.name()));
    checkpoint(scenario, node, "other", &other);
    assert!(is(node, "other", "RUNNING"));
    empty(node);
    for (reference, name) in [(reference, "job"), (&*other, "another")] {
        let output = restore(scenario, node, reference, name, &[]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(is(node, name, "RUNNING"), "{name}");
    }
    scenario.wait_for_ticks(node, "job").unwrap();
}

#[test]
fn a_containerd_without_room_loses_nothing_and_is_named() {
    let scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 8, &[]).unwrap();
    let state = "/run/containerd/io.containerd.runtime.v2.task/default/job/rootfs/state";
    fs::write(a.path(state).join("written"), vec![7; 48 << 20]).unwrap();
    let reference = scenario.reference("room/containerd:v1");
    checkpoint(&scenario, a, "job", &reference);
    scenario.remove(a, "job").unwrap();
    at_once(&scenario, |node| is_full(&scenario, node, &reference));
    scenario.end().unwrap();
}

/// Where operations are written down.
const JOURNAL: &str = "/var/lib/kybernate/operations";

/// Fills it.
const FILL_JOURNAL: &str = r#"
[[hooks]]
name = "fill"
when = "before"
command = ["/bin/sh", "-c", "cat /dev/zero >/var/lib/kybernate/operations/fill; true"]
on_request = true
"#;

/// What cannot be written down is not begun, and what has begun comes to its end.
#[test]
fn an_operation_without_room_for_its_journal_is_not_begun() {
    let mut scenario = start();
    for name in ["a", "b"] {
        drop(scenario.agent(name).take());
        let mount = ["mount", "-t", "tmpfs", "-o", "mode=0700,size=512k", "small", JOURNAL];
        scenario.node(name).run(&mount).unwrap();
        scenario.next_agent(name, FILL_JOURNAL).unwrap();
    }
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("room/journal:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let before = scenario.traces(node).unwrap();
        let first = scenario.kyb(node, &[&words[..], &["--hook", "fill"]].concat()).unwrap();
        assert!(first.status.success(), "full meanwhile: {}", said(&first));
        scenario.wait_for_ticks(node, "job").unwrap();
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        let second = scenario.kyb(node, &words).unwrap();
        assert_eq!(second.status.code(), Some(1), "{}", said(&second));
        let reason = format!("failed to keep the operations in \"{JOURNAL}\"");
        let text = said(&second);
        assert!(text.contains(&reason) && text.contains("No space left"), "{text}");
        scenario.wait_for_ticks(node, "job").unwrap();
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        fs::remove_file(node.path(&format!("{JOURNAL}/fill"))).unwrap();
        checkpoint(&scenario, node, "job", &reference);
        scenario.wait_for_ticks(node, "job").unwrap();
    });
    scenario.end().unwrap();
}
