//! Manifests: what is taken, what is refused, what comes back.

use http::Method;
use kybernate_spec::{Descriptor, Digest, MANIFEST_BYTES_MAX, media_type};

use crate::harness::{Remote, TestRegistry, image, sha512};

#[tokio::test]
async fn a_manifest_comes_back_by_tag_and_by_digest() {
    let registry = TestRegistry::start().await;
    let pushed = registry.push_image("a/b", "v1", b"layer", None).await;
    for reference in ["v1".to_owned(), pushed.digest.to_string()] {
        let path = format!("/v2/a/b/manifests/{reference}");
        let (head, get) = (registry.head(&path).await, registry.get(&path).await);
        assert_eq!((head.status, get.status), (200, 200));
        assert_eq!(get.body, image(b"layer", None));
        for name in ["content-length", "content-type", "docker-content-digest", "etag"] {
            assert_eq!(head.header(name), get.header(name), "{name}");
        }
        assert_eq!(head.header("content-type"), media_type::OCI_MANIFEST);
        assert_eq!(head.header("docker-content-digest"), pushed.digest.to_string());
        assert_eq!(head.header("content-length"), pushed.size.to_string());
    }
}

#[tokio::test]
async fn a_manifest_whose_content_is_missing_is_refused() {
    let registry = TestRegistry::start().await;
    let check = async |name: &str| {
        let content = image(b"layer", None);
        registry.put_manifest(name, "v1", media_type::OCI_MANIFEST, content).await
    };
    check("a").await.refused(400, "MANIFEST_BLOB_UNKNOWN");
    registry.push("a", b"{}").await;
    let reply = check("a").await;
    reply.refused(400, "MANIFEST_BLOB_UNKNOWN");
    let named = Digest::of(b"layer").to_string();
    assert!(String::from_utf8_lossy(&reply.body).contains(&named), "{reply:?}");
    registry.push("a", b"layer").await;
    assert_eq!(check("a").await.status, 201);
    // What another repository has does not count.
    check("b").await.refused(400, "MANIFEST_BLOB_UNKNOWN");

    let child = Descriptor::of(media_type::OCI_MANIFEST, b"not pushed");
    let index = index_of(media_type::OCI_INDEX, &[child]);
    let reply = registry.put_manifest("a", "i", media_type::OCI_INDEX, index).await;
    reply.refused(400, "MANIFEST_BLOB_UNKNOWN");
    registry.get("/v2/a/manifests/i").await.refused(404, "MANIFEST_UNKNOWN");
}

#[tokio::test]
async fn every_kind_of_manifest_is_kept_as_it_was_pushed() {
    let registry = TestRegistry::start().await;
    let child = registry.push_image("a", "v1", b"layer", None).await;
    let docker = String::from_utf8(image(b"layer", None)).unwrap();
    let docker = docker.replace(media_type::OCI_MANIFEST, media_type::DOCKER_MANIFEST);
    let list = index_of(media_type::DOCKER_MANIFEST_LIST, std::slice::from_ref(&child));
    let index = index_of(media_type::OCI_INDEX, &[child]);
    for (tag, media_type, content) in [
        ("docker", media_type::DOCKER_MANIFEST, docker.into_bytes()),
        ("list", media_type::DOCKER_MANIFEST_LIST, list),
        ("index", media_type::OCI_INDEX, index),
        ("unknown", "application/x-unknown", b"not even \xff JSON".to_vec()),
    ] {
        let pushed = registry.put_manifest("a", tag, media_type, content.clone()).await;
        assert_eq!(pushed.status, 201, "{tag} {pushed:?}");
        let reply = registry.get(&format!("/v2/a/manifests/{tag}")).await;
        assert_eq!(reply.header("content-type"), media_type);
        assert_eq!(reply.body, content);
    }
}

#[tokio::test]
async fn a_manifest_must_match_the_digest_it_is_pushed_under() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v1", b"layer", None).await;
    let content = image(b"layer", None);
    let wrong = Digest::of(b"else").to_string();
    let reply = registry.put_manifest("a", &wrong, media_type::OCI_MANIFEST, content.clone()).await;
    reply.refused(400, "DIGEST_INVALID");
    let reply = registry.put_manifest("a", "sha256:x", media_type::OCI_MANIFEST, content.clone());
    reply.await.refused(400, "DIGEST_INVALID");

    let digest = sha512(&content).to_string();
    let reply =
        registry.put_manifest("a", &digest, media_type::OCI_MANIFEST, content.clone()).await;
    assert_eq!(reply.status, 201);
    assert_eq!(reply.header("docker-content-digest"), digest);
    assert_eq!(registry.get(&format!("/v2/a/manifests/{digest}")).await.body, content);
}

