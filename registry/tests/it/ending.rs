//! How a registry ends: those who send requests learn of it before it accepts no more.

use http::Method;
use kybernate_registry::config::Config;
use rustix::process::Signal;
use tokio::net::TcpStream;

use crate::harness::{Remote, TestRegistry, noise, wait_until};
use crate::process::{Process, command};

const MIB: usize = 1 << 20;

async fn is_not_ready(remote: &Remote) -> bool {
    remote.get("/readyz").await.status == 503
}

#[tokio::test]
async fn the_end_is_announced_while_requests_are_still_taken() {
    let root = tempfile::tempdir().unwrap();
    // Longer than any test: only the second signal ends it.
    let process = Process::start(root.path(), &["--connections-announce", "1h"]).await;
    let remote = process.remote.clone();
    assert_eq!(remote.get("/readyz").await.status, 200);
    let upload = remote.begin("a").await;
    process.signal(Signal::TERM);
    wait_until("it says that it is not ready", async || is_not_ready(&remote).await).await;
    assert_eq!(remote.get("/livez").await.status, 200);

    // Who has not heard of it yet is served: on a connection of its own, and what has begun.
    let late = Remote::new(remote.url.clone());
    let content = noise(MIB, 1);
    assert_eq!(late.patch(&upload, 0, &content).await.status, 202);
    let digest = late.push("a", b"late").await;
    assert_eq!(late.blob("a", &digest).await.body, b"late".as_slice());
    assert!(is_not_ready(&late).await);

    drop((remote, late));
    let output = process.terminate().await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("not ready any more") && log.contains("drained=true"), "{log}");
}

#[tokio::test]
async fn nothing_is_announced_where_that_is_not_wanted() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--connections-announce", "0s"]).await;
    assert_eq!(process.remote.get("/v2/").await.status, 200);
    assert_eq!(process.terminate().await.status.code(), Some(0));

    // Nor when somebody at a terminal asks.
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--connections-announce", "1h"]).await;
    assert_eq!(process.end(Signal::INT).await.status.code(), Some(0));
}

/// Many services read their files again when they are told so in this way, and so it is tried.
#[tokio::test]
async fn a_hang_up_ends_nothing() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &[]).await;
    let upload = process.remote.begin("a").await;
    process.signal(Signal::HUP);
    assert_eq!(process.remote.patch(&upload, 0, b"content").await.status, 202);
    let output = process.terminate().await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("drained=true"), "{log}");
}

#[tokio::test]
async fn figures_and_health_are_served_until_the_last_request_is_answered() {
    let mut config = Config::default();
    config.metrics.listen = Some("127.0.0.1:9".parse().unwrap());
    let registry = TestRegistry::start_with(&config, tempfile::tempdir().unwrap()).await;
    let operations = Remote::new(registry.serve_operations().await);
    let address = registry.url.strip_prefix("http://").unwrap().to_owned();
    let upload = registry.begin("a").await;
    let (mut more, body) = futures::channel::mpsc::channel::<std::io::Result<Vec<u8>>>(1);
    more.try_send(Ok(noise(MIB, 2))).unwrap();
    let body = reqwest::Body::wrap_stream(body);
    let remote = registry.remote.clone();
    let pushing = remote.send(Method::PATCH, &upload, &[], body);
    let received = async || {
        let page = operations.get("/metrics").await.body;
        let received = String::from_utf8_lossy(&page).into_owned();
        let received = received.lines().find_map(|line| {
            line.strip_prefix("kybernate_registry_network_received_bytes_total ")?.parse().ok()
        });
        received.is_some_and(|received: usize| received > MIB)
    };
    let late = Remote::new(operations.url.clone());
    let ending = async {
        wait_until("the push is under way", received).await;
        let looking = async {
            let closed = async || TcpStream::connect(&address).await.is_err();
            wait_until("nothing new is accepted", closed).await;
            assert!(is_not_ready(&late).await);
            assert_eq!(late.get("/metrics").await.status, 200);
            // The end waits for it.
            drop(more);
        };
        futures::future::join(registry.stop(), looking).await
    };
    let (pushed, _kept) = futures::future::join(pushing, ending).await;
    assert_eq!(pushed.status, 202);
    late.try_send(Method::GET, "/readyz", &[], "").await.unwrap_err();
}

#[tokio::test]
async fn how_long_the_end_is_announced_has_a_limit() {
    let serve = ["serve", "--connections-announce", "25h"];
    let output = command(&serve).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("announce") && told.contains("write a time from 0s to 1day"), "{told}");
}
