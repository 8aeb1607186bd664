//! Checkpoints that become images of containerd's: its own restore takes them without us, and what
//! it took them from goes with the image.

use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario, counter};
use rustix::process::Signal;
use serde_json::Value;

mod kubernetes;

use crate::failures::victims::{
    END_LIMIT, catch, is_done_without_kyb, running, signal, start_containerd,
};
use crate::harness::{at_once, checkpoint, next_agents, on_both, restore, said, start};
use crate::pods::{CONFIG, command_of, make_ready};
use crate::workloads::Place;

/// Where containerd keeps what is not whole yet.
const INGEST: &str = "/var/lib/containerd/io.containerd.content.v1.content/ingest";
/// How much of a dump has to be there for its writing to be in its middle.
const MIDDLE_BYTES: u64 = 4 << 20;

/// Takes a checkpoint on a node and removes its source, the source's image too. Returns where it is
/// and what the workload said.
fn taken(scenario: &Scenario, node: &Node, mib: u32) -> (String, Value) {
    scenario.run_workload(node, "job", mib, &[]).unwrap();
    let before = scenario.wait_for_ticks(node, "job").unwrap();
    let reference = scenario.reference(&format!("provided/{}:v1", node.name()));
    checkpoint(scenario, node, "job", &reference);
    scenario.remove(node, "job").unwrap();
    node.run(&["ctr", "image", "rm", "--sync", &scenario.image()]).unwrap();
    (reference, before)
}

/// Returns everything that containerd keeps.
fn kept(node: &Node) -> String {
    let script = "ctr image ls -q; ctr content ls -q | sort; ctr content active; \
        ctr snapshot ls; ctr leases ls; ls /var/lib/kybernate/stage /run/kybernate/stage";
    said(&node.output(&["sh", "-c", script]).unwrap())
}

fn provide(scenario: &Scenario, node: &Node, reference: &str) -> Value {
    scenario.kyb_json(node, &["provide", reference, "--plain-http"]).unwrap()
}

/// Lets containerd restore an image by itself, and looks at what goes on.
pub(crate) fn containerd_restores(
    node: &Node,
    (scenario, name): (&Scenario, &str),
    image: &str,
    old: &Value,
) {
    node.run(&["ctr", "container", "restore", "--rw", "--live", name, image]).unwrap();
    goes_on(node, (scenario, name), old);
}

/// It is the same process, and has lost nothing.
pub(crate) fn goes_on(node: &Node, (scenario, name): (&Scenario, &str), old: &Value) {
    let new = scenario.wait_for_ticks(node, name).unwrap();
    assert_eq!(new["boot_id_of_process"], old["boot_id_of_process"]);
    assert!(counter(&new) > counter(old), "{new}");
    for fact in ["checksum_ok", "pipe_ok", "shm_ok", "log_ok"] {
        assert_eq!(new[fact], true, "{new}");
    }
}

#[test]
fn containerd_restores_what_was_provided_and_lets_it_go() {
    let mut scenario = start();
    let agents = [scenario.agent_a.take(), scenario.agent_b.take()];
    let nodes = [&scenario.testbed.a, &scenario.testbed.b];
    for (node, agent) in nodes.into_iter().zip(agents) {
        let (reference, before) = taken(&scenario, node, 24);
        let empty = kept(node);
        let told = provide(&scenario, node, &reference);
        let image = told["image"].as_str().unwrap();
        assert_eq!(image, format!("{reference}-containerd"));
        let full = kept(node);
        assert_ne!(full, empty);
        // Once more is nothing more.
        let again = provide(&scenario, node, &reference);
        assert_eq!((&again["image"], &again["digest"]), (&told["image"], &told["digest"]));
        assert!(again["timesMicroseconds"].get("materialise").is_none(), "{again}");
        assert_eq!(kept(node), full);
        // For another name the dump is there already.
        let words = ["provide", &reference, "--plain-http", "--name", "example.com/other:1"];
        let other = scenario.kyb_json(node, &words).unwrap();
        assert_eq!(other["image"], "example.com/other:1");
        let largest = "ctr content ls | awk '{ print $2 }' | sort -h | uniq -c | tail -1";
        let largest = node.run(&["sh", "-c", largest]).unwrap();
        assert!(largest.trim_start().starts_with("1 "), "one dump, and not two: {largest}");
        node.run(&["ctr", "image", "rm", "--sync", "example.com/other:1"]).unwrap();
        assert_eq!(kept(node), full);

        // Nothing of ours is needed any more.
        drop(agent);
        for name in ["one", "two"] {
            containerd_restores(node, (&scenario, name), image, &before);
            is_in_its_cgroups(node, name);
        }
        scenario.remove(node, "one").unwrap();
        scenario.wait_for_ticks(node, "two").unwrap();
        scenario.remove(node, "two").unwrap();
        node.run(&["ctr", "image", "rm", "--sync", image]).unwrap();
        assert_eq!(kept(node), empty);
    }
    scenario.end().unwrap();
}

