//! Tokens: our own token server, and those of others.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed step here is a failed test"
)]

use std::path::Path;

use http::Method;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use kybernate_registry::config::{Challenge, Config, IssuerSettings};
use kybernate_spec::Digest;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::access::{Guarded, basic, htpasswd, rule, with_users};
use crate::harness::{Remote, Reply, wait_until};

fn bearer(files: &Path) -> Config {
    let mut config = with_users(files);
    config.access.challenge = Challenge::Bearer;
    config
}

async fn ask(remote: &Remote, query: &str, authorization: &str) -> Reply {
    let headers = [("authorization", authorization)];
    let headers = if authorization.is_empty() { &[][..] } else { &headers[..] };
    remote.send(Method::GET, &format!("/token?{query}"), headers, "").await
}

fn token(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{reply:?}");
    format!("Bearer {}", reply.json()["token"].as_str().unwrap())
}

pub(crate) async fn status(
    remote: &Remote,
    method: Method,
    path: &str,
    authorization: &str,
) -> Reply {
    let headers = [("authorization", authorization)];
    let headers = if authorization.is_empty() { &[][..] } else { &headers[..] };
    remote.send(method, path, headers, "").await
}

#[tokio::test]
async fn a_client_follows_the_challenge_to_a_token() {
    let policy = rule(&["team/**"], &["user:alice"], &["pull", "push", "restore"])
        + &rule(&["open/*"], &["anonymous"], &["pull"]);
    let users = htpasswd(&[("alice", "right"), ("eve", "third")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, bearer).await;
    let remote = &guarded.registry.remote;
    let host = remote.url.clone();
    let path = format!("/v2/team/model/blobs/uploads/?digest={}", Digest::of(b""));
    let reply = status(remote, Method::POST, &path, "").await;
    reply.refused(401, "UNAUTHORIZED");
    assert_eq!(
        reply.header("www-authenticate"),
        format!(
            "Bearer realm=\"{host}/token\",service=\"kybernate-registry\",scope=\"repository:team/model:pull,push\""
        )
    );
    let mount = "/v2/team/model/blobs/uploads/?mount=sha256:aa&from=open/x";
    let reply = status(remote, Method::POST, mount, "").await;
    let challenge = reply.header("www-authenticate");
    assert!(challenge.ends_with("pull,push repository:open/x:pull\""), "{challenge}");

    let alice = basic("alice", "right");
    let query = "service=kybernate-registry&account=alice&scope=repository:team/model:pull,push";
    let reply = ask(remote, query, &alice).await;
    assert_eq!(reply.header("cache-control"), "no-store");
    assert_eq!(reply.json()["expires_in"], 300);
    let good = token(&reply);
    assert_eq!(status(remote, Method::POST, &path, &good).await.status, 201);
    let base = status(remote, Method::GET, "/v2/", &good).await;
    assert_eq!(base.status, 200);

    // It is good for nothing else, and the client is told what it lacks.
    let other = "/v2/team/other/tags/list";
    let reply = status(remote, Method::GET, other, &good).await;
    reply.refused(401, "UNAUTHORIZED");
    let challenge = reply.header("www-authenticate");
    let lack = "scope=\"repository:team/other:pull\",error=\"insufficient_scope\"";
    assert!(challenge.ends_with(lack), "{challenge}");
    // But for what alice may not do at all there is no token.
    let reply = status(remote, Method::GET, "/v2/secret/tags/list", &good).await;
    reply.refused(404, "NAME_UNKNOWN");
    let blob = format!("/v2/team/model/blobs/{}", Digest::of(b""));
    status(remote, Method::DELETE, &blob, &good).await.refused(403, "DENIED");

    // Passwords are good at the door too.
    assert_eq!(status(remote, Method::GET, &blob, &alice).await.status, 200);
    let eve = basic("eve", "third");
    let reply = ask(remote, "scope=repository:team/model:pull,push", &eve).await;
    let nothing = token(&reply);
    assert_eq!(reply.json()["scope"], "");
    assert_eq!(status(remote, Method::GET, &blob, &nothing).await.status, 404);
}

#[tokio::test]
async fn the_token_server_gives_no_more_than_the_policy() {
    let policy = rule(&["team/**"], &["user:alice"], &["pull", "push", "restore"])
        + &rule(&["open/*"], &["anonymous"], &["pull"]);
    let users = htpasswd(&[("alice", "right")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, bearer).await;
    let remote = guarded.registry.remote.clone();
    let alice = basic("alice", "right");
    let granted = async |query: &str, authorization: &str| {
        ask(&remote, query, authorization).await.json()["scope"].as_str().unwrap().to_owned()
    };
    let wide = "scope=repository:team/a:*&scope=repository:open/x:pull%20repository:no:pull";
    assert_eq!(granted(wide, &alice).await, "repository:team/a:pull,push repository:open/x:pull");
    let restore = "scope=repository:team/a:restore,delete";
    assert_eq!(granted(restore, &alice).await, "repository:team/a:restore");
    assert_eq!(granted("scope=repository:open/x:pull,push", "").await, "repository:open/x:pull");

    // Without credentials, for something closed: the client has to know that it lacks them.
    let reply = ask(&remote, "scope=repository:team/a:pull", "").await;
    reply.refused(401, "UNAUTHORIZED");
    assert!(reply.header("www-authenticate").starts_with("Basic "));
    let wrong = ask(&remote, "scope=repository:open/x:pull", &basic("alice", "wrong")).await;
    wrong.refused(401, "UNAUTHORIZED");
    ask(&remote, "scope=team", &alice).await.refused(400, "UNSUPPORTED");

    // The other form, as containerd and oras send it.
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let send = async |body: &'static str| remote.send(Method::POST, "/token", &form, body).await;
    let body = "grant_type=password&service=s&client_id=c&username=alice&password=right\
                &scope=repository%3Ateam%2Fa%3Apull";
    let reply = send(body).await;
    assert_eq!(reply.json()["scope"], "repository:team/a:pull");
    assert_eq!(reply.json()["access_token"], reply.json()["token"]);
    send("grant_type=password&username=alice&password=x").await.refused(401, "UNAUTHORIZED");
    send("grant_type=refresh_token&refresh_token=x").await.refused(400, "UNSUPPORTED");
    send("grant_type=password&username=alice").await.refused(400, "UNSUPPORTED");
    let long: &'static str = Box::leak("x=".repeat(20_000).into_boxed_str());
    send(long).await.refused(400, "UNSUPPORTED");

    // What the policy takes away is gone at once, whatever the token says; so is a user.
    let good = token(&ask(&remote, "scope=repository:team/a:push,pull", &alice).await);
    let path = "/v2/team/a/blobs/uploads/";
    assert_eq!(status(&remote, Method::POST, path, &good).await.status, 202);
    guarded.replace("policy.toml", &rule(&["team/**"], &["user:alice"], &["pull"]));
    let denied = async || status(&remote, Method::POST, path, &good).await.status == 403;
    wait_until("the policy is in force", denied).await;
    guarded.replace("htpasswd", &htpasswd(&[("bob", "x")]));
    let out = async || status(&remote, Method::GET, "/v2/", &good).await.status == 401;
    wait_until("alice is out", out).await;
}

#[tokio::test]
async fn a_catalog_needs_its_own_scope() {
    let policy = rule(&["team/**"], &["user:alice"], &["pull", "push"]);
    let users = htpasswd(&[("alice", "right")]);
    let files = [("policy.toml", &*policy), ("htpasswd", &users)];
    let guarded = Guarded::start(&files, bearer).await;
    let remote = &guarded.registry.remote;
    let alice = basic("alice", "right");
    let path = format!("/v2/team/a/blobs/uploads/?digest={}", Digest::of(b""));
    assert_eq!(status(remote, Method::POST, &path, &alice).await.status, 201);
    let pull = token(&ask(remote, "scope=repository:team/a:pull", &alice).await);
    let reply = status(remote, Method::GET, "/v2/_catalog", &pull).await;
    assert!(reply.header("www-authenticate").contains("scope=\"registry:catalog:*\""));
    // A token makes no other: that would have no end, and could be good for more.
    for scope in ["registry:catalog:*", "repository:team/a:pull"] {
        ask(remote, &format!("scope={scope}"), &pull).await.refused(403, "DENIED");
    }
    let list = token(&ask(remote, "scope=registry:catalog:*", &alice).await);
    let reply = status(remote, Method::GET, "/v2/_catalog", &list).await;
    assert_eq!(reply.json()["repositories"], json!(["team/a"]));
    status(remote, Method::GET, "/v2/team/a/tags/list", &list).await.refused(401, "UNAUTHORIZED");
}

/// Somebody else who makes tokens.
struct Issuer {
    key: EncodingKey,
    id: String,
}

impl Issuer {
    fn new(id: &str) -> Self {
        use aws_lc_rs::rand::SystemRandom;
        use aws_lc_rs::signature::Ed25519KeyPair;
        let made = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).unwrap();
        Self { key: EncodingKey::from_ed_der(made.as_ref()), id: id.to_owned() }
    }

    fn keys(&self) -> String {
        let mut jwk = Jwk::from_encoding_key(&self.key, Algorithm::EdDSA).unwrap();
        jwk.common.key_id = Some(self.id.clone());
        json!({ "keys": [jwk] }).to_string()
    }

    fn sign(&self, more: &Value) -> String {
        let mut claims =
            json!({ "iss": "https://ci", "aud": "registry", "exp": 4_000_000_000_u64 });
        let more = more.as_object().unwrap();
        claims.as_object_mut().unwrap().extend(more.clone());
        let mut header = Header::new(Algorithm::EdDSA);
        header.kid = Some(self.id.clone());
        format!("Bearer {}", jsonwebtoken::encode(&header, &claims, &self.key).unwrap())
    }
}

pub(crate) fn trusting(jwks: &str) -> impl Fn(&Path) -> Config {
    let jwks = jwks.to_owned();
    move |files| {
        let mut config = Config::default();
        config.access.policy = Some(files.join("policy.toml"));
        config.access.realm = Some("https://auth.example/token".to_owned());
        let jwks = if jwks.contains("://") {
            jwks.clone()
        } else {
            files.join(&jwks).display().to_string()
        };
        config.access.issuers = vec![IssuerSettings {
            name: "ci".to_owned(),
            issuer: "https://ci".to_owned(),
            audience: "registry".to_owned(),
            jwks,
            decides: true,
        }];
        config
    }
}

#[tokio::test]
async fn tokens_of_others_are_good_for_what_they_say_or_what_the_policy_says() {
    let issuer = Issuer::new("one");
    let policy = rule(&["prod/*"], &["claim:ci:groups=ops", "token:ci:repo:acme/*"], &["pull"]);
    let files = [("policy.toml", &*policy), ("keys.json", &issuer.keys())];
    let guarded = Guarded::start(&files, trusting("keys.json")).await;
    let remote = guarded.registry.remote.clone();
    let get =
        async |path: &str, token: &str| status(&remote, Method::GET, path, token).await.status;
    let access = json!([{ "type": "repository", "name": "a", "actions": ["pull", "push"] }]);
    let scoped = issuer.sign(&json!({ "sub": "x", "access": access }));
    let path = format!("/v2/a/blobs/uploads/?digest={}", Digest::of(b""));
    assert_eq!(status(&remote, Method::POST, &path, &scoped).await.status, 201);
    assert_eq!(get("/v2/a/tags/list", &scoped).await, 200);
    assert_eq!(get("/v2/prod/a/tags/list", &scoped).await, 401);
    for good in [json!({ "groups": ["dev", "ops"] }), json!({ "sub": "repo:acme/app" })] {
        // Missing, but to be seen.
        let good = issuer.sign(&good);
        assert_eq!(get("/v2/prod/a/tags/list", &good).await, 404);
        let path = "/v2/prod/a/blobs/uploads/";
        status(&remote, Method::POST, path, &good).await.refused(403, "DENIED");
    }
    let reply = remote.get("/v2/a/tags/list").await;
    assert_eq!(
        reply.header("www-authenticate"),
        "Bearer realm=\"https://auth.example/token\",service=\"kybernate-registry\",scope=\"repository:a:pull\""
    );
    for bad in [
        Issuer::new("one").sign(&json!({})),
        issuer.sign(&json!({ "exp": 1 })),
        issuer.sign(&json!({ "aud": "other" })),
        issuer.sign(&json!({ "iss": "https://evil" })),
    ] {
        let reply = status(&remote, Method::GET, "/v2/a/tags/list", &bad).await;
        reply.refused(401, "UNAUTHORIZED");
        assert!(reply.header("www-authenticate").contains("invalid_token"));
    }
    // New keys are taken, and the old ones forgotten with all that they proved.
    let next = Issuer::new("two");
    guarded.replace("keys.json", &next.keys());
    let taken = async || get("/v2/", &next.sign(&json!({}))).await == 200;
    wait_until("the new keys are in force", taken).await;
    assert_eq!(get("/v2/a/tags/list", &scoped).await, 401);
}

#[tokio::test]
async fn what_a_token_lists_only_limits_it_unless_its_issuer_decides() {
    let issuer = Issuer::new("one");
    let policy = rule(&["prod/*"], &["claim:ci:groups=ops"], &["pull", "push"]);
    let files = [("policy.toml", &*policy), ("keys.json", &issuer.keys())];
    let undecided = |files: &Path| {
        let mut config = trusting("keys.json")(files);
        config.access.issuers[0].decides = IssuerSettings::default().decides;
        config
    };
    let guarded = Guarded::start(&files, undecided).await;
    let remote = guarded.registry.remote.clone();
    let access = json!([
        { "type": "repository", "name": "a", "actions": ["pull", "push"] },
        { "type": "repository", "name": "prod/a", "actions": ["pull"] },
        { "type": "registry", "name": "catalog", "actions": ["*"] },
    ]);
    let listed = issuer.sign(&json!({ "groups": ["ops"], "access": access }));
    let push = async |repository: &str, token: &str| {
        let path = format!("/v2/{repository}/blobs/uploads/?digest={}", Digest::of(b""));
        status(&remote, Method::POST, &path, token).await.status
    };
    // No rule speaks of `a`, so nothing is allowed there, whoever says so.
    assert_eq!(push("a", &listed).await, 403);
    // What a rule allows, the token may be too little for.
    assert_eq!(push("prod/a", &listed).await, 401);
    assert_eq!(push("prod/a", &issuer.sign(&json!({ "groups": ["ops"] }))).await, 201);
    assert_eq!(push("b", &issuer.sign(&json!({ "groups": ["ops"] }))).await, 403);
    let pulled = status(&remote, Method::GET, "/v2/prod/a/tags/list", &listed).await;
    assert_eq!(pulled.status, 200);
    let catalog = status(&remote, Method::GET, "/v2/_catalog", &listed).await;
    assert_eq!(catalog.json()["repositories"], json!(["prod/a"]));
}

#[tokio::test]
async fn keys_are_fetched_from_where_they_are_published() {
    let issuer = Issuer::new("one");
    let keys = issuer.keys();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/keys", listener.local_addr().unwrap());
    let publish = async {
        loop {
            let (mut stream, _peer) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /keys "));
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", keys.len());
            stream.write_all((head + &keys).as_bytes()).await.unwrap();
        }
    };
    let policy = rule(&["**"], &["token:ci:*"], &["pull"]);
    let files = [("policy.toml", &*policy)];
    let test = async {
        let guarded = Guarded::start(&files, trusting(&url)).await;
        let remote = guarded.registry.remote.clone();
        let token = issuer.sign(&json!({ "sub": "x" }));
        let known = async || status(&remote, Method::GET, "/v2/", &token).await.status == 200;
        wait_until("the keys are known", known).await;
    };
    tokio::select! { () = publish => {} () = test => {} }
}
