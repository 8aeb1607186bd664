//! What a client is told when it has to prove who it is: the header `WWW-Authenticate`.

use http::HeaderMap;
use http::header::HOST;

/// The path of our own token server.
pub const TOKEN_PATH: &str = "/token";

/// Longest `Host` that is repeated to a client.
const HOST_LENGTH_MAX: usize = 255;

/// How clients are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Scheme {
    Basic,
    Bearer {
        /// Where tokens are to be had; our own token server when it is not set.
        realm: Option<String>,
    },
}

/// What a request tells about the way it came.
#[derive(Debug, Clone, Copy)]
pub struct Way<'a> {
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// Whether the connection is encrypted.
    pub encrypted: bool,
}

/// What is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack<'a> {
    /// Any credentials.
    Credentials,
    /// Credentials that are right.
    Validity,
    /// A token that is good for this scope.
    Scope(&'a str),
    /// A token that is good for this scope too.
    More(&'a str),
}

impl Scheme {
    /// Returns the header's value.
    pub(super) fn ask(&self, service: &str, way: Way<'_>, lack: Lack<'_>) -> String {
        let realm = match self {
            Self::Basic => return basic(service),
            Self::Bearer { realm: Some(realm) } => realm.clone(),
            Self::Bearer { realm: None } => own(way).unwrap_or_else(|| service.to_owned()),
        };
        let (error, scope) = match lack {
            Lack::Credentials => ("", ""),
            Lack::Validity => (",error=\"invalid_token\"", ""),
            Lack::Scope(scope) => ("", scope),
            Lack::More(scope) => (",error=\"insufficient_scope\"", scope),
        };
        let (open, close) = if scope.is_empty() { ("", "") } else { (",scope=\"", "\"") };
        format!("Bearer realm=\"{realm}\",service=\"{service}\"{open}{scope}{close}{error}")
    }
}

/// Asks for a name and a password.
pub(super) fn basic(service: &str) -> String {
    format!("Basic realm=\"{service}\", charset=\"UTF-8\"")
}

/// Returns the URL of our own token server as the client sees us.
fn own(way: Way<'_>) -> Option<String> {
    let host = way.headers.get(HOST)?.to_str().ok()?;
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if host.is_empty() || host.len() > HOST_LENGTH_MAX || !host.bytes().all(good) {
        return None;
    }
    // A proxy that ends TLS says so. A client that says so itself misleads nobody else.
    let forwarded = way.headers.get("x-forwarded-proto").is_some_and(|said| said == "https");
    let scheme = if way.encrypted || forwarded { "https" } else { "http" };
    Some(format!("{scheme}://{host}{TOKEN_PATH}"))
}
