//! Who may do what.
//!
//! [`Access::identify`] finds out who sends a request, and the [`Caller`] it returns answers
//! whether that may be done. [`policy`] has the rules, [`subject`] the names they speak of,
//! [`action`] what can be done; `follow` reads files again when they change.
//!
//! While no rule exists everything is allowed, and nothing here costs more than one comparison.

use std::sync::Arc;

use kybernate_spec::{NameError, RepositoryName};

use self::action::Action;
use self::follow::{Followed, View};
use self::policy::Policy;
use self::subject::Identity;
use crate::config::{AccessSettings, Mistake};
use crate::tasks::Tasks;

pub mod action;
pub(crate) mod follow;
pub mod grant;
pub mod policy;
pub mod subject;

/// Who may do what, as it is configured.
#[derive(Debug)]
pub struct Access {
    rules: Rules,
    /// A repository that nobody can push to, since nobody knows its name: looked at in the place
    /// of one that the caller may not see, so that both answer alike and take as long.
    hidden: RepositoryName,
}

/// What has been read and is not followed yet.
#[derive(Debug)]
pub struct AccessFiles {
    policy: Option<Followed<Policy>>,
}

#[derive(Debug)]
enum Rules {
    /// There is none: everything is allowed.
    None,
    File(View<Policy>),
}

/// Why access control could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The system has no randomness.
    #[error("failed to get random bytes")]
    Random(#[source] getrandom::Error),
    /// A name that we chose is refused.
    #[error("failed to choose a name")]
    Name(#[source] NameError),
}

/// Who sends a request, and what that may do.
#[derive(Debug, Clone)]
pub enum Caller {
    /// No rule exists, so it does not matter.
    Anyone,
    /// Somebody, to whom rules apply.
    Somebody {
        /// The rules when the request came.
        policy: Arc<Policy>,
        /// Who.
        identity: Arc<Identity>,
    },
}

impl AccessFiles {
    /// Reads the files that `settings` names and returns everything that is wrong at once. Blocks.
    pub fn read(settings: &AccessSettings) -> Result<Self, Vec<Mistake>> {
        let policy = settings.policy.as_ref().map(|path| {
            let name = path.clone();
            Followed::open("policy", [path.clone()], move |contents| {
                let content = contents.first().map(Vec::as_slice).unwrap_or_default();
                let Ok(text) = std::str::from_utf8(content) else {
                    return Err(vec![follow::mistake(&name, None, "the file is not UTF-8")]);
                };
                Policy::read(&name, text, &[])
            })
        });
        Ok(Self { policy: policy.transpose()? })
    }
}

impl Access {
    /// Puts what was read in force, and follows the files as long as tasks run.
    pub fn start(files: AccessFiles, tasks: &Tasks) -> Result<Self, AccessError> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(AccessError::Random)?;
        let hidden = format!("hidden/{:032x}", u128::from_be_bytes(secret));
        let hidden = hidden.parse().map_err(AccessError::Name)?;
        let rules = files.policy.map_or(Rules::None, |policy| {
            tracing::info!(rules = policy.get().rules(), "access is limited by a policy");
            let view = policy.view();
            policy.follow(tasks);
            Rules::File(view)
        });
        Ok(Self { rules, hidden })
    }

    /// Returns who sends a request.
    pub fn identify(&self) -> Caller {
        match &self.rules {
            Rules::None => Caller::Anyone,
            Rules::File(policy) => {
                Caller::Somebody { policy: policy.get(), identity: Arc::default() }
            }
        }
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
            Self::Somebody { policy, identity } => policy.allows(identity, action, repository),
        }
    }
}
