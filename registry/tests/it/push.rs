//! Every way to push a blob.

use bytes::Bytes;
use futures::stream;
use http::Method;
use kybernate_spec::{Algorithm, Digest, Hasher};
use reqwest::Body;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::harness::{TestRegistry, noise, sha512, wait_until};

const MIB: usize = 1 << 20;

async fn check(registry: &TestRegistry, repository: &str, digest: &Digest, content: &[u8]) {
    let reply = registry.blob(repository, digest).await;
    assert_eq!(reply.status, 200, "{digest}");
    assert_eq!(reply.header("docker-content-digest"), digest.to_string());
    assert!(reply.body == content, "{digest} came back changed");
}

#[tokio::test]
async fn a_blob_is_pushed_with_post_and_put() {
    let registry = TestRegistry::start().await;
    for length in [0, 1, 4096, (64 << 10) + 1, MIB, 5 * MIB + 3] {
        let content = noise(length, 1);
        let digest = registry.push("a/b", &content).await;
        check(&registry, "a/b", &digest, &content).await;
    }
}

/// Nobody knows the upload of a push in one request, so nobody can go on with it.
#[tokio::test]
async fn a_push_with_one_post_that_fails_leaves_no_upload() {
    let registry = TestRegistry::start().await;
    let uploads = || std::fs::read_dir(registry.path("uploads")).unwrap().count();
    let digest = Digest::of(b"content");
    let path = format!("/v2/a/blobs/uploads/?digest={digest}");
    let push = async |headers: &[(&str, &str)], body: &'static str| {
        registry.send(Method::POST, &path, headers, body).await
    };
    push(&[("content-range", "what")], "content").await.refused(400, "UNSUPPORTED");
    push(&[("content-range", "0-3")], "content").await.refused(400, "SIZE_INVALID");
    push(&[], "other").await.refused(400, "DIGEST_INVALID");
    wait_until("no upload is left", async || uploads() == 0).await;

    let address = registry.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 7\r\n\r\ncon");
    stream.write_all(head.as_bytes()).await.unwrap();
    wait_until("the upload has begun", async || uploads() == 1).await;
    drop(stream);
    wait_until("it is given up", async || uploads() == 0).await;
    assert_eq!(push(&[], "content").await.status, 201);
}

#[tokio::test]
async fn a_blob_is_pushed_with_one_post() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB + 1, 2);
    for digest in [Digest::of(&content), sha512(&content)] {
        let path = format!("/v2/a/blobs/uploads/?digest={digest}");
        let reply = registry.send(Method::POST, &path, &[], content.clone()).await;
        assert_eq!(reply.status, 201);
        assert_eq!(reply.header("location"), format!("/v2/a/blobs/{digest}"));
        check(&registry, "a", &digest, &content).await;
    }
}

#[tokio::test]
async fn a_blob_is_pushed_in_chunks_of_any_size() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB + 17, 3);
    for size in [MIB, 700_001, 3 * MIB + 17, MIB + 1] {
        let upload = registry.begin("a").await;
        let mut start = 0;
        for chunk in content.chunks(size) {
            let reply = registry.patch(&upload, start, chunk).await;
            start += chunk.len();
            assert_eq!(reply.status, 202);
            assert_eq!(reply.header("range"), format!("0-{}", start - 1));
            assert_eq!(reply.header("location"), upload);
        }
        let digest = Digest::of(&content);
        assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
        check(&registry, "a", &digest, &content).await;
    }
}

#[tokio::test]
async fn the_last_chunk_may_come_with_the_put() {
    let registry = TestRegistry::start().await;
    let content = noise(MIB + 5000, 4);
    let digest = Digest::of(&content);
    let upload = registry.begin("a").await;
    registry.patch(&upload, 0, &content[..5000]).await;
    let range = format!("5000-{}", content.len() - 1);
    let path = format!("{upload}?digest={digest}");
    let headers = [("content-range", &*range)];
    let reply = registry.send(Method::PUT, &path, &headers, content[5000..].to_vec()).await;
    assert_eq!(reply.status, 201);
    check(&registry, "a", &digest, &content).await;
}

