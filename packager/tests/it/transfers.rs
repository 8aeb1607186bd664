//! Blobs over bad lines and from registries that answer wrongly.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kybernate_packager::store::{ConnectOptions, Store, StoreErrorKind};
use kybernate_spec::{Descriptor, Location, media_type};

use crate::artifact::{Memory, checkpoint, noise, put, read};
use crate::dump::dump;
use crate::hostile::{Reply, Scripted, log_in, reply};
use crate::kyb::{kyb, until};
use crate::proxy::Proxy;
use crate::registry::{Registry, open};
use crate::unpacking::is_running;

const MIB: u64 = 1 << 20;

/// Registries that tell how far an upload is: docker-registry 2.8 does not.
fn resuming() -> Vec<Registry> {
    [Registry::ours(), Registry::distribution()].into_iter().flatten().collect()
}

#[tokio::test]
async fn a_cut_upload_goes_on_where_the_registry_says() {
    for registry in resuming() {
        let content = noise(16 << 20, 1);
        let cuts = [4 * MIB, 5 * MIB, 3 * MIB];
        let proxy = Proxy::start(registry.address(), &cuts).await;
        let store = open(&proxy.at("a/b")).await;
        let blob = put(&store, media_type::PAGES, content.clone()).await;
        assert_eq!(proxy.cuts_left(), 0, "nothing was cut");
        let passed = proxy.passed();
        assert!(passed < 20 * MIB, "{passed} bytes passed: it was begun again");
        assert!(read(store.blob(&blob).await.unwrap()).await.unwrap() == content);
    }
}

#[tokio::test]
async fn a_killed_upload_is_gone_on_with_by_the_next_run() {
    for registry in resuming() {
        let scratch = tempfile::tempdir().unwrap();
        // One shard of 32 MiB.
        dump(scratch.path(), 32 << 8);
        let proxy = Proxy::stalling(registry.address(), 24 * MIB).await;
        let at = proxy.at("a/b:v1").to_string();
        {
            let mut first = std::pin::pin!(kyb(scratch.path(), ["pack", "dump", &at]));
            tokio::select! {
                done = &mut first => panic!("it got through: {done:?}"),
                () = proxy.stalled() => {}
            }
            // Dropped, and so killed.
        }
        let notes = scratch.path().join(".cache/kybernate/uploads");
        let [note] = &fs_err::read_dir(&notes).unwrap().collect::<Vec<_>>()[..] else {
            panic!("not one note")
        };
        let note = note.as_ref().unwrap().path();
        // A dying process has no command line any more and still its files.
        until("the killed one is gone and has let go", || {
            !is_running(&at) && fs_err::File::open(&note).unwrap().file().try_lock().is_ok()
        });
        proxy.heal();
        let before = proxy.passed();
        let mut again = kyb(scratch.path(), ["pack", "dump", &at]).await;
        assert_eq!(again.code, 0, "{again:?}");
        let passed = proxy.passed() - before;
        assert!(passed < 16 * MIB, "{passed} bytes passed: it was begun again");
        assert_eq!(fs_err::read_dir(&notes).unwrap().count(), 0, "a note is left");
        // No acknowledged blob is sent again.
        let before = proxy.passed();
        again = kyb(scratch.path(), ["pack", "dump", &at]).await;
        assert_eq!(again.code, 0, "{again:?}");
        assert!(proxy.passed() - before < MIB);
        assert!(!again.told.contains("uploads/") && !again.out.contains("uploads/"));
    }
}

#[tokio::test]
async fn a_note_of_an_upload_that_is_gone_does_no_harm() {
    for registry in Registry::all() {
        let scratch = tempfile::tempdir().unwrap();
        let location = registry.at("a/b");
        let options =
            ConnectOptions { notes: Some(scratch.path().to_owned()), ..ConnectOptions::default() };
        let store = Store::open(&location, &options).await.unwrap();
        let content = noise(9 << 20, 1);
        let blob = Descriptor::of(media_type::PAGES, &content);
        let name = kybernate_spec::Digest::of(format!("{location}@{}", blob.digest).as_bytes());
        let stale = format!("http://{}/v2/a/b/blobs/uploads/gone", registry.address());
        fs_err::write(scratch.path().join(name.hex()), stale).unwrap();
        store.put_blob(&blob, &Memory(content)).await.unwrap();
        assert!(store.has_blob(&blob).await.unwrap());
        assert_eq!(fs_err::read_dir(scratch.path()).unwrap().count(), 0);
    }
}

