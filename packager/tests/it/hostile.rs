//! Registries that misbehave, and registries that want credentials.

use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use kybernate_packager::store::StoreErrorKind;
use kybernate_spec::{Descriptor, Digest, Location, MANIFEST_BYTES_MAX, media_type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::artifact::Memory;
use crate::kyb::kyb;
use crate::registry::{Registry, open};

/// The empty index.
const INDEX: &str =
    r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#;

/// What stands for an attempt to speak TLS.
pub(crate) const TLS: &str = "tls handshake";

/// The head of a request: its first line and its headers, in lower case.
type Head = String;

/// Answers requests over one connection.
type Answer = Arc<dyn Fn(Head) -> Reply + Send + Sync>;

/// What is sent back: head and body, then perhaps an endless body.
pub(crate) struct Reply {
    pub(crate) text: String,
    pub(crate) endless: bool,
}

/// A server that says what a test wants it to say.
pub(crate) struct Scripted {
    pub(crate) address: String,
    requests: Arc<Mutex<Vec<Head>>>,
    // Aborted when dropped.
    _serving: JoinSet<()>,
}

impl Scripted {
    pub(crate) async fn start(
        answer: impl Fn(&str, &str) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (seen, here) = (Arc::clone(&requests), address.clone());
        let hellos = Arc::clone(&requests);
        let answer: Answer = Arc::new(move |head| {
            seen.lock().unwrap().push(head.clone());
            answer(&here, &head)
        });
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (hellos, answer) = (Arc::clone(&hellos), Arc::clone(&answer));
                connections.spawn(async move {
                    if is_tls(&stream).await {
                        // Hangs up, as servers do that see no letter.
                        hellos.lock().unwrap().push(TLS.to_owned());
                    } else {
                        serve(stream, answer).await;
                    }
                });
            }
        });
        Self { address, requests, _serving: serving }
    }

    pub(crate) fn at(&self, path: &str) -> Location {
        format!("{}/{path}", self.address).parse().unwrap()
    }

    pub(crate) fn asked(&self, what: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|head| head.contains(what)).count()
    }

    /// Returns the heads of all requests so far, in small letters, and forgets them.
    pub(crate) fn take_heads(&self) -> Vec<String> {
        let mut heads = std::mem::take(&mut *self.requests.lock().unwrap());
        heads.retain(|head| head != TLS);
        heads
    }
}

/// Whether the client begins with a TLS handshake.
async fn is_tls(stream: &TcpStream) -> bool {
    let mut first = [0];
    stream.peek(&mut first).await.is_ok() && first == [0x16]
}

fn serve(mut stream: TcpStream, answer: Answer) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let mut head = Vec::new();
        while let Ok(byte) = stream.read_u8().await {
            head.push(byte);
            if !head.ends_with(b"\r\n\r\n") {
                continue;
            }
            let reply =
                answer(String::from_utf8(std::mem::take(&mut head)).unwrap().to_lowercase());
            stream.write_all(reply.text.as_bytes()).await.unwrap();
            // Ends when the client has had enough.
            while reply.endless && stream.write_all(&[b' '; 4096]).await.is_ok() {}
        }
    })
}

pub(crate) fn reply(status: &str, headers: &str, body: &str) -> Reply {
    let length = body.len();
    let text = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
    Reply { text, endless: false }
}

#[tokio::test]
async fn an_endless_manifest_is_not_read_to_the_end() {
    let server = Scripted::start(|_, head| {
        if head.starts_with("get /v2/ ") {
            return reply("200 OK", "", "");
        }
        Reply { text: "HTTP/1.1 200 OK\r\n\r\n".to_owned(), endless: true }
    })
    .await;
    let location = server.at("a/b:v1");
    let error = open(&location).await.resolve(&location).await.unwrap_err();
    let is_limit =
        |kind| matches!(kind, StoreErrorKind::TooLarge { limit: MANIFEST_BYTES_MAX, .. });
    assert!(is_limit(error.kind));
}

#[tokio::test]
async fn a_manifest_with_another_digest_is_refused() {
    let server = Scripted::start(|_, _| reply("200 OK", "", INDEX)).await;
    let location = server.at("a/b:v1");
    let store = open(&location).await;
    let right = Digest::of(INDEX.as_bytes());
    assert_eq!(store.manifest(&right).await.unwrap().content, INDEX);
    let error = store.manifest(&Digest::of(b"other")).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::Mismatch(_)), "{error:?}");
}

#[tokio::test]
async fn a_busy_registry_is_asked_again() {
    let tries = Mutex::new(0);
    let server = Scripted::start(move |_, head| {
        let mut tries = tries.lock().unwrap();
        *tries += usize::from(head.contains("/manifests/"));
        if *tries == 1 || *tries == 2 {
            return reply("429 Too Many Requests", "", "");
        }
        reply("200 OK", "", INDEX)
    })
    .await;
    let location = server.at("a/b:v1");
    open(&location).await.resolve(&location).await.unwrap();
    assert_eq!(server.asked("/manifests/"), 3);
}

