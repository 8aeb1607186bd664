//! `kyb`: takes, moves, inspects and restores checkpoints.

mod cli;
mod interrupt;
mod terminal;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory as _, FromArgMatches as _};
use kybernate_packager::spans::{Span, Spans};
use kybernate_packager::trace_parent::TraceParent;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::cli::{Cli, Failure, better};
use crate::terminal::Terminal;

/// How long work on other threads may take to clean up after an interruption.
const GRACE: Duration = Duration::from_secs(5);

/// Exit code when nobody reads stdout any more: that of a program that SIGPIPE has ended, as shells
/// tell it. Ours ends by itself, after what it has under way.
const UNREAD: u8 = 141;

/// What is logged.
const LOG: &str = "KYB_LOG";

/// Certificates that are not accepted are told as what a command ends with.
const LOG_DEFAULT: &str = "warn,rustls_platform_verifier=off";

fn main() -> ExitCode {
    let (terminal, ended) = match parse() {
        Ok((cli, name)) => {
            let terminal = Terminal::new(cli.json());
            let ended = start(cli, name, &terminal);
            (terminal, ended)
        }
        Err(told) => {
            // Help goes to stdout and succeeds.
            let printed = told.print().and_then(|()| std::io::stdout().flush());
            if !told.use_stderr() {
                return if printed.is_err() { UNREAD.into() } else { ExitCode::SUCCESS };
            }
            // What was wrong may have come before what was right.
            let json = std::env::args_os().any(|argument| argument == "--json");
            let text = told.to_string();
            let text = text.trim_start_matches("error: ").trim_end().to_owned();
            (Terminal::new(json), Err(Failure::Shown(text.into())))
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if terminal.is_unread() => UNREAD.into(),
        Err(failure) => {
            terminal.fail(&failure);
            ExitCode::from(failure.code())
        }
    }
}

/// Understands the command line. Returns also what its span is called.
fn parse() -> Result<(Cli, String), clap::Error> {
    let matches = Cli::command().try_get_matches().map_err(better)?;
    let name = format!("kyb {}", matches.subcommand_name().unwrap_or_default());
    let cli = Cli::from_arg_matches(&matches).map_err(better)?;
    cli.help().map_or(Ok((cli, name)), Err)
}

fn start(cli: Cli, name: String, terminal: &Terminal) -> Result<(), Failure> {
    let log = EnvFilter::builder().with_default_directive(tracing::Level::WARN.into());
    let log = if std::env::var_os(LOG).is_none_or(|log| log.is_empty()) {
        log.parse_lossy(LOG_DEFAULT)
    } else {
        log.with_env_var(LOG).from_env_lossy()
    };
    tracing_subscriber::fmt()
        .with_env_filter(log)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        // Nobody is left to tell when nobody reads stderr.
        .log_internal_errors(false)
        .init();
    kybernate_packager::open_files::raise_limit();
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::failed)?;
    let ended = runtime.block_on(traced(cli, name, terminal));
    runtime.shutdown_timeout(GRACE);
    ended
}

/// Returns the place in a trace that the command has, as tools are told it for OpenTelemetry.
fn parent() -> Option<TraceParent> {
    let given = std::env::var_os(TraceParent::VARIABLE).filter(|text| !text.is_empty())?;
    let parsed = given.to_string_lossy().parse();
    if parsed.is_err() {
        tracing::warn!("the TRACEPARENT in the environment is none, and left out");
    }
    parsed.ok()
}

/// Runs a command as one span.
async fn traced(cli: Cli, name: String, terminal: &Terminal) -> Result<(), Failure> {
    let spans = Spans::start("kyb").map_err(Failure::usage)?;
    let span = Span::of_client(name, parent());
    let trace = span.place();
    tracing::info!(trace_id = trace.trace_id(), "begins");
    let ended = trace.around(run(cli, terminal)).await;
    match &ended {
        Ok(()) => drop(span),
        Err(failure) => span.fail(failure.word()),
    }
    if let Some(spans) = spans {
        spans.flush().await;
    }
    ended
}

/// Runs the command until it ends or is interrupted: then it is dropped, and with it whatever
/// temporary files it holds.
async fn run(cli: Cli, terminal: &Terminal) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    let mut running = std::pin::pin!(cli.run(terminal));
    loop {
        tokio::select! {
            ended = &mut running => return ended,
            _ = interrupt.recv() => if !terminal.interrupts().deliver() {
                return Err(Failure::failed("interrupted"));
            },
            _ = terminate.recv() => if !terminal.interrupts().deliver() {
                return Err(Failure::failed("terminated"));
            },
        }
    }
}