/// A server that answers requests for the blob so, and all others well.
async fn serving(answer: impl Fn(&str) -> Reply + Send + Sync + 'static) -> (Scripted, Store) {
    let server = Scripted::start(move |_, head| match head {
        _ if head.starts_with("get /v2/ ") => reply("200 OK", "", ""),
        _ => answer(head),
    })
    .await;
    let store = open(&server.at("a/b")).await;
    (server, store)
}

const CONTENT: &str = "what a blob holds, twenty-nine";

async fn pull(store: &Store) -> Result<Vec<u8>, StoreErrorKind> {
    let blob = Descriptor::of(media_type::PAGES, CONTENT.as_bytes());
    let stream = store.blob(&blob).await.map_err(|error| error.kind)?;
    read(stream).await.map_err(|error| error.kind)
}

#[tokio::test]
async fn a_blob_of_another_length_is_refused_at_once() {
    for content in [&CONTENT[..9], "more than what a blob holds, twenty-nine"] {
        let (server, store) = serving(|_| reply("200 OK", "", content)).await;
        let kind = pull(&store).await.unwrap_err();
        assert!(matches!(kind, StoreErrorKind::Mismatch(_)), "{kind:?}");
        assert_eq!(server.asked("/blobs/"), 1);
    }
}

#[tokio::test]
async fn other_bytes_of_the_same_length_are_refused() {
    let other = CONTENT.replace("twenty", "TWENTY");
    let (_server, store) = serving(move |_| reply("200 OK", "", &other)).await;
    let kind = pull(&store).await.unwrap_err();
    assert!(matches!(kind, StoreErrorKind::Mismatch(_)), "{kind:?}");
}

#[tokio::test]
async fn a_body_that_ends_early_is_gone_on_with() {
    // Without ranges the registry sends all of it again.
    for ranges in [true, false] {
        let asked = AtomicUsize::new(0);
        let (server, store) = serving(move |head| {
            let first = asked.fetch_add(1, Ordering::Relaxed) == 0;
            let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
            if first {
                let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
                let text = format!("{head}{}0\r\n\r\n", chunk(&CONTENT[..9]));
                return Reply { text, endless: false };
            }
            assert!(head.contains("range: bytes=9-29\r\n"), "{head}");
            if ranges {
                return reply(
                    "206 Partial Content",
                    "Content-Range: bytes 9-29/30\r\n",
                    &CONTENT[9..],
                );
            }
            reply("200 OK", "", CONTENT)
        })
        .await;
        assert_eq!(pull(&store).await.unwrap(), CONTENT.as_bytes());
        assert_eq!(server.asked("/blobs/"), 2);
    }
}

#[tokio::test]
async fn what_a_registry_has_no_more_in_the_middle_is_damaged() {
    let asked = AtomicUsize::new(0);
    let (_server, store) = serving(move |_| {
        if asked.fetch_add(1, Ordering::Relaxed) > 0 {
            return reply("404 Not Found", "", "");
        }
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let text = format!("{head}9\r\n{}\r\n0\r\n\r\n", &CONTENT[..9]);
        Reply { text, endless: false }
    })
    .await;
    let kind = pull(&store).await.unwrap_err();
    let StoreErrorKind::Mismatch(told) = &kind else { panic!("{kind:?}") };
    assert!(told.contains("at byte 9"), "{told}");
    // Where it was not there before, it is not found, and who may know why is told.
    let blob = Descriptor::of(media_type::PAGES, CONTENT.as_bytes());
    let Err(error) = store.blob(&blob).await else { panic!("it is there") };
    let told = error.to_string();
    assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error:?}");
    assert!(told.contains(blob.digest.hex()) && told.contains("registry's log"), "{told}");
}

