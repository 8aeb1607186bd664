//! GPU memory that CRIU's plugin moves: of a container, and of a pod's. The plugin is none
//! (`conformance/gpu/plugin.rs`); CRIU asks it as it asks NVIDIA's.

use std::path::Path;
use std::process::Stdio;

use kybernate_conformance::node::Node;

use super::{CONFIG, counts_on, run, start_with_driver};
use crate::harness::{checkpoint, library, restore, said};
use crate::pods::{self, Staged};

/// Where CRIU has its plugins.
const PLUGIN: &str = "/usr/lib/criu/cuda_plugin.so";

fn install_plugin(node: &Node) {
    let place = node.path(PLUGIN);
    fs_err::create_dir_all(place.parent().unwrap()).unwrap();
    library("gpu/plugin.rs", &place);
}

/// Returns how many processes the plugin has brought back.
fn resumed(node: &Node) -> usize {
    let noted = fs_err::read_to_string(node.path("/opt/gpu/resumed")).unwrap_or_default();
    noted.lines().count()
}

#[test]
fn what_the_plugin_has_dumped_comes_back_by_the_plugin_alone() {
    let config = format!("{CONFIG}method = \"plugin\"\n{}", pods::CONFIG);
    let (scenario, on_a, _) = start_with_driver("580.105.08 13000", &config);
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    install_plugin(a);
    install_plugin(b);
    run(&scenario, a, "model", &on_a);
    let reference = scenario.reference("gpu/model:v1");
    let digest = checkpoint(&scenario, a, "model", &reference);
    let facts = scenario.kyb_json(a, &["inspect", &reference, "--plain-http"]).unwrap().to_string();
    assert!(facts.contains("\"pages\"") && facts.contains(&on_a), "{facts}");
    scenario.remove(a, "model").unwrap();

    let output = restore(&scenario, a, &reference, "model", &[]);
    assert!(output.status.success(), "{}", said(&output));
    counts_on(a, "model");
    assert_eq!(resumed(a), 1);
    scenario.remove(a, "model").unwrap();
    // The plugin cannot give it another GPU.
    let output = restore(&scenario, b, &reference, "model", &[]);
    assert!(said(&output).contains("which CRIU's plugin cannot do"), "{}", said(&output));

    // A pod's container, which nobody but the plugin helps.
    let pinned = format!("{reference}@{digest}");
    let output = scenario.kyb(b, &["stage", &pinned, "--tier", "ram", "--plain-http"]).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    b.run(&["ctr", "image", "pull", "--plain-http", &pinned]).unwrap();
    let staged = Staged { scenario, at: "b", pinned, before: serde_json::Value::Null };
    let (b, here) = (staged.node(), staged.here());
    let create = || {
        let program = ["/workload", "hold", "map", "/count"];
        let mut command = here.command_of([here.pinned, "pod"], &[&here.wish()], &[], &program);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let output = create();
    assert!(output.status.success(), "{}", said(&output));
    counts_on(b, "pod");
    assert_eq!(resumed(b), 1);
    staged.scenario.remove(b, "pod").unwrap();

    // CRIU would restore it without a word where it has no plugins at all.
    fs_err::remove_dir_all(Path::new(&b.path(PLUGIN)).parent().unwrap()).unwrap();
    let output = create();
    let text = said(&output);
    assert!(!output.status.success() && text.contains("no cuda_plugin.so in"), "{text}");
    b.output(&["ctr", "container", "rm", "pod"]).unwrap();
    assert_eq!(resumed(b), 1);
    staged.scenario.end().unwrap();
}
