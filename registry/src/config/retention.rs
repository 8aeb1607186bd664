//! `[retention]`: which tags are kept.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Pattern, Period};

/// Which tags are kept. A repository that no rule speaks of keeps all of them.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Retention {
    /// How often tags that no rule keeps are removed.
    pub interval: Period,
    /// What is kept. A tag goes when rules speak of its repository and none of them keeps it.
    pub rule: Vec<RetentionRule>,
}

/// Keeps those of a repository's tags for which everything it says is true.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionRule {
    /// Patterns of the repositories.
    #[schemars(extend("examples" = [["ci/**"]]))]
    pub repositories: Vec<Pattern>,
    /// Patterns of tags that are kept; all of them when left out.
    #[schemars(extend("examples" = [["main-*"]]))]
    pub matching: Vec<Pattern>,
    /// Keep so many of them, the last pushed.
    #[schemars(extend("examples" = [10]))]
    pub newest: Option<usize>,
    /// Keep what was pushed within this time.
    #[schemars(extend("examples" = ["30days"]))]
    pub younger_than: Option<Period>,
    /// Keep what was pulled or pushed within this time, to the hour.
    #[schemars(extend("examples" = ["14days"]))]
    pub pulled_within: Option<Period>,
    /// Keep only what carries a signature of cosign or notation.
    pub signed: bool,
}

impl Default for Retention {
    fn default() -> Self {
        Self { interval: Period(Duration::from_hours(1)), rule: Vec::new() }
    }
}

impl Retention {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let day = Duration::from_hours(24);
        self.interval.check(Duration::from_secs(1)..=day * 7, "interval", mistakes);
        let mut mistakes = mistakes.within("rule");
        for (number, rule) in self.rule.iter().enumerate() {
            let mut mistakes = mistakes.item(number);
            if rule.repositories.is_empty() {
                mistakes.add("repositories", "is empty; write patterns such as \"ci/**\"");
            }
            if rule.newest == Some(0) {
                mistakes.add("newest", "0 keeps nothing; write how many, or leave the rule out");
            }
            if rule.younger_than.is_some_and(|Period(time)| time.is_zero()) {
                mistakes.add("younger_than", "0 keeps nothing; write how long, as in \"30days\"");
            }
            if let Some(period) = rule.pulled_within {
                // Pulls are noted to the hour.
                period.check(day / 12..=day * 36_500, "pulled_within", &mut mistakes);
            }
        }
    }

    /// Returns the rules that speak of a repository, with their numbers.
    pub fn rules(&self, repository: &str) -> Vec<(usize, &RetentionRule)> {
        let rules = self.rule.iter().enumerate();
        rules.filter(|(_, rule)| Pattern::any(&rule.repositories, repository)).collect()
    }
}
