//! What a reader did: a table for people, JSON for programs, `JUnit` for build servers.

use std::collections::BTreeMap;
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde_json::{Value, json};

use super::Vector;

/// What a reader did with every vector.
#[derive(Clone, Debug)]
pub struct Report {
    /// The reader.
    pub reader: String,
    /// What it did, in the order of the vectors.
    pub findings: Vec<Finding>,
    /// How long all of it took.
    pub time: Duration,
}

/// What a reader did with one vector.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The vector.
    pub vector: Vector,
    /// What was wrong; `None` when all was right.
    pub fault: Option<String>,
    /// How long it took.
    pub time: Duration,
}

/// Returns what a reader has to do with a vector, in words.
pub fn expected(vector: &Vector) -> String {
    match (&vector.files, vector.reason) {
        (Some(_), None) => "read".to_owned(),
        (Some(_), Some(reason)) => format!("read or refused for {reason}"),
        (None, reason) => format!("refused for {}", reason.map_or("nothing", |r| r.as_str())),
    }
}

impl Report {
    /// Counts what went wrong.
    pub fn failed(&self) -> usize {
        self.findings.iter().filter(|finding| finding.fault.is_some()).count()
    }

    /// Returns a count per expectation and every fault, for people.
    pub fn text(&self) -> String {
        let mut counts = BTreeMap::<String, (usize, usize)>::new();
        for finding in &self.findings {
            let (passed, failed) = counts.entry(expected(&finding.vector)).or_default();
            *(if finding.fault.is_none() { passed } else { failed }) += 1;
        }
        let mut text = format!("{}\n\n", self.reader) + &row("must be", "pass", "fail");
        for (expected, (passed, failed)) in counts {
            text += &row(&expected, &passed.to_string(), &failed.to_string());
        }
        for finding in &self.findings {
            text += &told(finding);
        }
        let (all, failed, seconds) = (self.findings.len(), self.failed(), self.time.as_secs_f64());
        text + &format!(
            "\n{all} vectors in {seconds:.1} s: {} passed, {failed} failed\n",
            all - failed
        )
    }

    /// Returns everything as JSON.
    pub fn json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            json!({
                "name": finding.vector.name,
                "section": finding.vector.section,
                "what": finding.vector.what,
                "expected": expected(&finding.vector),
                "outcome": if finding.fault.is_none() { "passed" } else { "failed" },
                "fault": finding.fault,
                "milliseconds": u64::try_from(finding.time.as_millis()).unwrap_or(u64::MAX),
            })
        });
        let failed = self.failed();
        json!({
            "reader": self.reader,
            "counts": { "passed": self.findings.len() - failed, "failed": failed },
            "vectors": findings.collect::<Vec<_>>(),
        })
    }

    /// Returns a `JUnit` report of one suite.
    pub fn junit(&self) -> Result<String, quick_junit::SerializeError> {
        let mut suite = TestSuite::new("vectors");
        suite.add_test_cases(self.findings.iter().map(|finding| {
            let status = match &finding.fault {
                None => TestCaseStatus::success(),
                Some(fault) => {
                    let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                    status.set_message(format!("must be {}", expected(&finding.vector)));
                    status.set_description(fault.as_str());
                    status
                }
            };
            let mut case = TestCase::new(finding.vector.name, status);
            case.set_classname(format!("§{}", finding.vector.section));
            case.set_time(finding.time);
            case
        }));
        let mut report = quick_junit::Report::new(format!("artifact vectors, {}", self.reader));
        report.set_time(self.time);
        report.add_test_suite(suite);
        report.to_string()
    }
}

fn row(first: &str, passed: &str, failed: &str) -> String {
    format!("{first:<44} {passed:>5} {failed:>5}\n")
}

fn told(finding: &Finding) -> String {
    let Some(fault) = &finding.fault else { return String::new() };
    let Vector { name, section, what, .. } = &finding.vector;
    let (expected, fault) = (expected(&finding.vector), fault.replace('\n', "\n  "));
    format!("\nFAILED {name} (§{section})\n  {what}\n  must be {expected}, but {fault}\n")
}
