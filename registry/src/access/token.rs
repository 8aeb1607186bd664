//! Tokens: JSON Web Tokens signed by an issuer that the configuration names, or by us.
//!
//! Only RS256, ES256 and `EdDSA` with public keys are accepted. Nothing a token says about itself is
//! believed before its signature is proven with a key that its issuer, as we know it, has.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::follow::mistake;
use super::grant::{AccessClaim, Decider, Grants};
use super::known::Known;
use super::subject::{Holder, Identity};
use crate::config::Mistake;

/// Longest token read.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// Keys of one issuer that are looked at; real ones have a handful.
const KEYS_MAX: usize = 64;
/// How far clocks may be apart.
const LEEWAY: Duration = Duration::from_mins(1);
/// Repositories that one token may name.
const GRANTS_MAX: usize = 1000;

/// The public keys of an issuer, and who has proven to have a token of theirs.
#[derive(Debug)]
pub(super) struct KeySet {
    keys: Vec<PublicKey>,
    known: Known,
}

struct PublicKey {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

/// Who may sign, and for whom.
#[derive(Debug, Clone)]
pub(super) struct Issuer {
    /// What policies call it; nothing for ourselves.
    pub(super) name: Option<Arc<str>>,
    /// Claim `iss`.
    pub(super) claim: String,
    /// What claim `aud` must be, or list.
    pub(super) audience: String,
    /// Whether it decides what may be done, and not the policy.
    pub(super) decides: bool,
}

/// Why a token was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum TokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token's algorithm is none of RS256, ES256 and EdDSA")]
    Algorithm,
    #[error("the token names an issuer that is not configured")]
    Issuer,
    #[error("the token names a key that its issuer does not have")]
    Key,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYet,
    #[error("the token is meant for somebody else")]
    Audience,
    #[error("the token's signature does not match")]
    Signature,
    #[error("the token lacks a claim, or one makes no sense")]
    Claims,
}

/// What a token says about how it was made.
#[derive(Debug, Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions that must be understood; none is.
    crit: Option<IgnoredAny>,
}

/// A token that has been taken apart and not been believed.
#[derive(Debug)]
pub(super) struct Unproven<'a> {
    text: &'a str,
    algorithm: Algorithm,
    key: Option<String>,
    /// Claim `iss`.
    pub(super) issuer: String,
}

impl<'a> Unproven<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, TokenError> {
        #[derive(Deserialize)]
        struct Claims {
            iss: String,
        }
        if text.len() > TOKEN_BYTES_MAX {
            return Err(TokenError::Malformed);
        }
        let mut parts = text.split('.');
        let (Some(header), Some(claims), Some(_), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        let header: Header = segment(header)?;
        if header.crit.is_some() {
            return Err(TokenError::Malformed);
        }
        let algorithm = match &*header.alg {
            "RS256" => Algorithm::RS256,
            "ES256" => Algorithm::ES256,
            "EdDSA" => Algorithm::EdDSA,
            _ => return Err(TokenError::Algorithm),
        };
        let Claims { iss } = segment(claims)?;
        Ok(Self { text, algorithm, key: header.kid, issuer: iss })
    }
}

fn segment<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, TokenError> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok();
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).ok_or(TokenError::Malformed)
}

impl KeySet {
    /// Has no key, so accepts nothing.
    pub(super) fn empty(secret: &[u8; 32]) -> Self {
        Self { keys: Vec::new(), known: Known::new(secret) }
    }

    /// Reads a JSON Web Key Set (RFC 7517). Keys that are of no use here are left out; a set
    /// without a useful one is a mistake.
    pub(super) fn read(
        path: &Path,
        content: &[u8],
        secret: &[u8; 32],
    ) -> Result<Self, Vec<Mistake>> {
        #[derive(Deserialize)]
        struct Written {
            keys: Vec<Value>,
        }
        let refuse = |told: &str| vec![mistake(path, None, told)];
        let written: Written = serde_json::from_slice(content).map_err(|error| {
            vec![mistake(path, Some(error.line()), "this is no JSON Web Key Set")]
        })?;
        if written.keys.len() > KEYS_MAX {
            return Err(refuse("there are more than 64 keys"));
        }
        let jwks = written.keys.into_iter().filter_map(|key| serde_json::from_value(key).ok());
        let keys: Vec<_> = jwks.filter_map(|key| PublicKey::of(&key)).collect();
        if keys.is_empty() {
            return Err(refuse("there is no public key for RS256, ES256 or EdDSA in it"));
        }
        Ok(Self { keys, known: Known::new(secret) })
    }

