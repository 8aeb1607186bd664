//! How callers prove who they are.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use serde_json::Value;

use super::Secret;
use super::action::Action;
use super::challenge::{Lack, Scheme, Way, basic};
use super::credentials::{Credentials, CredentialsError};
use super::follow::{Followed, View};
use super::grant::AccessClaim;
use super::htpasswd::{Checker, PasswordError, Users};
use super::jwks::{Prepared, Trusted};
use super::policy::Policy;
use super::scope::Scope;
use super::sign::{Claims, KEY_FILE, KeyFileError, SignError, Signer};
use super::subject::{Holder, Identity};
use super::token::{Issuer, TokenError, Unproven};
use crate::config::{AccessSettings, Challenge, Config, Mistake};
use crate::tasks::Tasks;

/// Whoever can prove something, and how.
#[derive(Debug)]
pub(super) struct Proof {
    service: String,
    scheme: Scheme,
    users: Option<View<Users>>,
    checker: Checker,
    issuers: Vec<Trusted>,
    own: Option<Own>,
}

/// Our own token server.
#[derive(Debug)]
struct Own {
    signer: View<Signer>,
    issuer: Issuer,
    life: Duration,
}

/// The files of a [`Proof`], read and not followed yet.
#[derive(Debug)]
pub(super) struct ProofFiles {
    secret: Secret,
    users: Option<Followed<Users>>,
    issuers: Vec<Prepared>,
}

/// Why credentials were not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The header cannot be read.
    #[error(transparent)]
    Malformed(#[from] CredentialsError),
    /// The password, or the token, proves nothing; the text says why, without what was sent.
    #[error("{0}")]
    Wrong(String),
    /// Too many wait to be checked, or too many were wrong.
    #[error("too many passwords wait to be checked, or too many from this address were wrong")]
    Busy,
}

/// A token of ours.
#[derive(Debug)]
pub struct Issued {
    /// The token.
    pub token: String,
    /// How long it is good.
    pub life: Duration,
    /// What it is good for.
    pub access: Vec<AccessClaim>,
}

/// Why our own token server cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    /// The keys could not be made.
    #[error(transparent)]
    File(#[from] KeyFileError),
    /// The keys are wrong.
    #[error("the keys of tokens are of no use: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Keys(Vec<Mistake>),
}

impl From<PasswordError> for Refusal {
    fn from(error: PasswordError) -> Self {
        match error {
            PasswordError::Wrong => Self::Wrong(error.to_string()),
            PasswordError::Busy => Self::Busy,
        }
    }
}

impl From<TokenError> for Refusal {
    fn from(error: TokenError) -> Self {
        Self::Wrong(error.to_string())
    }
}

impl ProofFiles {
    /// Reads what settings name and adds what is wrong to `wrong`. Blocks.
    pub(super) fn read(
        settings: &AccessSettings,
        secret: Secret,
        wrong: &mut Vec<Mistake>,
    ) -> Self {
        let users = settings.htpasswd.as_ref().map(|path| {
            let name = path.clone();
            Followed::open("htpasswd", [path.clone()], move |contents| {
                let content = contents.first().map(Vec::as_slice).unwrap_or_default();
                Users::read(&name, content, &secret)
            })
        });
        let users = users.transpose().unwrap_or_else(|mistakes| {
            wrong.extend(mistakes);
            None
        });
        let mut issuers = Vec::new();
        for issuer in &settings.issuers {
            match Prepared::read(issuer, secret) {
                Ok(prepared) => issuers.push(prepared),
                Err(mistakes) => wrong.extend(mistakes),
            }
        }
        Self { secret, users, issuers }
    }

    pub(super) fn start(self, config: &Config, tasks: &Tasks) -> Result<Proof, OwnError> {
        let settings = &config.access;
        let users = self.users.map(|users| {
            let view = users.view();
            users.follow(tasks);
            view
        });
        let own = users.as_ref().map(|_| Own::start(config, self.secret, tasks)).transpose()?;
        let realm = settings.realm.clone();
        let scheme = match settings.challenge {
            Challenge::Auto if users.is_some() && realm.is_none() => Scheme::Basic,
            Challenge::Basic => Scheme::Basic,
            // Without a server to send clients to, a name has to do for those who bring tokens.
            Challenge::Auto | Challenge::Bearer if own.is_none() => {
                Scheme::Bearer { realm: realm.or_else(|| Some(settings.service.clone())) }
            }
            Challenge::Auto | Challenge::Bearer => Scheme::Bearer { realm },
        };
        let secret = self.secret;
        let issuers = self.issuers.into_iter().map(|issuer| issuer.start(tasks, secret)).collect();
        let (service, checker) = (settings.service.clone(), Checker::default());
        Ok(Proof { service, scheme, users, checker, issuers, own })
    }
}

