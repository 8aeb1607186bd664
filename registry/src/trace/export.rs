//! From ended spans to the collector.
//!
//! Whoever ends a span never waits: it goes into a queue, or is counted as lost when that is full.
//! The SDK's own queue does the same and tells nobody how many it lost.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fs_err as fs;
use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::Context;
use opentelemetry_otlp::tonic_types::metadata::MetadataMap;
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{
    SpanExporter, WithExportConfig as _, WithHttpConfig as _, WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{TraceError, chain};
use crate::access::follow::mistake;
use crate::config::{Mistake, Standard, Trace, TraceProtocol};
use crate::metrics::TraceMetrics;

/// Spans that wait, 1 to 2 KiB each.
const WAITING_MAX: usize = 4096;
/// Spans sent at once, as the specification of the SDK has it.
const BATCH_MAX: usize = 512;
/// How long spans are gathered before they are sent.
const GATHER: Duration = Duration::from_secs(1);
/// How long one attempt may take with all that the library repeats of it.
const ATTEMPT_MAX: Duration = Duration::from_mins(1);
/// Time between two warnings.
const WARN_EVERY: Duration = Duration::from_mins(1);
/// Longest file of headers.
const HEADERS_BYTES_MAX: u64 = 64 << 10;

/// Where the SDK puts spans that have ended.
#[derive(Debug)]
pub(super) struct Outlet {
    spans: mpsc::Sender<SpanData>,
    displaced: Arc<AtomicU64>,
}

/// Spans that wait to be sent.
#[derive(Debug)]
pub(super) struct Waiting {
    spans: mpsc::Receiver<SpanData>,
    /// Those that found no room, and of which nothing was said yet.
    displaced: Arc<AtomicU64>,
}

impl Outlet {
    pub(super) fn new() -> (Self, Waiting) {
        let (sender, spans) = mpsc::channel(WAITING_MAX);
        let displaced = Arc::new(AtomicU64::new(0));
        (Self { spans: sender, displaced: Arc::clone(&displaced) }, Waiting { spans, displaced })
    }
}

impl SpanProcessor for Outlet {
    fn on_start(&self, _span: &mut Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.spans.try_send(span).is_err() {
            self.displaced.fetch_add(1, Ordering::Relaxed);
            TraceMetrics::of_process().displaced();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Waiting {
    /// Sends spans until `cancel`, and then those that are left.
    pub(super) async fn export(self, exporter: SpanExporter, cancel: CancellationToken) {
        let Self { mut spans, displaced } = self;
        let mut complaint = Complaint::default();
        let mut batch = Vec::with_capacity(BATCH_MAX);
        loop {
            tokio::select! {
                _some = spans.recv_many(&mut batch, BATCH_MAX) => {}
                () = cancel.cancelled() => {}
            }
            let until = Instant::now() + GATHER;
            while batch.len() < BATCH_MAX {
                if cancel.is_cancelled() {
                    // What is there now is all there will be.
                    match spans.try_recv() {
                        Ok(span) => batch.push(span),
                        Err(_none) => break,
                    }
                    continue;
                }
                let room = BATCH_MAX - batch.len();
                let more = spans.recv_many(&mut batch, room);
                tokio::select! {
                    more = timeout_at(until, more) => if more.is_err() { break },
                    () = cancel.cancelled() => {}
                }
            }
            if batch.is_empty() && cancel.is_cancelled() {
                return;
            }
            send(&exporter, std::mem::take(&mut batch), &mut complaint).await;
            match displaced.swap(0, Ordering::Relaxed) {
                0 => {}
                lost => complaint.about(lost, "they came faster than the collector takes them"),
            }
        }
    }
}

async fn send(exporter: &SpanExporter, batch: Vec<SpanData>, complaint: &mut Complaint) {
    let metrics = TraceMetrics::of_process();
    let spans = u64::try_from(batch.len()).unwrap_or(u64::MAX);
    let why = match timeout(ATTEMPT_MAX, exporter.export(batch)).await {
        Ok(Ok(())) => {
            metrics.exported.inc_by(spans);
            return;
        }
        Ok(Err(error)) => chain(&error).to_string(),
        Err(_elapsed) => "the collector takes too long".to_owned(),
    };
    metrics.failed(spans);
    complaint.about(spans, &why);
}

/// Says now and then that spans are lost.
#[derive(Debug, Default)]
struct Complaint {
    told: Option<Instant>,
    /// Spans lost since.
    lost: u64,
}

impl Complaint {
    fn about(&mut self, spans: u64, why: &str) {
        self.lost += spans;
        if self.told.is_none_or(|told| told.elapsed() >= WARN_EVERY) {
            tracing::warn!(spans = self.lost, error = why, "spans are lost");
            (self.told, self.lost) = (Some(Instant::now()), 0);
        }
    }
}

/// Makes what sends spans to the collector.
pub(super) fn exporter(
    settings: &Trace,
    standard: &Standard,
    resource: &Resource,
) -> Result<SpanExporter, TraceError> {
    let protocol = settings.protocol(standard).map_err(TraceError::Mistake)?;
    let headers = headers(settings).map_err(TraceError::Mistake)?;
    let endpoint = settings.endpoint.as_deref();
    let wait = settings.timeout.map(|timeout| timeout.0);
    let built = match protocol {
        TraceProtocol::Http => {
            let texts = headers.iter().filter_map(|(name, value)| {
                Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
            });
            let mut builder = SpanExporter::builder().with_http().with_headers(texts.collect());
            if let Some(endpoint) = endpoint {
                builder = builder.with_endpoint(with_path(endpoint));
            }
            if let Some(wait) = wait {
                builder = builder.with_timeout(wait);
            }
            builder.build()
        }
        TraceProtocol::Grpc => {
            let tls = ClientTlsConfig::new().with_enabled_roots();
            let metadata = MetadataMap::from_headers(headers);
            let mut builder =
                SpanExporter::builder().with_tonic().with_metadata(metadata).with_tls_config(tls);
            if let Some(endpoint) = endpoint {
                builder = builder.with_endpoint(endpoint);
            }
            if let Some(wait) = wait {
                builder = builder.with_timeout(wait);
            }
            builder.build()
        }
    };
    let mut exporter = built.map_err(TraceError::Build)?;
    exporter.set_resource(resource);
    Ok(exporter)
}

/// Returns the URL that spans are posted to.
fn with_path(endpoint: &str) -> String {
    let base = endpoint.trim_end_matches('/');
    if base.ends_with("/v1/traces") { base.to_owned() } else { format!("{base}/v1/traces") }
}

/// Reads what is sent along. No mistake tells what is in the file: it is secret.
pub(super) fn headers(settings: &Trace) -> Result<HeaderMap, Mistake> {
    let Some(path) = &settings.headers else { return Ok(HeaderMap::new()) };
    let mut text = String::new();
    let file = fs::File::open(path);
    let read = file.and_then(|file| file.take(HEADERS_BYTES_MAX).read_to_string(&mut text));
    read.map_err(|error| {
        mistake(path, None, format!("the file cannot be read ({})", error.kind()))
    })?;
    let mut headers = HeaderMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let parsed = line.split_once(':').and_then(|(name, value)| {
            let mut value = HeaderValue::from_str(value.trim()).ok()?;
            value.set_sensitive(true);
            Some((name.trim().parse::<HeaderName>().ok()?, value))
        });
        let Some((name, value)) = parsed else {
            return Err(mistake(path, Some(number), "is no header; write \"name: value\""));
        };
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests;
