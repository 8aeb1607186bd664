//! What a token is limited to: its claim `access` (Docker's token specification).

use serde::{Deserialize, Serialize};

use super::action::{Action, Actions};

/// What a token may be used for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grants {
    /// Repositories by name, and what may be done with them.
    pub repositories: Vec<(String, Actions)>,
    /// Whether the list of repositories may be read.
    pub catalog: bool,
    /// Who decided.
    pub decided_by: Decider,
}

/// Who decides what a token with a claim `access` may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decider {
    /// The issuer did: it is an authorization server that we trust.
    Issuer,
    /// The policy does, at each request; the token only limits it further.
    Policy,
}

/// One element of the claim `access`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessClaim {
    /// What is named; `repository` here.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its name.
    pub name: String,
    /// What may be done with it.
    pub actions: Vec<String>,
}

impl Grants {
    /// Reads the claim.
    pub fn new(claims: &[AccessClaim], decided_by: Decider) -> Self {
        let repositories = claims.iter().filter(|claim| claim.kind == "repository");
        let repositories = repositories.map(|claim| {
            (claim.name.clone(), Actions::of_words(claim.actions.iter().map(String::as_str)))
        });
        let catalog = |claim: &AccessClaim| claim.kind == "registry" && claim.name == "catalog";
        let catalog = claims.iter().any(catalog);
        Self { repositories: repositories.collect(), catalog, decided_by }
    }

    /// Whether the token may be used for this.
    pub fn covers(&self, action: Action, repository: &str) -> bool {
        let mut named = self.repositories.iter().filter(|(name, _)| name == repository);
        named.any(|(_, actions)| actions.has(action))
    }
}
