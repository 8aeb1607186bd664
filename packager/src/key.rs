//! Key pairs as cosign has them: the private key encrypted in PEM, the public key in SPKI PEM.
//!
//! P-256 is for both. With Ed25519 cosign 3 verifies what we sign; what it signs itself with such a
//! key, nobody verifies (`spec/artifact.md`, "Signature").

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::Digest;
use sha2::{Digest as _, Sha256};
use sigstore::crypto::Signature;
use sigstore::crypto::signing_key::Signer;
use sigstore::crypto::signing_key::ecdsa::EllipticCurve;
use sigstore::crypto::signing_key::ecdsa::ec::{EcdsaKeys, EcdsaSigner};
use sigstore::crypto::signing_key::ed25519::{Ed25519Keys, Ed25519Signer};
use sigstore::crypto::verification_key::CosignVerificationKey;
use sigstore::errors::SigstoreError;

mod kind;

pub use self::kind::WrongKind;
use self::kind::{Content, Wanted};

/// Largest key file read. Real ones have less than 1 KiB, RSA public keys included.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// A private key that signs: P-256 or Ed25519.
pub struct SigningKey {
    signer: Box<dyn Signer + Send + Sync>,
    public: PublicKey,
}

/// The kinds of keys that sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyType {
    /// ECDSA on P-256 with SHA-256; cosign's.
    #[default]
    P256,
    /// Ed25519 (RFC 8032).
    Ed25519,
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
    #[error(
        "the password is wrong: kyb takes it from COSIGN_PASSWORD, or asks for it in a terminal where that is \
         not set, and an agent takes it from `password_file`"
    )]
    Password,
    /// It is encrypted, and no password was given.
    #[error("it is encrypted: set COSIGN_PASSWORD, or run in a terminal")]
    NoPassword,
    /// It is no key, or of a kind that cannot do this.
    #[error("it is not usable: damaged, or of a kind that signs no checkpoints")]
    Unusable(#[source] SigstoreError),
    /// It is something else than what was needed.
    #[error("{0}")]
    WrongKind(WrongKind),
    /// It is a directory.
    #[error("it is a directory: name the file in it")]
    Directory,
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
        Self::generate_of(KeyType::P256)
    }

    /// Makes a new key.
    pub fn generate_of(kind: KeyType) -> Result<Self, KeyError> {
        let made = match kind {
            KeyType::P256 => EcdsaKeys::new(EllipticCurve::P256).and_then(|keys| ecdsa(&keys)),
            KeyType::Ed25519 => Ed25519Keys::new().and_then(|keys| ed25519(&keys)),
        };
        Self::of(made.map_err(|error| unusable("make", "a key", error))?, "a new key")
    }

    /// Opens a key in cosign's encrypted PEM, or in PKCS #8 PEM in the clear.
    pub fn from_pem(pem: &[u8], password: &[u8]) -> Result<Self, KeyError> {
        const WHICH: &str = "the private key";
        check_kind(pem, Wanted::Private).map_err(|kind| KeyError {
            operation: "open",
            key: WHICH.to_owned(),
            kind,
        })?;
        let opened = if is_encrypted(pem) {
            // What it is shows only once it is open; the second derivation costs 0.1 s.
            either(EcdsaKeys::from_encrypted_pem(pem, password), || {
                Ed25519Keys::from_encrypted_pem(pem, password)
            })
        } else {
            either(EcdsaKeys::from_pem(pem), || Ed25519Keys::from_pem(pem))
        };
        let signer = opened.map_err(|error| match error {
            // What the secret box says when it does not open.
            SigstoreError::PrivateKeyEncryptError(_) => {
                KeyError { operation: "open", key: WHICH.to_owned(), kind: KeyErrorKind::Password }
            }
            other => unusable("open", WHICH, other),
        })?;
        Self::of(signer, WHICH)
    }

    /// Opens a key file. `password` is asked only when the key is encrypted.
    pub fn from_file(
        path: &Path,
        password: impl FnOnce() -> io::Result<Option<String>>,
    ) -> Result<Self, KeyError> {
        let wrong = |kind| of_file("open", path, kind);
        let pem = read_file(path)?;
        // Before a password is asked for in vain.
        check_kind(&pem, Wanted::Private).map_err(wrong)?;
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

    /// Signs `message`; returns the signature: DER for P-256, 64 bytes for Ed25519.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        self.signer.sign(message).map_err(|error| unusable("sign with", "the private key", error))
    }

    /// Returns the private key in cosign's encrypted PEM.
    pub fn to_encrypted_pem(&self, password: &[u8]) -> Result<String, KeyError> {
        let pem = self.signer.key_pair().private_key_to_encrypted_pem(password);
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

    fn of(signer: Box<dyn Signer + Send + Sync>, which: &str) -> Result<Self, KeyError> {
        let failed = |error| unusable("use", which, error);
        let spki = signer.key_pair().public_key_to_der().map_err(failed)?;
        let key = CosignVerificationKey::try_from_der(&spki).map_err(failed)?;
        let public = PublicKey { key, spki };
        if public.key_type().is_none() {
            let text = "only P-256 and Ed25519 keys sign checkpoints".to_owned();
            return Err(failed(SigstoreError::KeyParseError(text)));
        }
        Ok(Self { signer, public })
    }
}

