//! `[quota]`: how much a repository may hold.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Pattern, Period, Size};

/// How much repositories may hold.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quota {
    /// How long an upload may be left alone before it is given up for another push to its
    /// repository that would not fit.
    pub upload_idle: Period,
    /// Limits; the first that matches a repository is its own. Without one it has none.
    pub rule: Vec<QuotaRule>,
}

/// A limit for each of some repositories.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuotaRule {
    /// Patterns of the repositories; each of them may hold as much.
    pub repositories: Vec<Pattern>,
    /// Bytes of all blobs and manifests of one repository, each counted once however often it is
    /// used.
    pub bytes: Size,
}

impl Default for Quota {
    fn default() -> Self {
        Self { upload_idle: Period(Duration::from_mins(15)), rule: Vec::new() }
    }
}

impl Quota {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let second = Duration::from_secs(1);
        self.upload_idle.check(second..=second * 86_400, "upload_idle", mistakes);
        let mut mistakes = mistakes.within("rule");
        for (number, rule) in self.rule.iter().enumerate() {
            if rule.repositories.is_empty() {
                mistakes
                    .item(number)
                    .add("repositories", "is empty; write patterns such as \"**\"");
            }
        }
    }

    /// Returns how many bytes a repository may hold.
    pub fn limit(&self, repository: &str) -> Option<u64> {
        let mut rules = self.rule.iter();
        let rule = rules.find(|rule| Pattern::any(&rule.repositories, repository))?;
        Some(rule.bytes.0)
    }
}
