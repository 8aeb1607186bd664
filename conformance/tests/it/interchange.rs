//! Checkpoints that go to containerd's own tools, and come from them.

use std::time::Duration;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Scenario, counter};
use serde_json::Value;

use crate::harness::{at_once, checkpoint, refused, restore, said, start};

/// What Podman writes.
const FILE: &str = "/srv/share/podman.tar.zst";
/// An empty file that Podman mounts into containers, so that programs there know where they are.
const ENVIRONMENT: &str = "/run/containerenv:/run/.containerenv";
/// How long a container may take to start.
const LIMIT: Duration = Duration::from_mins(1);

/// Exports what runs on a node, and lets `ctr` restore it there under another name.
fn export(scenario: &Scenario, node: &Node, id: &str) -> Value {
    let again = format!("{id}-again");
    let before = scenario.wait_for_ticks(node, id).unwrap();
    let letter = node.name();
    let reference = scenario.reference(&format!("export/{letter}-{id}:v1"));
    checkpoint(scenario, node, id, &reference);
    let file = exported(node, id);
    let key = format!("/srv/share/node-{letter}.pub");
    let words = ["export", &reference, &file, "--format", "containerd", "--key", &key];
    let told = scenario.kyb_json(node, &[&words[..], &["--plain-http"]].concat()).unwrap();
    // Neither the source nor its image is needed any more.
    scenario.remove(node, id).unwrap();
    let images = node.run(&["ctr", "image", "ls", "-q"]).unwrap();
    for image in images.lines() {
        node.run(&["ctr", "image", "rm", "--sync", image]).unwrap();
    }

    node.run(&["ctr", "image", "import", &file]).unwrap();
    let name = told["name"].as_str().unwrap();
    node.run(&["ctr", "container", "restore", "--rw", "--live", &again, name]).unwrap();
    let after = scenario.wait_for_ticks(node, &again).unwrap();
    goes_on(&before, &after);
    scenario.remove(node, &again).unwrap();
    told
}

/// The file that a container of a node is exported into.
fn exported(node: &Node, id: &str) -> String {
    format!("/srv/share/{}-{id}.tar", node.name())
}

/// The same process went on, and nothing of it is broken.
fn goes_on(before: &Value, after: &Value) {
    assert_eq!(after["boot_id_of_process"], before["boot_id_of_process"]);
    assert!(counter(after) > counter(before));
    for fact in ["checksum_ok", "pipe_ok", "shm_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
}

#[test]
fn ctr_restores_what_was_exported() {
    let scenario = start();
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 24, &[]).unwrap();
        let told = export(&scenario, node, "job");
        assert!(told["image"].as_str().unwrap().contains("/demo/counter@sha256:"), "{told}");
        // What went out comes in again, and is the same process still.
        let letter = node.name();
        let (file, key) = (exported(node, "job"), format!("/srv/share/node-{letter}.key"));
        let back = scenario.reference(&format!("back/{letter}:v1"));
        let words = ["import", &file, &back, "--format", "containerd", "--namespace", "default"];
        let signed = ["--sign-key", &key, "--plain-http"];
        scenario.kyb_json(node, &[&words[..], &signed].concat()).unwrap();
        let output = restore(&scenario, node, &back, "back", &["--allow-unknown-facts"]);
        assert!(output.status.success(), "{}", said(&output));
        // CRIU was told to leave its cgroups alone, and has written down none to be made.
        export(&scenario, node, "back");
    });
    scenario.end().unwrap();
}