#[tokio::test]
async fn a_malformed_manifest_or_tag_is_refused() {
    let registry = TestRegistry::start().await;
    for content in ["", "{", "[]", "{}", r#"{"config":5}"#] {
        let reply = registry.put_manifest("a", "v1", media_type::OCI_MANIFEST, content).await;
        reply.refused(400, "MANIFEST_INVALID");
    }
    let reply = registry.put_manifest("a", "v1", media_type::OCI_INDEX, image(b"", None)).await;
    reply.refused(400, "MANIFEST_INVALID");
    let reply = registry.put_manifest("a", ".no-tag", "x/y", "content").await;
    reply.refused(400, "MANIFEST_INVALID");
    registry.get("/v2/a/manifests/.no-tag").await.refused(404, "MANIFEST_UNKNOWN");
}

#[tokio::test]
async fn a_manifest_of_4_mib_is_taken_and_a_larger_one_refused() {
    let registry = TestRegistry::start().await;
    let most = usize::try_from(MANIFEST_BYTES_MAX).unwrap();
    let large = registry.put_manifest("a", "large", "x/y", vec![b' '; most]).await;
    assert_eq!(large.status, 201);
    assert_eq!(registry.get("/v2/a/manifests/large").await.body.len(), most);
    let reply = registry.put_manifest("a", "larger", "x/y", vec![b' '; most + 1]).await;
    reply.refused(413, "SIZE_INVALID");
    let pieces = futures::stream::iter((0..5).map(|_| Ok::<_, std::io::Error>(vec![0; 1 << 20])));
    let body = reqwest::Body::wrap_stream(pieces);
    let reply = registry.put_manifest("a", "larger", "x/y", body).await;
    reply.refused(413, "SIZE_INVALID");
}

#[tokio::test]
async fn deleting_a_tag_keeps_the_manifest_and_deleting_the_manifest_takes_its_tags() {
    let registry = TestRegistry::start().await;
    let one = registry.push_image("a", "one", b"layer", None).await;
    for tag in ["two", "three"] {
        registry.put_manifest("a", tag, media_type::OCI_MANIFEST, image(b"layer", None)).await;
    }
    registry.push_image("a", "other", b"other layer", None).await;
    assert_eq!(registry.delete("/v2/a/manifests/one").await.status, 202);
    registry.delete("/v2/a/manifests/one").await.refused(404, "MANIFEST_UNKNOWN");
    let path = format!("/v2/a/manifests/{}", one.digest);
    assert_eq!(registry.get(&path).await.status, 200);
    assert_eq!(registry.get("/v2/a/tags/list").await.json()["tags"].as_array().unwrap().len(), 3);

    assert_eq!(registry.delete(&path).await.status, 202);
    registry.delete(&path).await.refused(404, "MANIFEST_UNKNOWN");
    registry.head(&path).await;
    registry.get("/v2/a/manifests/two").await.refused(404, "MANIFEST_UNKNOWN");
    let tags = registry.get("/v2/a/tags/list").await.json();
    assert_eq!(tags, serde_json::json!({ "name": "a", "tags": ["other"] }));
    registry.push_image("a", "one", b"layer", None).await;
    assert_eq!(registry.get(&path).await.status, 200, "it can be pushed again");
}

#[tokio::test]
async fn a_tag_moves_to_what_is_pushed_last() {
    let registry = TestRegistry::start().await;
    for layer in ["first", "second"] {
        let pushed = registry.push_image("a", "latest", layer.as_bytes(), None).await;
        let reply = registry.head("/v2/a/manifests/latest").await;
        assert_eq!(reply.header("docker-content-digest"), pushed.digest.to_string());
    }
}

#[tokio::test]
async fn one_put_by_digest_may_set_several_tags() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v0", b"layer", None).await;
    let content = image(b"layer", None);
    let digest = Digest::of(&content);
    let reference = format!("{digest}?tag=v1&tag=v1.2");
    let reply = registry.put_manifest("a", &reference, media_type::OCI_MANIFEST, content).await;
    assert_eq!(reply.status, 201);
    let told: Vec<_> = reply.headers.get_all("oci-tag").iter().collect();
    assert_eq!(told, ["v1", "v1.2"]);
    assert_eq!(registry.head("/v2/a/manifests/v1.2").await.status, 200);
}

