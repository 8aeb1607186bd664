//! GPU memory in files of its own (custom storage), byte by byte.

use std::process::{Child, Stdio};
use std::sync::LazyLock;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario};
use kybernate_spec::media_type;
use rustix::process::Signal;

use super::{CONFIG, LIMIT, counts_on, fails, gpu, run, start_with_driver, uuid, was_asked};
use crate::failures::victims::{catch, guards, processes, running, signal};
use crate::harness::{at_once, checkpoint, on_both, restore, said};

/// More than the agent copies at once.
const BYTES: usize = (70 << 20) + 321;

/// Versions of a driver with custom storage, and of its CUDA.
const DRIVER: &str = "615.10 13040";

/// What a GPU's memory holds that nothing else does; some pages are zero.
static CONTENT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let words = (1_u64..).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    let mut content: Vec<u8> = words.take(BYTES.div_ceil(8)).flatten().collect();
    content.truncate(BYTES);
    content.chunks_mut(4096).step_by(5).for_each(|page| page.fill(0));
    content
});

/// Says where GPU memory goes.
fn config(storage: &str) -> String {
    format!("{CONFIG}storage = \"{storage}\"\n")
}

/// Gives the nodes a driver of CUDA 13.4.
fn start_with_storage() -> (Scenario, String, String) {
    start_with_driver(DRIVER, &config("auto"))
}

/// Where what a container's first process has on a GPU is.
fn memory(node: &Node, id: &str, uuid: &str) -> std::path::PathBuf {
    let tasks = node.run(&["ctr", "task", "ls"]).unwrap();
    let line = tasks.lines().find(|line| line.split_whitespace().next() == Some(id)).unwrap();
    let pid = line.split_whitespace().nth(1).unwrap();
    node.path(&format!("/opt/gpu/memory-{uuid}-{pid}"))
}

/// Whether a container runs with the GPU memory that it had.
fn is_whole(node: &Node, id: &str, uuid: &str) {
    let runs = wait_until(LIMIT, || gpu(node, id) == ("0".to_owned(), uuid.to_owned()));
    assert!(runs, "{:?}", gpu(node, id));
    assert!(fs_err::read(memory(node, id, uuid)).unwrap() == *CONTENT, "it has other memory");
    counts_on(node, id);
}

/// Returns what is on a node, but for the agent, which is another one each time.
fn left(scenario: &Scenario, node: &Node) -> Vec<String> {
    let traces = scenario.traces(node).unwrap();
    let lines = traces.lines().filter(|line| !line.ends_with("kybernate-agent serve"));
    lines.map(str::to_owned).collect()
}

fn begin(node: &Node, reference: &str) -> Child {
    let key = format!("node-{}", node.name());
    let words = ["kyb", "checkpoint", "model", reference, "--plain-http", "--sign-key", &key];
    node.command(&words).spawn().unwrap()
}

