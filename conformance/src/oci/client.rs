//! The HTTP client of the suite: one request, one whole reply, nothing hidden.

use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use kybernate_spec::chain;
use reqwest::header::{HeaderName, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Body, Method, Url};

use super::auth::{Auth, Credentials};
use super::check::{Stop, fail};
use super::reply::Reply;

/// How long one request may take: a registry that is slower than this hangs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What clients that know every manifest accept: without it registries of Docker's lineage show OCI
/// manifests to nobody ("Pulling manifests": the client SHOULD include an `Accept` header).
pub const EVERY_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, */*";

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL names no registry.
    #[error("{0:?} is not the URL of a registry such as http://127.0.0.1:5000")]
    Url(String),
    /// The HTTP client cannot be made.
    #[error("failed to set up the HTTP client")]
    Http(#[source] reqwest::Error),
}

/// Speaks to one registry.
#[derive(Debug)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    auth: Auth,
}

/// A request while it is put together.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// The whole URL.
    pub url: Url,
    headers: Vec<(HeaderName, String)>,
    body: Payload,
    anonymous: bool,
}

#[derive(Clone, Debug)]
enum Payload {
    None,
    /// Sent with its length.
    Whole(Bytes),
    /// Sent in pieces, without a length.
    Pieces(Vec<Bytes>),
}

impl Client {
    /// Makes a client for the registry at `url`; a missing scheme is `http://`.
    pub fn new(url: &str, credentials: Option<Credentials>) -> Result<Self, ClientError> {
        let wrong = || ClientError::Url(url.to_owned());
        let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let Ok(base) = Url::parse(&full) else { return Err(wrong()) };
        if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
            return Err(wrong());
        }
        let http = reqwest::Client::builder()
            .timeout(REQUEST_TIMEOUT)
            .tcp_nodelay(true)
            .build()
            .map_err(ClientError::Http)?;
        Ok(Self { http, base, auth: Auth::new(credentials) })
    }

    /// Returns the registry's URL.
    pub const fn base(&self) -> &Url {
        &self.base
    }

    /// Whether somebody's name and password were given.
    pub const fn has_credentials(&self) -> bool {
        self.auth.has_credentials()
    }

    /// Returns the URL of a path of the registry, which is sent as it is written.
    pub fn url(&self, path: &str) -> Result<Url, Stop> {
        let mut text = self.base.origin().ascii_serialization();
        text.push_str(path);
        match Url::parse(&text) {
            Ok(url) => Ok(url),
            Err(error) => fail(text, "a URL", error.to_string()),
        }
    }

    /// Sends a request and reads the reply; asks for a token when the registry wants one.
    pub async fn send(&self, request: &Request) -> Result<Reply, Stop> {
        let ours = request.url.origin() == self.base.origin() && !request.anonymous;
        let known = if ours { self.auth.known(request) } else { None };
        let reply = self.exchange(request, known).await?;
        let challenge = reply.headers.get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
        if let Some(challenge) = challenge.filter(|_| ours && reply.status == 401)
            && let Some(header) = self.auth.answer(&self.http, challenge, request).await
        {
            return self.exchange(request, Some(header)).await;
        }
        Ok(reply)
    }

    async fn exchange(
        &self,
        request: &Request,
        authorization: Option<HeaderValue>,
    ) -> Result<Reply, Stop> {
        let text = request.to_string();
        let mut builder = self.http.request(request.method.clone(), request.url.clone());
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if let Some(header) = authorization {
            builder = builder.header(reqwest::header::AUTHORIZATION, header);
        }
        builder = match &request.body {
            Payload::None => builder,
            Payload::Whole(content) => builder.body(content.clone()),
            Payload::Pieces(pieces) => {
                let pieces = pieces.clone().into_iter().map(Ok::<_, std::convert::Infallible>);
                builder.body(Body::wrap_stream(stream::iter(pieces)))
            }
        };
        let told = |error: reqwest::Error| chain(&error.without_url()).to_string();
        let response = match builder.send().await {
            Ok(response) => response,
            Err(error) => return fail(text, "a reply", told(error)),
        };
        let (url, status) = (response.url().clone(), response.status().as_u16());
        let headers = response.headers().clone();
        match response.bytes().await {
            Ok(body) => Ok(Reply { request: text, url, status, headers, body }),
            Err(error) => fail(text, "a whole reply", format!("{status}, then {}", told(error))),
        }
    }
}

impl Request {
    /// Begins a request without a body.
    pub const fn new(method: Method, url: Url) -> Self {
        Self { method, url, headers: Vec::new(), body: Payload::None, anonymous: false }
    }

    /// Sets a header.
    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((HeaderName::from_static(name), value.into()));
        self
    }

    /// Sends this content, with its length.
    #[must_use]
    pub fn body(mut self, content: impl Into<Bytes>) -> Self {
        self.body = Payload::Whole(content.into());
        self
    }

    /// Sends these pieces one after the other, without a length (chunked transfer coding).
    #[must_use]
    pub fn pieces(mut self, pieces: Vec<Bytes>) -> Self {
        self.body = Payload::Pieces(pieces);
        self
    }

    /// Adds a parameter to the query, as it is written.
    #[must_use]
    pub fn query(mut self, parameter: &str) -> Self {
        let query = match self.url.query() {
            Some(query) if !query.is_empty() => format!("{query}&{parameter}"),
            _ => parameter.to_owned(),
        };
        self.url.set_query(Some(&query));
        self
    }

    /// Sends no credentials.
    #[must_use]
    pub const fn anonymous(mut self) -> Self {
        self.anonymous = true;
        self
    }

    /// Returns the content that is sent with its length.
    pub(super) const fn content(&self) -> Option<&Bytes> {
        match &self.body {
            Payload::Whole(content) => Some(content),
            Payload::None | Payload::Pieces(_) => None,
        }
    }
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.url)?;
        for (name, value) in self.headers.iter().filter(|(_, value)| value != EVERY_MANIFEST) {
            write!(f, " [{name}: {value}]")?;
        }
        match &self.body {
            Payload::None => Ok(()),
            Payload::Whole(content) => write!(f, " with {} bytes", content.len()),
            Payload::Pieces(pieces) => write!(f, " with {} pieces and no length", pieces.len()),
        }
    }
}
