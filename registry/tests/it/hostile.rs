//! What no client would send that means well: raw bytes on a socket.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failed step here is a failed test")]

use std::time::Duration;

use futures::future::join_all;
use http::Method;
use kybernate_spec::{Digest, media_type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::{Remote, TestRegistry, image, noise, wait_until};
use crate::process::Process;

/// A server that says nothing for so long has lost the request.
const PATIENCE: Duration = Duration::from_secs(20);

async fn connect(remote: &Remote) -> TcpStream {
    TcpStream::connect(remote.url.strip_prefix("http://").unwrap()).await.unwrap()
}

/// Sends bytes and returns what comes until the server closes; a server that keeps the connection
/// open is asked to close by the last request itself.
async fn raw(remote: &Remote, request: &[u8]) -> String {
    let mut stream = connect(remote).await;
    // The server may refuse before it has read all.
    let _refused_early = stream.write_all(request).await;
    let mut reply = Vec::new();
    let reading = timeout(PATIENCE, stream.read_to_end(&mut reply)).await;
    let _reset_after_reply = reading.expect("the server neither answers nor closes");
    String::from_utf8_lossy(&reply).into_owned()
}

/// Returns the status of every reply in what came.
fn statuses(replies: &str) -> Vec<u16> {
    let lines = replies.split("HTTP/1.1 ").skip(1);
    lines.map(|rest| rest.split(' ').next().unwrap().parse().unwrap()).collect()
}

/// Every file below a directory but those a store always has.
fn files(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}

#[tokio::test]
async fn no_part_of_a_path_leads_out_of_the_store() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v1", b"layer", None).await;
    let mut before = files(&registry.path("."));
    let outside = registry.path("..").join("outside");
    fs_err::write(&outside, b"secret").unwrap();
    let digest = Digest::of(b"x");
    let bad = [
        "..",
        "../..",
        "../../outside",
        "a/../../outside",
        "%2e%2e",
        "%2e%2e%2f%2e%2e%2foutside",
        "..%2f..%2foutside",
        ".",
        "a//b",
        "/etc",
        "%2fetc%2fpasswd",
        "a%00b",
        "a%5c..%5cb",
        "_blobs",
        "a/_tags",
        "a/_manifests/sha256",
        "%c0%ae%c0%ae",
        "~root",
        "a\\..\\b",
        "CON",
        "a%0d%0ab",
    ];
    for part in bad {
        let paths = [
            format!("/v2/{part}/tags/list"),
            format!("/v2/{part}/manifests/v1"),
            format!("/v2/{part}/blobs/{digest}"),
            format!("/v2/{part}/referrers/{digest}"),
            format!("/v2/a/manifests/{part}"),
            format!("/v2/a/blobs/{part}"),
            format!("/v2/a/blobs/sha256:{part}"),
            format!("/v2/a/referrers/sha512:{part}"),
            format!("/v2/a/blobs/uploads/{part}"),
        ];
        for path in paths {
            for method in ["GET", "PUT", "DELETE", "PATCH", "POST"] {
                let request = format!(
                    "{method} {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                );
                let reply = raw(&registry, request.as_bytes()).await;
                assert!(!reply.contains("secret"), "{request} {reply}");
                let status = statuses(&reply)[0];
                assert!((400..500).contains(&status), "{request} {reply}");
            }
        }
        for query in [format!("mount={digest}&from={part}"), format!("digest={part}")] {
            let path = format!("/v2/a/blobs/uploads/?{query}");
            let reply = registry.try_send(Method::POST, &path, &[], "").await.unwrap();
            assert!(matches!(reply.status, 202 | 400), "{path} {reply:?}");
        }
    }
    let mut after = files(&registry.path("."));
    // The index is made in the background.
    let own = ["/uploads/", "/index/"];
    let is_own =
        |path: &std::path::Path| own.iter().any(|own| path.to_string_lossy().contains(own));
    after.retain(|path| !is_own(path));
    before.retain(|path| !is_own(path));
    after.sort();
    before.sort();
    assert_eq!(after, before);
    assert_eq!(fs_err::read(outside).unwrap(), b"secret");
}

#[tokio::test]
async fn two_lengths_for_one_body_are_refused() {
    let registry = TestRegistry::start().await;
    let smuggled = "GET /v2/_catalog HTTP/1.1\r\nHost: r\r\n\r\n";
    let shapes = [
        // Both framings, in both orders, and each of them twice.
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 6\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 99999999999999999999999999\r\n",
        "Content-Length : 5\r\n",
        " Content-Length: 5\r\n",
        "Content-Length: 5\r\n Transfer-Encoding: chunked\r\n",
        "Bad\0Field: x\r\n",
    ];
    for shape in shapes {
        let head = format!("POST /v2/a/blobs/uploads/ HTTP/1.1\r\nHost: r\r\n{shape}\r\n");
        let reply = raw(&registry, (head + "0\r\n\r\n" + smuggled).as_bytes()).await;
        assert!(!reply.contains("repositories"), "{shape:?} let a second request in: {reply}");
        assert!(statuses(&reply).len() <= 1, "{shape:?} {reply}");
    }
}

#[tokio::test]
async fn a_length_that_nobody_can_send_is_refused() {
    let registry = TestRegistry::start().await;
    let put = async |length: u64| {
        let head = format!(
            "PUT /v2/a/manifests/v1 HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        raw(&registry, head.as_bytes()).await
    };
    // The longest that the HTTP library has a number for.
    let reply = put(u64::MAX - 2).await;
    assert_eq!(statuses(&reply), [413], "{reply}");
    assert!(reply.contains("\"SIZE_INVALID\""), "{reply}");
    // What is above it answers itself, with a status alone, and ends the connection.
    for length in [u64::MAX - 1, u64::MAX] {
        let reply = put(length).await;
        assert_eq!(statuses(&reply), [431], "{reply}");
    }
}

#[tokio::test]
async fn requests_in_one_packet_are_answered_in_order() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("a", b"content").await;
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: r\r\n");
    let blob = get(&format!("/v2/a/blobs/{digest}"));
    let several = [
        blob.clone() + "\r\n",
        get("/v2/a/manifests/none") + "\r\n",
        "POST /v2/a/blobs/uploads/ HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n".to_owned(),
        blob + "Connection: close\r\n\r\n",
    ];
    let replies = raw(&registry, several.concat().as_bytes()).await;
    assert_eq!(statuses(&replies), [200, 404, 202, 200], "{replies}");
    assert_eq!(
        replies.matches("content\n").count() + replies.matches("\r\n\r\ncontent").count(),
        2
    );
}

#[tokio::test]
async fn heads_without_end_are_cut_off() {
    let registry = TestRegistry::start().await;
    let begin = "GET /v2/ HTTP/1.1\r\nHost: r\r\n";
    let many = (0..10_000).map(|n| format!("X-{n}: y\r\n")).collect::<Vec<_>>().concat();
    let long = format!("X: {}\r\n", "y".repeat(8 << 20));
    for head in [many, long] {
        let reply = raw(&registry, (begin.to_owned() + &head + "\r\n").as_bytes()).await;
        let status = statuses(&reply);
        assert!(status.iter().all(|status| (400..500).contains(status)), "{reply}");
    }
    let path = "a/".repeat(100_000);
    let reply =
        raw(&registry, format!("GET /v2/{path} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes()).await;
    assert!(statuses(&reply).iter().all(|status| (400..500).contains(status)), "{reply}");
    for nonsense in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"[..],
        b"\0\0\0\0",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        raw(&registry, &[nonsense, b"\r\n\r\n"].concat()).await;
    }
    assert_eq!(registry.get("/v2/").await.status, 200, "it goes on");
}

#[tokio::test]
async fn a_body_shorter_than_it_says_becomes_nothing() {
    let registry = TestRegistry::start().await;
    let content = noise(300_000, 1);
    let digest = Digest::of(&content);
    let path = format!("/v2/a/blobs/uploads/?digest={digest}");
    let head = format!("POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: 300001\r\n\r\n");
    let mut stream = connect(&registry).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&content).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut reply = String::new();
    let read = timeout(PATIENCE, stream.read_to_string(&mut reply)).await;
    read.expect("the server closes").unwrap();
    assert!(!reply.contains(" 201 "), "{reply}");
    assert_eq!(registry.head_blob("a", &digest).await, 404);
    // Chunks that lie: a size that is no number, one that is too large, an end that is none.
    for chunks in
        ["zz\r\nhello\r\n0\r\n\r\n", "ffffffffffffffffff\r\nx", "5\r\nhelloWORLD\r\n0\r\n\r\n"]
    {
        let head = format!("POST {path} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n");
        let reply = raw(&registry, (head + chunks).as_bytes()).await;
        assert!(!reply.contains(" 201 "), "{chunks:?} {reply}");
    }
    assert_eq!(registry.head_blob("a", &digest).await, 404);
}

#[tokio::test]
async fn json_as_deep_or_as_long_as_it_gets_is_refused_or_taken() {
    let registry = TestRegistry::start().await;
    registry.push("a", b"{}").await;
    let kind = media_type::OCI_MANIFEST;
    let deep = [r#"{"annotations":"#.repeat(200_000), "1".to_owned(), "}".repeat(200_000)].concat();
    let deeper = ["[".repeat(1 << 20), "]".repeat(1 << 20)].concat();
    for content in
        [deep, deeper, "{".repeat(4 << 20), "\"".to_owned(), "nul".to_owned(), String::new()]
    {
        registry.put_manifest("a", "v1", kind, content).await.refused(400, "MANIFEST_INVALID");
    }
    let layer = r#"{"mediaType":"x","size":9,"digest":"sha256:"#;
    let absent: Vec<String> = (0..20_000).map(|n| format!("{layer}{n:064x}\"}}")).collect();
    let config =
        r#"{"mediaType":"x","size":2,"digest":""#.to_owned() + &Digest::of(b"{}").to_string();
    let many = format!(
        r#"{{"schemaVersion":2,"mediaType":"{kind}","config":{config}"}},"layers":[{}]}}"#,
        absent.join(",")
    );
    let reply = registry.put_manifest("a", "v1", kind, many).await;
    reply.refused(400, "MANIFEST_BLOB_UNKNOWN");
    assert!(
        reply.body.len() < 1 << 20,
        "what is missing is told within bounds: {}",
        reply.body.len()
    );
    assert_eq!(registry.head("/v2/a/manifests/v1").await.status, 404);
}

#[tokio::test]
async fn numbers_beyond_everything_are_answered() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v1", b"layer", None).await;
    let huge = "99999999999999999999999999999999";
    for query in [
        format!("n={huge}"),
        "n=-1".into(),
        "n=0".into(),
        "n=x".into(),
        format!("n=1&last={huge}"),
        format!("last={}", "z".repeat(60_000)),
        "n=1&n=2".into(),
        "%zz".into(),
        "last=%ff".into(),
    ] {
        for path in ["/v2/a/tags/list", "/v2/_catalog"] {
            let reply = registry.get(&format!("{path}?{query}")).await;
            assert!(matches!(reply.status, 200 | 400 | 414), "{path}?{query} {reply:?}");
        }
    }
    let blob = format!("/v2/a/blobs/{}", Digest::of(b"layer"));
    let ranges = "bytes=".to_owned() + &vec!["0-0"; 10_000].join(",");
    for range in [
        format!("bytes={huge}-"),
        format!("bytes=-{huge}"),
        format!("bytes=0-{huge}"),
        format!("bytes={huge}-{huge}"),
        "bytes=5-5".into(),
        "bytes=--1".into(),
        ranges,
    ] {
        let reply = registry.send(Method::GET, &blob, &[("range", &range)], "").await;
        assert!(matches!(reply.status, 200 | 206 | 416 | 431), "{range:.40} {reply:?}");
        assert!(reply.status != 206 || reply.body.len() <= 5, "{reply:?}");
    }
    let upload = registry.begin("a").await;
    for range in [
        format!("0-{huge}"),
        format!("{huge}-{huge}"),
        "0-18446744073709551615".into(),
        "1-0".into(),
    ] {
        let reply = registry.send(Method::PATCH, &upload, &[("content-range", &range)], "x").await;
        assert!(matches!(reply.status, 400 | 416), "{range} {reply:?}");
    }
    assert_eq!(registry.send(Method::PATCH, &upload, &[], "x").await.status, 202, "it goes on");
}

#[tokio::test]
async fn many_tags_at_once_have_a_bound() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v1", b"layer", None).await;
    let content = image(b"layer", None);
    let tags = (0..2_000).map(|n| format!("tag=t{n}")).collect::<Vec<_>>().join("&");
    let path = format!("/v2/a/manifests/{}?{tags}", Digest::of(&content));
    let headers = [("content-type", media_type::OCI_MANIFEST)];
    let reply = registry.send(Method::PUT, &path, &headers, content).await;
    assert!(matches!(reply.status, 400 | 414), "{reply:?}");
    assert_eq!(registry.head("/v2/a/manifests/t0").await.status, 404, "none of them is set");
}

