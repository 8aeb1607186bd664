//! Byte quotas.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::path::Path;

use futures::SinkExt as _;
use http::Method;
use kybernate_registry::config::Config;
use kybernate_spec::{Digest, media_type};
use reqwest::Body;

use crate::harness::{Reply, TestRegistry, image, noise, wait_until};

const MIB: usize = 1 << 20;
const RULES: &str = r#"
[[quota.rule]]
repositories = ["free/**"]
bytes = "1TiB"
[[quota.rule]]
repositories = ["**"]
bytes = "4MiB"
"#;

async fn post(registry: &TestRegistry, name: &str, content: Vec<u8>) -> Reply {
    let path = format!("/v2/{name}/blobs/uploads/?digest={}", Digest::of(&content));
    registry.send(Method::POST, &path, &[], content).await
}

/// A body whose length is not announced.
fn streamed(content: Vec<u8>) -> Body {
    let chunks: Vec<_> =
        content.chunks(64 << 10).map(<[u8]>::to_vec).map(Ok::<_, std::io::Error>).collect();
    Body::wrap_stream(futures::stream::iter(chunks))
}

/// Returns how many bytes lie in unfinished uploads.
fn received(registry: &TestRegistry) -> u64 {
    let files = std::fs::read_dir(registry.path("uploads")).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[tokio::test]
async fn a_repository_holds_as_much_as_it_may_and_no_more() {
    let registry = TestRegistry::start_set(RULES).await;
    for indexed in [false, true] {
        if indexed {
            wait_until("the index answers", async || registry.is_indexed()).await;
        }
        let name = format!("r/{indexed}");
        assert_eq!(post(&registry, &name, noise(3 * MIB, 1)).await.status, 201);
        let refused = post(&registry, &name, noise(MIB + 1, 2)).await;
        refused.refused(403, "DENIED");
        let told = refused.json().to_string();
        assert!(told.contains("3145728 of the 4194304 bytes"), "{told}");
        assert_eq!(received(&registry), 0, "not a byte was taken");
        assert_eq!(post(&registry, &name, noise(3 * MIB, 1)).await.status, 201, "it is there");
        assert_eq!(post(&registry, &name, noise(MIB, 3)).await.status, 201, "exactly all");
        registry.put_manifest(&name, "t", "x/y", "one byte more").await.refused(403, "DENIED");

        // What is deleted is free again, at once.
        let path = format!("/v2/{name}/blobs/{}", Digest::of(&noise(3 * MIB, 1)));
        assert_eq!(registry.delete(&path).await.status, 202);
        assert_eq!(post(&registry, &name, noise(2 * MIB, 4)).await.status, 201);
        assert_eq!(registry.put_manifest(&name, "t", "x/y", "small").await.status, 201);
    }
    assert_eq!(post(&registry, "free/r", noise(5 * MIB, 5)).await.status, 201);
}

#[tokio::test]
async fn a_body_of_unknown_length_is_cut_where_the_quota_ends() {
    let registry = TestRegistry::start_set(RULES).await;
    let upload = registry.begin("r").await;
    let content = noise(3 * MIB, 1);
    let reply = registry.send(Method::PATCH, &upload, &[], streamed(content.clone())).await;
    assert_eq!(reply.status, 202, "{reply:?}");
    let more = registry.send(Method::PATCH, &upload, &[], streamed(noise(2 * MIB, 2))).await;
    more.refused(403, "DENIED");
    let status = registry.get(&upload).await;
    assert_eq!(status.header("range"), "0-3145727", "what was too much is forgotten");
    let digest = Digest::of(&content);
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    let upload = registry.begin("r").await;
    let content = noise(2 * MIB, 3);
    let reply = registry.put(&upload, &Digest::of(&content), streamed(content.clone())).await;
    reply.refused(403, "DENIED");
    wait_until("nothing is left behind", async || received(&registry) == 0).await;
}

/// What is there takes no room when it is sent again; but it may be deleted while it is sent, and its
/// room be given to another.
#[tokio::test]
async fn what_is_deleted_while_it_is_sent_again_takes_room() {
    let registry = TestRegistry::start_set(RULES).await;
    let content = noise(3 * MIB, 1);
    let digest = registry.push("r", &content).await;
    let (mut give, given) = futures::channel::mpsc::channel::<std::io::Result<Vec<u8>>>(0);
    let path = format!("/v2/r/blobs/uploads/?digest={digest}");
    let length = content.len().to_string();
    let headers = [("content-length", &*length)];
    let again = registry.send(Method::POST, &path, &headers, Body::wrap_stream(given));
    let others = async {
        give.send(Ok(content[..2 * MIB].to_vec())).await.unwrap();
        wait_until("some of it is there", async || received(&registry) > 0).await;
        let blob = format!("/v2/r/blobs/{digest}");
        assert_eq!(registry.delete(&blob).await.status, 202);
        assert_eq!(post(&registry, "r", noise(3 * MIB, 2)).await.status, 201);
        give.send(Ok(content[2 * MIB..].to_vec())).await.unwrap();
        drop(give);
    };
    let (reply, ()) = futures::future::join(again, others).await;
    reply.refused(403, "DENIED");
    assert_eq!(registry.head_blob("r", &digest).await, 404);
    assert_eq!(registry.head_blob("r", &Digest::of(&noise(3 * MIB, 2))).await, 200);
    wait_until("nothing is left behind", async || received(&registry) == 0).await;
}

/// What is there takes no room when it comes again, and is deleted by another at the same moment:
/// whichever way they meet, no more is there than may be. With events, which are told in order.
#[tokio::test]
async fn what_is_deleted_while_it_comes_again_takes_room() {
    let sink = "[[notify.endpoint]]\nname = \"a\"\nurl = \"http://127.0.0.1:9/\"\n";
    let registry = TestRegistry::start_set(&format!("{RULES}\n{sink}")).await;
    let contents: Vec<_> = (0..6).map(|seed| noise(1_300_000, seed)).collect();
    for content in &contents {
        registry.push("free/a", content).await;
    }
    for _ in 0..15 {
        let each = contents.iter().map(|content| async {
            let digest = Digest::of(content);
            let manifest = format!("/v2/m/manifests/{digest}");
            let mount = format!("/v2/b/blobs/uploads/?mount={digest}&from=free/a");
            let reference = digest.to_string();
            let put = || registry.put_manifest("m", &reference, "x/y", content.clone());
            let mounted = || registry.send(Method::POST, &mount, &[], "");
            let blob = format!("/v2/b/blobs/{digest}");
            let manifests = async { tokio::join!(put(), registry.delete(&manifest), put()) };
            let blobs = async { tokio::join!(mounted(), registry.delete(&blob), mounted()) };
            futures::future::join(manifests, blobs).await;
        });
        futures::future::join_all(each).await;
        for place in ["m/manifests", "b/blobs"] {
            let mut there = 0;
            for content in &contents {
                let path = format!("/v2/{place}/{}", Digest::of(content));
                there += usize::from(registry.head(&path).await.status == 200);
            }
            assert!(there <= 3, "{there} of {place}, of which three fit");
        }
    }
}

#[tokio::test]
async fn a_mount_counts_where_it_goes() {
    let registry = TestRegistry::start_set(RULES).await;
    let content = noise(3 * MIB, 1);
    let digest = registry.push("free/a", &content).await;
    registry.push("r", &noise(2 * MIB, 2)).await;
    let mount = format!("/v2/r/blobs/uploads/?mount={digest}&from=free/a");
    registry.send(Method::POST, &mount, &[], "").await.refused(403, "DENIED");
    let mount = format!("/v2/s/blobs/uploads/?mount={digest}&from=free/a");
    assert_eq!(registry.send(Method::POST, &mount, &[], "").await.status, 201);
    assert_eq!(registry.send(Method::POST, &mount, &[], "").await.status, 201, "it is there");
    assert_eq!(post(&registry, "s", noise(MIB, 3)).await.status, 201, "it counts once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_do_not_pass_it_together() {
    let registry = TestRegistry::start_set(RULES).await;
    let pushes = (0..16u64).map(|n| post(&registry, "r", noise(MIB, 100 + n)));
    let answers = futures::future::join_all(pushes).await;
    let stored = answers.iter().filter(|reply| reply.status == 201).count();
    // A push that is just being committed counts as under way and as stored, so that all of them
    // never pass the limit; another one may be refused over that.
    assert!((1..=4).contains(&stored), "{answers:?}");
    for reply in answers.iter().filter(|reply| reply.status != 201) {
        reply.refused(403, "DENIED");
    }
    // What was refused holds nothing.
    for more in stored..4 {
        let seed = 200 + u64::try_from(more).unwrap();
        assert_eq!(post(&registry, "r", noise(MIB, seed)).await.status, 201);
    }
    post(&registry, "r", noise(MIB, 300)).await.refused(403, "DENIED");
}

#[tokio::test]
async fn a_manifest_counts_once_however_many_tags_it_has() {
    let registry =
        TestRegistry::start_set("[[quota.rule]]\nrepositories = ['r']\nbytes = 1000\n").await;
    registry.push("r", b"{}").await;
    registry.push("r", b"layer").await;
    for tag in ["a", "b", "c", "d"] {
        let reply =
            registry.put_manifest("r", tag, media_type::OCI_MANIFEST, image(b"layer", None));
        assert_eq!(reply.await.status, 201);
    }
    registry.put_manifest("r", "e", "x/y", noise(700, 1)).await.refused(403, "DENIED");
}

#[tokio::test]
async fn a_blob_that_is_there_takes_no_room_and_more_than_it_does() {
    let registry = TestRegistry::start_set(RULES).await;
    let content = noise(3 * MIB, 1);
    let digest = registry.push("r", &content).await;
    assert_eq!(post(&registry, "r", content).await.status, 201, "the same once more");
    let path = format!("/v2/r/blobs/uploads/?digest={digest}");
    let longer = noise(20 * MIB, 2);
    let refused = registry.send(Method::POST, &path, &[], longer.clone()).await;
    refused.refused(403, "DENIED");
    registry.send(Method::POST, &path, &[], streamed(longer)).await.refused(403, "DENIED");
    assert_eq!(received(&registry), 0);
}

/// What lies in begun uploads, the ones that a client went away from too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_uploads_have_received_counts_until_they_end() {
    let registry = TestRegistry::start_set(RULES).await;
    let mut begun = Vec::new();
    for _ in 0..16 {
        begun.push(registry.begin("r").await);
    }
    let patches = begun.iter().zip(0..).map(|(upload, seed)| {
        let (registry, chunk) = (&registry, noise(MIB, 200 + seed));
        async move { (registry.patch(upload, 0, &chunk).await, upload, Digest::of(&chunk)) }
    });
    let answers = futures::future::join_all(patches).await;
    let (taken, refused): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|(reply, ..)| reply.status == 202);
    assert_eq!(taken.len(), 4, "{taken:?}");
    for (reply, ..) in &refused {
        reply.refused(403, "DENIED");
    }
    assert_eq!(received(&registry), 4 << 20, "no more lies on the disk than may be shown");
    post(&registry, "r", noise(1, 1)).await.refused(403, "DENIED");
    assert_eq!(post(&registry, "s", noise(MIB, 1)).await.status, 201, "others have their own");

    // What is given up is free, and so is what was committed twice.
    let (mut taken, digest) = (taken.into_iter(), Digest::of(&noise(MIB, 2)));
    let (_, upload, _) = taken.next().unwrap();
    assert_eq!(registry.delete(upload).await.status, 204);
    assert_eq!(post(&registry, "r", noise(MIB, 2)).await.status, 201);
    for (_, upload, digest) in taken {
        assert_eq!(registry.put(upload, &digest, "").await.status, 201);
    }
    let path = format!("/v2/r/blobs/{digest}");
    assert_eq!(registry.delete(&path).await.status, 202);
    assert_eq!(post(&registry, "r", noise(MIB, 3)).await.status, 201, "nothing is counted twice");
    assert_eq!(received(&registry), 0);
}