#[tokio::test]
async fn a_stream_of_unknown_length_is_taken() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB + 100, 5);
    let pieces: Vec<_> = content
        .chunks(10_007)
        .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
        .collect();
    let digest = Digest::of(&content);
    let upload = registry.begin("a").await;
    let body = Body::wrap_stream(stream::iter(pieces));
    let reply = registry.send(Method::PATCH, &upload, &[], body).await;
    assert_eq!(reply.status, 202);
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    check(&registry, "a", &digest, &content).await;
}

#[tokio::test]
async fn sha512_is_hashed_once_when_announced_and_works_when_not() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB + 9, 6);
    let digest = sha512(&content);
    for path in ["/v2/a/blobs/uploads/", "/v2/a/blobs/uploads/?digest-algorithm=sha512"] {
        let begun = registry.send(Method::POST, path, &[], "").await;
        let upload = begun.header("location");
        registry.patch(upload, 0, &content[..=MIB]).await;
        registry.patch(upload, MIB + 1, &content[MIB + 1..]).await;
        assert_eq!(registry.put(upload, &digest, "").await.status, 201);
        check(&registry, "a", &digest, &content).await;
    }
    let reply =
        registry.send(Method::POST, "/v2/a/blobs/uploads/?digest-algorithm=md5", &[], "").await;
    reply.refused(400, "DIGEST_INVALID");
}

