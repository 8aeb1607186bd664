//! `kyb sign`

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::sign::sign;
use kybernate_spec::Location;
use serde_json::json;

use super::{Connection, Failure, keys};
use crate::terminal::Terminal;

/// Sign a checkpoint.
///
/// The signature is a cosign bundle beside the checkpoint: `cosign verify --key FILE
/// --insecure-ignore-tlog REF@DIGEST` accepts it. Nothing is sent to a transparency log.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb sign registry.example.com/team/job:v1 --key team.key")]
pub(super) struct Sign {
    /// What to sign.
    #[arg(value_name = "REF")]
    reference: Location,
    /// The private key. Its password comes from `COSIGN_PASSWORD` or is asked for.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    #[command(flatten)]
    connection: Connection,
}

impl Sign {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let key = keys::open(&self.key).await?;
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let signature = sign(&store, &stored.descriptor, &key).await?;
        let digest = &stored.descriptor.digest;
        let facts = json!({
            "digest": digest,
            "signature": signature.digest,
            "key": key.public().hint(),
        });
        let text = format!("signed {digest}\nby     {}", key.public().hint());
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
