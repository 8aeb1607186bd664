//! One trace through `kyb`, the agent and the registry, as a collector gets it.

use std::net::{SocketAddr, TcpListener};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{PASSWORD, Scenario};
use kybernate_conformance::testbed::HUB_ADDRESS;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::runtime::Runtime;

use crate::harness::{checkpoint, in_hub, on_both, restore, said, start};
use crate::pods::{CONFIG, WORKLOAD, command_of, make_ready};

/// How long a span may be on its way: the registry gathers them for a second.
const SENT_LIMIT: Duration = Duration::from_secs(30);

type Taken = Arc<Mutex<Vec<Bytes>>>;

/// A collector in the testbed's network.
struct Collector {
    address: SocketAddr,
    taken: Taken,
    _runtime: Runtime,
}

/// A span, and who sent it from where.
#[derive(Debug)]
struct Sent {
    who: String,
    host: Option<String>,
    span: Span,
}

async fn take(State(taken): State<Taken>, body: Bytes) -> Vec<u8> {
    taken.lock().unwrap().push(body);
    ExportTraceServiceResponse::default().encode_to_vec()
}

/// Listens in the network of the testbed: a thread goes there, and its socket stays.
fn listen(scenario: &Scenario) -> TcpListener {
    in_hub(scenario, || TcpListener::bind((HUB_ADDRESS, 0)).unwrap()).join().unwrap()
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
            let who = text(attributes, "service.name").unwrap();
            let host = text(attributes, "host.name");
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            found.extend(spans.map(|span| Sent { who: who.clone(), host: host.clone(), span }));
        }
        found
    }

    fn wait_for(&self, what: &str, wanted: impl Fn(&Sent) -> bool) -> Span {
        let mut found = None;
        wait_until(SENT_LIMIT, || {
            found = self.spans().into_iter().find(&wanted);
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("{what} in {:#?}", self.spans())).span
    }

    /// Waits for the span of a command that was called on a node.
    fn command(&self, node: &Node, name: &str) -> Span {
        self.wait_for(name, |sent| {
            sent.who == "kyb" && sent.span.name == name && sent.host.as_deref() == Some(node.name())
        })
    }

    /// Waits for what this service did in a span.
    fn below(&self, above: &Span, who: &str) -> Span {
        self.wait_for(who, |sent| sent.who == who && is_below(&sent.span, above))
    }
}

fn is_below(span: &Span, above: &Span) -> bool {
    span.trace_id == above.trace_id && span.parent_span_id == above.span_id
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|one| one.key == key)?;
    match found.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        other => panic!("{other:?}"),
    }
}

fn error(span: &Span) -> Option<String> {
    text(&span.attributes, "error.type")
}

#[test]
fn a_checkpoint_is_one_trace_from_the_command_to_the_registry() {
    let mut scenario = start();
    let collector = Collector::start(&scenario);
    let endpoint = format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://{}", collector.address);
    scenario.environment.push(endpoint);
    scenario.registry.take();
    scenario.registry = Some(scenario.start_registry().unwrap());
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let _agent = scenario.start_agent(node, CONFIG).unwrap();
        is_one_trace(scenario, node, &collector);
    });
    let taken = collector.taken.lock().unwrap().concat();
    let secret = PASSWORD.as_bytes();
    assert!(!taken.windows(secret.len()).any(|window| window == secret), "a secret is exported");
    scenario.end().unwrap();
}

fn is_one_trace(scenario: &Scenario, node: &Node, collector: &Collector) {
    scenario.run_workload(node, "job", 16, &[]).unwrap();
    let reference = scenario.reference(&format!("traced/job:{}", node.name()));
    let digest = checkpoint(scenario, node, "job", &reference);

    let command = collector.command(node, "kyb checkpoint");
    assert!(command.parent_span_id.is_empty() && error(&command).is_none(), "{command:?}");
    let operation = collector.below(&command, "kybernate-agent");
    assert_eq!(operation.name, "checkpoint");
    let is_within = |span: &Span| {
        span.start_time_unix_nano >= operation.start_time_unix_nano
            && span.end_time_unix_nano <= operation.end_time_unix_nano
    };
    for step in ["dump", "pack", "sign"] {
        let span = collector.wait_for(step, |sent| {
            sent.who == "kybernate-agent"
                && sent.span.name == step
                && is_below(&sent.span, &operation)
        });
        assert!(is_within(&span), "{span:?} {operation:?}");
    }
    let request = collector.below(&operation, "kybernate-registry");
    assert!(request.start_time_unix_nano >= operation.start_time_unix_nano, "{request:?}");

    restores_in_a_trace(scenario, node, collector, &format!("{reference}@{digest}"));

    // What is refused is told, in one word, on both spans.
    let unknown = scenario.reference("traced/none:v1");
    let output = restore(scenario, node, &unknown, "none", &[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let command = collector.command(node, "kyb restore");
    let operation = collector.below(&command, "kybernate-agent");
    assert_eq!(error(&command).as_deref(), Some("failed"));
    assert_eq!(error(&operation).as_deref(), Some("failed"));
}

/// Nobody has a trace when containerd creates a Pod's container: the agent begins one.
fn restores_in_a_trace(scenario: &Scenario, node: &Node, collector: &Collector, pinned: &str) {
    make_ready(scenario, node, pinned);
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mut create = command_of(node, [pinned, "main"], &[&wish], &[], &WORKLOAD);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let operation = collector.wait_for("restore", |sent| {
        sent.span.name == "restore"
            && sent.span.parent_span_id.is_empty()
            && sent.host.as_deref() == Some(node.name())
    });
    assert_eq!(text(&operation.attributes, "container.id").as_deref(), Some("main"));
    assert!(error(&operation).is_none(), "{operation:?}");
    collector.below(&operation, "kybernate-registry");
}
