//! A repository that one check has for itself, and what is done in it again and again.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kybernate_spec::{Algorithm, Descriptor, Digest, media_type};
use reqwest::{Method, Url};
use serde_json::{Value, json};

use super::check::{Edition, Stop, fail};
use super::client::{Client, EVERY_MANIFEST, Request};
use super::content::{self, Doc};
use super::reply::{Reply, digest_of};

/// A repository of the registry under test. What is pushed through it is deleted by
/// [`Repo::clean`], as far as the registry deletes.
#[derive(Clone, Debug)]
pub struct Repo {
    client: Arc<Client>,
    name: Arc<str>,
    edition: Edition,
    // Held to add or take a line, never across an `.await`, hence not a tokio mutex.
    made: Arc<Mutex<Made>>,
}

/// What is to be deleted in the end.
#[derive(Debug, Default)]
struct Made {
    uploads: Vec<Url>,
    manifests: Vec<String>,
    blobs: Vec<String>,
}

/// A request in a repository, while it is put together.
#[derive(Clone, Debug)]
pub struct Call {
    repo: Repo,
    request: Result<Request, Stop>,
}

/// An image as it was pushed.
#[derive(Clone, Debug)]
pub struct Image {
    /// The manifest.
    pub doc: Doc,
    /// Its digest.
    pub digest: Digest,
    /// The config.
    pub config: Descriptor,
    /// The only layer.
    pub layer: Descriptor,
}

impl Repo {
    /// Returns a repository; it exists once something is pushed to it.
    pub fn new(client: Arc<Client>, name: &str, edition: Edition) -> Self {
        Self { client, name: name.into(), edition, made: Arc::default() }
    }

    /// Returns a second repository of the same check.
    #[must_use]
    pub fn beside(&self, suffix: &str) -> Self {
        self.named(&format!("{}-{suffix}", self.name))
    }

