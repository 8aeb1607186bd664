//! What somebody else has removed or changed: a tier's directory, what was mounted there, or a
//! checkpoint.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::{Staging, StagingError, Tier, Use, blocking, is_changed};

/// How long looking at some files may take: the disk may be what CRIU has waited for.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

impl Use {
    /// Returns how what is read differs from what was staged, if somebody has changed it since.
    pub(crate) async fn changed(&self) -> Option<io::Error> {
        let files = Arc::clone(&self.staging.kept(self.tier).ok()?.shelf);
        let digest = self.digest.clone();
        let compared = blocking(move || files.compare(&digest));
        timeout(LOOK_LIMIT, compared).await.ok()?.err().filter(is_changed)
    }
}

impl Staging {
    /// Forgets what does not lie there any more, but for what is in use: whoever reads it finds out.
    pub(crate) async fn look(&self) {
        for (tier, kept) in &self.tiers {
            let known: Vec<_> = kept
                .ledger()
                .entries()
                .iter()
                .filter(|(_, entry)| entry.users.is_empty())
                .map(|(digest, entry)| (digest.clone(), entry.used_at))
                .collect();
            let files = Arc::clone(&kept.shelf);
            let looked = tokio::task::spawn_blocking(move || {
                known.into_iter().filter(|(digest, _)| files.is_gone(digest)).collect::<Vec<_>>()
            });
            for (digest, used_at) in looked.await.unwrap_or_default() {
                // One that was staged anew meanwhile was used since.
                let mut ledger = kept.ledger();
                let same = ledger.entries().get(&digest).is_some_and(|one| one.used_at == used_at);
                let left = same && ledger.leave(&digest);
                if left {
                    ledger.left(&digest, true);
                }
                drop(ledger);
                if left {
                    tracing::warn!(%digest, tier = tier.name(), "somebody removed what was staged");
                    self.changed(*tier);
                }
            }
        }
    }

    /// Makes a tier's directory again where somebody has removed it, or what was mounted there.
    pub(super) async fn stand(&self, tier: Tier) -> Result<(), StagingError> {
        let files = Arc::clone(&self.kept(tier)?.shelf);
        let stands = blocking(move || files.prepare()).await;
        stands.map_err(|source| StagingError::Io("prepare", tier.name(), source))
    }
}
