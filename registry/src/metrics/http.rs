//! Requests by route, method and class of status.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Method, StatusCode};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::Latency;
use crate::route::Route;

const METHODS: [&str; 7] = ["GET", "HEAD", "PUT", "PATCH", "POST", "DELETE", "other"];
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Figures of requests.
#[derive(Debug, Clone)]
pub struct HttpMetrics {
    /// Requests that wait for the head of their reply.
    pub in_flight: Gauge,
    /// One per route and method, in the order of [`Route::LABELS`] and [`METHODS`].
    series: Arc<[Series]>,
}

#[derive(Debug, Default)]
struct Series {
    classes: [AtomicU64; CLASSES.len()],
    latency: Latency,
}

impl Default for HttpMetrics {
    fn default() -> Self {
        let series = std::iter::repeat_with(Series::default);
        let series = series.take(Route::LABELS.len() * METHODS.len()).collect();
        Self { in_flight: Gauge::default(), series }
    }
}

impl HttpMetrics {
    /// Counts a request when the head of its reply is known, which for a pull is before its body.
    pub fn answered(
        &self,
        route: &'static str,
        method: &Method,
        status: StatusCode,
        took: Duration,
    ) {
        let last = |labels: &[&str]| labels.len() - 1;
        let position = |labels: &[&str], wanted: &str| {
            labels.iter().position(|label| *label == wanted).unwrap_or(last(labels))
        };
        let route = position(&Route::LABELS, route);
        let method = position(&METHODS, method.as_str());
        let Some(series) = self.series.get(route * METHODS.len() + method) else { return };
        let class = usize::from(status.as_u16() / 100).saturating_sub(1);
        if let Some(count) = series.classes.get(class) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        series.latency.observe(took);
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "Requests by route, method and class of status";
        registry.register("http_requests", help, Requests(Arc::clone(&self.series)));
        let help = "Time from a request's head to the head of its reply";
        let durations = Durations(Arc::clone(&self.series));
        registry.register_with_unit("http_request_duration", help, Unit::Seconds, durations);
        let help = "Requests that wait for the head of their reply";
        registry.register("http_requests_in_flight", help, self.in_flight.clone());
    }
}

#[derive(Debug)]
struct Requests(Arc<[Series]>);

#[derive(Debug)]
struct Durations(Arc<[Series]>);

/// Returns each series with its labels.
fn labelled(series: &[Series]) -> impl Iterator<Item = (&'static str, &'static str, &Series)> {
    let labels = Route::LABELS.iter().flat_map(|route| METHODS.map(|method| (*route, method)));
    labels.zip(series).map(|((route, method), series)| (route, method, series))
}

impl EncodeMetric for Requests {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (route, method, series) in labelled(&self.0) {
            for (class, count) in CLASSES.iter().zip(&series.classes) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    let labels = [("route", route), ("method", method), ("status", *class)];
                    let mut series = encoder.encode_family(&labels)?;
                    series.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
                }
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

impl EncodeMetric for Durations {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (route, method, series) in labelled(&self.0) {
            if series.latency.count() > 0 {
                let labels = [("route", route), ("method", method)];
                series.latency.encode(encoder.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
