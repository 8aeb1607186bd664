//! `kybernate-registry`: parse, build, serve, drain.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use kybernate_registry::config::{Args, Command, Config};
use kybernate_registry::server::Server;
use kybernate_registry::store::Store;
use kybernate_registry::telemetry;
use kybernate_spec::chain;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// `EX_USAGE` of sysexits(3): the operator must change something, a restart will not help.
const EXIT_USAGE: u8 = 64;
/// Below the 30 s after which Kubernetes kills.
const GRACE: Duration = Duration::from_secs(25);
/// Threads that wait for the disk; more of them would only queue there.
const BLOCKING_THREADS_MAX: usize = 64;

#[expect(clippy::print_stderr, reason = "nothing is logging yet")]
fn main() -> ExitCode {
    let Args { command: Command::Serve(arguments) } = match Args::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let told = error.print();
            let good = told.is_ok() && !error.use_stderr();
            return if good { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) };
        }
    };
    let config = match arguments.validate() {
        Ok(config) => config,
        Err(wrong) => {
            for error in wrong {
                eprintln!("kybernate-registry: {}", chain(&error));
            }
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "registry stopped");
            ExitCode::FAILURE
        }
    }
}

fn serve(config: Config) -> anyhow::Result<()> {
    telemetry::start(config.log_format, config.log);
    // Each connection and each blob being read is an open file.
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files })
        .context("failed to raise the limit of open files")?;
    let store = Store::open(&config.root)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    runtime.block_on(async {
        let listener = TcpListener::bind(config.listen)
            .await
            .with_context(|| format!("failed to listen on {}", config.listen))?;
        let server = Server::start(store, listener).context("failed to serve")?;
        let (mut term, mut int) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        writeln!(std::io::stdout(), "listening on {}", server.address())?;
        tracing::info!(address = %server.address(), root = ?config.root, "serving");
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        tracing::info!("draining");
        let drained = server.shut_down(GRACE).await;
        tracing::info!(drained, "stopped");
        Ok(())
    })
}
