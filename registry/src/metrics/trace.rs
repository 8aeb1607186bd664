//! What becomes of spans.

use std::sync::LazyLock;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

static METRICS: LazyLock<TraceMetrics> = LazyLock::new(TraceMetrics::default);

/// Figures of spans; its handles share what they count.
#[derive(Debug, Clone, Default)]
pub struct TraceMetrics {
    /// Spans that the collector has taken.
    pub exported: Counter,
    lost: Family<[(&'static str, &'static str); 1], Counter>,
}

impl TraceMetrics {
    /// Returns the figures of the process, of which there is one set, as there is one place that
    /// spans are sent to.
    pub fn of_process() -> &'static Self {
        &METRICS
    }

    /// Spans found no room to wait.
    pub fn displaced(&self) {
        self.lost.get_or_create(&[("why", "queue")]).inc();
    }

    /// Spans were not taken by the collector.
    pub fn failed(&self, spans: u64) {
        self.lost.get_or_create(&[("why", "export")]).inc_by(spans);
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Spans that the collector has taken";
        registry.register("trace_exported_spans", help, self.exported.clone());
        let help = "Spans that were lost: there was no room to keep them (queue), or the collector \
                    did not take them (export)";
        registry.register("trace_lost_spans", help, self.lost.clone());
    }
}
