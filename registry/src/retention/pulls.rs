//! Which manifests were pulled since it was noted last.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use kybernate_spec::{Digest, RepositoryName};

use crate::config::Retention;

/// Manifests remembered between two notes, ~200 bytes each. Pulls beyond them are not noted.
const PULLED_MAX: usize = 50_000;

/// Gathers pulls, so that a pull writes nothing.
#[derive(Debug, Default)]
pub(crate) struct Pulls {
    /// Repositories whose rules ask for pulls.
    wanted: Option<Retention>,
    // Held for a look-up only, never across an `.await`, hence not a tokio mutex.
    pulled: Mutex<HashSet<(RepositoryName, Digest)>>,
}

impl Pulls {
    pub(crate) fn new(retention: &Retention) -> Self {
        let asked = retention.rule.iter().any(|rule| rule.pulled_within.is_some());
        Self { wanted: asked.then(|| retention.clone()), pulled: Mutex::default() }
    }

    /// Remembers that a manifest was pulled, where a rule asks for it.
    pub(crate) fn remember(&self, repository: &RepositoryName, digest: &Digest) {
        let Some(retention) = &self.wanted else { return };
        let rules = retention.rules(repository.as_str());
        if !rules.iter().any(|(_, rule)| rule.pulled_within.is_some()) {
            return;
        }
        let mut pulled = self.pulled.lock().unwrap_or_else(PoisonError::into_inner);
        if pulled.len() < PULLED_MAX {
            pulled.insert((repository.clone(), digest.clone()));
        }
    }

    pub(super) fn take(&self) -> HashSet<(RepositoryName, Digest)> {
        std::mem::take(&mut *self.pulled.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
