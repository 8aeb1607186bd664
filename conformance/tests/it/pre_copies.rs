//! Memory that is copied before the pause (`--pre-copy`), where the kernel tracks which pages are written
//! to, as the emulated machine's does (`emulated`). Elsewhere it is refused.

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use crate::cgroups;
use crate::harness::{at_once, nodes, refused_here, restore, said, start};
use crate::workloads::own::another_user_moves;

/// Of it, the workload writes to little.
const MIB: u32 = 48;

/// Gives a container a CRIU configuration file that is the agent's to write.
pub(crate) const OWN_OPTIONS: &[&str] =
    &["--annotation", "org.criu.config=/var/lib/kybernate/criu/job.conf"];

/// Writes down, in the pause, how much memory each round and the dump have.
pub(crate) const HOOKS: &str = r#"
[[hooks]]
name = "look"
when = "while_paused"
command = ["/bin/sh", "-c", "find /run/kybernate /var/lib/kybernate -path '*/stage/*' -name 'pages-*.img' -printf '%p %s\\n' >/root/pages"]
"#;

/// Whether the kernel tracks which pages are written to.
fn tracks(node: &Node) -> bool {
    node.output(&["criu", "check", "--feature", "mem_dirty_track"]).unwrap().status.success()
}

fn words<'a>(reference: &'a str, key: &'a str) -> [&'a str; 7] {
    ["checkpoint", "job", reference, "--plain-http", "--pre-copy", "--sign-key", key]
}

/// Returns how many bytes of memory the files below a directory of the last checkpoint had.
fn had(node: &Node, directory: &str) -> u64 {
    let text = fs::read_to_string(node.path("/root/pages")).unwrap();
    let within = text.lines().filter(|line| line.contains(&format!("/{directory}/")));
    within.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Takes `job`, and makes sure that its pause was for little.
fn take(scenario: &Scenario, node: &Node, reference: &str) -> Value {
    let key = format!("node-{}", node.name());
    // The first dump makes the file that its CRIU is told by.
    let traces =
        || scenario.traces(node).unwrap().replace("/var/lib/kybernate/criu/job.conf\n", "");
    let before = traces();
    let taken = scenario.kyb_json(node, &words(reference, &key)).unwrap();
    let (first, dump) = (had(node, "round-1"), had(node, "images"));
    println!("{}: {first} bytes before the pause, {dump} in it: {taken}", node.name());
    assert!(first > u64::from(MIB) << 20, "the first round has not everything: {first}");
    assert!(dump > 0 && dump * 4 < first, "the pause was for {dump} of {first} bytes");
    assert!(taken["timesMicroseconds"].to_string().contains("pre-copy"), "{taken}");
    assert_eq!(traces(), before, "something is left");
    scenario.wait_for_ticks(node, "job").unwrap()
}

/// Neither node copies the memory of a container that was started so.
fn is_refused(scenario: &Scenario, options: &[&str], reason: &str) {
    at_once(scenario, |node| {
        scenario.run_workload(node, "job", 1, options).unwrap();
        let reference = scenario.reference(&format!("pre-copied/refused:{}", node.name()));
        let key = format!("node-{}", node.name());
        let output = scenario.kyb(node, &words(&reference, &key)).unwrap();
        refused_here(&output, reason);
        let output = scenario.kyb(node, &["preflight", "job", "--pre-copy"]).unwrap();
        refused_here(&output, reason);
        scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();
    });
}

#[test]
fn it_is_refused_where_the_kernel_does_not_track_memory() {
    let scenario = start();
    if tracks(&scenario.testbed.a) {
        println!("SKIPPED: this kernel tracks which pages are written to");
    } else {
        is_refused(&scenario, OWN_OPTIONS, "CONFIG_MEM_SOFT_DIRTY");
    }
    scenario.end().unwrap();
}

/// By agents with [`HOOKS`].
pub(crate) fn memory_is_copied_before_the_pause(scenario: &Scenario) {
    let [a, b] = nodes(scenario);
    assert!(tracks(a), "this kernel does not track which pages are written to");
    let first = scenario.reference("pre-copied/job:v1");
    // Nobody could tell its CRIU what was copied.
    is_refused(scenario, &[], "org.criu.config");

    let options = [OWN_OPTIONS, cgroups::shown(a)].concat();
    scenario.run_workload(a, "job", MIB, &options).unwrap();
    let seen = take(scenario, a, &first);
    let told = fs::read_to_string(a.path("/var/lib/kybernate/criu/job.conf")).unwrap();
    assert!(!told.contains("round"), "another dump would look for it: {told}");
    cgroups::are_its_own(a, "job");
    scenario.remove(a, "job").unwrap();
    // What was restored is taken once more.
    let second = scenario.reference("pre-copied/job:v2");
    for (node, reference) in [(b, &first), (b, &second), (a, &first)] {
        let output = restore(scenario, node, reference, "job", &[]);
        assert!(output.status.success(), "{}", said(&output));
        let after = scenario.wait_for_ticks(node, "job").unwrap();
        cgroups::are_its_own(node, "job");
        assert_eq!(after["boot_id_of_process"], seen["boot_id_of_process"]);
        for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
            assert_eq!(after[fact], true, "{after}");
        }
        if (node.name(), reference) == ("b", &first) {
            take(scenario, node, &second);
        }
        scenario.remove(node, "job").unwrap();
    }
    // The emulated machine is the one that withholds nothing from CRIU.
    let moved = another_user_moves(scenario, [a, b]);
    assert!(moved, "what is another user's was not moved");
}
