//! Others are told what happens, sooner or later.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed step is a failed test")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use kybernate_spec::{Digest, media_type};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::harness::{Remote, TestRegistry, image, wait_until};
use crate::process::Process;

/// What an endpoint was sent: headers and the envelope.
type Received = Vec<(HeaderMap, Value)>;

/// Takes events, or refuses them.
struct Endpoint {
    url: String,
    received: Arc<Mutex<Received>>,
    answer: Arc<AtomicU16>,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[derive(Clone)]
struct Behaviour {
    received: Arc<Mutex<Received>>,
    answer: Arc<AtomicU16>,
}

async fn receive(State(to): State<Behaviour>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let answer = StatusCode::from_u16(to.answer.load(Ordering::Relaxed)).unwrap();
    if answer.is_success() {
        let envelope = serde_json::from_slice(&body).unwrap();
        to.received.lock().unwrap().push((headers, envelope));
    }
    answer
}

impl Endpoint {
    async fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn on(listener: TcpListener) -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::new(AtomicU16::new(200));
        let state = Behaviour { received: Arc::clone(&received), answer: Arc::clone(&answer) };
        let url = format!("http://{}/events", listener.local_addr().unwrap());
        let router = Router::new().route("/events", post(receive)).with_state(state);
        #[expect(clippy::disallowed_methods, reason = "aborted when the endpoint is dropped")]
        let serving = tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
        Self { url, received, answer, serving }
    }

    /// Waits until there are so many events, and returns them.
    async fn events(&self, many: usize) -> Vec<Value> {
        let enough = async || self.received.lock().unwrap().len() >= many;
        wait_until("events are there", enough).await;
        let received = self.received.lock().unwrap();
        assert_eq!(received.len(), many, "{received:?}");
        received.iter().map(|(_, envelope)| envelope["events"][0].clone()).collect()
    }

    fn setting(&self, more: &str) -> String {
        format!(
            "[[notify.endpoint]]\nname = \"e\"\nurl = {:?}\nretry_max = \"1s\"\n{more}",
            self.url
        )
    }
}

async fn push(remote: &Remote, tag: &str) -> Digest {
    remote.push_image("a", tag, tag.as_bytes(), None).await.digest
}

