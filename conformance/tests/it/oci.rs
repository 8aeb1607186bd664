//! The conformance suite for registries: on our own, and on registries that are wrong on purpose.

use std::process::{Command, Output};

use kybernate_conformance::oci::check::{Edition, Level};
use kybernate_conformance::oci::client::Client;
use kybernate_conformance::oci::report::Report;
use kybernate_conformance::oci::runner::{Outcome, Settings};
use kybernate_conformance::oci::{against, block_on, random_namespace};
use kybernate_conformance::process::Service;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{bin, said};

mod liar;

/// Our registry on a directory that goes with it.
struct Registry {
    url: String,
    // Ended before its directory is removed.
    _service: Service,
    _root: TempDir,
}

impl Registry {
    fn start() -> Self {
        // In memory where there is such a place: durability has tests of its own.
        let memory = std::path::Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let root = tempfile::tempdir_in(base).unwrap();
        let mut command = Command::new(bin().join("kybernate-registry"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--log", "error", "--root"]);
        let mut service = Service::start(command.arg(root.path().join("store"))).unwrap();
        let address = service.wait_for_line("listening on").unwrap();
        Self { url: format!("http://{address}"), _service: service, _root: root }
    }
}

fn settings(edition: Edition, filters: &[&str]) -> Settings {
    let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
    Settings { edition, jobs: 16, namespace: random_namespace().unwrap(), filters }
}

fn ids(report: &Report, of: impl Fn(&Outcome) -> bool) -> Vec<&str> {
    let findings = report.findings.iter().filter(|finding| of(&finding.outcome));
    findings.map(|finding| finding.id.as_str()).collect()
}

#[test]
fn our_registry_has_no_failure_in_either_edition() {
    let registry = Registry::start();
    for edition in [Edition::Stable, Edition::Dev] {
        let client = Client::new(&registry.url, None).unwrap();
        let report = block_on(against(client, &settings(edition, &[]))).unwrap();
        let counts = report.counts();
        assert_eq!((counts.failed, counts.warned), (0, 0), "{}", report.text());
        assert!(counts.passed >= 300, "{}", report.text());
    }
}

#[test]
fn nothing_passes_on_a_registry_that_always_fails() {
    let report = block_on(async {
        let (listener, url) = liar::listen().await;
        let client = Client::new(&url, None).unwrap();
        let settings = settings(Edition::Dev, &[]);
        tokio::select! {
            ended = liar::always(listener, 500) => panic!("{ended:?}"),
            report = against(client, &settings) => report,
        }
    });
    let report = report.unwrap();
    assert_eq!(ids(&report, |outcome| *outcome == Outcome::Passed), Vec::<&str>::new());
    let must = report.findings.iter().filter(|finding| finding.level == Level::Must).count();
    assert!(report.counts().failed * 10 > must * 9, "{}", report.text());
}

#[test]
fn every_lie_is_found_by_the_checks_it_is_about() {
    let registry = Registry::start();
    let mut wrong = Vec::new();
    for lie in liar::LIES {
        let report = block_on(async {
            let (listener, url) = liar::listen().await;
            let client = Client::new(&url, None).unwrap();
            let settings = settings(Edition::Dev, lie.found_by);
            tokio::select! {
                ended = liar::serve(listener, &registry.url, lie) => panic!("{ended:?}"),
                report = against(client, &settings) => report,
            }
        });
        let report = report.unwrap();
        let failed =
            ids(&report, |outcome| matches!(outcome, Outcome::Failed(_) | Outcome::Warned(_)));
        if failed != lie.found_by {
            wrong.push(format!("{}: found by {failed:?}\n{}", lie.name, report.text()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn oci(arguments: &[&str]) -> Output {
    Command::new(bin().join("kybernate-conformance")).arg("oci").args(arguments).output().unwrap()
}

#[test]
fn the_command_tells_what_it_found_in_three_forms() {
    let registry = Registry::start();
    let directory = tempfile::tempdir().unwrap();
    let junit = directory.path().join("junit.xml");
    let filter = ["--filter", "pull.blob.get", "--filter", "base"];
    let table = [&[&registry.url, "--report", junit.to_str().unwrap()][..], &filter].concat();
    let output = oci(&table);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(said(&output).contains("Pulling blobs"), "{}", said(&output));
    let xml = fs_err::read_to_string(&junit).unwrap();
    let report = quick_junit::Report::deserialize_from_str(&xml).unwrap();
    assert!(report.tests >= 10 && report.failures == 0, "{xml}");

    let output = oci(&[&[&registry.url, "--json", "--dev"][..], &filter].concat());
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["counts"]["failed"], 0);
    assert!(json["checks"].as_array().unwrap().len() >= 10);
}

#[test]
fn the_command_says_by_its_exit_code_what_happened() {
    // Nobody listens there: a port below 1024 that is not used on a test's machine.
    let output = oci(&["http://127.0.0.1:9", "--filter", "base.get.ok"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("FAILED base.get.ok"), "{}", said(&output));
    for wrong in [
        &["not a url"][..],
        &["http://127.0.0.1:9", "--filter", "no-such-check"],
        &["http://127.0.0.1:9", "--username", "somebody"],
        &[],
    ] {
        let output = oci(wrong);
        assert_eq!(output.status.code(), Some(64), "{wrong:?}: {}", said(&output));
    }
}
