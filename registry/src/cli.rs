//! The command line of `kybernate-registry`.

use std::path::PathBuf;

use crate::config::{GcSettings, ReindexSettings, ScrubSettings, Settings};

/// The command line of `kybernate-registry`.
#[derive(Debug, clap::Parser)]
#[command(
    version,
    about = "An OCI registry on a directory",
    after_help = "Examples:\n  kybernate-registry serve --root ./registry --listen 0.0.0.0:5000\n  \
                  kybernate-registry serve --config /etc/kybernate/registry.toml\n  \
                  kybernate-registry gc --root ./registry --dry-run"
)]
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
    /// Prints `listening on ADDRESS` once it serves. SIGTERM and SIGINT let requests finish first;
    /// SIGTERM is announced by `/readyz` before, see `--connections-announce`.
    /// Options win over the environment, the environment over the file, the file over the defaults.
    #[command(
        after_help = "Example:\n  kybernate-registry serve --root ./registry --listen 0.0.0.0:5000"
    )]
    Serve(Settings),
    /// Collect garbage.
    ///
    /// Asks the server that has the store, or opens it when nobody serves it. What nothing needs
    /// any more is first condemned: a 404 that a push brings back. It goes for good once its
    /// quarantine is over, so space comes back with a later run. A server does this by itself;
    /// see `[gc]` in `schema`.
    #[command(after_help = "Example:\n  kybernate-registry gc --root ./registry --dry-run")]
    Gc {
        /// Where the store is, and what is garbage.
        #[command(flatten)]
        settings: GcSettings,
        /// Change nothing and tell what would be done.
        #[arg(long)]
        dry_run: bool,
        /// Look only where garbage is known to have come about, not everywhere.
        #[arg(long)]
        noted: bool,
        /// Print one line of JSON for each thing done, and one for the whole.
        #[arg(long)]
        json: bool,
    },
    /// Read everything stored again and compare it with its digests.
    ///
    /// Asks the server that has the store, or opens it when nobody serves it. What is corrupt is
    /// moved to `corrupt/`, and the next push of it heals. Then all manifests are looked at, and
    /// those that name what is not there are told. A pass that was interrupted goes on where it
    /// was. Exits with 2 when something was corrupt or not to be read, or a manifest lacks something.
    #[command(
        after_help = "Example:\n  kybernate-registry scrub --root ./registry --scrub-rate 100MiB"
    )]
    Scrub {
        /// Where the store is, and how fast it is read.
        #[command(flatten)]
        settings: ScrubSettings,
        /// Begin anew, also when a pass is under way.
        #[arg(long)]
        restart: bool,
        /// Print one line of JSON for each thing found, now and then one with how far it is, and
        /// one for the whole.
        #[arg(long)]
        json: bool,
    },
    /// Make the index over the store's objects again.
    ///
    /// Asks the server that has the store, which goes on serving, or opens it when nobody serves it.
    /// Lists of tags, repositories and referrers are answered from the index. It is made by itself
    /// whenever it is missing or damaged; this is for who has changed the objects by hand.
    #[command(after_help = "Example:\n  kybernate-registry reindex --root ./registry")]
    Reindex {
        /// Where the store is.
        #[command(flatten)]
        settings: ReindexSettings,
        /// Print what there is as one line of JSON.
        #[arg(long)]
        json: bool,
    },
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
