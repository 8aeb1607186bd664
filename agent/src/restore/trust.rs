//! Whether a checkpoint may be trusted, before a byte of its payload moves.

use std::sync::Arc;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::key::PublicKey;
use kybernate_packager::policy::{Objection, PolicyError, Verdict, in_time};
use kybernate_packager::store::Store;
use kybernate_packager::verify::verify_signature;
use kybernate_spec::chain;

use super::admission::AdmissionError;
use super::rules::{Judge, Refusal, judge};
use super::{Order, Purpose};
use crate::app::App;
use crate::operations::{Kind, RefusedBy};

/// What is to be trusted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspect<'a> {
    pub(super) store: &'a Store,
    pub(super) checkpoint: &'a Checkpoint,
}

/// Lets whoever decides by this node's configuration decide.
pub(super) async fn check(
    app: &Arc<App>,
    operation: &str,
    order: &Order,
    suspect: Suspect<'_>,
) -> Result<(), AdmissionError> {
    let config = &suspect.checkpoint.config;
    let in_time = || {
        in_time(config, jiff::Timestamp::now())
            .map_err(|error| Refusal::one(RefusedBy::Policy, error.to_string()))
    };
    match judge(order, &app.config)? {
        Judge::Policy => by_policy(app, operation, order, suspect).await,
        Judge::Keys(keys) => {
            by_keys(suspect, &keys).await?;
            Ok(in_time()?)
        }
        Judge::Nobody => {
            tracing::warn!(operation, reference = %order.location, "restored unsigned, as asked");
            Ok(in_time()?)
        }
    }
}

async fn by_keys(suspect: Suspect<'_>, keys: &[PublicKey]) -> Result<(), AdmissionError> {
    let digest = &suspect.checkpoint.stored.descriptor.digest;
    match verify_signature(suspect.store, digest, keys).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_refusal() => {
            Err(Refusal::one(RefusedBy::Signature, chain(&error).to_string()).into())
        }
        Err(error) => Err(error.into()),
    }
}

async fn by_policy(
    app: &Arc<App>,
    operation: &str,
    order: &Order,
    suspect: Suspect<'_>,
) -> Result<(), AdmissionError> {
    let policy = app.trust().await;
    let Suspect { store, checkpoint } = suspect;
    let judged = policy.judge(store, checkpoint, &order.location, Some(&order.namespace)).await;
    let count = |outcome, objection: Option<Objection>| {
        let reason = objection.map(Objection::name).unwrap_or_default();
        let kind = match order.purpose {
            Purpose::Now => Kind::Restore,
            Purpose::Later => Kind::Stage,
            Purpose::Image => Kind::Provide,
        };
        app.operations.metrics.judged(kind, outcome, reason);
    };
    let reference = &order.location;
    match judged {
        Ok(Verdict::Signed { rule, by }) => {
            count("signed", None);
            tracing::info!(operation, %reference, rule, key = by.key, "trusted");
            Ok(())
        }
        Ok(Verdict::Tolerated { rule, why }) => {
            let objection = Objection::of(&why);
            count("tolerated", objection);
            let reason = objection.map(Objection::name);
            let error = chain(&why);
            tracing::warn!(operation, %reference, rule, reason, %error, "not trusted, but the rule only warns");
            Ok(())
        }
        Ok(Verdict::NotLooked { rule }) => {
            count("not-looked", None);
            tracing::warn!(operation, %reference, rule, "the rule does not look at signatures");
            Ok(())
        }
        Err(error) => {
            let Some(objection) = error.objection() else { return Err(unknown(error)) };
            count("refused", Some(objection));
            let told = chain(&error).to_string();
            tracing::warn!(operation, %reference, reason = objection.name(), error = told, "refused");
            let by = match objection {
                Objection::NoRule | Objection::Expired => RefusedBy::Policy,
                Objection::NotSigned | Objection::OtherKey => RefusedBy::Signature,
            };
            Err(Refusal::one(by, told).into())
        }
    }
}

/// What is neither trusted nor refused.
fn unknown(error: PolicyError) -> AdmissionError {
    match error {
        PolicyError::Signature { source, .. } => source.into(),
        // These are refusals always; were they not, nothing would be trusted either.
        other => Refusal::one(RefusedBy::Policy, other.to_string()).into(),
    }
}
