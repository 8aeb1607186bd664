//! `kill -9` in the middle of collections.

use super::*;

/// What is known of the tags of a repository.
#[derive(Debug, Default)]
struct Known {
    tags: BTreeMap<String, Digest>,
    /// Being changed when the registry was killed: it may name anything that is whole, or nothing.
    unsure: Option<String>,
}

/// Pushes, moves and deletes tags until the registry goes away.
async fn work(remote: &Remote, first: u64, known: &mut Known) -> reqwest::Result<()> {
    for number in first.. {
        let tag = format!("t{}", number % 5);
        known.unsure = Some(tag.clone());
        let layers = [noise(3000, number % 4), noise(70_000, number)];
        let digest = push_skipping(remote, "a", &tag, &layers).await?;
        known.tags.insert(tag.clone(), digest);
        if number.is_multiple_of(3) {
            let path = format!("/v2/a/manifests/{tag}");
            remote.try_send(Method::DELETE, &path, &[], "").await?;
            known.tags.remove(&tag);
        }
        known.unsure = None;
    }
    Ok(())
}

async fn check(remote: &Remote, known: &mut Known) {
    if let Some(tag) = known.unsure.take() {
        known.tags.remove(&tag);
        let reply = remote.get(&format!("/v2/a/manifests/{tag}")).await;
        if reply.status == 200 {
            check_parts(remote, "a", &tag, &reply).await;
        }
    }
    for (tag, digest) in &known.tags {
        check_image(remote, "a", tag, digest).await;
    }
}

/// Killed again and again while it collects under pushes, moved tags and deletes: what was
/// acknowledged is there each time, and what is garbage goes in the end.
#[tokio::test]
async fn a_collection_that_is_killed_loses_nothing_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let options = [&HASTY[..], &["--log-filter", "error"]].concat();
    let mut known = Known::default();
    for round in 0..12u64 {
        let process = Process::start(root.path(), &options).await;
        let remote = process.remote.clone();
        check(&remote, &mut known).await;
        // A different moment each time, spread over the steps of pushes and collections.
        let lead = Duration::from_millis(20 + round * 37 % 200);
        let killing = async {
            let _on_time = tokio::time::timeout(lead, std::future::pending::<()>()).await;
            process.kill().await;
        };
        let (ended, ()) =
            futures::future::join(work(&remote, round * 100, &mut known), killing).await;
        ended.unwrap_err();
    }
    let process = Process::start(root.path(), &options).await;
    check(&process.remote, &mut known).await;
    // Without tags nothing is needed, wherever it was killed.
    let listed = process.remote.get("/v2/a/tags/list").await.json();
    for tag in listed["tags"].as_array().unwrap() {
        let path = format!("/v2/a/manifests/{}", tag.as_str().unwrap());
        assert_eq!(process.remote.delete(&path).await.status, 202);
    }
    let empty = async || {
        files(&root.path().join("blobs")) == 0 && files(&root.path().join("repositories")) == 0
    };
    wait_until("everything has gone", empty).await;
    process.terminate().await;
}
