//! The format's test vectors: what is checked in, on our reader, on a second one, and on readers
//! that are wrong on purpose.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kybernate_conformance::vectors::{self, Pool, list, report::Report, runner};
use kybernate_spec::Reason;
use serde_json::Value;

use crate::harness::{bin, said};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn collect(directory: &Path, below: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs_err::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, below, files);
        } else {
            let name = path.strip_prefix(below).unwrap().to_str().unwrap().to_owned();
            files.insert(name, fs_err::read(&path).unwrap());
        }
    }
}

/// What is checked in is what the program makes. `UPDATE=1 cargo test` writes it anew.
#[test]
fn the_vectors_are_up_to_date() {
    let (pool, directory) = (vectors::all().unwrap(), root().join("spec/testdata"));
    if std::env::var_os("UPDATE").is_some() {
        // Beside it is what the packager's tests write.
        if directory.join("layout").exists() {
            fs_err::remove_dir_all(directory.join("layout")).unwrap();
        }
        vectors::write(&pool, &directory).unwrap();
    }
    let mut files = BTreeMap::new();
    collect(&directory.join("layout"), &directory.join("layout"), &mut files);
    let names: Vec<_> = files.keys().filter(|name| !pool.files.contains_key(*name)).collect();
    assert!(names.is_empty(), "not of the vectors: {names:?}");
    for (name, content) in &pool.files {
        let same = files.get(name) == Some(content);
        assert!(same, "{name} differs: run `UPDATE=1 cargo test` and commit spec/testdata");
    }
    let listed = fs_err::read_to_string(directory.join("vectors.json")).unwrap();
    assert_eq!(listed, list(&pool).unwrap());
}

#[test]
fn every_reason_has_a_vector() {
    let pool = vectors::all().unwrap();
    for reason in Reason::ALL {
        let count = pool.vectors.iter().filter(|vector| vector.reason == Some(reason)).count();
        assert!(count > 0, "{reason}");
    }
    assert!(pool.vectors.iter().filter(|vector| vector.files.is_none()).count() >= 60);
}

fn run(pool: &Pool, reader: &[&str]) -> Report {
    let reader: Vec<String> = reader.iter().map(|&word| word.to_owned()).collect();
    runner::run(pool, &reader).unwrap()
}

fn failed(report: &Report) -> Vec<&str> {
    let failed = report.findings.iter().filter(|finding| finding.fault.is_some());
    failed.map(|finding| finding.vector.name).collect()
}

#[test]
fn kyb_reads_and_refuses_what_it_must() {
    let kyb = bin().join("kyb");
    let reader = [
        kyb.to_str().unwrap(),
        "unpack",
        "oci:{layout}:{name}",
        "{out}",
        "--insecure-no-signature",
        "--json",
    ];
    let report = run(&vectors::all().unwrap(), &reader);
    assert_eq!(report.failed(), 0, "{}", report.text());
}

/// It was written from the specification alone: that it can be shows that the prose suffices.
#[test]
fn the_reader_in_python_reads_and_refuses_what_it_must() {
    let reader = root().join("conformance/reader/reader.py");
    let report = run(&vectors::all().unwrap(), &["python3", reader.to_str().unwrap()]);
    assert_eq!(report.failed(), 0, "{}", report.text());
}

/// A reader that takes the words after the script as `$1`, `$2` and `$3`.
fn script(text: &str, names: &[&str]) -> Report {
    let mut pool = vectors::all().unwrap();
    pool.vectors.retain(|vector| names.contains(&vector.name));
    run(&pool, &["sh", "-c", text, "reader"])
}

#[test]
fn a_reader_that_is_wrong_fails() {
    let two = ["nothing", "pack-magic"];
    let refusal = r#"{"error":{"reason":"header"}}"#;
    for (wrong, text, failing) in [
        ("takes everything", "mkdir $3".to_owned(), &two[1..]),
        ("refuses everything", format!("echo '{refusal}'; exit 2"), &two[..1]),
        ("refuses without a reason", "exit 2".to_owned(), &two[..]),
        ("leaves something", format!("touch $3.part; echo '{refusal}'; exit 2"), &two[..]),
        ("leaves a part", format!("mkdir $3; touch $3/a; echo '{refusal}'; exit 2"), &two[..]),
        ("is killed", "kill -9 $$".to_owned(), &two[..]),
        ("has a file too many", "mkdir $3; touch $3/a; chmod 600 $3/a".to_owned(), &two[..]),
    ] {
        let report = script(&text, &two);
        assert_eq!(failed(&report), failing, "one that {wrong}: {}", report.text());
    }
    let everybody =
        "umask 0; mkdir $3; printf core >$3/core-1.img; printf inventory >$3/inventory.img";
    assert_eq!(failed(&script(everybody, &["pack-only"])), ["pack-only"]);
    let owner = everybody.replace("umask 0", "umask 77");
    assert_eq!(failed(&script(&owner, &["pack-only"])), Vec::<&str>::new());
}

fn command(arguments: &[&str]) -> Output {
    let program = bin().join("kybernate-conformance");
    Command::new(program).arg("vectors").args(arguments).output().unwrap()
}

#[test]
fn the_command_tells_what_a_reader_did_in_three_forms() {
    let directory = tempfile::tempdir().unwrap();
    let junit = directory.path().join("junit.xml");
    let reader = ["--", "sh", "-c", "mkdir {out}"];
    let table =
        [&["--filter", "facts-minimal", "--report", junit.to_str().unwrap()][..], &reader].concat();
    let output = command(&table);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("1 passed, 0 failed"), "{}", said(&output));
    let report = fs_err::read_to_string(&junit).unwrap();
    let report = quick_junit::Report::deserialize_from_str(&report).unwrap();
    assert_eq!((report.tests, report.failures), (1, 0));

    let output = command(&[&["--filter", "pack-magic", "--json"][..], &reader].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["counts"]["failed"], 1);
    assert_eq!(json["vectors"][0]["fault"], "it was read");

    for wrong in [&["--filter", "no such vector", "--list"][..], &["--json"], &["--", ""][..0]] {
        assert_eq!(command(wrong).status.code(), Some(64), "{wrong:?}");
    }
}