#[test]
fn gpu_memory_in_files_goes_where_its_container_goes() {
    let (scenario, on_a, on_b) = start_with_storage();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run(&scenario, a, "model", &on_a);
    fs_err::write(memory(a, "model", &on_a), &*CONTENT).unwrap();

    let reference = scenario.reference("gpu/files:v1");
    checkpoint(&scenario, a, "model", &reference);
    is_whole(a, "model", &on_a);
    let inspected =
        scenario.kyb_json(a, &["inspect", &reference, "--plain-http"]).unwrap().to_string();
    for told in ["\"storage\":\"device\"", &on_a, &format!("\"bytes\":{BYTES}"), media_type::DEVICE]
    {
        assert!(inspected.contains(told), "{inspected} does not have {told}");
    }
    // An increment has the same shards.
    let again = scenario.reference("gpu/files:v2");
    checkpoint(&scenario, a, "model", &again);
    is_whole(a, "model", &on_a);

    // Elsewhere it is on the GPU that is there.
    for (reference, name) in [(&reference, "first"), (&again, "second")] {
        let output = restore(&scenario, b, reference, name, &[]);
        assert!(output.status.success(), "{}", said(&output));
        is_whole(b, name, &on_b);
        scenario.remove(b, name).unwrap();
    }

    // Who asks no driver does not take it, and an older driver cannot.
    let output = scenario.kyb(b, &["provide", &reference, "--plain-http"]).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("asks no driver"), "{}", said(&output));
    fs_err::remove_file(b.path("/opt/gpu/driver")).unwrap();
    let before = scenario.traces(b).unwrap();
    let output = restore(&scenario, b, &reference, "third", &[]);
    assert!(!output.status.success() && said(&output).contains("615"), "{}", said(&output));
    assert_eq!(scenario.traces(b).unwrap(), before, "something is left");

    // What fails in the middle costs nobody but the restored one.
    fs_err::write(b.path("/opt/gpu/driver"), DRIVER).unwrap();
    fails(b, "copy-in 2");
    let output = restore(&scenario, b, &reference, "fourth", &[]);
    assert!(!output.status.success() && said(&output).contains("cut short"), "{}", said(&output));
    assert_eq!(scenario.traces(b).unwrap(), before, "something is left");
    fails(b, "");

    // Stopped, it goes on there alone.
    let words = ["checkpoint", "model", &again, "--plain-http", "--sign-key", "node-a", "--stop"];
    scenario.kyb_json(a, &words).unwrap();
    let output = restore(&scenario, b, &again, "model", &[]);
    assert!(output.status.success(), "{}", said(&output));
    is_whole(b, "model", &on_b);
    scenario.end().unwrap();
}

/// Runs a container with all of that on its GPU, and returns what is on the node then.
fn run_full(scenario: &Scenario, node: &Node) -> Vec<String> {
    run(scenario, node, "model", &uuid(node));
    fs_err::write(memory(node, "model", &uuid(node)), &*CONTENT).unwrap();
    left(scenario, node)
}

/// What is in files comes back from them, whoever dies, and when.
#[test]
fn gpu_memory_comes_back_from_files_whoever_ends_the_checkpoint() {
    let (mut scenario, ..) = start_with_storage();
    on_both(&mut scenario, |scenario, node, agent| {
        let before = run_full(scenario, node);
        let reference = scenario.reference(&format!("gpu/files-killed:{}", node.name()));
        is_cut_short(node, &reference, agent);
        let agent = scenario.start_agent(node, &config("auto")).unwrap();
        is_left_in_files(scenario, node, &reference, agent);
        let _agent = scenario.start_agent(node, &config("auto")).unwrap();
        is_whole(node, "model", &uuid(node));
        checkpoint(scenario, node, "model", &reference);
        is_whole(node, "model", &uuid(node));
        assert_eq!(left(scenario, node), before, "something is left");
    });
    scenario.end().unwrap();
}

/// Ends a checkpoint in the middle of the copy, by its client and by its agent.
fn is_cut_short(node: &Node, reference: &str, agent: Agent) {
    // Cancelled: that is brought to its end, and it comes back.
    fails(node, "copy-out wait");
    let mut kyb = begin(node, reference);
    assert!(catch(|| was_asked(node, "copy-out")), "nothing is copied");
    signal(&running(node, "kyb"), Signal::INT);
    fails(node, "");
    assert!(!kyb.wait().unwrap().success(), "it was not cancelled");
    is_whole(node, "model", &uuid(node));
    fs_err::remove_file(node.path("/opt/gpu/calls")).unwrap();

    // The agent is killed: the guardian does the rest.
    fails(node, "copy-out wait");
    let mut kyb = begin(node, reference);
    assert!(catch(|| was_asked(node, "copy-out")), "nothing is copied");
    assert_eq!(gpu(node, "model").0, "4");
    agent.kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    fails(node, "");
    is_whole(node, "model", &uuid(node));
}

