//! `[access]`: who may do what.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Mistakes;

/// Who may do what. While nothing is set here, everybody may do everything.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AccessSettings {
    /// File of rules (TOML): who may pull, push and delete where; read again when it changes.
    #[schemars(extend("format" = "file"))]
    pub policy: Option<PathBuf>,
}

impl AccessSettings {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        if self.policy.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            mistakes.add("policy", "is empty; name the file of rules, or leave it out");
        }
    }
}
