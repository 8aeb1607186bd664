//! A /dev/shm from outside, as the containers of a pod have it: the node's CRI plugin mounts one for
//! all of them in place of the default. CRIU leaves such a mount out; we do not.

use std::path::Path;
use std::time::Duration;

use containerd_client::Client;
use containerd_client::services::v1::{Container, GetContainerRequest, UpdateContainerRequest};
use containerd_client::tonic::Request;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::{Value, json};

use crate::harness::{checkpoint, restore, said, start};
use crate::pods;

/// What the pod's mount is of, on the node.
const SOURCE: &str = "/run/pod/shm";

/// How long a container may take to count on.
const COUNT_LIMIT: Duration = Duration::from_secs(30);

/// Starts a container that counts in a mapped file of a /dev/shm from outside.
fn run_in_a_pod(scenario: &Scenario, node: &Node, id: &str) {
    mount(node);
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    create(node, id, &image, &[]);
    node.run(&["ctr", "task", "start", "-d", id]).unwrap();
}

/// Makes the pod's mount.
fn mount(node: &Node) {
    node.run(&["mkdir", "-p", SOURCE]).unwrap();
    node.run(&["mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "shm", SOURCE]).unwrap();
}

/// Creates a container with the pod's mount.
fn create(node: &Node, id: &str, image: &str, options: &[&str]) {
    let words = ["/workload", "hold", "map", "/dev/shm/count"];
    let created = [&["ctr", "container", "create"], options, &[image, id], &words].concat();
    node.run(&created).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // `ctr` adds mounts and takes none away.
    runtime.block_on(edit(node, id, |spec| {
        let mounts = spec["mounts"].as_array_mut().unwrap();
        let shared = mounts.iter_mut().find(|mount| mount["destination"] == "/dev/shm").unwrap();
        *shared = json!({
            "destination": "/dev/shm", "type": "bind", "source": SOURCE,
            "options": ["rbind", "rprivate", "rw"],
        });
    }));
}

/// Changes the specification of a container that has no task yet.
async fn edit(node: &Node, id: &str, change: impl FnOnce(&mut Value)) {
    let socket = node.path("/run/containerd/containerd.sock");
    let mut client = Client::from_path(socket).await.unwrap().containers();
    let answer = client.get(default(GetContainerRequest { id: id.to_owned() })).await.unwrap();
    let mut spec = answer.into_inner().container.unwrap().spec.unwrap();
    let mut json: Value = serde_json::from_slice(&spec.value).unwrap();
    change(&mut json);
    spec.value = json.to_string().into_bytes();
    let container = Container { id: id.to_owned(), spec: Some(spec), ..Container::default() };
    let update_mask = Some(prost_types::FieldMask { paths: vec!["spec".to_owned()] });
    let message = UpdateContainerRequest { container: Some(container), update_mask };
    client.update(default(message)).await.unwrap();
}

/// A request in containerd's namespace that `ctr` uses.
fn default<M>(message: M) -> Request<M> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", "default".parse().unwrap());
    request
}

fn sh(node: &Node, id: &str, script: &str) -> String {
    let words = ["ctr", "task", "exec", "--exec-id", "sh", id, "sh", "-c", script];
    node.told(&words).unwrap()
}

/// Returns the count, once it has gone on from `before`.
fn counts_on(node: &Node, id: &str, before: u64) -> u64 {
    let mut last = String::new();
    let goes_on = wait_until(COUNT_LIMIT, || {
        last = sh(node, id, "head -n 1 /dev/shm/count");
        last.trim().parse().is_ok_and(|count: u64| count > before)
    });
    assert!(goes_on, "it was {before}, and is {last:?}");
    last.trim().parse().unwrap()
}

#[test]
fn files_in_a_dev_shm_from_outside_move_too() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run_in_a_pod(&scenario, a, "shm");
    sh(a, "shm", "echo kept > /dev/shm/note; mkdir /dev/shm/d; ln -s ../note /dev/shm/d/link");
    sh(a, "shm", "ln /dev/shm/note /dev/shm/d/name; chmod 600 /dev/shm/note; chmod 750 /dev/shm/d");
    let note = a.run(&["cat", &format!("{SOURCE}/note")]).unwrap();
    assert_eq!(note, "kept\n", "its /dev/shm is another one");
    let before = counts_on(a, "shm", 0);

    let reference = scenario.reference("pod/job:v1");
    checkpoint(&scenario, a, "shm", &reference);
    scenario.remove(a, "shm").unwrap();
    a.run(&["umount", SOURCE]).unwrap();

    let output = restore(&scenario, b, &reference, "shm", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let look = "cat /dev/shm/note /dev/shm/d/link /dev/shm/d/name; stat -c '%a %h' /dev/shm/note; \
                stat -c %a /dev/shm /dev/shm/d; ls /dev/shm; grep -c ' /dev/shm ' /proc/mounts";
    let found = "kept\nkept\nkept\n600 2\n1777\n750\ncount\nd\nnote\n1\n";
    assert_eq!(sh(b, "shm", look), found);
    // What is counted in memory shows in the file, and what is written to the file in memory.
    let count = counts_on(b, "shm", before);
    let write = "echo 'said after it moved.' | dd of=/dev/shm/count bs=21 seek=1 conv=notrunc";
    sh(b, "shm", write);
    let said_again = || sh(b, "shm", "tail -n 1 /dev/shm/count") == "said after it moved.\n";
    assert!(wait_until(COUNT_LIMIT, said_again), "what is mapped is another file");

    // What was restored can be taken again, and the volume goes with its container.
    let reference = scenario.reference("pod/job:v2");
    checkpoint(&scenario, b, "shm", &reference);
    scenario.remove(b, "shm").unwrap();
    let output = restore(&scenario, b, &reference, "again", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(sh(b, "again", look), found);
    counts_on(b, "again", count);
    let volumes = b.run(&["ls", "/run/kybernate/volumes/default"]).unwrap();
    assert_eq!(volumes, "again\n");
    scenario.end().unwrap();
}

fn holds(path: &Path, text: &str) -> bool {
    let content = fs_err::read(path).unwrap();
    content.windows(text.len()).any(|one| one == text.as_bytes())
}

/// Takes away what a registry has that holds this text, and returns how many files that were.
fn lose(directory: &Path, text: &str) -> usize {
    let mut lost = 0;
    for entry in fs_err::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            lost += lose(&path, text);
        } else if path.is_file() && holds(&path, text) {
            fs_err::remove_file(path).unwrap();
            lost += 1;
        }
    }
    lost
}

