//! `kyb verify`

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::progress::Progress;
use kybernate_packager::verify::{read_everything, verify_signature};
use kybernate_spec::Location;
use serde_json::json;

use super::{Connection, Failure, keys};
use crate::terminal::{Terminal, bytes};

/// Check who signed a checkpoint.
///
/// One good signature by one of the keys is enough. Signatures are those of `kyb sign` and of
/// `cosign sign --key`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb verify registry.example.com/team/job:v1 --key team.pub")]
pub(super) struct Verify {
    /// What to verify.
    #[arg(value_name = "REF")]
    reference: Location,
    /// A public key that is trusted; may be given more than once.
    #[arg(long = "key", value_name = "FILE", required = true)]
    keys: Vec<PathBuf>,
    /// Read every byte of the checkpoint too.
    #[arg(long)]
    deep: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Verify {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let keys = keys::read(&self.keys).await?;
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        let verified = verify_signature(&store, &digest, &keys).await?;
        let mut text = format!("verified  {digest}\nkey       {}", verified.key);
        let mut read = None;
        if self.deep {
            let progress = Progress::default();
            let work = read_everything(&store, stored, &progress);
            let all = terminal.show(&progress, Box::pin(work)).await?;
            text = format!("{text}\nread      {}, every byte is as signed", bytes(all));
            read = Some(all);
        }
        let facts = json!({
            "digest": digest,
            "key": verified.key,
            "signature": verified.signature,
            "bytesRead": read,
        });
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
