//! What a restart keeps.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kybernate_registry::store::{OpenError, Store};
use kybernate_spec::Digest;

use crate::harness::{TestRegistry, image, noise, sha512};

const MIB: usize = 1 << 20;

#[tokio::test]
async fn everything_acknowledged_is_there_after_a_restart() {
    let registry = TestRegistry::start().await;
    let content = noise(2 * MIB + 1, 1);
    let digest = registry.push("a", &content).await;
    let subject = registry.push_image("a", "v1", b"layer", None).await;
    registry.push_image("a", "r", b"other", Some(&subject)).await;
    let lists = async |registry: &TestRegistry| {
        let mut lists = Vec::new();
        for path in
            ["/v2/_catalog", "/v2/a/tags/list", &*format!("/v2/a/referrers/{}", subject.digest)]
        {
            lists.push(registry.get(path).await.json());
        }
        lists
    };
    let before = lists(&registry).await;

    let registry = registry.restart().await;
    assert_eq!(lists(&registry).await, before);
    assert!(registry.blob("a", &digest).await.body == content);
    assert_eq!(registry.get("/v2/a/manifests/v1").await.body, image(b"layer", None));
}

#[tokio::test]
async fn an_upload_goes_on_after_a_restart() {
    for sha_512 in [false, true] {
        let registry = TestRegistry::start().await;
        let content = noise(3 * MIB + 1, 2);
        let digest = if sha_512 { sha512(&content) } else { Digest::of(&content) };
        let empty = registry.begin("a").await;
        let upload = registry.begin("a").await;
        registry.patch(&upload, 0, &content[..MIB + 7]).await;

        let registry = registry.restart().await;
        let status = registry.get(&upload).await;
        assert_eq!((status.status, status.header("range")), (204, "0-1048582"));
        registry.patch(&upload, MIB + 7, &content[MIB + 7..]).await;
        assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
        assert!(registry.blob("a", &digest).await.body == content);
        assert_eq!(registry.put(&empty, &Digest::of(b"x"), "x").await.status, 201);
    }
}

#[tokio::test]
async fn what_a_killed_process_was_writing_is_swept() {
    let registry = TestRegistry::start().await;
    let began = "00000001"; // The second after 1970 began.
    let old = registry.path(&format!("uploads/{began}{}-0123456789abcdef", "a".repeat(32)));
    fs_err::write(&old, "old").unwrap();
    fs_err::write(old.with_extension("crc"), "old").unwrap();
    leave_alone(&old, 25);
    leave_alone(&old.with_extension("crc"), 25);
    // No number that a store gets to.
    let half = "tmp/18446744073709551615";
    fs_err::write(registry.path(half), "half a record").unwrap();
    let young = registry.begin("a").await;

    let registry = registry.restart().await;
    assert!(!old.exists());
    assert!(!old.with_extension("crc").exists());
    assert!(!registry.path(half).exists());
    assert_eq!(registry.get(&young).await.status, 204);
    let path = format!("/v2/a/blobs/uploads/{began}{}", "a".repeat(32));
    registry.get(&path).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
}

/// Makes a file look as if nothing had been written to it for so many hours.
fn leave_alone(path: &Path, hours: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_hours(hours)).unwrap();
}

/// Makes the only upload of a registry one that began so many hours ago. Returns its path and file.
fn age(registry: &TestRegistry, upload: &str, hours: u64) -> (String, PathBuf) {
    let (above, id) = upload.rsplit_once('/').unwrap();
    let began = SystemTime::now() - Duration::from_hours(hours);
    let began = began.duration_since(UNIX_EPOCH).unwrap().as_secs();
    let older = format!("{began:08x}{}", &id[8..]);
    let entries = std::fs::read_dir(registry.path("uploads")).unwrap();
    let file = entries.map(|entry| entry.unwrap().path()).find(|path| path.extension().is_none());
    let file = file.unwrap();
    let name = file.file_name().unwrap().to_str().unwrap().replace(id, &older);
    let renamed = file.with_file_name(name);
    fs_err::rename(&file, &renamed).unwrap();
    (format!("{above}/{older}"), renamed)
}

#[tokio::test]
async fn an_upload_lives_from_its_last_byte_on() {
    let registry = TestRegistry::start().await;
    let content = noise(MIB + 9, 4);
    let upload = registry.begin("a").await;
    assert_eq!(registry.patch(&upload, 0, &content[..MIB]).await.status, 202);
    let registry = registry.restart().await;
    // Begun longer ago than it may be left alone, and never left alone so long.
    let (upload, file) = age(&registry, &upload, 6 * 24);
    leave_alone(&file, 23);
    let registry = registry.restart().await;
    let status = registry.get(&upload).await;
    assert_eq!((status.status, status.header("range")), (204, "0-1048575"));
    assert_eq!(registry.patch(&upload, MIB, &content[MIB..]).await.status, 202);
    let digest = Digest::of(&content);
    assert_eq!(registry.put(&upload, &digest, "").await.status, 201);
    assert!(registry.blob("a", &digest).await.body == content);

    let upload = registry.begin("a").await;
    let registry = registry.restart().await;
    // Its id is a secret: it does not suffice for ever, however often it is used.
    let (upload, file) = age(&registry, &upload, 8 * 24);
    registry.get(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    registry.patch(&upload, 0, b"more").await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    leave_alone(&file, 25);
    let registry = registry.restart().await;
    assert!(!file.exists());
    drop(registry);
}

#[test]
fn a_store_that_is_whole_is_opened_without_waiting_for_the_disk() {
    let root = tempfile::tempdir().unwrap();
    let syncs = || Store::open(root.path()).unwrap().metrics().sync.count();
    assert!(syncs() > 2, "all of its directories are new");
    assert_eq!(syncs(), 0);
    // Of what somebody took away, all is made durably again.
    fs_err::remove_dir(root.path().join("corrupt")).unwrap();
    assert_eq!(syncs(), 1);
    fs_err::remove_dir(root.path().join("blobs/sha512/7f")).unwrap();
    assert_eq!(syncs(), 1);
    fs_err::remove_dir_all(root.path().join("blobs")).unwrap();
    assert!(syncs() > 2);
    assert_eq!(syncs(), 0);
}

#[tokio::test]
async fn a_store_is_served_by_one_process_at_a_time() {
    let registry = TestRegistry::start().await;
    let root = registry.path("");
    assert!(matches!(Store::open(&root), Err(OpenError::Locked(_))));
    let kept = registry.stop().await;
    Store::open(&root).unwrap();
    drop(kept);
}

#[test]
fn a_directory_that_is_not_ours_is_refused() {
    let root = tempfile::tempdir().unwrap();
    fs_err::write(root.path().join("precious"), "data").unwrap();
    assert!(matches!(Store::open(root.path()), Err(OpenError::Foreign { .. })));
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing was made in it");

    let root = tempfile::tempdir().unwrap();
    drop(Store::open(root.path()).unwrap());
    let version = root.path().join("kybernate-registry.json");
    insta::assert_snapshot!(fs_err::read_to_string(&version).unwrap(), @r#"{"layout":1}"#);
    fs_err::write(&version, r#"{"layout":2}"#).unwrap();
    assert!(matches!(Store::open(root.path()), Err(OpenError::Layout { found: 2, .. })));
    fs_err::write(&version, "{").unwrap();
    assert!(matches!(Store::open(root.path()), Err(OpenError::Malformed(..))));
}
