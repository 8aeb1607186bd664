//! Traces: what a request did and how long each part took, for OpenTelemetry's collectors.
//!
//! Logs and traces know nothing of each other: what is exported is what this module is told, and
//! nothing that somebody logs can get into it. While nothing is traced, all that is left of it is
//! the look whether it is on.
//!
//! ```text
//! request ──▶ Request span ──▶ parts ──▶ bounded queue ──▶ batches ──▶ collector
//!   traceparent    (`request`)   (`part`)      (`export`)    lost ones are counted
//! ```
//!
//! The span of a request is over with the last byte of its reply and with all that it began.

use std::sync::OnceLock;

use futures::future::Either;
use kybernate_spec::chain;
use opentelemetry::trace::{
    FutureExt as _, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, ContextGuard, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

use self::export::{Outlet, Waiting, exporter};
use crate::config::{Mistake, Standard, Trace};
use crate::tasks::Tasks;

mod export;
mod request;

pub(crate) use self::request::RequestSpan;

/// What makes spans, once the process traces.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// How long spans may take to be sent at the end.
const FLUSH_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// Why nothing can be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// What is set cannot work.
    #[error(transparent)]
    Mistake(Mistake),
    /// The library refuses what is set, here or in the environment.
    #[error("failed to set up traces")]
    Build(#[source] opentelemetry_otlp::ExporterBuildError),
}

/// Spans on their way.
#[derive(Debug)]
pub struct Traces {
    tasks: Tasks,
    // Kept until the end: a provider that is dropped shuts down.
    _provider: SdkTracerProvider,
}

impl Traces {
    /// Begins to trace when that is set. Blocks shortly; needs a runtime around it.
    pub fn start(settings: &Trace) -> Result<Option<Self>, TraceError> {
        let standard = Standard::read();
        if !settings.is_on(&standard) {
            return Ok(None);
        }
        let detector = Box::new(EnvResourceDetector::new());
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("host.name", host_name()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .with_detector(detector)
            .with_service_name(standard.service().to_owned())
            .build();
        let exporter = exporter(settings, &standard, &resource)?;
        let (outlet, waiting) = Outlet::new();
        let mut builder =
            SdkTracerProvider::builder().with_resource(resource).with_span_processor(outlet);
        if let Some(ratio) = settings.ratio {
            let own = Box::new(Sampler::TraceIdRatioBased(ratio));
            builder = builder.with_sampler(Sampler::ParentBased(own));
        }
        let provider = builder.build();
        let tasks = Tasks::default();
        tasks.spawn(|cancel| Waiting::export(waiting, exporter, cancel));
        if TRACER.set(provider.tracer("kybernate-registry")).is_err() {
            tracing::debug!("traces were started already");
        }
        Ok(Some(Self { tasks, _provider: provider }))
    }

    /// Sends what is left, as far as the collector takes it soon.
    pub async fn flush(self) {
        if !self.tasks.shut_down(FLUSH_TIME_MAX).await {
            tracing::warn!("the collector has not taken the last spans in time");
        }
    }
}

/// Says what is wrong with the files that the settings name. Blocks.
pub(crate) fn check(settings: &Trace) -> Result<(), Mistake> {
    export::headers(settings).map(drop)
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Whether the request that is being worked on is recorded.
fn recorded() -> Option<(&'static SdkTracer, Context)> {
    let tracer = TRACER.get()?;
    let context = Context::current();
    let recorded = context.span().span_context().is_sampled();
    recorded.then_some((tracer, context))
}

fn begin(name: &'static str, (tracer, parent): (&SdkTracer, Context)) -> Context {
    let span = tracer.span_builder(name).start_with_context(tracer, &parent);
    parent.with_span(span)
}

/// Does `work` as a part of the request under way.
pub(crate) fn part<T, E>(name: &'static str, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let Some(parent) = recorded() else { return work() };
    let context = begin(name, parent);
    let guard = context.clone().attach();
    let outcome = work();
    drop(guard);
    if outcome.is_err() {
        // What it was is in the log, under the request's id.
        context.span().set_status(Status::error(""));
    }
    outcome
}

/// Whether the process traces.
pub(crate) fn is_on() -> bool {
    TRACER.get().is_some()
}

/// Returns `work` as a part of the request under way.
pub(crate) fn part_of<F: Future>(name: &'static str, work: F) -> impl Future<Output = F::Output> {
    // No `async` here: it would hold the work twice.
    match recorded() {
        Some(parent) => Either::Left(work.with_context(begin(name, parent))),
        None => Either::Right(work),
    }
}

/// Says something of the part under way.
pub(crate) fn note(key: &'static str, value: u64) {
    if let Some((_, context)) = recorded() {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        context.span().set_attribute(KeyValue::new(key, value));
    }
}

/// What takes the request under way along to another thread.
#[derive(Debug)]
pub(crate) struct Carried(Option<Context>);

/// Returns what takes the request under way along.
pub(crate) fn carried() -> Carried {
    Carried(recorded().map(|(_, context)| context))
}

impl Carried {
    /// Works on the request until the value is dropped.
    pub(crate) fn go_on(self) -> Option<ContextGuard> {
        self.0.map(Context::attach)
    }
}

/// Takes the request under way along to another task.
pub(crate) fn carry<F: Future>(work: F) -> impl Future<Output = F::Output> {
    match recorded() {
        Some((_, context)) => Either::Left(work.with_context(context)),
        None => Either::Right(work),
    }
}
