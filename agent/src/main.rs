//! `kybernate-agent`: parse, build, serve, drain.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kybernate_agent::config::{Config, LogFormat, ServeArgs};
use kybernate_agent::guardian::GuardianArgs;
use kybernate_agent::rescue::RescueArgs;
use kybernate_agent::{gate, gpu, guardian, memory, rescue, serve};
use kybernate_packager::spans::Spans;
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
    /// Say everything that is wrong with a configuration file, keys included.
    #[command(after_help = "Example:\n  kybernate-agent verify /etc/kybernate/agent.toml")]
    Verify {
        /// Configuration file (TOML).
        file: PathBuf,
    },
    /// Print the JSON schema of the configuration file.
    #[command(after_help = "Example:\n  kybernate-agent schema >agent.schema.json")]
    Schema,
    /// Let containers run again that an agent which has ended left paused.
    ///
    /// The next agent does that by itself, first of all. A service manager runs this for the case that
    /// none can start. It does nothing while an agent runs.
    #[command(after_help = "Example:\n  kybernate-agent rescue --config /etc/kybernate/agent.toml")]
    Rescue(RescueArgs),
    /// Bring a paused container back when its agent cannot (started by the agent itself).
    #[command(hide = true)]
    Guardian(GuardianArgs),
    /// Ask the GPU's driver for one thing (started by the agent itself).
    #[command(hide = true)]
    Gpu,
    /// Decode CRIU's images without privileges (started by the agent itself).
    #[command(hide = true)]
    Gate,
}

fn main() -> ExitCode {
    memory::share();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    match arguments.command {
        Command::Serve(arguments) => run(arguments),
        Command::Verify { file } => verify(file),
        Command::Schema => print(&format!("{:#}", Config::schema())),
        Command::Guardian(arguments) => {
            log(LogFormat::Text);
            guardian::run(arguments)
        }
        Command::Rescue(arguments) => {
            log(LogFormat::Text);
            rescue::run(arguments)
        }
        Command::Gate => gate::run(),
        Command::Gpu => gpu::run(),
    }
}

#[tokio::main]
async fn run(arguments: ServeArgs) -> ExitCode {
    let format = arguments.log_format.unwrap_or_default();
    // First of all: as another user even the keys it is configured with cannot be read.
    if !rustix::process::geteuid().is_root() {
        log(format);
        tracing::error!(
            "the agent needs root: it pauses, dumps and restores other people's processes"
        );
        return ExitCode::FAILURE;
    }
    let config = match arguments.validate() {
        Ok(config) => {
            log(config.log_format);
            config
        }
        Err(wrong) => {
            log(format);
            for error in wrong {
                tracing::error!("{}", chain(&error));
            }
            return ExitCode::from(EXIT_USAGE);
        }
    };
    kybernate_packager::open_files::raise_limit();
    let spans = match Spans::start("kybernate-agent") {
        Ok(spans) => spans,
        Err(error) => {
            tracing::error!("{}", chain(&error));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let served = serve::serve(config).await;
    if let Some(spans) = spans {
        spans.flush().await;
    }
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = %chain(&error), "the agent stopped");
            ExitCode::FAILURE
        }
    }
}

fn verify(file: PathBuf) -> ExitCode {
    log(LogFormat::Text);
    let good = format!("{}: good", file.display());
    // The file alone: what the environment of whoever asks has is not its fault.
    match Config::read(file) {
        Ok(_config) => print(&good),
        Err(wrong) => {
            for error in wrong {
                tracing::error!("{}", chain(&error));
            }
            ExitCode::from(EXIT_USAGE)
        }
    }
}

fn print(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_closed) => ExitCode::FAILURE,
    }
}

fn usage(error: &clap::Error) -> ExitCode {
    // Nobody is left to tell when even this cannot be written.
    error.print().unwrap_or_default();
    if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
}

fn log(format: LogFormat) {
    // The library says of each file system that it could not be unmounted: that was done already.
    let filter = EnvFilter::try_from_env("KYBERNATE_LOG")
        .unwrap_or_else(|_| EnvFilter::new("info,fuser=off"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
