//! Lists of tags and repositories, in pages.

use crate::harness::TestRegistry;

#[tokio::test]
async fn tags_come_sorted_and_in_pages() {
    let registry = TestRegistry::start().await;
    for tag in ["c", "a", "B", "1", "b", "_x"] {
        registry.put_manifest("r", tag, "x/y", "content").await;
    }
    let all = registry.get("/v2/r/tags/list").await;
    let sorted = serde_json::json!(["1", "B", "_x", "a", "b", "c"]);
    assert_eq!(all.json()["tags"], sorted);
    assert!(!all.headers.contains_key("link"));

    let mut seen = Vec::new();
    let mut path = "/v2/r/tags/list?n=4".to_owned();
    loop {
        let page = registry.get(&path).await;
        seen.extend(page.json()["tags"].as_array().unwrap().clone());
        let Some(link) = page.headers.get("link") else { break };
        let link = link.to_str().unwrap();
        path = link.strip_prefix('<').unwrap().split_once(">; rel=\"next\"").unwrap().0.to_owned();
    }
    assert_eq!(serde_json::Value::from(seen), sorted);

    let page = registry.get("/v2/r/tags/list?n=2&last=a").await.json();
    assert_eq!(page["tags"], serde_json::json!(["b", "c"]));
    let none = registry.get("/v2/r/tags/list?n=0").await;
    assert_eq!(none.json()["tags"], serde_json::json!([]));
    registry.get("/v2/r/tags/list?n=-1").await.refused(400, "UNSUPPORTED");
}

#[tokio::test]
async fn repositories_are_found_whatever_their_names_hold() {
    let registry = TestRegistry::start().await;
    let names = ["a", "a-b", "a/b", "a/blobs/uploads", "z/tags/list"];
    for name in names {
        registry.put_manifest(name, "v1", "x/y", "content").await;
    }
    let all = registry.get("/v2/_catalog").await.json();
    assert_eq!(all, serde_json::json!({ "repositories": names }));
    let page = registry.get("/v2/_catalog?n=2&last=a-b").await;
    assert_eq!(page.json()["repositories"], serde_json::json!(["a/b", "a/blobs/uploads"]));
    assert!(page.header("link").contains("last=a%2Fblobs%2Fuploads"));
}
