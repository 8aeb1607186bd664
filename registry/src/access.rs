//! Who may do what.
//!
//! [`Access::identify`] finds out who sends a request, and the [`Caller`] it returns answers
//! whether that may be done. [`policy`] has the rules, [`subject`] the names they speak of,
//! [`action`] what can be done, [`grant`] what a token is limited to.
//!
//! How callers prove who they are: [`credentials`] reads the header, `htpasswd` checks passwords,
//! `token` the tokens of issuers whose keys `jwks` keeps, `sign` makes tokens of our own for the
//! [`scope`] that a client asks for, [`challenge`] tells clients what is wanted, [`limit`] how much
//! is too much. `follow` reads
//! files again when they change.
//!
//! While no rule exists everything is allowed, and nothing here costs more than one comparison.

use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderMap;
use kybernate_spec::{NameError, RepositoryName};
use serde_json::Value;

use self::action::Action;
use self::challenge::{Lack, Way};
use self::follow::{Followed, View};
use self::grant::Decider;
use self::policy::Policy;
use self::proof::{Issued, OwnError, Proof, ProofFiles, Refusal};
use self::scope::Scope;
use self::sign::SignError;
use self::subject::{CertificateNames, Identity};
use crate::config::{AccessSettings, Config, Mistake};
use crate::tasks::Tasks;

pub mod action;
pub mod challenge;
pub mod credentials;
pub(crate) mod follow;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub mod grant;
mod htpasswd;
mod jwks;
mod known;
pub mod limit;
pub mod policy;
pub mod proof;
pub mod scope;
pub mod sign;
pub mod subject;
mod token;

/// A key that never leaves the process: what is remembered of credentials is hashed with it.
type Secret = [u8; 32];

/// Who may do what, as it is configured.
#[derive(Debug)]
pub struct Access {
    rules: Rules,
    proof: Option<Proof>,
    anonymous: Arc<Identity>,
    /// A repository that nobody can push to, since nobody knows its name: looked at in the place
    /// of one that the caller may not see, so that both answer alike and take as long.
    hidden: RepositoryName,
}

/// What has been read and is not followed yet.
#[derive(Debug)]
pub struct AccessFiles {
    policy: Option<Followed<Policy>>,
    proof: Option<ProofFiles>,
}

#[derive(Debug)]
enum Rules {
    /// There is none: everything is allowed.
    None,
    Fixed(Arc<Policy>),
    File(View<Policy>),
}

