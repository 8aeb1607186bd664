//! What garbage collection has done.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::Latency;
use crate::gc::Summary;

/// Figures of garbage collection; its handles share what they count.
#[derive(Debug, Clone, Default)]
pub struct GcMetrics {
    duration: Latency,
    condemned: Counter,
    revived: Counter,
    removed: Counter,
    removed_bytes: Counter,
    skipped: Counter,
    failed: Counter,
    succeeded: Gauge<f64, AtomicU64>,
}

impl GcMetrics {
    /// Counts a collection that has come to its end, dry runs excepted.
    pub fn ended(&self, summary: &Summary, now: SystemTime) {
        if summary.dry_run {
            return;
        }
        self.duration.observe(Duration::from_millis(summary.duration_ms));
        for (counter, many) in [
            (&self.condemned, summary.condemned),
            (&self.revived, summary.revived),
            (&self.removed, summary.removed),
            (&self.removed_bytes, summary.removed_bytes),
            (&self.skipped, summary.skipped),
        ] {
            counter.inc_by(many);
        }
        if !summary.stopped {
            self.succeeded.set(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
        }
    }

    /// Counts a collection that failed.
    pub fn failed(&self) {
        self.failed.inc();
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Collections of garbage, rests included";
        registry.register_with_unit("gc_duration", help, Unit::Seconds, self.duration.clone());
        let help = "Blobs and manifests of a repository that were condemned";
        registry.register("gc_condemned", help, self.condemned.clone());
        let help = "Condemned blobs and manifests that were brought back by a collection";
        registry.register("gc_revived", help, self.revived.clone());
        let help = "Contents removed for good";
        registry.register("gc_removed", help, self.removed.clone());
        let (help, bytes) = ("Bytes of contents removed for good", self.removed_bytes.clone());
        registry.register_with_unit("gc_removed", help, Unit::Bytes, bytes);
        let help = "Times that a repository was left alone since it could not be read";
        registry.register("gc_skipped", help, self.skipped.clone());
        registry.register("gc_failed", "Collections that failed", self.failed.clone());
        let (help, when) = ("When a collection last came to its end", self.succeeded.clone());
        registry.register_with_unit("gc_last_success_timestamp", help, Unit::Seconds, when);
    }
}
