//! Several clients at one thing.

#![expect(clippy::indexing_slicing, reason = "a failed step here is a failed test")]

use std::collections::BTreeSet;

use futures::future::join_all;
use kybernate_spec::{Descriptor, Digest, media_type};

use crate::harness::{Remote, TestRegistry, image, noise, sha512};

const CLIENTS: u64 = 8;

/// Pushes one image of its own and one that everybody pushes, under the same two tags.
async fn push_both(remote: &Remote, client: u64) -> Digest {
    let common = noise(1_000, 1);
    let own = noise(2_000, 10 + client);
    for content in [b"{}".to_vec(), common.clone(), own.clone()] {
        remote.push("r", &content).await;
    }
    for (layer, tag) in [(&common, "common"), (&own, "moves")] {
        let reply = remote.put_manifest("r", tag, media_type::OCI_MANIFEST, image(layer, None));
        assert_eq!(reply.await.status, 201);
    }
    Digest::of(&image(&own, None))
}

async fn check(remote: &Remote, pushed: &BTreeSet<Digest>) {
    for digest in pushed {
        let reply = remote.get(&format!("/v2/r/manifests/{digest}")).await;
        assert_eq!((reply.status, &Digest::of(&reply.body)), (200, digest));
    }
    let named = remote.get("/v2/r/manifests/moves").await;
    assert!(pushed.contains(&Digest::of(&named.body)), "the tag names none of them: {named:?}");
    assert_eq!(named.header("docker-content-digest"), Digest::of(&named.body).to_string());
    let common = remote.get("/v2/r/manifests/common").await;
    assert!(common.body == image(&noise(1_000, 1), None));
    let tags = remote.get("/v2/r/tags/list").await.json();
    assert_eq!(tags["tags"], serde_json::json!(["common", "moves"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_who_push_one_tag_at_once_all_are_kept_and_one_is_named() {
    let mut registry = TestRegistry::start().await;
    for _restarted in 0..2 {
        let remote = registry.remote.clone();
        let pushed = join_all((0..CLIENTS).map(|client| push_both(&remote, client))).await;
        let pushed: BTreeSet<_> = pushed.into_iter().collect();
        assert_eq!(pushed.len(), 8);
        check(&registry, &pushed).await;
        registry = registry.restart().await;
        check(&registry, &pushed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_who_delete_and_push_a_tag_at_once_nobody_is_told_a_half() {
    let registry = TestRegistry::start().await;
    registry.push_image("r", "t", b"layer", None).await;
    let clients = (0..CLIENTS).map(|client| {
        let remote = registry.remote.clone();
        async move {
            for _ in 0..10 {
                if client.is_multiple_of(2) {
                    let reply = remote.delete("/v2/r/manifests/t").await;
                    assert!([202, 404].contains(&reply.status), "{reply:?}");
                } else {
                    remote.push_image("r", "t", b"layer", None).await;
                }
                let reply = remote.get("/v2/r/manifests/t").await;
                let whole = reply.status == 200 && reply.body == image(b"layer", None);
                assert!(whole || reply.status == 404, "{reply:?}");
            }
        }
    });
    join_all(clients).await;
    registry.push_image("r", "t", b"layer", None).await;
    assert_eq!(registry.head("/v2/r/manifests/t").await.status, 200);
}

/// Everything under SHA-512: content, manifests, tags, subjects, lists.
#[tokio::test]
async fn a_repository_may_know_no_sha_256() {
    let registry = TestRegistry::start().await;
    let long = |content: &[u8]| Descriptor {
        digest: sha512(content),
        ..Descriptor::of(media_type::OCI_LAYER_TAR, content)
    };
    let mut subject = None;
    for layer in [&b"one"[..], b"two"] {
        for content in [layer, b"{}"] {
            let upload = registry.begin("r").await;
            assert_eq!(registry.put(&upload, &sha512(content), content.to_vec()).await.status, 201);
        }
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_MANIFEST,
            "artifactType": "a/b",
            "config": long(b"{}"),
            "layers": [long(layer)],
            "subject": subject,
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let reference = format!("{}?tag=latest", sha512(&manifest));
        let reply =
            registry.put_manifest("r", &reference, media_type::OCI_MANIFEST, manifest.clone());
        assert_eq!(reply.await.status, 201);
        subject = Some(long(&manifest)).filter(|_| subject.is_none()).or(subject);
    }
    let registry = registry.restart().await;
    let latest = registry.get("/v2/r/manifests/latest").await;
    assert_eq!(latest.header("docker-content-digest"), sha512(&latest.body).to_string());
    let subject = subject.unwrap().digest;
    let listed = registry.get(&format!("/v2/r/referrers/{subject}")).await.json();
    assert_eq!(listed["manifests"][0]["digest"], sha512(&latest.body).to_string());
    assert_eq!(registry.delete(&format!("/v2/r/manifests/{subject}")).await.status, 202);
    for content in [b"one", b"two"] {
        assert_eq!(registry.blob("r", &sha512(content)).await.body, content.as_slice());
        assert_eq!(registry.head_blob("r", &Digest::of(content)).await, 404);
    }
}
