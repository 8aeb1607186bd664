//! The content of a signature: cosign's bundle with a DSSE envelope around an in-toto statement
//! (Sigstore bundle v0.3; DSSE protocol; in-toto attestation v1).

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use kybernate_spec::{Digest, media_type};
use serde::{Deserialize, Serialize};

use crate::key::{KeyError, PublicKey, SigningKey};

/// What cosign says a signature is, among other statements about an image.
pub(crate) const PREDICATE: &str = "https://sigstore.dev/cosign/sign/v1";

/// What cosign says is in a bundle that we understand.
pub(crate) const CONTENT: &str = "dsse-envelope";

/// The kind of statement.
const STATEMENT: &str = "https://in-toto.io/Statement/v1";

/// Signatures looked at in one envelope. cosign writes one.
const SIGNATURES_MAX: usize = 16;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    media_type: String,
    verification_material: Material,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dsse_envelope: Option<Envelope>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    public_key: Option<Hint>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Hint {
    #[serde(default)]
    hint: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Debug, Serialize, Deserialize)]
struct EnvelopeSignature {
    sig: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    predicate_type: String,
    predicate: serde_json::Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Subject {
    digest: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, serde_json::Value>,
}

/// What a bundle proves.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// The key with this hint signed the digest.
    By(String),
    /// It is signed by a key that is not among those asked for; it names it so.
    OtherKey(String),
}

/// Why a bundle proves nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BundleError {
    #[error("it is malformed")]
    Malformed(#[source] serde_json::Error),
    #[error("its base64 is malformed")]
    Base64(#[source] base64::DecodeError),
    #[error("it is {0:?} where {1:?} is wanted")]
    Kind(String, &'static str),
    #[error("it holds no envelope")]
    NoEnvelope,
    #[error("it is about something else")]
    OtherSubject,
}

/// Signs `digest`; returns the bundle's bytes.
pub(crate) fn sign(digest: &Digest, key: &SigningKey) -> Result<Vec<u8>, SignBundleError> {
    let digests = BTreeMap::from([(digest.algorithm().name().to_owned(), digest.hex().to_owned())]);
    let statement = Statement {
        kind: STATEMENT.to_owned(),
        subject: vec![Subject { digest: digests, annotations: BTreeMap::new() }],
        predicate_type: PREDICATE.to_owned(),
        predicate: serde_json::json!({}),
    };
    let payload = serde_json::to_vec(&statement)?;
    let signature = key.sign(&authenticated(media_type::IN_TOTO, &payload))?;
    let bundle = Bundle {
        media_type: media_type::SIGSTORE_BUNDLE.to_owned(),
        verification_material: Material { public_key: Some(Hint { hint: key.public().hint() }) },
        dsse_envelope: Some(Envelope {
            payload: BASE64.encode(payload),
            payload_type: media_type::IN_TOTO.to_owned(),
            signatures: vec![EnvelopeSignature { sig: BASE64.encode(signature) }],
        }),
    };
    Ok(serde_json::to_vec(&bundle)?)
}

/// Why a bundle could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignBundleError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("failed to write the statement")]
    Json(#[from] serde_json::Error),
}

/// Finds out whether one of `keys` signed `digest`.
pub(crate) fn verify(
    bundle: &[u8],
    digest: &Digest,
    keys: &[PublicKey],
) -> Result<Proof, BundleError> {
    let bundle: Bundle = serde_json::from_slice(bundle).map_err(BundleError::Malformed)?;
    wanted(&bundle.media_type, media_type::SIGSTORE_BUNDLE)?;
    let hint = bundle.verification_material.public_key.map(|key| key.hint).unwrap_or_default();
    let envelope = bundle.dsse_envelope.ok_or(BundleError::NoEnvelope)?;
    wanted(&envelope.payload_type, media_type::IN_TOTO)?;
    let payload = BASE64.decode(&envelope.payload).map_err(BundleError::Base64)?;
    let message = authenticated(media_type::IN_TOTO, &payload);
    let mut signer = None;
    for signature in envelope.signatures.iter().take(SIGNATURES_MAX) {
        let signature = BASE64.decode(&signature.sig).map_err(BundleError::Base64)?;
        signer = signer.or_else(|| keys.iter().find(|key| key.verifies(&signature, &message)));
    }
    let statement: Statement = serde_json::from_slice(&payload).map_err(BundleError::Malformed)?;
    wanted(&statement.kind, STATEMENT)?;
    wanted(&statement.predicate_type, PREDICATE)?;
    let algorithm = digest.algorithm().name();
    let matches =
        |subject: &Subject| subject.digest.get(algorithm).is_some_and(|hex| hex == digest.hex());
    if !statement.subject.iter().any(matches) {
        return Err(BundleError::OtherSubject);
    }
    Ok(signer.map_or(Proof::OtherKey(hint), |key| Proof::By(key.hint())))
}

/// What is really signed (DSSE protocol, "Pre-Authentication Encoding").
fn authenticated(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut message =
        format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    message.extend_from_slice(payload);
    message
}

fn wanted(found: &str, wanted: &'static str) -> Result<(), BundleError> {
    if found == wanted { Ok(()) } else { Err(BundleError::Kind(found.to_owned(), wanted)) }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod vectors;