#[tokio::test]
async fn uploads_count_after_a_restart_too() {
    let registry = TestRegistry::start_set(RULES).await;
    let upload = registry.begin("r").await;
    let content = noise(3 * MIB, 1);
    assert_eq!(registry.patch(&upload, 0, &content).await.status, 202);
    let config = Config::read(Path::new("test.toml"), RULES).unwrap();
    let registry = TestRegistry::start_with(&config, registry.stop().await).await;
    post(&registry, "r", noise(MIB + 1, 2)).await.refused(403, "DENIED");
    assert_eq!(post(&registry, "r", noise(MIB / 2, 2)).await.status, 201);
    // It counts once, also when it goes on.
    let more = noise(MIB / 2, 3);
    let reply = registry.patch(&upload, content.len(), &more).await;
    assert_eq!(reply.status, 202, "{reply:?}");
    registry.patch(&upload, content.len() + more.len(), b"x").await.refused(403, "DENIED");
    let digest = Digest::of(&[content, more].concat());
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    post(&registry, "r", b"x".to_vec()).await.refused(403, "DENIED");

    // One that is given up without being gone on with is free as well.
    let upload = registry.begin("s").await;
    assert_eq!(registry.patch(&upload, 0, &noise(4 * MIB, 4)).await.status, 202);
    let registry = TestRegistry::start_with(&config, registry.stop().await).await;
    post(&registry, "s", noise(1, 5)).await.refused(403, "DENIED");
    assert_eq!(registry.delete(&upload).await.status, 204);
    assert_eq!(post(&registry, "s", noise(4 * MIB, 5)).await.status, 201);
}

