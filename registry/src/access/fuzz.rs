//! Parsers that only [`crate::access`] knows, for [`crate::fuzz`].

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bcrypt::HashParts;

use super::Secret;
use super::htpasswd::Users;
use super::token::{Issuer, KeySet, TokenError, Unproven};
use crate::fuzz::have_places;

const SECRET: Secret = [7; 32];
/// A key that signed none of the inputs: the example of RFC 7517.
const KEY: &str = "\
    {\"keys\":[{\"kty\":\"EC\",\"crv\":\"P-256\",\"kid\":\"k\",\
    \"x\":\"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4\",\
    \"y\":\"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM\"}]}";

/// A file of users.
pub fn htpasswd(bytes: &[u8]) {
    match Users::read(Path::new("htpasswd"), bytes, &SECRET) {
        Err(wrong) => have_places(&wrong, &String::from_utf8_lossy(bytes)),
        Ok(users) => {
            for user in ["alice", "nobody", ""] {
                assert!(users.hash(user).parse::<HashParts>().is_ok(), "nothing to check against");
            }
        }
    }
}

/// The keys of an issuer (JWKS).
pub fn keys(bytes: &[u8]) {
    if let Err(wrong) = KeySet::read(Path::new("keys.json"), bytes, &SECRET) {
        have_places(&wrong, &String::from_utf8_lossy(bytes));
    }
}

/// A token, which no issuer has signed.
pub fn token(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(token) = Unproven::parse(text) else { return };
    let keys = KeySet::read(Path::new("keys.json"), KEY.as_bytes(), &SECRET).ok();
    let known = keys.as_ref().is_some_and(|keys| keys.may_have_signed(&token));
    let issuer = Issuer {
        name: Some(Arc::from("ci")),
        claim: token.issuer.clone(),
        audience: "registry".to_owned(),
        decides: false,
    };
    let now = UNIX_EPOCH + Duration::from_hours(24 * 365 * 60);
    let refused = keys.and_then(|keys| keys.prove(&token, &issuer, now).err());
    assert!(refused.is_some_and(|refused| known || refused == TokenError::Key), "it is believed");
}
