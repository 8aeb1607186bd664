//! Starts a registry on a free port and speaks HTTP to it.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failed step here is a failed test"
)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method};
use kybernate_registry::config::Config;
use kybernate_registry::server::Server;
use kybernate_registry::store::Store;
use kybernate_spec::{Algorithm, Descriptor, Digest, Hasher, media_type};
use reqwest::{Body, Client};
use tempfile::TempDir;
use tokio::net::TcpListener;

/// How long anything may take to come about.
const PATIENCE: Duration = Duration::from_secs(30);

/// A registry that serves as long as the value lives.
#[derive(Debug)]
pub(crate) struct TestRegistry {
    pub(crate) remote: Remote,
    server: Server,
    root: TempDir,
}

/// A registry somewhere, and a client for it.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) url: String,
    pub(crate) client: Client,
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl TestRegistry {
    pub(crate) async fn start() -> Self {
        // In memory where there is such a place: each store makes 512 directories, and the tests
        // of the program itself, which are about durability, run on the disk.
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        Self::start_in(tempfile::tempdir_in(base).unwrap()).await
    }

    /// Starts with a configuration file's text.
    pub(crate) async fn start_set(text: &str) -> Self {
        let config = Config::read(Path::new("test.toml"), text).unwrap();
        Self::start_with(&config, tempfile::tempdir().unwrap()).await
    }

    pub(crate) async fn start_in(root: TempDir) -> Self {
        Self::start_with(&Config::default(), root).await
    }

    pub(crate) async fn start_with(config: &Config, root: TempDir) -> Self {
        let path = root.path().join("store");
        let store = Store::open_within(&path, config.root_wait.0).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::start(config, store, listener).unwrap();
        let remote = Remote::new(format!("http://{}", server.address()));
        Self { remote, server, root }
    }

    /// Serves figures and health on an address of their own, and returns its URL.
    pub(crate) async fn serve_operations(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        self.server.serve_operations(listener);
        url
    }

    /// Stops, leaving the directory.
    pub(crate) async fn stop(self) -> TempDir {
        drop(self.remote);
        assert!(self.server.shut_down(PATIENCE).await);
        self.root
    }

    pub(crate) async fn restart(self) -> Self {
        Self::start_in(self.stop().await).await
    }

    pub(crate) fn is_indexed(&self) -> bool {
        self.server.is_indexed()
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.path().join("store").join(below)
    }

    /// Returns the file that holds content.
    pub(crate) fn blob_path(&self, digest: &Digest) -> PathBuf {
        blob_path(&self.root.path().join("store"), digest)
    }
}

impl std::ops::Deref for TestRegistry {
    type Target = Remote;

    fn deref(&self) -> &Remote {
        &self.remote
    }
}

impl Remote {
    pub(crate) fn new(url: String) -> Self {
        Self { url, client: Client::builder().no_proxy().build().unwrap() }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Reply {
        self.try_send(method, path, headers, body).await.unwrap()
    }

    pub(crate) async fn try_send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> reqwest::Result<Reply> {
        let url = if path.starts_with("http") { path.to_owned() } else { self.url.clone() + path };
        let mut request = self.client.request(method, url).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(Reply { status, headers, body: response.bytes().await? })
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, &[], "").await
    }

    pub(crate) async fn head(&self, path: &str) -> Reply {
        self.send(Method::HEAD, path, &[], "").await
    }

    pub(crate) async fn delete(&self, path: &str) -> Reply {
        self.send(Method::DELETE, path, &[], "").await
    }

    /// Begins an upload and returns its path.
    pub(crate) async fn begin(&self, repository: &str) -> String {
        let path = format!("/v2/{repository}/blobs/uploads/");
        let reply = self.send(Method::POST, &path, &[], "").await;
        assert_eq!(reply.status, 202, "{reply:?}");
        reply.header("location").to_owned()
    }

