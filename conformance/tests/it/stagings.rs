//! Checkpoints that lie ready in memory or on disk: restored without a byte on the way, found again
//! by the next agent, and nothing half made.

mod pinned;
mod rotted;

use std::process::{Child, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Agent, Scenario, counter};
use rustix::process::Signal;
use serde_json::Value;

use self::pinned::{what_is_read_is_removed, what_is_read_stays};
use crate::failures::victims::{
    END_LIMIT, catch, is_done_without_kyb, running, signal, start_containerd,
};
use crate::harness::{at_once, checkpoint, next_agents, on_both, said, start};

/// Memory of the workload, in MiB. A third of it is zero, and is stored nowhere.
const MIB: u64 = 48;
/// In memory two of them fit, on disk none.
const TIERS: &str = "metrics = \"unix:/run/kybernate/metrics.sock\"
[staging.ram]
budget = \"128MiB\"
[staging.nvme]
budget = \"16MiB\"
";
/// A tier on disk, and a log of objects.
const DISK: &str = "log_format = \"json\"\n[staging.nvme]\nbudget = \"256MiB\"\n";
const RAM: &str = "/run/kybernate/ram";
const METRICS: &str = "/run/kybernate/metrics.sock";

/// Starts everything, with tiers on both nodes and a checkpoint of node a's.
fn scene() -> (Scenario, String, Value) {
    let mut scenario = start();
    next_agents(&mut scenario, TIERS);
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", u32::try_from(MIB).unwrap(), &[]).unwrap();
    let reference = scenario.reference("staging/job:v1");
    checkpoint(&scenario, a, "job", &reference);
    let taken = scenario.wait_for_ticks(a, "job").unwrap();
    (scenario, reference, taken)
}

fn stage(scenario: &Scenario, node: &Node, reference: &str, tier: &str) -> Value {
    let words = ["stage", reference, "--tier", tier, "--plain-http"];
    scenario.kyb_json(node, &words).unwrap()
}

/// Restores and returns what kyb told and what the workload says.
fn restored(scenario: &Scenario, node: &Node, reference: &str, name: &str) -> (Value, Value) {
    let words = ["restore", reference, "--plain-http", "--name", name];
    let told = scenario.kyb_json(node, &words).unwrap();
    (told, scenario.wait_for_ticks(node, name).unwrap())
}

/// Returns everything that lies in a tier's directory.
fn files(node: &Node, directory: &str) -> String {
    let list = format!(
        "cd {directory} && find . -mindepth 1 -not -name record.json -printf '%p %s %T@\\n' | sort"
    );
    node.run(&["sh", "-c", &list]).unwrap()
}

fn tier(node: &Value, name: &str) -> Value {
    let mut tiers = node["tiers"].as_array().unwrap().iter();
    tiers.find(|tier| tier["tier"] == name).unwrap().clone()
}

/// Kills containerd and starts it again: the agent says that it cannot work meanwhile, and lives.
fn is_ready_with_containerd(node: &Node) {
    let ask = |page: &str| {
        let url = format!("http://x/{page}");
        let words = ["curl", "-s", "-w", " %{http_code}", "--unix-socket", METRICS, &url];
        node.run(&words).unwrap()
    };
    assert_eq!(ask("readyz"), "ready\n 200");
    signal(&running(node, "containerd"), Signal::KILL);
    let mut told = String::new();
    let tells = wait_until(END_LIMIT, || {
        told = ask("readyz");
        told.ends_with(" 503")
    });
    assert!(tells && told.contains("containerd"), "{told}");
    assert!(ask("healthz").ends_with(" 200"));
    start_containerd(node);
    let is_back = wait_until(END_LIMIT, || ask("readyz") == "ready\n 200");
    assert!(is_back, "{}", ask("readyz"));
}

