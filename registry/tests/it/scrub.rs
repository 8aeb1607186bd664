//! Reading everything again.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use kybernate_registry::config::{Config, Period, Scrub, Size};
use kybernate_spec::{Digest, media_type};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::harness::{TestRegistry, blob_path, noise, sha512, wait_until};
use crate::process::{Process, command};

const QUIET: [&str; 4] = ["--log-filter", "warn", "--scrub-enabled", "false"];

/// Runs `scrub` and returns its exit code and its lines.
async fn scrub(root: &Path, more: &[&str]) -> (i32, Vec<Value>) {
    let start = ["scrub", "--root", root.to_str().unwrap(), "--json", "--log-filter", "off"];
    let output = command(&[&start[..], more].concat()).output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code().unwrap(), lines)
}

fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

fn events(lines: &[Value], event: &str) -> Vec<String> {
    let told = lines.iter().filter(|line| line["event"] == event);
    told.map(|line| line["digest"].as_str().unwrap().to_owned()).collect()
}

/// What has rotted where nobody reads is found, moved away, and healed by a push; also by a
/// checksum that still matches a chunk, and without a server.
#[tokio::test]
async fn what_has_rotted_is_found() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &QUIET).await;
    let (small, large, other) = (noise(1000, 1), noise(3 << 20, 2), noise(200_000, 3));
    for content in [&small, &large, &other] {
        process.remote.push("a", content).await;
    }
    let upload = process.remote.begin("a").await;
    assert_eq!(process.remote.put(&upload, &sha512(&small), small.clone()).await.status, 201);
    let fast = ["--scrub-rate", "1GiB"];
    let (code, lines) = scrub(root.path(), &fast).await;
    assert_eq!(code, 0);
    let last = lines.last().unwrap();
    assert_eq!((&last["contents"], &last["corrupt"]), (&4.into(), &0.into()), "{last}");
    assert_eq!(last["bytes"], small.len() * 2 + large.len() + other.len());

    let digest = Digest::of(&large);
    flip(&blob_path(root.path(), &digest), 2_500_000);
    flip(&blob_path(root.path(), &sha512(&small)), 999);
    let (code, lines) = scrub(root.path(), &fast).await;
    assert_eq!(code, 2);
    let found = events(&lines, "corrupt");
    assert_eq!(found, [digest.to_string(), sha512(&small).to_string()]);
    assert_eq!(process.remote.head_blob("a", &digest).await, 404);
    assert_eq!(std::fs::read_dir(root.path().join("corrupt")).unwrap().count(), 2);

    process.remote.push("a", &large).await;
    assert!(process.remote.blob("a", &digest).await.body == large);
    flip(&blob_path(root.path(), &Digest::of(&other)), 7);
    process.terminate().await;
    let (code, lines) = scrub(root.path(), &fast).await;
    assert_eq!((code, events(&lines, "corrupt")), (2, vec![Digest::of(&other).to_string()]));
    assert_eq!(scrub(root.path(), &fast).await.0, 0);
}

#[tokio::test]
async fn checksums_that_have_rotted_are_made_anew() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &QUIET).await;
    let content = noise(3 << 20, 1);
    let digest = process.remote.push("a", &content).await;
    let checksums = blob_path(root.path(), &digest).with_extension("crc");
    for damage in [Some(40), None] {
        match damage {
            Some(at) => flip(&checksums, at),
            None => std::fs::remove_file(&checksums).unwrap(),
        }
        let (code, lines) = scrub(root.path(), &["--scrub-rate", "1GiB"]).await;
        assert_eq!((code, events(&lines, "repaired")), (0, vec![digest.to_string()]));
        assert!(process.remote.blob("a", &digest).await.body == content);
    }
}