/// Kills the agent when all of it is in files: the guardian alone brings it back. Then that is killed,
/// too, and it stays there for the next agent.
fn is_left_in_files(scenario: &Scenario, node: &Node, reference: &str, agent: Agent) {
    let mut kyb = begin(node, reference);
    assert!(catch(|| gpu(node, "model").0 == "2"), "it was not taken");
    agent.kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    is_whole(node, "model", &uuid(node));

    let agent = scenario.start_agent(node, &config("auto")).unwrap();
    let mut kyb = begin(node, reference);
    assert!(catch(|| gpu(node, "model").0 == "2"), "it was not taken");
    let guardians = processes(node, guards);
    signal(&guardians, Signal::STOP);
    agent.kill();
    signal(&guardians, Signal::KILL);
    kyb.wait().unwrap();
    assert!(!guardians.is_empty() && wait_until(LIMIT, || processes(node, guards).is_empty()));
    assert_eq!(gpu(node, "model").0, "2", "somebody was left");
}

/// All of it is in the checkpoint, which may be all that is left.
#[test]
fn a_checkpoint_is_published_though_its_source_does_not_get_its_memory_back() {
    let (scenario, ..) = start_with_storage();
    at_once(&scenario, |node| {
        let before = run_full(&scenario, node);
        let late = scenario.reference(&format!("gpu/late:{}", node.name()));
        comes_back_late(&scenario, node, &late);
        assert_eq!(left(&scenario, node), before, "something is left");
        let lost = scenario.reference(&format!("gpu/lost:{}", node.name()));
        is_lost(&scenario, node, &lost);
        assert_eq!(left(&scenario, node), before, "something is left");
    });
    // Node b takes those of both.
    let b = &scenario.testbed.b;
    at_once(&scenario, |node| {
        for what in ["late", "lost"] {
            let name = format!("{what}-{}", node.name());
            let reference = scenario.reference(&format!("gpu/{what}:{}", node.name()));
            let output = restore(&scenario, b, &reference, &name, &[]);
            assert!(output.status.success(), "{}", said(&output));
            is_whole(b, &name, &uuid(b));
        }
    });
    scenario.end().unwrap();
}

/// Somebody has its GPU: it is published first, and comes back as soon as it can.
fn comes_back_late(scenario: &Scenario, node: &Node, reference: &str) {
    fails(node, "restore 2");
    let key = format!("node-{}", node.name());
    let words = ["kyb", "checkpoint", "model", reference, "--plain-http", "--sign-key", &key];
    let mut kyb = node.command(&words);
    let kyb = kyb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let inspect = ["inspect", reference, "--plain-http"];
    let stored = || scenario.kyb(node, &inspect).unwrap().status.success();
    assert!(wait_until(LIMIT, stored), "it is not published");
    assert_eq!(gpu(node, "model").0, "2");
    fails(node, "");
    let output = kyb.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for told in ["ran again without its GPU memory", "OUT_OF_MEMORY"] {
        assert!(said(&output).contains(told), "{}", said(&output));
    }
    is_whole(node, "model", &uuid(node));
}

/// The copy back breaks off: nobody can help it, and the next one has it.
fn is_lost(scenario: &Scenario, node: &Node, reference: &str) {
    fails(node, "copy-in 2");
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "model", reference, "--plain-http", "--sign-key", &key, "--json"];
    let output = scenario.kyb(node, &words).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(gpu(node, "model").0, "5");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let warnings = told["warnings"].to_string();
    for told in ["cut short", "does not get its GPU memory back"] {
        assert!(warnings.contains(told), "{warnings}");
    }
    fails(node, "");
}

/// A driver without it is refused where nothing else will do, before anything is touched.
#[test]
fn files_that_are_wanted_need_a_driver_that_has_them() {
    let (scenario, ..) = start_with_driver("580.105.08 13000", &config("device"));
    at_once(&scenario, |node| {
        run(&scenario, node, "model", &uuid(node));
        let reference = scenario.reference(&format!("gpu/wanted:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "model", &reference, "--plain-http", "--sign-key", &key];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("615 is needed for [gpu] storage"), "{}", said(&output));
        assert!(!was_asked(node, "lock"));
        counts_on(node, "model");
    });
    scenario.end().unwrap();
}
