//! Users and passwords.

use http::Method;
use kybernate_spec::Digest;

use crate::access::{Guarded, basic, htpasswd, probe, rule, with_policy, with_users};
use crate::harness::{TestRegistry, wait_until};
use crate::process::Process;

#[tokio::test]
async fn users_may_what_the_policy_says() {
    let policy = rule(&["team/**"], &["user:alice"], &["pull", "push"])
        + &rule(&["team/**"], &["user:bob"], &["pull"])
        + &rule(&["open/*"], &["anonymous"], &["pull"]);
    let users = htpasswd(&[("alice", "right"), ("bob", "also"), ("eve", "third")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, with_users).await;
    let remote = &guarded.registry.remote;
    let status = async |method: Method, path: &str, authorization: &str| {
        let headers = [("authorization", authorization)];
        let headers = if authorization.is_empty() { &[][..] } else { &headers[..] };
        remote.send(method, path, headers, "").await.status
    };
    let (alice, bob, eve) = (basic("alice", "right"), basic("bob", "also"), basic("eve", "third"));
    let uploads = "/v2/team/model/blobs/uploads/?digest=";
    let digest = Digest::of(b"");
    let push = format!("{uploads}{digest}");
    let pull = format!("/v2/team/model/blobs/{digest}");
    assert_eq!(status(Method::POST, &push, "").await, 401);
    assert_eq!(status(Method::POST, &push, &bob).await, 403);
    assert_eq!(status(Method::POST, &push, &eve).await, 403);
    assert_eq!(status(Method::POST, &push, &alice).await, 201);
    assert_eq!(status(Method::GET, &pull, "").await, 401);
    assert_eq!(status(Method::GET, &pull, &bob).await, 200);
    assert_eq!(status(Method::GET, &pull, &eve).await, 404);
    assert_eq!(status(Method::DELETE, &pull, &bob).await, 403);
    assert_eq!(status(Method::DELETE, &pull, &eve).await, 404);
    // Who one is, is asked at the door; and wrong is wrong, also where none would be needed.
    assert_eq!(status(Method::GET, "/v2/", "").await, 401);
    assert_eq!(status(Method::GET, "/v2/", &eve).await, 200);
    for wrong in [
        &*basic("alice", "wrong"),
        &basic("nobody", "right"),
        "Basic ?",
        "Digest x",
        "Bearer x.y.z",
    ] {
        for path in ["/v2/", "/v2/open/a/tags/list", "/v2/_catalog", &pull] {
            assert_eq!(status(Method::GET, path, wrong).await, 401, "{path} {wrong}");
        }
    }
    assert_eq!(status(Method::GET, "/v2/open/a/tags/list", "").await, 404);
    assert_eq!(status(Method::GET, "/v2/open/a/tags/list", "Basic Og==").await, 404);
    assert_eq!(status(Method::GET, "/livez", "Basic ?").await, 200);
    let reply = remote.get("/v2/team/model/tags/list").await;
    reply.refused(401, "UNAUTHORIZED");
    let challenge = reply.header("www-authenticate");
    assert_eq!(challenge, "Basic realm=\"kybernate-registry\", charset=\"UTF-8\"");

    // To eve, who may see nothing, what is there looks as what is not.
    let headers = [("authorization", &*eve)];
    let there = probe(remote, "team/model", &digest.to_string(), &headers).await;
    let missing = probe(remote, "team/nomod", &digest.to_string(), &headers).await;
    assert_eq!(there, missing);
}

#[tokio::test]
async fn users_without_a_policy_may_do_everything_and_nobody_else() {
    let users = htpasswd(&[("alice", "right")]);
    let configure = |files: &std::path::Path| {
        let mut config = with_users(files);
        config.access.policy = None;
        config
    };
    let guarded = Guarded::start(&[("htpasswd", &*users)], configure).await;
    let remote = &guarded.registry.remote;
    remote.get("/v2/a/tags/list").await.refused(401, "UNAUTHORIZED");
    remote.get("/v2/_catalog").await.refused(401, "UNAUTHORIZED");
    let headers = [("authorization", &*basic("alice", "right"))];
    let path = "/v2/a/blobs/uploads/";
    assert_eq!(remote.send(Method::POST, path, &headers, "").await.status, 202);
    assert_eq!(remote.send(Method::GET, "/v2/_catalog", &headers, "").await.status, 200);
}

#[tokio::test]
async fn who_tries_many_passwords_is_told_to_come_again() {
    let policy = rule(&["**"], &["authenticated"], &["pull"]);
    let users = htpasswd(&[("alice", "right"), ("bob", "right")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, with_users).await;
    let remote = guarded.registry.remote.clone();
    let ask = async |path: &str, user: &str, password: &str| {
        remote.send(Method::GET, path, &[("authorization", &*basic(user, password))], "").await
    };
    assert_eq!(ask("/v2/", "bob", "right").await.status, 200);
    let guesses = (0..200).map(|guess| (["/v2/", "/token"][guess % 2], guess.to_string()));
    let answers = guesses.map(|(path, guess)| async move { ask(path, "alice", &guess).await });
    let mut refused = None;
    for answer in answers {
        let answer = answer.await;
        if answer.status != 401 {
            refused = Some(answer);
            break;
        }
    }
    let refused = refused.unwrap();
    refused.refused(429, "TOOMANYREQUESTS");
    assert!(refused.header("retry-after").parse::<u64>().unwrap() > 0);
    assert_eq!(ask("/v2/", "bob", "right").await.status, 200, "who is known is not affected");
}

#[tokio::test]
async fn a_changed_file_forgets_who_was_let_in() {
    let policy = rule(&["**"], &["authenticated"], &["pull"]);
    let first = htpasswd(&[("alice", "old"), ("bob", "same")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &first)];
    let guarded = Guarded::start(&files, with_users).await;
    let remote = guarded.registry.remote.clone();
    let ask = async |user: &str, password: &str| {
        let headers = [("authorization", &*basic(user, password))];
        let mut status = 429;
        wait_until("it may be tried again", async || {
            status = remote.send(Method::GET, "/v2/", &headers, "").await.status;
            status != 429
        })
        .await;
        status
    };
    assert_eq!((ask("alice", "old").await, ask("bob", "same").await), (200, 200));
    guarded.replace("htpasswd", &htpasswd(&[("alice", "new"), ("bob", "same")]));
    wait_until("the new password is right", async || ask("alice", "new").await == 200).await;
    assert_eq!((ask("alice", "old").await, ask("bob", "same").await), (401, 200));
    guarded.replace("htpasswd", "alice:plain\n");
    guarded.replace("htpasswd", &htpasswd(&[("bob", "same")]));
    wait_until("alice is out", async || ask("alice", "new").await == 401).await;
    assert_eq!(ask("bob", "same").await, 200);
}

/// A push whose password is taken away half-way goes on: its id is enough, for its life.
#[tokio::test]
async fn an_upload_that_was_begun_may_be_ended_without_credentials() {
    let policy = rule(&["**"], &["user:alice"], &["pull", "push"]);
    let users = htpasswd(&[("alice", "right")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, with_users).await;
    let remote = &guarded.registry.remote;
    let alice = basic("alice", "right");
    let headers = [("authorization", &*alice)];
    let begun = remote.send(Method::POST, "/v2/a/blobs/uploads/", &headers, "").await;
    let upload = begun.header("location").to_owned();
    assert_eq!(remote.patch(&upload, 0, b"bytes").await.status, 202);
    let wrong = [("authorization", "Bearer expired.by.now")];
    assert_eq!(remote.send(Method::GET, &upload, &wrong, "").await.status, 204);
    // Another repository's name with the same id is no way in.
    let elsewhere = upload.replace("/a/", "/b/");
    assert_eq!(remote.get(&elsewhere).await.status, 401);
    assert_eq!(remote.put(&upload, &Digest::of(b"bytes"), "").await.status, 201);
    // What has ended is no secret any more, and tells nothing about the blob.
    assert_eq!(remote.put(&upload, &Digest::of(b"bytes"), "").await.status, 401);
}

#[tokio::test]
async fn nothing_secret_is_logged() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("htpasswd");
    let users = htpasswd(&[("alice", "hush-hush")]);
    fs_err::write(&file, &users).unwrap();
    let store = root.path().join("store");
    let options = ["--access-htpasswd", file.to_str().unwrap(), "--log", "trace"];
    let process = Process::start(&store, &options).await;
    let remote = process.remote.clone();
    let (right, wrong) = (basic("alice", "hush-hush"), basic("alice", "hush-wrong"));
    let token = "Bearer hush.token.hush";
    for authorization in [&*right, &wrong, token, "Basic hush"] {
        let headers = [("authorization", authorization)];
        remote.send(Method::GET, "/token?scope=repository:a:pull", &headers, "").await;
        remote.send(Method::GET, "/v2/", &headers, "").await;
    }
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let body = "grant_type=password&username=alice&password=hush-hush&scope=repository:a:pull";
    let reply = remote.send(Method::POST, "/token", &form, body).await;
    let issued = reply.json()["token"].as_str().unwrap().to_owned();
    fs_err::write(&file, "alice:hush-plain\n").unwrap();
    let bearer = format!("Bearer {issued}");
    let headers = [("authorization", &*bearer)];
    assert_eq!(remote.send(Method::GET, "/v2/", &headers, "").await.status, 200);
    drop(remote);
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    assert!(log.contains("credentials are not accepted"), "{log}");
    let encoded = right.strip_prefix("Basic ").unwrap();
    let hash = users.trim_end().rsplit_once('$').unwrap().1;
    let signature = issued.rsplit_once('.').unwrap().1;
    for secret in ["hush", encoded, hash, signature] {
        let line = log.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "{secret}");
    }
}

#[tokio::test]
async fn nothing_is_asked_where_nothing_is_configured() {
    for guarded in [
        TestRegistry::start().await,
        Guarded::start(&[("policy.toml", &rule(&["a"], &["anonymous"], &["pull"]))], with_policy)
            .await
            .registry,
    ] {
        let reply = guarded.get("/v2/").await;
        assert_eq!((reply.status, reply.headers.get("www-authenticate")), (200, None));
        guarded.get("/token?scope=repository:a:pull").await.refused(404, "UNSUPPORTED");
        guarded.get("/token/keys").await.refused(404, "UNSUPPORTED");
    }
}
