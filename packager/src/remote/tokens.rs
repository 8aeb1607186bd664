//! Proving who asks: with a token for each kind of access, or a password with each request
//! (distribution, "Token authentication").

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use http_auth::ChallengeParser;
use kybernate_spec::RepositoryName;
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, Url};
use serde::Deserialize;
use tokio::sync::{Mutex, RwLock};

use super::documents::{failure, read};
use super::patience::within_stall;
use crate::store::StoreErrorKind;

/// How long a bearer token is used: the shortest life a token server gives (distribution,
/// "Token authentication": never less than 60 seconds).
const TOKEN_LIFE: Duration = Duration::from_secs(50);

/// Longest reply of a token server.
const REPLY_BYTES_MAX: u64 = 128 << 10;

/// What a request does to a repository.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    /// It does nothing to any: it only shows who asks.
    Nothing,
    Pull,
    Push,
    Delete,
    /// Writes to it what is read from another one.
    Mount(RepositoryName),
}

/// Where a registry sends whoever wants in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Challenge {
    realm: Url,
    service: Option<String>,
}

/// How requests to one repository prove who asks.
pub(super) struct Tokens {
    http: reqwest::Client,
    auth: RegistryAuth,
    repository: String,
    challenge: RwLock<Option<Challenge>>,
    // Held across the request for a token, so that many requests wait for one token.
    given: Mutex<BTreeMap<Access, (Instant, String)>>,
}

/// What a token server answers: both names are in use.
#[derive(Deserialize)]
struct Given {
    token: Option<String>,
    access_token: Option<String>,
}

impl Tokens {
    /// Reads the registry's first reply.
    pub(super) fn new(
        http: reqwest::Client,
        auth: RegistryAuth,
        repository: String,
        headers: &HeaderMap,
    ) -> Self {
        let challenge = RwLock::new(Challenge::find(headers));
        Self { http, auth, repository, challenge, given: Mutex::default() }
    }

    /// Adds what the registry wants to see.
    pub(super) async fn sign(
        &self,
        request: RequestBuilder,
        access: Access,
        plain_http: bool,
    ) -> Result<RequestBuilder, StoreErrorKind> {
        let challenge = self.challenge.read().await.clone();
        let Some(challenge) = challenge else { return Ok(self.with_password(request)) };
        let mut given = self.given.lock().await;
        if let Some((since, token)) = given.get(&access)
            && since.elapsed() < TOKEN_LIFE
        {
            return Ok(request.bearer_auth(token));
        }
        if !(plain_http || challenge.is_private()) {
            let told = format!(
                "the token server {} wants plain HTTP, which shows passwords to others",
                challenge.realm
            );
            return Err(StoreErrorKind::Registry(OciDistributionError::AuthenticationFailure(
                told,
            )));
        }
        let token = self.ask(&challenge, &access).await?;
        let signed = request.bearer_auth(&token);
        given.insert(access, (Instant::now(), token));
        Ok(signed)
    }

    /// Whether there is a token for such requests already.
    pub(super) async fn holds(&self, access: &Access) -> bool {
        let given = self.given.lock().await;
        given.get(access).is_some_and(|(since, _)| since.elapsed() < TOKEN_LIFE)
    }

    /// Reads a reply that refuses a request: some registries say only then what they want to see.
    /// Returns whether it is something else than before.
    pub(super) async fn learn(&self, headers: &HeaderMap) -> bool {
        let Some(found) = Challenge::find(headers) else { return false };
        let mut challenge = self.challenge.write().await;
        let is_new = challenge.as_ref() != Some(&found);
        *challenge = Some(found);
        is_new
    }

    /// Forgets all tokens: the registry does not accept one.
    pub(super) async fn forget(&self) {
        self.given.lock().await.clear();
    }

