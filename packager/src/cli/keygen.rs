//! `kyb keygen`

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kybernate_packager::key::KeyType;
use serde_json::json;

use super::{Failure, keys};
use crate::terminal::Terminal;

/// Make a key pair that signs checkpoints.
///
/// The files are cosign's: a private key, encrypted with a password, and its public key. The
/// password comes from `COSIGN_PASSWORD` or is asked for. Existing files are never replaced.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb keygen team\n  makes team.key and team.pub")]
pub(super) struct Keygen {
    /// What the files' names begin with.
    #[arg(default_value = "kyb")]
    prefix: PathBuf,
    /// The kind of key. cosign 3 verifies with both, and signs with P-256 alone.
    #[arg(long = "type", value_name = "TYPE", default_value = "p256")]
    kind: Kind,
}

/// The kinds of keys, as options have them.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    P256,
    Ed25519,
}

impl From<Kind> for KeyType {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::P256 => Self::P256,
            Kind::Ed25519 => Self::Ed25519,
        }
    }
}

impl Keygen {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let (key, [private, public]) = keys::make(&self.prefix, self.kind.into()).await?;
        let fingerprint = key.public().fingerprint();
        let facts = json!({
            "private": private.display().to_string(),
            "public": public.display().to_string(),
            "fingerprint": fingerprint,
            "hint": key.public().hint(),
        });
        let text = format!(
            "private key  {}\npublic key   {}\nfingerprint  {fingerprint}\nsigns as     {}",
            private.display(),
            public.display(),
            key.public().hint(),
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
