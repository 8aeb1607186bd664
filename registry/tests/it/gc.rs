//! Garbage collection beside clients, over real sockets, and with the real program.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed step here is a failed test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use http::Method;
use kybernate_registry::config::{Config, Gc, Period};
use kybernate_spec::{Descriptor, Digest, media_type};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Remote, Reply, TestRegistry, image, noise, wait_until};
use crate::process::{Process, command};

mod crash;

/// Collects all the time and keeps nothing for longer than `quarantine`.
fn hasty(quarantine: Duration) -> Config {
    let now = Period(Duration::ZERO);
    let often = Period(Duration::from_millis(1));
    let gc = Gc {
        interval: often,
        everything: often,
        grace: now,
        untagged: now,
        quarantine: Period(quarantine),
        ..Gc::default()
    };
    Config { gc, ..Config::default() }
}

async fn start(config: &Config) -> TestRegistry {
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    TestRegistry::start_with(config, tempfile::tempdir_in(base).unwrap()).await
}

/// The options that make the program as hasty.
const HASTY: [&str; 10] = [
    "--gc-interval",
    "1ms",
    "--gc-everything",
    "1ms",
    "--gc-grace",
    "0s",
    "--gc-untagged",
    "0s",
    "--gc-quarantine",
    "0s",
];

/// Runs a command on a store and returns its exit code and its lines.
async fn run(name: &str, root: &Path, more: &[&str]) -> (i32, Vec<Value>) {
    let root = root.to_str().unwrap();
    let arguments = [&[name, "--root", root, "--json"], more].concat();
    let output = command(&arguments).output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(output.status.code() != Some(1), "{} {text}", String::from_utf8_lossy(&output.stderr));
    (output.status.code().unwrap(), lines)
}

/// Returns what a run did, without what differs between two runs that do the same.
fn done(lines: &[Value]) -> BTreeSet<String> {
    let told = lines
        .iter()
        .filter(|line| !["done", "progress"].contains(&line["event"].as_str().unwrap()));
    told.map(ToString::to_string).collect()
}

fn files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().map(Result::unwrap);
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

/// Counts a store's files without those of its index, which writes and removes when it likes.
fn files_but_of_the_index(root: &Path) -> usize {
    let entries = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let others = entries.filter(|path| !path.ends_with("index"));
    others.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}

/// A client that skips what exists: it looks, it leaves out, it names. In between everything it saw
/// is condemned, and then either it is brought back or the client is told.
#[tokio::test]
async fn a_client_that_skips_what_exists_is_never_cheated() {
    let registry = start(&hasty(Duration::from_hours(1))).await;
    for round in 0..5u64 {
        let layer = noise(1000, round);
        let (config, digest) = (registry.push("a", b"{}").await, registry.push("a", &layer).await);
        // The push is as good as a look. The configuration is needed from the second round on.
        let gone = async || registry.head_blob("a", &digest).await == 404;
        wait_until("what was shown is condemned", gone).await;
        let tag = format!("v{round}");
        let pushed =
            registry.put_manifest("a", &tag, media_type::OCI_MANIFEST, image(&layer, None)).await;
        assert_eq!(pushed.status, 201, "{pushed:?}");
        assert_eq!(registry.blob("a", &digest).await.body, layer);
        assert_eq!(registry.blob("a", &config).await.body, &b"{}"[..]);
    }
}

#[tokio::test]
async fn after_the_quarantine_the_client_is_told() {
    let registry = start(&hasty(Duration::ZERO)).await;
    let layer = noise(100_000, 1);
    let digest = registry.push("a", &layer).await;
    wait_until("it is removed", async || files(&registry.path("blobs")) == 0).await;
    let content = image(&layer, None);
    let refused = registry.put_manifest("a", "v1", media_type::OCI_MANIFEST, content).await;
    refused.refused(400, "MANIFEST_BLOB_UNKNOWN");
    assert_eq!(registry.get("/v2/a/manifests/v1").await.status, 404);
    let mount = format!("/v2/b/blobs/uploads/?mount={digest}&from=a");
    assert_eq!(registry.send(Method::POST, &mount, &[], "").await.status, 202);
}

