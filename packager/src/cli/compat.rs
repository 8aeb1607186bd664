//! `kyb compat`

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use jiff::Timestamp;
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::{
    self, Finding, Outcome, Report, Severity, Subject, Target, Verdict, examine,
};
use kybernate_packager::policy::in_time;
use kybernate_spec::checkpoint::{CONFIG_BYTES_MAX, NodeFacts};
use kybernate_spec::{Digest, Location, document};
use serde_json::json;

use super::aside::aside;
use super::facts::FactsSource;
use super::offer::Offer;
use super::{Connection, Failure};
use crate::terminal::Terminal;

/// Exit code when a fact that decides is not known.
const UNKNOWN: u8 = 3;

const AFTER: &str = "\
Exit codes: 0 it is compatible, 2 it is not, or its time is over, 3 a fact that decides is not known, 1 and 64 as ever.

Example:
  kyb compat registry.example.com/team/job:v1
  kyb compat registry.example.com/team/job:v1 --facts worker-7.json --allow-device /dev/kvm";

/// Say whether a checkpoint can be restored on this node, and if not, why.
///
/// The rules are those by which the agent refuses, and each has a name in the specification. Nobody
/// is trusted and nothing is verified here; signatures are for `kyb verify`. The allowances are
/// those that `kyb restore` would be given.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(super) struct Compat {
    /// The checkpoint.
    #[arg(value_name = "REF")]
    reference: Location,
    /// The facts of another node, as its `kyb facts --json` prints them.
    #[arg(long, value_name = "FILE")]
    facts: Option<PathBuf>,
    /// The container image that the new container is made of, when it is not the checkpoint's own.
    #[arg(long, value_name = "DIGEST")]
    image: Option<Digest>,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    source: FactsSource,
    #[command(flatten)]
    offer: Offer,
}

impl Compat {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let node = match &self.facts {
            Some(path) => {
                let path = path.clone();
                aside(move || read(&path)).await.map_err(Failure::failed)??
            }
            None => self.source.report().await?.facts,
        };
        let store = self.connection.open(&self.reference).await?;
        let checkpoint = Checkpoint::open(&store, &self.reference).await?;
        let offer = compat::Offer {
            mounts: self.offer.mounts.into_iter().map(|mount| mount.destination).collect(),
            devices: self.offer.devices,
            host_namespaces: self.offer.host_namespaces,
        };
        let target = Target { node: &node, image: self.image.as_ref(), offer };
        let report = examine(&Subject::of(&checkpoint), &target);
        let verdict = report.verdict();
        let expired = in_time(&checkpoint.config, Timestamp::now()).err();
        let facts = json!({
            "digest": checkpoint.stored.descriptor.digest,
            "verdict": verdict,
            "expired": expired.as_ref().map(ToString::to_string),
            "rules": report.findings,
            "gpuPairs": report.gpu_pairs,
        });
        let over = expired.as_ref().map_or_else(String::new, |over| format!("expired: {over}\n"));
        terminal.print(&facts, &(over + &text(&report))).map_err(Failure::failed)?;
        if expired.is_some() {
            return Err(Failure::Answered(2, "expired".into()));
        }
        match verdict {
            Verdict::Compatible => Ok(()),
            Verdict::Incompatible => Err(Failure::Answered(2, "incompatible".into())),
            Verdict::Unknown => Err(Failure::Answered(UNKNOWN, "not known".into())),
        }
    }
}

/// Reads a node's facts.
fn read(path: &Path) -> Result<NodeFacts, Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::usage(format!("--facts {}: {error}", path.display()))
    };
    let file = fs_err::File::open(path).map_err(Failure::usage)?;
    let mut content = Vec::new();
    // A pipe does not say how much there is.
    file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut content).map_err(Failure::usage)?;
    if u64::try_from(content.len()).is_ok_and(|length| length > CONFIG_BYTES_MAX) {
        return Err(wrong(&format!("it has more than {CONFIG_BYTES_MAX} bytes")));
    }
    document::parse(&content).map_err(|error| wrong(&error))
}

fn text(report: &Report) -> String {
    let mut text = match report.verdict() {
        Verdict::Compatible => "compatible\n".to_owned(),
        Verdict::Incompatible => "incompatible\n".to_owned(),
        Verdict::Unknown => "not known: a fact that decides is missing\n".to_owned(),
    };
    let mut line = |word: &str, found: &Finding| {
        // Writing to a string does not fail.
        let _written = writeln!(text, "{word:<8} {:<16} {}", found.rule, found.message);
    };
    let weights = [
        (Severity::Refuse, Outcome::Broken, "refused"),
        (Severity::Refuse, Outcome::Unknown, "unknown"),
        (Severity::Warn, Outcome::Broken, "warning"),
        (Severity::Warn, Outcome::Unknown, "unknown"),
        (Severity::Info, Outcome::Broken, "note"),
    ];
    for (severity, outcome, word) in weights {
        let chosen = |found: &&Finding| found.severity == severity && found.outcome == outcome;
        report.findings.iter().filter(chosen).for_each(|found| line(word, found));
    }
    for pair in &report.gpu_pairs {
        let _written = writeln!(text, "{:<8} {} -> {}", "gpu", pair.from, pair.to);
    }
    text
}
