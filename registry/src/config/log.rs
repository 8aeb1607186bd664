//! `[log]`: what is logged, and how.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use super::Mistakes;

/// What is logged, and how.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// How log lines look: `text` for people, `json` for machines.
    pub format: LogFormat,
    /// What is logged: a level, or `target=level` rules joined by commas.
    pub filter: String,
    /// Which requests get a line: `all`, only those that failed (`errors`), or `none`.
    pub access: AccessLog,
}

/// Which requests get a line in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// Every request.
    All,
    /// Those answered with 400 or above.
    Errors,
    /// None.
    None,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object per line.
    Json,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Text, filter: "info".to_owned(), access: AccessLog::All }
    }
}

impl Log {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        if let Err(error) = EnvFilter::try_new(&self.filter) {
            let told = format!(
                "{:?} is no filter ({error}); write a level such as \"info\", or rules such as \
                 \"warn,kybernate_registry=debug\"",
                self.filter
            );
            mistakes.add("filter", told);
        }
    }
}
