//! What the conformance suite finds in our registry and in others, side by side.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::registry::server::Program;
use crate::oci::check::Edition;
use crate::oci::client::Client;
use crate::oci::report::{self, Counts, Report};
use crate::oci::runner::Settings;
use crate::oci::{JOBS, against, block_on, random_namespace};

/// One registry, tested in both editions.
struct Column {
    name: String,
    reports: [Report; 2],
}

/// Tests every registry there is, and prints a table or JSON.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub(crate) fn run(bin: &Path, cache: &Path, json: bool) -> anyhow::Result<()> {
    let home = tempfile::Builder::new().prefix("kybernate-bench-").tempdir_in("/var/tmp")?;
    let mut columns = Vec::new();
    for program in Program::all(bin, cache) {
        crate::cli::say(&format!("testing {}", program.name));
        let server = program.start(&home.path().join(program.name.replace(' ', "-")))?;
        let url = format!("http://{}", server.address);
        let reports = [test(&url, Edition::Stable)?, test(&url, Edition::Dev)?];
        server.stop()?;
        columns.push(Column { name: program.name, reports });
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&document(&columns))?);
    } else {
        println!("{}", table(&columns));
    }
    Ok(())
}

fn test(url: &str, edition: Edition) -> anyhow::Result<Report> {
    let namespace = random_namespace()?;
    let settings = Settings { edition, jobs: JOBS, namespace, filters: Vec::new() };
    block_on(against(Client::new(url, None)?, &settings))
}

/// A table in Markdown: by section for the main branch, which has all of them, then the sums.
fn table(columns: &[Column]) -> String {
    let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    let mut text = format!("| pass / fail / warn / skip | {} |\n|---|", names.join(" | "));
    text += &"---|".repeat(columns.len());
    text.push('\n');
    let of = |place: usize, section: Option<&str>| {
        let cells = columns.iter().map(|column| {
            let report = column.reports.get(place)?;
            let sections = report.sections();
            Some(match section {
                None => report.counts(),
                Some(wanted) => sections.iter().find(|(name, _)| *name == wanted)?.1,
            })
        });
        cells.map(|counts| counts.map_or_else(|| "–".to_owned(), cell)).collect::<Vec<_>>()
    };
    let sections = columns.first().map(|column| {
        let [_, dev] = &column.reports;
        dev.sections()
    });
    for (section, _) in sections.unwrap_or_default() {
        text += &line(section, &of(1, Some(section)));
    }
    for (place, edition) in [Edition::Stable, Edition::Dev].into_iter().enumerate() {
        text += &line(&format!("**{}**", report::name(edition)), &of(place, None));
    }
    text
}

fn line(first: &str, cells: &[String]) -> String {
    format!("| {first} | {} |\n", cells.join(" | "))
}

fn cell(counts: Counts) -> String {
    let Counts { passed, failed, warned, skipped } = counts;
    format!("{passed} / {failed} / {warned} / {skipped}")
}

fn document(columns: &[Column]) -> Value {
    let registries = columns.iter().map(|Column { name, reports }| {
        let editions = reports.iter().map(|report| {
            let counts = json!(report.counts());
            (report::name(report.edition).to_owned(), counts)
        });
        (name.clone(), Value::Object(editions.collect()))
    });
    Value::Object(registries.collect::<Map<_, _>>())
}
