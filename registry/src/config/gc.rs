//! `[gc]`: how long what nothing needs is kept, and how often it is looked for.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Period};
use crate::gc::Settings;

/// What a push may take from its first blob to its tag without being a long one.
const PUSH_TIME: Duration = Duration::from_mins(5);

/// Garbage collection.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gc {
    /// Collect garbage in the background while serving.
    pub enabled: bool,
    /// How often it is looked where garbage is known to have come about.
    pub interval: Period,
    /// How often everything is looked at: for what a power failure let be forgotten.
    pub everything: Period,
    /// A blob that no manifest names is kept for this time after it was pushed, mounted or shown to
    /// a client.
    pub grace: Period,
    /// A manifest without tag, index and subject is kept for this time after it was pushed or lost
    /// its tag.
    pub untagged: Period,
    /// Keep manifests without tag, index and subject for ever.
    pub keep_untagged: bool,
    /// What is condemned is a 404 and can be brought back by a push for this time, then it goes.
    pub quarantine: Period,
}

impl Default for Gc {
    fn default() -> Self {
        let Settings { grace, untagged, quarantine } = Settings::default();
        Self {
            enabled: true,
            interval: Period(Duration::from_mins(10)),
            everything: Period(Duration::from_hours(24)),
            grace: Period(grace),
            untagged: Period(untagged.unwrap_or_default()),
            keep_untagged: false,
            quarantine: Period(quarantine),
        }
    }
}

impl Gc {
    /// Returns how long what is kept.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            grace: self.grace.0,
            untagged: (!self.keep_untagged).then_some(self.untagged.0),
            quarantine: self.quarantine.0,
        }
    }

    /// Says what is good and takes away what somebody still pushes.
    pub(super) fn doubts(&self) -> Vec<String> {
        let lives =
            [("grace", self.grace.0, true), ("untagged", self.untagged.0, !self.keep_untagged)];
        let short = lives.into_iter().filter(|(_, life, counts)| *counts && *life < PUSH_TIME);
        let told = short.map(|(key, life, _)| {
            format!(
                "gc.{key}: after {} what a push has not named yet is collected under it; write at \
                 least {}",
                Period(life),
                Period(PUSH_TIME)
            )
        });
        if self.enabled { told.collect() } else { Vec::new() }
    }

    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let year = Duration::from_hours(24 * 365);
        for (key, period) in [("interval", self.interval), ("everything", self.everything)] {
            period.check(Duration::from_millis(1)..=year, key, mistakes);
        }
        let lives =
            [("grace", self.grace), ("untagged", self.untagged), ("quarantine", self.quarantine)];
        for (key, period) in lives {
            period.check(Duration::ZERO..=year, key, mistakes);
        }
    }
}
