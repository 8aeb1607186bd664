//! `kybernate-conformance cluster`, as a person uses it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use fs_err as fs;
use fs_err::os::unix::fs::symlink;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::root;
use kybernate_conformance::testbed::state::State;
use serde_json::{Value, json};

use super::story::READY;
use crate::harness::{bin, said};
use crate::nodes::Probe;

/// A pod whose node is asked for, of the image that the cluster's registry has.
fn pod(node: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": format!("on-{node}") },
        "spec": {
            "runtimeClassName": "kybernate",
            "nodeSelector": { "kubernetes.io/hostname": node },
            "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "main", "image": "10.77.0.1:5000/demo/counter:base" }],
        },
    })
}

#[test]
fn the_command_starts_asks_and_ends_a_cluster() {
    if super::is_left_out() {
        return;
    }
    preflight().unwrap();
    // Testbeds of its own, beside those that a person may have up.
    let cache = tempfile::tempdir().unwrap();
    for part in ["roots", "tools"] {
        symlink(root::cache().join(part), cache.path().join(part)).unwrap();
    }
    let cli = |words: &[&str]| -> Output {
        let mut command = Command::new(bin().join("kybernate-conformance"));
        command.arg("cluster").args(words).env("KYBERNATE_CACHE", cache.path()).output().unwrap()
    };
    let ran = |words: &[&str]| {
        let output = cli(words);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(cli(&["kubectl", "--", "get", "nodes"]).status.code(), Some(1), "none is up");
    ran(&["up"]);
    let state = state(cache.path());
    let probe = Probe::new(&state);
    let nodes: Value =
        serde_json::from_str(&ran(&["kubectl", "--", "get", "nodes", "-o", "json"])).unwrap();
    assert_eq!(nodes["items"].as_array().unwrap().len(), 2, "{nodes}");
    // Each node has all that a pod needs, an agent too.
    let share = state.directory.join("share");
    for node in ["a", "b"] {
        let file = format!("/srv/share/on-{node}.json");
        fs::write(share.join(format!("on-{node}.json")), pod(node).to_string()).unwrap();
        ran(&["kubectl", "--", "apply", "-f", &file]);
    }
    ran(&["kubectl", "--", "wait", "--for=condition=Ready", READY, "pod", "on-a", "on-b"]);
    assert!(!cli(&["kubectl", "--", "get", "pod", "nobody"]).status.success());
    ran(&["down"]);
    assert_eq!(probe.traces(), BTreeSet::new());
    ran(&["down"]);
}

/// Returns the testbed that `up` keeps.
fn state(cache: &Path) -> State {
    let text = fs::read(cache.join("testbeds/up/state.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}