/// Makes sure that a container's processes are in its own cgroups.
fn is_in_its_cgroups(node: &Node, name: &str) {
    let place = Place { node, namespace: "default", id: name, state: "/state" };
    let pid = place.pid().unwrap();
    let membership = node.run(&["cat", &format!("/proc/{pid}/cgroup")]).unwrap();
    let own = |line: &str| line.ends_with(&format!("/{name}"));
    assert!(membership.lines().all(own), "{membership}");
}

/// Has a checkpoint come back by each of the three doors, and be the same process behind each.
fn comes_by_every_door(scenario: &Scenario, node: &Node, pinned: &str, before: &Value) {
    let output = restore(scenario, node, pinned, "kyb", &[]);
    assert!(output.status.success(), "{}", said(&output));
    goes_on(node, (scenario, "kyb"), before);
    scenario.remove(node, "kyb").unwrap();

    make_ready(scenario, node, pinned);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let program = ["/workload", "run", "--state", "/state", "--mib", "8"];
    let mut create = command_of(node, [pinned, "pod"], &[&wish], &[], &program);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    goes_on(node, (scenario, "pod"), before);
    scenario.remove(node, "pod").unwrap();

    let told = provide(scenario, node, pinned);
    containerd_restores(node, (scenario, "ctr"), told["image"].as_str().unwrap(), before);
    is_in_its_cgroups(node, "ctr");
    scenario.remove(node, "ctr").unwrap();
}

/// A container that the agent restored is dumped by a CRIU that leaves cgroups alone. What that writes
/// down has cgroups that threads are in, and describes none: no CRIU restores it that is told nothing.
#[test]
fn what_the_agent_had_restored_comes_back_by_every_door() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    at_once(&scenario, |node| {
        let (first, before) = taken(&scenario, node, 8);
        let output = restore(&scenario, node, &first, "again", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "again").unwrap();
        let second = scenario.reference(&format!("provided/{}:v2", node.name()));
        let digest = checkpoint(&scenario, node, "again", &second);
        scenario.remove(node, "again").unwrap();
        comes_by_every_door(&scenario, node, &format!("{second}@{digest}"), &before);
    });
    scenario.end().unwrap();
}

/// What a node refuses to provide.
fn refuses(scenario: &Scenario, node: &Node) {
    let refused = |words: &[&str], code: i32, reason: &str| {
        let before = kept(node);
        let words = [&["provide"], words, &["--plain-http"]].concat();
        let output = scenario.kyb(node, &words).unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(reason), "{text:?} does not mention {reason:?}");
        assert_eq!(kept(node), before);
    };
    let reference = |tag: &str| scenario.reference(&format!("provided/{tag}:{}", node.name()));
    scenario.run_workload(node, "job", 24, &[]).unwrap();
    let unsigned = reference("unsigned");
    let words = ["checkpoint", "job", &unsigned, "--plain-http", "--unsigned"];
    scenario.kyb_json(node, &words).unwrap();
    refused(&[&unsigned], 2, "not signed");
    let strange = reference("strange");
    let key = "/srv/share/stranger.key";
    let words = ["checkpoint", "job", &strange, "--plain-http", "--sign-key", key];
    scenario.kyb_json(node, &words).unwrap();
    refused(&[&strange], 2, "by none of the trusted keys");

    // The gate is the restore's: what it lets in must be allowed by name.
    scenario.run_workload(node, "more", 24, &["--cap-add", "CAP_SYS_PTRACE"]).unwrap();
    let more = reference("more");
    checkpoint(scenario, node, "more", &more);
    refused(&[&more], 2, "--allow-cap");
    let words = ["provide", &more, "--plain-http", "--allow-cap", "CAP_SYS_PTRACE"];
    let told = scenario.kyb_json(node, &words).unwrap();
    // That is another image than one without.
    let image = told["image"].as_str().unwrap();
    refused(&[&more], 1, "exists already");
    // Nobody's name is taken.
    let good = reference("good");
    checkpoint(scenario, node, "job", &good);
    refused(&[&good, "--name", &scenario.image()], 1, "exists already");
    refused(&[&good, "--name", image], 1, "exists already");
}

