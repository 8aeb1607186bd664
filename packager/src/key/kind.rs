//! What is in a file that was given for a key, so that people are told what it is instead, what was
//! needed and what to do. Nothing is decided by it: that is for who reads the key.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

/// Bytes of a key in DER in which its algorithm is named.
const ALGORITHM_BYTES: usize = 64;

/// Names of algorithms and curves in DER (RFC 5480, 8017, 8410), those that name more before those
/// that name less.
const ALGORITHMS: &[(&[u8], Algorithm)] = &[
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07], Algorithm::P256),
    (&[0x2b, 0x81, 0x04, 0x00, 0x22], Algorithm::Other("P-384")),
    (&[0x2b, 0x81, 0x04, 0x00, 0x23], Algorithm::Other("P-521")),
    (&[0x2b, 0x81, 0x04, 0x00, 0x0a], Algorithm::Other("secp256k1")),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01], Algorithm::Other("RSA")),
    (&[0x2a, 0x86, 0x48, 0xce, 0x38, 0x04, 0x01], Algorithm::Other("DSA")),
    (&[0x06, 0x03, 0x2b, 0x65, 0x70], Algorithm::Ed25519),
    (&[0x06, 0x03, 0x2b, 0x65, 0x71], Algorithm::Other("Ed448")),
    (&[0x06, 0x03, 0x2b, 0x65, 0x6e], Algorithm::Other("X25519")),
    (&[0x06, 0x03, 0x2b, 0x65, 0x6f], Algorithm::Other("X448")),
];

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing.
    Empty,
    /// `PRIVATE KEY`: PKCS #8, in the clear.
    Private(Algorithm),
    /// cosign's own form, also ours.
    Encrypted,
    /// `PUBLIC KEY`: SPKI.
    Public(Algorithm),
    /// PKCS #8, encrypted as OpenSSL does it.
    EncryptedByOthers,
    /// `EC PRIVATE KEY`: SEC 1.
    OldElliptic,
    /// `RSA PRIVATE KEY` or `RSA PUBLIC KEY`: PKCS #1.
    OldRsa(&'static str),
    /// An ssh key, private or public.
    Ssh(&'static str),
    /// A certificate, or something that is about one.
    Certificate(&'static str),
    /// Something of PGP.
    Pgp,
    /// Another PEM text.
    Pem(String),
    /// Something binary that looks like DER.
    Der,
    /// Anything else.
    Unknown,
}

/// What a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    P256,
    Ed25519,
    Other(&'static str),
    Unknown,
}

/// What a file was wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Private,
    Public,
}

/// What people are told of a file that is not what was wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongKind {
    content: Content,
    wanted: Wanted,
}

impl WrongKind {
    /// Returns what is to be told of a file that holds nothing of what is wanted.
    pub(super) fn of(file: &[u8], wanted: Wanted) -> Option<Self> {
        let content = Content::of(file);
        let may_do = match (wanted, &content) {
            (Wanted::Private, Content::Private(algorithm)) => {
                !matches!(algorithm, Algorithm::Other(_))
            }
            (Wanted::Public, Content::Public(Algorithm::Other(name))) => {
                matches!(*name, "RSA" | "P-384" | "P-521")
            }
            (wanted, content) => matches!(
                (wanted, content),
                (Wanted::Private, Content::Encrypted) | (Wanted::Public, Content::Public(_))
            ),
        };
        (!may_do).then_some(Self { content, wanted })
    }
}

