//! What those who run a registry look at: health, figures, request ids, the end.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use http::Method;
use kybernate_registry::config::Config;
use kybernate_spec::{Digest, media_type};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::harness::{Remote, TestRegistry, noise, wait_until};
use crate::process::{Process, command};

const MIB: usize = 1 << 20;

/// Returns the value of a series on a metrics page.
fn figure(page: &str, series: &str) -> u64 {
    let lines = page.lines().filter_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    lines.map(|value| value.parse::<u64>().unwrap()).sum()
}

async fn page(remote: &Remote) -> String {
    let reply = remote.get("/metrics").await;
    assert_eq!(reply.status, 200);
    assert!(reply.header("content-type").starts_with("application/openmetrics-text"));
    String::from_utf8(reply.body.to_vec()).unwrap()
}

#[tokio::test]
async fn health_says_whether_it_lives_has_started_and_is_ready() {
    let registry = TestRegistry::start().await;
    for path in ["/livez", "/startupz", "/readyz"] {
        assert_eq!(registry.get(path).await.status, 200, "{path}");
        assert_eq!(registry.head(path).await.status, 200, "{path}");
        registry.delete(path).await.refused(405, "UNSUPPORTED");
    }
    // The device goes: a restart would not mend it, but requests should not come here. Whoever makes the
    // index just then makes directories, wherever that is.
    wait_until("the index answers", async || registry.is_indexed()).await;
    std::fs::rename(registry.path(""), registry.path("").with_extension("gone")).unwrap();
    assert_eq!(registry.get("/readyz").await.status, 503);
    assert_eq!(registry.get("/livez").await.status, 200);
    std::fs::rename(registry.path("").with_extension("gone"), registry.path("")).unwrap();
    assert_eq!(registry.get("/readyz").await.status, 200);
}

/// A method, a path, headers, and the status of the reply where all is well.
type Request<'a> = (Method, String, &'a [(&'a str, &'a str)], u16);

/// What is not found while the store has gone may be in it: nobody is told that it does not exist,
/// also where a directory is left in its place, as where a disk was mounted.
#[tokio::test]
async fn nothing_is_said_to_be_missing_while_the_store_has_gone() {
    let registry = TestRegistry::start().await;
    let image = registry.push_image("a", "v1", b"layer", None).await;
    let layer = Digest::of(b"layer");
    let upload = registry.begin("a").await;
    let (root, gone) = (registry.path(""), registry.path("").with_extension("gone"));
    let manifest = crate::harness::image(b"layer", Some(&image));
    let typed = [("content-type", media_type::OCI_MANIFEST)];
    let none: [(&str, &str); 0] = [];
    let requests = [
        (Method::GET, format!("/v2/a/blobs/{layer}"), &none[..], 200),
        (Method::HEAD, format!("/v2/a/blobs/{layer}"), &none[..], 200),
        (Method::GET, "/v2/a/manifests/v1".to_owned(), &none[..], 200),
        (Method::HEAD, format!("/v2/a/manifests/{}", image.digest), &none[..], 200),
        (Method::GET, format!("/v2/a/referrers/{layer}"), &none[..], 200),
        (Method::PATCH, upload.clone(), &none[..], 202),
        // What is still in memory of it went with the request before.
        (Method::GET, upload.clone(), &none[..], 204),
        (Method::POST, "/v2/a/blobs/uploads/".to_owned(), &none[..], 202),
        (Method::POST, format!("/v2/b/blobs/uploads/?mount={layer}&from=a"), &none[..], 201),
        (Method::PUT, "/v2/a/manifests/v2".to_owned(), &typed[..], 201),
        (Method::DELETE, "/v2/a/manifests/v2".to_owned(), &none[..], 202),
    ];
    let ask = async |(method, path, headers, _): &Request<'_>| {
        let body = if *method == Method::PUT { manifest.clone() } else { Vec::new() };
        registry.send(method.clone(), path, headers, body).await
    };
    for replaced in [false, true] {
        // Whoever makes it just then makes directories, wherever that is.
        wait_until("the index answers", async || registry.is_indexed()).await;
        std::fs::rename(&root, &gone).unwrap();
        if replaced {
            std::fs::create_dir(&root).unwrap();
        }
        for request in &requests {
            let reply = ask(request).await;
            assert_eq!(reply.status, 503, "{request:?} {reply:?}");
            reply.header("retry-after");
        }
        registry.get("/v2/a/manifests/v1").await.refused(503, "UNKNOWN");
        for list in ["/v2/a/tags/list", "/v2/_catalog"] {
            // The index may know for a moment longer.
            let reply = registry.get(list).await;
            let known = reply.json().to_string().contains("[\"");
            assert!(reply.status == 503 || reply.status == 200 && known, "{reply:?}");
        }
        assert_eq!(registry.get("/readyz").await.status, 503);
        if replaced {
            let removed = std::fs::remove_dir(&root);
            assert!(removed.is_ok(), "something was made in the other directory: {removed:?}");
        }
        std::fs::rename(&gone, &root).unwrap();
        assert_eq!(registry.get("/readyz").await.status, 200);
    }
    for request in &requests {
        assert_eq!(ask(request).await.status, request.3, "{request:?}");
    }
    registry.get("/v2/a/manifests/none").await.refused(404, "MANIFEST_UNKNOWN");
}

