//! What a container had written to its root file system.

use kybernate_conformance::node::Node;
use serde_json::Value;

use crate::harness::{at_once, checkpoint, restore, said, start};

/// One of each that a file system has: deleted, replaced, linked, and with everything that is not
/// content.
const WRITE: &str = "set -e; b=busybox
    rm /etc/os-release && rm -r /var/tmp && mkdir /var/tmp && echo new > /var/tmp/new
    mkdir -p /w/a/b && cd /w && head -c 5000001 /dev/urandom > a/large && echo x > program
    $b touch a/empty && ln a/empty a/b/again && ln -s ../../etc a/link && ln -s /nowhere a/out
    $b mkfifo -m 620 a/pipe && $b mknod -m 666 a/null c 1 3 && mv /etc/group /w/moved
    name=\"$($b printf 'n%.0s' $($b seq 200))\" && mkdir deep && echo long > deep/$name
    $b chown -R 12:34 a/b && $b chown 1000:7 program && $b chown -h 5:6 a/link
    chmod 700 a && chmod 1777 a/b && chmod 6755 program
    $b touch -d 2001-02-03 program a/large a/b a";

/// Lists it, but not what is not there: what `find` says of that comes between any two lines.
const LIST: &str = "find /w /var /etc/os-release /etc/group 2>/dev/null | busybox sort | \
    while read -r name; do stat -c '%N %f %u %g %h %s %Y %t %T' \"$name\"; done; \
    cat /w/a/large /w/program /w/deep/* /var/tmp/new | sha256sum";

fn list(node: &Node, container: &str) -> String {
    node.told(&["ctr", "task", "exec", "--exec-id", "list", container, "sh", "-c", LIST]).unwrap()
}

/// Returns the digest of the last layer of a checkpoint's image.
fn layer(node: &Node, reference: &str) -> String {
    let read = |reference: &str| -> Value {
        let manifest = node.run(&["crane", "manifest", "--insecure", reference]).unwrap();
        serde_json::from_str(&manifest).unwrap()
    };
    let index = read(reference);
    let (repository, _tag) = reference.rsplit_once(':').unwrap();
    let image =
        read(&format!("{repository}@{}", index["manifests"][0]["digest"].as_str().unwrap()));
    image["layers"].as_array().unwrap().last().unwrap()["digest"].as_str().unwrap().to_owned()
}

/// The agent unpacks it by itself, which must be as containerd does it; and the content store does not
/// get it, which who takes the container again must not notice.
#[test]
fn what_was_written_comes_back_as_containerd_would_unpack_it() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    a.run(&["ctr", "task", "exec", "--exec-id", "w", "job", "sh", "-c", WRITE]).unwrap();
    let reference = scenario.reference("written/job:v1");
    checkpoint(&scenario, a, "job", &reference);
    let (written, layer) = (list(a, "job"), layer(b, &reference));
    assert!(written.contains("/w/a/b/again 81a4 12 34 2 0 "), "{written}");
    for node in [a, b] {
        let output = restore(&scenario, node, &reference, "back", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "back").unwrap();
        assert_eq!(list(node, "back"), written);
        let content = node.run(&["ctr", "content", "ls", "-q"]).unwrap();
        assert!(!content.contains(&layer), "containerd unpacked it: {content}");

        // In a namespace of its own, where containerd has none of its layers.
        let (other, image) = (["ctr", "-n", "other"], &*reference);
        node.run(&[&other[..], &["image", "pull", "--plain-http", image]].concat()).unwrap();
        let words = ["run", "--rm", image, "cold", "sh", "-c", LIST];
        let unpacked = node.told(&[&other[..], &words].concat()).unwrap();
        assert_eq!(unpacked, written);
    }

    // Taken again, to where none of its layers are.
    let peer = scenario.start_peer().unwrap();
    let elsewhere = scenario.peer_reference("written/again:v1");
    checkpoint(&scenario, b, "back", &elsewhere);
    a.run(&["ctr", "-n", "third", "image", "pull", "--plain-http", &elsewhere]).unwrap();
    let words = ["ctr", "-n", "third", "run", "--rm", &elsewhere, "cold", "sh", "-c", LIST];
    assert_eq!(a.told(&words).unwrap(), written);
    drop(peer);
    scenario.end().unwrap();
}

/// The agent holds each directory open that another one is in, and stops at so many.
#[test]
fn what_the_agent_does_not_unpack_is_left_to_containerd() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let deep =
        "d=$(busybox printf 'd/%.0s' $(busybox seq 300)); mkdir -p $d && echo deep > $d/file";
    a.run(&["ctr", "task", "exec", "--exec-id", "w", "job", "sh", "-c", deep]).unwrap();
    let reference = scenario.reference("written/deep:v1");
    checkpoint(&scenario, a, "job", &reference);
    let output = restore(&scenario, b, &reference, "back", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(b, "back").unwrap();
    let content = b.run(&["ctr", "content", "ls", "-q"]).unwrap();
    assert!(content.contains(&layer(b, &reference)), "{content}");
    let read = "cat $(find / -xdev -path '/d/*' -name file)";
    let words = ["ctr", "task", "exec", "--exec-id", "r", "back", "sh", "-c", read];
    assert_eq!(b.told(&words).unwrap(), "deep\n");
    scenario.end().unwrap();
}

/// Without its layers a checkpoint is nothing that anybody could restore.
#[test]
fn a_source_whose_layers_are_out_of_reach_is_not_stopped() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let peer = scenario.start_peer().unwrap();
    let elsewhere = scenario.peer_reference("written/away:v1");
    checkpoint(&scenario, a, "job", &elsewhere);
    let output = restore(&scenario, b, &elsewhere, "back", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(b, "back").unwrap();
    drop(peer);
    let reference = scenario.reference("written/away:v2");
    let words =
        ["checkpoint", "back", &reference, "--plain-http", "--sign-key", "node-b", "--stop"];
    let output = scenario.kyb(b, &words).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let registry = elsewhere.split('/').next().unwrap();
    assert!(said(&output).contains(registry), "{}", said(&output));
    scenario.wait_for_ticks(b, "back").unwrap();
    scenario.end().unwrap();
}

/// What is sparse, or the same again and again, is very small when it is compressed: far more comes out of
/// that than anybody takes who does not know yet whether it is what was signed.
#[test]
fn what_is_sparse_comes_back_though_its_source_has_ended() {
    const SPARSE: &str = "set -e; truncate -s 600M /sparse; echo end >> /sparse; echo more > /more";
    const LOOK: &str = "stat -c %s /sparse; tail -c 4 /sparse; cat /more";
    let scenario = start();
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        node.run(&["ctr", "task", "exec", "--exec-id", "w", "job", "sh", "-c", SPARSE]).unwrap();
        let reference = scenario.reference(&format!("sparse/job:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key, "--stop"];
        let output = scenario.kyb(node, &words).unwrap();
        assert!(output.status.success(), "{}", said(&output));
        scenario.remove(node, "job").unwrap();
        let output = restore(&scenario, node, &reference, "back", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "back").unwrap();
        let look = ["ctr", "task", "exec", "--exec-id", "l", "back", "sh", "-c", LOOK];
        assert_eq!(node.told(&look).unwrap(), "629145604\nend\nmore\n");
    });
    scenario.end().unwrap();
}
