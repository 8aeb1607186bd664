//! Manifests, tags and lists of referrers: small documents, read with a limit.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kybernate_spec::RepositoryName;
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use reqwest::header::{
    ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, IF_NONE_MATCH, LINK,
    RETRY_AFTER,
};
use reqwest::{RequestBuilder, Response, StatusCode, Url};

use super::patience::{CONNECT, persist, within_stall};
use super::scheme::Scheme;
use super::tls;
use super::tokens::{Access, Tokens};
use super::upload::next_url;
use crate::checked::length;
use crate::store::StoreErrorKind;
use crate::trace_parent::TraceParent;

/// What registries see of us in their logs.
pub(super) const USER_AGENT: &str = concat!("kybernate/", env!("CARGO_PKG_VERSION"));

/// How much of an error's text is read.
const ERROR_BYTES_MAX: u64 = 8 << 10;

/// A document and what its reply's headers say.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) content: Bytes,
    pub(super) media_type: Option<String>,
    /// Address of the next page.
    pub(super) next: Option<Url>,
    /// Whether `OCI-Filters-Applied` names the artifact type.
    pub(super) filtered: bool,
}

/// What a registry did that was asked to link a blob.
#[derive(Debug)]
pub(super) enum Mount {
    Linked,
    /// It has begun an upload instead, and may have said where.
    Upload(Option<Url>),
}

/// The part of a registry's API that is not about blobs.
pub(super) struct Documents {
    /// One for all that is asked. It has no limit on the time between two reads, which would count
    /// from the request on.
    http: reqwest::Client,
    base: Url,
    tokens: Tokens,
    /// Whether tokens may be had over plain HTTP from anywhere.
    plain_http: bool,
}