#[test]
fn what_is_not_provided_leaves_nothing() {
    let scenario = start();
    at_once(&scenario, |node| refuses(&scenario, node));
    scenario.end().unwrap();
}

/// Begins to provide a checkpoint and returns when a part of it is in containerd's content store.
fn begun(node: &Node, reference: &str) -> Child {
    let mut kyb = node.command(&["kyb", "provide", reference, "--plain-http"]);
    let kyb = kyb.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let place = node.path(INGEST);
    let written = || {
        let entries = fs::read_dir(&place).into_iter().flatten().filter_map(Result::ok);
        let mut sizes = entries.filter_map(|entry| fs::metadata(entry.path().join("data")).ok());
        sizes.any(|data| data.len() > MIDDLE_BYTES)
    };
    assert!(catch(written), "nothing is written: {}", kept(node));
    kyb
}

/// containerd dies while it is given a dump, and is there again: it has all of it then, or nothing.
fn containerd_dies(node: &Node, reference: &str, empty: &str) {
    let kyb = begun(node, reference);
    signal(&running(node, "containerd"), Signal::KILL);
    start_containerd(node);
    let output = kyb.wait_with_output().unwrap();
    if output.status.success() {
        node.run(&["ctr", "image", "rm", "--sync", &format!("{reference}-containerd")]).unwrap();
    }
    let gone = wait_until(END_LIMIT, || kept(node) == empty);
    assert!(gone, "what containerd was given is not gone: {}\n{empty}", kept(node));
}

