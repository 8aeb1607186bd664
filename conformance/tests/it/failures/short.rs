//! Memory that a dump speaks of and does not have.

use std::path::Path;
use std::process::Output;

use fs_err as fs;
use kybernate_conformance::scenario::{PASSWORD, Scenario};
use serde_json::Value;

use crate::harness::{checkpoint, nodes, restore, said, start};
use crate::trust::{METRICS, are_told};

const DUMP: &str = "/tmp/dump";
const FACTS: &str = "/tmp/facts.json";
const PAGE_BYTES: u64 = 4096;
/// Fields of an entry of a pagemap, as protobuf writes their numbers: flags, and the number of pages, as
/// CRIU before 4.2 has it and since then.
const FLAGS: u8 = 4 << 3;
const PAGES: [u8; 2] = [2 << 3, 5 << 3];
/// What an entry says that is neither in the file nor in a parent, and what it says else.
const LAZY: u8 = 2;
const PRESENT: u8 = 4;

/// Reads a number as protobuf has it, and returns it with what follows.
fn number(bytes: &[u8]) -> (u64, &[u8]) {
    let length = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let digits = bytes[..length].iter().rev();
    let value = digits.fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f));
    (value, &bytes[length..])
}

/// Takes the pages of a pagemap's last entry out of their file. The pagemap says of them then what
/// nobody counts who packs the dump, and what CRIU reads all the same.
fn cut(dump: &Path) {
    let mut pagemap = fs::read(dump.join("pagemap-1.img")).unwrap();
    let (mut at, mut last) = (8, 0);
    while at < pagemap.len() {
        let length = u32::from_le_bytes(pagemap[at..at + 4].try_into().unwrap());
        last = at + 4;
        at = last + usize::try_from(length).unwrap();
    }
    let (mut rest, mut pages, mut flags) = (&pagemap[last..], 0, 0);
    while let [field, after @ ..] = rest {
        let (value, next) = number(after);
        match *field {
            FLAGS => flags = pagemap.len() - after.len(),
            field if PAGES.contains(&field) => pages = value,
            _ => {}
        }
        rest = next;
    }
    assert!(flags > 0 && pages > 0, "the last entry is of another kind: {:?}", &pagemap[last..]);
    assert_eq!(pagemap[flags] & PRESENT, PRESENT);
    pagemap[flags] = LAZY;
    fs::write(dump.join("pagemap-1.img"), pagemap).unwrap();
    let file = fs::OpenOptions::new().write(true).open(dump.join("pages-1.img")).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length - pages * PAGE_BYTES).unwrap();
}

/// Writes the facts of a checkpoint for whoever packs its dump again.
fn write_facts(scenario: &Scenario, digest: &str) {
    let repository = scenario.reference("short/job");
    let read = |what: &str, digest: &str| -> Value {
        let name = format!("{repository}@{digest}");
        let text = scenario.testbed.b.run(&["crane", what, "--insecure", &name]).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let index = read("manifest", digest);
    let own = index["manifests"].as_array().unwrap().last().unwrap();
    let manifest = read("manifest", own["digest"].as_str().unwrap());
    let mut facts = read("blob", manifest["config"]["digest"].as_str().unwrap());
    facts.as_object_mut().unwrap().remove("sizes").unwrap();
    fs::write(scenario.testbed.a.path(FACTS), facts.to_string()).unwrap();
}

/// Packs node a's dump and signs it.
fn pack(scenario: &Scenario, reference: &str) {
    let a = &scenario.testbed.a;
    let password = format!("COSIGN_PASSWORD={PASSWORD}");
    let image = scenario.image();
    let words = ["env", &password, "kyb", "pack", DUMP, reference, "--image", &image];
    let more = ["--facts", FACTS, "--sign-key", "/srv/share/node-a.key", "--plain-http"];
    let packed = a.output(&[&words[..], &more].concat()).unwrap();
    assert!(packed.status.success(), "{}", said(&packed));
}

/// Whether a restore came as far as to make a container, which is before CRIU.
fn was_begun(output: &Output) -> bool {
    said(output).lines().any(|line| line.starts_with("create: "))
}

#[test]
fn memory_that_is_missing_is_noticed_before_criu_waits_for_it() {
    let mut scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let (whole, short) = (scenario.reference("short/job:v1"), scenario.reference("short/job:v2"));
    let taken = scenario.reference("short/job:taken");
    write_facts(&scenario, &checkpoint(&scenario, a, "job", &taken));
    let words = ["unpack", &taken, DUMP, "--plain-http", "--insecure-no-signature"];
    let unpacked = scenario.kyb(a, &words).unwrap();
    assert!(unpacked.status.success(), "{}", said(&unpacked));
    pack(&scenario, &whole);
    cut(&a.path(DUMP));
    pack(&scenario, &short);

    // With what was written beside the memory missing, CRIU may fail: it gets as far as that.
    let output = restore(&scenario, &scenario.testbed.b, &whole, "whole", &[]);
    assert_ne!(output.status.code(), Some(2), "{}", said(&output));
    assert!(was_begun(&output), "{}", said(&output));
    if output.status.success() {
        scenario.remove(&scenario.testbed.b, "whole").unwrap();
    }
    // Read as it comes, and written first.
    let config = "pages_on_demand = false\n[staging.ram]\nbudget = \"256MiB\"\n";
    let metrics = format!("metrics = \"unix:{METRICS}\"\n");
    for (name, config) in [("a", ""), ("a", config), ("b", ""), ("b", config)] {
        scenario.next_agent(name, &format!("{metrics}{config}")).unwrap();
        let node = scenario.node(name);
        let before = scenario.traces(node).unwrap();
        let output = restore(&scenario, node, &short, "short", &[]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{config:?} on {name}: {text}");
        assert!(text.contains("refused (integrity)") && text.contains("pages-1.img"), "{text}");
        assert!(text.contains("take a checkpoint anew") && !was_begun(&output), "{text}");
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        are_told(&scenario, node, "integrity", &["restore"]);
    }
    // It is not staged for later either.
    for node in nodes(&scenario) {
        let words = ["stage", &short, "--tier", "ram", "--plain-http"];
        let output = scenario.kyb(node, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains("pages-1.img"), "{}", said(&output));
    }
    scenario.end().unwrap();
}