#[tokio::test]
async fn a_full_registry_is_told_apart() {
    let server = Scripted::start(|_, head| match head {
        _ if head.starts_with("post ") => {
            reply("202 Accepted", "Location: /v2/a/b/blobs/uploads/1\r\n", "")
        }
        _ if head.starts_with("put ") => reply("507 Insufficient Storage", "", ""),
        _ => reply("200 OK", "", ""),
    })
    .await;
    let store = open(&server.at("a/b")).await;
    let content = bytes::Bytes::from_static(&[0; 1000]);
    let blob = Descriptor::of(media_type::PAGES, &content);
    let error = store.put_blob(&blob, &Memory(content)).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::Full), "{error:?}");
    assert_eq!(server.asked("put /v2/a/b/blobs/uploads/1?digest=sha256"), 1);
}

#[tokio::test]
async fn a_refusal_is_not_asked_again() {
    let server = Scripted::start(|_, head| {
        if head.starts_with("get /v2/ ") {
            return reply("200 OK", "", "");
        }
        reply("403 Forbidden", "", r#"{"errors":[{"code":"DENIED","message":"no"}]}"#)
    })
    .await;
    let location = server.at("a/b:v1");
    let error = open(&location).await.resolve(&location).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::Denied(_)), "{error:?}");
    let told = kybernate_spec::chain(&error).to_string();
    assert!(told.contains("not allowed") && told.contains("the registry says \"no\""), "{told}");
    assert_eq!(server.asked("/manifests/"), 1);
}

#[tokio::test]
async fn a_list_of_referrers_is_read_page_by_page() {
    let entry = |number: u8| {
        let referrer = Descriptor::of(media_type::OCI_MANIFEST, &[number]);
        INDEX.replace("[]", &format!("[{}]", serde_json::to_string(&referrer).unwrap()))
    };
    let server = Scripted::start(move |_, head| {
        if head.contains("last=1") {
            return reply("200 OK", "", &entry(2));
        }
        let next = "Link: </v2/a/b/referrers/next?last=1>; rel=\"next\"\r\n";
        reply("200 OK", next, &entry(1))
    })
    .await;
    let store = open(&server.at("a/b")).await;
    let listed = store.referrers(&Digest::of(b"subject"), None).await.unwrap();
    let digests: Vec<Digest> = listed.into_iter().map(|entry| entry.digest).collect();
    assert_eq!(digests, [Digest::of(&[1]), Digest::of(&[2])]);
}

#[tokio::test]
async fn a_token_is_fetched_once_and_sent() {
    let server = Scripted::start(|here, head| {
        if head.starts_with("get /token") {
            // kyb:pass-word-1
            assert!(
                head.contains("authorization: basic a3liOnBhc3Mtd29yZC0x".to_lowercase().as_str())
            );
            return reply("200 OK", "", r#"{"token":"let-me-in"}"#);
        }
        if head.contains("authorization: bearer let-me-in") {
            return reply("200 OK", "", INDEX);
        }
        let wanted =
            format!("WWW-Authenticate: Bearer realm=\"http://{here}/token\",service=\"s\"\r\n");
        reply("401 Unauthorized", &wanted, "")
    })
    .await;
    let scratch = tempfile::tempdir().unwrap();
    log_in(scratch.path(), &server.address);
    let at = server.at("a/b:v1").to_string();
    // An index, though no checkpoint: it was read, so the token was right.
    kyb(scratch.path(), ["inspect", &at]).await.ended(1, "is no checkpoint");
    assert_eq!(server.asked("get /token"), 1);
}

#[tokio::test]
async fn credentials_come_from_dockers_configuration() {
    let Some(registry) = Registry::docker_with_password() else { return };
    let scratch = tempfile::tempdir().unwrap();
    crate::dump::dump(scratch.path(), 10);
    let at = registry.at("a/b:v1").to_string();
    let stranger = kyb(scratch.path(), ["pack", "dump", &at]).await;
    stranger.ended(1, "not authorised");
    log_in(scratch.path(), registry.address());
    assert_eq!(kyb(scratch.path(), ["pack", "dump", &at]).await.code, 0);
    assert_eq!(kyb(scratch.path(), ["copy", &at, "oci:layout"]).await.code, 0);
    assert_eq!(kyb(scratch.path(), ["inspect", &at]).await.code, 0);
}

/// Writes what `docker login` would write.
pub(crate) fn log_in(home: &std::path::Path, registry: &str) {
    fs_err::create_dir(home.join(".docker")).unwrap();
    let config = serde_json::json!({"auths": {registry: {"auth": "a3liOnBhc3Mtd29yZC0x"}}});
    fs_err::write(home.join(".docker/config.json"), config.to_string()).unwrap();
}