#[test]
fn a_staged_checkpoint_is_restored_where_it_lies() {
    let (mut scenario, reference, taken) = scene();
    // Two ask at once, and its bytes come once.
    let words = ["kyb", "stage", &reference, "--tier=ram", "--plain-http", "--json"];
    let ask = || scenario.testbed.b.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut moved = Vec::new();
    for asked in [ask(), ask()] {
        let output = asked.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        moved.push(told["sizes"]["transferredBytes"].as_u64().unwrap());
    }
    moved.sort_unstable();
    assert!(moved[0] == 0 && moved[1] > MIB << 19, "{moved:?}");

    let before = files(&scenario.testbed.b, RAM);
    let (told, after) = restored(&scenario, &scenario.testbed.b, &reference, "one");
    assert_eq!(told["staged"], "ram", "{told}");
    assert!(told["timesMicroseconds"].get("materialise").is_none(), "{told}");
    assert!(told["sizes"]["transferredBytes"].as_u64().unwrap() < MIB << 19, "{told}");
    assert_eq!(after["boot_id_of_process"], taken["boot_id_of_process"]);
    assert!(after["checksum_ok"] == true && counter(&after) > Some(0), "{after}");
    assert_eq!(files(&scenario.testbed.b, RAM), before, "a restore changed what is staged");

    // The next agent finds it.
    scenario.agent_b.take().unwrap().kill();
    scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, TIERS).unwrap());
    let b = &scenario.testbed.b;
    let node = scenario.kyb_json(b, &["node"]).unwrap();
    let ram = tier(&node, "ram");
    assert_eq!(ram["staged"][0]["references"][0], reference.as_str(), "{node}");
    assert_eq!(ram["staged"][0]["pinned"], false);
    assert!(ram["usedBytes"].as_u64().unwrap() > MIB << 19, "{node}");
    let (told, _) = restored(&scenario, b, &reference, "two");
    assert_eq!(told["staged"], "ram", "{told}");
    // The image is there by now: what comes are documents.
    assert!(told["sizes"]["transferredBytes"].as_u64().unwrap() < 256 << 10, "{told}");
    let page = ["curl", "-s", "--unix-socket", METRICS, "http://x/metrics"];
    let page = b.run(&page).unwrap();
    assert!(page.contains("kybernate_agent_staging_hits_total{tier=\"ram\"} 1"), "{page}");

    at_once(&scenario, is_ready_with_containerd);

    let told = scenario.kyb_json(b, &["evict", &reference]).unwrap();
    assert_eq!(told["evicted"][0]["tier"], "ram", "{told}");
    assert_eq!(files(b, RAM), "");
    let output = scenario.kyb(b, &["evict", &reference]).unwrap();
    assert!(said(&output).contains("is not staged here"), "{}", said(&output));
    let (told, _) = restored(&scenario, b, &reference, "three");
    assert!(told["staged"].is_null(), "{told}");
    scenario.end().unwrap();
}

/// What was used longest ago makes room for what is new, not what has come first.
#[test]
fn what_nobody_used_for_long_makes_room() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        let reference =
            |tag: &str| scenario.reference(&format!("staging/lru-{}:{tag}", node.name()));
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let [first, second, third] = ["1", "2", "3"].map(reference);
        for reference in [&first, &second, &third] {
            checkpoint(scenario, node, "job", reference);
        }
        agent.kill();
        let agent = scenario.start_agent(node, "[staging.ram]\nbudget = \"1GiB\"\n").unwrap();
        let staged = || tier(&scenario.kyb_json(node, &["node"]).unwrap(), "ram");
        stage(scenario, node, &first, "ram");
        let bytes = staged()["usedBytes"].as_u64().unwrap();
        agent.kill();
        // For two, and none for three.
        let budget = format!("[staging.ram]\nbudget = \"{}KiB\"\n", bytes * 5 / 2 / 1024);
        let _agent = scenario.start_agent(node, &budget).unwrap();
        stage(scenario, node, &second, "ram");
        restored(scenario, node, &first, "again");
        scenario.remove(node, "again").unwrap();
        stage(scenario, node, &third, "ram");
        let left = staged()["staged"].to_string();
        let has = |reference: &str| left.contains(&format!("\"{reference}\""));
        assert_eq!([&first, &second, &third].map(|one| has(one)), [true, false, true], "{left}");
    });
    scenario.end().unwrap();
}

