//! `[scrub]`: how often and how fast everything stored is read again.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Period, Size};

/// Scrubbing.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Scrub {
    /// Scrub in the background while serving.
    pub enabled: bool,
    /// How long after the beginning of a pass over everything the next one begins.
    pub interval: Period,
    /// Bytes read per second, at most; half a per cent of a processor for each 8 MiB.
    pub rate: Size,
}

impl Default for Scrub {
    fn default() -> Self {
        Self { enabled: true, interval: Period(Duration::from_hours(24 * 30)), rate: Size(8 << 20) }
    }
}

impl Scrub {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let year = Duration::from_hours(24 * 365);
        self.interval.check(Duration::from_millis(1)..=year, "interval", mistakes);
        self.rate.check(1 << 10..=1 << 40, "rate", mistakes);
    }
}
