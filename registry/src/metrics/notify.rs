//! What is told to others.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Figures of an endpoint; its name was chosen in the configuration.
type PerEndpoint = Family<[(&'static str, String); 1], Counter>;

/// Figures of events; its handles share what they count.
#[derive(Debug, Clone, Default)]
pub struct NotifyMetrics {
    delivered: PerEndpoint,
    failed: PerEndpoint,
    /// Events that an endpoint was not sent, once for each.
    pub lost: Counter,
    /// Events kept for whoever has not got them.
    pub waiting: Gauge,
}

impl NotifyMetrics {
    /// An endpoint has got an event.
    pub fn delivered(&self, endpoint: &str) {
        self.delivered.get_or_create(&[("endpoint", endpoint.to_owned())]).inc();
    }

    /// An attempt failed.
    pub fn failed(&self, endpoint: &str) {
        self.failed.get_or_create(&[("endpoint", endpoint.to_owned())]).inc();
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let delivered = self.delivered.clone();
        registry.register("notify_delivered", "Events that endpoints have got", delivered);
        let help = "Attempts to deliver an event that failed";
        registry.register("notify_failed", help, self.failed.clone());
        let help = "Events that there was no room to keep, once per endpoint";
        registry.register("notify_lost", help, self.lost.clone());
        let help = "Events kept for endpoints that have not got them";
        registry.register("notify_waiting", help, self.waiting.clone());
    }
}