#[test]
fn a_checkpoint_on_disk_is_restored_by_the_next_agent() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let agent = scenario.start_agent(node, DISK).unwrap();
        let reference = scenario.reference(&format!("staging/disk:{}", node.name()));
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        checkpoint(scenario, node, "job", &reference);
        let taken = scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();
        let words = ["stage", &reference, "--tier", "nvme", "--plain-http"];
        let told = scenario.kyb_json(node, &words).unwrap();
        assert!(told["sizes"]["transferredBytes"].as_u64().unwrap() > 8 << 20, "{told}");
        agent.kill();
        let _agent = scenario.start_agent(node, DISK).unwrap();
        let words = ["restore", &reference, "--plain-http", "--name", "back"];
        let told = scenario.kyb_json(node, &words).unwrap();
        assert_eq!(told["staged"], "nvme", "{told}");
        assert!(told["sizes"]["transferredBytes"].as_u64().unwrap() < 1 << 20, "{told}");
        let after = scenario.wait_for_ticks(node, "back").unwrap();
        assert_eq!(after["boot_id_of_process"], taken["boot_id_of_process"]);
        assert!(after["checksum_ok"] == true && counter(&after) > Some(0), "{after}");
        let told = scenario.kyb_json(node, &["evict", &reference]).unwrap();
        assert_eq!(told["evicted"][0]["tier"], "nvme", "{told}");
        let told = scenario.kyb_json(node, &["node"]).unwrap();
        assert_eq!(tier(&told, "nvme")["usedBytes"], 0, "{told}");
        logs_objects(scenario, node);
    });
    scenario.end().unwrap();
}

/// As the kernel makes one that has a fault. What the agent is for goes on.
#[test]
fn a_tier_on_a_disk_for_reading_only_keeps_no_agent_from_its_work() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let agent = scenario.start_agent(node, DISK).unwrap();
        let told = scenario.kyb_json(node, &["node"]).unwrap();
        let directory = tier(&told, "nvme")["directory"].as_str().unwrap().to_owned();
        agent.kill();
        node.run(&["mount", "-t", "tmpfs", "-o", "ro,mode=0755", "disk", &directory]).unwrap();
        let agent = scenario.start_agent(node, DISK).unwrap();
        let told = scenario.kyb_json(node, &["node"]).unwrap();
        let problem = told["problems"][0].as_str().unwrap();
        assert!(
            problem.contains("the nvme tier is closed") && problem.contains("os error 30"),
            "{told}"
        );
        let reference = scenario.reference(&format!("staging/read-only:{}", node.name()));
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        checkpoint(scenario, node, "job", &reference);
        let words = ["stage", &reference, "--tier", "nvme", "--plain-http"];
        let output = scenario.kyb(node, &words).unwrap();
        assert!(!output.status.success(), "{}", said(&output));
        assert!(said(&output).contains("the nvme tier is closed"), "{}", said(&output));
        scenario.remove(node, "job").unwrap();
        let (told, _) = restored(scenario, node, &reference, "job");
        assert!(told["staged"].is_null(), "{told}");
        agent.kill();
        node.run(&["umount", &directory]).unwrap();
        let _agent = scenario.start_agent(node, DISK).unwrap();
        stage(scenario, node, &reference, "nvme");
        scenario.remove(node, "job").unwrap();
    });
    scenario.end().unwrap();
}

/// Each line that they have logged is an object; the agent before them spoke text.
fn logs_objects(scenario: &Scenario, node: &Node) {
    let name = format!("agent-{}.log", node.name());
    let log = fs::read_to_string(scenario.testbed.private().join(name)).unwrap();
    let lines = log.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let ended = |line: &&Value| line.to_string().contains("the operation has ended");
    let ends: Vec<_> = lines.iter().filter(ended).collect();
    assert_eq!(ends.len(), 3, "{log}");
    assert!(ends.iter().all(|line| line["level"] == "INFO" && line["timestamp"].is_string()));
}

/// Begins to stage a checkpoint in memory, and returns when its pages come.
fn begun(node: &Node, reference: &str) -> Child {
    let mut kyb = node.command(&["kyb", "stage", reference, "--tier=ram", "--plain-http"]);
    let kyb = kyb.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let place = node.path(RAM);
    let new = || {
        let mut entries = fs::read_dir(&place).unwrap().filter_map(Result::ok);
        entries.any(|entry| entry.path().join("images/pages-1.img").exists())
    };
    assert!(catch(new), "no page came");
    kyb
}

/// kyb dies in the middle: the agent goes on.
fn kyb_dies(scenario: &Scenario, node: &Node, reference: &str) {
    is_done_without_kyb(scenario, node, begun(node, reference), "stage");
    let told = scenario.kyb_json(node, &["evict", reference]).unwrap();
    assert_eq!(told["evicted"].as_array().unwrap().len(), 1, "{told}");
    assert_eq!(files(node, RAM), "");
}