    /// Returns a repository of the same check that has any name.
    #[must_use]
    pub fn named(&self, name: &str) -> Self {
        Self { name: name.into(), ..self.clone() }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the text that is tested against.
    pub const fn edition(&self) -> Edition {
        self.edition
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns `length` bytes that only this repository has.
    pub fn bytes(&self, label: &str, length: usize) -> Bytes {
        content::bytes(&format!("{}/{label}", self.name), length)
    }

    /// Begins a request to a path below the repository.
    pub fn call(&self, method: Method, path: &str) -> Call {
        self.root(method, &format!("/v2/{}/{path}", self.name))
    }

    /// Begins a request to a path of the registry.
    pub fn root(&self, method: Method, path: &str) -> Call {
        let request = self.client.url(path).map(|url| request(method, url));
        Call { repo: self.clone(), request }
    }

    /// Begins a request to a URL that the registry has named.
    pub fn at(&self, method: Method, url: &Url) -> Call {
        Call { repo: self.clone(), request: Ok(request(method, url.clone())) }
    }

    /// Begins a GET below the repository.
    pub fn get(&self, path: &str) -> Call {
        self.call(Method::GET, path)
    }

    /// Begins a HEAD below the repository.
    pub fn head(&self, path: &str) -> Call {
        self.call(Method::HEAD, path)
    }

    /// Begins a DELETE below the repository.
    pub fn delete(&self, path: &str) -> Call {
        self.call(Method::DELETE, path)
    }

    /// Begins a POST that begins an upload; `query` is appended as it is.
    pub fn post(&self, query: &str) -> Call {
        self.call(Method::POST, &format!("blobs/uploads/{query}")).body(Bytes::new())
    }

    /// Begins a PUT of a manifest.
    pub fn put(&self, reference: &str, doc: &Doc) -> Call {
        self.call(Method::PUT, &format!("manifests/{reference}"))
            .header("content-type", &doc.media_type)
            .body(doc.content.clone())
    }

    /// Begins the PUT that ends an upload with the whole content.
    pub fn finish(&self, session: &Url, digest: &str, content: impl Into<Bytes>) -> Call {
        self.at(Method::PUT, session)
            .query(&format!("digest={digest}"))
            .header("content-type", "application/octet-stream")
            .body(content)
    }

    /// Begins a PATCH that adds a chunk which begins at `start`.
    pub fn chunk(&self, session: &Url, start: usize, content: impl Into<Bytes>) -> Call {
        let content = content.into();
        let range = format!("{start}-{}", (start + content.len()).saturating_sub(1));
        self.at(Method::PATCH, session)
            .header("content-type", "application/octet-stream")
            .header("content-range", range)
            .body(content)
    }

    /// Begins an upload and returns its location.
    pub async fn begin(&self) -> Result<Url, Stop> {
        self.post("").send().await?.is(202)?.location()
    }

    /// Pushes a blob by POST and PUT and returns its digest.
    pub async fn push_blob(&self, content: &Bytes) -> Result<Digest, Stop> {
        self.push_blob_as(Algorithm::Sha256, content).await
    }

    /// Pushes a blob under a digest of this algorithm.
    pub async fn push_blob_as(
        &self,
        algorithm: Algorithm,
        content: &Bytes,
    ) -> Result<Digest, Stop> {
        let digest = digest_of(algorithm, content);
        let session = self.begin().await?;
        self.finish(&session, &digest.to_string(), content.clone()).send().await?.is(201)?;
        Ok(digest)
    }

    /// Pushes a blob and returns its descriptor.
    pub async fn push_as(&self, media_type: &str, content: &Bytes) -> Result<Descriptor, Stop> {
        self.push_blob(content).await?;
        Ok(Descriptor::of(media_type, content))
    }

    /// Pushes a config and a layer and makes an image of them, which is not pushed.
    pub async fn image_with(&self, label: &str, more: Value) -> Result<Image, Stop> {
        let config = json!({ "architecture": "amd64", "os": "linux", "author": label });
        let config = self.push_as(media_type::OCI_CONFIG, &config.to_string().into()).await?;
        let layer = self.bytes(label, 512);
        let layer = self.push_as(media_type::OCI_LAYER_TAR, &layer).await?;
        let doc = Doc::image(&config, std::slice::from_ref(&layer), more);
        Ok(Image { digest: doc.digest(), doc, config, layer })
    }

    /// Pushes an image under a tag.
    pub async fn push_image(&self, tag: &str) -> Result<Image, Stop> {
        let image = self.image_with(tag, json!({ "annotations": { "test": tag } })).await?;
        self.put(tag, &image.doc).send().await?.is(201)?;
        Ok(image)
    }

    /// Pushes several tags on one image.
    pub async fn push_tags(&self, tags: &[&str]) -> Result<Image, Stop> {
        let image = self.image_with("tags", json!({})).await?;
        for tag in tags {
            self.put(tag, &image.doc).send().await?.is(201)?;
        }
        Ok(image)
    }

    /// Deletes everything that was pushed, as far as the registry deletes.
    pub async fn clean(&self) {
        let Ok(mut made) = self.made.lock().map(|mut made| std::mem::take(&mut *made)) else {
            return;
        };
        made.manifests.sort();
        made.manifests.dedup();
        made.blobs.sort();
        made.blobs.dedup();
        let uploads = made.uploads.into_iter().map(Ok);
        let paths = made.manifests.iter().chain(&made.blobs).map(|path| self.client.url(path));
        for url in uploads.chain(paths).flatten() {
            // A registry that does not delete keeps them.
            drop(self.client.send(&Request::new(Method::DELETE, url)).await);
        }
    }

    /// Notes what a request has made.
    fn note(&self, request: &Request, reply: &Reply) {
        let Ok(mut made) = self.made.lock() else { return };
        let path = request.url.path();
        let pairs: Vec<_> = request.url.query_pairs().collect();
        let parameter = |name| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value);
        match (&request.method, reply.status) {
            (&Method::POST, 202) => made.uploads.extend(reply.location()),
            (&Method::PUT, 200..300) if path.contains("/manifests/") => {
                let content = request.content().map(Bytes::as_ref);
                let digest = Digest::of(content.unwrap_or_default());
                made.manifests.push(format!("/v2/{}/manifests/{digest}", self.name));
            }
            (&Method::POST | &Method::PUT, 201) => {
                made.uploads.retain(|upload| upload.path() != path);
                let digest = parameter("digest").or_else(|| parameter("mount"));
                made.blobs.extend(digest.map(|digest| format!("/v2/{}/blobs/{digest}", self.name)));
            }
            _ => {}
        }
    }
}

impl Call {
    /// Sets a header.
    #[must_use]
    pub fn header(self, name: &'static str, value: impl Into<String>) -> Self {
        self.with(|request| request.header(name, value))
    }

    /// Sends this content, with its length.
    #[must_use]
    pub fn body(self, content: impl Into<Bytes>) -> Self {
        self.with(|request| request.body(content))
    }

    /// Sends these pieces, without a length.
    #[must_use]
    pub fn pieces(self, pieces: Vec<Bytes>) -> Self {
        self.with(|request| request.pieces(pieces))
    }

    /// Adds a parameter to the query, as it is written.
    #[must_use]
    pub fn query(self, parameter: &str) -> Self {
        self.with(|request| request.query(parameter))
    }

    /// Sends no credentials.
    #[must_use]
    pub fn anonymous(self) -> Self {
        self.with(Request::anonymous)
    }

    /// Sends it and reads the whole reply.
    pub async fn send(self) -> Result<Reply, Stop> {
        let request = self.request?;
        let reply = self.repo.client.send(&request).await?;
        self.repo.note(&request, &reply);
        Ok(reply)
    }

    fn with(mut self, change: impl FnOnce(Request) -> Request) -> Self {
        self.request = self.request.map(change);
        self
    }
}

/// Begins a request; one for a manifest accepts every kind.
fn request(method: Method, url: Url) -> Request {
    let pulls = matches!(method, Method::GET | Method::HEAD) && url.path().contains("/manifests/");
    let request = Request::new(method, url);
    if pulls { request.header("accept", EVERY_MANIFEST) } else { request }
}

/// Ends the check when a list is not what it should be.
pub fn same<T: PartialEq + std::fmt::Debug>(
    reply: &Reply,
    found: &T,
    wanted: &T,
) -> Result<(), Stop> {
    if found == wanted {
        return Ok(());
    }
    fail(&reply.request, format!("{wanted:?}"), format!("{found:?}"))
}
