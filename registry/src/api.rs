//! Every endpoint, on one screen.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{
    AUTHORIZATION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, CONTENT_TYPE, EXPECT, HOST, USER_AGENT,
    X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use kybernate_spec::{Digest, RepositoryName};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument as _;
use tracing::field::Empty;

use crate::access::Caller;
use crate::access::challenge::{Lack, Way};
use crate::access::limit::{Client, Place};
use crate::access::subject::{CertificateNames, Identity};
use crate::app::AppState;
use crate::condition;
use crate::config::Config;
use crate::error::ApiError;
use crate::notify::Origin;
use crate::places::until_sent;
use crate::request_id::{REQUEST_ID, RequestId};
use crate::route::Route;
use crate::trace::{self, RequestSpan};
use crate::upload::next_frame;

use self::seen::Seen;

mod blob;
mod gate;
mod health;
mod list;
mod manifest;
mod multipart;
mod seen;
mod token;
mod upload;

use self::gate::Entry;

/// How much of a refused body is read so that the client gets to see why it was refused: closing
/// with bytes unread resets the connection, which destroys the reply on its way.
const LINGER_BYTES_MAX: u64 = 1 << 30;
/// How long that is done.
const LINGER_TIME_MAX: Duration = Duration::from_secs(30);

/// No script, no form, nothing of this origin's or of others'.
const NO_PAGE: &str = "sandbox; default-src 'none'";
/// Of a header that others are told, at most so many letters.
const TOLD_MAX: usize = 256;

const API_VERSION: HeaderName = HeaderName::from_static("docker-distribution-api-version");
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// Who is at the other end of a connection.
#[derive(Debug)]
pub struct Peer {
    /// Where it connects from.
    pub address: SocketAddr,
    /// Whether the connection is encrypted.
    pub encrypted: bool,
    /// The certificate that it was made with.
    pub certificate: Option<Arc<CertificateNames>>,
}

/// Builds the HTTP service of one connection.
pub fn router(app: AppState, peer: Peer) -> Router {
    serve(Served { app, peer: Arc::new(peer), door: Door::Registry })
}

/// Builds the HTTP service of a connection to the address that has only figures and health.
pub fn operations(app: AppState, peer: Peer) -> Router {
    serve(Served { app, peer: Arc::new(peer), door: Door::Operations })
}

fn serve(served: Served) -> Router {
    Router::new()
        // Repository names hold '/', so the path is split by `Route` and not by the router.
        .fallback(dispatch)
        .layer(CatchPanicLayer::custom(|_panic| internal_error()))
        .with_state(served)
}

#[derive(Debug, Clone)]
struct Served {
    app: AppState,
    peer: Arc<Peer>,
    door: Door,
}

/// Which address a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    Registry,
    Operations,
}

impl Door {
    fn shows(self, route: &Route<'_>, config: &Config) -> bool {
        match route {
            Route::Live | Route::Ready | Route::Started => true,
            Route::Metrics => (self == Self::Operations) == config.metrics.listen.is_some(),
            _ => self == Self::Registry,
        }
    }
}

/// What a handler is given.
#[derive(Clone, Copy)]
struct Call<'a> {
    app: &'a AppState,
    parts: &'a Parts,
    peer: &'a Peer,
    caller: &'a Caller,
    id: &'a RequestId,
}

async fn dispatch(State(served): State<Served>, request: Request) -> Response {
    let id = RequestId::of(request.headers());
    // Above every level that a filter may choose: the lines inside carry the id.
    let span = tracing::error_span!("request", request.id = id.as_str(), trace_id = Empty);
    let Some(traced) = RequestSpan::begin(&request, &served.peer, &id) else {
        return respond(served, request, id).instrument(span).await;
    };
    if let Some(trace) = traced.trace_id() {
        span.record("trace_id", trace);
    }
    // Boxed, so that where nothing is traced no room is carried along for it.
    Box::pin(traced.around(respond(served, request, id)).instrument(span)).await
}

