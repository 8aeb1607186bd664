//! What has rotted on a disk is not what was staged.

use std::path::PathBuf;

use kybernate_conformance::scenario::counter;

use super::{restored, stage, tier};
use crate::harness::{change_a_bit, next_agents, said};
use crate::pods::{CONFIG, Spot, stage_on_both};

const DISK: &str = "[staging.nvme]\nbudget = \"128MiB\"\n";
const UNPROVEN: &str = "[staging.nvme]\nbudget = \"128MiB\"\nverify = false\n";

/// Changes a bit of the largest file that is staged on the disk, as a disk does: nothing else tells of it.
/// Returns its name.
fn rot(spot: Spot<'_>) -> String {
    let told = spot.scenario.kyb_json(spot.node, &["node"]).unwrap();
    let directory = tier(&told, "nvme")["directory"].as_str().unwrap().to_owned();
    let list = format!("ls -S {directory}/*/images/* | head -n 1");
    let path = PathBuf::from(spot.node.run(&["sh", "-c", &list]).unwrap().trim());
    change_a_bit(&spot.node.path(path.to_str().unwrap()));
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

/// No Pod gets it, and what is told names the file. Once it is staged anew, it goes on.
fn no_pod_gets_it(spot: Spot<'_>) {
    let (scenario, node) = (spot.scenario, spot.node);
    scenario.kyb_json(node, &["evict", spot.pinned]).unwrap();
    stage(scenario, node, spot.pinned, "nvme");
    let name = rot(spot);
    let create = || spot.create("main", spot.pinned, &[&spot.wish()]);
    for parts in [&["stage the checkpoint anew", "nvme", &name][..], &["is not staged on this"]] {
        let output = create();
        let text = said(&output);
        let is_told = parts.iter().all(|part| text.contains(part));
        assert!(!output.status.success() && is_told, "on {}: {text}", node.name());
        node.output(&["ctr", "container", "rm", "main"]).unwrap();
    }
    let told = scenario.kyb_json(node, &["node"]).unwrap();
    assert_eq!(tier(&told, "nvme")["usedBytes"], 0, "{told}");
    stage(scenario, node, spot.pinned, "nvme");
    let output = create();
    assert!(output.status.success(), "on {}: {}", node.name(), said(&output));
    let after = scenario.wait_for_ticks(node, "main").unwrap();
    assert!(counter(&after) > counter(spot.before) && after["checksum_ok"] == true, "{after}");
    scenario.remove(node, "main").unwrap();
}

/// A restore has it from the registry.
fn it_comes_from_the_registry(spot: Spot<'_>) {
    rot(spot);
    let (told, after) = restored(spot.scenario, spot.node, spot.pinned, "back");
    assert!(told["staged"].is_null(), "{told}");
    assert!(told["warnings"].to_string().contains("not as it was written"), "{told}");
    assert!(told["timesMicroseconds"]["prove"].as_u64() > Some(0), "{told}");
    assert!(counter(&after) > counter(spot.before) && after["checksum_ok"] == true, "{after}");
    spot.scenario.remove(spot.node, "back").unwrap();
}

#[test]
fn what_has_rotted_on_a_disk_is_not_restored() {
    let mut staged = stage_on_both();
    next_agents(&mut staged.scenario, &format!("{CONFIG}{DISK}"));
    staged.on_both(no_pod_gets_it);
    staged.on_both(it_comes_from_the_registry);
    // Where the file system proves what it reads, nobody has to do so twice.
    next_agents(&mut staged.scenario, &format!("{CONFIG}{UNPROVEN}"));
    staged.on_both(|spot| {
        stage(spot.scenario, spot.node, spot.pinned, "nvme");
        let (told, _) = restored(spot.scenario, spot.node, spot.pinned, "back");
        assert_eq!(told["staged"], "nvme", "{told}");
        assert!(told["timesMicroseconds"].get("prove").is_none(), "{told}");
        spot.scenario.remove(spot.node, "back").unwrap();
    });
    // Of what was staged so, nobody knows what was in it.
    next_agents(&mut staged.scenario, &format!("{CONFIG}{DISK}"));
    staged.on_both(|spot| {
        let (told, _) = restored(spot.scenario, spot.node, spot.pinned, "back");
        assert!(told["staged"].is_null(), "{told}");
    });
    staged.scenario.end().unwrap();
}