impl fmt::Debug for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Documents").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl Documents {
    /// Asks the registry whether it speaks TLS, and whether it wants credentials. What it says
    /// holds for all further requests.
    pub(super) async fn connect(
        scheme: Scheme,
        image: &oci_client::Reference,
        auth: RegistryAuth,
    ) -> Result<Self, StoreErrorKind> {
        let http = client().build()?;
        let (root, reply) = scheme.greet(&http, image.resolve_registry()).await?;
        let base = parse(&format!("{root}{}/", image.repository()))?;
        let wanted = if reply.status().is_success() { &HeaderMap::new() } else { reply.headers() };
        let tokens = Tokens::new(http.clone(), auth, image.repository().to_owned(), wanted);
        Ok(Self { http, base, tokens, plain_http: scheme == Scheme::Plain })
    }

    /// Reads the document at `path` of the repository.
    pub(super) async fn get(
        &self,
        path: &str,
        accept: &str,
        limit: u64,
    ) -> Result<Document, StoreErrorKind> {
        let url = self.address(path)?;
        self.get_url(&url, accept, limit).await
    }

    /// Reads the document at `url`, which a reply of the registry named.
    pub(super) async fn get_url(
        &self,
        url: &Url,
        accept: &str,
        limit: u64,
    ) -> Result<Document, StoreErrorKind> {
        persist(async || {
            let request = self.http.get(url.clone()).header(ACCEPT, accept);
            let reply = self.send(request, url, Access::Pull).await?;
            let headers = reply.headers().clone();
            let next = next_page(reply.url(), &headers);
            let content = read(reply, limit).await?;
            Ok(Document {
                content,
                media_type: text(&headers, CONTENT_TYPE.as_str()),
                next,
                filtered: text(&headers, "oci-filters-applied")
                    .is_some_and(|filters| filters.contains("artifactType")),
            })
        })
        .await
    }

    /// Stores a document. Returns whether the registry lists it under its subject by itself.
    pub(super) async fn put(
        &self,
        path: &str,
        media_type: &str,
        content: Bytes,
    ) -> Result<bool, StoreErrorKind> {
        let url = self.address(path)?;
        persist(async || {
            let request = self.put_request(&url, media_type, &content);
            let reply = self.send(request, &url, Access::Push).await?;
            Ok(reply.headers().contains_key("oci-subject"))
        })
        .await
    }

    /// Stores a document where none is to be (RFC 9110, 13.1.2). Returns false when there is one, which
    /// may be this, stored by a request whose reply was lost.
    pub(super) async fn put_new(
        &self,
        path: &str,
        media_type: &str,
        content: Bytes,
    ) -> Result<bool, StoreErrorKind> {
        let url = self.address(path)?;
        persist(async || {
            let request = self.put_request(&url, media_type, &content).header(IF_NONE_MATCH, "*");
            let reply = self.exchange(request, &url, Access::Push).await?;
            if reply.status() == StatusCode::PRECONDITION_FAILED {
                return Ok(false);
            }
            self.check(reply).await.map(|_reply| true)
        })
        .await
    }

    fn put_request(&self, url: &Url, media_type: &str, content: &Bytes) -> RequestBuilder {
        self.http.put(url.clone()).header(CONTENT_TYPE, media_type).body(content.clone())
    }

    /// Removes what is at `path`.
    pub(super) async fn delete(&self, path: &str) -> Result<(), StoreErrorKind> {
        let url = self.address(path)?;
        let again = AtomicBool::new(false);
        persist(async || {
            let again = again.swap(true, Ordering::Relaxed);
            let request = self.http.delete(url.clone());
            match self.send(request, &url, Access::Delete).await {
                // It was done, and the reply to that got lost.
                Err(StoreErrorKind::NotFound) if again => Ok(()),
                other => other.map(|_reply| ()),
            }
        })
        .await
    }

    /// Whether there is something at `path`.
    pub(super) async fn exists(&self, path: &str) -> Result<bool, StoreErrorKind> {
        let url = self.address(path)?;
        let found = persist(async || {
            let request = self.http.head(url.clone());
            self.send(request, &url, Access::Pull).await.map(|_reply| ())
        })
        .await;
        match found {
            Ok(()) => Ok(true),
            Err(StoreErrorKind::NotFound) => Ok(false),
            Err(kind) => Err(kind),
        }
    }

    /// Returns the address of `path`, which holds nothing a user wrote unparsed.
    pub(super) fn address(&self, path: &str) -> Result<Url, StoreErrorKind> {
        parse(&format!("{}{path}", self.base))
    }

    /// Returns the client for blobs: whoever uses it watches for progress.
    pub(super) const fn http(&self) -> &reqwest::Client {
        &self.http
    }

    /// Adds credentials to a request, when it goes to the registry itself: an upload may go on
    /// elsewhere, where they are nobody's business. On redirects the HTTP client sees to the same.
    pub(super) async fn sign(
        &self,
        request: RequestBuilder,
        url: &Url,
        access: Access,
    ) -> Result<RequestBuilder, StoreErrorKind> {
        if url.origin() != self.base.origin() {
            return Ok(request);
        }
        self.tokens.sign(request, access, self.plain_http).await
    }

    /// Returns the reply when it tells of success.
    pub(super) async fn check(&self, reply: Response) -> Result<Response, StoreErrorKind> {
        let status = reply.status();
        if status.is_success() {
            return Ok(reply);
        }
        if status == StatusCode::UNAUTHORIZED {
            self.tokens.forget().await;
        }
        // Uploads and redirects have secrets in their addresses, most often in the query.
        let url = if reply.url().path().contains("/blobs/uploads/") {
            format!("{}blobs/uploads/…", self.base)
        } else {
            let mut url = reply.url().clone();
            url.set_query(None);
            url.to_string()
        };
        Err(failure(reply, url).await)
    }

    /// Asks the registry to link a blob of its repository `from`.
    pub(super) async fn mount(
        &self,
        digest: &str,
        from: &RepositoryName,
    ) -> Result<Mount, StoreErrorKind> {
        let mut url = self.address("blobs/uploads/")?;
        url.query_pairs_mut().append_pair("mount", digest).append_pair("from", from.as_str());
        persist(async || {
            let request = self.http.post(url.clone()).header(CONTENT_LENGTH, 0);
            let reply = self.send(request, &url, Access::Mount(from.clone())).await?;
            let linked = reply.status() == StatusCode::CREATED;
            Ok(if linked { Mount::Linked } else { Mount::Upload(next_url(&reply)) })
        })
        .await
    }

    /// Sends a request to `url`, and returns the reply when it tells of success.
    async fn send(
        &self,
        request: RequestBuilder,
        url: &Url,
        access: Access,
    ) -> Result<Response, StoreErrorKind> {
        let reply = self.exchange(request, url, access).await?;
        self.check(reply).await
    }

    /// Sends a request to `url`; again when the registry says with a 401 that it wants another
    /// token, or one at all.
    async fn exchange(
        &self,
        request: RequestBuilder,
        url: &Url,
        access: Access,
    ) -> Result<Response, StoreErrorKind> {
        let again = request.try_clone();
        let is_old = self.tokens.holds(&access).await;
        let request = self.sign(request, url, access.clone()).await?;
        let reply = within_stall(request.send()).await?;
        let is_own = reply.url().origin() == self.base.origin();
        if reply.status() == StatusCode::UNAUTHORIZED
            && is_own
            && let Some(again) = again
        {
            let is_new = self.tokens.learn(reply.headers()).await;
            if is_new || is_old {
                self.tokens.forget().await;
                let request = self.sign(again, url, access).await?;
                return within_stall(request.send()).await;
            }
        }
        Ok(reply)
    }
}

