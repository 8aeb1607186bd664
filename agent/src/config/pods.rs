//! `[pods]` and `[[registry]]`: what kybernate-runc is given, and how registries are reached for it.

use std::str::FromStr as _;
use std::time::Duration;

use kybernate_spec::Reference;

use super::reader::Reader;
use super::{ConfigError, PAUSE_DEADLINE_MAX};

/// Less than the two minutes that a kubelet gives a runtime.
const RESTORE_LIMIT: Duration = Duration::from_secs(100);

/// How pods' containers are restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodsConfig {
    /// How long CRIU may take.
    pub restore_limit: Duration,
    /// Whether what lies in a pod's emptyDirs goes along with a checkpoint.
    pub capture_empty_dirs: bool,
}

/// How a registry is reached where no request can say so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryConfig {
    /// `host[:port]`, as references have it.
    pub host: String,
    /// Whether it speaks plain HTTP.
    pub plain_http: bool,
}

/// Reads `[pods]`.
pub(super) fn pods(file: &mut Reader<'_>) -> PodsConfig {
    let mut table = file.table("pods");
    let wanted = "a time like \"100s\", from 1s to 1h";
    let restore_limit = table.time("restore_limit", wanted, PAUSE_DEADLINE_MAX);
    let restore_limit = restore_limit.unwrap_or(RESTORE_LIMIT);
    let capture_empty_dirs = table.flag("capture_empty_dirs").unwrap_or(false);
    table.finish();
    PodsConfig { restore_limit, capture_empty_dirs }
}

/// Reads one `[[registry]]`.
pub(super) fn registry(table: &mut Reader<'_>) -> RegistryConfig {
    let host = table.required("host");
    let is_host = |named: Reference| *named.registry == *host;
    if !host.is_empty() && !Reference::from_str(&format!("{host}/name")).is_ok_and(is_host) {
        let place = table.place("host");
        let wanted = "a registry's HOST[:PORT], without a scheme and a path";
        table.wrong(ConfigError::Bounds(place, wanted, host.clone()));
    }
    let plain_http = table.flag("plain_http").unwrap_or(false);
    RegistryConfig { host, plain_http }
}
