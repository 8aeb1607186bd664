use std::os::unix::fs::PermissionsExt as _;

use super::*;

#[test]
fn a_written_pair_is_read_back_and_works() {
    for kind in [KeyType::P256, KeyType::Ed25519] {
        written_and_read(kind);
    }
}

fn written_and_read(kind: KeyType) {
    let directory = tempfile::tempdir().unwrap();
    let made = SigningKey::generate_of(kind).unwrap();
    let [private, public] = made.write_files(&directory.path().join("node"), b"secret").unwrap();
    let permissions = fs_err::metadata(&private).unwrap().permissions().mode();
    assert_eq!(permissions & 0o777, 0o600);
    let read = SigningKey::from_file(&private, || Ok(Some("secret".to_owned()))).unwrap();
    let public = PublicKey::from_file(&public).unwrap();
    assert_eq!(public.fingerprint(), read.public().fingerprint());
    assert_eq!((public.key_type(), read.public().key_type()), (Some(kind), Some(kind)));
    let signature = read.sign(b"message").unwrap();
    assert!(public.verifies(&signature, b"message"));
    assert!(!public.verifies(&signature, b"massage"));
}

#[test]
fn a_wrong_password_is_told_apart() {
    for kind in [KeyType::P256, KeyType::Ed25519] {
        let made = SigningKey::generate_of(kind).unwrap();
        let pem = made.to_encrypted_pem(b"right").unwrap();
        let error = SigningKey::from_pem(pem.as_bytes(), b"wrong").unwrap_err();
        assert!(matches!(error.kind, KeyErrorKind::Password), "{error:?}");
    }
    let error = SigningKey::from_pem(b"no key", b"").unwrap_err();
    assert!(matches!(error.kind, KeyErrorKind::Unusable(_)), "{error:?}");
}

#[test]
fn a_key_file_is_never_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let public = directory.path().join("node.pub");
    fs_err::write(&public, "precious").unwrap();
    let key = SigningKey::generate().unwrap();
    let error = key.write_files(&directory.path().join("node"), b"").unwrap_err();
    assert!(matches!(error.kind, KeyErrorKind::Exists), "{error:?}");
    assert_eq!(fs_err::read_to_string(&public).unwrap(), "precious");
    assert!(!directory.path().join("node.key").exists());
}

#[test]
fn the_hint_is_cosigns() {
    let pem = "-----BEGIN PUBLIC KEY-----\n\
        MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEUXItgZRxH0mF239AZ0oIUUmMHi3a\n\
        CJXDDRK7074nPNBl6Ee2ke2vuX/HCeZi1D4owcaCIYXWmE/CcQmLT60HNw==\n\
        -----END PUBLIC KEY-----\n";
    let key = PublicKey::from_pem(pem.as_bytes()).unwrap();
    assert_eq!(key.hint(), "KYcgMOCfqr4N6SYs32bLLa4qkUWD+kz61QYjA/dJPUg=");
    assert_eq!(key.to_pem(), pem);
}

/// RFC 8410, 10.1 and 10.3: also what `openssl genpkey -algorithm ed25519` writes.
#[test]
fn an_ed25519_key_in_the_clear_is_read() {
    let pem = "-----BEGIN PRIVATE KEY-----\n\
        MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
        -----END PRIVATE KEY-----\n";
    let public = "-----BEGIN PUBLIC KEY-----\n\
        MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
        -----END PUBLIC KEY-----\n";
    let key = SigningKey::from_pem(pem.as_bytes(), b"").unwrap();
    assert_eq!(key.public().to_pem(), public);
    assert_eq!(key.public().key_type(), Some(KeyType::Ed25519));
    let signature = key.sign(b"message").unwrap();
    assert_eq!((signature.len(), &signature), (64, &key.sign(b"message").unwrap()));
    let public = PublicKey::from_pem(public.as_bytes()).unwrap();
    assert!(public.verifies(&signature, b"message") && !public.verifies(&signature, b"massage"));
}