/// Pushes an image as a client does that looks first, and again from the beginning when it is told
/// that something it skipped has gone. Fails when the registry goes away.
async fn push_skipping(
    remote: &Remote,
    repository: &str,
    tag: &str,
    layers: &[Vec<u8>],
) -> reqwest::Result<Digest> {
    let layer = |content: &Vec<u8>| Descriptor::of(media_type::OCI_LAYER_TAR, content);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": Descriptor::of(media_type::OCI_EMPTY, b"{}"),
        "layers": layers.iter().map(layer).collect::<Vec<_>>(),
    })
    .to_string();
    let config = b"{}".to_vec();
    for _ in 0..1000 {
        for content in layers.iter().chain([&config]) {
            let digest = Digest::of(content);
            let path = format!("/v2/{repository}/blobs/{digest}");
            if remote.try_send(Method::HEAD, &path, &[], "").await?.status != 200 {
                let path = format!("/v2/{repository}/blobs/uploads/?digest={digest}");
                let pushed = remote.try_send(Method::POST, &path, &[], content.clone()).await?;
                assert_eq!(pushed.status, 201, "{pushed:?}");
            }
        }
        let path = format!("/v2/{repository}/manifests/{tag}");
        let headers = [("content-type", media_type::OCI_MANIFEST)];
        let pushed = remote.try_send(Method::PUT, &path, &headers, manifest.clone()).await?;
        if pushed.status == 201 {
            return Ok(Digest::of(manifest.as_bytes()));
        }
        pushed.refused(400, "MANIFEST_BLOB_UNKNOWN");
    }
    panic!("a push never came through")
}

/// Checks that a tag names an image and that all of it is there.
async fn check_image(remote: &Remote, repository: &str, tag: &str, digest: &Digest) {
    let reply = remote.get(&format!("/v2/{repository}/manifests/{tag}")).await;
    assert_eq!(reply.status, 200, "{repository}:{tag} is lost");
    assert_eq!(Digest::of(&reply.body), *digest);
    check_parts(remote, repository, tag, &reply).await;
}

async fn check_parts(remote: &Remote, repository: &str, tag: &str, reply: &Reply) {
    let manifest = reply.json();
    let layers = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
    for part in layers {
        let part: Digest = part["digest"].as_str().unwrap().parse().unwrap();
        let blob = remote.blob(repository, &part).await;
        assert_eq!(blob.status, 200, "{part} of {repository}:{tag} is lost");
        assert_eq!(Digest::of(&blob.body), part);
    }
}

/// Pushes, moved tags and deletes while garbage is collected without a pause: whatever was
/// acknowledged and not deleted is there at the end, and nothing else is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_acknowledged_stays_under_a_collection_that_never_ends() {
    let registry = start(&hasty(Duration::ZERO)).await;
    let worker = async |worker: u64| {
        let repository = format!("w/{}", worker % 2);
        let mut tags = BTreeMap::new();
        for round in 0..25u64 {
            // Layers that many share, and one that only this image has.
            let layers = [
                noise(2000, round % 3),
                noise(70_000, round % 2),
                noise(500, worker * 1000 + round),
            ];
            let tag = format!("t{worker}-{}", round % 4);
            let digest = push_skipping(&registry, &repository, &tag, &layers).await.unwrap();
            tags.insert(tag.clone(), digest.clone());
            if round % 5 == 4 {
                let deleted = registry.delete(&format!("/v2/{repository}/manifests/{tag}")).await;
                assert_eq!(deleted.status, 202);
                tags.remove(&tag);
            }
            for (tag, digest) in &tags {
                check_image(&registry, &repository, tag, digest).await;
            }
        }
        (repository, tags)
    };
    let tags = futures::future::join_all((0..4).map(worker)).await;
    let mut images = BTreeSet::new();
    for (repository, tags) in &tags {
        for (tag, digest) in tags {
            check_image(&registry, repository, tag, digest).await;
            images.insert(digest.clone());
        }
    }
    let mut contents: BTreeSet<Digest> = images.clone();
    for (repository, tags) in &tags {
        for digest in tags.values() {
            let manifest =
                registry.get(&format!("/v2/{repository}/manifests/{digest}")).await.json();
            let parts = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
            contents.extend(
                parts.map(|part| part["digest"].as_str().unwrap().parse::<Digest>().unwrap()),
            );
        }
    }
    let large = contents
        .iter()
        .filter(|digest| std::fs::metadata(registry.blob_path(digest)).unwrap().len() > 64 << 10);
    let expected = contents.len() + large.count();
    wait_until("all garbage has gone", async || files(&registry.path("blobs")) == expected).await;
}

