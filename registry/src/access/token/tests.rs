use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair};
use jsonwebtoken::{EncodingKey, Header as JwtHeader};
use proptest::prelude::*;
use serde_json::json;

use super::*;

const SECRET: [u8; 32] = [3; 32];

struct Signing {
    algorithm: Algorithm,
    id: &'static str,
    key: EncodingKey,
}

impl Signing {
    fn es256(id: &'static str) -> Self {
        let made =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new());
        let key = EncodingKey::from_ec_der(made.unwrap().as_ref());
        Self { algorithm: Algorithm::ES256, id, key }
    }

    fn eddsa(id: &'static str) -> Self {
        let made = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).unwrap();
        Self { algorithm: Algorithm::EdDSA, id, key: EncodingKey::from_ed_der(made.as_ref()) }
    }

    fn rs256(id: &'static str) -> Self {
        let made = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let der: Pkcs8V1Der<'_> = made.as_der().unwrap();
        // What is inside PKCS #8 for a key of this size: PKCS #1.
        let key = EncodingKey::from_rsa_der(&der.as_ref()[26..]);
        Self { algorithm: Algorithm::RS256, id, key }
    }

    fn jwk(&self) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.key, self.algorithm).unwrap();
        jwk.common.key_id = Some(self.id.to_owned());
        serde_json::to_value(jwk).unwrap()
    }

    fn sign(&self, claims: &Value) -> String {
        let mut header = JwtHeader::new(self.algorithm);
        header.kid = Some(self.id.to_owned());
        jsonwebtoken::encode(&header, claims, &self.key).unwrap()
    }
}

fn issuer() -> Issuer {
    Issuer {
        name: Some("ci".into()),
        claim: "https://ci".into(),
        audience: "registry".into(),
        decides: true,
    }
}

fn seconds(from_now: i64) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    i64::try_from(now).unwrap() + from_now
}

fn claims() -> Value {
    json!({ "iss": "https://ci", "aud": "registry", "sub": "job", "exp": seconds(300) })
}

fn with(key: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[key] = value;
    claims
}

fn set(keys: &[&Signing]) -> KeySet {
    let keys: Vec<_> = keys.iter().map(|key| key.jwk()).collect();
    let content = serde_json::to_vec(&json!({ "keys": keys })).unwrap();
    KeySet::read(Path::new("k"), &content, &SECRET).unwrap()
}

fn prove(keys: &KeySet, token: &str) -> Result<Arc<Identity>, TokenError> {
    let token = Unproven::parse(token)?;
    if token.issuer != issuer().claim {
        return Err(TokenError::Issuer);
    }
    keys.prove(&token, &issuer(), SystemTime::now())
}

