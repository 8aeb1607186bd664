//! Pulling blobs: headers, ranges, refusals, whose wire text is pinned.

use http::Method;
use kybernate_spec::Digest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{Remote, TestRegistry, noise};

const MIB: usize = 1 << 20;

#[tokio::test]
async fn the_api_says_that_it_is_spoken() {
    let registry = TestRegistry::start().await;
    for path in ["/v2/", "/v2", "/livez", "/readyz"] {
        assert_eq!(registry.get(path).await.status, 200, "{path}");
        assert_eq!(registry.head(path).await.status, 200, "{path}");
    }
    let version = "docker-distribution-api-version";
    assert_eq!(registry.get("/v2/").await.header(version), "registry/2.0");
    assert_eq!(registry.get("/nothing").await.header(version), "registry/2.0");
}

#[tokio::test]
async fn refusals_speak_the_specification() {
    let registry = TestRegistry::start().await;
    let check = async |method: Method, path: &str| {
        let reply = registry.send(method, path, &[("x-request-id", "x")], "").await;
        let body = String::from_utf8_lossy(&reply.body);
        let (before, after) = body.split_once(r#""detail":{"requestId":"x"},"#).unwrap();
        format!("{} {before}{after}", reply.status)
    };
    insta::assert_snapshot!(
        check(Method::GET, "/v2/model/blobs/sha256:XYZ").await,
        @r#"400 {"errors":[{"code":"DIGEST_INVALID","message":"digest \"sha256:XYZ\" is not 64 lowercase hexadecimal digits after the algorithm"}]}"#
    );
    insta::assert_snapshot!(
        check(Method::GET, "/v2/Model/tags/list").await,
        @r#"400 {"errors":[{"code":"NAME_INVALID","message":"\"Model\" is not a repository name: each path component must be lowercase letters and digits, separated by one '.', one or two '_', or dashes"}]}"#
    );
    insta::assert_snapshot!(
        check(Method::GET, "/v2/model/tags/list").await,
        @r#"404 {"errors":[{"code":"NAME_UNKNOWN","message":"no such repository"}]}"#
    );
    insta::assert_snapshot!(
        check(Method::GET, "/v2/model/manifests/v1").await,
        @r#"404 {"errors":[{"code":"MANIFEST_UNKNOWN","message":"the repository has no such manifest"}]}"#
    );
    insta::assert_snapshot!(
        check(Method::GET, "/v1/").await,
        @r#"404 {"errors":[{"code":"UNSUPPORTED","message":"no such endpoint"}]}"#
    );
    insta::assert_snapshot!(
        check(Method::PUT, "/v2/").await,
        @r#"405 {"errors":[{"code":"UNSUPPORTED","message":"the endpoint does not know this method"}]}"#
    );
    let reply = registry.send(Method::POST, "/v2/a/manifests/v1", &[], "").await;
    assert_eq!(reply.header("allow"), "GET, HEAD, PUT, DELETE");
}

#[tokio::test]
async fn a_head_tells_what_a_get_sends() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB + 1, 1);
    let digest = registry.push("a", &content).await;
    let path = format!("/v2/a/blobs/{digest}");
    let (head, get) = (registry.head(&path).await, registry.get(&path).await);
    assert!(get.body == content);
    let names =
        ["content-length", "content-type", "docker-content-digest", "etag", "accept-ranges"];
    for name in names {
        assert_eq!(head.header(name), get.header(name), "{name}");
    }
    assert_eq!(head.header("content-length"), content.len().to_string());
    assert!(head.body.is_empty());
}

#[tokio::test]
async fn ranges_are_served_from_any_chunk() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB + 100, 2);
    let digest = registry.push("a", &content).await;
    let path = format!("/v2/a/blobs/{digest}");
    let end = content.len();
    let ranges = [
        ("bytes=0-0", 0..1),
        ("bytes=500-1499", 500..1500),
        ("bytes=1048570-1048590", MIB - 6..MIB + 15),
        ("bytes=2097152-", 2 * MIB..end),
        ("bytes=5-", 5..end),
        ("bytes=-100", end - 100..end),
        ("bytes=-99999999999", 0..end),
        ("bytes=3145728-99999999999", 3 * MIB..end),
    ];
    for (range, expected) in ranges {
        let reply = registry.send(Method::GET, &path, &[("range", range)], "").await;
        assert_eq!(reply.status, 206, "{range}");
        let told = format!("bytes {}-{}/{end}", expected.start, expected.end - 1);
        assert_eq!(reply.header("content-range"), told);
        assert_eq!(reply.header("content-length"), expected.len().to_string());
        assert!(reply.body == content[expected], "{range}");
    }
    for range in ["bytes=500-0", "bytes=-0", &*format!("bytes={end}-"), "bytes=9999999999-"] {
        let reply = registry.send(Method::GET, &path, &[("range", range)], "").await;
        reply.refused(416, "SIZE_INVALID");
        assert_eq!(reply.header("content-range"), format!("bytes */{end}"));
    }
    for ignored in ["bytes=0-1,x", "lines=1-2", "bytes=x"] {
        let reply = registry.send(Method::GET, &path, &[("range", ignored)], "").await;
        assert_eq!((reply.status, reply.body.len()), (200, end), "{ignored}");
    }
    let other = [("range", "bytes=0-0"), ("if-range", "\"other\"")];
    assert_eq!(registry.send(Method::GET, &path, &other, "").await.status, 200);
    let tag = format!("\"{digest}\"");
    let same = [("range", "bytes=0-0"), ("if-range", &*tag)];
    assert_eq!(registry.send(Method::GET, &path, &same, "").await.status, 206);
}

