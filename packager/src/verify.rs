//! Checks the signatures of a checkpoint: cosign bundles among the referrers of its index.

use std::fmt;

use kybernate_spec::{Descriptor, Digest, chain, media_type};

use crate::bundle::{self, BundleError, Proof};
use crate::checked::collect;
use crate::key::PublicKey;
use crate::outline::Outline;
use crate::store::{Store, StoreError};

/// Referrers looked at. More than that on one checkpoint is a flood, not a need.
pub const SIGNATURES_MAX: usize = 64;

/// Largest bundle read. Real ones have less than 1 KiB, with certificate and log entry 10 KiB.
const BUNDLE_BYTES_MAX: u64 = 256 << 10;

/// A good signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Which key made it, as bundles name keys.
    pub key: String,
    /// The signature's manifest.
    pub signature: Digest,
}

/// Why a digest is not shown to be signed by the keys asked for.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is no signature that can be read.
    #[error("{digest} is not signed{skipped}")]
    NotSigned {
        /// What was to be verified.
        digest: Digest,
        /// Referrers that looked like signatures but were none.
        skipped: Skipped,
    },
    /// It is signed, but by other keys.
    #[error("{digest} is signed, but by none of the trusted keys: by {}{skipped}", keys.join(", "))]
    OtherKeys {
        /// What was to be verified.
        digest: Digest,
        /// The keys, as the signatures name them, which proves nothing.
        keys: Vec<String>,
        /// Referrers that looked like signatures but were none.
        skipped: Skipped,
    },
    /// The signatures could not be read, so nothing is known.
    #[error("failed to read the signatures of {digest}")]
    Store {
        /// What was to be verified.
        digest: Digest,
        /// What happened.
        #[source]
        source: StoreError,
    },
}

/// Referrers that looked like signatures but could not be used, with the reason for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped(Vec<(Digest, String)>);

/// What one referrer turned out to be.
enum Looked {
    Proof(Proof),
    Other,
    Unusable(String),
}

impl VerifyError {
    /// Whether this is an answer, and not a failure to get one.
    pub const fn is_refusal(&self) -> bool {
        !matches!(self, Self::Store { .. })
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (digest, reason)) in self.0.iter().enumerate() {
            let opening = if position == 0 { " (not usable: " } else { "; " };
            write!(f, "{opening}{digest}: {reason}")?;
        }
        if self.0.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// Looks for a signature of `digest` by one of `keys`; one is enough. At most [`SIGNATURES_MAX`]
/// referrers are looked at.
pub async fn verify_signature(
    store: &Store,
    digest: &Digest,
    keys: &[PublicKey],
) -> Result<Verified, VerifyError> {
    let unreadable = |source| VerifyError::Store { digest: digest.clone(), source };
    let referrers =
        store.referrers(digest, Some(media_type::SIGSTORE_BUNDLE)).await.map_err(unreadable)?;
    let (mut others, mut skipped, mut failure) = (Vec::new(), Skipped::default(), None);
    for referrer in referrers.iter().take(SIGNATURES_MAX) {
        match look(store, digest, referrer, keys).await {
            Ok(Looked::Proof(Proof::By(key))) => {
                return Ok(Verified { key, signature: referrer.digest.clone() });
            }
            Ok(Looked::Proof(Proof::OtherKey(key))) => others.push(key),
            Ok(Looked::Other) => {}
            Ok(Looked::Unusable(reason)) => skipped.0.push((referrer.digest.clone(), reason)),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    if let Some(over) = referrers.get(SIGNATURES_MAX) {
        let reason = format!("only {SIGNATURES_MAX} signatures are looked at");
        skipped.0.push((over.digest.clone(), reason));
    }
    match failure {
        Some(source) => Err(unreadable(source)),
        None if others.is_empty() => {
            Err(VerifyError::NotSigned { digest: digest.clone(), skipped })
        }
        None => Err(VerifyError::OtherKeys { digest: digest.clone(), keys: others, skipped }),
    }
}

/// Lists what looks like a signature of `digest`, without checking it.
pub async fn list_signatures(store: &Store, digest: &Digest) -> Result<Vec<Digest>, StoreError> {
    let referrers = store.referrers(digest, Some(media_type::SIGSTORE_BUNDLE)).await?;
    let mut found = Vec::new();
    for referrer in referrers.iter().take(SIGNATURES_MAX) {
        if bundle_layer(store, digest, referrer).await?.is_ok() {
            found.push(referrer.digest.clone());
        }
    }
    Ok(found)
}

async fn look(
    store: &Store,
    digest: &Digest,
    referrer: &Descriptor,
    keys: &[PublicKey],
) -> Result<Looked, StoreError> {
    let layer = match bundle_layer(store, digest, referrer).await? {
        Ok(layer) => layer,
        Err(other) => return Ok(other),
    };
    let read = match store.blob(&layer).await {
        Ok(stream) => collect(stream, &layer, BUNDLE_BYTES_MAX).await,
        Err(error) => Err(error),
    };
    let content = match read {
        Err(error) if error.kind.is_about_content() => return Ok(unusable(&error)),
        other => other?,
    };
    Ok(match bundle::verify(&content, digest, keys) {
        Ok(proof) => Looked::Proof(proof),
        // Attestations are bundles too.
        Err(BundleError::Kind(_, bundle::PREDICATE)) => Looked::Other,
        Err(error) => unusable(&error),
    })
}

/// Finds the bundle within a referrer, or what the referrer is instead.
async fn bundle_layer(
    store: &Store,
    digest: &Digest,
    referrer: &Descriptor,
) -> Result<Result<Descriptor, Looked>, StoreError> {
    let stored = match store.manifest(&referrer.digest).await {
        Err(error) if error.kind.is_about_content() => return Ok(Err(unusable(&error))),
        other => other?,
    };
    let outline = match Outline::parse(&stored.content, None) {
        Ok(outline) => outline,
        Err(error) => return Ok(Err(unusable(&error))),
    };
    let bundles: Vec<&Descriptor> =
        outline.blobs.iter().filter(|b| b.media_type == media_type::SIGSTORE_BUNDLE).collect();
    Ok(match bundles.as_slice() {
        [] => Err(Looked::Other),
        _ if outline.subject.as_ref().is_none_or(|subject| subject.digest != *digest) => {
            Err(Looked::Unusable("its subject is something else".to_owned()))
        }
        [layer] if layer.size <= BUNDLE_BYTES_MAX => Ok((*layer).clone()),
        [_] => Err(Looked::Unusable(format!("it has more than {BUNDLE_BYTES_MAX} bytes"))),
        _ => Err(Looked::Unusable("it has more than one bundle".to_owned())),
    })
}

fn unusable(error: &(dyn std::error::Error + 'static)) -> Looked {
    Looked::Unusable(chain(error).to_string())
}