/// What very many transfers have taken goes back to the system with them.
#[tokio::test]
async fn memory_does_not_stay_with_who_needed_it_once() {
    const PULLS: usize = 60;
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--log-filter", "warn"]).await;
    // More than the sockets hold.
    let digest = process.remote.push("a", &noise(32 << 20, 1)).await;
    let resident = async || {
        let page = process.remote.get("/metrics").await.body;
        let page = String::from_utf8(page.to_vec()).unwrap();
        let line =
            page.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        line.unwrap().parse::<usize>().unwrap()
    };
    let before = resident().await;
    let pull = format!("GET /v2/a/blobs/{digest} HTTP/1.1\r\nHost: r\r\n\r\n");
    // The first ones teach an allocator what sizes to keep.
    for _ in 0..3 {
        let mut pulls = Vec::new();
        for _ in 0..PULLS {
            let mut stream = connect(&process.remote).await;
            stream.write_all(pull.as_bytes()).await.unwrap();
            stream.read_exact(&mut [0; 12]).await.unwrap();
            pulls.push(stream);
        }
        let taken = async || resident().await > before + (PULLS << 20);
        wait_until("each holds a mebibyte or two", taken).await;
        drop(pulls);
        let given_back = async || resident().await < before + (32 << 20);
        wait_until("they are given back", given_back).await;
    }
    process.terminate().await;
}

