//! Key pairs as cosign has them: the private key encrypted in PEM, the public key in SPKI PEM.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::Digest;
use sha2::{Digest as _, Sha256};
use sigstore::crypto::Signature;
use sigstore::crypto::signing_key::ecdsa::EllipticCurve;
use sigstore::crypto::signing_key::ecdsa::ec::{EcdsaKeys, EcdsaSigner};
use sigstore::crypto::signing_key::{KeyPair as _, Signer as _};
use sigstore::crypto::verification_key::CosignVerificationKey;
use sigstore::errors::SigstoreError;

/// Largest key file read. Real ones have less than 1 KiB, RSA public keys included.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// The line a private key in the clear begins with.
const CLEAR: &str = "-----BEGIN PRIVATE KEY-----";

/// A private key that signs: P-256.
pub struct SigningKey {
    signer: EcdsaSigner,
    public: PublicKey,
}

/// A public key that signatures are checked with: P-256, or another kind that cosign signs with.
#[derive(Clone)]
pub struct PublicKey {
    key: CosignVerificationKey,
    spki: Vec<u8>,
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} {key}")]
pub struct KeyError {
    /// What was tried, as "read".
    pub operation: &'static str,
    /// Which key: a path, or what kind of key.
    pub key: String,
    /// What happened.
    #[source]
    pub kind: KeyErrorKind,
}

/// What is wrong with a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyErrorKind {
    /// The password does not open it.
    #[error("the password is wrong")]
    Password,
    /// It is encrypted, and no password was given.
    #[error("it is encrypted: set COSIGN_PASSWORD, or run in a terminal")]
    NoPassword,
    /// It is no key, or of a kind that cannot do this.
    #[error("it is not usable: {0}")]
    Unusable(#[source] SigstoreError),
    /// The file is too large to be a key.
    #[error("it has more than {KEY_BYTES_MAX} bytes")]
    TooLarge,
    /// There is a file already, which is never replaced.
    #[error("the file exists, and keys are never replaced")]
    Exists,
    /// The file could not be read or written.
    #[error("input or output failed")]
    Io(#[source] io::Error),
}

impl SigningKey {
    /// Makes a new P-256 key.
    pub fn generate() -> Result<Self, KeyError> {
        let failed = |error| unusable("make", "a P-256 key", error);
        Self::of(&EcdsaKeys::new(EllipticCurve::P256).map_err(failed)?, "a P-256 key")
    }

    /// Opens a key in cosign's encrypted PEM, or in PKCS #8 PEM in the clear.
    pub fn from_pem(pem: &[u8], password: &[u8]) -> Result<Self, KeyError> {
        const WHICH: &str = "the private key";
        let keys = if is_encrypted(pem) {
            EcdsaKeys::from_encrypted_pem(pem, password)
        } else {
            EcdsaKeys::from_pem(pem)
        };
        let keys = keys.map_err(|error| match error {
            // What the secret box says when it does not open.
            SigstoreError::PrivateKeyEncryptError(_) => {
                KeyError { operation: "open", key: WHICH.to_owned(), kind: KeyErrorKind::Password }
            }
            other => unusable("open", WHICH, other),
        })?;
        Self::of(&keys, WHICH)
    }

    /// Opens a key file. `password` is asked only when the key is encrypted.
    pub fn from_file(
        path: &Path,
        password: impl FnOnce() -> io::Result<Option<String>>,
    ) -> Result<Self, KeyError> {
        let wrong = |kind| of_file("open", path, kind);
        let pem = read_file(path)?;
        if !is_encrypted(&pem) {
            return Self::from_pem(&pem, &[]).map_err(|error| wrong(error.kind));
        }
        let password = password().map_err(|error| wrong(KeyErrorKind::Io(error)))?;
        let password = password.ok_or_else(|| wrong(KeyErrorKind::NoPassword))?;
        Self::from_pem(&pem, password.as_bytes()).map_err(|error| wrong(error.kind))
    }

    /// Returns the public key.
    pub const fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs `message`; returns the signature in DER.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        self.signer.sign(message).map_err(|error| unusable("sign with", "the private key", error))
    }

    /// Returns the private key in cosign's encrypted PEM.
    pub fn to_encrypted_pem(&self, password: &[u8]) -> Result<String, KeyError> {
        let pem = self.signer.ecdsa_keys().private_key_to_encrypted_pem(password);
        pem.map(|pem| pem.to_string())
            .map_err(|error| unusable("encrypt", "the private key", error))
    }

    /// Writes `<prefix>.key`, which only its owner may read, and `<prefix>.pub`. Existing files are
    /// left alone; either both files are made or none.
    pub fn write_files(&self, prefix: &Path, password: &[u8]) -> Result<[PathBuf; 2], KeyError> {
        let private = with_suffix(prefix, ".key");
        let public = with_suffix(prefix, ".pub");
        for path in [&private, &public] {
            if path.symlink_metadata().is_ok() {
                return Err(of_file("write", path, KeyErrorKind::Exists));
            }
        }
        write_file(&private, 0o600, &self.to_encrypted_pem(password)?)?;
        if let Err(error) = write_file(&public, 0o644, &self.public.to_pem()) {
            fs_err::remove_file(&private)
                .map_err(|error| of_file("remove", &private, KeyErrorKind::Io(error)))?;
            return Err(error);
        }
        Ok([private, public])
    }

    fn of(keys: &EcdsaKeys, which: &str) -> Result<Self, KeyError> {
        let failed = |error| unusable("use", which, error);
        let spki = keys.public_key_to_der().map_err(failed)?;
        let key = CosignVerificationKey::try_from_der(&spki).map_err(failed)?;
        let p256 = matches!(key, CosignVerificationKey::ECDSA_P256_SHA256_ASN1(_));
        if !p256 {
            let text = "only P-256 keys sign checkpoints".to_owned();
            return Err(failed(SigstoreError::KeyParseError(text)));
        }
        let signer = EcdsaSigner::from_ecdsa_keys(keys).map_err(failed)?;
        Ok(Self { signer, public: PublicKey { key, spki } })
    }
}

