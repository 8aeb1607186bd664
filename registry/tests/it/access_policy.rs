//! The policy: what is hidden looks missing, what is denied is denied, and files are read again.

use http::Method;
use kybernate_spec::Digest;

use crate::access::{Guarded, probe, rule, with_policy};
use crate::harness::{TestRegistry, noise, wait_until};
use crate::process::command;

fn anonymous(repositories: &[&str], actions: &[&str]) -> String {
    rule(repositories, &["anonymous"], actions)
}

#[tokio::test]
async fn a_repository_one_may_not_see_answers_as_a_missing_one() {
    // Everything is made while all is allowed, then hidden.
    let all = anonymous(&["**"], &["pull", "push", "delete"]);
    let guarded = Guarded::start(&[("policy.toml", &all)], with_policy).await;
    let remote = guarded.registry.remote.clone();
    let layer = noise(100, 1);
    let secret = remote.push_image("secret/model", "v1", &layer, None).await;
    remote.push_image("secret/model", "v2", &layer, Some(&secret)).await;
    remote.push_image("open/model", "v1", &layer, None).await;
    let session = remote.begin("secret/model").await;

    guarded.replace("policy.toml", &anonymous(&["open/*"], &["pull"]));
    let hidden = async || remote.get("/v2/secret/model/tags/list").await.status == 404;
    wait_until("the policy is in force", hidden).await;
    for digest in [secret.digest.to_string(), Digest::of(&layer).to_string()] {
        let there = probe(&remote, "secret/model", &digest, &[]).await;
        let missing = probe(&remote, "secret/nomod", &digest, &[]).await;
        assert_eq!(there, missing);
        // Also one that may be seen and is missing, for what needs no more than sight.
        let visible = probe(&remote, "open/missing", &digest, &[]).await;
        for (hidden, visible) in there.iter().zip(&visible) {
            if hidden.starts_with("GET") || hidden.starts_with("HEAD") {
                let upload = hidden.contains("uploads/0");
                assert!(hidden == visible || upload, "{hidden}\n{visible}");
            }
        }
    }
    // Not in the catalog, and no page or link tells of it.
    for query in ["", "?n=1", "?n=1&last=open/model", "?n=10&last=a"] {
        let reply = remote.get(&format!("/v2/_catalog{query}")).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(!text.contains("secret") && !reply.headers.contains_key("link"), "{reply:?}");
        assert_eq!(text.contains("open/model"), !query.contains("last=open"), "{text}");
    }
    // The upload that began before goes on.
    let content = noise(50, 2);
    assert_eq!(remote.patch(&session, 0, &content).await.status, 202);
    assert_eq!(remote.get(&session).await.status, 204);
    assert_eq!(remote.put(&session, &Digest::of(&content), "").await.status, 201);
    remote.put(&session, &Digest::of(&content), "").await.refused(403, "DENIED");
}

/// Equal answers after unequal work would be told apart by their time. So the work must be equal,
/// and here whoever looked at the hidden repository would fail over it.
#[tokio::test]
async fn what_is_hidden_is_not_looked_at() {
    let all = anonymous(&["**"], &["pull", "push", "delete"]);
    let guarded = Guarded::start(&[("policy.toml", &all)], with_policy).await;
    let remote = guarded.registry.remote.clone();
    let mut digests = Vec::new();
    for name in ["secret/model", "open/model"] {
        digests.push(remote.push_image(name, "v1", b"layer", None).await.digest);
        let dir = guarded.registry.path(&format!("repositories/{name}"));
        fs_err::rename(&dir, dir.with_extension("away")).unwrap();
        // A link that leads to itself: no look at anything below it succeeds, or finds nothing.
        fs_err::os::unix::fs::symlink("model", &dir).unwrap();
    }
    guarded.replace("policy.toml", &anonymous(&["open/*"], &["pull"]));
    let hidden = async || remote.get("/v2/secret/model/manifests/v1").await.status == 404;
    wait_until("the policy is in force", hidden).await;
    let looked_at = format!("/v2/open/model/manifests/{}", digests[1]);
    for path in ["/v2/open/model/manifests/v1", &looked_at] {
        assert_eq!(remote.get(path).await.status, 500, "{path}: a look at one is told");
    }
    for digest in [digests[0].to_string(), Digest::of(b"layer").to_string()] {
        let there = probe(&remote, "secret/model", &digest, &[]).await;
        assert_eq!(there, probe(&remote, "secret/nomod", &digest, &[]).await);
    }
}

#[tokio::test]
async fn what_may_be_seen_is_denied_openly() {
    let all = anonymous(&["**"], &["pull", "push", "delete"]);
    let guarded = Guarded::start(&[("policy.toml", &all)], with_policy).await;
    let remote = guarded.registry.remote.clone();
    let image = remote.push_image("a/model", "v1", b"layer", None).await;
    let (pull, push) = (anonymous(&["a/*"], &["pull"]), anonymous(&["b/*"], &["push"]));
    guarded.replace("policy.toml", &(pull + &push));
    let denied = async || {
        let path = "/v2/a/model/blobs/uploads/";
        remote.send(Method::POST, path, &[], "").await.status == 403
    };
    wait_until("the policy is in force", denied).await;
    for path in ["manifests/v1".to_owned(), format!("blobs/{}", Digest::of(b"layer"))] {
        let path = format!("/v2/a/model/{path}");
        assert_eq!(remote.get(&path).await.status, 200);
        remote.delete(&path).await.refused(403, "DENIED");
    }
    let manifest = remote.get("/v2/a/model/manifests/v1").await;
    let media_type = manifest.header("content-type").to_owned();
    remote.put_manifest("a/model", "v2", &media_type, manifest.body).await.refused(403, "DENIED");
    // Who may only push sees nothing, and can push all the same.
    let digest = remote.push("b/in", b"one way").await;
    assert_eq!(remote.head_blob("b/in", &digest).await, 404);
    assert_eq!(remote.get("/v2/b/in/tags/list").await.status, 404);
    assert_eq!(remote.get(&format!("/v2/a/model/manifests/{}", image.digest)).await.status, 200);
}