/// Whoever opens connections and says nothing takes them from those who wait.
#[tokio::test]
async fn ten_thousand_idle_connections_keep_nobody_out() {
    const IDLE: usize = 10_000;
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = files.maximum.unwrap_or(u64::MAX);
    let many = usize::try_from(limit.saturating_sub(2_000)).unwrap_or(IDLE).min(IDLE);
    let raised = rustix::process::Rlimit { current: files.maximum, ..files };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--log-filter", "warn"]).await;
    let digest = process.remote.push("a", b"content").await;
    let say_nothing = async |number| {
        let mut stream = connect(&process.remote).await;
        if number % 2 == 0 {
            let _closed = stream.write_all(b"GET /v2/ HTTP/1.1\r\nHo").await;
        }
        stream
    };
    let mut idle = Vec::new();
    while idle.len() < many {
        idle.extend(join_all((0..500).map(say_nothing)).await);
    }
    let fresh = Remote::new(process.remote.url.clone());
    let reply = timeout(PATIENCE, fresh.blob("a", &digest)).await;
    assert_eq!(reply.expect("a new client is answered").body, "content");
    drop(idle);
    process.kill().await;
}

/// Whoever opens what was pushed in a browser gets no page that could act for them.
#[tokio::test]
async fn what_is_pushed_is_no_page_of_a_browser() {
    let registry = TestRegistry::start().await;
    let page = "<script>fetch('/v2/')</script>";
    assert_eq!(registry.put_manifest("a", "v1", "text/html", page).await.status, 201);
    for path in ["/v2/a/manifests/v1", "/v2/a/manifests/none", "/v2/"] {
        let reply = registry.get(path).await;
        assert_eq!(reply.header("x-content-type-options"), "nosniff", "{path}");
        let policy = reply.header("content-security-policy");
        assert!(policy.contains("sandbox") && !policy.contains("allow"), "{path} {policy}");
    }
}

/// What takes a place while it is sent is sent as before.
#[tokio::test]
async fn a_large_manifest_and_long_lists_come_whole() {
    let registry = TestRegistry::start().await;
    let content = noise(3 << 20, 1);
    let pushed = registry.put_manifest("a", "v1", "x/y", content.clone()).await;
    assert_eq!(pushed.status, 201);
    let reply = registry.get("/v2/a/manifests/v1").await;
    assert_eq!(reply.header("content-length"), content.len().to_string());
    assert!(reply.body == content);
    assert!(!registry.get("/v2/a/tags/list").await.header("content-length").is_empty());
}
