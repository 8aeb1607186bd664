//! `kyb unpack`

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::progress::Progress;
use kybernate_packager::unpack::{Limits, unpack};
use kybernate_packager::verify::verify_signature;
use kybernate_spec::Location;
use serde_json::json;

use super::{Connection, Failure, keys};
use crate::terminal::{Terminal, bytes};

/// Turn a checkpoint into a dump directory that CRIU can read.
///
/// Its signature is verified first, then every byte on the way. The directory appears whole or not
/// at all.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb unpack registry.example.com/team/job:v1 ./dump --key team.pub")]
pub(super) struct Unpack {
    /// What to unpack.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Where to. Must not exist, or be empty.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// A public key that is trusted; may be given more than once.
    #[arg(long = "key", value_name = "FILE", required_unless_present = "insecure_no_signature")]
    keys: Vec<PathBuf>,
    /// Unpack whoever made it.
    #[arg(long, conflicts_with = "keys")]
    insecure_no_signature: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Unpack {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let keys = keys::read(&self.keys).await?;
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        if !self.insecure_no_signature {
            verify_signature(&store, &digest, &keys).await?;
        }
        let name = self.reference.to_string();
        let checkpoint = Checkpoint::of(&store, stored, &name).await?;
        let progress = Progress::default();
        progress.step("unpack");
        let work = unpack(&store, &checkpoint, &self.directory, Limits::default(), &progress);
        terminal.show(&progress, Box::pin(work)).await?;
        let sizes = &checkpoint.config.sizes;
        let facts = json!({
            "digest": digest,
            "directory": self.directory.display().to_string(),
            "dumpBytes": sizes.dump_bytes,
        });
        let text = format!(
            "unpacked {digest}\ninto     {}, {}",
            self.directory.display(),
            bytes(sizes.dump_bytes)
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
