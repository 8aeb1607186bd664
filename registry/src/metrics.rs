//! Figures for Prometheus.
//!
//! Whoever counts something owns a struct of handles, such as [`StoreMetrics`], with a
//! `register(&self, registry)` that names them, and [`Metrics::new`] calls it: this is all that a
//! part has to do to be seen. Names are `kybernate_registry_<noun>_<unit>`, labels have few values
//! that we choose (never a repository or a digest), and counting is an atomic addition: nothing
//! here takes a lock while a request is served.

use std::fmt;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

pub use self::gc::GcMetrics;
pub use self::http::HttpMetrics;
pub use self::latency::Latency;
pub use self::notify::NotifyMetrics;
pub use self::store::StoreMetrics;
pub use self::tls::TlsMetrics;
pub use self::trace::TraceMetrics;

mod gc;
mod http;
mod latency;
mod notify;
mod process;
mod store;
mod tls;
mod trace;

/// What the page of [`Metrics::page`] is.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Everything that is counted, built once.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests.
    pub http: HttpMetrics,
    /// Connections.
    pub connections: ConnectionMetrics,
    /// Uploads begun and not ended, of those that were touched since the start.
    pub uploads_open: Gauge,
    /// Events told to others.
    pub notify: NotifyMetrics,
    /// The certificate in force.
    pub tls: TlsMetrics,
}

/// Connections, and what goes over them.
#[derive(Debug, Clone, Default)]
pub struct ConnectionMetrics {
    /// Connections open now.
    pub open: Gauge,
    /// Connections in no request that were closed to make room for others.
    pub displaced: Counter,
    /// Bytes read from sockets.
    pub received: Counter,
    /// Bytes written to sockets.
    pub sent: Counter,
}

impl Metrics {
    /// Builds all metrics; those of the store are counted there.
    pub fn new(store: &StoreMetrics) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(process::Process));
        let ours = registry.sub_registry_with_prefix("kybernate_registry");
        let http = HttpMetrics::default();
        http.register(ours);
        let connections = ConnectionMetrics::default();
        connections.register(ours);
        store.register(ours);
        let uploads_open = Gauge::default();
        let help = "Uploads begun and not ended, of those touched since the start";
        ours.register("uploads_open", help, uploads_open.clone());
        let notify = NotifyMetrics::default();
        notify.register(ours);
        let tls = TlsMetrics::default();
        tls.register(ours);
        TraceMetrics::of_process().register(ours);
        Self { registry, http, connections, uploads_open, notify, tls }
    }

    /// Writes all metrics in the text format of OpenMetrics.
    pub fn page(&self) -> Result<String, fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

impl ConnectionMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register("connections_open", "Connections open now", self.open.clone());
        let help = "Connections in no request that were closed to make room for others";
        registry.register("connections_displaced", help, self.displaced.clone());
        let (received, sent) = (self.received.clone(), self.sent.clone());
        let help = "Bytes read from sockets";
        registry.register_with_unit("network_received", help, Unit::Bytes, received);
        let help = "Bytes written to sockets";
        registry.register_with_unit("network_sent", help, Unit::Bytes, sent);
    }
}
