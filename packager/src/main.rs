//! `kyb`: takes, moves, inspects and restores checkpoints.

mod cli;
mod terminal;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{Cli, Failure};
use crate::terminal::Terminal;

/// Exit code of wrong usage, as sysexits.h has it; clap would say 2, which means refused here.
const USAGE: u8 = 64;

/// How long work on other threads may take to clean up after an interruption.
const GRACE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => {
            // Help goes to stdout and succeeds. Nobody is left to tell when printing fails.
            let _printed = told.print();
            return if told.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let terminal = Terminal::new(cli.json());
    let ended = start(cli, &terminal);
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            terminal::say(&failure.to_string());
            terminal.tell(&failure.told());
            failure.exit_code()
        }
    }
}

fn start(cli: Cli, terminal: &Terminal) -> Result<(), Failure> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing::Level::WARN.into())
                .with_env_var("KYB_LOG")
                .from_env_lossy(),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .init();
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    let ended = runtime.block_on(run(cli, terminal));
    runtime.shutdown_timeout(GRACE);
    ended
}

/// Runs the command until it ends or is interrupted: then it is dropped, and with it whatever
/// temporary files it holds.
async fn run(cli: Cli, terminal: &Terminal) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    tokio::select! {
        ended = cli.run(terminal) => ended,
        _ = interrupt.recv() => Err(Failure::failed("interrupted")),
        _ = terminate.recv() => Err(Failure::failed("terminated")),
    }
}