/// Why access control could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A name that we chose is refused.
    #[error("failed to choose a name")]
    Name(#[source] NameError),
    /// The system has no randomness.
    #[error("failed to get random bytes")]
    Random(#[source] getrandom::Error),
    /// Our own token server cannot work.
    #[error("failed to set up the token server")]
    Own(#[source] OwnError),
}

/// Who sends a request, and what that may do.
#[derive(Debug, Clone)]
pub enum Caller {
    /// No rule exists, so it does not matter.
    Anyone,
    /// Somebody, to whom rules apply.
    Somebody(Somebody),
}

/// A caller to whom rules apply.
#[derive(Debug, Clone)]
pub struct Somebody {
    /// The rules when the request came.
    policy: Arc<Policy>,
    identity: Arc<Identity>,
    refused: Option<Refusal>,
}

impl AccessFiles {
    /// Reads the files that `settings` names and returns everything that is wrong at once. Blocks.
    pub fn read(settings: &AccessSettings) -> Result<Self, Vec<Mistake>> {
        let mut wrong = Vec::new();
        let issuers: Vec<_> = settings.issuers.iter().map(|issuer| issuer.name.clone()).collect();
        let policy = settings.policy.as_ref().map(|path| {
            let name = path.clone();
            Followed::open("policy", [path.clone()], move |contents| {
                let content = contents.first().map(Vec::as_slice).unwrap_or_default();
                let Ok(text) = std::str::from_utf8(content) else {
                    return Err(vec![follow::mistake(&name, None, "the file is not UTF-8")]);
                };
                let issuers: Vec<_> = issuers.iter().map(String::as_str).collect();
                Policy::read(&name, text, &issuers)
            })
        });
        let policy = policy.transpose().unwrap_or_else(|mistakes| {
            wrong.extend(mistakes);
            None
        });
        let proof = if settings.htpasswd.is_some() || !settings.issuers.is_empty() {
            let mut secret = Secret::default();
            if let Err(error) = getrandom::fill(&mut secret) {
                // Nothing could be remembered safely, so nothing is served.
                let told = format!("the system has no randomness ({error})");
                wrong.push(follow::mistake("/dev/urandom".as_ref(), None, told));
            }
            Some(ProofFiles::read(settings, secret, &mut wrong))
        } else {
            None
        };
        if wrong.is_empty() { Ok(Self { policy, proof }) } else { Err(wrong) }
    }
}

impl Access {
    /// Puts what was read in force, and follows the files as long as tasks run. Blocks.
    pub fn start(files: AccessFiles, config: &Config, tasks: &Tasks) -> Result<Self, AccessError> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(AccessError::Random)?;
        let hidden = format!("hidden/{:032x}", u128::from_be_bytes(secret));
        let hidden = hidden.parse().map_err(AccessError::Name)?;
        let proof = files.proof.map(|proof| proof.start(config, tasks)).transpose();
        let proof = proof.map_err(AccessError::Own)?;
        let rules = match files.policy {
            Some(policy) => {
                tracing::info!(rules = policy.get().rules(), "access is limited by a policy");
                let view = policy.view();
                policy.follow(tasks);
                Rules::File(view)
            }
            None if proof.is_some() || config.tls.client_ca.is_some() => {
                Rules::Fixed(Arc::new(Policy::of_the_authenticated()))
            }
            None => Rules::None,
        };
        Ok(Self { rules, proof, anonymous: Arc::default(), hidden })
    }

    /// Returns who sends a request from an address, which is what guesses at passwords count for.
    pub async fn identify(
        &self,
        headers: &HeaderMap,
        certificate: Option<&Arc<CertificateNames>>,
        address: IpAddr,
    ) -> Caller {
        let policy = match &self.rules {
            Rules::None => return Caller::Anyone,
            Rules::Fixed(policy) => Arc::clone(policy),
            Rules::File(policy) => policy.get(),
        };
        let proven = match &self.proof {
            Some(proof) => proof.of(headers, address).await,
            None => Ok(None),
        };
        let (identity, refused) = match proven {
            Ok(identity) => (identity, None),
            Err(refusal) => (None, Some(refusal)),
        };
        Caller::Somebody(self.somebody(policy, identity, refused, certificate))
    }

    /// Returns who has a password, for our own token server.
    pub async fn identify_by_password(
        &self,
        caller: &Somebody,
        (user, password): (&str, &str),
        address: IpAddr,
    ) -> Somebody {
        let proven = match &self.proof {
            Some(proof) => proof.password(user, password, address).await.map(Some),
            None => Ok(None),
        };
        let (identity, refused) = match proven {
            Ok(identity) => (identity, None),
            Err(refusal) => (None, Some(refusal)),
        };
        let certificate = caller.identity.certificate.as_ref();
        self.somebody(Arc::clone(&caller.policy), identity, refused, certificate)
    }

    fn somebody(
        &self,
        policy: Arc<Policy>,
        identity: Option<Arc<Identity>>,
        refused: Option<Refusal>,
        certificate: Option<&Arc<CertificateNames>>,
    ) -> Somebody {
        let identity = identity.unwrap_or_else(|| Arc::clone(&self.anonymous));
        let identity = match certificate {
            None => identity,
            Some(names) => {
                let mut both = Identity::clone(&identity);
                both.certificate = Some(Arc::clone(names));
                Arc::new(both)
            }
        };
        Somebody { policy, identity, refused }
    }

    /// Returns what to ask a client for; nothing when there is nothing that it could bring.
    pub fn ask(&self, way: Way<'_>, lack: Lack<'_>) -> Option<String> {
        self.proof.as_ref().map(|proof| proof.ask(way, lack))
    }

    /// Returns how our token server asks for a password.
    pub fn ask_for_password(&self) -> Option<String> {
        self.proof.as_ref().map(Proof::ask_for_password)
    }

    /// Whether there is a token server of our own.
    pub fn issues_tokens(&self) -> bool {
        self.proof.as_ref().is_some_and(Proof::issues)
    }

    /// Makes a token for a caller, good for as much of `scopes` as the policy allows. Returns
    /// nothing for a caller whom we make none for, as for one that itself came with a token.
    pub fn issue(&self, caller: &Somebody, scopes: &[Scope]) -> Option<Result<Issued, SignError>> {
        self.proof.as_ref()?.issue(&caller.policy, &caller.identity, scopes)
    }

    /// Returns the public keys that our own tokens can be checked with.
    pub fn public_keys(&self) -> Option<Value> {
        self.proof.as_ref()?.public_keys()
    }

    /// Returns the repository to look at in the place of one that must not be seen.
    pub fn hidden(&self) -> &RepositoryName {
        &self.hidden
    }
}

impl Caller {
    /// Whether the caller may do something with a repository.
    pub fn may(&self, action: Action, repository: &str) -> bool {
        match self {
            Self::Anyone => true,
            Self::Somebody(caller) => caller.may(action, repository),
        }
    }

    /// Whether the caller may see a repository in the list of all.
    pub fn sees(&self, repository: &str) -> bool {
        match self {
            Self::Anyone => true,
            Self::Somebody(caller) => caller.sees(repository),
        }
    }

    /// Returns who it is; nothing when that is not known.
    pub fn identity(&self) -> Option<&Identity> {
        match self {
            Self::Anyone => None,
            Self::Somebody(caller) => Some(&caller.identity),
        }
    }
}

impl Somebody {
    fn may(&self, action: Action, repository: &str) -> bool {
        self.policy.allows(&self.identity, action, repository)
    }

    fn sees(&self, repository: &str) -> bool {
        match &self.identity.grants {
            Some(grants) if grants.catalog => {
                grants.decided_by == Decider::Issuer
                    || self.policy.allowed(&self.identity, repository).has(Action::Pull)
            }
            _ => self.may(Action::Pull, repository),
        }
    }

    /// Whether other credentials of the caller's could help where these do not: it has none, or its
    /// token is good for less than it may do.
    pub fn could_bring_more(&self, action: Action, repository: &str) -> bool {
        match &self.identity.grants {
            Some(_) if self.is_nobody() => true,
            Some(grants) => {
                !grants.covers(action, repository)
                    && (grants.decided_by == Decider::Issuer
                        || self.policy.allowed(&self.identity, repository).has(action))
            }
            None => self.identity.is_anonymous(),
        }
    }

    /// Whether nothing is proven about the caller, also by a token.
    pub fn is_nobody(&self) -> bool {
        self.identity.is_anonymous()
    }

    /// Whether the caller brought a token that limits it.
    pub fn has_token(&self) -> bool {
        self.identity.grants.is_some()
    }

    /// Whether the list of repositories could have anything in it for the caller.
    pub fn may_list(&self) -> bool {
        match &self.identity.grants {
            Some(grants) => grants.catalog,
            None => self.policy.speaks_of(&self.identity),
        }
    }

    /// Returns why the caller's credentials were not accepted.
    pub fn refused(&self) -> Option<&Refusal> {
        self.refused.as_ref()
    }
}