/// containerd dies in the middle: what is staged comes past it.
fn containerd_dies(scenario: &Scenario, node: &Node, reference: &str) {
    let mut kyb = begun(node, reference);
    signal(&running(node, "containerd"), Signal::KILL);
    start_containerd(node);
    assert!(kyb.wait().unwrap().success(), "it is a failure on {}", node.name());
    let told = scenario.kyb_json(node, &["evict", reference]).unwrap();
    assert_eq!(told["evicted"].as_array().unwrap().len(), 1, "{told}");
    assert_eq!(files(node, RAM), "");
}

/// The agent dies in the middle: what it had staged is there whole, or not at all.
fn the_agent_dies(scenario: &mut Scenario, name: &str, reference: &str) {
    let mut kyb = begun(scenario.node(name), reference);
    scenario.agent(name).take().unwrap().kill();
    kyb.kill().unwrap();
    kyb.wait().unwrap();
    scenario.next_agent(name, TIERS).unwrap();
    let node = scenario.node(name);
    let left = || files(node, RAM);
    assert!(wait_until(END_LIMIT, || !left().contains("new-")), "{}", left());
    let whole = !left().is_empty();
    let told = scenario.kyb_json(node, &["node"]).unwrap();
    assert_eq!(tier(&told, "ram")["staged"].as_array().unwrap().len(), usize::from(whole));
}

#[test]
fn what_cannot_be_staged_leaves_nothing() {
    let (mut scenario, reference, _) = scene();
    let ask = |scenario: &Scenario, reference: &str, tier: &str| {
        let words = ["stage", reference, "--tier", tier, "--plain-http"];
        scenario.kyb(&scenario.testbed.b, &words).unwrap()
    };
    // The budget, and who signed: both before any page moves.
    let output = ask(&scenario, &reference, "nvme");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("budget of 16777216 bytes"), "{}", said(&output));
    let unsigned = scenario.reference("staging/unsigned:v1");
    let words = ["checkpoint", "job", &unsigned, "--plain-http", "--unsigned"];
    scenario.kyb_json(&scenario.testbed.a, &words).unwrap();
    let output = ask(&scenario, &unsigned, "ram");
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("not signed"), "{}", said(&output));
    assert_eq!(files(&scenario.testbed.b, RAM), "");

    scenario.next_agent("a", TIERS).unwrap();
    at_once(&scenario, |node| {
        kyb_dies(&scenario, node, &reference);
        containerd_dies(&scenario, node, &reference);
    });
    for name in ["a", "b"] {
        the_agent_dies(&mut scenario, name, &reference);
    }
    stage(&scenario, &scenario.testbed.b, &reference, "ram");

    // The memory behind the tier is full.
    drop(scenario.agent_b.take());
    let b = &scenario.testbed.b;
    let mount = "mkdir -p /run/small && mount -t tmpfs -o size=8m,mode=0700 small /run/small";
    b.run(&["sh", "-c", mount]).unwrap();
    let small = "[staging.ram]\nbudget = \"128MiB\"\ndirectory = \"/run/small\"\n";
    scenario.agent_b = Some(scenario.start_agent(b, small).unwrap());
    let output = ask(&scenario, &reference, "ram");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("No space left") && text.contains("/run/small is full"), "{text}");
    assert!(text.contains("as large as the budget of 134217728 bytes"), "{text}");
    assert_eq!(files(&scenario.testbed.b, "/run/small"), "");
    scenario.end().unwrap();
}

/// Returns how many bytes the tier in memory could hold.
fn size(node: &Node) -> u64 {
    let told = node.run(&["df", "--output=size", "-B1", RAM]).unwrap();
    told.lines().last().unwrap().trim().parse().unwrap()
}

/// Starts the next agent with another budget, and returns it and how many it finds staged.
fn with_budget(scenario: &Scenario, node: &Node, old: Agent, mib: u64) -> (Agent, usize) {
    drop(old);
    // kybernate-runc says nothing of how a registry is asked.
    let registry = "[[registry]]\nhost = \"10.77.0.1:5000\"\nplain_http = true\n";
    let config = format!("[staging.ram]\nbudget = \"{mib}MiB\"\n{registry}");
    let agent = scenario.start_agent(node, &config).unwrap();
    let told = scenario.kyb_json(node, &["node"]).unwrap();
    assert_eq!(tier(&told, "ram")["budgetBytes"], mib << 20, "{told}");
    let size = size(node);
    assert!((mib << 20..(mib + 64) << 20).contains(&size), "{size} bytes for {mib} MiB");
    (agent, tier(&told, "ram")["staged"].as_array().unwrap().len())
}

