//! What was taken of a pod, restored by containerd alone, and taken again.

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::counter;

use super::story::Story;
use crate::harness::{at_once, checkpoint, refused_here, restore, said};

const NAME: &str = "beside";
const NETWORK: &str = "network:/run/beside";

/// Its mounts and its network are whoever restores it to give; the refusals say which.
pub(super) fn goes_on(story: &Story) {
    let scenario = &story.scenario;
    at_once(scenario, |node| {
        let boot = &story.before["boot_id_of_process"];
        // `ip netns` would mount once more what the pods' networks are held by.
        let make = "touch /run/beside && unshare --net=/run/beside ip link set lo up";
        node.run(&["sh", "-c", make]).unwrap();
        let told = restore(scenario, node, &story.pinned, NAME, &[]);
        refused_here(&told, "--allow-mount SOURCE:/etc/hosts");
        let mounts = given(story, node);
        let mounts: Vec<_> = mounts.iter().flat_map(|mount| ["--allow-mount", mount]).collect();
        let told = restore(scenario, node, &story.pinned, NAME, &mounts);
        refused_here(&told, "--allow-host-namespace network:PATH");
        let more = [&mounts[..], &["--allow-host-namespace", NETWORK]].concat();
        let more = [&more[..], &["--allow-new-privileges"]].concat();
        let again = scenario.reference(&format!("pods/beside:{}", node.name()));
        for reference in [&story.pinned, &again] {
            let output = restore(scenario, node, reference, NAME, &more);
            assert!(output.status.success(), "on {}: {}", node.name(), said(&output));
            let after = scenario.wait_for_ticks(node, NAME).unwrap();
            assert_eq!(&after["boot_id_of_process"], boot, "it was started anew");
            assert!(counter(&after) > counter(&story.before), "{after}");
            if reference == &story.pinned {
                checkpoint(scenario, node, NAME, &again);
            }
            scenario.remove(node, NAME).unwrap();
        }
        node.run(&["umount", "/run/beside"]).unwrap();
    });
}

/// Makes something on the node for each mount that the pod had of its own, and returns how that is told.
fn given(story: &Story, node: &Node) -> Vec<String> {
    let facts = ["inspect", &story.pinned, "--plain-http", "--facts-only"];
    let facts = story.scenario.kyb_json(node, &facts).unwrap();
    let mounts = facts["config"]["needs"]["mounts"].as_array().unwrap().iter();
    // Its shared memory goes along.
    let given = mounts
        .filter(|mount| mount["external"] == true)
        .filter(|mount| mount["destination"] != "/dev/shm");
    let told = given.map(|mount| {
        let place = mount["destination"].as_str().unwrap();
        let is_file = place.starts_with("/etc/") || place == "/dev/termination-log";
        let source = format!("/var/lib/beside{place}");
        let make = if is_file { "mkdir -p $(dirname $1) && touch $1" } else { "mkdir -p $1" };
        node.run(&["sh", "-c", make, "sh", &source]).unwrap();
        let is_read_only = mount["options"].as_array().unwrap().iter().any(|one| one == "ro");
        format!("{source}:{place}{}", if is_read_only { ":ro" } else { "" })
    });
    told.collect()
}