    /// Makes a set of ES256 keys: their ids, and their points, uncompressed.
    pub(super) fn of_points<'a>(
        keys: impl IntoIterator<Item = (&'a str, &'a [u8])>,
        secret: &[u8; 32],
    ) -> Self {
        let key = |(id, point): (&str, &[u8])| PublicKey {
            id: Some(id.to_owned()),
            algorithm: Algorithm::ES256,
            key: DecodingKey::from_ec_der(point),
        };
        Self { keys: keys.into_iter().map(key).collect(), known: Known::new(secret) }
    }

    /// Whether there is a key that a token may be signed with.
    pub(super) fn may_have_signed(&self, token: &Unproven<'_>) -> bool {
        self.candidates(token).next().is_some()
    }

    fn candidates(&self, token: &Unproven<'_>) -> impl Iterator<Item = &PublicKey> {
        let (algorithm, id) = (token.algorithm, token.key.clone());
        self.keys.iter().filter(move |key| {
            let named = id.is_none() || key.id.is_none() || key.id == id;
            key.algorithm == algorithm && named
        })
    }

    /// Proves a token and returns who it speaks of.
    pub(super) fn prove(
        &self,
        token: &Unproven<'_>,
        issuer: &Issuer,
        now: SystemTime,
    ) -> Result<Arc<Identity>, TokenError> {
        let mark = self.known.mark(&["bearer", token.text]);
        if let Some(identity) = self.known.find(&mark, now) {
            return Ok(identity);
        }
        let mut validation = Validation::new(token.algorithm);
        validation.set_audience(&[&issuer.audience]);
        validation.set_issuer(&[&issuer.claim]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.validate_nbf = true;
        validation.leeway = LEEWAY.as_secs();
        let mut refused = TokenError::Key;
        for key in self.candidates(token) {
            let decoded =
                jsonwebtoken::decode::<Map<String, Value>>(token.text, &key.key, &validation);
            match decoded {
                Ok(decoded) => {
                    let until = decoded.claims.get("exp").and_then(Value::as_u64);
                    let until = until.and_then(|exp| {
                        UNIX_EPOCH.checked_add(Duration::from_secs(exp))?.checked_add(LEEWAY)
                    });
                    let identity = Arc::new(identify(issuer, decoded.claims)?);
                    // One whose end cannot be counted is proven anew each time.
                    if until.is_some() {
                        self.known.remember(mark, &identity, until);
                    }
                    return Ok(identity);
                }
                Err(error) => refused = kind(error.kind()),
            }
        }
        Err(refused)
    }
}

impl PublicKey {
    fn of(jwk: &Jwk) -> Option<Self> {
        let algorithm = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
                Algorithm::ES256
            }
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                Algorithm::EdDSA
            }
            // Symmetric keys above all: whoever can check with one can sign with it.
            _ => return None,
        };
        let named = jwk.common.key_algorithm.map(|named| format!("{named:?}"));
        if named.is_some_and(|named| named != format!("{algorithm:?}"))
            || jwk.common.public_key_use == Some(PublicKeyUse::Encryption)
        {
            return None;
        }
        let key = DecodingKey::from_jwk(jwk).ok()?;
        Some(Self { id: jwk.common.key_id.clone(), algorithm, key })
    }
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {:?}", self.algorithm, self.id)
    }
}

fn identify(issuer: &Issuer, mut claims: Map<String, Value>) -> Result<Identity, TokenError> {
    let subject = match claims.get("sub") {
        None => "",
        Some(subject) => subject.as_str().ok_or(TokenError::Claims)?,
    };
    if subject.chars().any(char::is_control) {
        return Err(TokenError::Claims);
    }
    let subject = Box::from(subject);
    let decided_by = if issuer.decides { Decider::Issuer } else { Decider::Policy };
    let grants = match claims.remove("access") {
        None | Some(Value::Null) => None,
        Some(access) => {
            let access: Result<Vec<AccessClaim>, _> = serde_json::from_value(access);
            let access = access.ok().filter(|access| access.len() <= GRANTS_MAX);
            Some(Grants::new(&access.ok_or(TokenError::Claims)?, decided_by))
        }
    };
    let holder = match &issuer.name {
        Some(name) => Holder::Token { issuer: Arc::clone(name), subject, claims: claims.into() },
        None if subject.is_empty() => Holder::Nobody,
        None => Holder::User(subject),
    };
    Ok(Identity { holder, certificate: None, grants })
}

fn kind(error: &ErrorKind) -> TokenError {
    match error {
        ErrorKind::ExpiredSignature => TokenError::Expired,
        ErrorKind::ImmatureSignature => TokenError::NotYet,
        ErrorKind::InvalidAudience => TokenError::Audience,
        ErrorKind::InvalidIssuer => TokenError::Issuer,
        ErrorKind::InvalidSignature => TokenError::Signature,
        ErrorKind::MissingRequiredClaim(_) | ErrorKind::InvalidClaimFormat(_) => TokenError::Claims,
        _ => TokenError::Malformed,
    }
}

#[cfg(test)]
mod tests;
