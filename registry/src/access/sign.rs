//! Tokens of our own, for users of the htpasswd file.
//!
//! The keys are PEM in one file, one block after another. The first signs, all are good for
//! checking: to change keys, put a new one before the old one, and take the old one out when the
//! last token that it signed has expired.

use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use kybernate_spec::{Algorithm as HashAlgorithm, Hasher};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject as _;
use serde::Serialize;
use serde_json::{Value, json};

use super::follow::mistake;
use super::grant::AccessClaim;
use super::token::KeySet;
use crate::config::Mistake;

/// Keys in the file; more than two are seldom of use.
const KEYS_MAX: usize = 8;
/// The name of the file in the store's root, unless another is configured.
pub(super) const KEY_FILE: &str = "token-keys.pem";

/// The keys of one state of the file.
pub(super) struct Signer {
    first: EncodingKey,
    /// Ids and points of all, the first one first.
    points: Vec<(String, Vec<u8>)>,
    /// What our own tokens are checked with.
    pub(super) keys: KeySet,
}

/// What a token says.
#[derive(Debug, Serialize)]
pub(super) struct Claims<'a> {
    /// Who made it.
    pub(super) iss: &'a str,
    /// Whom it is for.
    pub(super) aud: &'a str,
    /// Whom it speaks of; empty for whoever has no name.
    pub(super) sub: &'a str,
    /// What it is good for.
    pub(super) access: &'a [AccessClaim],
}

/// Why a token could not be made.
#[derive(Debug, thiserror::Error)]
#[error("failed to sign a token")]
pub struct SignError(#[source] jsonwebtoken::errors::Error);

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[error("failed to make a key for tokens")]
pub struct KeyFileError(#[source] io::Error);

impl Signer {
    /// Reads the file and returns everything that is wrong, without the keys.
    pub(super) fn read(
        path: &Path,
        content: &[u8],
        secret: &[u8; 32],
    ) -> Result<Self, Vec<Mistake>> {
        let refuse = |told: &str| vec![mistake(path, None, told)];
        let (mut first, mut points) = (None, Vec::new());
        for key in PrivatePkcs8KeyDer::pem_slice_iter(content) {
            let wrong = "a key is not an unencrypted PKCS #8 key of the curve P-256; make one with \
                         `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`";
            let Ok(key) = key else { return Err(refuse(wrong)) };
            let der = key.secret_pkcs8_der();
            let Ok(pair) = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der) else {
                return Err(refuse(wrong));
            };
            let point = pair.public_key().as_ref().to_vec();
            first.get_or_insert_with(|| EncodingKey::from_ec_der(der));
            points.push((key_id(&point), point));
        }
        let Some(first) = first else { return Err(refuse("there is no private key in it")) };
        if points.len() > KEYS_MAX {
            return Err(refuse("there are more than 8 keys in it"));
        }
        let known = points.iter().map(|(id, point)| (&**id, &**point));
        let keys = KeySet::of_points(known, secret);
        Ok(Self { first, points, keys })
    }

    /// Makes the file when it is missing. Only its owner may read it.
    pub(super) fn make_file(path: &Path) -> Result<(), KeyFileError> {
        if fs::symlink_metadata(path).is_ok() {
            return Ok(());
        }
        let write = || {
            let pair = EcdsaKeyPair::generate_pkcs8(
                &ECDSA_P256_SHA256_FIXED_SIGNING,
                &SystemRandom::new(),
            );
            let pem = pem(pair.map_err(io::Error::other)?.as_ref());
            let next = path.with_extension("new");
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&next)?;
            file.write_all(pem.as_bytes())?;
            file.sync_all()?;
            fs::rename(&next, path)
        };
        write().map_err(KeyFileError)
    }

    /// Signs what a token says, with the times of its life.
    pub(super) fn sign(
        &self,
        claims: &Claims<'_>,
        now: SystemTime,
        life: Duration,
    ) -> Result<String, SignError> {
        #[derive(Serialize)]
        struct Timed<'a> {
            #[serde(flatten)]
            claims: &'a Claims<'a>,
            iat: u64,
            nbf: u64,
            exp: u64,
        }
        let mut header = Header::new(Algorithm::ES256);
        header.kid = self.points.first().map(|(id, _)| id.clone());
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let timed = Timed { claims, iat: now, nbf: now, exp: now + life.as_secs() };
        jsonwebtoken::encode(&header, &timed, &self.first).map_err(SignError)
    }

    /// Returns the public keys as a JSON Web Key Set.
    pub(super) fn public(&self) -> Value {
        let keys = self.points.iter().filter_map(|(id, point)| {
            // An uncompressed point: 4, x, y (SEC 1, 2.3.3).
            let (x, y) = point.strip_prefix(&[4])?.split_at_checked(32)?;
            let (x, y) = (URL_SAFE_NO_PAD.encode(x), URL_SAFE_NO_PAD.encode(y));
            Some(json!({
                "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": id, "x": x, "y": y,
            }))
        });
        json!({ "keys": keys.collect::<Vec<_>>() })
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signer")
    }
}

fn key_id(point: &[u8]) -> String {
    let mut hasher = Hasher::new(HashAlgorithm::Sha256);
    hasher.update(point);
    hasher.finish().hex().chars().take(16).collect()
}

fn pem(der: &[u8]) -> String {
    let encoded = STANDARD.encode(der);
    let lines: Vec<_> = encoded.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", lines.join("\n"))
}

#[cfg(test)]
mod tests;