impl PublicKey {
    /// Reads a key in SPKI PEM.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        let key = CosignVerificationKey::try_from_pem(pem)
            .map_err(|error| unusable("read", "the public key", error))?;
        let spki = match &key {
            CosignVerificationKey::RSA_PSS_SHA256(spki)
            | CosignVerificationKey::RSA_PKCS1_SHA256(spki)
            | CosignVerificationKey::ECDSA_P256_SHA256_ASN1(spki)
            | CosignVerificationKey::ECDSA_P384_SHA384_ASN1(spki)
            | CosignVerificationKey::ECDSA_P521_SHA512_ASN1(spki)
            | CosignVerificationKey::ED25519(spki) => spki.clone(),
        };
        Ok(Self { key, spki })
    }

    /// Reads a key file.
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        let pem = read_file(path)?;
        Self::from_pem(&pem).map_err(|error| of_file("read", path, error.kind))
    }

    /// Returns the key in SPKI PEM.
    pub fn to_pem(&self) -> String {
        let text = BASE64.encode(&self.spki);
        let mut pem = "-----BEGIN PUBLIC KEY-----\n".to_owned();
        for (position, letter) in text.chars().enumerate() {
            if position > 0 && position % 64 == 0 {
                pem.push('\n');
            }
            pem.push(letter);
        }
        pem.push_str("\n-----END PUBLIC KEY-----\n");
        pem
    }

    /// Returns the SHA-256 of the key in SPKI DER: what people compare.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.spki)
    }

    /// Returns what bundles name the key by: the base64 of the fingerprint's bytes.
    pub fn hint(&self) -> String {
        BASE64.encode(Sha256::digest(&self.spki))
    }

    /// Whether `signature` over `message` was made with the private half.
    pub fn verifies(&self, signature: &[u8], message: &[u8]) -> bool {
        self.key.verify_signature(Signature::Raw(signature), message).is_ok()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("public", &self.public).finish_non_exhaustive()
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PublicKey").field(&self.fingerprint()).finish()
    }
}

fn is_encrypted(pem: &[u8]) -> bool {
    !String::from_utf8_lossy(pem).contains(CLEAR)
}

fn read_file(path: &Path) -> Result<Vec<u8>, KeyError> {
    let wrong = |kind| of_file("read", path, kind);
    // Devices and pipes tell no size: what is read is bounded, not what they claim.
    let read = || {
        let mut content = Vec::new();
        fs_err::File::open(path)?.take(KEY_BYTES_MAX + 1).read_to_end(&mut content)?;
        Ok(content)
    };
    let content = read().map_err(|error| wrong(KeyErrorKind::Io(error)))?;
    if u64::try_from(content.len()).is_ok_and(|length| length <= KEY_BYTES_MAX) {
        Ok(content)
    } else {
        Err(wrong(KeyErrorKind::TooLarge))
    }
}

fn write_file(path: &Path, mode: u32, content: &str) -> Result<(), KeyError> {
    let write = || {
        let mut file =
            fs_err::OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(content.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => of_file("write", path, KeyErrorKind::Exists),
        _ => of_file("write", path, KeyErrorKind::Io(error)),
    })
}

fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

fn of_file(operation: &'static str, path: &Path, kind: KeyErrorKind) -> KeyError {
    KeyError { operation, key: format!("key file {}", path.display()), kind }
}

fn unusable(operation: &'static str, key: &str, error: SigstoreError) -> KeyError {
    KeyError { operation, key: key.to_owned(), kind: KeyErrorKind::Unusable(error) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_written_pair_is_read_back_and_works() {
        let directory = tempfile::tempdir().unwrap();
        let made = SigningKey::generate().unwrap();
        let [private, public] =
            made.write_files(&directory.path().join("node"), b"secret").unwrap();
        let permissions = fs_err::metadata(&private).unwrap().permissions().mode();
        assert_eq!(permissions & 0o777, 0o600);
        let read = SigningKey::from_file(&private, || Ok(Some("secret".to_owned()))).unwrap();
        let public = PublicKey::from_file(&public).unwrap();
        assert_eq!(public.fingerprint(), read.public().fingerprint());
        let signature = read.sign(b"message").unwrap();
        assert!(public.verifies(&signature, b"message"));
        assert!(!public.verifies(&signature, b"massage"));
    }

    #[test]
    fn a_wrong_password_is_told_apart() {
        let pem = SigningKey::generate().unwrap().to_encrypted_pem(b"right").unwrap();
        let error = SigningKey::from_pem(pem.as_bytes(), b"wrong").unwrap_err();
        assert!(matches!(error.kind, KeyErrorKind::Password), "{error:?}");
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
}
