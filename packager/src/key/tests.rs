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
    assert!(matches!(error.kind, KeyErrorKind::WrongKind(_)), "{error:?}");
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

/// Writes a PEM text whose key names its algorithm as real ones do.
fn pem(label: &str, algorithm: &[u8]) -> String {
    let der = [&[0x30, 0x59, 0x30, 0x13], algorithm, &[0; 40]].concat();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64.encode(der))
}

#[test]
fn a_file_that_is_no_such_key_is_told_for_what_it_is() {
    let made = SigningKey::generate().unwrap();
    let (private, public) = (made.to_encrypted_pem(b"x").unwrap(), made.public().to_pem());
    let rsa = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
    let p384 = [0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x22];
    let ed448 = [0x06, 0x03, 0x2b, 0x65, 0x71];
    let label = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    let both = [
        (String::new(), "it is empty", "`kyb keygen NAME`"),
        (" \n".to_owned(), "it is empty", "`kyb keygen NAME`"),
        ("ssh-ed25519 AAAAC3Nz me@work".to_owned(), "public key of ssh", "`kyb keygen NAME`"),
        (label("OPENSSH PRIVATE KEY"), "private key of ssh", "`kyb keygen NAME`"),
        (label("PGP PRIVATE KEY BLOCK"), "it is of PGP", "`kyb keygen NAME`"),
        (label("X"), "calls itself \"X\"", "`kyb keygen NAME`"),
        (label("CERTIFICATE REQUEST"), "a request for a certificate", "`kyb keygen NAME`"),
        ("[[rule]]".to_owned(), "it is no key in PEM", "`kyb keygen NAME`"),
        (pem("PRIVATE KEY", &ed448), "a private Ed448 key", ""),
        (pem("PUBLIC KEY", &ed448), "a public Ed448 key", ""),
        (label("CERTIFICATE"), "it is a certificate, not a key", ""),
        (label("EC PRIVATE KEY"), "in the form of SEC 1", "`openssl p"),
        (label("ENCRYPTED PRIVATE KEY"), "that OpenSSL encrypted", ""),
        (label("RSA PUBLIC KEY"), "a public RSA key in the form of PKCS #1", ""),
        (label("RSA PRIVATE KEY"), "a private RSA key in the form of PKCS #1", ""),
    ];
    let signing = [
        (public, "it is a public P-256 key", "NAME.key beside NAME.pub"),
        (pem("PRIVATE KEY", &rsa), "a private RSA key", "`kyb keygen NAME`"),
        (pem("PRIVATE KEY", &p384), "a private P-384 key", "`kyb keygen NAME`"),
        (label("ENCRYPTED PRIVATE KEY"), "OpenSSL", "`cosign import-key-pair --key FILE`"),
    ];
    let checking = [
        (private, "it is a private key, encrypted", "NAME.pub beside it"),
        (pem("PRIVATE KEY", &p384), "a private P-384 key", "`openssl pkey -in FILE -pubout`"),
        (label("CERTIFICATE"), "a certificate", "`openssl x509 -in FILE -noout -pubkey`"),
        (label("RSA PUBLIC KEY"), "PKCS #1", "`openssl rsa -RSAPublicKey_in"),
    ];
    for (file, is, remedy) in both.iter().chain(&signing) {
        let told = SigningKey::from_pem(file.as_bytes(), b"").unwrap_err().kind.to_string();
        assert!(told.contains(is) && told.contains(remedy), "{told}");
        assert!(told.contains("a private key was needed"), "{told}");
    }
    for (file, is, remedy) in both.iter().chain(&checking) {
        let told = PublicKey::from_pem(file.as_bytes()).unwrap_err().kind.to_string();
        assert!(told.contains(is) && told.contains(remedy), "{told}");
        assert!(told.contains("a public key was needed"), "{told}");
    }
    let der = SigningKey::from_pem(&[0x30, 0x82, 0xff, 0x00], b"").unwrap_err();
    assert!(der.kind.to_string().contains("binary, maybe DER"), "{der:?}");
}

#[test]
fn no_password_is_asked_for_a_file_that_is_no_private_key() {
    let directory = tempfile::tempdir().unwrap();
    let made = SigningKey::generate().unwrap();
    let [private, public] = made.write_files(&directory.path().join("k"), b"x").unwrap();
    let wrong = SigningKey::from_file(&public, || panic!("it asks for a password")).unwrap_err();
    assert!(matches!(wrong.kind, KeyErrorKind::WrongKind(_)), "{wrong:?}");
    let none = SigningKey::from_file(&private, || Ok(None)).unwrap_err();
    assert!(matches!(none.kind, KeyErrorKind::NoPassword), "{none:?}");
    let bad = SigningKey::from_file(directory.path(), || Ok(None)).unwrap_err();
    assert!(matches!(bad.kind, KeyErrorKind::Directory), "{bad:?}");
}
