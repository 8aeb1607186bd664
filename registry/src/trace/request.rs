//! The span of a request, with the attributes of OpenTelemetry's conventions for HTTP servers.

use axum::response::Response;
use axum::{body::Body, extract::Request};
use futures::FutureExt as _;
use http::header::{HOST, USER_AGENT};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Method, Version};
use http_body_util::BodyExt as _;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{FutureExt as _, SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::propagation::TraceContextPropagator;

use super::TRACER;
use crate::api::Peer;
use crate::request_id::RequestId;
use crate::route::{Route, without_secrets};

/// Longest text of a client that is exported.
const TEXT_MAX: usize = 256;

/// The span of a request.
#[derive(Debug, Clone)]
pub(crate) struct RequestSpan(Context);

impl RequestSpan {
    /// Begins the span of a request, in the client's trace when it names one; nothing while nothing
    /// is traced.
    pub(crate) fn begin(request: &Request, peer: &Peer, id: &RequestId) -> Option<Self> {
        let tracer = TRACER.get()?;
        let path = request.uri().path();
        let route = Route::of(path);
        // Probes and scrapers ask every few seconds, and always get the same.
        if route.as_ref().is_some_and(Route::is_for_operators) {
            return None;
        }
        let headers = request.headers();
        let parent =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &Incoming(headers));
        let method = known(request.method());
        let name = match &route {
            Some(route) => format!("{method} {}", route.template()),
            None => method.to_owned(),
        };
        let text = |name: HeaderName| headers.get(name)?.to_str().ok().map(shortened);
        let mut attributes = vec![
            KeyValue::new("http.request.method", method),
            KeyValue::new("url.scheme", if peer.encrypted { "https" } else { "http" }),
            KeyValue::new("network.protocol.version", version(request.version())),
            KeyValue::new("client.address", peer.address.ip().to_string()),
            KeyValue::new("kybernate.request.id", id.as_str().to_owned()),
        ];
        if let Some(route) = &route {
            attributes.push(KeyValue::new("http.route", route.template()));
            attributes.push(KeyValue::new("url.path", shortened(&without_secrets(path))));
        }
        if let Some(agent) = text(USER_AGENT) {
            attributes.push(KeyValue::new("user_agent.original", agent));
        }
        if let Some(host) = text(HOST).and_then(|host| host.parse::<Authority>().ok()) {
            attributes.push(KeyValue::new("server.address", host.host().to_owned()));
            if let Some(port) = host.port_u16() {
                attributes.push(KeyValue::new("server.port", i64::from(port)));
            }
        }
        let span = tracer.span_builder(name).with_kind(SpanKind::Server);
        let span = span.with_attributes(attributes).start_with_context(tracer, &parent);
        Some(Self(parent.with_span(span)))
    }

    /// Returns the trace, for logs, where it is recorded.
    pub(crate) fn trace_id(&self) -> Option<String> {
        let span = self.0.span();
        let of = span.span_context();
        of.is_sampled().then(|| of.trace_id().to_string())
    }

    /// Answers the request within its span, which ends with the reply's last byte.
    pub(crate) fn around(
        self,
        answer: impl Future<Output = Response>,
    ) -> impl Future<Output = Response> {
        // No `async` here: it would hold the answer's future twice.
        let Self(context) = self;
        answer.with_context(context.clone()).map(|response| answered(response, context))
    }
}

/// Says in the span how a request is answered.
fn answered(response: Response, context: Context) -> Response {
    let (status, span) = (response.status(), context.span());
    let code = i64::from(status.as_u16());
    span.set_attribute(KeyValue::new("http.response.status_code", code));
    if status.is_server_error() {
        span.set_attribute(KeyValue::new("error.type", code.to_string()));
        span.set_status(Status::error(""));
    }
    until_sent(response, context)
}

/// Holds the span until the body is sent; one that is cut was an error.
fn until_sent(response: Response, context: Context) -> Response {
    // Of all adapters this one leaves the body's length as it is.
    response.map(|body| {
        Body::new(body.map_err(move |error| {
            let span = context.span();
            span.set_attribute(KeyValue::new("error.type", "body"));
            span.set_status(Status::error(""));
            error
        }))
    })
}

/// What a request's headers say of the trace it is part of.
struct Incoming<'a>(&'a HeaderMap);

impl Extractor for Incoming<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Returns the methods there are; a client may send any word.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::CONNECT => "CONNECT",
        Method::TRACE => "TRACE",
        _ => "_OTHER",
    }
}

fn version(version: Version) -> &'static str {
    if version == Version::HTTP_10 { "1.0" } else { "1.1" }
}

fn shortened(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}