#[test]
fn what_ctr_took_is_imported_and_restored() {
    let scenario = start();
    let peer = scenario.start_peer().unwrap();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for (from, to) in [(a, b), (b, b)] {
        let letter = from.name();
        scenario.run_workload(from, "job", 24, &[]).unwrap();
        let before = scenario.wait_for_ticks(from, "job").unwrap();
        // By another registry, and by ours: its index lists blobs.
        let path = format!("ctr/job:{letter}");
        let is_ours = letter == "b";
        let theirs =
            if is_ours { scenario.reference(&path) } else { scenario.peer_reference(&path) };
        let take = ["ctr", "container", "checkpoint", "--task", "--rw", "--image", "job", &theirs];
        from.run(&take).unwrap();
        from.run(&["ctr", "image", "push", "--plain-http", &theirs]).unwrap();
        scenario.remove(from, "job").unwrap();

        let ours = scenario.reference(&format!("imported/{letter}:v1"));
        let words = ["import", &theirs, &ours, "--format", "containerd", "--plain-http"];
        let key = format!("/srv/share/node-{letter}.key");
        let known = ["--namespace", "default", "--container", "job", "--sign-key", &key];
        let told = scenario.kyb_json(to, &[&words[..], &known].concat()).unwrap();
        assert_eq!((&told["runnable"], &told["signed"]), (&Value::Bool(true), &Value::Bool(true)));
        // Nobody recorded what the node was: that has to be allowed.
        refused(&scenario, to, &ours, &[], "was not known where the checkpoint was taken");
        let name = format!("from-{letter}");
        let output = restore(&scenario, to, &ours, &name, &["--allow-unknown-facts"]);
        assert!(output.status.success(), "{}", said(&output));
        goes_on(&before, &scenario.wait_for_ticks(to, &name).unwrap());
    }
    drop(peer);
    scenario.end().unwrap();
}

/// Podman's images and containers, where its overlays are on no overlay.
const STORAGE: &str = "[storage]\ndriver = \"overlay\"\n\
    graphroot = \"/var/lib/containerd/podman\"\nrunroot = \"/run/podman\"\n";

#[test]
fn what_podman_exports_is_imported_and_restored() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    fs_err::create_dir_all(a.path("/etc/containers")).unwrap();
    fs_err::write(a.path("/etc/containers/storage.conf"), STORAGE).unwrap();
    let image = scenario.image();
    let run = ["podman", "run", "-d", "--name", "job", "--network", "none", "--runtime", "runc"];
    let workload = ["--mib", "24"];
    a.run(&[&run[..], &["--tls-verify=false", &image], &workload[..]].concat()).unwrap();
    let status = ["podman", "exec", "job", "/workload", "status", "--state", "/state"];
    let mut last = String::new();
    let mut before = Value::Null;
    let runs = wait_until(LIMIT, || {
        let output = a.output(&status).unwrap();
        before = serde_json::from_slice(&output.stdout).unwrap_or_default();
        last = said(&output) + &said(&a.output(&["podman", "logs", "job"]).unwrap());
        counter(&before) > Some(0)
    });
    assert!(runs, "{last}");
    a.run(&["podman", "container", "checkpoint", "--export", FILE, "job"]).unwrap();
    a.run(&["podman", "rm", "--force", "job"]).unwrap();

    let ours = scenario.reference("podman/job:v1");
    let words = ["import", FILE, &ours, "--format", "podman", "--image", &image, "--plain-http"];
    let signed = ["--namespace", "default", "--sign-key", "/srv/share/node-a.key"];
    scenario.kyb_json(a, &[&words[..], &signed].concat()).unwrap();
    // What Podman had put into its mounts is the node's, and has to be given again.
    let given = ["/etc/hosts:/etc/hosts", "/etc/hostname:/etc/hostname", ENVIRONMENT];
    let allowed = given.iter().flat_map(|mount| ["--allow-mount", *mount]).collect::<Vec<_>>();
    for node in [a, b] {
        fs_err::write(node.path("/etc/hostname"), "job\n").unwrap();
        fs_err::write(node.path("/run/containerenv"), "").unwrap();
        refused(&scenario, node, &ours, &["--allow-unknown-facts"], "/run/.containerenv");
        let beyond = ["--allow-unknown-facts", "--allow-new-privileges"];
        let words = [&beyond[..], &allowed[..]].concat();
        let output = restore(&scenario, node, &ours, "job", &words);
        assert!(output.status.success(), "{}", said(&output));
        goes_on(&before, &scenario.wait_for_ticks(node, "job").unwrap());
    }
    scenario.end().unwrap();
}
