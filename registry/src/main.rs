//! `kybernate-registry`: parse, build, serve, drain.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use kybernate_registry::admin::Request;
use kybernate_registry::cli::{Args, Command};
use kybernate_registry::config::{Config, Settings};
use kybernate_registry::maintain::{Outcome, maintain};
use kybernate_registry::server::{Files, Server, StartError};
use kybernate_registry::store::Store;
use kybernate_registry::telemetry;
use kybernate_registry::trace::Traces;
use kybernate_spec::chain;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// `EX_USAGE` of sysexits(3): the operator must change something, a restart will not help.
const EXIT_USAGE: u8 = 64;
/// Something does not have the digest it should, is not there, or cannot be read.
const EXIT_REFUSED: u8 = 2;
/// Threads that wait for the disk; more of them would only queue there.
const BLOCKING_THREADS_MAX: usize = 64;

fn main() -> ExitCode {
    let Args { command } = match Args::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let told = error.print();
            let good = told.is_ok() && !error.use_stderr();
            return if good { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) };
        }
    };
    match run(command) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "registry stopped");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(settings) => match Config::load(&settings) {
            Ok(config) => serve(config),
            Err(wrong) => Ok(wrong_usage(&wrong)),
        },
        Command::Gc { settings, dry_run, noted, json } => {
            let request = Request::Gc { dry_run, everything: !noted };
            maintain_store(&settings.0, |_| request, json)
        }
        Command::Scrub { settings, restart, json } => {
            // A server has a rate of its own; what is typed here wins over it.
            let rate = settings.0.is_given("scrub-rate");
            let request = |config: &Config| Request::Scrub {
                restart,
                rate: rate.then_some(config.scrub.rate.0),
            };
            maintain_store(&settings.0, request, json)
        }
        Command::Reindex { settings, json } => {
            maintain_store(&settings.0, |_| Request::Reindex, json)
        }
        Command::Verify { file } => {
            let text = match fs_err::read_to_string(&file) {
                Ok(text) => text,
                Err(error) => return Ok(wrong_usage(&[error])),
            };
            match Config::read(&file, &text) {
                Ok(config) => match Files::read(&config) {
                    Ok(good) => {
                        for doubt in config.doubts().into_iter().chain(good.doubts()) {
                            writeln!(io::stderr(), "warning: {doubt}")?;
                        }
                        writeln!(io::stdout(), "{}: good", file.display())?;
                    }
                    Err(wrong) => return Ok(wrong_usage(&wrong)),
                },
                Err(wrong) => return Ok(wrong_usage(&wrong)),
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Schema => {
            let schema = serde_json::to_string_pretty(&Config::schema())?;
            writeln!(io::stdout(), "{schema}")?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

#[expect(clippy::print_stderr, reason = "it answers what was typed, and is no line of a log")]
fn wrong_usage(wrong: &[impl std::fmt::Display]) -> ExitCode {
    for mistake in wrong {
        eprintln!("{mistake}");
    }
    ExitCode::from(EXIT_USAGE)
}

fn maintain_store(
    settings: &Settings,
    request: impl FnOnce(&Config) -> Request,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let config = match Config::load(settings) {
        Ok(config) => config,
        Err(wrong) => return Ok(wrong_usage(&wrong)),
    };
    telemetry::start(&config.log);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("failed to start the runtime")?;
    let mut out = io::stdout().lock();
    let outcome = runtime.block_on(maintain(&config, &request(&config), json, &mut out));
    let outcome = match outcome {
        Err(error) if error.is_usage() => return Ok(wrong_usage(&[error])),
        outcome => outcome.context("maintenance failed")?,
    };
    Ok(match outcome {
        Outcome::Good => ExitCode::SUCCESS,
        Outcome::Found => ExitCode::from(EXIT_REFUSED),
        Outcome::Stopped => ExitCode::FAILURE,
    })
}

fn serve(config: Config) -> anyhow::Result<ExitCode> {
    telemetry::start(&config.log);
    for doubt in config.doubts() {
        tracing::warn!("{doubt}");
    }
    // Each connection and each blob being read is an open file.
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files })
        .context("failed to raise the limit of open files")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    let traces = {
        let _within = runtime.enter();
        match Traces::start(&config.trace) {
            Err(error) => return Ok(wrong_usage(&[chain(&error)])),
            Ok(traces) => traces,
        }
    };
    // Addresses first: where one is taken, nothing is made on the disk.
    let (listener, operations) = runtime.block_on(listen(&config))?;
    let store = match Store::open_within(&config.root, config.root_wait.0) {
        Err(error) if error.is_usage() => return Ok(wrong_usage(&[error])),
        opened => opened?,
    };
    runtime.block_on(async {
        let server = match Server::start(&config, store, listener) {
            Err(StartError::Mistakes(wrong)) => return Ok(wrong_usage(&wrong)),
            started => started.context("failed to serve")?,
        };
        if let Some(listener) = operations {
            tracing::info!(address = %listener.local_addr()?, "serving figures and health");
            server.serve_operations(listener);
        }
        let signals = Signals::take()?;
        writeln!(io::stdout(), "listening on {}", server.address())?;
        tracing::info!(address = %server.address(), root = ?config.root, "serving");
        if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
            tracing::warn!(%error, "failed to tell the service manager");
        }
        signals.end(&server, config.connections.announce.0).await;
        tracing::info!("draining");
        let drained = server.shut_down(config.connections.drain.0).await;
        if let Some(traces) = traces {
            traces.flush().await;
        }
        tracing::info!(drained, "stopped");
        Ok(ExitCode::SUCCESS)
    })
}

/// What a registry is told while it serves.
struct Signals {
    term: Signal,
    int: Signal,
    hangup: Signal,
}

impl Signals {
    fn take() -> io::Result<Self> {
        let [term, int, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self { term: term?, int: int?, hangup: hangup? })
    }

    /// Returns when the registry is to accept nothing more.
    async fn end(self, server: &Server, announce: Duration) {
        let Self { mut term, mut int, mut hangup } = self;
        loop {
            tokio::select! {
                _ = term.recv() => break,
                // Somebody at a terminal: nobody has to be told.
                _ = int.recv() => return,
                // Such a one has closed it; or somebody has replaced a file and wants it read.
                _ = hangup.recv() => if io::stdin().is_terminal() {
                    return;
                } else {
                    tracing::info!("a hang-up changes nothing: files are read again when they change");
                }
            }
        }
        server.announce_end();
        tracing::info!(?announce, "not ready any more");
        let again = async {
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        };
        let _over_or_asked_again = tokio::time::timeout(announce, again).await;
    }
}

/// Takes the registry's address, and that of figures where they have their own.
async fn listen(config: &Config) -> anyhow::Result<(TcpListener, Option<TcpListener>)> {
    let listener = TcpListener::bind(config.listen.as_str())
        .await
        .with_context(|| format!("failed to listen on {}", config.listen))?;
    let Some(address) = &config.metrics.listen else { return Ok((listener, None)) };
    let operations = TcpListener::bind(address.as_str())
        .await
        .with_context(|| format!("failed to listen on {address} for metrics"))?;
    Ok((listener, Some(operations)))
}
