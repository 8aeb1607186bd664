//! What is counted of staged checkpoints.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::Tier;

/// Counters and gauges. All clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    hits: Family<Of, Counter>,
    misses: Counter,
    evictions: Family<Of, Counter>,
    bytes: Family<Of, Gauge>,
    budget: Family<Of, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    tier: &'static str,
}

impl Figures {
    pub(super) fn hit(&self, tier: Tier) {
        self.hits.get_or_create(&of(tier)).inc();
    }

    pub(super) fn miss(&self) {
        self.misses.inc();
    }

    pub(super) fn evicted(&self, tier: Tier) {
        self.evictions.get_or_create(&of(tier)).inc();
    }

    pub(super) fn bytes(&self, tier: Tier, bytes: u64) {
        self.bytes.get_or_create(&of(tier)).set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    pub(super) fn budget(&self, tier: Tier, bytes: u64) {
        self.budget.get_or_create(&of(tier)).set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Puts all of it on the page.
    pub(crate) fn register(&self, all: &mut Registry) {
        let help = "Restores whose dump was staged";
        all.register("staging_hits", help, self.hits.clone());
        let help = "Restores whose dump was in no tier, on a node that has any";
        all.register("staging_misses", help, self.misses.clone());
        let help = "Staged checkpoints that were removed, for others or because it was asked for";
        all.register("staging_evictions", help, self.evictions.clone());
        let help = "Bytes of staged checkpoints, with what is promised to those being staged";
        all.register_with_unit("staged", help, Unit::Bytes, self.bytes.clone());
        let help = "Most bytes of staged checkpoints";
        all.register_with_unit("staging_budget", help, Unit::Bytes, self.budget.clone());
    }
}

fn of(tier: Tier) -> Of {
    Of { tier: tier.name() }
}
