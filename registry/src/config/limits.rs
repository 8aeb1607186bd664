//! `[limits]`: how much one client may ask for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Mistakes;

/// How much one client may ask for: whoever has credentials or a certificate counts by name, others
/// by address (IPv6 by its first 64 bits). Who asks for more is told when to come again.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitSettings {
    /// Requests per second, over time; without it there is no limit.
    pub requests_per_second: Option<u32>,
    /// Requests that may come at once before that counts; ten seconds' worth when it is not set.
    pub burst: Option<u32>,
    /// Requests that may be in progress at once; without it there is no limit.
    pub concurrent_requests: Option<u32>,
}

impl LimitSettings {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        for (key, number) in [
            ("requests_per_second", self.requests_per_second),
            ("burst", self.burst),
            ("concurrent_requests", self.concurrent_requests),
        ] {
            if number.is_some_and(|number| !(1..=1_000_000).contains(&number)) {
                mistakes.add(key, "is out of range; write a number from 1 to 1000000");
            }
        }
        if self.burst.is_some() && self.requests_per_second.is_none() {
            mistakes.add("burst", "means nothing alone; set requests_per_second too");
        }
    }
}
