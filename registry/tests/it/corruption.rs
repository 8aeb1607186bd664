//! Bytes that changed on disk never leave, and the next push heals them.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use http::Method;
use kybernate_spec::{Digest, media_type};

use crate::harness::{TestRegistry, image, noise};

const MIB: usize = 1 << 20;

fn flip(path: &Path, at: usize) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = u64::try_from(at).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

async fn check_healed(registry: &TestRegistry, digest: &Digest, content: &[u8]) {
    registry.blob("a", digest).await.refused(404, "BLOB_UNKNOWN");
    assert_eq!(registry.head_blob("a", digest).await, 404, "it must not look as if it were there");
    let manifest = image(content, None);
    registry.push("a", b"{}").await;
    let tried = registry.put_manifest("a", "v1", media_type::OCI_MANIFEST, manifest).await;
    tried.refused(400, "MANIFEST_BLOB_UNKNOWN");

    registry.push("a", content).await;
    assert_eq!(registry.head_blob("a", digest).await, 200);
    assert!(registry.blob("a", digest).await.body == content);
}

#[tokio::test]
async fn one_byte_changed_in_the_first_chunk_is_a_404_until_pushed_again() {
    let registry = TestRegistry::start().await;
    for (seed, length, at) in
        [(1, 1, 0), (2, 1000, 999), (3, 64 << 10, 5), (4, (64 << 10) + 1, 0), (5, 5 * MIB, MIB - 1)]
    {
        let content = noise(length, seed);
        let digest = registry.push("a", &content).await;
        flip(&registry.blob_path(&digest), at);
        check_healed(&registry, &digest, &content).await;
    }
}

#[tokio::test]
async fn one_byte_changed_further_on_cuts_the_connection() {
    let registry = TestRegistry::start().await;
    let content = noise(5 * MIB + 10, 1);
    let digest = registry.push("a", &content).await;
    flip(&registry.blob_path(&digest), 5 * MIB + 9);
    let path = format!("/v2/a/blobs/{digest}");

    // A range that does not touch the bad chunk is good.
    let range = [("range", "bytes=0-5242879")];
    let reply = registry.send(Method::GET, &path, &range, "").await;
    assert!(reply.body == content[..5 * MIB]);

    registry.try_send(Method::GET, &path, &[], "").await.unwrap_err();
    check_healed(&registry, &digest, &content).await;
}

#[tokio::test]
async fn a_blob_that_was_cut_or_has_grown_is_a_404() {
    let registry = TestRegistry::start().await;
    for (seed, length, to) in [
        (1, 3 * MIB, 2 * MIB),
        (2, 3 * MIB, 100),
        (3, 3 * MIB, 0),
        (4, 1000, 999),
        (5, 1000, 0),
        (6, 1000, 1001),
        (7, 3 * MIB, 4 * MIB),
    ] {
        let content = noise(length, seed);
        let digest = registry.push("a", &content).await;
        let file = OpenOptions::new().write(true).open(registry.blob_path(&digest)).unwrap();
        file.set_len(u64::try_from(to).unwrap()).unwrap();
        check_healed(&registry, &digest, &content).await;
    }
}

#[tokio::test]
async fn damaged_or_missing_checksums_are_healed_too() {
    let registry = TestRegistry::start().await;
    let content = noise(3 * MIB, 1);
    let digest = registry.push("a", &content).await;
    let checksums = registry.blob_path(&digest).with_extension("crc");
    for at in [0, 20, 32] {
        flip(&checksums, at);
        check_healed(&registry, &digest, &content).await;
    }
    fs::remove_file(&checksums).unwrap();
    check_healed(&registry, &digest, &content).await;
    fs::remove_file(registry.blob_path(&digest)).unwrap();
    check_healed(&registry, &digest, &content).await;
}

/// A push heals also what nobody has noticed yet.
#[tokio::test]
async fn a_push_replaces_what_is_there() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB, 1);
    let digest = registry.push("a", &content).await;
    flip(&registry.blob_path(&digest), 77);
    registry.push("b", &content).await;
    for repository in ["a", "b"] {
        assert!(registry.blob(repository, &digest).await.body == content);
    }
}

#[tokio::test]
async fn a_manifest_that_changed_is_a_404_until_pushed_again() {
    let registry = TestRegistry::start().await;
    let pushed = registry.push_image("a", "v1", b"layer", None).await;
    flip(&registry.blob_path(&pushed.digest), 10);
    for reference in ["v1", &*pushed.digest.to_string()] {
        let path = format!("/v2/a/manifests/{reference}");
        registry.get(&path).await.refused(404, "MANIFEST_UNKNOWN");
        assert_eq!(registry.head(&path).await.status, 404);
    }
    registry.push_image("a", "v1", b"layer", None).await;
    assert_eq!(registry.get("/v2/a/manifests/v1").await.body, image(b"layer", None));
}

#[tokio::test]
async fn a_damaged_record_is_absent_and_healed_by_a_push() {
    let registry = TestRegistry::start().await;
    let subject = registry.push_image("a", "v1", b"layer", None).await;
    let referrer = registry.push_image("a", "r", b"other", Some(&subject)).await;
    let hex = |digest: &Digest| digest.hex().to_owned();
    let (of, by) = (hex(&subject.digest), hex(&referrer.digest));
    for record in [
        "repositories/a/_tags/r".to_owned(),
        format!("repositories/a/_manifests/sha256/{by}"),
        format!("repositories/a/_referrers/sha256/{of}/sha256-{by}"),
    ] {
        let path = registry.path(&record);
        let length = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
    }
    // The index may know them from before.
    let root = registry.stop().await;
    fs::remove_dir_all(root.path().join("store/index")).ok();
    let registry = TestRegistry::start_in(root).await;
    registry.get("/v2/a/manifests/r").await.refused(404, "MANIFEST_UNKNOWN");
    let list = format!("/v2/a/referrers/{}", subject.digest);
    assert_eq!(registry.get(&list).await.json()["manifests"], serde_json::json!([]));

    registry.push_image("a", "r", b"other", Some(&subject)).await;
    assert_eq!(registry.get("/v2/a/manifests/r").await.status, 200);
    assert_eq!(registry.get(&list).await.json()["manifests"].as_array().unwrap().len(), 1);
}