/// Begins a client of registries.
pub(super) fn client() -> reqwest::ClientBuilder {
    // No `Referer`: whoever a registry redirects to need not know where from.
    let builder = reqwest::Client::builder().user_agent(USER_AGENT).referer(false);
    let builder = builder.default_headers(traced()).connect_timeout(CONNECT);
    match tls::config() {
        Some(config) => builder.tls_backend_preconfigured(config),
        // It tries again, and says what is wrong.
        None => builder,
    }
}

/// Returns what a reply that tells of no success means. `url` is shown as its address.
pub(super) async fn failure(reply: Response, url: String) -> StoreErrorKind {
    let (status, after) = (reply.status(), retry_after(reply.headers()));
    // The status tells enough when the text is too long or cut off.
    let message = read(reply, ERROR_BYTES_MAX).await.unwrap_or_default();
    let message = String::from_utf8_lossy(&message).into_owned();
    let answer = OciDistributionError::ServerError { code: status.as_u16(), url, message };
    match (StoreErrorKind::from(answer), after) {
        (StoreErrorKind::Registry(answer), Some(after))
            if matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            ) =>
        {
            StoreErrorKind::Busy { after, answer }
        }
        (kind, _) => kind,
    }
}

/// Reads a reply's body, never more than `limit` bytes of it.
pub(super) async fn read(mut reply: Response, limit: u64) -> Result<Bytes, StoreErrorKind> {
    let mut content = Vec::new();
    let mut size = 0_u64;
    if let Some(announced) = reply.content_length().filter(|announced| *announced > limit) {
        return Err(StoreErrorKind::TooLarge { size: announced, limit });
    }
    while let Some(bytes) = within_stall(reply.chunk()).await? {
        size = size.saturating_add(length(&bytes));
        if size > limit {
            return Err(StoreErrorKind::TooLarge { size, limit });
        }
        content.extend_from_slice(&bytes);
    }
    Ok(content.into())
}

/// Returns the headers that say which trace a request belongs to, where it belongs to one.
fn traced() -> HeaderMap {
    let parent = TraceParent::current();
    let value = parent.and_then(|parent| HeaderValue::from_str(parent.as_str()).ok());
    value.map(|value| (HeaderName::from_static(TraceParent::HEADER), value)).into_iter().collect()
}

/// Returns the address of the next page (RFC 8288, `rel="next"`), on the same host only: the
/// request for it carries credentials.
fn next_page(here: &Url, headers: &HeaderMap) -> Option<Url> {
    let link = text(headers, LINK.as_str())?;
    let (address, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
    let next = parameters.contains("rel=\"next\"") || parameters.contains("rel=next");
    let url = here.join(address).ok()?;
    (next && url.origin() == here.origin()).then_some(url)
}

pub(super) fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(ToOwned::to_owned)
}

/// Reads `Retry-After`: seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = text(headers, RETRY_AFTER.as_str())?;
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text.trim()).ok()?;
    let left = then.as_second().saturating_sub(jiff::Timestamp::now().as_second());
    Some(Duration::from_secs(u64::try_from(left).unwrap_or(0)))
}

pub(super) fn parse(url: &str) -> Result<Url, StoreErrorKind> {
    Url::parse(url)
        .map_err(|error| OciDistributionError::UrlParseError(format!("{url:?}: {error}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_to_ask_again_is_seconds_or_a_date() {
        let after = |value: &str| {
            retry_after(&HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]))
        };
        assert_eq!(after("7"), Some(Duration::from_secs(7)));
        assert_eq!(after("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        let later = after("Fri, 06 Nov 2195 08:49:37 GMT").unwrap();
        assert!(later > Duration::from_hours(24), "{later:?}");
        assert_eq!(after("soon"), None);
    }

    #[test]
    fn a_next_page_on_another_host_is_not_followed() {
        let here = Url::parse("http://localhost:5000/v2/a/referrers/sha256:0").unwrap();
        let link = |value: &'static str| {
            next_page(&here, &HeaderMap::from_iter([(LINK, value.parse().unwrap())]))
        };
        let next = link("</v2/a/referrers/sha256:0?last=1>; rel=\"next\"").unwrap();
        assert_eq!(next.as_str(), "http://localhost:5000/v2/a/referrers/sha256:0?last=1");
        assert_eq!(link("<http://elsewhere/>; rel=\"next\""), None);
        assert_eq!(link("</v2/>; rel=\"prev\""), None);
    }
}