impl Content {
    /// Looks at a file.
    pub(super) fn of(file: &[u8]) -> Self {
        let Ok(text) = str::from_utf8(file) else {
            return if file.starts_with(&[0x30]) { Self::Der } else { Self::Unknown };
        };
        let text = text.trim_start_matches('\u{feff}').trim();
        if text.is_empty() {
            return Self::Empty;
        }
        let ssh = ["ssh-ed25519 ", "ssh-rsa ", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-", "ssh-dss "];
        if ssh.iter().any(|begin| text.starts_with(begin)) || text.contains("---- BEGIN SSH2 ") {
            return Self::Ssh("public");
        }
        let Some((_, rest)) = text.split_once("-----BEGIN ") else {
            return if text.starts_with('0') { Self::Der } else { Self::Unknown };
        };
        let Some((label, rest)) = rest.split_once("-----") else { return Self::Unknown };
        let body = rest.split("-----").next().unwrap_or_default();
        match label {
            "PUBLIC KEY" => Self::Public(Algorithm::of(body)),
            "PRIVATE KEY" => Self::Private(Algorithm::of(body)),
            "ENCRYPTED COSIGN PRIVATE KEY" | "ENCRYPTED SIGSTORE PRIVATE KEY" => Self::Encrypted,
            "ENCRYPTED PRIVATE KEY" => Self::EncryptedByOthers,
            "EC PRIVATE KEY" | "EC PARAMETERS" => Self::OldElliptic,
            "RSA PRIVATE KEY" => Self::OldRsa("private"),
            "RSA PUBLIC KEY" => Self::OldRsa("public"),
            "OPENSSH PRIVATE KEY" => Self::Ssh("private"),
            "CERTIFICATE" | "TRUSTED CERTIFICATE" | "X509 CERTIFICATE" => {
                Self::Certificate("a certificate")
            }
            "CERTIFICATE REQUEST" | "NEW CERTIFICATE REQUEST" => {
                Self::Certificate("a request for a certificate")
            }
            label if label.starts_with("PGP ") => Self::Pgp,
            label => Self::Pem(label.chars().filter(|c| !c.is_control()).take(40).collect()),
        }
    }
}

impl Algorithm {
    fn of(body: &str) -> Self {
        let body: String = body.split_whitespace().collect();
        let Ok(der) = BASE64.decode(body) else { return Self::Unknown };
        let head = der.get(..ALGORITHM_BYTES.min(der.len())).unwrap_or_default();
        let has = |name: &[u8]| head.windows(name.len()).any(|window| window == name);
        let found = ALGORITHMS.iter().find(|(name, _)| has(name));
        found.map_or(Self::Unknown, |(_, algorithm)| *algorithm)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::P256 => f.write_str("P-256 "),
            Self::Ed25519 => f.write_str("Ed25519 "),
            Self::Other(name) => write!(f, "{name} "),
            Self::Unknown => Ok(()),
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("it is empty"),
            Self::Private(algorithm) => write!(f, "it is a private {algorithm}key"),
            Self::Encrypted => f.write_str("it is a private key, encrypted"),
            Self::Public(algorithm) => write!(f, "it is a public {algorithm}key"),
            Self::EncryptedByOthers => f.write_str("it is a private key that OpenSSL encrypted"),
            Self::OldElliptic => f.write_str("it is a private EC key in the form of SEC 1"),
            Self::OldRsa(half) => write!(f, "it is a {half} RSA key in the form of PKCS #1"),
            Self::Ssh(half) => write!(f, "it is a {half} key of ssh"),
            Self::Certificate(what) => write!(f, "it is {what}, not a key"),
            Self::Pgp => f.write_str("it is of PGP"),
            Self::Pem(label) => write!(f, "it is a PEM text that calls itself {label:?}"),
            Self::Der => f.write_str("it is binary, maybe DER"),
            Self::Unknown => f.write_str("it is no key in PEM"),
        }
    }
}

impl fmt::Display for WrongKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; ", self.content)?;
        f.write_str(match self.wanted {
            Wanted::Private => "a private key was needed (P-256 or Ed25519): ",
            Wanted::Public => {
                "a public key was needed (P-256, Ed25519, or another that cosign signs with): "
            }
        })?;
        f.write_str(self.remedy())
    }
}

impl WrongKind {
    fn remedy(&self) -> &'static str {
        match (self.wanted, &self.content) {
            (Wanted::Private, Content::Public(_)) => {
                "name the file that it belongs to, NAME.key beside NAME.pub"
            }
            (Wanted::Public, Content::Private(_) | Content::OldElliptic) => {
                "name NAME.pub, or write it with `openssl pkey -in FILE -pubout`"
            }
            (Wanted::Public, Content::Encrypted) => {
                "name NAME.pub beside it, or write it with `cosign public-key --key FILE`"
            }
            (Wanted::Private, Content::EncryptedByOthers) => {
                "`cosign import-key-pair --key FILE` makes one of it, or `kyb keygen` a new one"
            }
            (Wanted::Private, Content::OldElliptic) => {
                "write it with `openssl pkcs8 -topk8 -nocrypt -in FILE`"
            }
            (Wanted::Public, Content::OldRsa("public")) => {
                "write it with `openssl rsa -RSAPublicKey_in -in FILE -pubout`"
            }
            (Wanted::Public, Content::OldRsa(_) | Content::EncryptedByOthers) => {
                "write it with `openssl pkey -in FILE -pubout`"
            }
            (Wanted::Public, Content::Ssh(_)) => {
                "ssh's keys sign no checkpoints; name NAME.pub that `kyb keygen NAME` has made"
            }
            (Wanted::Public, Content::Certificate("a certificate")) => {
                "write the one in it with `openssl x509 -in FILE -noout -pubkey`"
            }
            (_, Content::Der) => {
                "if it is one in DER, write it as PEM with `openssl pkey -inform DER`"
            }
            (Wanted::Private, _) => "`kyb keygen NAME` makes NAME.key",
            (Wanted::Public, _) => "name NAME.pub that `kyb keygen NAME` has made",
        }
    }
}
