//! The index is never the truth: without it, with a wrong one and while it is deleted, lists are
//! what was acknowledged.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed step here is a failed test"
)]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kybernate_spec::media_type;

use crate::harness::{Remote, TestRegistry, noise, wait_until};
use crate::process::{Process, command};

async fn indexed(registry: &TestRegistry) {
    wait_until("the index answers", async || registry.is_indexed()).await;
}

async fn tags(remote: &Remote, repository: &str) -> BTreeSet<String> {
    let list = remote.get(&format!("/v2/{repository}/tags/list")).await.json();
    let tags = list["tags"].as_array().unwrap().iter();
    tags.map(|tag| tag.as_str().unwrap().to_owned()).collect()
}

async fn put(remote: &Remote, repository: &str, tag: &str) {
    let reply = remote.put_manifest(repository, tag, "x/y", format!("{repository} {tag}")).await;
    assert_eq!(reply.status, 201, "{reply:?}");
}

/// Every list there is, of a registry with a few repositories.
async fn everything(remote: &Remote, paths: &[String]) -> Vec<serde_json::Value> {
    let mut lists = Vec::new();
    for path in paths {
        lists.push(remote.get(path).await.json());
    }
    lists
}

/// Fills a registry with a bit of all that is listed, and returns the lists' paths.
async fn fill(registry: &TestRegistry) -> Vec<String> {
    let subject = registry.push_image("a/b", "v1", b"layer", None).await;
    registry.push_image("a/b", "v2", b"other", None).await;
    registry.push_image("a/b", "signature", b"signature", Some(&subject)).await;
    registry.push_image("a", "x", b"layer", None).await;
    let referrers = format!("/v2/a/b/referrers/{}", subject.digest);
    let filter = format!("{referrers}?artifactType={}", media_type::OCI_EMPTY);
    registry.push("only/blobs", b"blob").await;
    let lists =
        ["/v2/_catalog", "/v2/a/tags/list", "/v2/a/b/tags/list", "/v2/only/blobs/tags/list"];
    lists.map(str::to_owned).into_iter().chain([referrers, filter]).collect()
}

/// Removes a directory that somebody writes to.
async fn remove(dir: &Path) {
    let removed = async || match std::fs::remove_dir_all(dir) {
        Ok(()) => true,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    wait_until("the index is removed", removed).await;
}

#[tokio::test]
async fn index_and_objects_answer_alike() {
    let registry = TestRegistry::start().await;
    let paths = fill(&registry).await;
    indexed(&registry).await;
    let with_index = everything(&registry, &paths).await;
    assert_eq!(with_index[0]["repositories"], serde_json::json!(["a", "a/b", "only/blobs"]));
    assert_eq!(with_index[4]["manifests"].as_array().unwrap().len(), 1);

    // Closed in an orderly way it is opened again; without a seal, or gone, it is made again.
    let spoilers: [fn(&Path); 4] = [
        |_root| {},
        |root| fs_err::remove_file(root.join("index.seal")).unwrap(),
        |root| fs_err::remove_dir_all(root.join("index")).unwrap(),
        |root| fs_err::write(root.join("index.seal"), "kybernate-index 1 0\n{}").unwrap(),
    ];
    let mut registry = registry;
    for spoil in spoilers {
        let root = registry.stop().await;
        assert!(root.path().join("store/index.seal").exists(), "it was closed in an orderly way");
        spoil(&root.path().join("store"));
        registry = TestRegistry::start_in(root).await;
        assert_eq!(everything(&registry, &paths).await, with_index);
        put(&registry, "a", "new").await;
        indexed(&registry).await;
        assert_eq!(tags(&registry, "a").await, ["new", "x"].map(str::to_owned).into());
        assert_eq!(registry.delete("/v2/a/manifests/new").await.status, 202);
        assert_eq!(everything(&registry, &paths).await, with_index);
    }
}

#[tokio::test]
async fn an_object_whose_index_write_was_cut_off_is_listed() {
    let root = tempfile::tempdir().unwrap();
    let store = root.path().join("store");
    let process = Process::start(&store, &["--log", "warn"]).await;
    put(&process.remote, "r", "a").await;
    put(&process.remote, "r", "gone").await;
    wait_until("there is an index", async || store.join("index").is_dir()).await;
    process.kill().await;
    // What a kill between the write of an object and the write to the index leaves.
    let tags_dir = store.join("repositories/r/_tags");
    fs_err::copy(tags_dir.join("a"), tags_dir.join("b")).unwrap();
    fs_err::remove_file(tags_dir.join("gone")).unwrap();

    let registry = TestRegistry::start_in(root).await;
    let expected: BTreeSet<_> = ["a", "b"].map(str::to_owned).into();
    assert_eq!(tags(&registry, "r").await, expected);
    indexed(&registry).await;
    assert_eq!(tags(&registry, "r").await, expected);
}

#[tokio::test]
async fn an_older_index_put_back_is_not_believed() {
    let registry = TestRegistry::start().await;
    put(&registry, "r", "a").await;
    indexed(&registry).await;
    let root = registry.stop().await;
    let index = root.path().join("store/index");
    let old = root.path().join("old");
    let name = std::fs::read_dir(&index).unwrap().next().unwrap().unwrap().file_name();
    copy_dir(&index.join(&name), &old);

    let registry = TestRegistry::start_in(root).await;
    indexed(&registry).await;
    put(&registry, "r", "b").await;
    let root = registry.stop().await;
    fs_err::remove_dir_all(index.join(&name)).unwrap();
    fs_err::rename(&old, index.join(&name)).unwrap();

    let registry = TestRegistry::start_in(root).await;
    indexed(&registry).await;
    assert_eq!(tags(&registry, "r").await, ["a", "b"].map(str::to_owned).into());
}

fn copy_dir(from: &Path, to: &Path) {
    fs_err::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            fs_err::copy(entry.path(), to).unwrap();
        }
    }
}

