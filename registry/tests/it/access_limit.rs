//! Limits for each client.

use std::path::Path;

use http::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::access::{Guarded, basic, htpasswd, rule, with_users};
use crate::harness::{noise, wait_until};

#[tokio::test]
async fn who_asks_too_often_is_told_when_to_come_again() {
    let policy = rule(&["**"], &["anonymous"], &["pull"]);
    let users = htpasswd(&[("alice", "right")]);
    let configure = |files: &Path| {
        let mut config = with_users(files);
        // Slow enough that none is regained while the test runs.
        config.limits.requests_per_second = Some(1);
        config.limits.burst = Some(60);
        config
    };
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, configure).await;
    let remote = &guarded.registry.remote;
    let mut refused = None;
    for _ in 0..200 {
        let reply = remote.get("/v2/a/tags/list").await;
        if reply.status == 429 {
            refused = Some(reply);
            break;
        }
    }
    let refused = refused.unwrap();
    refused.refused(429, "TOOMANYREQUESTS");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    // Alice counts by name, wherever she comes from, and probes of the machine do not count.
    let alice = basic("alice", "right");
    let headers = [("authorization", &*alice)];
    assert_eq!(remote.send(Method::GET, "/v2/", &headers, "").await.status, 200);
    assert_eq!(remote.get("/livez").await.status, 200);
}

#[tokio::test]
async fn a_pull_is_in_progress_until_it_has_been_sent() {
    let configure = |_: &Path| {
        let mut config = kybernate_registry::config::Config::default();
        config.limits.concurrent_requests = Some(1);
        config
    };
    let guarded = Guarded::start(&[], configure).await;
    let remote = &guarded.registry.remote;
    let digest = remote.push("a", &noise(64 << 20, 1)).await;
    let address = remote.url.strip_prefix("http://").unwrap().to_owned();
    let mut stream = TcpStream::connect(&address).await.unwrap();
    let request = format!("GET /v2/a/blobs/{digest} HTTP/1.1\r\nHost: r\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
    let reply = remote.get("/v2/").await;
    reply.refused(429, "TOOMANYREQUESTS");
    assert_eq!(reply.header("retry-after"), "1");
    drop(stream);
    wait_until("the pull has ended", async || remote.get("/v2/").await.status == 200).await;
}
