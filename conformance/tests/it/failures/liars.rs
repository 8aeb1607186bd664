//! A registry that takes what a source is ended for, and keeps nothing of it.

use std::net::SocketAddr;
use std::thread::JoinHandle;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use kybernate_conformance::testbed::HUB_ADDRESS;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::harness::{at_once, in_hub, said, start};

/// Most bytes of a request or an answer: a shard is less.
const BODY_BYTES_MAX: usize = 256 << 20;

/// What is taken, and not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    Tag,
    Signature,
}

/// A proxy of the scenario's registry in the testbed's network.
struct Liar {
    address: SocketAddr,
    ends: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Liar {
    fn start(scenario: &Scenario, lie: Lie) -> Self {
        let registry = scenario.reference("").split_once('/').unwrap().0.to_owned();
        let (tell, told) = std::sync::mpsc::channel();
        let (ends, ended) = oneshot::channel();
        // The runtime has no other thread.
        let thread = in_hub(scenario, move || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().build().unwrap().block_on(async {
                let listener = TcpListener::bind((HUB_ADDRESS, 0)).await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let router = Router::new().fallback(answer).with_state((registry, lie));
                let served = axum::serve(listener, router);
                tokio::select! {
                    served = served => served.unwrap(),
                    _ = ended => {}
                }
            });
        });
        Self { address: told.recv().unwrap(), ends: Some(ends), thread: Some(thread) }
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        drop(self.ends.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Lies, or hands on what is asked and what the registry answers.
async fn answer(State((registry, lie)): State<(String, Lie)>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, BODY_BYTES_MAX).await.unwrap();
    if head.method == Method::PUT && is_it(lie, head.uri.path(), &body) {
        return StatusCode::CREATED.into_response();
    }
    let mut headers = head.headers;
    headers.remove(header::CONTENT_LENGTH);
    let asked =
        reqwest::Client::new().request(head.method, format!("http://{registry}{}", head.uri));
    let answered = asked.headers(headers).body(body).send().await.unwrap();
    let (status, headers) = (answered.status(), answered.headers().clone());
    let mut response = Response::new(Body::from(answered.bytes().await.unwrap()));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn is_it(lie: Lie, path: &str, body: &Bytes) -> bool {
    let Some((_, name)) = path.rsplit_once("/manifests/") else { return false };
    let is_signature = body.windows(8).any(|part| part == b"sigstore");
    match lie {
        Lie::Tag => !name.starts_with("sha256:") && !is_signature,
        Lie::Signature => is_signature,
    }
}

fn stops(scenario: &Scenario, node: &Node, lie: Lie) {
    let liar = Liar::start(scenario, lie);
    let reference = format!("{}/lies/job:{}", liar.address, node.name());
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key, "--stop"];
    let output = scenario.kyb(node, &words).unwrap();
    let told = "does not give it back";
    assert!(!output.status.success() && said(&output).contains(told), "{lie:?}: {}", said(&output));
    scenario.wait_for_ticks(node, "job").unwrap();
}

#[test]
fn a_source_outlives_a_registry_that_keeps_nothing() {
    let scenario = start();
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        for lie in [Lie::Tag, Lie::Signature] {
            stops(&scenario, node, lie);
        }
    });
    scenario.end().unwrap();
}
