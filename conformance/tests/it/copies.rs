//! Files that are open and have no name any more, where symbolic links have taken the place of their
//! directories. CRIU makes such a file anew by its path, before it is in the container: the links would
//! lead it to the node's own files.

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::END_LIMIT;
use crate::harness::{checkpoint, restore, said, start};

/// Where the links lead: directories that the node has, and the container others.
const AWAY: [&str; 2] = ["/srv/away", "/dev/shm/away"];

/// Holds a file of its root and one in memory, and a directory in which a process is.
const HOLDS: &str = "mkdir -p /srv/away /dev/shm/away /tmp/d /tmp/f/cwd /dev/shm/d; \
    exec 7<>/tmp/d/root 8<>/dev/shm/d/memory 9<>/tmp/top; \
    echo root >&7; echo memory >&8; echo top >&9; \
    cd /tmp/f/cwd; rm -r /tmp/d /tmp/f /tmp/top /dev/shm/d; \
    ln -s /srv/away /tmp/d; ln -s /srv/away /tmp/f; ln -s /dev/shm/away /dev/shm/d; \
    echo ready > /tmp/ready; while true; do sleep 0.1; done";

fn run(scenario: &Scenario, node: &Node, id: &str) {
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    node.run(&["ctr", "run", "-d", &image, id, "sh", "-c", HOLDS]).unwrap();
    assert!(wait_until(END_LIMIT, || sh(node, id, "cat /tmp/ready || true") == "ready\n"));
}

fn sh(node: &Node, id: &str, script: &str) -> String {
    node.told(&["ctr", "task", "exec", "--exec-id", "sh", id, "sh", "-c", script]).unwrap()
}

/// Restores with links in the way: all is as it was, and nothing is made on the node.
fn comes_back(scenario: &Scenario, node: &Node, reference: &str, id: &str, options: &[&str]) {
    let [root, memory] = AWAY;
    node.run(&["mkdir", "-p", root, memory]).unwrap();
    let changes = || node.run(&["stat", "-c", "%y %z %h", root, memory]).unwrap();
    let before = changes();
    let output = restore(scenario, node, reference, id, options);
    assert_eq!(changes(), before, "something was made on the node");
    assert!(output.status.success(), "{}", said(&output));
    let look = "cat /proc/1/fd/7 /proc/1/fd/8 /proc/1/fd/9; readlink /proc/1/fd/7; \
                ls -A / /tmp /dev/shm /srv/away | grep -E 'kybernate|cr\\.' ; ls /proc/1/cwd/ | wc -l; \
                readlink /tmp/d";
    let found = "root\nmemory\ntop\n/srv/away/root (deleted)\n0\n/srv/away\n";
    assert_eq!(sh(node, id, look), found);
}

#[test]
fn files_without_names_are_made_nowhere_on_the_node() {
    let mut scenario = start();
    scenario.next_agent("b", "[staging.ram]\nbudget = \"64MiB\"").unwrap();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run(&scenario, a, "job");
    let first = scenario.reference("copies/job:v1");
    checkpoint(&scenario, a, "job", &first);
    scenario.remove(a, "job").unwrap();
    comes_back(&scenario, b, &first, "job", &[]);
    comes_back(&scenario, a, &first, "job", &[]);

    // What was restored is taken, and what was staged is restored.
    let second = scenario.reference("copies/job:v2");
    checkpoint(&scenario, b, "job", &second);
    scenario.remove(b, "job").unwrap();
    scenario.kyb_json(b, &["stage", &second, "--tier", "ram", "--plain-http"]).unwrap();
    comes_back(&scenario, b, &second, "job", &[]);
    scenario.remove(b, "job").unwrap();

    // Another program's dump says where such files are, and no more.
    let peer = scenario.start_peer().unwrap();
    run(&scenario, b, "job");
    let theirs = scenario.peer_reference("copies/job:v1");
    b.run(&["ctr", "container", "checkpoint", "--task", "--rw", "--image", "job", &theirs])
        .unwrap();
    b.run(&["ctr", "image", "push", "--plain-http", &theirs]).unwrap();
    scenario.remove(b, "job").unwrap();
    let third = scenario.reference("copies/job:v3");
    let words = ["import", &theirs, &third, "--format", "containerd", "--plain-http"];
    let known = ["--namespace", "default", "--sign-key", "/srv/share/node-b.key"];
    scenario.kyb_json(b, &[&words[..], &known].concat()).unwrap();
    comes_back(&scenario, b, &third, "job", &["--allow-unknown-facts"]);
    drop(peer);
    scenario.end().unwrap();
}
