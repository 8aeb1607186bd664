//! How long something took, without a lock.

use std::array;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Upper bounds in microseconds: 100 µs is a cached HEAD, 10 ms a sync, 60 s a slow client.
const BOUNDS: [u64; 15] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000,
    2_500_000, 10_000_000, 60_000_000,
];

/// A histogram of durations; its handles share what they count.
///
/// The library's own takes a mutex for each observation.
#[derive(Debug, Clone)]
pub struct Latency(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// One per bound, and one for what is above all of them.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    microseconds: AtomicU64,
}

impl Default for Latency {
    fn default() -> Self {
        let buckets = array::from_fn(|_| AtomicU64::new(0));
        Self(Arc::new(Inner { buckets, microseconds: AtomicU64::new(0) }))
    }
}

impl Latency {
    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        let took = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let at = BOUNDS.partition_point(|bound| *bound < took);
        if let Some(bucket) = self.0.buckets.get(at) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.0.microseconds.fetch_add(took, Ordering::Relaxed);
    }

    /// Counts how long `work` takes.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let began = std::time::Instant::now();
        let outcome = work();
        self.observe(began.elapsed());
        outcome
    }

    /// Returns how many durations were counted.
    pub fn count(&self) -> u64 {
        self.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }
}

impl EncodeMetric for Latency {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let seconds = |microseconds| Duration::from_micros(microseconds).as_secs_f64();
        let bounds = BOUNDS.map(seconds).into_iter().chain([f64::INFINITY]);
        let counts = self.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let buckets: Vec<_> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = seconds(self.0.microseconds.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
