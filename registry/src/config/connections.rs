//! `[connections]`: how many clients, and how long they may be silent.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Period};

/// Limits of connections.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Connections {
    /// Connections at once; an idle one costs about 20 KiB.
    pub max: usize,
    /// How long a client may take to send a request's head, so also how long an idle connection
    /// stays. Go's client closes its own after 90 s: less than that closes it under a request.
    pub idle: Period,
    /// How long a client may leave a reply unread; there is no limit on the whole.
    pub unread: Period,
    /// How long requests are still taken after SIGTERM while `/readyz` answers 503, so that whoever
    /// sends requests here learns of the end before it comes. A second signal ends it at once.
    pub announce: Period,
    /// How long requests in flight may go on after that; Kubernetes kills 30 s after SIGTERM.
    pub drain: Period,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            max: 4096,
            idle: Period(Duration::from_mins(2)),
            // Pulls stop for a while when the client unpacks, so this is more than a push may be
            // silent.
            unread: Period(Duration::from_mins(5)),
            // A probe each second sees it, and with `drain` it is less than 30 s.
            announce: Period(Duration::from_secs(3)),
            drain: Period(Duration::from_secs(25)),
        }
    }
}

impl Connections {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        if !(1..=1_000_000).contains(&self.max) {
            let told = format!("{} is out of range; write a number from 1 to 1000000", self.max);
            mistakes.add("max", told);
        }
        for (key, period) in [("idle", self.idle), ("unread", self.unread)] {
            period.check(Duration::from_secs(1)..=Duration::from_hours(24), key, mistakes);
        }
        for (key, period) in [("announce", self.announce), ("drain", self.drain)] {
            period.check(Duration::ZERO..=Duration::from_hours(24), key, mistakes);
        }
    }
}