#[tokio::test]
async fn an_upload_that_was_left_alone_makes_room() {
    let rules = format!("[quota]\nupload_idle = \"1s\"\n{RULES}");
    let config = Config::read(Path::new("test.toml"), &rules).unwrap();
    let registry = TestRegistry::start_set(&rules).await;
    let old = registry.begin("r").await;
    assert_eq!(registry.patch(&old, 0, &noise(2 * MIB, 1)).await.status, 202);
    let registry = TestRegistry::start_with(&config, registry.stop().await).await;
    let newer = registry.begin("r").await;
    assert_eq!(registry.patch(&newer, 0, &noise(2 * MIB, 2)).await.status, 202);
    let other = registry.begin("s").await;
    assert_eq!(registry.patch(&other, 0, &noise(2 * MIB, 3)).await.status, 202);
    // The first, from before the restart, goes; then there is room, and the second stays.
    let fits = async || {
        let content = noise(2 * MIB, 4);
        let path = format!("/v2/r/blobs/uploads/?digest={}", Digest::of(&content));
        let reply = registry.send(Method::POST, &path, &[], streamed(content));
        reply.await.status == 201
    };
    wait_until("an idle upload makes room", fits).await;
    assert_eq!(registry.get(&old).await.status, 404);
    assert_eq!(registry.get(&newer).await.status, 204);
    // Then the second, which this process knows.
    wait_until("the next makes room", async || {
        post(&registry, "r", noise(MIB, 5)).await.status == 201
    })
    .await;
    assert_eq!(registry.get(&newer).await.status, 404);
    assert_eq!(registry.get(&other).await.status, 204, "others are left alone");
    let digest = Digest::of(&noise(2 * MIB, 2));
    registry.put(&newer, &digest, "").await.refused(404, "BLOB_UPLOAD_UNKNOWN");
}
