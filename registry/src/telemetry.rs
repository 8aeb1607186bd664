//! Log lines on standard error.

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// Starts logging. A second start changes nothing.
pub fn start(config: &Log) {
    // Proven to be a filter when the configuration was read.
    let filter = EnvFilter::new(&config.filter);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match config.format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    if let Err(error) = started {
        tracing::debug!(%error, "logging was started already");
    }
}
