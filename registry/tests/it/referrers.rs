//! Referrers: listed from the moment they are acknowledged until they are deleted.

use kybernate_spec::{Descriptor, media_type};

use crate::harness::{TestRegistry, image};

#[tokio::test]
async fn a_subject_lists_what_refers_to_it() {
    let registry = TestRegistry::start().await;
    let subject = registry.push_image("a", "v1", b"layer", None).await;
    let path = format!("/v2/a/referrers/{}", subject.digest);
    let none = registry.get(&path).await;
    assert_eq!((none.status, none.header("content-type")), (200, media_type::OCI_INDEX));
    assert_eq!(none.json()["manifests"], serde_json::json!([]));

    let config = Descriptor::of("application/vnd.test.config", b"{}");
    let signature = serde_json::json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST,
        "artifactType": "application/vnd.test.v1+json", "config": config, "layers": [],
        "subject": subject, "annotations": { "key": "value" },
    })
    .to_string();
    let reply = registry.put_manifest("a", "s", media_type::OCI_MANIFEST, signature.clone()).await;
    assert_eq!(reply.status, 201);
    assert_eq!(reply.header("oci-subject"), subject.digest.to_string());
    let plain = registry.push_image("a", "p", b"other", Some(&subject)).await;

    let list = registry.get(&path).await.json();
    assert_eq!(list["manifests"].as_array().unwrap().len(), 2);
    let filter = format!("{path}?artifactType=application%2Fvnd.test.v1%2Bjson");
    let filtered = registry.get(&filter).await;
    assert_eq!(filtered.header("oci-filters-applied"), "artifactType");
    let [one] = filtered.json()["manifests"].as_array().unwrap().clone().try_into().unwrap();
    let signature = Descriptor::of(media_type::OCI_MANIFEST, signature.as_bytes());
    assert_eq!(one["digest"], signature.digest.to_string());
    assert_eq!(one["size"], signature.size);
    assert_eq!(one["annotations"]["key"], "value");

    // The config's type stands in where the manifest has none.
    let filtered = registry.get(&format!("{path}?artifactType={}", media_type::OCI_EMPTY)).await;
    assert_eq!(filtered.json()["manifests"][0]["digest"], plain.digest.to_string());
}

#[tokio::test]
async fn a_subject_may_come_later_or_never() {
    let registry = TestRegistry::start().await;
    let subject = Descriptor::of(media_type::OCI_MANIFEST, &image(b"later", None));
    let referrer = registry.push_image("a", "r", b"layer", Some(&subject)).await;
    let path = format!("/v2/a/referrers/{}", subject.digest);
    let list = registry.get(&path).await.json();
    assert_eq!(list["manifests"][0]["digest"], referrer.digest.to_string());
    registry.push_image("a", "v1", b"later", None).await;
    assert_eq!(registry.get(&path).await.json(), list);
    registry.get("/v2/a/referrers/sha256:x").await.refused(400, "DIGEST_INVALID");
    let elsewhere = registry.get(&format!("/v2/b/referrers/{}", subject.digest)).await;
    assert_eq!(elsewhere.json()["manifests"], serde_json::json!([]));
}

#[tokio::test]
async fn a_deleted_referrer_is_no_longer_listed() {
    let registry = TestRegistry::start().await;
    let subject = registry.push_image("a", "v1", b"layer", None).await;
    let referrer = registry.push_image("a", "r", b"other", Some(&subject)).await;
    assert_eq!(registry.delete(&format!("/v2/a/manifests/{}", referrer.digest)).await.status, 202);
    let path = format!("/v2/a/referrers/{}", subject.digest);
    assert_eq!(registry.get(&path).await.json()["manifests"], serde_json::json!([]));
}

#[tokio::test]
async fn referrers_come_in_pages() {
    let registry = TestRegistry::start().await;
    let subject = registry.push_image("a", "v1", b"layer", None).await;
    for number in 0..5u8 {
        registry.push_image("a", "r", &[number], Some(&subject)).await;
    }
    let mut path = format!("/v2/a/referrers/{}?n=2", subject.digest);
    let mut seen = 0;
    loop {
        let page = registry.get(&path).await;
        seen += page.json()["manifests"].as_array().unwrap().len();
        let Some(link) = page.headers.get("link") else { break };
        let link = link.to_str().unwrap();
        path = link.strip_prefix('<').unwrap().split_once(">; rel=\"next\"").unwrap().0.to_owned();
    }
    assert_eq!(seen, 5);
}
