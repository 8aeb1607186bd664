//! GPU memory, on a simulated GPU (`conformance/gpu/simulation.rs`): real containers, containerd, CRIU
//! and agents, and a driver that is none. Its state is in a file of the container's, and goes with it.

use std::path::Path;
use std::time::Duration;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::json;

use crate::failures::victims::catch;
use crate::harness::{checkpoint, library, on_both, restore, said, start};

mod plugin;
mod storage;

const GIB: u64 = 1 << 30;
const LIBRARY: &str = "libkybernate-gpu-simulation.so";
const CONFIG: &str = "[gpu]\ndriver = \"/opt/gpu/libkybernate-gpu-simulation.so\"\n\
    management = \"/opt/gpu/libkybernate-gpu-simulation.so\"\n";

/// How long something may take that takes a moment.
const LIMIT: Duration = Duration::from_mins(1);

/// Puts a GPU into a node.
fn install(node: &Node, driver: &str) -> String {
    let place = node.path("/opt/gpu");
    fs_err::create_dir_all(&place).unwrap();
    library("gpu/simulation.rs", &place.join(LIBRARY));
    fs_err::write(place.join("driver"), driver).unwrap();
    let uuid = uuid(node);
    fs_err::write(place.join("gpus"), format!("{uuid} {} SIM-1\n", 8 * GIB)).unwrap();
    uuid
}

/// Returns what the GPU of a node is called.
fn uuid(node: &Node) -> String {
    format!("GPU-{}-0000-0000-0000-000000000000", node.name().repeat(8))
}

fn fails(node: &Node, faults: &str) {
    replace(&node.path("/opt/gpu/faults"), faults);
}

/// Puts a file in the place of one that the simulation may read just now.
fn replace(path: &Path, content: &str) {
    let new = path.with_extension("new");
    fs_err::write(&new, content).unwrap();
    fs_err::rename(new, path).unwrap();
}

fn was_asked(node: &Node, call: &str) -> bool {
    let calls = fs_err::read_to_string(node.path("/opt/gpu/calls")).unwrap_or_default();
    calls.lines().any(|line| line.split(' ').next() == Some(call))
}

/// Returns a file of a container's, which may be frozen.
fn file(node: &Node, id: &str, name: &str) -> std::path::PathBuf {
    let state = "/run/containerd/io.containerd.runtime.v2.task/default";
    node.path(&format!("{state}/{id}/rootfs/{name}"))
}

/// Returns the driver's state of the container, and its GPU.
fn gpu(node: &Node, id: &str) -> (String, String) {
    let text = fs_err::read_to_string(file(node, id, "gpu-simulation")).unwrap();
    let mut cells = text.split_whitespace().map(str::to_owned);
    (cells.next().unwrap(), cells.next().unwrap())
}

fn counts_on(node: &Node, id: &str) {
    let count = || {
        let text = fs_err::read_to_string(file(node, id, "count")).ok()?;
        text.lines().next()?.trim().parse::<u64>().ok()
    };
    let mut before = None;
    let counts = wait_until(LIMIT, || {
        before = count();
        before.is_some()
    });
    assert!(counts, "it does not count");
    assert!(wait_until(LIMIT, || count() > before), "it does not run");
}

/// Runs a container with memory on the GPU.
fn run(scenario: &Scenario, node: &Node, id: &str, uuid: &str) {
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    node.run(&["ctr", "run", "-d", &image, id, "/workload", "hold", "map", "/count"]).unwrap();
    assert!(wait_until(LIMIT, || file(node, id, "count").exists()));
    replace(&file(node, id, "gpu-simulation"), &format!("0 {uuid} {GIB}\n"));
    counts_on(node, id);
}

/// Starts nodes with a GPU each.
fn start_with_gpus() -> (Scenario, String, String) {
    start_with_driver("580.105.08 13000", CONFIG)
}

/// The same with a driver of this version, and of CUDA's, and agents of this configuration.
fn start_with_driver(driver: &str, config: &str) -> (Scenario, String, String) {
    let mut scenario = start();
    drop((scenario.agent_a.take(), scenario.agent_b.take()));
    let (on_a, on_b) = (install(&scenario.testbed.a, driver), install(&scenario.testbed.b, driver));
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, config).unwrap());
    scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, config).unwrap());
    (scenario, on_a, on_b)
}