    async fn ask(&self, challenge: &Challenge, access: &Access) -> Result<String, StoreErrorKind> {
        let mut url = challenge.realm.clone();
        {
            let mut query = url.query_pairs_mut();
            query.extend_pairs(challenge.service.iter().map(|service| ("service", service)));
            query.extend_pairs(access.scopes(&self.repository).map(|scope| ("scope", scope)));
        }
        let reply = within_stall(self.with_password(self.http.get(url)).send()).await?;
        if !reply.status().is_success() {
            let mut url = challenge.realm.clone();
            url.set_query(None);
            return Err(failure(reply, url.to_string()).await);
        }
        let reply = read(reply, REPLY_BYTES_MAX).await?;
        // Not what is wrong with it: that may quote a token.
        let given = serde_json::from_slice::<Given>(&reply).ok();
        let token = given.and_then(|given| given.token.or(given.access_token));
        token.filter(|token| !token.is_empty()).ok_or_else(|| {
            let told = format!("{} gave no token", challenge.realm);
            StoreErrorKind::Registry(OciDistributionError::RegistryTokenDecodeError(told))
        })
    }

    fn with_password(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.auth {
            RegistryAuth::Basic(user, password) => request.basic_auth(user, Some(password)),
            _ => request,
        }
    }
}

impl Access {
    /// Returns what a token must be good for.
    fn scopes(&self, repository: &str) -> impl Iterator<Item = String> {
        let (actions, from) = match self {
            Self::Nothing => (None, None),
            Self::Pull => (Some("pull"), None),
            Self::Push => (Some("pull,push"), None),
            Self::Delete => (Some("pull,delete"), None),
            Self::Mount(from) => (Some("pull,push"), Some(format!("repository:{from}:pull"))),
        };
        let own = actions.map(|actions| format!("repository:{repository}:{actions}"));
        own.into_iter().chain(from)
    }
}

impl Challenge {
    fn find(headers: &HeaderMap) -> Option<Self> {
        let texts =
            headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let mut challenges =
            texts.flat_map(|text| ChallengeParser::new(text).map_while(Result::ok));
        let bearer = challenges.find(|found| found.scheme.eq_ignore_ascii_case("bearer"))?;
        let parameter = |name: &str| {
            let mut parameters = bearer.params.iter();
            let (_, value) = parameters.find(|(key, _)| key.eq_ignore_ascii_case(name))?;
            Some(value.to_unescaped())
        };
        let realm = Url::parse(&parameter("realm")?).ok()?;
        Some(Self { realm, service: parameter("service") })
    }

    /// Whether nobody else can read what is sent there.
    fn is_private(&self) -> bool {
        let host = self.realm.host_str().unwrap_or_default();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        self.realm.scheme() == "https"
            || host == "localhost"
            || address.is_ok_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(challenges: &[&'static str]) -> Option<Challenge> {
        let value = |text: &&'static str| (WWW_AUTHENTICATE, text.parse().unwrap());
        Challenge::find(&challenges.iter().map(value).collect())
    }

    #[test]
    fn a_token_is_asked_for_where_the_registry_says() {
        let told = "Bearer realm=\"https://auth.example.com/token\",service=\"a b\",scope=\"x\"";
        for challenges in [&[told][..], &["Basic realm=\"r\"", told]] {
            let challenge = found(challenges).unwrap();
            assert_eq!(challenge.realm.as_str(), "https://auth.example.com/token");
            assert_eq!(challenge.service.as_deref(), Some("a b"));
        }
        assert!(found(&["Basic realm=\"r\""]).is_none() && found(&[]).is_none());
    }

    #[test]
    fn a_token_server_that_others_can_listen_to_is_not_private() {
        let private = |realm: &str| {
            Challenge { realm: Url::parse(realm).unwrap(), service: None }.is_private()
        };
        assert!(private("https://auth.example.com/") && private("http://127.0.0.1:5000/token"));
        assert!(private("http://[::1]:5000/") && private("http://localhost/"));
        assert!(!private("http://auth.example.com/") && !private("http://127.0.0.1.example.com/"));
    }

    #[test]
    fn a_mount_reads_one_repository_and_writes_another() {
        let scopes: Vec<_> = Access::Mount("a/b".parse().unwrap()).scopes("c/d").collect();
        assert_eq!(scopes, ["repository:c/d:pull,push", "repository:a/b:pull"]);
    }
}
