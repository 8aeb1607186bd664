//! One trace through `kyb`, the agent and the registry, as a collector gets it.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::scenario::{PASSWORD, Scenario};
use kybernate_conformance::testbed::HUB_ADDRESS;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::runtime::Runtime;

use crate::harness::{checkpoint, restore, said, start};

/// How long a span may be on its way: the registry gathers them for a second.
const SENT_LIMIT: Duration = Duration::from_secs(30);

type Taken = Arc<Mutex<Vec<Bytes>>>;

/// A collector in the testbed's network.
struct Collector {
    address: SocketAddr,
    taken: Taken,
    _runtime: Runtime,
}

/// A span and the name of who sent it.
type Sent = (String, Span);

async fn take(State(taken): State<Taken>, body: Bytes) -> Vec<u8> {
    taken.lock().unwrap().push(body);
    ExportTraceServiceResponse::default().encode_to_vec()
}

/// Listens in the network of the testbed: a thread goes there, and its socket stays.
fn listen(scenario: &Scenario) -> TcpListener {
    let pid = scenario.testbed.hub.process().pid;
    let listening = std::thread::spawn(move || {
        let network = fs_err::File::open(format!("/proc/{pid}/ns/net")).unwrap();
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&network), kind).unwrap();
        TcpListener::bind((HUB_ADDRESS, 0)).unwrap()
    });
    listening.join().unwrap()
}

impl Collector {
    fn start(scenario: &Scenario) -> Self {
        let listener = listen(scenario);
        let address = listener.local_addr().unwrap();
        let (taken, runtime) = (Taken::default(), Runtime::new().unwrap());
        let router = Router::new().route("/v1/traces", post(take)).with_state(Arc::clone(&taken));
        listener.set_nonblocking(true).unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await.unwrap();
        });
        Self { address, taken, _runtime: runtime }
    }

    fn spans(&self) -> Vec<Sent> {
        let taken = self.taken.lock().unwrap().clone();
        let decoded =
            taken.into_iter().map(|body| ExportTraceServiceRequest::decode(body).unwrap());
        let mut found = Vec::new();
        for resource in decoded.flat_map(|request| request.resource_spans) {
            let attributes = &resource.resource.as_ref().unwrap().attributes;
            let name = attributes.iter().find(|one| one.key == "service.name").unwrap();
            let Some(Value::StringValue(name)) = name.value.clone().unwrap().value else {
                panic!("{name:?}")
            };
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            found.extend(spans.map(|span| (name.clone(), span)));
        }
        found
    }

    /// Waits for a span of this service.
    fn wait_for(&self, who: &str, wanted: impl Fn(&Span) -> bool) -> Span {
        let mut found = None;
        let is_wanted = |(name, span): &Sent| name == who && wanted(span);
        wait_until(SENT_LIMIT, || {
            found = self.spans().into_iter().find(is_wanted);
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("{who} in {:#?}", self.spans())).1
    }
}

fn error(span: &Span) -> Option<String> {
    let found = span.attributes.iter().find(|one| one.key == "error.type")?;
    match found.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_checkpoint_is_one_trace_from_the_command_to_the_registry() {
    let mut scenario = start();
    let collector = Collector::start(&scenario);
    let endpoint = format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{}", collector.address);
    scenario.environment.push(endpoint);
    scenario.registry.take();
    scenario.registry = Some(scenario.start_registry().unwrap());
    scenario.agent_a.take().unwrap().kill();
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, "").unwrap());
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("traced/job:v1");
    checkpoint(&scenario, a, "job", &reference);

    let command = collector.wait_for("kyb", |span| span.name == "kyb checkpoint");
    assert!(command.parent_span_id.is_empty() && error(&command).is_none(), "{command:?}");
    let below = |above: &Span| {
        let (trace, id) = (above.trace_id.clone(), above.span_id.clone());
        move |span: &Span| span.trace_id == trace && span.parent_span_id == id
    };
    let operation = collector.wait_for("kybernate-agent", below(&command));
    assert_eq!(operation.name, "checkpoint");
    let is_within = |span: &Span| {
        span.start_time_unix_nano >= operation.start_time_unix_nano
            && span.end_time_unix_nano <= operation.end_time_unix_nano
    };
    for step in ["dump", "pack", "sign"] {
        let is_step = below(&operation);
        let span = collector.wait_for("kybernate-agent", |span| span.name == step && is_step(span));
        assert!(is_within(&span), "{span:?} {operation:?}");
    }
    let request = collector.wait_for("kybernate-registry", below(&operation));
    assert!(request.start_time_unix_nano >= operation.start_time_unix_nano, "{request:?}");

    // What is refused is told, in one word, on both spans.
    let unknown = scenario.reference("traced/none:v1");
    let output = restore(&scenario, a, &unknown, "none", &[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let command = collector.wait_for("kyb", |span| span.name == "kyb restore");
    let operation = collector.wait_for("kybernate-agent", below(&command));
    assert_eq!(error(&command).as_deref(), Some("failed"));
    assert_eq!(error(&operation).as_deref(), Some("failed"));

    let taken = collector.taken.lock().unwrap().concat();
    let secret = PASSWORD.as_bytes();
    assert!(!taken.windows(secret.len()).any(|window| window == secret), "a secret is exported");
    scenario.end().unwrap();
}
