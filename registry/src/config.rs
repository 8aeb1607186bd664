//! Configuration, read once and proven before the first socket is opened.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;

use tracing_subscriber::EnvFilter;

/// The command line of `kybernate-registry`.
#[derive(Debug, clap::Parser)]
#[command(version, about = "An OCI registry on a directory")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `kybernate-registry` can do.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Serve a registry.
    ///
    /// Prints `listening on ADDRESS` once it serves. SIGTERM and SIGINT let requests finish first.
    #[command(
        after_help = "Example:\n  kybernate-registry serve --root ./registry --listen 0.0.0.0:5000"
    )]
    Serve(ServeArgs),
}

/// The options of `serve`; each has an environment variable of the same name.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Directory that holds everything; made when it is missing.
    #[arg(
        long,
        env = "KYBERNATE_REGISTRY_ROOT",
        value_name = "DIR",
        default_value = "/var/lib/kybernate-registry"
    )]
    root: PathBuf,
    /// Address to serve on; port 0 takes a free one.
    #[arg(
        long,
        env = "KYBERNATE_REGISTRY_LISTEN",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:5000"
    )]
    listen: String,
    /// How log lines look.
    #[arg(
        long,
        env = "KYBERNATE_REGISTRY_LOG_FORMAT",
        value_name = "FORMAT",
        default_value = "text"
    )]
    log_format: String,
    /// What is logged: a level, or `target=level` rules joined by commas.
    #[arg(long, env = "KYBERNATE_REGISTRY_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object per line.
    Json,
}

/// A configuration that can work.
#[derive(Debug)]
#[non_exhaustive]
pub struct Config {
    /// Directory that holds everything.
    pub root: PathBuf,
    /// Address to serve on.
    pub listen: SocketAddr,
    /// How log lines look.
    pub log_format: LogFormat,
    /// What is logged.
    pub log: EnvFilter,
}

/// One thing wrong with the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The root is empty.
    #[error("--root must not be empty")]
    EmptyRoot,
    /// The root is something else than a directory.
    #[error("--root {0:?} is not a directory")]
    RootIsFile(PathBuf),
    /// The address names no socket.
    #[error("--listen {0:?} is not an address such as 127.0.0.1:5000")]
    Listen(String, #[source] Option<std::io::Error>),
    /// There is no such format.
    #[error("--log-format {0:?} is neither text nor json")]
    LogFormat(String),
    /// The filter cannot be read.
    #[error("--log {0:?} is not a filter such as info or kybernate_registry=debug")]
    Log(String, #[source] tracing_subscriber::filter::ParseError),
}

impl ServeArgs {
    /// Checks the options and returns everything that is wrong at once.
    pub fn validate(self) -> Result<Config, Vec<ConfigError>> {
        let Self { root, listen, log_format, log } = self;
        let root = if root.as_os_str().is_empty() {
            Err(ConfigError::EmptyRoot)
        } else if root.exists() && !root.is_dir() {
            Err(ConfigError::RootIsFile(root))
        } else {
            Ok(root)
        };
        let address = match listen.to_socket_addrs() {
            Ok(mut addresses) => addresses.next().ok_or(ConfigError::Listen(listen, None)),
            Err(error) => Err(ConfigError::Listen(listen, Some(error))),
        };
        let format = match log_format.as_str() {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(ConfigError::LogFormat(log_format)),
        };
        let filter = EnvFilter::try_new(&log).map_err(|error| ConfigError::Log(log, error));
        match (root, address, format, filter) {
            (Ok(root), Ok(listen), Ok(log_format), Ok(log)) => {
                Ok(Config { root, listen, log_format, log })
            }
            (root, address, format, filter) => {
                let wrong = [root.err(), address.err(), format.err(), filter.err()];
                Err(wrong.into_iter().flatten().collect())
            }
        }
    }
}

#[cfg(test)]
mod tests;