#[test]
fn tokens_of_each_algorithm_are_accepted() {
    for key in [Signing::es256("a"), Signing::eddsa("b"), Signing::rs256("c")] {
        let keys = set(&[&Signing::es256("other"), &key]);
        let token = key.sign(&claims());
        for _again in 0..2 {
            let identity = prove(&keys, &token).unwrap();
            assert_eq!(identity.name().unwrap(), "token:ci:job");
            assert_eq!(identity.grants, None);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let key = Signing::es256("a");
    let keys = set(&[&key]);
    let check = |claims: Value, expected: TokenError| {
        let refused = prove(&keys, &key.sign(&claims)).unwrap_err();
        assert_eq!(refused, expected, "{claims}");
    };
    check(with("exp", json!(seconds(-100))), TokenError::Expired);
    check(with("exp", json!(null)), TokenError::Claims);
    check(with("exp", json!("soon")), TokenError::Claims);
    check(with("nbf", json!(seconds(100))), TokenError::NotYet);
    check(with("aud", json!("other")), TokenError::Audience);
    check(with("aud", json!([])), TokenError::Audience);
    check(with("aud", json!(null)), TokenError::Claims);
    check(with("iss", json!("https://evil")), TokenError::Issuer);
    check(with("sub", json!(7)), TokenError::Claims);
    check(with("sub", json!("a\nb")), TokenError::Claims);
    check(with("access", json!("all")), TokenError::Claims);
    check(with("access", json!([{ "type": "repository" }])), TokenError::Claims);
    // Within the leeway, and lists that hold us.
    for good in [
        with("exp", json!(seconds(-30))),
        with("nbf", json!(seconds(30))),
        with("aud", json!(["other", "registry"])),
    ] {
        prove(&keys, &key.sign(&good)).unwrap();
    }
    // A stranger's key under a known name, and a known key's token that was changed.
    let foreign = Signing::es256("a").sign(&claims());
    assert_eq!(prove(&keys, &foreign).unwrap_err(), TokenError::Signature);
    assert_eq!(prove(&keys, &Signing::es256("z").sign(&claims())).unwrap_err(), TokenError::Key);
    assert_eq!(prove(&keys, &Signing::eddsa("a").sign(&claims())).unwrap_err(), TokenError::Key);
    let (good, other) = (key.sign(&claims()), key.sign(&with("sub", json!("root"))));
    let (good, other) = (good.split('.').collect::<Vec<_>>(), other.split('.').collect::<Vec<_>>());
    let forged = [good[0], other[1], good[2]].join(".");
    assert_eq!(prove(&keys, &forged).unwrap_err(), TokenError::Signature);
    let none = KeySet::empty(&SECRET);
    assert_eq!(prove(&none, &good.join(".")).unwrap_err(), TokenError::Key);
}

#[test]
fn weak_algorithms_are_refused() {
    let key = Signing::es256("a");
    let keys = set(&[&key]);
    let signed = key.sign(&claims());
    let body = signed.split('.').nth(1).unwrap();
    let with_header = |header: Value, signature: &str| {
        format!("{}.{body}.{signature}", URL_SAFE_NO_PAD.encode(header.to_string()))
    };
    for algorithm in ["none", "None", "NONE", "HS256", "HS512", "RS512", "PS256", "ES384", ""] {
        let token = with_header(json!({ "alg": algorithm, "kid": "a" }), "");
        assert_eq!(prove(&keys, &token).unwrap_err(), TokenError::Algorithm, "{algorithm}");
    }
    // The public key, used as the secret of HMAC.
    let secret = serde_json::to_vec(&key.jwk()).unwrap();
    let header = JwtHeader::new(Algorithm::HS256);
    let hmac =
        jsonwebtoken::encode(&header, &claims(), &EncodingKey::from_secret(&secret)).unwrap();
    assert_eq!(prove(&keys, &hmac).unwrap_err(), TokenError::Algorithm);
    let critical = with_header(json!({ "alg": "ES256", "crit": ["b64"] }), "AAAA");
    assert_eq!(prove(&keys, &critical).unwrap_err(), TokenError::Malformed);
    let empty = with_header(json!({ "alg": "ES256", "kid": "a" }), "");
    prove(&keys, &empty).unwrap_err();
}

#[test]
fn a_key_set_takes_only_what_is_of_use() {
    let read = |content: &Value| {
        let content = serde_json::to_vec(content).unwrap();
        KeySet::read(Path::new("k"), &content, &SECRET).map(|set| set.keys.len())
    };
    let good = Signing::es256("a").jwk();
    let mut for_encryption = good.clone();
    for_encryption["use"] = json!("enc");
    let mut other_algorithm = good.clone();
    other_algorithm["alg"] = json!("ES384");
    let symmetric = json!({ "kty": "oct", "k": "c2VjcmV0", "alg": "HS256" });
    let strange = json!({ "kty": "new", "x": 1 });
    let all = json!({ "keys": [good, for_encryption, other_algorithm, symmetric, strange, 7] });
    assert_eq!(read(&all).unwrap(), 1);
    read(&json!({ "keys": [symmetric] })).unwrap_err();
    read(&json!({ "keys": [] })).unwrap_err();
    read(&json!([])).unwrap_err();
    read(&json!({ "keys": vec![good; 65] })).unwrap_err();
}

#[test]
fn the_claim_access_becomes_grants() {
    let key = Signing::es256("a");
    let keys = set(&[&key]);
    let access = json!([
        { "type": "repository", "name": "a/b", "actions": ["pull", "*", "fly"] },
        { "type": "registry", "name": "catalog", "actions": ["*"] },
        { "type": "galaxy", "name": "x", "actions": ["pull"] },
    ]);
    let identity = prove(&keys, &key.sign(&with("access", access))).unwrap();
    let grants = identity.grants.as_ref().unwrap();
    assert!(grants.catalog && grants.decided_by == Decider::Issuer);
    assert_eq!(grants.repositories.len(), 1);
    assert!(grants.covers(super::super::Action::Delete, "a/b"));
    let none = prove(&keys, &key.sign(&with("access", json!([])))).unwrap();
    assert!(none.grants.as_ref().is_some_and(|grants| grants.repositories.is_empty()));
}

proptest! {
    #[test]
    fn any_text_is_refused(text in "\\PC{0,100}", header in "\\PC{0,30}", claims in "\\PC{0,30}") {
        let keys = KeySet::empty(&SECRET);
        prop_assert!(prove(&keys, &text).is_err());
        let shaped = [&*header, &claims, &text].map(|part| URL_SAFE_NO_PAD.encode(part)).join(".");
        prop_assert!(prove(&keys, &shaped).is_err());
    }

    /// One letter of a good token changed is no good token.
    #[test]
    fn a_changed_token_is_refused(at in any::<prop::sample::Index>(), letter in "[A-Za-z0-9_.-]") {
        use std::sync::LazyLock;
        static GOOD: LazyLock<(KeySet, String)> = LazyLock::new(|| {
            let key = Signing::es256("a");
            (set(&[&key]), key.sign(&claims()))
        });
        let (keys, good) = &*GOOD;
        let at = at.index(good.len());
        prop_assume!(good[at..=at] != letter);
        let mut changed = good.clone();
        changed.replace_range(at..=at, &letter);
        prop_assert!(prove(keys, &changed).is_err(), "{} {}", at, letter);
    }
}

proptest! {
    /// Whatever an issuer publishes, keys are found in it or it is refused, within its lines, and
    /// nothing of it is repeated.
    #[test]
    fn any_key_set_is_read_or_refused(
        before in "[{\\[\"a-z: \n]{0,20}",
        keys in prop::collection::vec(prop::collection::hash_map(
            prop::sample::select(vec!["kty", "crv", "alg", "use", "kid", "x", "y", "n", "e", "k"]),
            prop_oneof![
                prop::sample::select(vec!["EC", "RSA", "OKP", "oct", "P-256", "Ed25519", "ES256",
                    "RS256", "EdDSA", "none", "sig", "AQAB", "-_=", ""]).prop_map(Value::from),
                "[A-Za-z0-9_-]{43}".prop_map(Value::from),
                any::<i64>().prop_map(Value::from),
                Just(Value::Null),
            ],
            0..8,
        ), 0..70),
        whole in any::<bool>(),
    ) {
        let text = serde_json::to_string_pretty(&json!({ "keys": keys })).unwrap();
        let text = if whole { text } else { before + &text };
        match KeySet::read(Path::new("keys.json"), text.as_bytes(), &SECRET) {
            Ok(set) => prop_assert!((1..=KEYS_MAX).contains(&set.keys.len())),
            Err(wrong) => {
                prop_assert!(!wrong.is_empty());
                let lines = text.matches('\n').count() + 1;
                for mistake in wrong {
                    let line = mistake.place.at.map_or(1, |(line, _)| line);
                    prop_assert!((1..=lines).contains(&line), "{} {}", mistake, text);
                }
            }
        }
    }
}