/// A file that somebody moved away is no file that has rotted: nobody reads it again. What names it
/// is told, until it is there again or nothing names it any more.
#[tokio::test]
async fn what_a_manifest_lacks_is_found() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &QUIET).await;
    let fast = ["--scrub-rate", "1GiB"];
    let layer = noise(100_000, 1);
    let image = process.remote.push_image("team/a", "v1", &layer, None).await;
    let index = serde_json::json!({ "schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": [image] });
    let index = index.to_string();
    let pushed = process.remote.put_manifest("team/a", "i", media_type::OCI_INDEX, index.clone());
    assert_eq!(pushed.await.status, 201);
    process.remote.push_image("b", "v1", b"other", None).await;
    let (code, lines) = scrub(root.path(), &fast).await;
    let last = lines.last().unwrap();
    assert_eq!((code, &last["manifests"], &last["incomplete"]), (0, &3.into(), &0.into()));

    let digest = Digest::of(&layer);
    let (path, aside) = (blob_path(root.path(), &digest), root.path().join("aside"));
    std::fs::rename(&path, &aside).unwrap();
    let figure = async || {
        let page = process.remote.get("/metrics").await.body;
        let page = String::from_utf8(page.to_vec()).unwrap();
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("kybernate_registry_incomplete_manifests "));
        line.unwrap().to_owned()
    };
    for _again in 0..2 {
        let (code, lines) = scrub(root.path(), &fast).await;
        assert_eq!((code, events(&lines, "missing")), (2, vec![digest.to_string()]));
        let told = lines.iter().find(|line| line["event"] == "missing").unwrap();
        assert_eq!(
            (&told["repository"], &told["manifest"]),
            (&"team/a".into(), &image.digest.to_string().into())
        );
        assert_eq!(lines.last().unwrap()["incomplete"], 1);
        assert_eq!(figure().await, "1");
    }
    // What has rotted and was moved away by this very pass is named too.
    flip(&blob_path(root.path(), &image.digest), 10);
    let (code, lines) = scrub(root.path(), &fast).await;
    assert_eq!((code, events(&lines, "corrupt")), (2, vec![image.digest.to_string()]));
    let missing = events(&lines, "missing");
    assert_eq!(
        missing,
        vec![image.digest.to_string(); 2],
        "the image itself, and the index's child"
    );
    assert_eq!(lines.last().unwrap()["incomplete"], 2);

    // What is deleted lacks nothing.
    for manifest in [Digest::of(index.as_bytes()), image.digest.clone()] {
        let deleted = process.remote.delete(&format!("/v2/team/a/manifests/{manifest}")).await;
        assert_eq!(deleted.status, 202);
    }
    let (code, lines) = scrub(root.path(), &fast).await;
    assert_eq!((code, events(&lines, "missing").len()), (0, 0), "{lines:?}");
    assert_eq!(figure().await, "0");
    process.terminate().await;
}

/// A pass goes on where it was when its server was killed: everything is read once.
#[tokio::test]
async fn a_pass_goes_on_after_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &QUIET).await;
    for seed in 0..40 {
        process.remote.push("a", &noise(100_000, seed)).await;
    }
    let slow = ["scrub", "--root", root.path().to_str().unwrap(), "--json", "--scrub-rate", "1MiB"];
    let mut slow = command(&slow).spawn().unwrap();
    let mut lines = BufReader::new(slow.stdout.take().unwrap()).lines();
    let (mut first, mut read) = (Value::Null, 0);
    while read == 0 {
        first = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        assert_eq!(first["event"], "progress");
        read = first["contents"].as_u64().unwrap();
    }
    assert!(read < 40, "{first}");
    process.kill().await;
    assert_eq!(slow.wait().await.unwrap().code(), Some(1), "the command is told");

    let process = Process::start(root.path(), &QUIET).await;
    let (code, lines) = scrub(root.path(), &["--scrub-rate", "1GiB"]).await;
    let last = lines.last().unwrap();
    assert_eq!((code, &last["contents"], &last["began"]), (0, &40.into(), &first["began"]));
    assert_eq!(last["bytes"], 40 * 100_000, "each was read once");
    let (_, lines) = scrub(root.path(), &["--scrub-rate", "1GiB"]).await;
    assert_eq!(lines.last().unwrap()["contents"], 40, "the next pass begins anew");
    process.terminate().await;
}

/// A client of the maintenance socket that goes away stops what it asked for.
#[tokio::test]
async fn who_hangs_up_stops_the_pass() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &QUIET).await;
    process.remote.push("a", &noise(3 << 20, 1)).await;
    let slow = ["scrub", "--root", root.path().to_str().unwrap(), "--json", "--scrub-rate", "1KiB"];
    let mut slow = command(&slow).spawn().unwrap();
    // It is a pass of an hour, and cannot have come to its end.
    let begun = BufReader::new(slow.stdout.take().unwrap()).lines().next_line().await;
    assert!(begun.unwrap().unwrap().contains(r#""contents":0"#));
    slow.kill().await.unwrap();
    let (code, lines) = scrub(root.path(), &["--scrub-rate", "1GiB"]).await;
    assert_eq!((code, &lines.last().unwrap()["contents"]), (0, &1.into()));
    process.terminate().await;
}

#[tokio::test]
async fn a_server_scrubs_by_itself() {
    let interval = Period(std::time::Duration::from_millis(1));
    let scrub = Scrub { interval, rate: Size(1 << 30), ..Scrub::default() };
    let config = Config { scrub, ..Config::default() };
    let registry = TestRegistry::start_with(&config, tempfile::tempdir().unwrap()).await;
    let content = noise(200_000, 1);
    let digest = registry.push("a", &content).await;
    flip(&registry.blob_path(&digest), 100_000);
    let found = async || std::fs::read_dir(registry.path("corrupt")).unwrap().count() == 1;
    wait_until("it is found", found).await;
    assert_eq!(registry.head_blob("a", &digest).await, 404);
}