#[tokio::test]
async fn a_wrong_digest_is_refused_on_every_path() {
    let registry = TestRegistry::start().await;
    let content = noise(MIB + 1, 7);
    for wrong in [Digest::of(b"something else"), sha512(b"something else")] {
        let path = format!("/v2/a/blobs/uploads/?digest={wrong}");
        let post = registry.send(Method::POST, &path, &[], content.clone()).await;
        post.refused(400, "DIGEST_INVALID");

        let upload = registry.begin("a").await;
        registry.put(&upload, &wrong, content.clone()).await.refused(400, "DIGEST_INVALID");
        registry.get(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");

        let upload = registry.begin("a").await;
        registry.patch(&upload, 0, &content).await;
        registry.put(&upload, &wrong, "").await.refused(400, "DIGEST_INVALID");

        let upload = registry.begin("a").await;
        registry.send(Method::PATCH, &upload, &[], content.clone()).await;
        registry.put(&upload, &wrong, "more").await.refused(400, "DIGEST_INVALID");

        assert_eq!(registry.head_blob("a", &wrong).await, 404);
    }
    let left = std::fs::read_dir(registry.path("uploads")).unwrap().count();
    assert_eq!(left, 0, "refused uploads leave no file");
}

#[tokio::test]
async fn a_put_without_a_proper_digest_is_refused() {
    let registry = TestRegistry::start().await;
    let upload = registry.begin("a").await;
    registry.send(Method::PUT, &upload, &[], "x").await.refused(400, "DIGEST_INVALID");
    for digest in ["x", "sha256:x", "md5:d41d8cd98f00b204e9800998ecf8427e"] {
        let path = format!("{upload}?digest={digest}");
        registry.send(Method::PUT, &path, &[], "x").await.refused(400, "DIGEST_INVALID");
    }
    assert_eq!(registry.put(&upload, &Digest::of(b"x"), "x").await.status, 201);
}

#[tokio::test]
async fn a_chunk_out_of_order_is_refused_and_the_upload_goes_on() {
    let registry = TestRegistry::start().await;
    let content = noise(1000, 8);
    let upload = registry.begin("a").await;
    registry.patch(&upload, 0, &content[..400]).await;

    for start in [0, 399, 401, 900] {
        let reply = registry.patch(&upload, start, &content[900..]).await;
        reply.refused(416, "BLOB_UPLOAD_INVALID");
        assert_eq!(reply.header("range"), "0-399");
        assert_eq!(reply.header("location"), upload);
    }
    let status = registry.get(&upload).await;
    assert_eq!((status.status, status.header("range")), (204, "0-399"));

    registry.patch(&upload, 400, &content[400..]).await;
    assert_eq!(registry.put(&upload, &Digest::of(&content), "").await.status, 201);
}

#[tokio::test]
async fn a_chunk_whose_length_is_not_its_range_changes_nothing() {
    let registry = TestRegistry::start().await;
    let upload = registry.begin("a").await;
    let announced = [("content-range", "0-9")];
    for body in ["short", "longer than announced"] {
        let reply = registry.send(Method::PATCH, &upload, &announced, body).await;
        reply.refused(400, "SIZE_INVALID");
        let stream = stream::iter([Ok::<_, std::io::Error>(body)]);
        let reply = registry.send(Method::PATCH, &upload, &announced, Body::wrap_stream(stream));
        reply.await.refused(400, "SIZE_INVALID");
    }
    let odd = [("content-range", "ten bytes")];
    let reply = registry.send(Method::PATCH, &upload, &odd, "0123456789").await;
    reply.refused(400, "UNSUPPORTED");
    assert_eq!(registry.send(Method::PATCH, &upload, &announced, "0123456789").await.status, 202);
    assert_eq!(registry.put(&upload, &Digest::of(b"0123456789"), "").await.status, 201);
}

#[tokio::test]
async fn a_cancelled_upload_is_gone() {
    let registry = TestRegistry::start().await;
    let upload = registry.begin("a").await;
    registry.patch(&upload, 0, b"data").await;
    assert_eq!(registry.delete(&upload).await.status, 204);
    registry.delete(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    registry.get(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    registry.patch(&upload, 4, b"data").await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    assert_eq!(std::fs::read_dir(registry.path("uploads")).unwrap().count(), 0);
}

#[tokio::test]
async fn an_upload_belongs_to_its_repository() {
    let registry = TestRegistry::start().await;
    let upload = registry.begin("mine").await.replace("/v2/mine/", "/v2/yours/");
    registry.get(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    let put = registry.put(&upload, &Digest::of(b"x"), "x").await;
    put.refused(404, "BLOB_UPLOAD_UNKNOWN");
    registry.get("/v2/mine/blobs/uploads/guess").await.refused(404, "BLOB_UPLOAD_UNKNOWN");
}

#[tokio::test]
async fn a_blob_is_mounted_from_a_repository_that_has_it() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("from", b"content").await;
    let mount = async |query: String| {
        let path = format!("/v2/to/blobs/uploads/?mount={digest}{query}");
        registry.send(Method::POST, &path, &[], "").await
    };
    assert_eq!(registry.head_blob("to", &digest).await, 404);

    for no_source in ["", "&from=other", "&from=UPPER"] {
        let reply = mount(no_source.to_owned()).await;
        assert_eq!(reply.status, 202, "an upload where a mount cannot be");
        assert!(reply.header("location").contains("/blobs/uploads/"));
        assert_eq!(registry.head_blob("to", &digest).await, 404);
    }
    let reply = mount("&from=from".to_owned()).await;
    assert_eq!(reply.status, 201);
    assert_eq!(reply.header("location"), format!("/v2/to/blobs/{digest}"));
    check(&registry, "to", &digest, b"content").await;
    assert_eq!(mount(String::new()).await.status, 201, "it is there already");
}

#[tokio::test]
async fn a_repository_does_not_show_what_only_another_has() {
    let registry = TestRegistry::start().await;
    let digest = registry.push("mine", b"secret").await;
    registry.blob("yours", &digest).await.refused(404, "BLOB_UNKNOWN");
    registry.push("yours", b"secret").await;
    assert_eq!(registry.delete(&format!("/v2/mine/blobs/{digest}")).await.status, 202);
    registry.blob("mine", &digest).await.refused(404, "BLOB_UNKNOWN");
    check(&registry, "yours", &digest, b"secret").await;
    let again = registry.delete(&format!("/v2/mine/blobs/{digest}")).await;
    again.refused(404, "BLOB_UNKNOWN");
}

#[tokio::test]
async fn many_push_the_same_and_different_blobs_at_once() {
    let registry = TestRegistry::start().await;
    let content = noise(MIB + 5, 9);
    let pushes = (0..16u64).map(|number| {
        let (registry, content) = (registry.remote.clone(), content.clone());
        async move {
            registry.push("same", &content).await;
            let other = noise(100_000, 100 + number);
            let digest = registry.push(&format!("other/{}", number % 3), &other).await;
            (number, digest)
        }
    });
    for (number, digest) in futures::future::join_all(pushes).await {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(&registry.blob(&format!("other/{}", number % 3), &digest).await.body);
        assert_eq!(hasher.finish(), digest);
    }
    check(&registry, "same", &Digest::of(&content), &content).await;
}