/// RFC 9110, 13.2.2: a client that has it already is told that, whatever part it asks for.
#[tokio::test]
async fn a_condition_is_looked_at_before_a_range() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("a", b"content").await;
    let path = format!("/v2/a/blobs/{digest}");
    let (own, other) = (format!("\"{digest}\""), "\"sha256:other\"");
    for (condition, tag, range, status) in [
        ("if-none-match", &*own, "bytes=100-", 304),
        ("if-none-match", &own, "bytes=0-1", 304),
        ("if-match", other, "bytes=100-", 412),
        ("if-none-match", other, "bytes=100-", 416),
        ("if-match", &own, "bytes=100-", 416),
        ("if-match", &own, "bytes=0-1", 206),
    ] {
        let headers = [(condition, tag), ("range", range)];
        let reply = registry.send(Method::GET, &path, &headers, "").await;
        assert_eq!(reply.status, status, "{condition} {tag} {range} {reply:?}");
        if status == 304 {
            assert_eq!(reply.header("etag"), own);
            assert!(reply.headers.get("content-range").is_none() && reply.body.is_empty());
            // RFC 9110, 8.6: the length of what a 200 would have, or none.
            let head = registry.send(Method::HEAD, &path, &headers[..1], "").await;
            assert_eq!((head.status, head.header("content-length")), (304, "7"), "{head:?}");
        }
    }
}

#[tokio::test]
async fn several_ranges_come_in_the_order_they_were_asked_for() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB + 10, 4);
    let digest = registry.push("a", &content).await;
    let range = [("range", "bytes=2097152-, 5-6,1048570-1048590")];
    let reply = registry.send(Method::GET, &format!("/v2/a/blobs/{digest}"), &range, "").await;
    assert_eq!(reply.status, 206);
    assert_eq!(reply.header("content-length"), reply.body.len().to_string());
    let kind = reply.header("content-type").to_owned();
    let mark = kind.strip_prefix("multipart/byteranges; boundary=").unwrap();
    let mut expected = Vec::new();
    for part in [2 * MIB..content.len(), 5..7, MIB - 6..MIB + 15] {
        let (first, last, length) = (part.start, part.end - 1, content.len());
        let head = format!(
            "\r\n--{mark}\r\nContent-Type: application/octet-stream\r\n\
             Content-Range: bytes {first}-{last}/{length}\r\n\r\n"
        );
        expected.extend_from_slice(head.as_bytes());
        expected.extend_from_slice(&content[part]);
    }
    expected.extend_from_slice(format!("\r\n--{mark}--\r\n").as_bytes());
    assert!(reply.body == expected);
}

/// containerd asks for open-ended ranges and hangs up when it has enough.
#[tokio::test]
async fn a_client_may_hang_up_in_the_middle() {
    let registry = TestRegistry::start().await;
    let content = noise(20 * MIB, 3);
    let digest = registry.push("a", &content).await;
    let address = registry.url.strip_prefix("http://").unwrap().to_owned();
    for start in 0..8 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let request = format!(
            "GET /v2/a/blobs/{digest} HTTP/1.1\r\nHost: r\r\nRange: bytes={}-\r\n\r\n",
            start * MIB
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut some = vec![0; 100_000];
        stream.read_exact(&mut some).await.unwrap();
    }
    assert!(registry.blob("a", &digest).await.body == content);
}

#[tokio::test]
async fn a_percent_encoded_digest_is_understood() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("a", b"x").await;
    let encoded = digest.to_string().replace(':', "%3A");
    assert_eq!(registry.get(&format!("/v2/a/blobs/{encoded}")).await.status, 200);
}

#[tokio::test]
async fn small_replies_on_one_connection_do_not_wait_for_each_other() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("a", b"x").await;
    let one = Remote { client: registry.client.clone(), url: registry.url.clone() };
    let mut times = Vec::new();
    for _ in 0..100 {
        let began = std::time::Instant::now();
        assert_eq!(one.blob("a", &digest).await.body.as_ref(), b"x");
        times.push(began.elapsed());
    }
    // With Nagle's algorithm nearly each reply would wait 40 ms for a delayed acknowledgement. On a
    // machine that does other things too, some may take longer for that alone.
    times.sort_unstable();
    assert!(times[25] < std::time::Duration::from_millis(40), "{times:?}");
}

#[tokio::test]
async fn the_empty_blob_is_a_blob() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("a", b"").await;
    assert_eq!(digest, Digest::of(b""));
    let reply = registry.blob("a", &digest).await;
    assert_eq!((reply.status, reply.body.len()), (200, 0));
    assert_eq!(reply.header("content-length"), "0");
}
