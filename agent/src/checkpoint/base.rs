//! The base of an increment: an earlier checkpoint in a registry.
//!
//! What an increment takes from its base it signs unseen: the base's shards are taken at their
//! word where the hashes of their pages agree. So the base must be as good as our own.

use std::sync::Arc;

use kybernate_packager::artifact::{ArtifactError, Checkpoint};
use kybernate_packager::key::PublicKey;
use kybernate_packager::pack::Base;
use kybernate_packager::policy::{Policy, Question, repository};
use kybernate_packager::store::{ConnectOptions, Store, StoreError};
use kybernate_packager::verify::{VerifyError, verify_signature};
use kybernate_spec::{Location, chain};

use super::{Order, Source, Wish};
use crate::app::App;
use crate::config::NamedKey;
use crate::operations::{Driver, RefusedBy};

/// Why a base cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("failed to use {base} as the base")]
pub(crate) struct BaseError {
    /// The reference that was given.
    base: Location,
    #[source]
    kind: BaseErrorKind,
}

/// What is wrong with it.
#[derive(Debug, thiserror::Error)]
enum BaseErrorKind {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error("no page hashes are stored with it: take it with --page-hashes")]
    NoPageHashes,
    #[error("this agent has no key, and no rule of its trust policy covers the base")]
    NoKeys,
    #[error(transparent)]
    Verify(#[from] VerifyError),
}

impl BaseError {
    /// Returns the rule that refused, when it was one.
    pub(super) const fn refused_by(&self) -> Option<RefusedBy> {
        match &self.kind {
            BaseErrorKind::NoKeys => Some(RefusedBy::Policy),
            BaseErrorKind::Verify(error) if error.is_refusal() => Some(RefusedBy::Signature),
            _ => None,
        }
    }
}

/// A base that can be used.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) base: Base,
    /// Whether it was asked for. Otherwise a checkpoint does not fail for it.
    pub(super) is_wanted: bool,
}

/// Opens the base that is asked for, or the last checkpoint of the container, and makes sure that it
/// can be used and trusted.
pub(super) async fn open(
    order: &Order,
    source: &Source,
    app: &Arc<App>,
    driver: &Driver,
) -> Result<Option<Opened>, BaseError> {
    match &order.base {
        Wish::None => Ok(None),
        Wish::This(location) => match open_one(location, order, app).await {
            Ok(base) => Ok(Some(Opened { base, is_wanted: true })),
            Err(kind) => Err(BaseError { base: location.clone(), kind }),
        },
        Wish::Last => {
            let Some(location) = last(order, source, app) else { return Ok(None) };
            match open_one(&location, order, app).await {
                Ok(base) => Ok(Some(Opened { base, is_wanted: false })),
                Err(error) => {
                    let reason = chain(&error).to_string();
                    tracing::info!(%location, reason, "the last checkpoint is no base for this one");
                    // Who takes one without page hashes wants no increment of it.
                    if !matches!(error, BaseErrorKind::NoPageHashes) {
                        let told = format!(
                            "it is taken in full: the last one, {location}, is no base: {reason}"
                        );
                        driver.note(|record| record.warnings.push(told));
                    }
                    Ok(None)
                }
            }
        }
    }
}

/// Returns the last checkpoint of the container where the new one goes: nothing is brought from
/// elsewhere unasked.
fn last(order: &Order, source: &Source, app: &App) -> Option<Location> {
    let created = source.container.created_at.as_ref()?;
    let created = jiff::Timestamp::new(created.seconds, created.nanos).ok()?;
    let wanted = repository(&order.location);
    let is_there = |reference: &str| {
        reference.parse().is_ok_and(|location: Location| repository(&location) == wanted)
    };
    let (namespace, container) = (&order.namespace, &order.container);
    let (place, digest) =
        app.operations.last_checkpoint(namespace, container, created, is_there)?;
    Some(place.parse::<Location>().ok()?.at(&digest))
}

async fn open_one(
    location: &Location,
    order: &Order,
    app: &Arc<App>,
) -> Result<Base, BaseErrorKind> {
    let connect = ConnectOptions { plain_http: order.plain_http, notes: None };
    let store = Store::open(location, &connect).await?;
    let checkpoint = Checkpoint::open(&store, location).await?;
    let policy = app.trust().await;
    let keys = keys(location, &checkpoint, order, &app.config.sign_keys, &policy);
    if keys.is_empty() {
        return Err(BaseErrorKind::NoKeys);
    }
    verify_signature(&store, &checkpoint.stored.descriptor.digest, &keys).await?;
    if checkpoint.page_hashes.is_none() {
        return Err(BaseErrorKind::NoPageHashes);
    }
    Ok(Base { store, checkpoint })
}

/// Returns who may have signed the base: we ourselves, and whoever may vouch for a restore of it
/// into the container's namespace. Rules that only warn have no say without a signature: what is
/// taken from the base is signed by us.
fn keys(
    location: &Location,
    checkpoint: &Checkpoint,
    order: &Order,
    own: &[NamedKey],
    policy: &Policy,
) -> Vec<PublicKey> {
    let repository = repository(location);
    let question = Question {
        repository: &repository,
        source_namespace: checkpoint.config.source.namespace.as_deref().unwrap_or_default(),
        target_namespace: &order.namespace,
    };
    let own = own.iter().map(|key| key.key.public().clone());
    let rules = policy.ask(question, jiff::Timestamp::now());
    own.chain(rules.map(|demand| demand.keys()).unwrap_or_default()).collect()
}
