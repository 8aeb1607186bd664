//! What clients are told of the tiers.

use kybernate_packager::agent_api as api;
use kybernate_spec::Digest;

use super::ledger::Entry;
use super::{Staging, Tier};

impl Tier {
    /// Returns what the API calls it.
    pub(crate) const fn to_api(self) -> api::Tier {
        match self {
            Self::Ram => api::Tier::Ram,
            Self::Nvme => api::Tier::Nvme,
        }
    }
}

impl Staging {
    /// Returns the tiers of this node and what lies ready there.
    pub(crate) fn to_api(&self) -> Vec<api::NodeTier> {
        let tell = |(tier, kept): (&Tier, &super::Kept)| {
            let ledger = kept.ledger();
            let whole = ledger.entries().iter().filter(|(_, entry)| !entry.is_spoilt);
            api::NodeTier {
                tier: tier.to_api().into(),
                directory: kept.shelf.directory().display().to_string(),
                budget_bytes: kept.shelf.budget(),
                used_bytes: ledger.used(),
                staged: whole.map(|(digest, one)| entry(*tier, digest, one)).collect(),
            }
        };
        self.tiers.iter().map(tell).collect()
    }

    /// Returns what is wrong with tiers of this node.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.closed.iter().map(|(tier, closed)| closed.error(*tier).to_string()).collect()
    }
}

/// Tells of one staged checkpoint.
pub(super) fn entry(tier: Tier, digest: &Digest, entry: &Entry) -> api::StagedCheckpoint {
    api::StagedCheckpoint {
        digest: digest.to_string(),
        references: entry.references.clone(),
        bytes: entry.bytes,
        tier: tier.to_api().into(),
        pinned: !entry.users.is_empty(),
        used_at: entry.used_at.to_string(),
    }
}
