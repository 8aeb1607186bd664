//! `[tags]`: tags that do not move.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Pattern};

/// What may be done with tags.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tags {
    /// Tags that stay with the manifest they were first given to; they cannot be deleted either.
    pub immutable: Vec<ImmutableTags>,
}

/// Tags that stay with the manifest they were first given to.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImmutableTags {
    /// Patterns of the repositories.
    #[schemars(extend("examples" = [["release/**"]]))]
    pub repositories: Vec<Pattern>,
    /// Patterns of the tags; all of them when left out.
    #[serde(default)]
    #[schemars(extend("examples" = [["v*"]]))]
    pub tags: Vec<Pattern>,
    /// Patterns of tags that may be moved all the same.
    #[serde(default)]
    #[schemars(extend("examples" = [["*-rc*"]]))]
    pub except: Vec<Pattern>,
}

impl Tags {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let mut mistakes = mistakes.within("immutable");
        for (number, rule) in self.immutable.iter().enumerate() {
            if rule.repositories.is_empty() {
                mistakes
                    .item(number)
                    .add("repositories", "is empty; write patterns such as \"**\"");
            }
        }
    }

    /// Whether a tag of a repository must stay where it is.
    pub fn is_immutable(&self, repository: &str, tag: &str) -> bool {
        self.immutable.iter().any(|rule| {
            Pattern::any(&rule.repositories, repository)
                && (rule.tags.is_empty() || Pattern::any(&rule.tags, tag))
                && !Pattern::any(&rule.except, tag)
        })
    }
}