/// Returns the names of the databases there are.
fn databases(index: &Path) -> BTreeSet<std::ffi::OsString> {
    let entries = std::fs::read_dir(index).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name()).collect()
}

/// Pushes and deletes tags, and looks after each whether the list says so.
async fn churn(remote: Remote, worker: u64, over: &AtomicBool) -> BTreeSet<String> {
    let repository = format!("w/{worker}");
    let mut expected = BTreeSet::new();
    for number in 0u64.. {
        if over.load(Ordering::Relaxed) && number > 20 {
            break;
        }
        let tag = format!("t{}", noise(1, worker * 1_000 + number)[0] % 30);
        if expected.remove(&tag) {
            let path = format!("/v2/{repository}/manifests/{tag}");
            assert_eq!(remote.delete(&path).await.status, 202);
        } else {
            put(&remote, &repository, &tag).await;
            expected.insert(tag);
        }
        assert_eq!(tags(&remote, &repository).await, expected);
        let catalog = remote.get("/v2/_catalog").await.json();
        let repositories = catalog["repositories"].as_array().unwrap();
        assert!(repositories.iter().any(|name| *name == *repository), "{catalog}");
    }
    expected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_may_be_deleted_and_spoiled_under_load() {
    let registry = TestRegistry::start().await;
    let index = registry.path("index");
    let over = AtomicBool::new(false);
    let working = (0..4).map(|worker| churn(registry.remote.clone(), worker, &over));
    let working = futures::future::join_all(working);
    let spoiling = async {
        for round in 0..3 {
            indexed(&registry).await;
            let alone = async || databases(&index).len() == 1;
            wait_until("earlier databases are removed", alone).await;
            let before = databases(&index);
            let database = index.join(before.first().unwrap());
            match round {
                0 => remove(&index).await,
                1 => remove(&database.join("slabs")).await,
                _ => {
                    for part in std::fs::read_dir(database.join("metadata")).unwrap() {
                        fs_err::write(part.unwrap().path(), "spoiled").unwrap();
                    }
                    remove(&database.join("metadata")).await;
                }
            }
            let another = async || registry.is_indexed() && databases(&index).is_disjoint(&before);
            wait_until("another index answers", another).await;
        }
        over.store(true, Ordering::Relaxed);
    };
    let (expected, ()) = futures::future::join(working, spoiling).await;

    indexed(&registry).await;
    for (worker, expected) in expected.iter().enumerate() {
        assert_eq!(tags(&registry, &format!("w/{worker}")).await, *expected);
    }
    // What is made again is also what is sealed.
    let registry = registry.restart().await;
    indexed(&registry).await;
    for (worker, expected) in expected.iter().enumerate() {
        assert_eq!(tags(&registry, &format!("w/{worker}")).await, *expected);
    }
}

/// Runs `reindex` and returns what it says there is.
async fn reindex(root: &Path) -> serde_json::Value {
    let reindex = ["reindex", "--json", "--root", root.to_str().unwrap()];
    let output = command(&reindex).output().await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn an_index_is_made_again_when_somebody_asks_for_it() {
    let registry = TestRegistry::start().await;
    let root = registry.path("");
    put(&registry, "r", "a").await;
    registry.push("only/blobs", b"blob").await;
    indexed(&registry).await;
    let one_tag = serde_json::json!(
        { "command": "reindex", "repositories": 2, "tags": 1, "referrers": 0, "links": 2 }
    );
    assert_eq!(reindex(&root).await, one_tag);
    // By hand, behind the server's back: the index that answers does not know of it.
    let tags_dir = root.join("repositories/r/_tags");
    fs_err::copy(tags_dir.join("a"), tags_dir.join("b")).unwrap();
    assert_eq!(tags(&registry, "r").await, ["a"].map(str::to_owned).into());
    assert_eq!(reindex(&root).await["tags"], 2);
    assert!(registry.is_indexed());
    assert_eq!(tags(&registry, "r").await, ["a", "b"].map(str::to_owned).into());
    put(&registry, "r", "c").await;
    assert_eq!(tags(&registry, "r").await, ["a", "b", "c"].map(str::to_owned).into());

    // With nobody there the command opens the store, and leaves an index that is believed.
    let kept = registry.stop().await;
    fs_err::copy(tags_dir.join("a"), tags_dir.join("d")).unwrap();
    assert_eq!(reindex(&root).await["tags"], 4);
    assert!(root.join("index.seal").exists());
    let registry = TestRegistry::start_in(kept).await;
    indexed(&registry).await;
    let all = ["a", "b", "c", "d"].map(str::to_owned);
    assert_eq!(tags(&registry, "r").await, all.into());
}
