//! The namespace of containerd's CRI plugin, which looks after every image there.

use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use rustix::process::Signal;
use serde_json::Value;

use super::taken;
use crate::failures::victims::{END_LIMIT, running, signal};
use crate::harness::{said, start};

/// How long the plugin may take to see a new image.
const SEEN_LIMIT: Duration = Duration::from_secs(20);

/// Starts containerd anew, with the CRI plugin.
fn with_plugin(node: &Node) {
    let before = running(node, "containerd");
    signal(&before, Signal::KILL);
    assert!(wait_until(END_LIMIT, || !before.iter().any(|process| process.runs())));
    fs::write(node.path("/etc/containerd/config.toml"), "version = 2\n").unwrap();
    let script = "containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &";
    node.run(&["sh", "-c", script]).unwrap();
    let loaded = || {
        let plugins = node.run(&["ctr", "--connect-timeout", "1s", "plugins", "ls"]);
        let cri = |line: &str| line.contains("cri") && line.trim_end().ends_with("ok");
        plugins.is_ok_and(|plugins| plugins.lines().any(cri))
    };
    assert!(wait_until(END_LIMIT, loaded), "the CRI plugin is not there");
}

fn status(node: &Node, name: &str) -> Option<Value> {
    let task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io";
    let file = node.path(&format!("{task}/{name}/rootfs/state/status.json"));
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

#[test]
fn what_is_provided_beside_the_kubelets_images_is_restored_and_let_go() {
    let mut scenario = start();
    let agents = [scenario.agent_a.take(), scenario.agent_b.take()];
    let nodes = [&scenario.testbed.a, &scenario.testbed.b];
    for (node, agent) in nodes.into_iter().zip(agents) {
        let (reference, before) = taken(&scenario, node, 24);
        // Its source was in another namespace: the node's policy has to say that this is right.
        let words = ["provide", &reference, "--plain-http", "--namespace", "k8s.io"];
        let refused = scenario.kyb(node, &words).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
        drop(agent);
        with_plugin(node);
        let trust = format!(
            "[[trust]]\nrepository = \"*\"\nkey = \"/srv/share/node-{}.pub\"\n\
             target_namespace = \"k8s.io\"\n",
            node.name()
        );
        let agent = scenario.start_agent(node, &trust).unwrap();
        let told = scenario.kyb_json(node, &words).unwrap();
        let image = told["image"].as_str().unwrap();
        // The plugin has taken note of it, and it is ours all the same.
        let label = "io.cri-containerd.image=managed";
        let managed = || {
            let images = node.run(&["ctr", "-n", "k8s.io", "image", "ls"]).unwrap();
            images.lines().any(|line| line.starts_with(image) && line.contains(label))
        };
        assert!(wait_until(SEEN_LIMIT, managed), "the plugin does not see it");
        let again = scenario.kyb_json(node, &words).unwrap();
        assert_eq!(again["image"], told["image"]);
        assert!(again["timesMicroseconds"].get("materialise").is_none(), "{again}");

        drop(agent);
        let ctr = |words: &[&str]| node.run(&[&["ctr", "-n", "k8s.io"], words].concat()).unwrap();
        ctr(&["container", "restore", "--rw", "--live", "one", image]);
        let goes_on = || {
            let now = status(node, "one").unwrap_or_default();
            now["counter"].as_u64() > before["counter"].as_u64()
                && now["boot_id_of_process"] == before["boot_id_of_process"]
        };
        assert!(wait_until(END_LIMIT, goes_on), "{:?} after {before}", status(node, "one"));
        ctr(&["task", "rm", "-f", "one"]);
        ctr(&["container", "rm", "one"]);
        // The plugin keeps a record of its own, by the digest of the image's configuration.
        for name in ctr(&["image", "ls", "-q"]).lines() {
            ctr(&["image", "rm", "--sync", name]);
        }
        let left = || ctr(&["content", "ls", "-q"]);
        assert!(wait_until(SEEN_LIMIT, || left().trim().is_empty()), "{}", left());
    }
    scenario.end().unwrap();
}