#[test]
fn a_pods_container_gets_what_was_staged() {
    let mut scenario = start();
    drop(scenario.agent_b.take());
    scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, pods::CONFIG).unwrap());
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run_in_a_pod(&scenario, a, "shm");
    sh(a, "shm", "echo kept in a pod > /dev/shm/note");
    let before = counts_on(a, "shm", 0);
    let reference = scenario.reference("pod/job:v1");
    let pinned = format!("{reference}@{}", checkpoint(&scenario, a, "shm", &reference));
    let output = scenario.kyb(b, &["stage", &pinned, "--tier", "ram", "--plain-http"]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    b.run(&["ctr", "image", "pull", "--plain-http", &pinned]).unwrap();
    // kybernate-runc has no time for it any more.
    assert_eq!(lose(&scenario.registry_root(), "kept in a pod"), 1);

    mount(b);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mut options = vec!["--runc-binary", "/srv/bin/kybernate-runc"];
    let own =
        ["io.kubernetes.cri.container-type=container", "io.kubernetes.cri.container-name=main"];
    for annotation in [own[0], own[1], &wish] {
        options.extend(["--annotation", annotation]);
    }
    create(b, "main", &pinned, &options);
    // What is in use is nobody's to replace.
    b.run(&["touch", &format!("{SOURCE}/other")]).unwrap();
    let output = b.output(&["ctr", "task", "start", "-d", "main"]).unwrap();
    assert!(said(&output).contains("/dev/shm is in use already"), "{}", said(&output));
    b.run(&["rm", &format!("{SOURCE}/other")]).unwrap();
    b.run(&["ctr", "task", "start", "-d", "main"]).unwrap();
    assert_eq!(sh(b, "main", "cat /dev/shm/note"), "kept in a pod\n");
    counts_on(b, "main", before);
    // So does a container of the agent's own.
    let output = restore(&scenario, b, &pinned, "own", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(sh(b, "own", "cat /dev/shm/note"), "kept in a pod\n");
    scenario.end().unwrap();
}
