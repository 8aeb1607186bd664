//! Spans of `kyb` and of the agent, for OpenTelemetry's collectors: of a command, below it of the
//! operation that it asks for, and below that of each step. What either asks of a registry is below
//! in turn, where the registry exports spans.
//!
//! OpenTelemetry's own names in the environment say whether and where spans are sent, as
//! `OTEL_EXPORTER_OTLP_ENDPOINT` does; without them nothing is done here. What is exported is what
//! this module is told: nothing that somebody logs gets into it.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::Duration;

use kybernate_spec::chain;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{ExporterBuildError, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{
    SdkTracer, SdkTracerProvider, SpanData, SpanExporter as _, SpanProcessor,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::progress::Step;
use crate::trace_parent::TraceParent;

/// What makes spans, once the process exports them.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Spans that wait, 1 to 2 KiB each. An operation has a dozen.
const WAITING_MAX: usize = 4096;
/// Spans sent at once, as the specification of the SDK has it.
const BATCH_MAX: usize = 512;
/// How long one attempt may take with all that the library repeats of it.
const ATTEMPT_MAX: Duration = Duration::from_secs(30);
/// How long spans may take to be sent at the end.
const FLUSH_MAX: Duration = Duration::from_secs(3);

/// Why nothing can be exported.
#[derive(Debug, thiserror::Error)]
pub enum SpansError {
    /// The environment wants a protocol that is not spoken here.
    #[error("OTEL_EXPORTER_OTLP_PROTOCOL is {0:?}: write http/protobuf or grpc")]
    Protocol(String),
    /// The library refuses what the environment says.
    #[error("failed to set up traces")]
    Build(#[source] ExporterBuildError),
}

/// Spans on their way.
#[derive(Debug)]
pub struct Spans {
    sending: JoinHandle<()>,
    end: CancellationToken,
    // Kept until the end: a provider that is dropped shuts down.
    _provider: SdkTracerProvider,
}

/// Something that takes time. It is over when this is dropped.
#[derive(Debug)]
pub struct Span {
    /// Nothing while nothing is exported.
    context: Option<Context>,
    place: TraceParent,
}

/// How spans are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Http,
    Grpc,
}

/// Where spans that have ended wait.
#[derive(Debug)]
struct Outlet(mpsc::Sender<SpanData>);

impl Spans {
    /// Begins to export when the environment says where to, in the name of `service` where it says
    /// nothing else. Needs a runtime around it.
    pub fn start(service: &'static str) -> Result<Option<Self>, SpansError> {
        let variable =
            |name: &str| std::env::var_os(name)?.into_string().ok().filter(|text| !text.is_empty());
        let Some(protocol) = protocol(variable)? else { return Ok(None) };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name = variable("OTEL_SERVICE_NAME").unwrap_or_else(|| service.to_owned());
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("host.name", host))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_detector(Box::new(EnvResourceDetector::new()))
            .with_service_name(name)
            .build();
        let built = match protocol {
            Protocol::Http => SpanExporter::builder().with_http().build(),
            Protocol::Grpc => {
                let tls = ClientTlsConfig::new().with_enabled_roots();
                SpanExporter::builder().with_tonic().with_tls_config(tls).build()
            }
        };
        let mut exporter = built.map_err(SpansError::Build)?;
        exporter.set_resource(&resource);
        let (sender, spans) = mpsc::channel(WAITING_MAX);
        let builder = SdkTracerProvider::builder().with_resource(resource);
        let provider = builder.with_span_processor(Outlet(sender)).build();
        let end = CancellationToken::new();
        #[expect(clippy::disallowed_methods, reason = "`flush` waits for it")]
        let sending = tokio::spawn(send(spans, exporter, end.clone()));
        if TRACER.set(provider.tracer("kybernate")).is_err() {
            tracing::debug!("spans are exported already");
        }
        Ok(Some(Self { sending, end, _provider: provider }))
    }

    /// Sends what is left, as far as the collector takes it soon.
    pub async fn flush(self) {
        self.end.cancel();
        if timeout(FLUSH_MAX, self.sending).await.is_err() {
            tracing::warn!("the collector has not taken the last spans in time");
        }
    }
}

impl Span {
    /// Begins a span of a client, below `parent` or in a trace of its own.
    pub fn of_client(name: String, parent: Option<TraceParent>) -> Self {
        Self::begin(name, SpanKind::Client, parent, Vec::new())
    }

    /// Begins a span of a server with what is known of it, below `parent` or in a trace of its own.
    pub fn of_server(
        name: &'static str,
        parent: Option<TraceParent>,
        facts: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Self {
        let facts = facts.into_iter().map(|(key, value)| KeyValue::new(key, value)).collect();
        Self::begin(name.to_owned(), SpanKind::Server, parent, facts)
    }

    fn begin(
        name: String,
        kind: SpanKind,
        parent: Option<TraceParent>,
        facts: Vec<KeyValue>,
    ) -> Self {
        let Some(tracer) = TRACER.get() else {
            return Self { context: None, place: parent.unwrap_or_else(TraceParent::random) };
        };
        let above = parent.as_ref().map(above).unwrap_or_default();
        let span = tracer.span_builder(name).with_kind(kind).with_attributes(facts);
        let span = span.start_with_context(tracer, &above);
        let place = TraceParent::of(span.span_context());
        Self { context: Some(above.with_span(span)), place }
    }

    /// Returns its place in its trace: while nothing is exported that of its parent.
    pub fn place(&self) -> TraceParent {
        self.place.clone()
    }

    /// Adds the steps that it had.
    pub fn steps(&self, steps: &[Step]) {
        let Some((tracer, context)) = TRACER.get().zip(self.context.as_ref()) else { return };
        for step in steps {
            let span = tracer.span_builder(step.name).with_start_time(step.began);
            let mut span = span.start_with_context(tracer, context);
            span.end_with_timestamp(step.began + step.took);
        }
    }

    /// Ends it as something that failed, with a word for how.
    pub fn fail(self, how: &'static str) {
        let Some(context) = self.context else { return };
        context.span().set_attribute(KeyValue::new("error.type", how));
        context.span().set_status(Status::error(""));
    }
}

/// Returns what a span below this place is made in.
fn above(place: &TraceParent) -> Context {
    let header = (TraceParent::HEADER.to_owned(), place.to_string());
    let headers = HashMap::from([header]);
    TraceContextPropagator::new().extract_with_context(&Context::new(), &headers)
}

/// Returns how spans are sent, when the environment wants them to be.
fn protocol(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Protocol>, SpansError> {
    let first = |names: [&str; 2]| names.into_iter().find_map(&variable);
    let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|off| off.eq_ignore_ascii_case("true"))
        || variable("OTEL_TRACES_EXPORTER").is_some_and(|exporter| exporter == "none");
    let endpoint = first(["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]);
    if is_off || endpoint.is_none() {
        return Ok(None);
    }
    let wanted = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
    match wanted.as_deref() {
        None | Some("http/protobuf") => Ok(Some(Protocol::Http)),
        Some("grpc") => Ok(Some(Protocol::Grpc)),
        Some(other) => Err(SpansError::Protocol(other.to_owned())),
    }
}

/// Sends spans until `end`, and then those that are left.
async fn send(mut spans: mpsc::Receiver<SpanData>, exporter: SpanExporter, end: CancellationToken) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    loop {
        let taken = tokio::select! {
            taken = spans.recv_many(&mut batch, BATCH_MAX) => taken,
            () = end.cancelled(), if !spans.is_closed() => {
                spans.close();
                continue;
            }
        };
        if taken == 0 {
            return;
        }
        let why = match timeout(ATTEMPT_MAX, exporter.export(std::mem::take(&mut batch))).await {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => chain(&error).to_string(),
            Err(_elapsed) => "the collector takes too long".to_owned(),
        };
        tracing::warn!(spans = taken, error = why, "spans are lost");
    }
}

impl SpanProcessor for Outlet {
    fn on_start(&self, _span: &mut opentelemetry_sdk::trace::Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.0.try_send(span).is_err() {
            tracing::debug!("a span is lost: the collector is too slow");
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol_of(names: &[(&str, &str)]) -> Result<Option<Protocol>, String> {
        let variable = |wanted: &str| {
            let found = names.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        };
        protocol(variable).map_err(|error| error.to_string())
    }

    #[test]
    fn the_environment_says_whether_and_how() {
        let (endpoint, own) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL");
        let (there, general) = ((endpoint, "http://h"), "OTEL_EXPORTER_OTLP_PROTOCOL");
        assert_eq!(protocol_of(&[(general, "grpc")]), Ok(None));
        assert_eq!(protocol_of(&[there]), Ok(Some(Protocol::Http)));
        assert_eq!(protocol_of(&[there, (general, "grpc")]), Ok(Some(Protocol::Grpc)));
        let both = [there, (general, "grpc"), (own, "http/protobuf")];
        assert_eq!(protocol_of(&both), Ok(Some(Protocol::Http)));
        for off in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(protocol_of(&[there, off]), Ok(None));
        }
        let wrong = protocol_of(&[there, (general, "http/json")]).unwrap_err();
        assert!(wrong.contains("http/json") && wrong.contains("grpc"), "{wrong}");
    }

    #[test]
    fn while_nothing_is_exported_a_span_is_where_its_parent_is() {
        let parent = TraceParent::random();
        let span = Span::of_client("kyb ls".to_owned(), Some(parent.clone()));
        assert_eq!(span.place(), parent);
        span.steps(&[]);
        span.fail("failed");
    }
}