async fn respond(served: Served, request: Request, id: RequestId) -> Response {
    let Served { app, peer, door } = served;
    let seen = Seen::begin(&app);
    let (parts, body) = request.into_parts();
    let route = Route::of(parts.uri.path()).filter(|route| door.shows(route, &app.config));
    let mut body = Some(body);
    let caller = match &route {
        None | Some(Route::TokenKeys) => Caller::Anyone,
        Some(route) if route.is_for_operators() => Caller::Anyone,
        Some(_) => {
            let (certificate, address) = (peer.certificate.as_ref(), peer.address.ip());
            let identifying = app.access.identify(&parts.headers, certificate, address);
            if trace::is_on() && parts.headers.contains_key(AUTHORIZATION) {
                Box::pin(trace::part_of("access.identify", identifying)).await
            } else {
                identifying.await
            }
        }
    };
    let call = Call { app: &app, parts: &parts, peer: &peer, caller: &caller, id: &id };
    let (answer, place) = match enter(call, route.as_ref()) {
        Ok(place) => (admit(call, route.as_ref(), &mut body).await, place),
        Err(error) => (Err(error), None),
    };
    let answer = match answer {
        Err(error) if error.may_be_of_no_store() => Err(doubted(call, error).await),
        answer => answer,
    };
    let failed = answer.is_err();
    let response = answer.unwrap_or_else(|error| error.respond(&id));
    let mut response = condition::apply(&parts, response);
    if let Some(body) = body.filter(|_| failed && !parts.headers.contains_key(EXPECT)) {
        linger(&app, body);
    }
    let headers = response.headers_mut();
    headers.insert(API_VERSION, HeaderValue::from_static("registry/2.0"));
    headers.insert(REQUEST_ID, id.header());
    // What is served is whatever was pushed: no browser is to make a page of it.
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(NO_PAGE));
    let client = caller.identity().and_then(Identity::name);
    seen.end(&parts, route.as_ref(), client.as_deref(), response.status());
    match place {
        // Until all is sent: a pull that is still going on is a request in progress.
        Some(place) => until_sent(place, response),
        None => response,
    }
}

/// Returns `error` unless the store has gone: then nobody is told that something is not in it.
async fn doubted(call: Call<'_>, error: ApiError) -> ApiError {
    match call.reach().await {
        Err(gone) => gone,
        Ok(()) => error,
    }
}

/// Counts a request. Those that no caller is known for are the machine's own.
fn enter(call: Call<'_>, route: Option<&Route<'_>>) -> Result<Option<Place>, ApiError> {
    let Some(limits) = &call.app.limits else { return Ok(None) };
    if route.is_some_and(Route::is_for_operators) {
        return Ok(None);
    }
    let name = call.caller.identity().and_then(Identity::name);
    let client = name.map_or_else(|| Client::of(call.peer.address.ip()), Client::Name);
    let place = limits.enter(client, Instant::now()).map_err(|again| ApiError::Busy {
        why: "you ask for too much at once",
        retry_after: again.seconds(),
    });
    place.map(Some)
}

async fn admit(
    call: Call<'_>,
    route: Option<&Route<'_>>,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let Some(route) = route else { return Err(ApiError::NoEndpoint) };
    match gate::enter(call, route).await? {
        Entry::Open => answer(call, route, body).await,
        Entry::Hidden(route) => answer(call, &route, body).await,
    }
}

async fn answer(
    call: Call<'_>,
    route: &Route<'_>,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    match (route, &call.parts.method) {
        (Route::Live, &Method::GET | &Method::HEAD) => Ok(health::live()),
        (Route::Ready, &Method::GET | &Method::HEAD) => Ok(health::ready(call).await),
        (Route::Started, &Method::GET | &Method::HEAD) => Ok(health::started()),
        (Route::Metrics, &Method::GET | &Method::HEAD) => Ok(health::metrics(call)),
        (Route::Base, &Method::GET | &Method::HEAD) => Ok(base()),
        (Route::Token, &Method::GET | &Method::POST) => token::issue(call, body).await,
        (Route::TokenKeys, &Method::GET) => token::keys(call),
        (Route::Catalog, &Method::GET) => list::catalog(call).await,
        (Route::Tags(name), &Method::GET) => list::tags(call, name).await,
        (Route::Referrers(name, subject), &Method::GET) => {
            list::referrers(call, name, subject).await
        }
        (Route::Blob(name, digest), &Method::GET) => blob::get(call, name, digest).await,
        (Route::Blob(name, digest), &Method::HEAD) => blob::head(call, name, digest).await,
        (Route::Blob(name, digest), &Method::DELETE) => blob::delete(call, name, digest).await,
        (Route::Uploads(name), &Method::POST) => upload::post(call, name, body).await,
        (Route::Upload(name, id), &Method::GET) => upload::get(call, name, id).await,
        (Route::Upload(name, id), &Method::PATCH) => upload::patch(call, name, id, body).await,
        (Route::Upload(name, id), &Method::PUT) => upload::put(call, name, id, body).await,
        (Route::Upload(name, id), &Method::DELETE) => upload::delete(call, name, id).await,
        (Route::Manifest(name, reference), &Method::GET) => {
            manifest::get(call, name, reference).await
        }
        (Route::Manifest(name, reference), &Method::HEAD) => {
            manifest::head(call, name, reference).await
        }
        (Route::Manifest(name, reference), &Method::PUT) => {
            manifest::put(call, name, reference, body).await
        }
        (Route::Manifest(name, reference), &Method::DELETE) => {
            manifest::delete(call, name, reference).await
        }
        (Route::Live | Route::Ready | Route::Started | Route::Metrics | Route::Base, _) => {
            Err(ApiError::Method("GET, HEAD"))
        }
        (Route::Token, _) => Err(ApiError::Method("GET, POST")),
        (Route::TokenKeys | Route::Catalog | Route::Tags(_) | Route::Referrers(..), _) => {
            Err(ApiError::Method("GET"))
        }
        (Route::Blob(..), _) => Err(ApiError::Method("GET, HEAD, DELETE")),
        (Route::Uploads(_), _) => Err(ApiError::Method("POST")),
        (Route::Upload(..), _) => Err(ApiError::Method("GET, PATCH, PUT, DELETE")),
        (Route::Manifest(..), _) => Err(ApiError::Method("GET, HEAD, PUT, DELETE")),
    }
}