impl Own {
    fn start(config: &Config, secret: Secret, tasks: &Tasks) -> Result<Self, OwnError> {
        let settings = &config.access;
        let path = settings.token_keys.clone().unwrap_or_else(|| config.root.join(KEY_FILE));
        if settings.token_keys.is_none() {
            Signer::make_file(&path)?;
        }
        let name = path.clone();
        let keys = Followed::open("token keys", [path], move |contents| {
            let content = contents.first().map(Vec::as_slice).unwrap_or_default();
            Signer::read(&name, content, &secret)
        });
        let keys = keys.map_err(OwnError::Keys)?;
        let signer = keys.view();
        keys.follow(tasks);
        let service = settings.service.clone();
        let issuer =
            Issuer { name: None, claim: service.clone(), audience: service, decides: false };
        Ok(Self { signer, issuer, life: settings.token_life.0 })
    }
}

impl Proof {
    /// Returns who the credentials of a request prove the caller to be; nothing when it has none.
    pub(super) async fn of(
        &self,
        headers: &HeaderMap,
        address: IpAddr,
    ) -> Result<Option<Arc<Identity>>, Refusal> {
        match Credentials::of(headers)? {
            None => Ok(None),
            Some(Credentials::Basic { user, password }) => {
                self.password(&user, &password, address).await.map(Some)
            }
            Some(Credentials::Bearer(token)) => self.token(&token).map(Some).map_err(Into::into),
        }
    }

    /// Checks a password.
    pub(super) async fn password(
        &self,
        user: &str,
        password: &str,
        address: IpAddr,
    ) -> Result<Arc<Identity>, Refusal> {
        let Some(users) = &self.users else { return Err(PasswordError::Wrong.into()) };
        Ok(self.checker.check(&users.get(), (user, password), address).await?)
    }

    fn token(&self, text: &str) -> Result<Arc<Identity>, TokenError> {
        let token = Unproven::parse(text)?;
        let now = SystemTime::now();
        if let Some(own) = self.own.as_ref().filter(|own| own.issuer.claim == token.issuer) {
            let identity = own.signer.get().keys.prove(&token, &own.issuer, now)?;
            // A user who has been taken out is out now, not when the token ends.
            return match &identity.holder {
                Holder::User(name) if !self.has_user(name) => Err(TokenError::Claims),
                _ => Ok(identity),
            };
        }
        let mut trusted = self.issuers.iter();
        let trusted = trusted.find(|trusted| trusted.issuer.claim == token.issuer);
        let trusted = trusted.ok_or(TokenError::Issuer)?;
        trusted.keys(&token).prove(&token, &trusted.issuer, now)
    }

    fn has_user(&self, name: &str) -> bool {
        self.users.as_ref().is_some_and(|users| users.get().has(name))
    }

    /// Returns what to ask a client for.
    pub(super) fn ask(&self, way: Way<'_>, lack: Lack<'_>) -> String {
        self.scheme.ask(&self.service, way, lack)
    }

    /// Returns how our token server asks for a password.
    pub(super) fn ask_for_password(&self) -> String {
        basic(&self.service)
    }

    /// Whether there is a token server of our own.
    pub(super) fn issues(&self) -> bool {
        self.own.is_some()
    }

    /// Makes a token that is good for as much of what is asked for as the policy allows.
    pub(super) fn issue(
        &self,
        policy: &Policy,
        identity: &Identity,
        scopes: &[Scope],
    ) -> Option<Result<Issued, SignError>> {
        let own = self.own.as_ref()?;
        if identity.grants.is_some() {
            // A token makes no other: its life would have no end, nor its limits.
            return None;
        }
        let subject = match &identity.holder {
            Holder::Nobody => "",
            Holder::User(name) => name,
            // Whoever has a token of somebody else's has one already.
            Holder::Token { .. } => return None,
        };
        let access: Vec<_> =
            scopes.iter().filter_map(|scope| grant(policy, identity, scope)).collect();
        let claims = Claims {
            iss: &own.issuer.claim,
            aud: &own.issuer.audience,
            sub: subject,
            access: &access,
        };
        let signed = own.signer.get().sign(&claims, SystemTime::now(), own.life);
        Some(signed.map(|token| Issued { token, life: own.life, access }))
    }

    /// Returns the public keys of our own tokens.
    pub(super) fn public_keys(&self) -> Option<Value> {
        self.own.as_ref().map(|own| own.signer.get().public())
    }
}

/// Returns what a token may be good for, of one scope.
fn grant(policy: &Policy, identity: &Identity, scope: &Scope) -> Option<AccessClaim> {
    match scope {
        Scope::Catalog => Some(AccessClaim {
            kind: "registry".to_owned(),
            name: "catalog".to_owned(),
            actions: vec!["*".to_owned()],
        }),
        Scope::Repository { name, actions } => {
            let allowed = Action::ALL
                .into_iter()
                .filter(|action| actions.has(*action) && policy.allows(identity, *action, name));
            let actions: Vec<_> = allowed.map(|action| action.name().to_owned()).collect();
            let kind = "repository".to_owned();
            (!actions.is_empty()).then(|| AccessClaim { kind, name: name.clone(), actions })
        }
    }
}