/// The GPU is free until it is resumed.
fn goes_and_comes_in_place(scenario: &Scenario, node: &Node) {
    let told = scenario.kyb_json(node, &["suspend", "model"]).unwrap();
    assert_eq!(told["suspended"].to_string(), r#"["cpu","gpu"]"#);
    assert_eq!(gpu(node, "model"), ("2".to_owned(), uuid(node)));
    scenario.kyb_json(node, &["resume", "model"]).unwrap();
    assert_eq!(gpu(node, "model"), ("0".to_owned(), uuid(node)));
    counts_on(node, "model");
}

/// `kyb node` says what GPU a node has.
fn are_told(scenario: &Scenario, node: &Node, uuid: &str) {
    let told = scenario.kyb_json(node, &["node"]).unwrap();
    let one = json!({ "uuid": uuid, "model": "SIM-1", "memoryBytes": 8 * GIB, "computeCapability": "9.0" });
    let gpu = json!({ "driver": "580.105.08", "cuda": "13.0", "devices": [one] });
    assert_eq!(told["facts"]["gpu"], gpu, "{told}");
}

#[test]
fn gpu_memory_goes_where_its_container_goes() {
    let (scenario, on_a, on_b) = start_with_gpus();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for (node, uuid) in [(a, &on_a), (b, &on_b)] {
        are_told(&scenario, node, uuid);
    }
    run(&scenario, a, "model", &on_a);
    goes_and_comes_in_place(&scenario, a);

    // Dumped: away while it is frozen, and back.
    let reference = scenario.reference("gpu/model:v1");
    checkpoint(&scenario, a, "model", &reference);
    assert_eq!(gpu(a, "model"), ("0".to_owned(), on_a.clone()));
    counts_on(a, "model");
    let facts = scenario.kyb_json(a, &["inspect", &reference, "--plain-http"]).unwrap().to_string();
    assert!(facts.contains("\"pages\"") && facts.contains(&on_a), "{facts}");

    // Elsewhere it gets the GPU that is there.
    let output = restore(&scenario, b, &reference, "model", &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(gpu(b, "model"), ("0".to_owned(), on_b.clone()));
    counts_on(b, "model");
    goes_and_comes_in_place(&scenario, b);

    // What the driver does not do costs nobody anything.
    fails(a, "checkpoint 801");
    let before = scenario.traces(a).unwrap();
    let words = ["checkpoint", "model", &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    assert!(!output.status.success() && said(&output).contains("NOT_SUPPORTED"));
    fails(a, "");
    assert_eq!(gpu(a, "model"), ("0".to_owned(), on_a));
    assert_eq!(scenario.traces(a).unwrap(), before, "something is left");
    counts_on(a, "model");
    fails(b, "restore 2");
    let before = scenario.traces(b).unwrap();
    let output = restore(&scenario, b, &reference, "again", &[]);
    assert!(!output.status.success() && said(&output).contains("OUT_OF_MEMORY"));
    assert_eq!(scenario.traces(b).unwrap(), before, "something is left");
    scenario.end().unwrap();
}

/// Killed in the middle of the driver's work, for good: the guardian brings it back.
#[test]
fn gpu_memory_comes_back_when_the_agent_is_killed() {
    let (mut scenario, ..) = start_with_gpus();
    on_both(&mut scenario, |scenario, node, agent| {
        run(scenario, node, "model", &uuid(node));
        let reference = scenario.reference(&format!("gpu/killed:{}", node.name()));
        fails(node, "checkpoint hang");
        let key = format!("node-{}", node.name());
        let words = ["kyb", "checkpoint", "model", &reference, "--plain-http", "--sign-key", &key];
        let mut kyb = node.command(&words).spawn().unwrap();
        assert!(catch(|| was_asked(node, "checkpoint")), "the driver was not asked");
        assert_eq!(gpu(node, "model").0, "1");
        agent.kill();
        // It would wait for the next agent.
        kyb.kill().unwrap();
        kyb.wait().unwrap();
        assert!(wait_until(LIMIT, || gpu(node, "model").0 == "0"), "it stays locked");
        counts_on(node, "model");
        fails(node, "");
        let _agent = scenario.start_agent(node, CONFIG).unwrap();
        checkpoint(scenario, node, "model", &reference);
        assert_eq!(gpu(node, "model"), ("0".to_owned(), uuid(node)));
    });
    scenario.end().unwrap();
}

/// Killed while GPU memory goes or comes back in place: the next agent does what was asked for.
#[test]
fn gpu_memory_goes_and_comes_in_place_when_the_agent_is_killed() {
    let (mut scenario, ..) = start_with_gpus();
    on_both(&mut scenario, |scenario, node, mut agent| {
        run(scenario, node, "model", &uuid(node));
        for (word, call, state) in [("suspend", "checkpoint", "2"), ("resume", "restore", "0")] {
            fs_err::remove_file(node.path("/opt/gpu/calls")).unwrap_or_default();
            fails(node, &format!("{call} hang"));
            let mut kyb = node.command(&["kyb", word, "model"]).spawn().unwrap();
            assert!(catch(|| was_asked(node, call)), "{word}: the driver was not asked");
            agent.kill();
            fails(node, "");
            agent = scenario.start_agent(node, CONFIG).unwrap();
            assert!(kyb.wait().unwrap().success(), "{word}: kyb calls it a failure");
            let done = wait_until(LIMIT, || gpu(node, "model").0 == state);
            assert!(done, "{word}: the driver says {}", gpu(node, "model").0);
            let told = scenario.kyb_json(node, &["ps", "--container", "model"]).unwrap();
            let since = &told["containers"][0]["suspendedSince"];
            assert_eq!(since.is_string(), word == "suspend", "{word}: {told}");
        }
        assert_eq!(gpu(node, "model").1, uuid(node));
        counts_on(node, "model");
    });
    scenario.end().unwrap();
}