#[tokio::test]
async fn garbage_quotas_and_retention_are_counted() {
    let registry = TestRegistry::start_set(
        "[[quota.rule]]\nrepositories = [\"**\"]\nbytes = \"1MiB\"\n\
         [gc]\ninterval = \"1ms\"\neverything = \"1ms\"\ngrace = \"0s\"\nquarantine = \"0s\"\n\
         [[retention.rule]]\nrepositories = [\"b\"]\nmatching = [\"kept\"]\n\
         [retention]\ninterval = \"1s\"\n",
    )
    .await;
    let content = noise(1000, 1);
    registry.push("a", &content).await;
    let large = noise(MIB + 1, 2);
    let path = format!("/v2/a/blobs/uploads/?digest={}", Digest::of(&large));
    registry.send(Method::POST, &path, &[], large).await.refused(403, "DENIED");
    let figure = async |series: &str| {
        figure(&page(&registry).await, &format!("kybernate_registry_{series}"))
    };
    wait_until("garbage is counted", async || figure("gc_removed_total").await == 1).await;
    assert_eq!(figure("gc_removed_bytes_total").await, 1000);
    assert_eq!(figure("gc_condemned_total").await, 1);
    assert!(figure("gc_duration_seconds_count").await >= 1);
    assert_eq!(figure("gc_failed_total").await, 0);
    assert_eq!(figure("quota_refused_total").await, 1);
    let page = page(&registry).await;
    for series in ["gc_last_success_timestamp_seconds 1", "store_read_duration_seconds_count 0"] {
        assert!(page.contains(&format!("kybernate_registry_{series}")), "{series} {page}");
    }
    registry.push_image("b", "dropped", b"layer", None).await;
    let dropped = async || figure("retention_removed_tags_total").await == 1;
    wait_until("a tag is dropped", dropped).await;
}