#[tokio::test]
async fn the_command_tells_beforehand_exactly_what_it_does() {
    let root = tempfile::tempdir().unwrap();
    let keeping_nothing = &HASTY[4..];
    let quiet = [&["--log-filter", "warn", "--gc-enabled", "false"], keeping_nothing].concat();
    let process = Process::start(root.path(), &quiet).await;
    let remote = &process.remote;
    for (tag, layer) in [("latest", 1), ("latest", 2), ("v1", 3)] {
        remote.push_image("a", tag, &noise(70_000, layer), None).await;
    }
    remote.push("b", b"stray").await;
    let mode = std::fs::metadata(root.path().join("admin.sock")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    assert_eq!(mode.uid(), rustix::process::getuid().as_raw());

    let mut rounds = 0;
    let mut changed = true;
    while changed {
        let counted = || files_but_of_the_index(root.path());
        let before = counted();
        let (_, told) = run("gc", root.path(), &["--dry-run"]).await;
        assert_eq!(counted(), before, "a dry run changes nothing");
        let (_, did) = run("gc", root.path(), &[]).await;
        assert_eq!(done(&told), done(&did));
        changed = !done(&did).is_empty();
        rounds += 1;
    }
    assert_eq!(rounds, 3, "condemned, removed, nothing more");
    assert_eq!(remote.head_blob("b", &Digest::of(b"stray")).await, 404);
    assert_eq!(remote.get("/v2/a/manifests/latest").await.status, 200);
    process.terminate().await;

    // Nobody serves it any more: the command does it itself, by its own settings.
    let (_, lines) = run("gc", root.path(), keeping_nothing).await;
    let summary = lines.last().unwrap();
    assert_eq!((&summary["event"], &summary["repositories"]), (&json!("done"), &json!(2)));
    let output = command(&["gc", "--root", "/nowhere/at/all"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no store"), "{output:?}");
}

/// As containerd's index of a checkpoint lists its dump.
#[tokio::test]
async fn blobs_that_an_index_lists_are_stored_with_it_and_kept() {
    let registry = start(&Config::default()).await;
    let index = |content: &[u8]| {
        let listed = Descriptor::of("application/vnd.example.dump.tar", content);
        let image = Descriptor::of(media_type::OCI_MANIFEST, &image(b"layer", None));
        json!({ "schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": [image, listed] })
            .to_string()
    };
    registry.push_image("a", "image", b"layer", None).await;
    let put = async |content: &[u8]| {
        registry.put_manifest("a", "dump", media_type::OCI_INDEX, index(content)).await
    };
    put(b"dump").await.refused(400, "MANIFEST_BLOB_UNKNOWN");
    // What is said to be a manifest is none because somebody has uploaded it as a blob.
    let hidden = image(b"other layer", None);
    registry.push("a", &hidden).await;
    let listed = Descriptor::of(media_type::OCI_MANIFEST, &hidden);
    let wrong = json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": [listed],
    });
    let put_wrong =
        registry.put_manifest("a", "wrong", media_type::OCI_INDEX, wrong.to_string()).await;
    put_wrong.refused(400, "MANIFEST_BLOB_UNKNOWN");
    let [dump, stray] = [registry.push("a", b"dump").await, registry.push("a", b"stray").await];
    assert_eq!(put(b"dump").await.status, 201);
    let root = registry.stop().await;
    let store = root.path().join("store");
    for _ in 0..2 {
        let (code, _) = run("gc", &store, &HASTY[4..]).await;
        assert_eq!(code, 0);
    }
    let (code, lines) = run("scrub", &store, &[]).await;
    assert_eq!(code, 0, "{lines:?}");
    let registry = TestRegistry::start_in(root).await;
    assert_eq!(registry.head_blob("a", &dump).await, 200);
    assert_eq!(registry.head_blob("a", &stray).await, 404);
    assert_eq!(registry.get("/v2/a/manifests/dump").await.status, 200);
}

#[tokio::test]
async fn the_socket_answers_nonsense_and_outlives_it() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let registry = start(&Config::default()).await;
    let path = registry.path("admin.sock");
    for text in ["\n", "{}\n", "{\"command\":\"reboot\"}\n", "\u{0}\u{1}\n", &"x".repeat(10_000)] {
        let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
        // It may be refused before it is sent whole.
        let _sent = stream.write_all(text.as_bytes()).await;
        let mut reply = String::new();
        let _cut = stream.read_to_string(&mut reply).await;
        assert!(reply.is_empty() || reply.contains("not understood"), "{reply}");
    }
    let root: TempDir = registry.stop().await;
    let (code, _) = run("gc", &root.path().join("store"), &[]).await;
    assert_eq!(code, 0);
}
