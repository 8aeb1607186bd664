//! `Evict`: taking a staged checkpoint away.

use std::str::FromStr as _;
use std::sync::Arc;

use kybernate_packager::agent_api as api;
use kybernate_spec::{Digest, Location};

use super::{Staging, StagingError, Tier, tell};
use crate::app::Rejection;

/// Which staged checkpoints are to go.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    name: Name,
    /// Only from this tier.
    tier: Option<Tier>,
}

#[derive(Clone, Debug)]
enum Name {
    /// By digest.
    Digest(Digest),
    /// By the reference it was staged by.
    Reference(String),
}

/// Why a checkpoint is not evicted.
#[derive(Debug, thiserror::Error)]
pub enum EvictError {
    /// None is staged under this name.
    #[error("{0} is not staged here")]
    NotStaged(String),
    /// It stays as long as somebody reads it, or until it is staged.
    #[error("{0} is in use: {1}; wait for that (`kyb watch ID`), or cancel it")]
    InUse(String, String),
    /// It could not be removed.
    #[error(transparent)]
    Staging(#[from] StagingError),
}

impl Wanted {
    /// Understands a request.
    pub(crate) fn parse(request: &api::EvictRequest) -> Result<Self, Rejection> {
        let tier = match request.tier() {
            api::Tier::Unspecified => None,
            api::Tier::Ram => Some(Tier::Ram),
            api::Tier::Nvme => Some(Tier::Nvme),
        };
        if let Ok(digest) = request.reference.parse() {
            return Ok(Self { name: Name::Digest(digest), tier });
        }
        let location = Location::from_str(&request.reference)?;
        let name = match location.digest() {
            Some(digest) => Name::Digest(digest.clone()),
            None => Name::Reference(location.to_string()),
        };
        Ok(Self { name, tier })
    }

    fn names(&self, digest: &Digest, references: &[String]) -> bool {
        match &self.name {
            Name::Digest(wanted) => wanted == digest,
            Name::Reference(wanted) => references.contains(wanted),
        }
    }
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Name::Digest(digest) => digest.fmt(f)?,
            Name::Reference(reference) => reference.fmt(f)?,
        }
        self.tier.map_or(Ok(()), |tier| write!(f, " in the {} tier", tier.name()))
    }
}

impl Staging {
    /// Removes what is wanted and returns it. Nothing is removed when any of it is in use.
    pub(crate) async fn evict(
        self: &Arc<Self>,
        wanted: &Wanted,
    ) -> Result<Vec<api::StagedCheckpoint>, EvictError> {
        let mut found = Vec::new();
        for (tier, kept) in &self.tiers {
            if wanted.tier.is_some_and(|only| only != *tier) {
                continue;
            }
            let ledger = kept.ledger();
            if let Name::Digest(digest) = &wanted.name
                && let Some(operation) = ledger.maker(digest)
            {
                let text = format!("operation {operation} is staging it");
                return Err(EvictError::InUse(wanted.to_string(), text));
            }
            for (digest, entry) in ledger.entries() {
                if wanted.names(digest, &entry.references) {
                    if !entry.users.is_empty() {
                        let users: Vec<&str> = entry.users.iter().map(String::as_str).collect();
                        let text = format!("operation {} reads it", users.join(" and "));
                        return Err(EvictError::InUse(digest.to_string(), text));
                    }
                    found.push((*tier, digest.clone(), tell::entry(*tier, digest, entry)));
                }
            }
        }
        if found.is_empty() {
            return Err(EvictError::NotStaged(wanted.to_string()));
        }
        let mut gone = Vec::new();
        for (tier, digest, told) in found {
            // Somebody may have removed it, or come for it, since it was looked at.
            if self.drop_entry(tier, &digest).await? {
                gone.push(told);
            } else if self.kept(tier)?.ledger().entries().contains_key(&digest) {
                let text = format!("an operation has just come for it in the {} tier", tier.name());
                return Err(EvictError::InUse(digest.to_string(), text));
            }
        }
        if gone.is_empty() {
            return Err(EvictError::NotStaged(wanted.to_string()));
        }
        Ok(gone)
    }
}
