//! The command line of `kybernate-registry`.

use std::path::PathBuf;

use crate::config::Settings;

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
    /// Options win over the environment, the environment over the file, the file over the defaults.
    #[command(
        after_help = "Example:\n  kybernate-registry serve --root ./registry --listen 0.0.0.0:5000"
    )]
    Serve(Settings),
    /// Say everything that is wrong with a configuration file.
    ///
    /// Reads the file alone: environment and options are left out. Exits with 64 when something is
    /// wrong, after a line `FILE:LINE:COLUMN: SETTING: what is wrong` for each mistake.
    #[command(after_help = "Example:\n  kybernate-registry verify /etc/kybernate/registry.toml")]
    Verify {
        /// Configuration file (TOML).
        file: PathBuf,
    },
    /// Print the JSON schema of the configuration.
    #[command(after_help = "Example:\n  kybernate-registry schema > registry.schema.json")]
    Schema,
}