#[tokio::test]
async fn requests_bytes_and_the_store_are_counted() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB, 1);
    let digest = registry.push("a", &content).await;
    let open = registry.begin("a").await;
    registry.blob("a", &digest).await;
    registry.get("/v2/a/manifests/none").await;
    registry.get("/nowhere").await;

    let page = page(&registry).await;
    let requests =
        |labels| figure(&page, &format!("kybernate_registry_http_requests_total{labels}"));
    assert_eq!(requests(r#"{route="uploads",method="POST",status="2xx"}"#), 2);
    assert_eq!(requests(r#"{route="upload",method="PUT",status="2xx"}"#), 1);
    assert_eq!(requests(r#"{route="blob",method="GET",status="2xx"}"#), 1);
    assert_eq!(requests(r#"{route="manifest",method="GET",status="4xx"}"#), 1);
    assert_eq!(requests(r#"{route="none",method="GET",status="4xx"}"#), 1);
    let figure = |series: &str| figure(&page, &format!("kybernate_registry_{series}"));
    let length = u64::try_from(content.len()).unwrap();
    for series in ["network_received_bytes_total", "network_sent_bytes_total"] {
        let bytes = figure(series);
        assert!((length..length + 16384).contains(&bytes), "{series} {bytes}");
    }
    assert_eq!(figure("uploads_open"), 1);
    assert_eq!(figure("store_commit_duration_seconds_count"), 1);
    assert!(figure("store_sync_duration_seconds_count") >= 2);
    assert_eq!(figure("corrupt_blobs_total"), 0);
    assert!(figure("connections_open") >= 1);
    assert_eq!(figure("http_requests_in_flight"), 1);
    let slow = r#"http_request_duration_seconds_bucket{le="+Inf",route="blob",method="GET"}"#;
    assert_eq!(figure(slow), 1, "{page}");
    assert!(page.contains("\nprocess_resident_memory_bytes ") && page.ends_with("# EOF\n"));

    registry.delete(&open).await;
    fs_err::write(registry.blob_path(&digest), &content[1..]).unwrap();
    registry.blob("a", &digest).await.refused(404, "BLOB_UNKNOWN");
    let page = self::page(&registry).await;
    assert_eq!(self::figure(&page, "kybernate_registry_corrupt_blobs_total"), 1);
    assert_eq!(self::figure(&page, "kybernate_registry_uploads_open"), 0);
}

#[tokio::test]
async fn figures_may_have_an_address_of_their_own() {
    let mut config = Config::default();
    config.metrics.listen = Some("127.0.0.1:9".parse().unwrap());
    let registry = TestRegistry::start_with(&config, tempfile::tempdir().unwrap()).await;
    let own = Remote::new(registry.serve_operations().await);
    assert_eq!(registry.get("/metrics").await.status, 404);
    assert_eq!(registry.get("/readyz").await.status, 200);
    page(&own).await;
    assert_eq!(own.get("/readyz").await.status, 200);
    own.get("/v2/").await.refused(404, "UNSUPPORTED");
    own.get("/v2/_catalog").await.refused(404, "UNSUPPORTED");
}

#[tokio::test]
async fn a_request_keeps_its_id_through_reply_and_log() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--log-format", "json"]).await;
    let remote = process.remote.clone();
    let ask = async |id: &str| {
        let headers = [("x-request-id", id)];
        remote.send(Method::GET, "/v2/a/manifests/none", &headers, "").await
    };
    let reply = ask("my-id.1").await;
    assert_eq!(reply.header("x-request-id"), "my-id.1");
    assert_eq!(reply.json()["errors"][0]["detail"]["requestId"], "my-id.1");
    let replaced = ask("evil id\"").await.header("x-request-id").to_owned();
    assert!(!replaced.is_empty() && !replaced.contains("evil"), "{replaced}");
    let made = remote.get("/v2/").await.header("x-request-id").to_owned();
    assert_ne!(made, replaced);
    // What happens below, on other threads, is found by the id too.
    let content = noise(2 * MIB, 1);
    let digest = remote.push("a", &content).await;
    let path = crate::harness::blob_path(root.path(), &digest);
    fs_err::write(path, &content[1..]).unwrap();
    let headers = [("x-request-id", "deep")];
    let blob = format!("/v2/a/blobs/{digest}");
    remote.send(Method::GET, &blob, &headers, "").await.refused(404, "BLOB_UNKNOWN");

    drop(remote);
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let of = |id: &str| -> Vec<_> {
        lines.clone().filter(|line| line["span"]["request.id"] == id).collect()
    };
    for id in ["my-id.1", &replaced, &made] {
        let lines = of(id);
        assert_eq!(lines.len(), 1, "{log}");
        assert_eq!(lines[0]["message"], "answered");
    }
    let corrupt = |line: &serde_json::Value| line["blob.digest"] == digest.to_string();
    assert!(of("deep").iter().any(corrupt), "{log}");
}

#[tokio::test]
async fn lines_about_requests_may_be_left_out() {
    for (access, lines) in [("all", 2), ("errors", 1), ("none", 0)] {
        let root = tempfile::tempdir().unwrap();
        let process = Process::start(root.path(), &["--log-access", access]).await;
        process.remote.get("/v2/").await;
        process.remote.get("/nowhere").await;
        let log = String::from_utf8(process.terminate().await.stderr).unwrap();
        assert_eq!(log.matches("answered").count(), lines, "{log}");
    }
}

/// Asks for a blob and reads only the beginning of the reply.
async fn begin_pull(process: &Process, digest: &Digest) -> TcpStream {
    let address = process.remote.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET /v2/a/blobs/{digest} HTTP/1.1\r\nHost: r\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    stream
}

#[tokio::test]
async fn a_pull_that_has_begun_may_finish_while_the_server_ends() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &[]).await;
    // More than the sockets hold.
    let content = noise(32 * MIB, 3);
    let digest = process.remote.push("a", &content).await;
    let mut stream = begin_pull(&process, &digest).await;
    let address = process.remote.url.strip_prefix("http://").unwrap().to_owned();
    let finishing = async {
        let refused = async || TcpStream::connect(&address).await.is_err();
        wait_until("nothing new is accepted", refused).await;
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert!(rest.ends_with(&content));
    };
    let (output, ()) = futures::future::join(process.terminate(), finishing).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("drained=true"), "{log}");
}

#[tokio::test]
async fn a_client_that_does_not_read_does_not_hold_up_the_end() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &["--connections-drain", "100ms"]).await;
    let content = noise(32 * MIB, 4);
    let digest = process.remote.push("a", &content).await;
    let stream = begin_pull(&process, &digest).await;
    let output = process.terminate().await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("drained=false"), "{log}");
    drop(stream);
}

#[tokio::test]
async fn the_program_serves_figures_where_it_is_told() {
    let root = tempfile::tempdir().unwrap();
    let local = "127.0.0.1:0";
    let mut serve = command(&["serve", "--listen", local, "--metrics-listen", local]);
    serve.args(["--log-format", "json", "--root"]).arg(root.path());
    let mut child = serve.spawn().unwrap();
    // Open until the end, so that nobody logs into a closed pipe.
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = loop {
        let line = log.next_line().await.unwrap().unwrap();
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        if line["message"] == "serving figures and health" {
            break line["address"].as_str().unwrap().to_owned();
        }
    };
    let process = Process::listening(child).await;
    page(&Remote::new(format!("http://{address}"))).await;
    process.kill().await;
}
