//! `[gpu]`: who moves GPU memory, and how long that may take.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::reader::Reader;
use super::{ConfigError, PAUSE_DEADLINE_MAX};

/// Most work on a GPU ends within milliseconds; a training step may take seconds.
const LOCK_LIMIT: Duration = Duration::from_secs(10);

/// Enough for the memory of eight large GPUs at 4 GB/s, as others have measured.
const LIMIT: Duration = Duration::from_mins(5);

/// How GPU memory gets into a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuConfig {
    /// Who moves it.
    pub method: GpuMethod,
    /// Where it goes when a container is dumped, if the agent moves it.
    #[serde(default)]
    pub storage: GpuStorage,
    /// The driver's library, when it is not the system's.
    pub driver: Option<PathBuf>,
    /// The management library.
    pub management: PathBuf,
    /// How long a process's work on the GPU may take to end.
    pub lock_limit: Duration,
    /// How long memory may take to be moved.
    pub limit: Duration,
}

/// Who moves GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuMethod {
    /// The agent, through the driver's checkpoint calls.
    #[default]
    Driver,
    /// CRIU, through its plugin.
    Plugin,
    /// Nobody: what has a GPU open is refused.
    None,
}

/// Where GPU memory goes when a container is dumped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuStorage {
    /// Into the memory of the processes.
    #[default]
    Pages,
    /// Into files of its own where the driver can do that, else into the memory of the processes. No
    /// GPU has run it.
    Auto,
    /// Into files of its own; what has a GPU open is refused where the driver cannot.
    Device,
}

/// Reads `[gpu]`.
pub(super) fn gpu(file: &mut Reader<'_>) -> GpuConfig {
    let mut table = file.table("gpu");
    let method = match table.text("method").as_deref() {
        None | Some("driver") => GpuMethod::Driver,
        Some("plugin") => GpuMethod::Plugin,
        Some("none") => GpuMethod::None,
        Some(other) => {
            let wrong = other.to_owned();
            let place = table.place("method");
            table.wrong(ConfigError::Bounds(place, "driver, plugin or none", wrong));
            GpuMethod::Driver
        }
    };
    let storage = match table.text("storage").as_deref() {
        None | Some("pages") => GpuStorage::Pages,
        Some("auto") => GpuStorage::Auto,
        Some("device") => GpuStorage::Device,
        Some(other) => {
            let wrong = other.to_owned();
            let place = table.place("storage");
            table.wrong(ConfigError::Bounds(place, "pages, auto or device", wrong));
            GpuStorage::Pages
        }
    };
    let driver = library(&mut table, "driver");
    let management = library(&mut table, "management");
    let config = GpuConfig {
        method,
        storage,
        driver,
        management: management.unwrap_or_else(|| "libnvidia-ml.so.1".into()),
        lock_limit: time(&mut table, "lock_limit", LOCK_LIMIT),
        limit: time(&mut table, "limit", LIMIT),
    };
    table.finish();
    config
}

/// Reads a path. One that is not absolute would be looked for in who knows how many places.
fn library(table: &mut Reader<'_>, key: &str) -> Option<PathBuf> {
    let path = PathBuf::from(table.text(key)?);
    if !path.is_absolute() {
        let place = table.place(key);
        table.wrong(ConfigError::RelativePath(place, path.clone()));
    }
    Some(path)
}

fn time(table: &mut Reader<'_>, key: &str, default: Duration) -> Duration {
    let Some(text) = table.text(key) else { return default };
    match humantime::parse_duration(&text) {
        Ok(time) if (Duration::from_millis(100)..=PAUSE_DEADLINE_MAX).contains(&time) => time,
        Ok(_) | Err(_) => {
            let place = table.place(key);
            let wrong = ConfigError::Bounds(place, "a time like \"10s\", from 100ms to 1h", text);
            table.wrong(wrong);
            default
        }
    }
}
