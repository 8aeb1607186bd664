//! `[metrics]`: where figures for Prometheus are.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Address, Mistakes};

/// Where figures for Prometheus are.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsPage {
    /// Serves `/metrics` and the health pages here, and `/metrics` nowhere else; without it
    /// `/metrics` is on the registry's own address.
    #[schemars(extend("examples" = ["127.0.0.1:9100"]))]
    pub listen: Option<Address>,
}

impl MetricsPage {
    pub(super) fn check(&self, listen: &Address, mistakes: &mut Mistakes<'_>) {
        if self.listen.as_ref().is_some_and(|own| own == listen && own.port() != Some(0)) {
            let told = format!("{listen} is the registry's own address; name another, or none");
            mistakes.add("listen", told);
        }
    }
}
