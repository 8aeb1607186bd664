//! What the store counts.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::{Registry, Unit};

use super::Latency;

/// Figures of a store; its handles share what they count.
#[derive(Debug, Clone, Default)]
pub struct StoreMetrics {
    /// Waits for a directory's entries to be on the disk.
    pub sync: Latency,
    /// Blobs made of uploads, syncs included.
    pub commit: Latency,
    /// Corrupt content that was found and moved away.
    pub corrupt: Counter,
}

impl StoreMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let (sync, commit) = (self.sync.clone(), self.commit.clone());
        let help = "Waits until a directory's entries are on the disk";
        registry.register_with_unit("store_sync_duration", help, Unit::Seconds, sync);
        let help = "Commits of blobs, syncs included";
        registry.register_with_unit("store_commit_duration", help, Unit::Seconds, commit);
        let help = "Corrupt content found and moved away";
        registry.register("corrupt_blobs", help, self.corrupt.clone());
    }
}