#[tokio::test]
async fn another_part_than_asked_for_is_refused() {
    let blob = Descriptor::of(media_type::PAGES, CONTENT.as_bytes());
    for (status, range, mismatch) in [
        ("206 Partial Content", "bytes 0-4/30", false),
        ("206 Partial Content", "bytes 5-9/31", true),
        ("416 Range Not Satisfiable", "bytes */3", true),
        ("204 No Content", "bytes 5-9/30", false),
    ] {
        let header = format!("Content-Range: {range}\r\n");
        let (_server, store) = serving(move |_| reply(status, &header, "")).await;
        let error = store.blob_range(&blob, 5, 5).await.err().unwrap();
        let is_mismatch = matches!(error.kind, StoreErrorKind::Mismatch(_));
        assert_eq!(is_mismatch, mismatch, "{range}: {error:?}");
    }
}

#[tokio::test]
async fn a_registry_that_stumbles_is_asked_again_and_one_that_is_broken_is_given_up() {
    let asked = AtomicUsize::new(0);
    let (_server, store) = serving(move |_| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => reply("500 Internal Server Error", "", ""),
        1 => reply("502 Bad Gateway", "", "<html>"),
        _ => reply("200 OK", "", CONTENT),
    })
    .await;
    assert_eq!(pull(&store).await.unwrap(), CONTENT.as_bytes());
    let (server, store) = serving(|_| reply("500 Internal Server Error", "", "")).await;
    let kind = pull(&store).await.unwrap_err();
    assert!(matches!(kind, StoreErrorKind::Registry(_)), "{kind:?}");
    assert_eq!(server.asked("/blobs/"), 6);
}

#[tokio::test]
async fn a_busy_registry_says_when_to_ask_again() {
    let asked = AtomicUsize::new(0);
    let (_server, store) = serving(move |_| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => reply("429 Too Many Requests", "Retry-After: 2\r\n", ""),
        _ => reply("200 OK", "", CONTENT),
    })
    .await;
    let begun = Instant::now();
    assert_eq!(pull(&store).await.unwrap(), CONTENT.as_bytes());
    assert!(begun.elapsed() >= Duration::from_secs(2));

    let wait = "Retry-After: 86400\r\n";
    let (server, store) = serving(|_| reply("503 Service Unavailable", wait, "")).await;
    let kind = pull(&store).await.unwrap_err();
    assert!(kind.to_string().contains("86400 s"), "{kind:?}");
    assert_eq!(server.asked("/blobs/"), 1);
}

#[tokio::test]
async fn whoever_is_elsewhere_gets_no_credentials() {
    let seen: &'static Mutex<Vec<String>> = Box::leak(Box::default());
    let storage = Scripted::start(|_, head| {
        seen.lock().unwrap().push(head.to_owned());
        match head {
            _ if head.starts_with("get ") => reply("200 OK", "", CONTENT),
            _ => reply("201 Created", "", ""),
        }
    })
    .await;
    let elsewhere = storage.address.clone();
    let server = Scripted::start(move |_, head| {
        let location = format!("Location: http://{elsewhere}/store/here?signed=1\r\n");
        match head {
            _ if !head.contains("authorization: basic") => {
                reply("401 Unauthorized", "WWW-Authenticate: Basic realm=\"r\"\r\n", "")
            }
            _ if head.starts_with("head ") => reply("404 Not Found", "", ""),
            _ if head.starts_with("post ") => reply("202 Accepted", &location, ""),
            _ => reply("307 Temporary Redirect", &location, ""),
        }
    })
    .await;
    let scratch = tempfile::tempdir().unwrap();
    log_in(scratch.path(), &server.address);
    // A layout with one small blob goes up; then a document is asked for.
    let layout: Location = format!("oci:{}/layout:v1", scratch.path().display()).parse().unwrap();
    let store = open(&layout).await;
    let index = checkpoint(&store, &[Bytes::from_static(b"x")]).await;
    store.tag(&index, layout.tag().unwrap()).await.unwrap();
    let at = server.at("a/b:v1").to_string();
    let up = kyb(scratch.path(), ["copy", "oci:layout:v1", &at]).await;
    let down = kyb(scratch.path(), ["inspect", &at]).await;
    let seen = seen.lock().unwrap();
    assert!(seen.iter().any(|head| head.starts_with("put /store/here?signed=1&digest=")), "{up:?}");
    assert!(seen.iter().any(|head| head.starts_with("get /store/here?signed=1")), "{down:?}");
    for head in seen.iter() {
        assert!(!head.contains("authorization") && !head.contains("referer"), "{head}");
    }
    for ran in [up, down] {
        assert!(!ran.told.contains("pass-word-1") && !ran.told.contains("signed=1"), "{ran:?}");
    }
}