impl PublicKey {
    /// Reads a key in SPKI PEM.
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        check_kind(pem, Wanted::Public).map_err(|kind| KeyError {
            operation: "read",
            key: "the public key".to_owned(),
            kind,
        })?;
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

    /// Returns its kind, when it is one that signs here.
    pub const fn key_type(&self) -> Option<KeyType> {
        match &self.key {
            CosignVerificationKey::ECDSA_P256_SHA256_ASN1(_) => Some(KeyType::P256),
            CosignVerificationKey::ED25519(_) => Some(KeyType::Ed25519),
            _ => None,
        }
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

type Opened = Result<Box<dyn Signer + Send + Sync>, SigstoreError>;

fn ecdsa(keys: &EcdsaKeys) -> Opened {
    Ok(Box::new(EcdsaSigner::from_ecdsa_keys(keys)?))
}

fn ed25519(keys: &Ed25519Keys) -> Opened {
    Ok(Box::new(Ed25519Signer::from_ed25519_keys(keys)?))
}

/// Takes an ECDSA key, or the Ed25519 key that it is instead.
fn either(
    first: Result<EcdsaKeys, SigstoreError>,
    second: impl FnOnce() -> Result<Ed25519Keys, SigstoreError>,
) -> Opened {
    match first {
        Ok(keys) => ecdsa(&keys),
        Err(error @ SigstoreError::PrivateKeyEncryptError(_)) => Err(error),
        // When it is neither, the first words tell what is wrong.
        Err(error) => second().map_or(Err(error), |keys| ed25519(&keys)),
    }
}

/// Refuses what is something else than is wanted.
fn check_kind(pem: &[u8], wanted: Wanted) -> Result<(), KeyErrorKind> {
    WrongKind::of(pem, wanted).map_or(Ok(()), |wrong| Err(KeyErrorKind::WrongKind(wrong)))
}

fn is_encrypted(pem: &[u8]) -> bool {
    Content::of(pem) == Content::Encrypted
}

fn read_file(path: &Path) -> Result<Vec<u8>, KeyError> {
    read_bounded(path, KEY_BYTES_MAX).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => of_file("read", path, KeyErrorKind::TooLarge),
        io::ErrorKind::IsADirectory => of_file("read", path, KeyErrorKind::Directory),
        _ => of_file("read", path, KeyErrorKind::Io(error)),
    })
}

/// Reads a file of at most `limit` bytes. Devices and pipes tell no size: what is read is bounded,
/// not what they claim.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    fs_err::File::open(path)?.take(limit.saturating_add(1)).read_to_end(&mut content)?;
    if u64::try_from(content.len()).is_ok_and(|length| length <= limit) {
        Ok(content)
    } else {
        Err(io::ErrorKind::FileTooLarge.into())
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
mod tests;