    /// Pushes a blob with POST and PUT.
    pub(crate) async fn push(&self, repository: &str, content: &[u8]) -> Digest {
        let digest = Digest::of(content);
        let upload = self.begin(repository).await;
        let reply = self.put(&upload, &digest, content.to_vec()).await;
        assert_eq!(reply.status, 201, "{reply:?}");
        digest
    }

    /// Ends an upload.
    pub(crate) async fn put(&self, upload: &str, digest: &Digest, body: impl Into<Body>) -> Reply {
        self.send(Method::PUT, &format!("{upload}?digest={digest}"), &[], body).await
    }

    /// Adds a chunk at `start`.
    pub(crate) async fn patch(&self, upload: &str, start: usize, chunk: &[u8]) -> Reply {
        let range = format!("{start}-{}", start + chunk.len() - 1);
        let headers = [("content-range", &*range)];
        self.send(Method::PATCH, upload, &headers, chunk.to_vec()).await
    }

    pub(crate) async fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        content: impl Into<Body>,
    ) -> Reply {
        let path = format!("/v2/{repository}/manifests/{reference}");
        self.send(Method::PUT, &path, &[("content-type", media_type)], content).await
    }

    /// Pushes an image of one layer under a tag and returns its descriptor.
    pub(crate) async fn push_image(
        &self,
        repository: &str,
        tag: &str,
        layer: &[u8],
        subject: Option<&Descriptor>,
    ) -> Descriptor {
        self.push(repository, b"{}").await;
        self.push(repository, layer).await;
        let content = image(layer, subject);
        let reply = self.put_manifest(repository, tag, media_type::OCI_MANIFEST, content.clone());
        let reply = reply.await;
        assert_eq!(reply.status, 201, "{reply:?}");
        Descriptor::of(media_type::OCI_MANIFEST, &content)
    }

    pub(crate) async fn blob(&self, repository: &str, digest: &Digest) -> Reply {
        self.get(&format!("/v2/{repository}/blobs/{digest}")).await
    }

    pub(crate) async fn head_blob(&self, repository: &str, digest: &Digest) -> u16 {
        self.head(&format!("/v2/{repository}/blobs/{digest}")).await.status
    }
}

impl Reply {
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> &str {
        match self.headers.get(name) {
            Some(value) => value.to_str().unwrap(),
            None => panic!("no {name} in {self:?}"),
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Holds the reply to a status and an error code of the specification.
    #[track_caller]
    pub(crate) fn refused(&self, status: u16, code: &str) {
        assert_eq!(self.status, status, "{self:?}");
        let body = self.json();
        assert_eq!(body["errors"][0]["code"], code, "{body}");
        assert!(!body["errors"][0]["message"].as_str().unwrap().is_empty(), "{body}");
    }
}

/// An image manifest with config `{}` and one layer.
pub(crate) fn image(layer: &[u8], subject: Option<&Descriptor>) -> Vec<u8> {
    let mut manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": Descriptor::of(media_type::OCI_EMPTY, b"{}"),
        "layers": [Descriptor::of(media_type::OCI_LAYER_TAR, layer)],
    });
    if let Some(subject) = subject {
        manifest["subject"] = serde_json::to_value(subject).unwrap();
    }
    serde_json::to_vec(&manifest).unwrap()
}

pub(crate) fn sha512(content: &[u8]) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha512);
    hasher.update(content);
    hasher.finish()
}

/// Bytes that do not repeat and are the same for the same seed.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(length)
    .collect()
}

pub(crate) fn blob_path(store: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.hex();
    store.join("blobs").join(digest.algorithm().name()).join(&hex[..2]).join(hex)
}

/// Waits until `condition` holds. Bounded.
pub(crate) async fn wait_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !condition().await {
        assert!(began.elapsed() < PATIENCE, "timed out waiting until {what}");
        #[expect(clippy::disallowed_methods, reason = "the one place that waits between looks")]
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