/// A list whose first page is elsewhere, and says that the second one is there too.
#[tokio::test]
async fn whoever_has_the_next_page_gets_no_credentials() {
    const PAGE: &str = r#"{"name":"a/b","tags":["v1"]}"#;
    let seen: &'static Mutex<Vec<String>> = Box::leak(Box::default());
    let elsewhere = Scripted::start(|_, head| {
        seen.lock().unwrap().push(head.to_owned());
        let next = "Link: </elsewhere?last=v1>; rel=\"next\"\r\n";
        reply("200 OK", if head.contains("last=v1") { "" } else { next }, PAGE)
    })
    .await;
    let address = elsewhere.address.clone();
    let server = Scripted::start(move |_, head| match head {
        _ if !head.contains("authorization: basic") => {
            reply("401 Unauthorized", "WWW-Authenticate: Basic realm=\"r\"\r\n", "")
        }
        _ => {
            let location = format!("Location: http://{address}/elsewhere\r\n");
            reply("307 Temporary Redirect", &location, "")
        }
    })
    .await;
    let scratch = tempfile::tempdir().unwrap();
    log_in(scratch.path(), &server.address);
    kyb(scratch.path(), ["ls", &server.at("a/b").to_string()]).await;
    let seen = seen.lock().unwrap();
    assert!(seen.iter().any(|head| head.starts_with("get /elsewhere?last=v1")), "{seen:?}");
    assert!(!seen.iter().any(|head| head.contains("authorization")), "{seen:?}");
}

#[tokio::test]
async fn a_registry_that_stumbles_at_first_is_greeted_again() {
    let asked = AtomicUsize::new(0);
    let server = Scripted::start(move |here, head| match head {
        _ if head.contains("authorization: bearer let-me-in") => reply("200 OK", "", CONTENT),
        _ if head.starts_with("get /token") => reply("200 OK", "", r#"{"token":"let-me-in"}"#),
        _ if asked.fetch_add(1, Ordering::Relaxed) == 0 => reply("503 Service Unavailable", "", ""),
        _ => {
            let realm = format!("WWW-Authenticate: Bearer realm=\"http://{here}/token\"\r\n");
            reply("401 Unauthorized", &realm, "")
        }
    })
    .await;
    assert_eq!(pull(&open(&server.at("a/b")).await).await.unwrap(), CONTENT.as_bytes());
}

#[tokio::test]
async fn a_registry_that_wants_a_token_later_gets_one() {
    let server = Scripted::start(|here, head| match head {
        _ if head.starts_with("get /v2/ ") => reply("200 OK", "", ""),
        _ if head.contains("authorization: bearer let-me-in") => reply("200 OK", "", "{}"),
        _ if head.starts_with("get /token") => reply("200 OK", "", r#"{"token":"let-me-in"}"#),
        _ => {
            let realm = format!("WWW-Authenticate: Bearer realm=\"http://{here}/token\"\r\n");
            reply("401 Unauthorized", &realm, "")
        }
    })
    .await;
    let location = server.at("a/b:v1");
    open(&location).await.resolve(&location).await.unwrap();
    assert_eq!((server.asked("get /token"), server.asked("/manifests/")), (1, 2));
}

#[tokio::test]
async fn a_removal_whose_reply_was_lost_is_done() {
    let asked = AtomicUsize::new(0);
    let (_server, store) = serving(move |_| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => reply("504 Gateway Timeout", "", ""),
        _ => reply("404 Not Found", "", ""),
    })
    .await;
    let tag = "v1".parse().unwrap();
    store.delete_tag(&tag).await.unwrap();
    let error = store.delete_tag(&tag).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error:?}");
}

