//! Clients that lose replies, connections and patience.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use kybernate_spec::Digest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{Remote, TestRegistry, noise, wait_until};

const MIB: usize = 1 << 20;

/// Sends a request whose body ends before its `Content-Length`, and leaves the connection open.
pub(crate) async fn send_part(
    remote: &Remote,
    request: &str,
    length: usize,
    part: &[u8],
) -> TcpStream {
    let address = remote.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("{request} HTTP/1.1\r\nHost: r\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(part).await.unwrap();
    stream
}

/// A push whose reply was lost must be safe to repeat: the second attempt finds the blob there.
#[tokio::test]
async fn a_push_may_be_repeated_after_a_lost_reply() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB, 1);
    let digest = Digest::of(&content);
    let upload = registry.begin("a").await;
    assert_eq!(registry.put(&upload, &digest, content.clone()).await.status, 201);
    for _ in 0..2 {
        let again = registry.put(&upload, &digest, content.clone()).await;
        assert_eq!(again.status, 201);
        assert_eq!(again.header("location"), format!("/v2/a/blobs/{digest}"));
    }
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    let other = registry.put(&upload, &Digest::of(b"other"), "other").await;
    other.refused(404, "BLOB_UPLOAD_UNKNOWN");
}

#[tokio::test]
async fn a_patch_that_was_cut_goes_on_where_it_was() {
    let registry = TestRegistry::start().await;
    let content = noise(5 * MIB + 3, 2);
    let upload = registry.begin("a").await;
    let sent = 3 * MIB + 1000;
    let request = format!("PATCH {upload}");
    let stream = send_part(&registry, &request, content.len(), &content[..sent]).await;
    drop(stream);

    let mut received = 0;
    wait_until("what was sent has arrived", async || {
        let status = registry.get(&upload).await;
        received = status.header("range").strip_prefix("0-").unwrap().parse::<usize>().unwrap() + 1;
        received == sent
    })
    .await;
    assert_eq!(registry.patch(&upload, received, &content[received..]).await.status, 202);
    let digest = Digest::of(&content);
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    assert!(registry.blob("a", &digest).await.body == content);
}

#[tokio::test]
async fn a_put_that_was_cut_may_be_sent_again_whole() {
    let registry = TestRegistry::start().await;
    let content = noise(4 * MIB, 3);
    let digest = Digest::of(&content);
    let upload = registry.begin("a").await;
    let request = format!("PUT {upload}?digest={digest}");
    for part in [10, MIB, 3 * MIB + 5] {
        drop(send_part(&registry, &request, content.len(), &content[..part]).await);
    }
    // The client comes again before we may have noticed that the others are gone. One of them may
    // even be read later and take over; then the client is told and tries once more.
    let whole = async || registry.put(&upload, &digest, content.clone()).await.status == 201;
    wait_until("the whole is taken", whole).await;
    assert!(registry.blob("a", &digest).await.body == content);
}

/// A connection that is dead but not closed must not keep a client from going on.
#[tokio::test]
async fn a_newer_request_takes_the_upload_over() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB, 4);
    let upload = registry.begin("a").await;
    let request = format!("PATCH {upload}");
    let mut dead = send_part(&registry, &request, content.len(), &content[..2 * MIB]).await;
    let file = registry.path("uploads").join(file_name(&registry));
    let begun = async || file.metadata().unwrap().len() > 0;
    wait_until("the older request is under way", begun).await;

    let digest = Digest::of(&content);
    let mut done = false;
    wait_until("the upload is taken over", async || {
        let status = registry.get(&upload).await;
        let range = status.header("range").strip_prefix("0-").unwrap().parse::<usize>().unwrap();
        let received = if range == 0 { 0 } else { range + 1 };
        let rest = &content[received..];
        done = registry.patch(&upload, received, rest).await.status == 202;
        done
    })
    .await;
    let mut reply = vec![0; 12];
    dead.read_exact(&mut reply).await.unwrap();
    assert_eq!(reply, b"HTTP/1.1 400", "the older request is told");
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    assert!(registry.blob("a", &digest).await.body == content);
}

/// Returns the name of the only upload's file.
fn file_name(registry: &TestRegistry) -> std::ffi::OsString {
    let mut files = std::fs::read_dir(registry.path("uploads")).unwrap();
    files.next().unwrap().unwrap().file_name()
}

/// The reason for a refusal reaches a client that is still sending.
#[tokio::test]
async fn a_refused_body_is_read_so_that_the_reply_arrives() {
    let registry = TestRegistry::start().await;
    let content = noise(32 * MIB, 5);
    let digest = Digest::of(b"x");
    let wrong = "/v2/a/blobs/uploads/00000000000000000000000000000000000000ff";
    for _ in 0..4 {
        let reply = registry.put(wrong, &digest, content.clone()).await;
        reply.refused(404, "BLOB_UPLOAD_UNKNOWN");
        let name = registry.put("/v2/NAME/blobs/uploads/1", &digest, content.clone());
        name.await.refused(400, "NAME_INVALID");
        let large = registry.put_manifest("a", "v1", "x/y", content.clone()).await;
        large.refused(413, "SIZE_INVALID");
    }
}
