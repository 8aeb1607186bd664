use super::*;

/// Written by cosign 3.1.1 with `sign --key --tlog-upload=false --use-signing-config=false`.
pub(super) const COSIGN: &str = r#"{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json", "verificationMaterial":{"publicKey":{"hint":"KYcgMOCfqr4N6SYs32bLLa4qkUWD+kz61QYjA/dJPUg="}}, "dsseEnvelope":{"payload":"eyJfdHlwZSI6Imh0dHBzOi8vaW4tdG90by5pby9TdGF0ZW1lbnQvdjEiLCAic3ViamVjdCI6W3siZGlnZXN0Ijp7InNoYTI1NiI6IjQwYWMyYzQyYzA5YjU5OWI4ZWRkOTgwN2M1ODQ2ZWEwOGY3NmJkZTgwOWIyMjkzNTkyZDY1ZDA2ZjI5ZGNhZTIifSwgImFubm90YXRpb25zIjp7fX1dLCAicHJlZGljYXRlVHlwZSI6Imh0dHBzOi8vc2lnc3RvcmUuZGV2L2Nvc2lnbi9zaWduL3YxIiwgInByZWRpY2F0ZSI6e319", "payloadType":"application/vnd.in-toto+json", "signatures":[{"sig":"MEQCIAp5FtZYnEtq91fQ0hNfeRpSadoDJ7c3OClRSi8ccJ9zAiA/d0+g47aDQW9XedHS4DouiX2oPRJ2n6UJ0SHTdUjsIw=="}]}}"#;
pub(super) const COSIGN_KEY: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEUXItgZRxH0mF239AZ0oIUUmMHi3a
CJXDDRK7074nPNBl6Ee2ke2vuX/HCeZi1D4owcaCIYXWmE/CcQmLT60HNw==
-----END PUBLIC KEY-----
";
pub(super) const COSIGN_SUBJECT: &str =
    "sha256:40ac2c42c09b599b8edd9807c5846ea08f76bde809b2293592d65d06f29dcae2";

#[test]
fn a_bundle_of_cosign_is_understood() {
    let key = PublicKey::from_pem(COSIGN_KEY.as_bytes()).unwrap();
    let digest = COSIGN_SUBJECT.parse().unwrap();
    let proof = verify(COSIGN.as_bytes(), &digest, std::slice::from_ref(&key)).unwrap();
    assert_eq!(proof, Proof::By(key.hint()));
}

#[test]
fn a_bundle_of_another_key_names_it() {
    let other = SigningKey::generate().unwrap().public().clone();
    let digest = COSIGN_SUBJECT.parse().unwrap();
    let proof = verify(COSIGN.as_bytes(), &digest, &[other]).unwrap();
    assert_eq!(proof, Proof::OtherKey("KYcgMOCfqr4N6SYs32bLLa4qkUWD+kz61QYjA/dJPUg=".to_owned()));
}

#[test]
fn a_bundle_about_another_digest_proves_nothing() {
    let key = SigningKey::generate().unwrap();
    let bundle = sign(&Digest::of(b"this"), &key).unwrap();
    let keys = [key.public().clone()];
    assert!(matches!(verify(&bundle, &Digest::of(b"this"), &keys), Ok(Proof::By(_))));
    let error = verify(&bundle, &Digest::of(b"that"), &keys).unwrap_err();
    assert!(matches!(error, BundleError::OtherSubject), "{error:?}");
}

#[test]
fn a_changed_statement_is_not_signed() {
    let key = SigningKey::generate().unwrap();
    let bundle = String::from_utf8(sign(&Digest::of(b"this"), &key).unwrap()).unwrap();
    let mut bundle: Bundle = serde_json::from_str(&bundle).unwrap();
    let envelope = bundle.dsse_envelope.as_mut().unwrap();
    let payload = String::from_utf8(BASE64.decode(&envelope.payload).unwrap()).unwrap();
    let forged = payload.replace(Digest::of(b"this").hex(), Digest::of(b"that").hex());
    envelope.payload = BASE64.encode(forged);
    let bundle = serde_json::to_vec(&bundle).unwrap();
    let proof = verify(&bundle, &Digest::of(b"that"), &[key.public().clone()]).unwrap();
    assert!(matches!(proof, Proof::OtherKey(_)), "{proof:?}");
}

#[test]
fn another_statement_about_the_same_digest_is_no_signature() {
    let key = SigningKey::generate().unwrap();
    let digest = Digest::of(b"this");
    let bundle = sign(&digest, &key).unwrap();
    let mut bundle: Bundle = serde_json::from_slice(&bundle).unwrap();
    let envelope = bundle.dsse_envelope.as_mut().unwrap();
    let payload = String::from_utf8(BASE64.decode(&envelope.payload).unwrap()).unwrap();
    let attestation = payload.replace(PREDICATE, "https://spdx.dev/Document");
    let signature = key.sign(&authenticated(media_type::IN_TOTO, attestation.as_bytes())).unwrap();
    envelope.payload = BASE64.encode(attestation);
    envelope.signatures[0].sig = BASE64.encode(signature);
    let bundle = serde_json::to_vec(&bundle).unwrap();
    let error = verify(&bundle, &digest, &[key.public().clone()]).unwrap_err();
    assert!(matches!(error, BundleError::Kind(..)), "{error:?}");
}

#[test]
fn nonsense_is_an_error() {
    let digest = Digest::of(b"this");
    for nonsense in ["", "{}", "null", "[1]", r#"{"mediaType":"x","verificationMaterial":{}}"#] {
        verify(nonsense.as_bytes(), &digest, &[]).unwrap_err();
    }
}