#[tokio::test]
async fn nothing_is_mounted_from_where_one_may_not_read() {
    let all = anonymous(&["**"], &["pull", "push"]);
    let guarded = Guarded::start(&[("policy.toml", &all)], with_policy).await;
    let remote = guarded.registry.remote.clone();
    let digest = remote.push("secret", b"bytes").await;
    remote.push("blind", b"bytes").await;
    remote.push("open", b"bytes").await;
    let rules = anonymous(&["mine", "open"], &["pull", "push"]) + &anonymous(&["blind"], &["push"]);
    guarded.replace("policy.toml", &rules);
    let hidden = async || remote.head_blob("secret", &digest).await == 404;
    wait_until("the policy is in force", hidden).await;
    let mount = async |to: &str, from: &str| {
        let path = format!("/v2/{to}/blobs/uploads/?mount={digest}{from}");
        remote.send(Method::POST, &path, &[], "").await.status
    };
    assert_eq!(mount("mine", "&from=secret").await, 202);
    assert_eq!(mount("mine", "&from=missing").await, 202);
    assert_eq!(mount("mine", "&from=blind").await, 202);
    assert_eq!(mount("mine", "").await, 202);
    assert_eq!(mount("blind", "").await, 202, "who may not pull is not told what is there");
    assert_eq!(remote.head_blob("mine", &digest).await, 404);
    assert_eq!(mount("mine", "&from=open").await, 201);
    assert_eq!(remote.head_blob("mine", &digest).await, 200);
}

#[tokio::test]
async fn a_catalog_is_paged_over_what_may_be_seen() {
    let all = anonymous(&["**"], &["pull", "push"]);
    let guarded = Guarded::start(&[("policy.toml", &all)], with_policy).await;
    let remote = guarded.registry.remote.clone();
    for name in ["a", "b", "c", "d", "e", "f"] {
        remote.push(&format!("{name}/x"), b"x").await;
    }
    guarded.replace("policy.toml", &anonymous(&["{b,d,e}/*"], &["pull"]));
    let hidden = async || remote.get("/v2/a/x/tags/list").await.status == 404;
    wait_until("the policy is in force", hidden).await;
    let (mut path, mut found) = ("/v2/_catalog?n=2".to_owned(), Vec::new());
    loop {
        let reply = remote.get(&path).await;
        let json = reply.json();
        let names = json["repositories"].as_array().unwrap();
        found.extend(names.iter().map(|name| name.as_str().unwrap().to_owned()));
        let Some(link) = reply.headers.get("link") else { break };
        path = link.to_str().unwrap()[1..].split_once('>').unwrap().0.to_owned();
        assert_eq!(names.len(), 2);
    }
    assert_eq!(found, ["b/x", "d/x", "e/x"]);
    assert_eq!(remote.get("/v2/_catalog?n=3").await.headers.get("link"), None);
}

#[tokio::test]
async fn without_rules_everything_is_allowed() {
    let registry = TestRegistry::start().await;
    let authorization = [("authorization", "Basic bm9ib2R5Om5vdGhpbmc=")];
    registry.push_image("any", "v1", b"layer", None).await;
    let reply = registry.send(Method::GET, "/v2/any/tags/list", &authorization, "").await;
    assert_eq!(reply.status, 200);
}

#[tokio::test]
async fn a_policy_that_is_wrong_is_refused_at_start_and_ignored_later() {
    let guarded =
        Guarded::start(&[("policy.toml", &anonymous(&["a"], &["push", "pull"]))], with_policy)
            .await;
    let remote = guarded.registry.remote.clone();
    for wrong in [
        "",
        "[[rule]]\n",
        "not toml",
        "[[rule]]\nrepositories=[\"**\"]\nsubjects=[\"x\"]\nactions=[\"pull\"]\n",
    ] {
        guarded.replace("policy.toml", wrong);
        let config = format!("[access]\npolicy = {:?}\n", guarded.file("policy.toml"));
        let file = guarded.file("registry.toml");
        fs_err::write(&file, config).unwrap();
        let output = command(&["verify", file.to_str().unwrap()]).output().await.unwrap();
        assert_eq!(output.status.code(), Some(64), "{wrong:?} {output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.starts_with(guarded.file("policy.toml").to_str().unwrap()), "{told}");
    }
    remote.push("a", b"still allowed").await;
    let reply = remote.send(Method::POST, "/v2/b/blobs/uploads/", &[], "").await;
    reply.refused(403, "DENIED");
    // And one that is right again is taken.
    guarded.replace("policy.toml", &anonymous(&["b"], &["push"]));
    let allowed =
        async || remote.send(Method::POST, "/v2/b/blobs/uploads/", &[], "").await.status == 202;
    wait_until("the policy is in force", allowed).await;
}