fn base() -> Response {
    ([(CONTENT_TYPE, "application/json")], "{}").into_response()
}

fn internal_error() -> Response {
    let body = r#"{"errors":[{"code":"UNKNOWN","message":"internal error"}]}"#;
    let json = [(CONTENT_TYPE, "application/json")];
    (StatusCode::INTERNAL_SERVER_ERROR, json, body).into_response()
}

/// Goes on reading a refused body for a while, beside the reply.
fn linger(app: &AppState, mut body: Body) {
    app.tasks.spawn(|cancel| async move {
        let reading = async {
            let mut read = 0;
            while read < LINGER_BYTES_MAX
                && let Ok(Some(bytes)) = next_frame(&mut body).await
            {
                read += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            }
        };
        tokio::select! {
            _too_long_or_done = tokio::time::timeout(LINGER_TIME_MAX, reading) => {}
            () = cancel.cancelled() => {}
        }
    });
}

impl<'a> Call<'a> {
    fn header(&self, name: HeaderName) -> Option<&'a str> {
        self.parts.headers.get(name)?.to_str().ok()
    }

    /// Returns how to ask the client for what it lacks; nothing when there is nothing to bring.
    fn ask(&self, lack: Lack<'_>) -> Option<String> {
        let way = Way { headers: &self.parts.headers, encrypted: self.peer.encrypted };
        self.app.access.ask(way, lack)
    }

    /// Returns what others are told of where a change comes from.
    fn origin(&self) -> Origin {
        // Kept for as long as an endpoint is away.
        let text = |name| self.header(name).map(|text| text.chars().take(TOLD_MAX).collect());
        let forwarded = self.parts.headers.get("x-forwarded-proto");
        let encrypted = self.peer.encrypted || forwarded.is_some_and(|said| said == "https");
        Origin {
            id: self.id.as_str().to_owned(),
            addr: Some(self.peer.address.to_string()),
            host: text(HOST),
            method: self.parts.method.to_string(),
            useragent: text(USER_AGENT).unwrap_or_default(),
            actor: self.caller.identity().and_then(Identity::name),
            scheme: if encrypted { "https" } else { "http" },
        }
    }

    /// Returns the length of the body when the client says it.
    fn content_length(&self) -> Option<u64> {
        self.header(CONTENT_LENGTH)?.parse().ok()
    }

    /// Returns the query's parameters in order.
    fn query(&self) -> Result<Vec<(String, String)>, ApiError> {
        match Query::try_from_uri(&self.parts.uri) {
            Ok(Query(parameters)) => Ok(parameters),
            Err(error) => {
                tracing::debug!(%error, "a query could not be read");
                Err(ApiError::Malformed("query"))
            }
        }
    }

    /// Runs work on the store that only reads.
    async fn look<T: Send + 'static>(
        &self,
        work: impl Fn(&Arc<crate::store::Store>) -> Result<T, crate::store::StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        Ok(crate::app::looking(&self.app.store, work).await?)
    }

    /// Fails when the store has gone. Asked where something is not found, it costs those nothing who
    /// find it.
    async fn reach(&self) -> Result<(), ApiError> {
        let reached = crate::app::looking(&self.app.store, |store| store.probe()).await;
        reached.map_err(ApiError::Unreachable)
    }

    /// Runs work on the store where blocking is allowed.
    async fn on_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<crate::store::Store>) -> Result<T, crate::store::StoreError>
        + Send
        + 'static,
    ) -> Result<T, ApiError> {
        Ok(crate::app::blocking(&self.app.store, work).await?)
    }
}

/// Returns a query's parameter.
fn parameter<'a>(query: &'a [(String, String)], name: &str) -> Option<&'a str> {
    query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

fn repository(name: &str) -> Result<RepositoryName, ApiError> {
    name.parse().map_err(ApiError::Name)
}

fn digest(text: &str) -> Result<Digest, ApiError> {
    text.parse().map_err(ApiError::Digest)
}