#[tokio::test]
async fn the_content_type_may_have_parameters_or_be_missing() {
    let registry = TestRegistry::start().await;
    registry.push_image("a", "v0", b"layer", None).await;
    let content = image(b"layer", None);
    let with = format!("{}; charset=utf-8", media_type::OCI_MANIFEST);
    assert_eq!(registry.put_manifest("a", "v1", &with, content.clone()).await.status, 201);
    let put = async |remote: &Remote| {
        remote.send(Method::PUT, "/v2/a/manifests/v2", &[], content.clone()).await
    };
    assert_eq!(put(&registry).await.status, 201);
    for tag in ["v1", "v2"] {
        let reply = registry.head(&format!("/v2/a/manifests/{tag}")).await;
        assert_eq!(reply.header("content-type"), media_type::OCI_MANIFEST);
    }
}

fn index_of(media_type: &str, children: &[Descriptor]) -> Vec<u8> {
    let index = serde_json::json!({
        "schemaVersion": 2, "mediaType": media_type, "manifests": children,
    });
    index.to_string().into_bytes()
}

#[tokio::test]
async fn a_push_may_say_what_it_replaces() {
    let registry = TestRegistry::start().await;
    let put = async |content: &'static str, name: &str, value: &str| {
        let headers = [("content-type", "x/y"), (name, value)];
        registry.send(Method::PUT, "/v2/a/manifests/v1", &headers, content).await
    };
    put("one", "if-match", "*").await.refused(412, "DENIED");
    assert_eq!(put("one", "if-none-match", "*").await.status, 201);
    put("two", "if-none-match", "*").await.refused(412, "DENIED");
    put("two", "if-match", "\"other\"").await.refused(412, "DENIED");
    let reply = registry.get("/v2/a/manifests/v1").await;
    assert_eq!(reply.body, "one");
    let tag = reply.header("etag").to_owned();
    put("two", "if-none-match", &tag).await.refused(412, "DENIED");
    assert_eq!(put("two", "if-match", &tag).await.status, 201);
    put("three", "if-match", &tag).await.refused(412, "DENIED");
    assert_eq!(registry.get("/v2/a/manifests/v1").await.body, "two");

    // Of many who replace the same, one does.
    let tag = registry.get("/v2/a/manifests/v1").await.header("etag").to_owned();
    let pushes =
        (0..8).map(|n| {
            let headers = [("content-type", "x/y"), ("if-match", &*tag)];
            let content = format!("at once {n}");
            let registry = &registry;
            async move {
                registry.send(Method::PUT, "/v2/a/manifests/v1", &headers, content).await.status
            }
        });
    let mut statuses = futures::future::join_all(pushes).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [201, 412, 412, 412, 412, 412, 412, 412]);
}

#[tokio::test]
async fn a_delete_may_say_what_it_removes() {
    let registry = TestRegistry::start().await;
    let put = async |content: &'static str| {
        assert_eq!(registry.put_manifest("a", "v1", "x/y", content).await.status, 201);
        registry.get("/v2/a/manifests/v1").await.header("etag").to_owned()
    };
    let delete = async |reference: &str, name: &str, value: &str| {
        let path = format!("/v2/a/{reference}");
        registry.send(Method::DELETE, &path, &[(name, value)], "").await
    };
    let (old, new) = (put("one").await, put("two").await);
    let digest = new.trim_matches('"');
    for reference in ["manifests/v1", &format!("manifests/{digest}")] {
        delete(reference, "if-match", &old).await.refused(412, "DENIED");
        delete(reference, "if-none-match", &new).await.refused(412, "DENIED");
        assert_eq!(registry.get("/v2/a/manifests/v1").await.body, "two");
    }
    assert_eq!(delete("manifests/v1", "if-match", &new).await.status, 202);
    // What is not there is missing, whatever is asked of it.
    delete("manifests/v1", "if-match", "*").await.refused(404, "MANIFEST_UNKNOWN");
    assert_eq!(delete(&format!("manifests/{digest}"), "if-match", "*").await.status, 202);

    let blob = registry.push("a", b"blob").await;
    let path = format!("blobs/{blob}");
    delete(&path, "if-match", "\"other\"").await.refused(412, "DENIED");
    assert_eq!(delete(&path, "if-match", &format!("\"{blob}\"")).await.status, 202);
    delete(&path, "if-match", "*").await.refused(404, "BLOB_UNKNOWN");

    // Of many who remove the same, one does.
    let tag = put("three").await;
    let deletes = (0..8).map(|_| delete("manifests/v1", "if-match", &tag));
    let answers = futures::future::join_all(deletes).await;
    assert_eq!(answers.iter().filter(|reply| reply.status == 202).count(), 1);
}
