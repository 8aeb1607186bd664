//! What a run has found: a table for people, JSON for programs, `JUnit` for build servers.

use std::collections::HashMap;
use std::time::Duration;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde_json::{Value, json};

use super::check::{Edition, Fault};
use super::runner::{Finding, Outcome};

/// The findings of one run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The registry.
    pub url: String,
    /// The text that was tested against.
    pub edition: Edition,
    /// How long all of it took.
    pub time: Duration,
    /// What was found, in the order of the suite.
    pub findings: Vec<Finding>,
}

/// How many checks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Did what is asked for.
    pub passed: usize,
    /// Did not do what is required.
    pub failed: usize,
    /// Did not do what is recommended or optional.
    pub warned: usize,
    /// Do not apply.
    pub skipped: usize,
}

impl Counts {
    fn of<'a>(findings: impl Iterator<Item = &'a Finding>) -> Self {
        let mut counts = Self::default();
        for finding in findings {
            match finding.outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Failed(_) => counts.failed += 1,
                Outcome::Warned(_) => counts.warned += 1,
                Outcome::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }

    /// Returns how many checks there were.
    pub const fn total(self) -> usize {
        self.passed + self.failed + self.warned + self.skipped
    }
}

impl Report {
    /// Counts everything.
    pub fn counts(&self) -> Counts {
        Counts::of(self.findings.iter())
    }

    /// Returns the headings in the order of the suite, with what was found under each.
    pub fn sections(&self) -> Vec<(&'static str, Counts)> {
        let mut order: Vec<&'static str> = Vec::new();
        let mut found: HashMap<&'static str, Vec<&Finding>> = HashMap::new();
        for finding in &self.findings {
            let list = found.entry(finding.section).or_default();
            if list.is_empty() {
                order.push(finding.section);
            }
            list.push(finding);
        }
        let count = |section| {
            let list = found.get(section).into_iter().flatten();
            (section, Counts::of(list.copied()))
        };
        order.into_iter().map(count).collect()
    }

    /// Returns the summary and every failure and warning, for people.
    pub fn text(&self) -> String {
        let mut text = format!("{} against {}\n\n", self.url, name(self.edition));
        text += &row("section", ["pass", "fail", "warn", "skip"].map(str::to_owned));
        for (section, counts) in self.sections() {
            text += &row(section, cells(counts));
        }
        text += &row("all", cells(self.counts()));
        for finding in &self.findings {
            let (word, fault) = match &finding.outcome {
                Outcome::Failed(fault) => ("FAILED", fault),
                Outcome::Warned(fault) => ("WARNED", fault),
                Outcome::Passed | Outcome::Skipped(_) => continue,
            };
            text += &told(word, finding, fault);
        }
        let skipped = self.findings.iter().filter_map(|finding| match &finding.outcome {
            Outcome::Skipped(reason) => Some(format!("{}: {reason}\n", finding.id)),
            _ => None,
        });
        let skipped: String = skipped.collect();
        if !skipped.is_empty() {
            text += "\nSKIPPED\n";
            text += &skipped;
        }
        let (counts, seconds) = (self.counts(), self.time.as_secs_f64());
        text + &format!("\n{} checks in {seconds:.1} s: {}\n", counts.total(), summary(counts))
    }

    /// Returns everything as JSON.
    pub fn json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            let (outcome, fault, reason) = match &finding.outcome {
                Outcome::Passed => ("passed", None, None),
                Outcome::Failed(fault) => ("failed", Some(fault), None),
                Outcome::Warned(fault) => ("warned", Some(fault), None),
                Outcome::Skipped(reason) => ("skipped", None, Some(reason)),
            };
            json!({
                "id": finding.id,
                "section": finding.section,
                "level": finding.level,
                "title": finding.title,
                "outcome": outcome,
                "fault": fault,
                "reason": reason,
                "milliseconds": u64::try_from(finding.time.as_millis()).unwrap_or(u64::MAX),
            })
        });
        json!({
            "registry": self.url,
            "specification": name(self.edition),
            "counts": self.counts(),
            "checks": findings.collect::<Vec<_>>(),
        })
    }

    /// Returns a `JUnit` report: a suite per section; a warning is a success that says so.
    pub fn junit(&self) -> Result<String, quick_junit::SerializeError> {
        let mut report = quick_junit::Report::new(format!("OCI registry {}", self.url));
        report.set_time(self.time);
        for (section, _) in self.sections() {
            let mut suite = TestSuite::new(section);
            let cases = self.findings.iter().filter(|finding| finding.section == section);
            suite.add_test_cases(cases.map(case));
            report.add_test_suite(suite);
        }
        report.to_string()
    }
}

/// Returns the name of the text that is tested against.
pub const fn name(edition: Edition) -> &'static str {
    match edition {
        Edition::Stable => "distribution-spec 1.1.1",
        Edition::Dev => "distribution-spec main",
    }
}

/// Returns counts in words.
pub fn summary(counts: Counts) -> String {
    let Counts { passed, failed, warned, skipped } = counts;
    format!("{passed} passed, {failed} failed, {warned} warnings, {skipped} skipped")
}

fn case(finding: &Finding) -> TestCase {
    let failure = |fault: &Fault| {
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
        status.set_type(finding.level.to_string());
        status.set_message(format!("expected {}, got {}", fault.expected, fault.got));
        status.set_description(fault.to_string());
        status
    };
    let mut case = match &finding.outcome {
        Outcome::Passed => TestCase::new(&*finding.id, TestCaseStatus::success()),
        Outcome::Failed(fault) => TestCase::new(&*finding.id, failure(fault)),
        Outcome::Warned(fault) => {
            let mut case = TestCase::new(&*finding.id, TestCaseStatus::success());
            case.set_system_out(told("WARNED", finding, fault));
            case
        }
        Outcome::Skipped(reason) => {
            let mut status = TestCaseStatus::skipped();
            status.set_message(reason.as_str());
            TestCase::new(&*finding.id, status)
        }
    };
    case.set_classname(finding.section);
    case.set_time(finding.time);
    case
}

fn told(word: &str, finding: &Finding, fault: &Fault) -> String {
    let Finding { id, level, title, section, .. } = finding;
    let fault = fault.to_string().replace('\n', "\n  ");
    format!("\n{word} {id}\n  {level} {title} ({section:?})\n  {fault}\n")
}

fn cells(counts: Counts) -> [String; 4] {
    [counts.passed, counts.failed, counts.warned, counts.skipped].map(|count| count.to_string())
}

fn row(first: &str, [pass, fail, warn, skip]: [String; 4]) -> String {
    format!("{first:<48} {pass:>5} {fail:>5} {warn:>5} {skip:>5}\n")
}