#[tokio::test]
async fn changes_are_told_as_distribution_tells_them() {
    let endpoint = Endpoint::start().await;
    let registry = TestRegistry::start_set(&endpoint.setting("")).await;
    let image = push(&registry, "v1").await;
    let host = registry.url.strip_prefix("http://").unwrap().to_owned();
    let (layer, mounted) = (Digest::of(b"v1"), "/v2/b/blobs/uploads/?from=a&mount=");
    let reply = registry.send(http::Method::POST, &format!("{mounted}{layer}"), &[], "").await;
    assert_eq!(reply.status, 201);
    registry.get("/v2/a/manifests/v1").await;
    assert_eq!(registry.delete("/v2/a/manifests/v1").await.status, 202);
    assert_eq!(registry.delete(&format!("/v2/a/manifests/{image}")).await.status, 202);
    // What is refused is not told.
    assert_eq!(registry.delete("/v2/a/manifests/v1").await.status, 404);
    let missing = crate::harness::image(b"nowhere", None);
    let refused = registry.put_manifest("a", "v2", media_type::OCI_MANIFEST, missing).await;
    refused.refused(400, "MANIFEST_BLOB_UNKNOWN");
    push(&registry, "last").await;

    let events = endpoint.events(5).await;
    let url = format!("http://{host}/v2/a/manifests/{image}");
    let size = events[0]["target"]["size"].as_u64().unwrap();
    assert_eq!(
        events[0]["target"],
        json!({
            "mediaType": media_type::OCI_MANIFEST, "size": size, "length": size, "digest": image,
            "repository": "a", "url": url, "tag": "v1",
        })
    );
    assert_eq!(events[0]["request"]["method"], "PUT");
    assert_eq!(events[0]["request"]["host"], host);
    assert!(events[0]["request"]["addr"].as_str().unwrap().starts_with("127.0.0.1:"));
    let actions: Vec<_> = events.iter().map(|event| event["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["push", "mount", "delete", "delete", "push"]);
    assert_eq!(events[1]["target"]["fromRepository"], "a");
    assert_eq!(events[1]["target"]["repository"], "b");
    assert_eq!(events[2]["target"], json!({ "repository": "a", "tag": "v1" }));
    assert_eq!(events[3]["target"], json!({ "repository": "a", "digest": image }));
    let ids: BTreeSet<_> = events.iter().map(|event| event["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 5);
    let headers = endpoint.received.lock().unwrap()[0].0.clone();
    assert_eq!(headers["content-type"], "application/vnd.docker.distribution.events.v1+json");
    assert_eq!(headers["webhook-id"], events[0]["id"].as_str().unwrap());
}

/// Who follows what is told ends where the registry is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_last_of_a_tag_is_what_it_names() {
    const ROUNDS: usize = 20;
    const PUSHES: usize = 6;
    let endpoint = Endpoint::start().await;
    let registry = TestRegistry::start_set(&endpoint.setting("")).await;
    let mut ends = Vec::new();
    for round in 0..ROUNDS {
        let pushes = (0..PUSHES).map(|n| {
            let content = format!("content {round} {n}");
            let registry = &registry;
            async move { registry.put_manifest("a", "v1", "x/y", content).await.status }
        });
        let answers = futures::future::join_all(pushes).await;
        assert!(answers.iter().all(|status| *status == 201), "{answers:?}");
        let names = registry.head("/v2/a/manifests/v1").await;
        ends.push(names.header("docker-content-digest").to_owned());
    }
    let events = endpoint.events(ROUNDS * PUSHES).await;
    for (round, end) in events.chunks(PUSHES).zip(&ends) {
        assert_eq!(round.last().unwrap()["target"]["digest"], **end);
    }
}

#[tokio::test]
async fn pulls_are_told_to_who_asks_and_requests_are_signed() {
    let endpoint = Endpoint::start().await;
    let secret = tempfile::NamedTempFile::new().unwrap();
    fs_err::write(secret.path(), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
    let more = format!("actions = [\"pull\"]\nsecret = {0:?}\nbearer = {0:?}", secret.path());
    let registry = TestRegistry::start_set(&endpoint.setting(&more)).await;
    let image = push(&registry, "v1").await;
    registry.head("/v2/a/manifests/v1").await;
    registry.get("/v2/a/manifests/v1").await;
    // Told last: what comes before it is all there is of the push and of the look.
    registry.get(&format!("/v2/a/manifests/{image}")).await;
    let events = endpoint.events(2).await;
    for (event, tag) in events.iter().zip([json!("v1"), Value::Null]) {
        assert_eq!((&event["action"], &event["target"]["tag"]), (&json!("pull"), &tag));
        assert_eq!(event["target"]["digest"], json!(image));
    }
    let headers = endpoint.received.lock().unwrap()[0].0.clone();
    assert!(headers["webhook-signature"].to_str().unwrap().starts_with("v1,"));
    assert_eq!(headers["authorization"], "Bearer whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
}

#[tokio::test]
async fn pushes_of_blobs_are_told_to_who_asks() {
    let (endpoint, without) = (Endpoint::start().await, Endpoint::start().await);
    let text = endpoint.setting("blobs = true\nactions = [\"push\"]\n")
        + &without.setting("").replace("name = \"e\"", "name = \"without\"");
    let registry = TestRegistry::start_set(&text).await;
    let image = push(&registry, "v1").await;
    let events = endpoint.events(3).await;
    let host = registry.url.strip_prefix("http://").unwrap();
    for (event, content) in events.iter().zip([&b"{}"[..], b"v1"]) {
        let digest = Digest::of(content);
        let url = format!("http://{host}/v2/a/blobs/{digest}");
        assert_eq!(event["action"], "push");
        assert_eq!(
            event["target"],
            json!({
                "mediaType": "application/octet-stream", "size": content.len(),
                "length": content.len(), "digest": digest, "repository": "a", "url": url,
            })
        );
        assert_eq!(event["request"]["method"], "PUT");
    }
    assert_eq!(events[2]["target"]["tag"], "v1");
    let others = without.events(1).await;
    assert_eq!(others[0]["target"]["digest"], json!(image));

    // What is refused is not told.
    let upload = registry.begin("a").await;
    let refused = registry.put(&upload, &Digest::of(b"other"), "content").await;
    refused.refused(400, "DIGEST_INVALID");
    registry.push("a", b"last").await;
    assert_eq!(endpoint.events(4).await[3]["target"]["digest"], json!(Digest::of(b"last")));
}

/// Killed after the push was acknowledged and before the endpoint took the event.
#[tokio::test]
async fn what_happened_is_told_after_a_kill() {
    let endpoint = Endpoint::start().await;
    endpoint.answer.store(503, Ordering::Relaxed);
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let config = root.path().join("r.toml");
    fs_err::write(&config, endpoint.setting("")).unwrap();
    let (store, config) = (root.path().join("store"), config.to_str().unwrap().to_owned());
    let process = Process::start(&store, &["--config", &config]).await;
    let image = push(&process.remote, "v1").await;
    process.kill().await;
    assert!(endpoint.received.lock().unwrap().is_empty());

    endpoint.answer.store(204, Ordering::Relaxed);
    let process = Process::start(&store, &["--config", &config]).await;
    assert_eq!(endpoint.events(1).await[0]["target"]["digest"], json!(image));
    let page = async || process.remote.get("/metrics").await.body;
    let figure = |page: &[u8], line: &str| String::from_utf8_lossy(page).contains(line);
    let counted = "kybernate_registry_notify_delivered_total{endpoint=\"e\"} 1\n";
    wait_until("it is counted", async || figure(&page().await, counted)).await;
    wait_until("nothing waits", async || {
        figure(&page().await, "kybernate_registry_notify_waiting 0\n")
    })
    .await;
    process.kill().await;
    // What was delivered before is not told again.
    let process = Process::start(&store, &["--config", &config]).await;
    let other = push(&process.remote, "v2").await;
    assert_eq!(endpoint.events(2).await[1]["target"]["digest"], json!(other));
    process.kill().await;
}

/// Killed over and over while pushes and deliveries are under way.
#[tokio::test]
async fn every_acknowledged_push_is_told_whenever_it_is_killed() {
    let endpoint = Endpoint::start().await;
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let config = root.path().join("r.toml");
    fs_err::write(&config, endpoint.setting("")).unwrap();
    let (store, config) = (root.path().join("store"), config.to_str().unwrap().to_owned());
    let start =
        async || Process::start(&store, &["--config", &config, "--log-filter", "warn"]).await;
    let acknowledged = Mutex::new(BTreeSet::new());
    for round in 0..6usize {
        let process = start().await;
        let remote = process.remote.clone();
        for content in [&b"{}"[..], b"layer"] {
            remote.push("a", content).await;
        }
        let manifest = image(b"layer", None);
        let pushing = async {
            for number in 0.. {
                let tag = format!("r{round}-{number}");
                let path = format!("/v2/a/manifests/{tag}");
                let headers = [("content-type", media_type::OCI_MANIFEST)];
                let put = remote.try_send(http::Method::PUT, &path, &headers, manifest.clone());
                match put.await {
                    Ok(reply) if reply.status == 201 => acknowledged.lock().unwrap().insert(tag),
                    _ => return,
                };
            }
        };
        let killing = async {
            let before = acknowledged.lock().unwrap().len();
            let enough = async || acknowledged.lock().unwrap().len() > before + 3 + round * 5;
            wait_until("something is pushed", enough).await;
            process.kill().await;
        };
        futures::future::join(pushing, killing).await;
    }
    let process = start().await;
    let told = || {
        let received = endpoint.received.lock().unwrap();
        let tag = |(_, envelope): &(HeaderMap, Value)| {
            envelope["events"][0]["target"]["tag"].as_str().unwrap().to_owned()
        };
        received.iter().map(tag).collect::<BTreeSet<_>>()
    };
    let acknowledged = acknowledged.lock().unwrap().clone();
    wait_until("everything is told", async || told().is_superset(&acknowledged)).await;
    // What is told is so, also of those that were not acknowledged.
    for tag in told() {
        let reply = process.remote.head(&format!("/v2/a/manifests/{tag}")).await;
        assert_eq!(reply.status, 200, "{tag}");
    }
    process.kill().await;
}

#[tokio::test]
async fn an_endpoint_that_is_away_slows_no_push_and_is_told_what_it_missed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/events", listener.local_addr().unwrap());
    // Connections are accepted by the kernel, and nobody answers.
    let text = format!(
        "[notify]\nkeep = 5\n[[notify.endpoint]]\nname = \"e\"\nurl = {url:?}\ntimeout = \"1s\"\n\
         retry_max = \"1s\"\n"
    );
    let registry = TestRegistry::start_set(&text).await;
    let began = Instant::now();
    for number in 0..20 {
        push(&registry, &format!("v{number}")).await;
    }
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    let endpoint = Endpoint::on(listener);
    let last = async || {
        let received = endpoint.received.lock().unwrap();
        let last =
            received.last().map(|(_, envelope)| envelope["events"][0]["target"]["tag"].clone());
        last == Some(json!("v19"))
    };
    wait_until("it is told of the last", last).await;
    let received = endpoint.received.lock().unwrap();
    let missed: u64 = received.iter().filter_map(|(_, envelope)| envelope["lost"].as_u64()).sum();
    let ids: BTreeSet<_> =
        received.iter().map(|(_, sent)| sent["events"][0]["id"].to_string()).collect();
    assert_eq!(ids.len() + usize::try_from(missed).unwrap(), 20);
    assert!((5..=7).contains(&ids.len()), "{ids:?}");
}

#[tokio::test]
async fn what_is_wrong_with_an_endpoint_is_said_without_its_url() {
    let text = "[[notify.endpoint]]\nname = \"e\"\nurl = \"http://u:geheim@h/\"\nbearer = \"/t\"\n\
                [[notify.endpoint]]\nname = \"e\"\nurl = \"geheim\"\nactions = []\n";
    let wrong = kybernate_registry::config::Config::read(Path::new("r"), text).unwrap_err();
    let told: Vec<_> = wrong.iter().map(ToString::to_string).collect();
    let told = told.join("\n");
    assert!(!told.contains("geheim"), "{told}");
    for key in ["[0].url", "[0].bearer", "[1].name", "[1].url", "[1].actions"] {
        assert!(told.contains(&format!("notify.endpoint{key}: ")), "{key}\n{told}");
    }
}
