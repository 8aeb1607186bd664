//! What is told of encrypted connections.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

/// Figures of the certificate in force; its handles share what they hold.
#[derive(Debug, Clone, Default)]
pub struct TlsMetrics {
    not_after: Arc<AtomicI64>,
}

impl TlsMetrics {
    /// Says when the certificate in force ends.
    pub fn set_not_after(&self, until: SystemTime) {
        let since = until.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.not_after.store(i64::try_from(since).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "When the certificate in force, or one that leads to its authority, expires, \
                    since the epoch; not there without one";
        let not_after = NotAfter(Arc::clone(&self.not_after));
        let name = "tls_certificate_not_after_timestamp";
        registry.register_with_unit(name, help, Unit::Seconds, not_after);
    }
}

/// Zero while there is none: whoever subtracts the time from it must not see that.
#[derive(Debug)]
struct NotAfter(Arc<AtomicI64>);

impl EncodeMetric for NotAfter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            since => encoder.encode_gauge(&since),
        }
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}
