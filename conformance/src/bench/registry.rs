//! Our registry's figures beside others', in one run.
//!
//! Every round measures every registry with the same client, one after the other; what counts is
//! the ratio within a round. [`server`] starts them, [`load`] and [`wire`] are the client,
//! [`figures`] says what is measured, [`table`] makes a table of it. Nothing is asserted on time.

mod figures;
mod load;
pub(super) mod server;
pub(super) mod table;
mod wire;

use std::path::Path;

use anyhow::Context as _;
use rustix::fs::sync;

use self::figures::Part;
use self::server::{Program, Server};
use self::table::Table;

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Plan {
    /// How often everything is measured.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Only our registry.
    #[arg(long)]
    alone: bool,
    /// How many tags the registry has that is started anew.
    #[arg(long, default_value_t = 100_000)]
    tags: u32,
    /// Print every round's figures as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Measures, and prints a table or JSON.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub(crate) fn run(bin: &Path, cache: &Path, plan: &Plan) -> anyhow::Result<()> {
    // On the disk, as registries are; removed at the end.
    let home = tempfile::Builder::new().prefix("kybernate-bench-").tempdir_in("/var/tmp")?;
    let mut programs = Program::all(bin, cache);
    programs.retain(|program| program.is_ours() || !plan.alone);
    let parts: Vec<Part> = Part::ALL.into_iter().filter(|part| plan.wants(*part)).collect();
    let mut table = Table::default();
    let mut running = Vec::new();
    for program in &programs {
        let root = home.path().join(program.name.replace(' ', "-"));
        running.push((program, program.start(&root)?));
    }
    for round in 0..=plan.rounds {
        for (program, server) in &running {
            for part in &parts {
                let figures = measure(*part, server, round);
                let figures = figures.with_context(|| format!("{}, {part:?}", program.name))?;
                // A first round warms up: the first touch of memory costs several times the later.
                if round > 0 {
                    table.add(&program.name, figures);
                }
            }
        }
        crate::cli::say(&format!("round {round}/{} is done", plan.rounds));
    }
    running.into_iter().try_for_each(|(_, server)| server.stop())?;
    if plan.wants(Part::Start) {
        for program in programs.iter().filter(|program| program.is_ours()) {
            crate::cli::say(&format!("pushing {} tags", plan.tags));
            let root = home.path().join("tags");
            for figures in figures::starts(program, &root, plan.tags, plan.rounds)? {
                table.add(&program.name, figures);
            }
        }
    }
    if plan.json {
        println!("{}", serde_json::to_string_pretty(&table.json())?);
    } else {
        println!("{}", table.text());
    }
    Ok(())
}

fn measure(part: Part, server: &Server, round: u32) -> anyhow::Result<Vec<(String, f64)>> {
    // What others have written is on the disk before.
    sync();
    figures::measure(part, server, u64::from(round))
}

impl Plan {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}
