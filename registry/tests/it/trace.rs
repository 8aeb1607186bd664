//! Traces, as a collector gets them from the real program.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::as_conversions,
    reason = "a failed step here is a failed test"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, Method};
use kybernate_spec::{Digest, media_type};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use tokio::net::{TcpListener, TcpSocket};
use tokio_stream::wrappers::TcpListenerStream;

use crate::access::{basic, htpasswd};
use crate::harness::{Remote, image, wait_until};
use crate::process::{Process, command};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const BLOB: usize = 3 << 20;

/// Takes spans, over HTTP or gRPC, and keeps all bytes and headers.
struct Collector {
    url: String,
    taken: Taken,
    serving: tokio::task::JoinHandle<()>,
}

#[derive(Clone, Default)]
struct Taken(Arc<Mutex<Vec<(HeaderMap, ExportTraceServiceRequest)>>>);

impl Drop for Collector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn take(State(taken): State<Taken>, headers: HeaderMap, body: Bytes) -> Vec<u8> {
    assert_eq!(headers.get("content-type").unwrap(), "application/x-protobuf");
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    taken.0.lock().unwrap().push((headers, request));
    ExportTraceServiceResponse::default().encode_to_vec()
}

#[tonic::async_trait]
impl TraceService for Taken {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let headers = request.metadata().clone().into_headers();
        self.0.lock().unwrap().push((headers, request.into_inner()));
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn http() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, taken) = (url(&listener), Taken::default());
        let router = Router::new().route("/v1/traces", post(take)).with_state(taken.clone());
        #[expect(clippy::disallowed_methods, reason = "aborted when the collector is dropped")]
        let serving = tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
        Self { url, taken, serving }
    }

    async fn grpc() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, taken) = (url(&listener), Taken::default());
        let service = TraceServiceServer::new(taken.clone());
        let served = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        #[expect(clippy::disallowed_methods, reason = "aborted when the collector is dropped")]
        let serving = tokio::spawn(async { served.await.unwrap() });
        Self { url, taken, serving }
    }

    fn spans(&self) -> Vec<Span> {
        let taken = self.taken.0.lock().unwrap();
        let resources = taken.iter().flat_map(|(_, request)| &request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| &scope.spans).cloned().collect()
    }

    /// Returns the one span that a request with this id had.
    fn of_request(&self, id: &str) -> Span {
        let own =
            |span: &Span| attributes(span).get("kybernate.request.id") == Some(&id.to_owned());
        let spans: Vec<_> = self.spans().into_iter().filter(own).collect();
        let [span] = &spans[..] else { panic!("{id}: {spans:?}") };
        span.clone()
    }

    /// Returns the span of this name below another.
    fn below(&self, parent: &Span, name: &str) -> Span {
        let own = |span: &Span| span.parent_span_id == parent.span_id && span.name == name;
        let spans: Vec<_> = self.spans().into_iter().filter(own).collect();
        let Some(span) = spans.first() else { panic!("{name}: {:?}", self.spans()) };
        assert_eq!(span.trace_id, parent.trace_id);
        assert!(span.start_time_unix_nano >= parent.start_time_unix_nano);
        assert!(span.end_time_unix_nano <= parent.end_time_unix_nano);
        span.clone()
    }
}

fn url(listener: &TcpListener) -> String {
    format!("http://{}", listener.local_addr().unwrap())
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.clone()) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{other:?}"),
    }
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    attributes.iter().map(|one| (one.key.clone(), text(one.value.as_ref()))).collect()
}

fn attributes(span: &Span) -> BTreeMap<String, String> {
    texts(&span.attributes)
}

fn resource(request: &ExportTraceServiceRequest) -> BTreeMap<String, String> {
    texts(&request.resource_spans.first().unwrap().resource.as_ref().unwrap().attributes)
}

