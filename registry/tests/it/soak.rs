//! `kill -9` at any moment under parallel pushes, tag moves, deletes, referrers and a garbage
//! collection that never rests: what was acknowledged is there and right, what was not is whole or
//! absent.
//!
//! Each worker has a repository of its own and does one thing at a time, so that of each path is
//! known what it must answer, or, if the registry died over it, which of two things it may.
//! `KYBERNATE_SOAK_ROUNDS` says how often the registry is killed.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed step here is a failed test"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use http::Method;
use kybernate_spec::{Descriptor, Digest, media_type};

use crate::harness::{Remote, image, noise, wait_until};
use crate::process::Process;

const ROUNDS: usize = 10;
const WORKERS: u64 = 4;
const TAGS: u64 = 3;
/// Contents that all of them push and delete, so that each goes and comes back all the time.
const SHARED: u64 = 4;
/// Deleted content goes as soon as it is found, and it is looked for all the time.
const SERVE: [&str; 6] = ["--log-filter", "warn", "--gc-interval", "20ms", "--gc-quarantine", "0s"];

/// What a path answers: a body of this digest, or 404.
type Answer = Option<Digest>;

/// One client with a repository of its own.
struct Worker {
    repository: String,
    /// What was acknowledged.
    known: BTreeMap<String, Answer>,
    /// How many writes were acknowledged.
    acknowledged: u64,
    /// What the operation under way makes of some paths.
    under_way: Vec<(String, Answer)>,
    /// Images that are there, with the layers they need.
    images: Vec<(Vec<u8>, Digest)>,
    chance: u64,
    serial: u64,
}

/// The registry is gone.
struct Gone;

impl Worker {
    fn new(number: u64) -> Self {
        let (known, under_way, images) = (BTreeMap::new(), Vec::new(), Vec::new());
        let repository = format!("soak/w{number}");
        let (chance, serial) = (number + 1, number << 32);
        Self { repository, known, acknowledged: 0, under_way, images, chance, serial }
    }

