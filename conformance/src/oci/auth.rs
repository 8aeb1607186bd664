//! Who we are: nobody, Basic, or a bearer token that the registry's challenge leads to.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;

use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Method, Url};
use serde_json::Value;

use super::client::Request;

/// A name and a password.
#[derive(Clone)]
pub struct Credentials {
    /// The name.
    pub username: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Answers challenges and remembers what worked.
pub(super) struct Auth {
    credentials: Option<Credentials>,
    // Held for a map look-up only, never across an `.await`, hence not a tokio mutex.
    known: Mutex<HashMap<String, HeaderValue>>,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl Auth {
    pub(super) fn new(credentials: Option<Credentials>) -> Self {
        Self { credentials, known: Mutex::default() }
    }

    pub(super) const fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// Returns what a request of this kind was answered with before.
    pub(super) fn known(&self, request: &Request) -> Option<HeaderValue> {
        self.known.lock().ok()?.get(&kind(request)).cloned()
    }

    /// Returns what a challenge wants to see, if we can have it.
    pub(super) async fn answer(
        &self,
        http: &reqwest::Client,
        challenge: &str,
        request: &Request,
    ) -> Option<HeaderValue> {
        let (scheme, parameters) = parse(challenge)?;
        let header = if scheme.eq_ignore_ascii_case("bearer") {
            let token = self.token(http, &parameters).await?;
            HeaderValue::try_from(format!("Bearer {token}")).ok()?
        } else if scheme.eq_ignore_ascii_case("basic") {
            self.basic(http)?
        } else {
            return None;
        };
        if let Ok(mut known) = self.known.lock() {
            known.insert(kind(request), header.clone());
        }
        Some(header)
    }

    /// Returns the header of Basic, as the client library makes it.
    fn basic(&self, http: &reqwest::Client) -> Option<HeaderValue> {
        let Credentials { username, password } = self.credentials.as_ref()?;
        let request = http.get("http://localhost/").basic_auth(username, Some(password));
        request.build().ok()?.headers().get(AUTHORIZATION).cloned()
    }

    /// Asks the realm for a token (the Docker token protocol, "Requesting a Token").
    async fn token(
        &self,
        http: &reqwest::Client,
        parameters: &HashMap<String, String>,
    ) -> Option<String> {
        let mut realm = Url::parse(parameters.get("realm")?).ok()?;
        for name in ["service", "scope"] {
            if let Some(value) = parameters.get(name) {
                realm.query_pairs_mut().append_pair(name, value);
            }
        }
        let mut request = http.request(Method::GET, realm);
        if let Some(Credentials { username, password }) = &self.credentials {
            request = request.basic_auth(username, Some(password));
        }
        let body = request.send().await.ok()?.bytes().await.ok()?;
        let body: Value = serde_json::from_slice(&body).ok()?;
        let token = body.get("token").or_else(|| body.get("access_token"))?;
        token.as_str().map(str::to_owned)
    }
}

/// What a token is for: repository and method.
fn kind(request: &Request) -> String {
    let path = request.url.path();
    let parts = ["/blobs/", "/manifests/", "/tags/", "/referrers/"];
    let cut = parts.iter().filter_map(|part| path.find(part)).min().unwrap_or(path.len());
    format!("{} {}", request.method, path.get(..cut).unwrap_or(path))
}

/// Reads `Scheme name="value", …` (RFC 9110, 11.6.1).
fn parse(challenge: &str) -> Option<(&str, HashMap<String, String>)> {
    let (scheme, mut rest) = challenge.trim().split_once(' ').unwrap_or((challenge.trim(), ""));
    let mut parameters = HashMap::new();
    while let Some((name, after)) = rest.split_once('=') {
        let (value, left) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_once(',').unwrap_or((after, "")),
        };
        let name = name.trim_matches([' ', ',']).to_ascii_lowercase();
        parameters.insert(name, value.trim().to_owned());
        rest = left;
    }
    (!scheme.is_empty()).then_some((scheme, parameters))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_challenge_is_read_with_its_commas() {
        let text = r#"Bearer realm="https://a/token",service=b, scope="repository:x:pull,push""#;
        let (scheme, parameters) = parse(text).unwrap();
        assert_eq!(scheme, "Bearer");
        assert_eq!(parameters["realm"], "https://a/token");
        assert_eq!(parameters["service"], "b");
        assert_eq!(parameters["scope"], "repository:x:pull,push");
    }

    #[test]
    fn a_challenge_without_parameters_is_one() {
        let (scheme, parameters) = parse("Basic").unwrap();
        assert_eq!((scheme, parameters.len()), ("Basic", 0));
        assert!(parse("Basic realm=\"open").is_none());
        assert!(parse(" ").is_none());
    }
}