#[tokio::test]
async fn a_truncated_signature_is_a_refusal() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 10);
    assert_eq!(kyb(scratch.path(), ["keygen", "ours"]).await.code, 0);
    let at = registry.at("a/b:v1").to_string();
    let packed = kyb(scratch.path(), ["pack", "dump", &at, "--sign-key", "ours.key"]).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let mut left = vec![registry.data()];
    let mut truncated = false;
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs_err::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if let Ok(text) = fs_err::read_to_string(&path)
            && text.contains("dsseEnvelope")
        {
            fs_err::write(&path, &text[..text.len() / 2]).unwrap();
            truncated = true;
        }
    }
    assert!(truncated, "there is no bundle");
    let ran = kyb(scratch.path(), ["verify", &at, "--key", "ours.pub"]).await;
    ran.ended(2, "bytes instead of");
}

/// zot says so when its disk is full.
#[tokio::test]
async fn a_registrys_word_on_a_digest_is_no_refusal_of_ours() {
    const WRONG: &str = r#"{"errors":[{"code":"DIGEST_INVALID","message":"not the digest"}]}"#;
    let server = Scripted::start(move |_, head| match head {
        _ if head.starts_with("get /v2/ ") => reply("200 OK", "", ""),
        _ if head.starts_with("post ") => {
            reply("202 Accepted", "Location: /v2/a/b/blobs/uploads/1\r\n", "")
        }
        _ if head.starts_with("put ") => reply("400 Bad Request", "Connection: close\r\n", WRONG),
        _ => reply("404 Not Found", "", ""),
    })
    .await;
    let scratch = tempfile::tempdir().unwrap();
    let layout: Location = format!("oci:{}/layout:v1", scratch.path().display()).parse().unwrap();
    let store = open(&layout).await;
    let index = checkpoint(&store, &[Bytes::from_static(b"x")]).await;
    store.tag(&index, layout.tag().unwrap()).await.unwrap();
    let at = server.at("a/b:v1").to_string();
    let ran = kyb(scratch.path(), ["copy", "oci:layout:v1", &at]).await;
    ran.ended(1, "the registry says that the digest is wrong");
    assert!(ran.told.contains("\"not the digest\""), "{ran:?}");
}

/// A registry that does not link the blob begins an upload of it, as the specification wants.
#[tokio::test]
async fn an_upload_begun_in_place_of_a_link_is_gone_on_with() {
    // The second registry has forgotten that upload by then.
    for forgets in [false, true] {
        let (server, store) = serving(move |head| {
            let upload = |name| format!("Location: /v2/a/b/blobs/uploads/{name}\r\n");
            match head {
                _ if head.starts_with("post ") && head.contains("mount=") => {
                    reply("202 Accepted", &upload("instead"), "")
                }
                _ if head.starts_with("post ") => reply("202 Accepted", &upload("anew"), ""),
                _ if head.starts_with("put /v2/a/b/blobs/uploads/instead") && forgets => {
                    reply("404 Not Found", "Connection: close\r\n", "")
                }
                _ if head.starts_with("put ") => reply("201 Created", "Connection: close\r\n", ""),
                _ => reply("404 Not Found", "", ""),
            }
        })
        .await;
        let content = Bytes::from_static(CONTENT.as_bytes());
        let blob = Descriptor::of(media_type::PAGES, &content);
        assert!(!store.mount_blob(&blob, &"a/c".parse().unwrap()).await.unwrap());
        store.put_blob(&blob, &Memory(content)).await.unwrap();
        let ended = |name: &str| server.asked(&format!("put /v2/a/b/blobs/uploads/{name}?digest="));
        assert_eq!((ended("instead"), ended("anew")), (1, usize::from(forgets)));
        assert_eq!(server.asked("post "), 1 + usize::from(forgets));
    }
}
