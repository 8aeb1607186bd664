//! Tags that stay where they are.

use kybernate_spec::{Digest, media_type};

use crate::harness::{TestRegistry, image};

const RULES: &str = r#"
[[tags.immutable]]
repositories = ["release/**"]
tags = ["v*"]
except = ["v*-rc*"]
"#;

#[tokio::test]
async fn an_immutable_tag_is_pushed_once() {
    let registry = TestRegistry::start_set(RULES).await;
    let push = async |name: &str, tag: &str, content: &'static str| {
        registry.put_manifest(name, tag, "x/y", content).await
    };
    for (name, tag) in [("release/a", "latest"), ("release/a", "v1-rc1"), ("other", "v1")] {
        assert_eq!(push(name, tag, "one").await.status, 201);
        assert_eq!(push(name, tag, "two").await.status, 201, "{name}:{tag} moves");
    }
    assert_eq!(push("release/a", "v1", "one").await.status, 201);
    assert_eq!(push("release/a", "v1", "one").await.status, 201, "the same once more");
    let refused = push("release/a", "v1", "two").await;
    refused.refused(409, "DENIED");
    let told = refused.json().to_string();
    assert!(told.contains(&Digest::of(b"one").to_string()), "{told}");
    assert_eq!(registry.get("/v2/release/a/manifests/v1").await.body, "one");

    // Several at once: none is set when one may not be.
    let digest = Digest::of(b"three");
    let path = format!("{digest}?tag=v2&tag=v1");
    push("release/a", &path, "three").await.refused(409, "DENIED");
    registry.get("/v2/release/a/manifests/v2").await.refused(404, "MANIFEST_UNKNOWN");
}

#[tokio::test]
async fn an_immutable_tag_and_its_manifest_cannot_be_deleted() {
    let registry = TestRegistry::start_set(RULES).await;
    registry.put_manifest("release/a", "v1", "x/y", "one").await;
    registry.put_manifest("release/a", "free", "x/y", "one").await;
    registry.put_manifest("release/a", "old", "x/y", "two").await;
    registry.delete("/v2/release/a/manifests/v1").await.refused(409, "DENIED");
    let path =
        |content: &str| format!("/v2/release/a/manifests/{}", Digest::of(content.as_bytes()));
    registry.delete(&path("one")).await.refused(409, "DENIED");
    assert_eq!(registry.delete("/v2/release/a/manifests/free").await.status, 202);
    assert_eq!(registry.delete(&path("two")).await.status, 202);
    assert_eq!(registry.get("/v2/release/a/manifests/v1").await.body, "one");
    registry.delete("/v2/release/a/manifests/v9").await.refused(404, "MANIFEST_UNKNOWN");
}

#[tokio::test]
async fn what_an_immutable_tag_needs_cannot_be_deleted() {
    let registry = TestRegistry::start_set(RULES).await;
    let image = registry.push_image("release/a", "child", b"layer", None).await;
    let index = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": image.digest,
            "size": image.size,
        }],
    });
    let media_type = "application/vnd.oci.image.index.v1+json";
    let pushed = registry.put_manifest("release/a", "v1", media_type, index.to_string()).await;
    assert_eq!(pushed.status, 201);
    let stray = registry.push("release/a", b"stray").await;

    let manifest = format!("/v2/release/a/manifests/{}", image.digest);
    registry.delete(&manifest).await.refused(409, "DENIED");
    let blob = |digest: &Digest| format!("/v2/release/a/blobs/{digest}");
    registry.delete(&blob(&Digest::of(b"layer"))).await.refused(409, "DENIED");
    assert_eq!(registry.delete(&blob(&stray)).await.status, 202);
    assert_eq!(registry.get(&manifest).await.status, 200);
    assert_eq!(registry.blob("release/a", &Digest::of(b"layer")).await.body, "layer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_push_an_immutable_tag_at_once_one_wins() {
    let registry = TestRegistry::start_set(RULES).await;
    for round in 0..5 {
        let tag = format!("v{round}");
        let pushes = (0..8).map(|n| {
            let content = format!("content {n}");
            let (registry, tag) = (&registry, &tag);
            async move { registry.put_manifest("release/r", tag, "x/y", content).await.status }
        });
        let answers = futures::future::join_all(pushes).await;
        assert_eq!(answers.iter().filter(|status| **status == 201).count(), 1, "{answers:?}");
        let winner = answers.iter().position(|status| *status == 201).unwrap();
        let found = registry.get(&format!("/v2/release/r/manifests/{tag}")).await;
        assert_eq!(found.body, format!("content {winner}"));
    }
}

/// Who deletes looks before it has the repository for itself: what comes in between is seen too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_immutable_tag_comes_to_need_is_not_deleted_meanwhile() {
    let registry = TestRegistry::start_set(RULES).await;
    for round in 0..20 {
        let layer = format!("layer {round}").into_bytes();
        let tag = format!("v{round}");
        registry.push("release/r", b"{}").await;
        let digest = registry.push("release/r", &layer).await;
        let path = format!("/v2/release/r/blobs/{digest}");
        let deleting = registry.delete(&path);
        let content = image(&layer, None);
        let pushing = registry.put_manifest("release/r", &tag, media_type::OCI_MANIFEST, content);
        let (deleted, pushed) = futures::future::join(deleting, pushing).await;
        let there = registry.head(&path).await.status;
        match (deleted.status, pushed.status) {
            (202, 400) => assert_eq!(there, 404),
            (409, 201) => assert_eq!(there, 200),
            both => panic!("{both:?} {there}"),
        }
    }
}

/// A manifest stays what it was pushed as: another type would change what the tag serves, and hide
/// what it needs.
#[tokio::test]
async fn a_manifest_does_not_become_something_else() {
    let registry = TestRegistry::start_set(RULES).await;
    let image = registry.push_image("release/a", "v1", b"layer", None).await;
    let path = format!("/v2/release/a/manifests/{}", image.digest);
    let content = registry.get(&path).await.body;
    let digest = image.digest.to_string();
    for reference in [&*digest, "free"] {
        let again = registry.put_manifest("release/a", reference, "application/x", content.clone());
        again.await.refused(400, "MANIFEST_INVALID");
    }
    assert_eq!(registry.head(&path).await.header("content-type"), media_type::OCI_MANIFEST);
    let layer = Digest::of(b"layer");
    registry.delete(&format!("/v2/release/a/blobs/{layer}")).await.refused(409, "DENIED");

    // One that does not say itself what it is, and what that needs.
    let config = registry.push("release/a", b"{}").await;
    let stranger = format!("{{\"needs\": \"{config}\"}}");
    let path = format!("/v2/release/a/manifests/{}", Digest::of(stranger.as_bytes()));
    let push = async |media_type| {
        registry.put_manifest("release/a", "v2", media_type, stranger.clone()).await
    };
    assert_eq!(push("x/one").await.status, 201);
    assert_eq!(push("x/one").await.status, 201);
    let refused = push("x/two").await;
    refused.refused(400, "MANIFEST_INVALID");
    assert!(refused.json().to_string().contains("x/one"), "{refused:?}");
    assert_eq!(registry.head(&path).await.header("content-type"), "x/one");
    registry.delete(&format!("/v2/release/a/blobs/{config}")).await.refused(409, "DENIED");
}
