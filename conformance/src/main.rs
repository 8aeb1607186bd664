//! `kybernate-conformance`: the testbed, the demo and the benchmark as commands.

use std::process::ExitCode;

use clap::Parser as _;
use kybernate_conformance::cli::{Cli, run};

/// `EX_USAGE` of sysexits(3).
const EXIT_USAGE: u8 = 64;

#[expect(clippy::print_stderr, reason = "this is where a failure is told")]
fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let wrong = error.use_stderr();
            drop(error.print());
            return if wrong { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kybernate-conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}