/// Ends operations of a node in their middle, and looks for what is left.
fn ends_early(scenario: &Scenario, node: &Node, agent: Agent) {
    let (reference, before) = taken(scenario, node, 192);
    let empty = kept(node);

    let mut kyb = begun(node, &reference);
    let words = ["ps", "--operations", "--state", "running"];
    let operations = scenario.kyb_json(node, &words).unwrap();
    let id = operations["operations"][0]["id"].as_str().unwrap();
    scenario.kyb_json(node, &["cancel", id]).unwrap();
    assert!(!kyb.wait().unwrap().success());
    assert_eq!(kept(node), empty, "what was cancelled is not gone");

    // Without its client it goes on.
    is_done_without_kyb(scenario, node, begun(node, &reference), "provide");
    node.run(&["ctr", "image", "rm", "--sync", &format!("{reference}-containerd")]).unwrap();
    assert_eq!(kept(node), empty, "more than the image is left");

    containerd_dies(node, &reference, &empty);

    let mut kyb = begun(node, &reference);
    agent.kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    // If nobody came back, containerd would let it go by itself.
    let leases = node.run(&["ctr", "leases", "ls"]).unwrap();
    assert!(leases.contains("containerd.io/gc.expire="), "{leases}");
    let _agent = scenario.start_agent(node, "[staging.ram]\nbudget = \"1GiB\"\n").unwrap();
    let gone = wait_until(END_LIMIT, || kept(node) == empty);
    assert!(gone, "what a dead agent wrote is not gone: {}\n{empty}", kept(node));

    // A dump that is staged is read where it lies.
    scenario.kyb_json(node, &["stage", &reference, "--tier=ram", "--plain-http"]).unwrap();
    let told = provide(scenario, node, &reference);
    assert_eq!(told["staged"], "ram", "{told}");
    assert!(told["timesMicroseconds"].get("materialise").is_none(), "{told}");
    let image = told["image"].as_str().unwrap();
    containerd_restores(node, (scenario, "again"), image, &before);
    // What containerd restored can be taken by us.
    let next = scenario.reference(&format!("provided/{}:v2", node.name()));
    checkpoint(scenario, node, "again", &next);
    let output = restore(scenario, node, &next, "third", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(node, "third").unwrap();
}

#[test]
fn what_is_cut_short_is_gone_and_the_next_one_works() {
    let mut scenario = start();
    on_both(&mut scenario, ends_early);
    scenario.end().unwrap();
}

/// Waits until a program that looks after itself has counted beyond `count`, and returns what it says.
fn counts(node: &Node, file: &str, count: u64) -> Value {
    let mut last = Value::Null;
    let read = || fs::read_to_string(node.path(file)).ok();
    let counted = wait_until(END_LIMIT, || {
        last = read().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        last["count"].as_u64() > Some(count)
    });
    assert!(counted, "it was to count beyond {count}, and says {last}");
    last
}

#[test]
fn people_are_told_what_containerd_would_lose() {
    let scenario = start();
    for (node, told) in [(&scenario.testbed.a, false), (&scenario.testbed.b, true)] {
        let image = scenario.image();
        node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
        let bound = format!("/srv/share/bound-{}", node.name());
        fs::create_dir(node.path(&bound)).unwrap();
        let mount = format!("type=bind,src={bound},dst=/bound,options=rbind:rw");
        let program = ["/workload", "keep", "--state", "/bound"];
        let run = ["ctr", "run", "-d", "--mount", &mount, &image, "keeps"];
        node.run(&[&run[..], &program].concat()).unwrap();
        let file = format!("{bound}/keep");
        let before = counts(node, &file, 0);
        let reference = scenario.reference(&format!("provided/keeps:{}", node.name()));
        checkpoint(&scenario, node, "keeps", &reference);
        scenario.remove(node, "keeps").unwrap();

        let words = ["provide", &reference, "--plain-http"];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(":/bound"), "{}", said(&output));
        let allow = ["--allow-mount", &format!("{bound}:/bound")];
        let provided = scenario.kyb_json(node, &[&words[..], &allow].concat()).unwrap();
        assert!(provided["warnings"].to_string().contains("file locks"), "{provided}");
        if told {
            fs::create_dir_all(node.path("/etc/criu")).unwrap();
            fs::write(node.path("/etc/criu/runc.conf"), "file-locks\n").unwrap();
        }
        let image = provided["image"].as_str().unwrap();
        node.run(&["ctr", "container", "restore", "--rw", "--live", "kept", image]).unwrap();
        let after = counts(node, &file, before["count"].as_u64().unwrap() + 5);
        assert_eq!(after["boot"], before["boot"]);
        // The other process has its turn first; which lock it looks at next, the dump says.
        let mut last = after;
        let is_so = wait_until(END_LIMIT, || {
            last = counts(node, &file, 0);
            let wrong = last["wrong"].as_str().unwrap();
            if told { wrong.is_empty() } else { wrong.starts_with("somebody else got the ") }
        });
        assert!(is_so, "{told}: {last}");
        scenario.remove(node, "kept").unwrap();
    }
    scenario.end().unwrap();
}

/// A node sees that its content store has no room, and provides when it has.
fn sees_no_room(scenario: &Scenario, node: &Node) {
    let (reference, before) = taken(scenario, node, 48);
    let empty = kept(node);
    let store = "/var/lib/containerd/io.containerd.content.v1.content";
    node.run(&["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", store]).unwrap();
    let output = scenario.kyb(node, &["provide", &reference, "--plain-http"]).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let words = format!("\"{store}\" has ");
    assert!(said(&output).contains(&words), "{}", said(&output));
    assert!(said(&output).contains("are needed"), "{}", said(&output));
    // Neither to containerd nor to this node.
    for step in ["gate", "materialise", "pull", "write"] {
        assert!(!said(&output).contains(&format!("{step}:")), "{}", said(&output));
    }
    let written = node.run(&["find", store, "-type", "f"]).unwrap();
    assert_eq!(written, "");
    node.run(&["umount", store]).unwrap();
    assert_eq!(kept(node), empty);
    let told = provide(scenario, node, &reference);
    containerd_restores(node, (scenario, "one"), told["image"].as_str().unwrap(), &before);
}

#[test]
fn a_content_store_without_room_is_seen_before_a_byte_comes() {
    let scenario = start();
    at_once(&scenario, |node| sees_no_room(&scenario, node));
    scenario.end().unwrap();
}