    /// A number below `limit`, the same in each run.
    fn draw(&mut self, limit: u64) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance % limit
    }

    fn manifest(&self, reference: &str) -> String {
        format!("/v2/{}/manifests/{reference}", self.repository)
    }

    fn blob(&self, digest: &Digest) -> String {
        format!("/v2/{}/blobs/{digest}", self.repository)
    }

    /// Works until the registry is gone.
    async fn work(&mut self, remote: &Remote, done: &AtomicUsize) {
        while self.step(remote).await.is_ok() {
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn step(&mut self, remote: &Remote) -> Result<(), Gone> {
        match self.draw(10) {
            0..=4 => self.push_image(remote).await,
            5..=6 if !self.images.is_empty() => self.move_tag(remote).await,
            7 => self.delete_tag(remote).await,
            8 if self.images.len() > 2 => self.delete_image(remote).await,
            _ => self.push_and_delete_blob(remote).await,
        }
    }

    /// Sends a write that makes `change` true, and remembers it when it is acknowledged.
    async fn write(
        &mut self,
        remote: &Remote,
        (method, path, body): (Method, String, Vec<u8>),
        change: Vec<(String, Answer)>,
        good: &[u16],
    ) -> Result<(), Gone> {
        self.under_way = change;
        let headers = [("content-type", media_type::OCI_MANIFEST)];
        let Ok(reply) = remote.try_send(method, &path, &headers, body).await else {
            return Err(Gone);
        };
        assert!(good.contains(&reply.status), "{path} {reply:?}");
        self.known.extend(self.under_way.drain(..));
        self.acknowledged += 1;
        Ok(())
    }

    async fn push_blob(&mut self, remote: &Remote, content: Vec<u8>) -> Result<Digest, Gone> {
        let digest = Digest::of(&content);
        let path = format!("/v2/{}/blobs/uploads/?digest={digest}", self.repository);
        let change = vec![(self.blob(&digest), Some(digest.clone()))];
        self.write(remote, (Method::POST, path, content), change, &[201]).await?;
        Ok(digest)
    }

    fn content(&mut self) -> Vec<u8> {
        self.serial += 1;
        let length =
            [0, 10, 5_000, 70_000, 1 << 20, 2_500_000][usize::try_from(self.draw(6)).unwrap()];
        [self.serial.to_le_bytes().to_vec(), noise(length, self.serial)].concat()
    }

    /// Pushes an image under a tag; every other one refers to an older image.
    async fn push_image(&mut self, remote: &Remote) -> Result<(), Gone> {
        self.push_blob(remote, b"{}".to_vec()).await?;
        let layer = self.content();
        let layer_digest = self.push_blob(remote, layer.clone()).await?;
        let subject = self.images.last().filter(|_| self.serial.is_multiple_of(2));
        let subject = subject.map(|(s, _)| Descriptor::of(media_type::OCI_MANIFEST, s));
        let manifest = image(&layer, subject.as_ref());
        let tag = format!("t{}", self.draw(TAGS));
        self.put(remote, &tag, manifest.clone()).await?;
        if let Some(subject) = subject {
            let list = format!("/v2/{}/referrers/{}", self.repository, subject.digest);
            let Ok(reply) = remote.try_send(Method::GET, &list, &[], "").await else {
                return Err(Gone);
            };
            let digest = Digest::of(&manifest).to_string();
            assert!(String::from_utf8_lossy(&reply.body).contains(&digest), "{list} {reply:?}");
        }
        self.images.push((manifest, layer_digest));
        Ok(())
    }

    async fn put(&mut self, remote: &Remote, tag: &str, manifest: Vec<u8>) -> Result<(), Gone> {
        let digest = Digest::of(&manifest);
        let change = vec![
            (self.manifest(&digest.to_string()), Some(digest.clone())),
            (self.manifest(tag), Some(digest)),
        ];
        self.write(remote, (Method::PUT, self.manifest(tag), manifest), change, &[201]).await
    }

    async fn move_tag(&mut self, remote: &Remote) -> Result<(), Gone> {
        let many = u64::try_from(self.images.len()).unwrap();
        let which = usize::try_from(self.draw(many)).unwrap();
        let (manifest, _) = self.images[which].clone();
        let tag = format!("t{}", self.draw(TAGS));
        self.put(remote, &tag, manifest).await
    }

    async fn delete_tag(&mut self, remote: &Remote) -> Result<(), Gone> {
        let tag = self.draw(TAGS);
        let path = self.manifest(&format!("t{tag}"));
        let change = vec![(path.clone(), None)];
        self.write(remote, (Method::DELETE, path, Vec::new()), change, &[202, 404]).await
    }

    async fn delete_image(&mut self, remote: &Remote) -> Result<(), Gone> {
        let (manifest, _layer) = self.images.remove(0);
        let digest = Digest::of(&manifest);
        let path = self.manifest(&digest.to_string());
        let gone = Some(digest);
        // Its tags go with it.
        let named = self.known.iter().filter(|(_, answer)| **answer == gone);
        let change = named.map(|(path, _)| (path.clone(), None)).collect();
        // A registry that died over the same has perhaps done it.
        self.write(remote, (Method::DELETE, path, Vec::new()), change, &[202, 404]).await
    }

    async fn push_and_delete_blob(&mut self, remote: &Remote) -> Result<(), Gone> {
        let content = match self.draw(2) {
            0 => self.content(),
            _ => noise(5_000, 1_000 + self.draw(SHARED)),
        };
        let digest = self.push_blob(remote, content).await?;
        let path = self.blob(&digest);
        let Ok(there) = remote.try_send(Method::GET, &path, &[], "").await else {
            return Err(Gone);
        };
        assert_eq!((there.status, Digest::of(&there.body)), (200, digest), "{path}");
        let change = vec![(path.clone(), None)];
        self.write(remote, (Method::DELETE, path, Vec::new()), change, &[202]).await
    }

    /// Asks for everything, and takes over what the registry made of what was under way.
    async fn check(&mut self, remote: &Remote) {
        for (path, new) in std::mem::take(&mut self.under_way) {
            let found = ask(remote, &path).await;
            let old = self.known.get(&path).cloned().flatten();
            assert!(found == old || found == new, "{path}: {found:?}, not {old:?} or {new:?}");
            self.known.insert(path, found);
        }
        for (path, expected) in &self.known {
            assert_eq!(ask(remote, path).await, *expected, "{path}");
        }
        // A manifest that is to be seen is whole: its layer is there too.
        for (manifest, layer) in &self.images {
            let path = self.manifest(&Digest::of(manifest).to_string());
            if self.known.get(&path).is_some_and(Option::is_some) {
                assert_eq!(ask(remote, &self.blob(layer)).await.as_ref(), Some(layer), "{path}");
            }
        }
        let known = &self.known;
        let repository = &self.repository;
        self.images.retain(|(manifest, _)| {
            let path = format!("/v2/{repository}/manifests/{}", Digest::of(manifest));
            known.get(&path).is_some_and(Option::is_some)
        });
    }
}

/// Returns the digest of what a path answers.
async fn ask(remote: &Remote, path: &str) -> Answer {
    let reply = remote.get(path).await;
    match reply.status {
        200 => Some(Digest::of(&reply.body)),
        404 => None,
        _ => panic!("{path} {reply:?}"),
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_kill_9_at_any_moment() {
    let rounds = std::env::var_os("KYBERNATE_SOAK_ROUNDS");
    let rounds = rounds.map_or(ROUNDS, |text| text.to_str().unwrap().parse().unwrap());
    let root = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut workers: Vec<Worker> = (0..WORKERS).map(Worker::new).collect();
    for round in 0..rounds {
        let process = Process::start(root.path(), &SERVE).await;
        let (remote, done) = (process.remote.clone(), Arc::new(AtomicUsize::new(0)));
        let working = join_all(workers.iter_mut().map(|worker| worker.work(&remote, &done)));
        let killing = async {
            // Whatever the others are doing when one of them is done with so many.
            let enough = async || done.load(Ordering::Relaxed) > 5 + round * 17 % 40;
            wait_until("something is done", enough).await;
            process.kill().await;
        };
        futures::future::join(working, killing).await;

        let process = Process::start(root.path(), &SERVE).await;
        // The new process writes there too, for moments; what the old one left would stay.
        let left = || std::fs::read_dir(root.path().join("tmp")).unwrap().count();
        wait_until("half-written records are swept", async || left() == 0).await;
        for worker in &mut workers {
            worker.check(&process.remote).await;
        }
        // Its end is as sudden, and loses nothing either.
        process.kill().await;
    }
    let acknowledged: u64 = workers.iter().map(|worker| worker.acknowledged).sum();
    eprintln!("{acknowledged} writes acknowledged, none lost in {} kills", 2 * rounds);
}
