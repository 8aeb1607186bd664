//! What is decided before anything large moves, for a restore and for what is staged for one.

use std::sync::Arc;

use kybernate_packager::artifact::{ArtifactError, Checkpoint};
use kybernate_packager::compat::Subject;
use kybernate_packager::store::{ConnectOptions, Store, StoreError, StoreErrorKind};
use kybernate_packager::verify::VerifyError;

use super::Order;
use super::rules::{self, Refusal};
use super::trust::{self, Suspect};
use crate::app::App;
use crate::operations::{Driver, OperationsError, RefusedBy};

/// A checkpoint whose signature counts here and whose facts fit, and where it is.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) store: Store,
    pub(crate) checkpoint: Checkpoint,
}

/// Why a checkpoint is not admitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmissionError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
}

impl AdmissionError {
    /// Returns the rule that refused, when it was one.
    pub(crate) fn refused_by(&self) -> Option<RefusedBy> {
        let integrity = |yes: bool| yes.then_some(RefusedBy::Integrity);
        match self {
            Self::Refused(refusal) => Some(refusal.by),
            Self::Store(error) | Self::Artifact(ArtifactError::Store(error)) => {
                integrity(matches!(error.kind, StoreErrorKind::Mismatch(_)))
            }
            Self::Artifact(ArtifactError::Version(_)) => Some(RefusedBy::Compatibility),
            Self::Artifact(ArtifactError::Shape(..) | ArtifactError::Malformed(..)) => {
                Some(RefusedBy::Integrity)
            }
            Self::Artifact(_) | Self::Verify(_) | Self::Operations(_) => None,
        }
    }
}

/// Finds the checkpoint and holds it against trust, time and the facts of this node.
pub(crate) async fn admit(
    app: &Arc<App>,
    driver: &Driver,
    order: &Order,
) -> Result<Admitted, AdmissionError> {
    driver.step("resolve");
    let connect = ConnectOptions { plain_http: order.plain_http, notes: None };
    let store = Store::open(&order.location, &connect).await?;
    let checkpoint = Checkpoint::open(&store, &order.location).await?;
    let digest = checkpoint.stored.descriptor.digest.clone();
    driver.note(|record| record.digest = Some(digest));
    driver.step("verify");
    let suspect = Suspect { store: &store, checkpoint: &checkpoint };
    trust::check(app, driver.id(), order, suspect).await?;
    driver.step("compare");
    let report = app.report().await;
    rules::compatible(order, &Subject::of(&checkpoint), &report.facts)?;
    Ok(Admitted { store, checkpoint })
}
