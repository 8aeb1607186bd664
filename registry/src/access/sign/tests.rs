use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::access::token::{Issuer, Unproven};

const SECRET: [u8; 32] = [5; 32];

fn issuer() -> Issuer {
    Issuer { name: None, claim: "us".into(), audience: "us".into(), decides: false }
}

fn sign(signer: &Signer) -> String {
    let access =
        [AccessClaim { kind: "repository".into(), name: "a".into(), actions: vec!["pull".into()] }];
    let claims = Claims { iss: "us", aud: "us", sub: "alice", access: &access };
    signer.sign(&claims, SystemTime::now(), Duration::from_mins(5)).unwrap()
}

fn is_good(signer: &Signer, token: &str) -> bool {
    let token = Unproven::parse(token).unwrap();
    signer.keys.prove(&token, &issuer(), SystemTime::now()).is_ok()
}

#[test]
fn keys_are_made_kept_and_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(KEY_FILE);
    Signer::make_file(&path).unwrap();
    let first = fs::read(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    Signer::make_file(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), first, "a key that is there is kept");
    let old = Signer::read(&path, &first, &SECRET).unwrap();
    let token = sign(&old);
    assert!(is_good(&old, &token));

    fs::remove_file(&path).unwrap();
    Signer::make_file(&path).unwrap();
    let second = fs::read(&path).unwrap();
    let both = Signer::read(&path, &[&*second, &*first].concat(), &SECRET).unwrap();
    let new = Signer::read(&path, &second, &SECRET).unwrap();
    assert!(is_good(&both, &token) && !is_good(&new, &token));
    assert!(is_good(&new, &sign(&both)), "the first key signs");
    let published = both.public();
    assert_eq!(published["keys"].as_array().unwrap().len(), 2);
    // Whoever has the published keys can check.
    let content = serde_json::to_vec(&published).unwrap();
    let keys = KeySet::read(Path::new("k"), &content, &SECRET).unwrap();
    let theirs = Issuer { name: Some("us".into()), ..issuer() };
    keys.prove(&Unproven::parse(&token).unwrap(), &theirs, SystemTime::now()).unwrap();
}

#[test]
fn what_is_no_key_is_told_without_it() {
    let read = |content: &[u8]| {
        let wrong = Signer::read(Path::new("k"), content, &SECRET).unwrap_err();
        wrong.iter().map(ToString::to_string).collect::<String>()
    };
    assert!(read(b"").contains("no private key"));
    assert!(read(b"secret").contains("no private key"));
    let bad = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
    let told = read(bad.as_bytes());
    assert!(told.contains("P-256") && !told.contains("c2VjcmV0"), "{told}");
    let cut = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n";
    read(cut.as_bytes());
}