fn hex(id: &[u8]) -> String {
    let mut text = String::new();
    for byte in id {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

/// Sends a request and returns its id.
async fn send(
    remote: &Remote,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> (u16, String) {
    let reply = remote.send(method, path, headers, body.to_vec()).await;
    (reply.status, reply.header("x-request-id").to_owned())
}

async fn figure(remote: &Remote, name: &str) -> u64 {
    let page = remote.get("/metrics").await.body;
    let page = String::from_utf8_lossy(&page).into_owned();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

/// The ids of requests, by what they did, and the secret of the upload.
struct Asked {
    ids: BTreeMap<&'static str, String>,
    secret: String,
}

/// Pushes and pulls a blob, in a trace of the client's and out of it.
async fn ask(remote: &Remote, login: &str) -> Asked {
    let sampled = format!("00-{TRACE}-{PARENT}-01");
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    let within = [("authorization", login), ("traceparent", &sampled)];
    let alone = [("authorization", login)];
    let without = [("authorization", login), ("traceparent", &unsampled)];
    let content = vec![7; BLOB];
    let digest = Digest::of(&content);
    let begun = remote.send(Method::POST, "/v2/a/b/blobs/uploads/", &within, "").await;
    assert_eq!(begun.status, 202);
    let upload = begun.header("location").to_owned();
    let secret = upload.rsplit_once('/').unwrap().1.to_owned();
    let (ended, stray) = (format!("{upload}?digest={digest}"), format!("{upload}/manifests/v1"));
    let (blob, list) = (format!("/v2/a/b/blobs/{digest}"), "/v2/a/b/tags/list".to_owned());
    let mut ids = BTreeMap::new();
    for (name, method, path, headers, body, wanted) in [
        ("patch", Method::PATCH, &upload, &within[..], &*content, 202),
        ("status", Method::GET, &upload, &within, b"", 204),
        ("put", Method::PUT, &ended, &within, b"", 201),
        ("list", Method::GET, &list, &within, b"", 200),
        ("stray", Method::GET, &stray, &alone, b"", 404),
        ("pull", Method::GET, &blob, &alone, b"", 200),
        ("unsampled", Method::HEAD, &blob, &without, b"", 200),
    ] {
        let (status, id) = send(remote, method, path, headers, body).await;
        assert_eq!(status, wanted, "{name}");
        ids.insert(name, id);
    }
    Asked { ids, secret }
}

fn is_told(collector: &Collector, asked: &Asked, address: &str) {
    let of = |name| collector.of_request(&asked.ids[name]);
    let put = of("put");
    assert_eq!(put.name, "PUT /v2/{name}/blobs/uploads/{id}");
    assert_eq!(put.kind, SpanKind::Server as i32);
    assert_eq!((&*hex(&put.trace_id), &*hex(&put.parent_span_id)), (TRACE, PARENT));
    let (host, port) = address.split_once(':').unwrap();
    let told = attributes(&put);
    for (name, value) in [
        ("http.request.method", "PUT"),
        ("http.route", "/v2/{name}/blobs/uploads/{id}"),
        ("http.response.status_code", "201"),
        ("url.path", "/v2/a/b/blobs/uploads/REDACTED"),
        ("url.scheme", "http"),
        ("server.address", host),
        ("server.port", port),
        ("network.protocol.version", "1.1"),
        ("client.address", "127.0.0.1"),
    ] {
        assert_eq!(told.get(name).map(String::as_str), Some(value), "{name}: {told:?}");
    }
    let size = BLOB.to_string();
    collector.below(&put, "access.identify");
    let commit = collector.below(&put, "store.commit");
    assert_eq!(attributes(&commit)["kybernate.blob.size"], size);
    collector.below(&commit, "store.sync");
    collector.below(&commit, "store.sync_directory");
    let receive = collector.below(&of("patch"), "upload.receive");
    assert_eq!(attributes(&receive)["kybernate.received.size"], size);
    assert_eq!(hex(&of("status").trace_id), TRACE);
    let list = attributes(&collector.below(&of("list"), "store.list"));
    // Whether the index is made already by then is not said.
    assert!(["0", "1"].contains(&&*list["kybernate.list.indexed"]), "{list:?}");
    let pull = of("pull");
    assert!(pull.parent_span_id.is_empty() && hex(&pull.trace_id) != TRACE, "{pull:?}");
    assert_eq!(attributes(&pull)["http.response.status_code"], "200");
    let stray = &attributes(&of("stray"))["url.path"];
    assert_eq!(stray, "/v2/a/b/blobs/uploads/REDACTED/manifests/v1");
    let all = collector.spans();
    let unsampled = &asked.ids["unsampled"];
    assert!(!all.iter().any(|span| attributes(span).values().any(|value| value == unsampled)));
    assert!(!all.iter().any(|span| span.name.contains("livez") || span.name.contains("metrics")));
}

#[tokio::test]
async fn a_push_is_told_part_by_part_and_no_secret_is() {
    let collector = Collector::http().await;
    let root = tempfile::tempdir().unwrap();
    let (users, config) = (root.path().join("htpasswd"), root.path().join("r.toml"));
    fs_err::write(&users, htpasswd(&[("alice", "geheim")])).unwrap();
    fs_err::write(&config, format!("[access]\nhtpasswd = {users:?}\n")).unwrap();
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--log-filter", "debug"]);
    serve.arg("--config").arg(&config).arg("--root").arg(root.path().join("store"));
    serve.env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url);
    serve.env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=sesam");
    serve.env("OTEL_SERVICE_NAME", "cache-7");
    serve.env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test");
    let process = Process::of(serve).await;
    let login = basic("alice", "geheim");
    let asked = ask(&process.remote, &login).await;
    assert_eq!(process.remote.get("/livez").await.status, 200);
    let exported = "kybernate_registry_trace_exported_spans_total";
    let some = async || figure(&process.remote, exported).await > 0;
    wait_until("spans are exported", some).await;
    let address = process.remote.url.strip_prefix("http://").unwrap().to_owned();
    // What is left is sent at the end.
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();

    is_told(&collector, &asked, &address);
    let trace = hex(&collector.of_request(&asked.ids["pull"]).trace_id);
    assert!(log.contains(&trace), "a log line leads to its trace: {log}");
    let login = login.strip_prefix("Basic ").unwrap();
    let secrets = [&*asked.secret, "geheim", login, "sesam"];
    for (headers, request) in collector.taken.0.lock().unwrap().iter() {
        assert_eq!(headers["x-key"], "sesam");
        let resource = resource(request);
        assert_eq!(resource["service.name"], "cache-7");
        assert_eq!(resource["deployment.environment.name"], "test");
        let bytes = request.encode_to_vec();
        for secret in secrets {
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{secret} is exported");
        }
    }
    for secret in secrets {
        assert!(!log.contains(secret), "{secret} is logged: {log}");
    }
}

#[tokio::test]
async fn spans_go_over_grpc_with_headers_of_a_file() {
    let collector = Collector::grpc().await;
    let root = tempfile::tempdir().unwrap();
    let (headers, config) = (root.path().join("headers"), root.path().join("r.toml"));
    fs_err::write(&headers, "X-Key: sesam\n").unwrap();
    let text = format!(
        "[trace]\nendpoint = {:?}\nprotocol = \"grpc\"\nratio = 1.0\nheaders = {headers:?}\n",
        collector.url
    );
    fs_err::write(&config, text).unwrap();
    let store = root.path().join("store");
    let process = Process::start(&store, &["--config", config.to_str().unwrap()]).await;
    let remote = process.remote.clone();
    remote.push("a", b"{}").await;
    remote.push("a", b"layer").await;
    let headers = [("content-type", media_type::OCI_MANIFEST)];
    let manifest = image(b"layer", None);
    let put = send(&remote, Method::PUT, "/v2/a/manifests/v1", &headers, &manifest).await;
    assert_eq!(put.0, 201);
    drop(remote);
    process.terminate().await;
    let put = collector.of_request(&put.1);
    assert_eq!(put.name, "PUT /v2/{name}/manifests/{reference}");
    collector.below(&collector.below(&put, "store.put_manifest"), "store.sync_directory");
    let taken = collector.taken.0.lock().unwrap();
    for (headers, request) in taken.iter() {
        assert_eq!(headers.get("x-key").unwrap(), "sesam");
        assert_eq!(resource(request)["service.name"], "kybernate-registry");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_harms_nobody() {
    // Connections are accepted by the kernel, and nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let root = tempfile::tempdir().unwrap();
    let endpoint = url(&listener);
    let more = ["--trace-endpoint", &endpoint, "--trace-timeout", "60s", "--log-access", "none"];
    let process = Process::start(root.path(), &more).await;
    let remote = process.remote.clone();
    let digest = remote.push("a", b"blob").await;
    let path = format!("/v2/a/blobs/{digest}");
    let lost = "kybernate_registry_trace_lost_spans_total{why=\"queue\"}";
    let began = Instant::now();
    let asking = async || {
        let heads = (0..500).map(|_| remote.head(&path));
        for reply in futures::future::join_all(heads).await {
            assert_eq!(reply.status, 200);
        }
        figure(&remote, lost).await > 0
    };
    wait_until("what finds no room is counted", asking).await;
    drop(remote);
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    let ending = Instant::now();
    let output = process.terminate().await;
    assert_eq!(output.status.code(), Some(0));
    assert!(ending.elapsed() < Duration::from_secs(15), "{:?}", ending.elapsed());

    // Nobody listens: told once, however many batches are lost.
    let nobody = TcpSocket::new_v4().unwrap();
    nobody.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let endpoint = format!("http://{}", nobody.local_addr().unwrap());
    let more = ["--trace-endpoint", &*endpoint, "--log-access", "none"];
    let process = Process::start(root.path(), &more).await;
    let remote = process.remote.clone();
    let failed = "kybernate_registry_trace_lost_spans_total{why=\"export\"}";
    for round in 1..4 {
        assert_eq!(remote.head(&path).await.status, 200);
        let counted = async || figure(&remote, failed).await >= round;
        wait_until("spans that are not taken are counted", counted).await;
    }
    drop(remote);
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    assert_eq!(log.matches("spans are lost").count(), 1, "{log}");
}

#[tokio::test]
async fn what_is_wrong_with_traces_is_told_without_secrets() {
    let root = tempfile::tempdir().unwrap();
    let (headers, config) = (root.path().join("headers"), root.path().join("r.toml"));
    fs_err::write(&headers, "geheim\n").unwrap();
    let text = "[trace]\nendpoint = \"http://u:geheim@h\"\nratio = 2.0\nprotocol = \"thrift\"\n";
    for (text, words) in [
        (text.to_owned(), &["trace.endpoint: ", "trace.ratio: ", "trace.protocol: "][..]),
        (format!("[trace]\nheaders = {headers:?}\n"), &["headers:1:1: is no header"]),
    ] {
        fs_err::write(&config, text).unwrap();
        let output = command(&["verify", config.to_str().unwrap()]).output().await.unwrap();
        assert_eq!(output.status.code(), Some(64));
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!told.contains("geheim"), "{told}");
        for word in words {
            assert!(told.contains(word), "{word}: {told}");
        }
    }
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--root"]);
    serve.arg(root.path().join("store")).env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1");
    let output = serve.env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json").output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("OTEL_EXPORTER_OTLP_PROTOCOL") && told.contains("grpc"), "{told}");
    assert!(!root.path().join("store").exists());
}
