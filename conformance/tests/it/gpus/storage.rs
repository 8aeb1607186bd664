//! GPU memory in files of its own (custom storage), byte by byte.

use std::process::{Child, Stdio};

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use kybernate_spec::media_type;
use rustix::process::Signal;

use super::{
    CONFIG, LIMIT, counts_on, fails, gpu, run, start_with_driver, start_with_gpus, was_asked,
};
use crate::failures::victims::{catch, guards, processes, running, signal};
use crate::harness::{checkpoint, restore, said};

/// More than the agent copies at once.
const BYTES: usize = (70 << 20) + 321;

/// Versions of a driver with custom storage, and of its CUDA.
const DRIVER: &str = "615.10 13040";

/// Says where GPU memory goes.
fn config(storage: &str) -> String {
    format!("{CONFIG}storage = \"{storage}\"\n")
}

/// Gives the nodes a driver of CUDA 13.4.
fn start_with_storage() -> (Scenario, String, String) {
    start_with_driver(DRIVER, &config("auto"))
}

/// Returns what a GPU's memory holds that nothing else does; some pages are zero.
fn content() -> Vec<u8> {
    let words = (1_u64..).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    let mut content: Vec<u8> = words.take(BYTES.div_ceil(8)).flatten().collect();
    content.truncate(BYTES);
    content.chunks_mut(4096).step_by(5).for_each(|page| page.fill(0));
    content
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
    assert!(fs_err::read(memory(node, id, uuid)).unwrap() == content(), "it has other memory");
    counts_on(node, id);
}

/// Returns what is on a node, but for the agent, which is another one each time.
fn left(scenario: &Scenario, node: &Node) -> Vec<String> {
    let traces = scenario.traces(node).unwrap();
    let lines = traces.lines().filter(|line| !line.ends_with("kybernate-agent serve"));
    lines.map(str::to_owned).collect()
}

fn begin(node: &Node, reference: &str) -> Child {
    let words = ["kyb", "checkpoint", "model", reference, "--plain-http", "--sign-key", "node-a"];
    node.command(&words).spawn().unwrap()
}

#[test]
fn gpu_memory_in_files_goes_where_its_container_goes() {
    let (scenario, on_a, on_b) = start_with_storage();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run(&scenario, a, "model", &on_a);
    fs_err::write(memory(a, "model", &on_a), content()).unwrap();

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

/// What is in files comes back from them, whoever dies, and when.
#[test]
fn gpu_memory_comes_back_from_files_whoever_ends_the_checkpoint() {
    let (mut scenario, on_a, _) = start_with_storage();
    run(&scenario, &scenario.testbed.a, "model", &on_a);
    fs_err::write(memory(&scenario.testbed.a, "model", &on_a), content()).unwrap();
    let before = left(&scenario, &scenario.testbed.a);
    let reference = scenario.reference("gpu/files-killed:v1");

    // Cancelled in the middle of the copy: that is brought to its end, and it comes back.
    let a = &scenario.testbed.a;
    fails(a, "copy-out wait");
    let mut kyb = begin(a, &reference);
    assert!(catch(|| was_asked(a, "copy-out")), "nothing is copied");
    signal(&running(a, "kyb"), Signal::INT);
    fails(a, "");
    assert!(!kyb.wait().unwrap().success(), "it was not cancelled");
    is_whole(a, "model", &on_a);
    fs_err::remove_file(a.path("/opt/gpu/calls")).unwrap();

    // In the middle of the copy the agent is killed: the guardian does the rest.
    fails(a, "copy-out wait");
    let mut kyb = begin(a, &reference);
    assert!(catch(|| was_asked(a, "copy-out")), "nothing is copied");
    assert_eq!(gpu(a, "model").0, "4");
    scenario.agent_a.take().unwrap().kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    fails(a, "");
    is_whole(a, "model", &on_a);
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, &config("auto")).unwrap());

    // When it is in files: the guardian alone.
    let a = &scenario.testbed.a;
    let mut kyb = begin(a, &reference);
    assert!(catch(|| gpu(a, "model").0 == "2"), "it was not taken");
    scenario.agent_a.take().unwrap().kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    is_whole(a, "model", &on_a);
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, &config("auto")).unwrap());

    // The same, and the guardian is killed, too: the next agent.
    let a = &scenario.testbed.a;
    let mut kyb = begin(a, &reference);
    assert!(catch(|| gpu(a, "model").0 == "2"), "it was not taken");
    let guardians = processes(a, guards);
    signal(&guardians, Signal::STOP);
    scenario.agent_a.take().unwrap().kill();
    signal(&guardians, Signal::KILL);
    kyb.wait().unwrap();
    assert!(!guardians.is_empty() && wait_until(LIMIT, || processes(a, guards).is_empty()));
    assert_eq!(gpu(a, "model").0, "2", "somebody was left");
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, &config("auto")).unwrap());
    let a = &scenario.testbed.a;
    is_whole(a, "model", &on_a);
    checkpoint(&scenario, a, "model", &reference);
    is_whole(a, "model", &on_a);
    assert_eq!(left(&scenario, a), before, "something is left");
    scenario.end().unwrap();
}

