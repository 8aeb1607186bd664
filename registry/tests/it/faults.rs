//! Replies that are lost on the way, and pushes that are cut at any byte.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed step here is a failed test"
)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use http::Method;
use kybernate_spec::{Digest, media_type};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::harness::{Remote, Reply, TestRegistry, image, noise, wait_until};

/// What happens to the next request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It is lost before the registry sees it.
    Before,
    /// It is done, but the reply is lost.
    AfterCommit,
}

/// Stands before a registry and loses what the script says; one request per connection.
#[derive(Debug)]
struct FaultyPath {
    remote: Remote,
    script: Arc<Mutex<VecDeque<Fault>>>,
    _serving: JoinSet<()>,
}

impl FaultyPath {
    async fn to(registry: &Remote) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let script = Arc::new(Mutex::new(VecDeque::new()));
        let target = registry.url.strip_prefix("http://").unwrap().to_owned();
        let (mut serving, faults) = (JoinSet::new(), Arc::clone(&script));
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let fault = faults.lock().unwrap().pop_front();
                connections.spawn(carry(stream, target.clone(), fault));
            }
        });
        let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0);
        let remote = Remote { url, client: client.build().unwrap() };
        Self { remote, script, _serving: serving }
    }

    fn next(&self, fault: Fault) {
        self.script.lock().unwrap().push_back(fault);
    }
}

async fn carry(mut client: TcpStream, target: String, fault: Option<Fault>) {
    if fault == Some(Fault::Before) {
        let mut head = [0; 64];
        let _read = client.read(&mut head).await;
        return;
    }
    let mut server = TcpStream::connect(target).await.unwrap();
    if fault.is_none() {
        let _ended = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        return;
    }
    let (mut from, _client) = client.split();
    let (mut reply, mut to) = server.split();
    let mut byte = [0];
    tokio::select! {
        // The first byte of the reply comes when all is done.
        answered = reply.read(&mut byte) => assert_eq!(answered.unwrap(), 1),
        _ended = async {
            let _sent = tokio::io::copy(&mut from, &mut to).await;
            std::future::pending::<()>().await;
        } => {}
    }
}

/// A request and what repeating it must answer, when it was lost and when it was done.
struct Write {
    method: Method,
    path: String,
    kind: &'static str,
    body: Vec<u8>,
    lost: u16,
    done: u16,
}

impl Write {
    fn new(method: Method, path: String, body: &[u8], lost: u16, done: u16) -> Self {
        Self { method, path, kind: media_type::OCI_MANIFEST, body: body.to_vec(), lost, done }
    }

    async fn send(&self, remote: &Remote) -> reqwest::Result<Reply> {
        let headers = [("content-type", self.kind)];
        remote.try_send(self.method.clone(), &self.path, &headers, self.body.clone()).await
    }
}

/// Every kind of write, in an order in which each finds what it needs.
fn writes(upload: &str, cancelled: &str, layer: &[u8]) -> Vec<Write> {
    let (digest, manifest) = (Digest::of(layer), image(layer, None));
    let named = Digest::of(&manifest);
    let post = |query: String, body: &[u8], status| {
        Write::new(Method::POST, format!("/v2/a/blobs/uploads/?{query}"), body, status, status)
    };
    let tagged = |reference: String| {
        Write::new(Method::PUT, format!("/v2/a/manifests/{reference}"), &manifest, 201, 201)
    };
    let delete = |path: String| Write::new(Method::DELETE, path, b"", 202, 404);
    vec![
        post(format!("digest={}", Digest::of(b"{}")), b"{}", 201),
        post(String::new(), b"", 202),
        Write::new(Method::PUT, format!("{upload}?digest={digest}"), layer, 201, 201),
        post(format!("mount={}&from=b", Digest::of(b"other")), b"", 201),
        Write::new(Method::DELETE, cancelled.to_owned(), b"", 204, 404),
        tagged("v1".to_owned()),
        tagged(format!("{named}?tag=v2&tag=v3")),
        delete("/v2/a/manifests/v1".to_owned()),
        delete(format!("/v2/a/manifests/{named}")),
        delete(format!("/v2/a/blobs/{digest}")),
    ]
}

