//! `kybernate-agent`: parse, build, serve, drain.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kybernate_agent::config::ServeArgs;
use kybernate_agent::guardian::GuardianArgs;
use kybernate_agent::{gate, guardian, serve};
use kybernate_spec::chain;
use tracing_subscriber::EnvFilter;

/// `EX_USAGE` of sysexits(3): the operator must change something, a restart will not help.
const EXIT_USAGE: u8 = 64;

/// Takes and restores checkpoints of this node's containers, through containerd.
#[derive(Debug, Parser)]
#[command(
    name = "kybernate-agent",
    version,
    after_help = "Example:\n  kybernate-agent serve --config /etc/kybernate/agent.toml"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the agent's API on a unix socket.
    #[command(after_help = "Example:\n  kybernate-agent serve --root /var/lib/kybernate")]
    Serve(ServeArgs),
    /// Bring a paused container back when its agent cannot (started by the agent itself).
    #[command(hide = true)]
    Guardian(GuardianArgs),
    /// Decode CRIU's images without privileges (started by the agent itself).
    #[command(hide = true)]
    Gate,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    if !matches!(arguments.command, Command::Gate) {
        log();
    }
    match arguments.command {
        Command::Serve(arguments) => run(arguments),
        Command::Guardian(arguments) => guardian::run(arguments),
        Command::Gate => gate::run(),
    }
}

#[tokio::main]
async fn run(arguments: ServeArgs) -> ExitCode {
    // First of all: as another user even the keys it is configured with cannot be read.
    if !rustix::process::geteuid().is_root() {
        tracing::error!(
            "the agent needs root: it pauses, dumps and restores other people's processes"
        );
        return ExitCode::FAILURE;
    }
    let config = match arguments.validate() {
        Ok(config) => config,
        Err(wrong) => {
            for error in wrong {
                tracing::error!("{}", chain(&error));
            }
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match serve::serve(config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = %chain(&error), "the agent stopped");
            ExitCode::FAILURE
        }
    }
}

fn usage(error: &clap::Error) -> ExitCode {
    // Nobody is left to tell when even this cannot be written.
    error.print().unwrap_or_default();
    if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
}

fn log() {
    let filter =
        EnvFilter::try_from_env("KYBERNATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