/// All of it is in the checkpoint, which may be all that is left.
#[test]
fn a_checkpoint_is_published_though_its_source_does_not_get_its_memory_back() {
    let (scenario, on_a, on_b) = start_with_storage();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    run(&scenario, a, "model", &on_a);
    fs_err::write(memory(a, "model", &on_a), content()).unwrap();
    let before = left(&scenario, a);

    // Somebody has its GPU: it is published first, and comes back as soon as it can.
    let late = scenario.reference("gpu/late:v1");
    fails(a, "restore 2");
    let words = ["kyb", "checkpoint", "model", &late, "--plain-http", "--sign-key", "node-a"];
    let mut kyb = a.command(&words);
    let kyb = kyb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let inspect = ["inspect", &late, "--plain-http"];
    let stored = || scenario.kyb(a, &inspect).unwrap().status.success();
    assert!(wait_until(LIMIT, stored), "it is not published");
    assert_eq!(gpu(a, "model").0, "2");
    fails(a, "");
    let output = kyb.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for told in ["ran again without its GPU memory", "OUT_OF_MEMORY"] {
        assert!(said(&output).contains(told), "{}", said(&output));
    }
    is_whole(a, "model", &on_a);
    assert_eq!(left(&scenario, a), before, "something is left");

    // The copy back breaks off: nobody can help it, and the next one has it.
    let lost = scenario.reference("gpu/lost:v1");
    fails(a, "copy-in 2");
    let words = ["checkpoint", "model", &lost, "--plain-http", "--sign-key", "node-a", "--json"];
    let output = scenario.kyb(a, &words).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(gpu(a, "model").0, "5");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let warnings = told["warnings"].to_string();
    for told in ["cut short", "does not get its GPU memory back"] {
        assert!(warnings.contains(told), "{warnings}");
    }
    fails(a, "");
    assert_eq!(left(&scenario, a), before, "something is left");
    for (reference, name) in [(&late, "first"), (&lost, "second")] {
        let output = restore(&scenario, b, reference, name, &[]);
        assert!(output.status.success(), "{}", said(&output));
        is_whole(b, name, &on_b);
    }
    scenario.end().unwrap();
}

/// A driver without it is refused where nothing else will do, before anything is touched.
#[test]
fn files_that_are_wanted_need_a_driver_that_has_them() {
    let (mut scenario, on_a, _) = start_with_gpus();
    drop(scenario.agent_a.take());
    let agent = scenario.start_agent(&scenario.testbed.a, &config("device"));
    scenario.agent_a = Some(agent.unwrap());
    let a = &scenario.testbed.a;
    run(&scenario, a, "model", &on_a);
    let reference = scenario.reference("gpu/wanted:v1");
    let words = ["checkpoint", "model", &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("615 is needed for [gpu] storage"), "{}", said(&output));
    assert!(!was_asked(a, "lock"));
    counts_on(a, "model");
    scenario.end().unwrap();
}