#[tokio::test]
async fn every_write_may_be_repeated_after_a_lost_reply() {
    for fault in [Fault::Before, Fault::AfterCommit] {
        let registry = TestRegistry::start().await;
        registry.push("b", b"other").await;
        let path = FaultyPath::to(&registry).await;
        let layer = noise(100_000, 1);
        let (upload, cancelled) = (registry.begin("a").await, registry.begin("a").await);
        for write in writes(&upload, &cancelled, &layer) {
            let (method, target) = (&write.method, &write.path);
            path.next(fault);
            write.send(&path.remote).await.expect_err("the reply is lost");
            let again = write.send(&path.remote).await.unwrap();
            let expected = if fault == Fault::Before { write.lost } else { write.done };
            assert_eq!(again.status, expected, "{fault:?} {method} {target} {again:?}");
        }
        assert_eq!(registry.head("/v2/a/manifests/v2").await.status, 404);
        assert_eq!(registry.head_blob("a", &Digest::of(b"other")).await, 200);
    }
}

#[tokio::test]
async fn a_chunk_whose_reply_was_lost_is_not_added_twice() {
    let registry = TestRegistry::start().await;
    let path = FaultyPath::to(&registry).await;
    let content = noise(3 << 20, 2);
    let upload = registry.begin("a").await;
    let (first, second) = content.split_at(1_500_000);
    path.next(Fault::AfterCommit);
    let range = format!("0-{}", first.len() - 1);
    let headers = [("content-range", &*range)];
    let lost = path.remote.try_send(Method::PATCH, &upload, &headers, first.to_vec()).await;
    lost.expect_err("the reply is lost");
    let again = registry.patch(&upload, 0, first).await;
    again.refused(416, "BLOB_UPLOAD_INVALID");
    assert_eq!(again.header("range"), range, "it says where to go on");
    assert_eq!(registry.patch(&upload, first.len(), second).await.status, 202);
    let digest = Digest::of(&content);
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    assert!(registry.blob("a", &digest).await.body == content);
}

async fn received(registry: &TestRegistry, upload: &str) -> usize {
    let status = registry.get(upload).await;
    assert_eq!(status.status, 204, "{status:?}");
    let last: usize = status.header("range").strip_prefix("0-").unwrap().parse().unwrap();
    if last == 0 { 0 } else { last + 1 }
}

/// Sends the rest from `start` on, but hangs up at `cut`, and waits until what was sent is there.
async fn send_cut(registry: &TestRegistry, upload: &str, content: &[u8], start: usize, cut: usize) {
    let address = registry.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let (last, length) = (content.len() - 1, content.len() - start);
    let head = format!(
        "PATCH {upload} HTTP/1.1\r\nHost: r\r\nContent-Range: {start}-{last}\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&content[start..cut]).await.unwrap();
    drop(stream);
    // One byte and none look alike in a `Range` of the specification.
    let there = async || received(registry, upload).await >= cut || cut <= 1;
    wait_until("what was sent has arrived", there).await;
}

/// Cuts near where a chunk ends, and anywhere.
fn cut(length: usize) -> impl Strategy<Value = usize> {
    let near = prop_oneof![Just(0_usize), Just(4096), Just(1 << 20), Just(2 << 20)];
    prop_oneof![(near, 0..3_usize).prop_map(|(at, more)| at + more), 0..length]
        .prop_map(move |at| at.clamp(2, length - 1))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_push_cut_at_any_byte_goes_on_there_also_after_a_restart(
        cuts in prop::collection::vec((cut(3_000_000), any::<bool>()), 1..5),
        on_disk: bool,
    ) {
        let work = async {
            let content = noise(3_000_000, 3);
            let root = if on_disk { tempfile::tempdir_in("/var/tmp") } else { tempfile::tempdir() };
            let mut registry = TestRegistry::start_in(root.unwrap()).await;
            let upload = registry.begin("a").await;
            let mut cuts = cuts;
            cuts.sort_unstable();
            for (cut, restart) in cuts {
                let start = received(&registry, &upload).await;
                if cut > start {
                    send_cut(&registry, &upload, &content, start, cut).await;
                }
                if restart {
                    registry = registry.restart().await;
                }
            }
            let start = received(&registry, &upload).await;
            assert_eq!(registry.patch(&upload, start, &content[start..]).await.status, 202);
            let digest = Digest::of(&content);
            assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
            assert!(registry.blob("a", &digest).await.body == content);
        };
        tokio::runtime::Runtime::new().unwrap().block_on(work);
    }
}
