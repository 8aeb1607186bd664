//! The signature vectors of the specification (`spec/testdata/signatures.json`).

use std::path::Path;

use super::*;

/// RFC 8410, 10.3.
const PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
";

#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Vectors {
    format: String,
    vectors: Vec<Vector>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
struct Vector {
    name: String,
    what: String,
    public_key: String,
    digest: Digest,
    bundle: String,
    result: String,
}

fn rewritten(bundle: &str, change: impl FnOnce(&mut Bundle)) -> String {
    let mut bundle: Bundle = serde_json::from_str(bundle).unwrap();
    change(&mut bundle);
    serde_json::to_string(&bundle).unwrap()
}

/// Signs what a payload says, whatever that is.
fn signed_anew(bundle: &str, key: &SigningKey, change: impl FnOnce(String) -> String) -> String {
    rewritten(bundle, |bundle| {
        let envelope = bundle.dsse_envelope.as_mut().unwrap();
        let payload = String::from_utf8(BASE64.decode(&envelope.payload).unwrap()).unwrap();
        let payload = change(payload);
        let message = authenticated(media_type::IN_TOTO, payload.as_bytes());
        envelope.payload = BASE64.encode(payload);
        envelope.signatures[0].sig = BASE64.encode(key.sign(&message).unwrap());
    })
}

/// Those of Ed25519, for a key and a digest.
fn ed25519(key: &SigningKey, digest: &Digest) -> Vec<Vector> {
    let ours = key.public().to_pem();
    let good = String::from_utf8(sign(digest, key).unwrap()).unwrap();
    let moved = signed_anew(&good, key, |payload| {
        payload.replace(digest.hex(), Digest::of(b"something else").hex())
    });
    let other = "https://spdx.dev/Document";
    let attestation = signed_anew(&good, key, |payload| payload.replace(PREDICATE, other));
    let changed = rewritten(&good, |bundle| {
        let envelope = bundle.dsse_envelope.as_mut().unwrap();
        let mut payload = BASE64.decode(&envelope.payload).unwrap();
        payload.push(b' ');
        envelope.payload = BASE64.encode(payload);
    });
    // The encoding's length is signed, not only the bytes: here the payload alone is.
    let bare = rewritten(&good, |bundle| {
        let envelope = bundle.dsse_envelope.as_mut().unwrap();
        let payload = BASE64.decode(&envelope.payload).unwrap();
        envelope.signatures[0].sig = BASE64.encode(key.sign(&payload).unwrap());
    });
    let hint = rewritten(&good, |bundle| {
        bundle.verification_material.public_key = Some(Hint { hint: "nobody".to_owned() });
    });
    let second = rewritten(&good, |bundle| {
        let signatures = &mut bundle.dsse_envelope.as_mut().unwrap().signatures;
        signatures.insert(0, EnvelopeSignature { sig: BASE64.encode([0; 64]) });
    });
    let vector = |name: &str, what: &str, bundle: &str, result: &str| Vector {
        name: name.to_owned(),
        what: what.to_owned(),
        public_key: ours.clone(),
        digest: digest.clone(),
        bundle: bundle.to_owned(),
        result: result.to_owned(),
    };
    vec![
        vector("ed25519", "Ed25519", &good, "verified"),
        vector("ed25519-hint", "a hint of nobody's proves nothing", &hint, "verified"),
        vector("ed25519-second", "the second of two signatures is good", &second, "verified"),
        vector("ed25519-moved", "a good signature of another digest", &moved, "unusable"),
        vector("ed25519-attestation", "another predicate", &attestation, "unusable"),
        vector("ed25519-changed", "a byte more in the payload", &changed, "other-key"),
        vector("ed25519-bare", "the payload signed without its encoding", &bare, "other-key"),
        vector(
            "no-envelope",
            "a bundle without an envelope",
            &rewritten(&good, |bundle| {
                bundle.dsse_envelope = None;
            }),
            "unusable",
        ),
    ]
}

/// All of them.
fn vectors() -> Vectors {
    let key = SigningKey::from_pem(PRIVATE.as_bytes(), b"").unwrap();
    let (ours, digest) = (key.public().to_pem(), Digest::of(b"kybernate"));
    let theirs: Digest = tests::COSIGN_SUBJECT.parse().unwrap();
    let by_cosign = |name: &str, what: &str, key: &str, digest: &Digest, result: &str| Vector {
        name: name.to_owned(),
        what: what.to_owned(),
        public_key: key.to_owned(),
        digest: digest.clone(),
        bundle: tests::COSIGN.to_owned(),
        result: result.to_owned(),
    };
    let cosigns = tests::COSIGN_KEY;
    let mut vectors = vec![
        by_cosign("p256", "P-256, made by cosign 3.1.1", cosigns, &theirs, "verified"),
        by_cosign("p256-other", "the same, and another digest", cosigns, &digest, "unusable"),
        by_cosign("p256-by-ed25519", "the same, and an Ed25519 key", &ours, &theirs, "other-key"),
    ];
    vectors.extend(ed25519(&key, &digest));
    Vectors { format: "1.0".to_owned(), vectors }
}

/// What others verify with is what we sign and verify. `UPDATE=1 cargo test` writes it anew.
#[test]
fn the_signature_vectors_are_ours() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/testdata/signatures.json");
    let made = serde_json::to_string_pretty(&vectors()).unwrap() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        fs_err::write(&path, &made).unwrap();
    }
    let committed = fs_err::read_to_string(&path).unwrap_or_default();
    assert!(committed == made, "run `UPDATE=1 cargo test` and commit spec/testdata");
    let committed: Vectors = serde_json::from_str(&committed).unwrap();
    for Vector { name, public_key, digest, bundle, result, .. } in committed.vectors {
        let key = PublicKey::from_pem(public_key.as_bytes()).unwrap();
        let found = match verify(bundle.as_bytes(), &digest, &[key]) {
            Ok(Proof::By(_)) => "verified",
            Ok(Proof::OtherKey(_)) => "other-key",
            Err(_) => "unusable",
        };
        assert_eq!(found, result, "{name}");
    }
}
