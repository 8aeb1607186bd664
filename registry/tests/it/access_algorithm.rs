//! Tokens of each algorithm, and those that only look like one.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a failed step here is a failed test"
)]

use aws_lc_rs::encoding::{AsDer as _, Pkcs8V1Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Method;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

use crate::access::{Guarded, rule};
use crate::access_token::{status, trusting};

/// Far away, for claims of time.
const IN_2096: u64 = 4_000_000_000;
const IN_2001: u64 = 1_000_000_000;

struct Signer {
    algorithm: Algorithm,
    id: &'static str,
    key: EncodingKey,
}

impl Signer {
    fn new(algorithm: Algorithm, id: &'static str) -> Self {
        let random = SystemRandom::new();
        let key = match algorithm {
            Algorithm::RS256 => {
                let made = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
                let der: Pkcs8V1Der<'_> = made.as_der().unwrap();
                // What is inside PKCS #8 for a key of this size: PKCS #1.
                EncodingKey::from_rsa_der(&der.as_ref()[26..])
            }
            Algorithm::ES256 => {
                let made = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random);
                EncodingKey::from_ec_der(made.unwrap().as_ref())
            }
            _ => {
                let made = Ed25519KeyPair::generate_pkcs8v1(&random).unwrap();
                EncodingKey::from_ed_der(made.as_ref())
            }
        };
        Self { algorithm, id, key }
    }

    fn public(&self) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.key, self.algorithm).unwrap();
        jwk.common.key_id = Some(self.id.to_owned());
        serde_json::to_value(jwk).unwrap()
    }

    fn sign(&self, claims: &Value) -> String {
        let mut header = Header::new(self.algorithm);
        header.kid = Some(self.id.to_owned());
        jsonwebtoken::encode(&header, claims, &self.key).unwrap()
    }
}

fn claims(more: &Value) -> Value {
    let mut claims =
        json!({ "iss": "https://ci", "aud": "registry", "sub": "job", "exp": IN_2096 });
    claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    claims
}

/// Signs with a secret that everybody can read: the public key, as whoever confuses a signature
/// with a MAC would check it.
fn with_public_key_as_secret(secret: &[u8], id: &str) -> String {
    let mut header = Header::new(Algorithm::HS256);
    header.kid = Some(id.to_owned());
    jsonwebtoken::encode(&header, &claims(&json!({})), &EncodingKey::from_secret(secret)).unwrap()
}

#[tokio::test]
async fn tokens_are_good_only_if_their_algorithm_key_and_claims_are() {
    let keys = [
        Signer::new(Algorithm::RS256, "rsa"),
        Signer::new(Algorithm::ES256, "ec"),
        Signer::new(Algorithm::EdDSA, "ed"),
    ];
    let published = json!({ "keys": keys.each_ref().map(Signer::public) }).to_string();
    let policy = rule(&["prod/*"], &["token:ci:job"], &["pull", "push"]);
    let files = [("policy.toml", &*policy), ("keys.json", &published)];
    let guarded = Guarded::start(&files, trusting("keys.json")).await;
    let remote = &guarded.registry.remote;
    let begin = async |token: &str| {
        let authorization = format!("Bearer {token}");
        status(remote, Method::POST, "/v2/prod/a/blobs/uploads/", &authorization).await
    };
    for key in &keys {
        assert_eq!(begin(&key.sign(&claims(&json!({})))).await.status, 202, "{}", key.id);
        let foreign = Signer::new(key.algorithm, key.id);
        let mut bad = vec![
            ("expired", key.sign(&claims(&json!({ "exp": IN_2001 })))),
            ("endless", key.sign(&claims(&json!({ "exp": null })))),
            ("not yet valid", key.sign(&claims(&json!({ "nbf": IN_2096 - 1 })))),
            ("of a foreign issuer", key.sign(&claims(&json!({ "iss": "https://evil" })))),
            ("for a foreign audience", key.sign(&claims(&json!({ "aud": "other" })))),
            ("by a wrong key", foreign.sign(&claims(&json!({})))),
            ("by an unknown key", Signer::new(key.algorithm, "other").sign(&claims(&json!({})))),
        ];
        // Another key's name: right signature, wrong key, and for two of three a wrong algorithm.
        let other = keys.iter().find(|other| other.id != key.id).unwrap();
        let mut header = Header::new(key.algorithm);
        header.kid = Some(other.id.to_owned());
        let confused = jsonwebtoken::encode(&header, &claims(&json!({})), &key.key).unwrap();
        bad.push(("by a key under another's name", confused));
        let signed = key.sign(&claims(&json!({})));
        let body = signed.split('.').nth(1).unwrap();
        for none in ["none", "None", "nOnE", ""] {
            let header = URL_SAFE_NO_PAD.encode(json!({ "alg": none, "kid": key.id }).to_string());
            bad.push(("without algorithm", format!("{header}.{body}.")));
        }
        let public = key.public();
        let mut secrets = vec![public.to_string().into_bytes()];
        for part in ["n", "x", "y"] {
            if let Some(part) = public.get(part).and_then(Value::as_str) {
                secrets.push(part.as_bytes().to_vec());
                secrets.push(URL_SAFE_NO_PAD.decode(part).unwrap());
            }
        }
        for secret in &secrets {
            bad.push(("by the public key", with_public_key_as_secret(secret, key.id)));
        }
        for (what, token) in bad {
            let reply = begin(&token).await;
            assert_eq!(reply.status, 401, "{} {what}", key.id);
            reply.refused(401, "UNAUTHORIZED");
            assert!(reply.header("www-authenticate").contains("invalid_token"), "{what}");
        }
    }
}
