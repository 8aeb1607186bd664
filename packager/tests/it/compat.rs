//! `kyb facts` and `kyb compat`, as people run them.

use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};
use serde_json::Value;
use tempfile::TempDir;

use crate::dump::dump;
use crate::kyb::{Ran, kyb};

/// An option that keeps kyb from an agent of the machine the test runs on.
const ALONE: &str = "--agent-socket nobody.sock";

async fn run(scratch: &TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

/// A checkpoint in an image layout, taken on a node of these facts, or of none.
async fn packed(scratch: &TempDir, node: Option<NodeFacts>) {
    dump(scratch.path(), 3);
    let mut config = CheckpointConfig { node, ..CheckpointConfig::default() };
    config.needs.devices = vec!["/dev/kybernate".to_owned()];
    let text = serde_json::to_vec(&config).unwrap();
    fs_err::write(scratch.path().join("config.json"), text).unwrap();
    let packed = run(scratch, "pack dump oci:out:v1 --facts config.json").await;
    assert_eq!(packed.code, 0, "{packed:?}");
}

/// The facts of the machine this runs on, with what it may lack made up.
async fn here(scratch: &TempDir) -> NodeFacts {
    let told = run(scratch, &format!("facts --json {ALONE}")).await;
    let mut facts: NodeFacts = serde_json::from_value(told.json()).unwrap();
    (facts.criu, facts.runtime) = ("4.1.1".to_owned(), "runc 1.1.15".to_owned());
    NodeFacts { containerd: "1.7.24".to_owned(), ..facts }
}

fn save(scratch: &TempDir, facts: &NodeFacts) {
    let text = serde_json::to_vec(facts).unwrap();
    fs_err::write(scratch.path().join("node.json"), text).unwrap();
}

/// The rules whose outcome is this one.
fn rules<'a>(report: &'a Value, outcome: &str) -> Vec<&'a str> {
    let all = report["rules"].as_array().unwrap().iter();
    all.filter(|one| one["outcome"] == outcome).map(|one| one["rule"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn without_an_agent_kyb_looks_itself() {
    let scratch = tempfile::tempdir().unwrap();
    let told = run(&scratch, &format!("facts {ALONE}")).await;
    assert_eq!(told.code, 0, "{told:?}");
    let kernel = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    for word in [std::env::consts::ARCH.replace("x86_64", "amd64").as_str(), kernel.trim()] {
        assert!(told.out.contains(word), "{word} is missing in {told:?}");
    }
    let facts = here(&scratch).await;
    assert_eq!(facts.kernel, kernel.trim());
    assert!(!facts.cpu.features.is_empty() && facts.gpu.is_some() && facts.devices.is_some());
}

#[tokio::test]
async fn a_checkpoint_is_compared_with_the_node_a_file_describes() {
    let scratch = tempfile::tempdir().unwrap();
    let source = here(&scratch).await;
    packed(&scratch, Some(NodeFacts { devices: None, ..source.clone() })).await;
    let image = format!("--image sha256:{}", "0".repeat(64));
    let compat = format!("compat oci:out:v1 --facts node.json --json {image}");

    // No device, and it is not known which image the source had.
    save(&scratch, &source);
    let told = run(&scratch, &compat).await;
    assert_eq!(told.code, 2, "{told:?}");
    let report: Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!(report["verdict"], "incompatible");
    assert_eq!(rules(&report, "broken"), ["devices", "devices.present"]);
    assert_eq!(rules(&report, "unknown"), ["image.digest"]);

    // What is left is not known.
    let with_device = NodeFacts { devices: Some(["/dev/kybernate".to_owned()].into()), ..source };
    save(&scratch, &with_device);
    let told = run(&scratch, &format!("{compat} --allow-device /dev/kybernate")).await;
    let report: Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!((told.code, &report["verdict"]), (3, &"unknown".into()));

    // An older CRIU is known, and told to people with both versions.
    save(&scratch, &NodeFacts { criu: "4.0".to_owned(), ..with_device });
    let told = run(&scratch, &format!("compat oci:out:v1 --facts node.json {image}")).await;
    assert_eq!(told.code, 2, "{told:?}");
    assert!(told.out.starts_with("incompatible"), "{told:?}");
    assert!(told.out.contains("criu") && told.out.contains("4.0 here is older than CRIU 4.1.1"));
    assert_eq!(told.told, "", "an answer is no error");
}

/// The first of the three answers needs a runnable image.
#[tokio::test]
async fn what_would_restore_here_ends_with_0() {
    let scratch = tempfile::tempdir().unwrap();
    let source = here(&scratch).await;
    dump(scratch.path(), 3);
    let digest = kybernate_spec::Digest::of(b"image");
    let mut config = CheckpointConfig { node: Some(source.clone()), ..CheckpointConfig::default() };
    config.source.image_digest = Some(digest.clone());
    let text = serde_json::to_vec(&config).unwrap();
    fs_err::write(scratch.path().join("config.json"), text).unwrap();
    assert_eq!(run(&scratch, "pack dump oci:out:v1 --facts config.json").await.code, 0);
    save(&scratch, &NodeFacts { containerd: "0.0.1".to_owned(), ..source });
    let line = format!("compat oci:out:v1 --facts node.json --image {digest}");
    let told = run(&scratch, &line).await;
    assert_eq!(told.code, 0, "{told:?}");
    assert!(told.out.starts_with("compatible"), "{told:?}");
    let report = run(&scratch, &format!("{line} --json")).await.json();
    assert_eq!(rules(&report, "unknown"), [""; 0]);
}

#[tokio::test]
async fn without_facts_compat_cannot_tell() {
    let scratch = tempfile::tempdir().unwrap();
    packed(&scratch, None).await;
    let image = format!("--image sha256:{}", "0".repeat(64));
    let allow = format!("--allow-device /dev/kybernate {image}");
    let facts =
        NodeFacts { devices: Some(["/dev/kybernate".to_owned()].into()), ..NodeFacts::default() };
    save(&scratch, &facts);
    let told = run(&scratch, &format!("compat oci:out:v1 --facts node.json {allow}")).await;
    assert_eq!(told.code, 3, "{told:?}");
    assert!(told.out.contains("no facts of the node"), "{told:?}");

    // No facts at all, or no JSON: that is no answer.
    fs_err::write(scratch.path().join("node.json"), "{}").unwrap();
    run(&scratch, "compat oci:out:v1 --facts node.json").await.ended(64, "missing field");
    run(&scratch, "compat oci:none:v1 --facts config.json").await.ended(64, "config.json");
}
