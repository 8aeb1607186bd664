//! `kyb inspect`

mod inside;

use clap::Args;
use kybernate_packager::inspect::{Inspected, KnownFrom, Look, Starts, inspect};
use kybernate_spec::Location;

pub(super) use self::inside::memory_kind;
use super::page::{Cell, Page, Table, Tone};
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Rows shown of each table.
const ROWS: usize = 24;

/// Show what a checkpoint says about itself, and what is inside.
///
/// Facts, sizes and signatures; processes, threads, memory by kind, open files, sockets,
/// namespaces, mounts, locks, from CRIU's images. Pages are not moved, but for those that hold the
/// first process's arguments, and nothing is verified: `kyb verify` does that.
///
/// Values of the environment and arguments that look like secrets are masked.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb inspect registry.example.com/team/job:v1\n  \
    kyb inspect oci:./job:v1 --json | jq '.inside.sockets[] | select(.state == \"listen\")'")]
pub(super) struct Inspect {
    /// What to look at.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Only the facts and the parts: a few KB are moved.
    #[arg(long)]
    facts_only: bool,
    /// Show everything; by default long lists are cut.
    #[arg(long)]
    all: bool,
    /// Show values that look like secrets, too.
    #[arg(long)]
    show_secrets: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Inspect {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let store = self.connection.open(&self.reference).await?;
        let look = Look { facts_only: self.facts_only, show_secrets: self.show_secrets };
        let inspected = inspect(&store, &self.reference, look).await?;
        let rows = if self.all { usize::MAX } else { ROWS };
        terminal.print_page(&inspected, &tell(&inspected, rows)).map_err(Failure::failed)
    }
}

fn tell(inspected: &Inspected, rows: usize) -> Page {
    let mut page = Page::default();
    facts(&mut page, inspected);
    if let Some(starts) = &inspected.starts {
        environment(&mut page, starts, rows);
    }
    if let Some(inside) = &inspected.inside {
        inside::tell(&mut page, inside, rows);
    }
    page
}

fn facts(page: &mut Page, inspected: &Inspected) {
    let config = &inspected.config;
    page.fact("checkpoint", inspected.digest.to_string());
    page.fact("format", &config.version);
    page.fact_if("taken", config.created.as_deref());
    page.fact_if("not after", config.not_after.as_deref());
    let source = &config.source;
    page.fact_if("container", source.container.as_deref());
    page.fact_if("namespace", source.namespace.as_deref());
    page.fact_if("cluster", source.cluster.as_deref());
    page.fact_if("image", source.image.as_deref());
    match &config.node {
        None => page.fact("node", Cell::new("unknown: packed without facts", Tone::Odd)),
        Some(node) => page.fact(
            "node",
            format!(
                "{} {}, kernel {}, cgroup {}, CRIU {}, {}, containerd {}",
                node.os,
                node.architecture,
                node.kernel,
                node.cgroup,
                node.criu,
                node.runtime,
                node.containerd
            ),
        ),
    }
    let lineage = match (&config.lineage.base, config.lineage.generation) {
        (None, _) => "full: compared with no other".to_owned(),
        (Some(base), 0) => format!("full, written anew; compared with {base}"),
        (Some(base), generation) => format!("generation {generation}, based on {base}"),
    };
    page.fact("lineage", lineage);
    let sizes = &config.sizes;
    page.fact(
        "content",
        format!(
            "{} processes, {} threads; {} in the dump, {} of pages stored",
            sizes.processes,
            sizes.threads,
            bytes(sizes.dump_bytes),
            bytes(sizes.page_bytes)
        ),
    );
    for layer in &inspected.layers {
        let title = layer.title.as_deref().unwrap_or("-");
        page.fact("  part", format!("{title} {} {}", bytes(layer.bytes), layer.digest));
    }
    let runnable = inspected.runnable.as_ref().map_or_else(
        || "none".to_owned(),
        |layers| format!("{} layers, {}", layers.len(), bytes(inspected.runnable_bytes)),
    );
    page.fact("runnable", runnable);
    let signatures = match inspected.unverified_signatures.len() {
        0 => Cell::new("none", Tone::Odd),
        count => Cell::new(&format!("{count}, not verified here"), Tone::Plain),
    };
    page.fact("signatures", signatures);
    commands(page, inspected);
}

/// Tells what ran, and what the image would run.
fn commands(page: &mut Page, inspected: &Inspected) {
    if let Some(ran) = &inspected.ran {
        let command = ran.command.join(" ");
        let told = match ran.known_from {
            KnownFrom::Memory => Cell::new(&command, Tone::Plain),
            KnownFrom::Program => {
                Cell::new(&format!("{command} (its arguments are not known)"), Tone::Plain)
            }
            KnownFrom::Image => {
                let text = format!("{command} (the image's; what ran is not known)");
                Cell::new(&text, Tone::Odd)
            }
        };
        page.fact("command", told);
    }
    let is_new = inspected.ran.as_ref().is_some_and(|ran| ran.known_from != KnownFrom::Image);
    if let Some(starts) = inspected.starts.as_ref().filter(|starts| !starts.command.is_empty())
        && is_new
    {
        page.fact("image runs", starts.command.join(" "));
    }
}

fn environment(page: &mut Page, starts: &Starts, rows: usize) {
    let mut table = Table::new(&["NAME", "VALUE"], rows);
    for variable in &starts.environment {
        let tone = if variable.masked { Tone::Odd } else { Tone::Plain };
        table.row(vec![(&variable.name).into(), Cell::new(&variable.value, tone)]);
    }
    page.table("ENVIRONMENT OF THE IMAGE", table);
}
