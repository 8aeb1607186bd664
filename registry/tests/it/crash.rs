//! `kill -9` in the middle of pushes: what was acknowledged is there and whole, nothing else is
//! half there.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::sync::{Arc, Mutex};

use http::Method;
use kybernate_spec::{Digest, media_type};

use crate::harness::{Remote, image, noise, sha512, wait_until};
use crate::process::Process;
use crate::retry::send_part;

const MIB: usize = 1 << 20;

#[derive(Debug, Clone, Default)]
struct Acknowledged {
    tried: Vec<(String, Digest)>,
    blobs: Vec<(String, Digest)>,
    tags: Vec<(String, Digest)>,
}

/// Pushes blobs and images until the registry goes away.
async fn push_until_it_dies(remote: Remote, worker: u64, seen: Arc<Mutex<Acknowledged>>) {
    for number in 0.. {
        let nth = worker * 1_000_000 + number;
        let length = usize::try_from(nth.wrapping_mul(7919) % 1_500_000).unwrap();
        let layer = noise(length, nth);
        let repository = format!("w/{worker}");
        seen.lock().unwrap().tried.push((repository.clone(), Digest::of(&layer)));
        for content in [b"{}".to_vec(), layer.clone()] {
            let digest = Digest::of(&content);
            let path = format!("/v2/{repository}/blobs/uploads/?digest={digest}");
            match remote.try_send(Method::POST, &path, &[], content).await {
                Ok(reply) if reply.status == 201 => {
                    seen.lock().unwrap().blobs.push((repository.clone(), digest));
                }
                _ => return,
            }
        }
        let manifest = image(&layer, None);
        let path = format!("/v2/{repository}/manifests/t{number}");
        let headers = [("content-type", media_type::OCI_MANIFEST)];
        match remote.try_send(Method::PUT, &path, &headers, manifest.clone()).await {
            Ok(reply) if reply.status == 201 => {
                seen.lock().unwrap().tags.push((path, Digest::of(&manifest)));
            }
            _ => return,
        }
    }
}

/// Checks that what was acknowledged is whole, and what was not is whole or absent.
async fn check_everything(remote: &Remote, seen: &Acknowledged) {
    for (repository, digest) in &seen.blobs {
        let reply = remote.blob(repository, digest).await;
        assert_eq!(reply.status, 200, "acknowledged {digest} is lost");
        assert_eq!(Digest::of(&reply.body), *digest);
    }
    for (repository, digest) in &seen.tried {
        let reply = remote.blob(repository, digest).await;
        assert!(reply.status == 404 || Digest::of(&reply.body) == *digest, "{digest} is torn");
    }
    for (path, digest) in &seen.tags {
        let reply = remote.get(path).await;
        assert_eq!(reply.status, 200, "acknowledged {path} is lost");
        assert_eq!(Digest::of(&reply.body), *digest);
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_kill_9() {
    let root = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Acknowledged::default()));
    for round in 1..=3u64 {
        let process = Process::start(root.path(), &["--log-filter", "warn"]).await;
        let pushing = (0..4).map(|worker| {
            push_until_it_dies(process.remote.clone(), worker + 10 * round, Arc::clone(&seen))
        });
        let pushing = futures::future::join_all(pushing);
        let enough = usize::try_from(round).unwrap() * 40;
        let killing = async {
            let acknowledged = async || seen.lock().unwrap().blobs.len() >= enough;
            wait_until("enough is pushed", acknowledged).await;
            process.kill().await;
        };
        futures::future::join(pushing, killing).await;

        let process = Process::start(root.path(), &["--log-filter", "warn"]).await;
        // The new process writes there too, for moments; what the old one left would stay.
        let left = || std::fs::read_dir(root.path().join("tmp")).unwrap().count();
        wait_until("half-written records are swept", async || left() == 0).await;
        let so_far = seen.lock().unwrap().clone();
        check_everything(&process.remote, &so_far).await;
        process.kill().await;
    }
}

/// Bytes sent before a break: around what is hashed, checksummed and written at once.
const CUTS: [usize; 9] =
    [1, 4_095, 65_537, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB + 4_097, 3 * MIB + 6];

#[tokio::test]
async fn a_push_that_is_cut_at_any_byte_goes_on_also_in_another_process() {
    let root = tempfile::tempdir().unwrap();
    let content = noise(3 * MIB + 7, 9);
    let mut process = Process::start(root.path(), &["--log-filter", "warn"]).await;
    let mut cut = Vec::new();
    for (number, length) in CUTS.into_iter().enumerate() {
        let digest = if number.is_multiple_of(2) { Digest::of(&content) } else { sha512(&content) };
        // Each in a repository of its own: what is there already would be taken at once.
        let repository = format!("cut/{length}");
        let upload = process.remote.begin(&repository).await;
        let request = format!("PATCH {upload}");
        let part = &content[..length];
        drop(send_part(&process.remote, &request, content.len(), part).await);
        cut.push((repository, upload, digest));
    }
    for round in 0..2 {
        // The first kill comes while the parts may still be under way, the second after a bit more.
        process.kill().await;
        process = Process::start(root.path(), &["--log-filter", "warn"]).await;
        for ((_, upload, _), length) in cut.iter().zip(CUTS) {
            let has = received(&process.remote, upload).await;
            assert!(has <= length + round, "{upload} has {has}, {length} were sent");
            if has < content.len() {
                let reply = process.remote.patch(upload, has, &content[has..=has]).await;
                // `0-0` is said of one byte and of none.
                let none = reply.status == 416 && has == 1;
                let reply =
                    if none { process.remote.patch(upload, 0, &content[..1]).await } else { reply };
                assert_eq!(reply.status, 202, "{reply:?}");
            }
        }
    }
    for (repository, upload, digest) in &cut {
        let has = received(&process.remote, upload).await;
        assert!(has > 1, "what was acknowledged is lost");
        assert_eq!(process.remote.put(upload, digest, content[has..].to_vec()).await.status, 201);
        assert!(process.remote.blob(repository, digest).await.body == content);
    }
    process.kill().await;
}

/// Asks how far an upload is.
async fn received(remote: &Remote, upload: &str) -> usize {
    let status = remote.get(upload).await;
    assert_eq!(status.status, 204, "{status:?}");
    let range = status.headers.get("range").map(|range| range.to_str().unwrap());
    range.map_or(0, |range| range.strip_prefix("0-").unwrap().parse::<usize>().unwrap() + 1)
}
