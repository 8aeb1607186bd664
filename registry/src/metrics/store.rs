//! What the store counts.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::{GcMetrics, Latency};

/// Figures of a store; its handles share what they count.
#[derive(Debug, Clone, Default)]
pub struct StoreMetrics {
    /// Waits for a directory's entries to be on the disk.
    pub sync: Latency,
    /// Blobs made of uploads, syncs included.
    pub commit: Latency,
    /// Reads of a part of a blob from the disk, its check included.
    pub read: Latency,
    /// Pushes and mounts refused since their repository would have held too much.
    pub quota_refused: Counter,
    /// Tags removed since no retention rule keeps them.
    pub retention_removed: Counter,
    /// Garbage collection.
    pub gc: GcMetrics,
    /// Corrupt content that was found and moved away.
    pub corrupt: Counter,
    /// Manifests that lack a part, as the last pass of scrubbing found them.
    pub incomplete: Gauge,
}

impl StoreMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let (sync, commit) = (self.sync.clone(), self.commit.clone());
        let help = "Waits until a directory's entries are on the disk";
        registry.register_with_unit("store_sync_duration", help, Unit::Seconds, sync);
        let help = "Commits of blobs, syncs included";
        registry.register_with_unit("store_commit_duration", help, Unit::Seconds, commit);
        let help = "Reads of a mebibyte of a blob from the disk, checks included";
        let read = self.read.clone();
        registry.register_with_unit("store_read_duration", help, Unit::Seconds, read);
        let help = "Pushes and mounts refused since the repository would hold too much";
        registry.register("quota_refused", help, self.quota_refused.clone());
        let help = "Tags removed since no retention rule keeps them";
        registry.register("retention_removed_tags", help, self.retention_removed.clone());
        self.gc.register(registry);
        let help = "Corrupt content found and moved away";
        registry.register("corrupt_blobs", help, self.corrupt.clone());
        let help = "Manifests that lack a part, as the last pass of scrubbing found them";
        registry.register("incomplete_manifests", help, self.incomplete.clone());
    }

    /// A pass of scrubbing found so many manifests that lack a part.
    pub(crate) fn note_incomplete(&self, manifests: u64) {
        self.incomplete.set(i64::try_from(manifests).unwrap_or(i64::MAX));
    }
}