#[test]
fn another_budget_counts_from_the_next_start_on() {
    let (mut scenario, first, _) = scene();
    let (second, third) =
        (scenario.reference("staging/job:v2"), scenario.reference("staging/job:v3"));
    for reference in [&second, &third] {
        checkpoint(&scenario, &scenario.testbed.a, "job", reference);
    }
    on_both(&mut scenario, |scenario, node, agent| {
        let again = |agent: Agent, mib: u64| with_budget(scenario, node, agent, mib);
        let restored = |reference: &str, name: &str| restored(scenario, node, reference, name).0;
        // Room for one of them.
        let (agent, found) = again(agent, 64);
        assert_eq!(found, 0);
        stage(scenario, node, &first, "ram");
        what_is_read_stays(scenario, node, [&first, &second]);
        // With more, what is there stays, and all three find room.
        let (agent, found) = again(agent, 256);
        assert_eq!(found, 1);
        for reference in [&second, &third] {
            stage(scenario, node, reference, "ram");
        }
        let told = restored(&first, "one");
        assert_eq!(told["staged"], "ram", "{told}");
        // With less, what was used least recently goes, here the second, and then all but the first.
        let (agent, found) = again(agent, 80);
        assert_eq!(found, 2);
        let told = restored(&second, "two");
        assert!(told["staged"].is_null(), "{told}");
        let (agent, found) = again(agent, 64);
        assert_eq!(found, 1);
        let told = restored(&first, "three");
        assert_eq!(told["staged"], "ram", "{told}");
        // None fits any more.
        let (_agent, found) = again(agent, 16);
        assert_eq!(found, 0);
        assert_eq!(files(node, RAM), "");
    });
    scenario.end().unwrap();
}

/// Whoever tidies up has no need to know the agent.
#[test]
fn a_tier_that_somebody_removed_is_made_again() {
    const BOTH: &str = "[staging.ram]\nbudget = \"128MiB\"\n[staging.nvme]\nbudget = \"128MiB\"\n";
    let (mut scenario, reference, taken) = scene();
    next_agents(&mut scenario, BOTH);
    let removals = [
        ("ram", "rm -rf DIR/*"),
        ("ram", "umount DIR && rm -rf DIR"),
        ("nvme", "rm -rf DIR"),
        ("nvme", "rm -rf DIR/*/images"),
    ];
    at_once(&scenario, |node| {
        for (name, removal) in removals {
            stage(&scenario, node, &reference, name);
            let told = scenario.kyb_json(node, &["node"]).unwrap();
            let directory = tier(&told, name)["directory"].as_str().unwrap().to_owned();
            node.run(&["sh", "-c", &removal.replace("DIR", &directory)]).unwrap();
            let told = scenario.kyb_json(node, &["node"]).unwrap();
            let (staged, used) = (&tier(&told, name)["staged"], &tier(&told, name)["usedBytes"]);
            assert!(staged.as_array().unwrap().is_empty() && *used == 0, "{removal}: {told}");

            let told = stage(&scenario, node, &reference, name);
            assert!(told["sizes"]["transferredBytes"].as_u64().unwrap() > MIB << 19, "{told}");
            let looked = node.run(&["stat", "-f", "-c", "%T", &directory]).unwrap();
            assert_eq!(looked.trim() == "tmpfs", name == "ram", "{removal}: {looked}");
            let looked = node.run(&["stat", "-c", "%a %u", &directory]).unwrap();
            assert_eq!(looked.trim(), "700 0", "{removal}");
            let (told, after) = restored(&scenario, node, &reference, "back");
            assert_eq!(told["staged"], name, "{removal}: {told}");
            assert_eq!(after["boot_id_of_process"], taken["boot_id_of_process"]);
            scenario.remove(node, "back").unwrap();
            scenario.kyb_json(node, &["evict", &reference]).unwrap();
        }
        let before = scenario.traces(node).unwrap();
        let mut failed = false;
        for name in ["ram", "nvme"] {
            let told = scenario.kyb_json(node, &["node"]).unwrap();
            let directory = tier(&told, name)["directory"].as_str().unwrap().to_owned();
            stage(&scenario, node, &reference, name);
            failed |= what_is_read_is_removed(&scenario, node, &reference, &directory);
            assert_eq!(scenario.traces(node).unwrap(), before, "{name}: something is left");
        }
        assert!(failed, "CRIU has read all of it before it was removed, twice");
    });
    scenario.end().unwrap();
}
