//! What a container's pod wants, before anything is begun for it.

use std::sync::Arc;

use kybernate_packager::agent_api as api;
use kybernate_packager::claim::Claimant;
use kybernate_spec::chain;

use super::{Claim, ClaimError, given, taken};
use crate::app::{App, Busy};
use crate::operations::Conclusion;
use crate::restore::pod::{OnRestart, Pod, PodError, Restart};

/// What a container's pod wants.
pub(super) struct Wish {
    pub(super) pod: Pod,
    policy: OnRestart,
    pub(super) claimant: Option<Claimant>,
    /// That nobody else restores it.
    pub(super) alone: Busy,
}

impl Wish {
    pub(super) async fn of(app: &Arc<App>, claim: &Claim) -> Result<Self, ClaimError> {
        let pod = Pod::find(app, &claim.namespace, &claim.container, &claim.live).await?;
        let policy = pod.policy(&claim.live)?;
        let claimant = pod.claimant(&claim.live, &app.config.node)?;
        let alone = taken::alone(app, &pod, claimant.is_some()).await?;
        Ok(Self { pod, policy, claimant, alone })
    }

    /// Has nothing be left of an earlier try. Returns the answer where the container is not restored, since its
    /// pod wants it to begin anew.
    pub(super) async fn begins(
        &self,
        app: &App,
        claim: &Claim,
    ) -> Result<Option<api::ClaimResponse>, ClaimError> {
        given::take_back(app, claim, &self.pod).await?;
        let (pod, policy) = (self.pod.clone(), self.policy);
        let restart = tokio::task::spawn_blocking(move || pod.restart(policy)).await;
        match restart.map_err(|error| PodError::Note(error.into()))?? {
            Restart::Restore => Ok(None),
            Restart::Fresh(fresh_because) => {
                Ok(Some(api::ClaimResponse { fresh_because, ..api::ClaimResponse::default() }))
            }
        }
    }
}

/// Tells what a pod is refused before anything is begun for it as an operation that has ended, as what is
/// refused later; who does not come in turn is told alone. Returns the error.
pub(super) async fn noted(app: &App, claim: &Claim, error: ClaimError) -> ClaimError {
    if matches!(error, ClaimError::Rejected(_)) {
        return error;
    }
    match app.operations.begin(claim.subject()).await {
        Ok(driver) => {
            let conclusion = Conclusion::failed(chain(&error).to_string(), error.refused_by());
            driver.close(Some(conclusion)).await;
        }
        Err(error) => tracing::warn!(error = %chain(&error), "a refusal is told to nobody else"),
    }
    error
}
