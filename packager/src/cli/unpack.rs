//! `kyb unpack`

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::progress::Progress;
use kybernate_packager::unpack::{Limits, unpack};
use kybernate_spec::Location;
use serde_json::json;

use super::trust::Trust;
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Turn a checkpoint into a dump directory that CRIU can read.
///
/// Its signature is verified first, then every byte on the way. The directory appears whole or not
/// at all.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("trusted")
        .args(["keys", "policy", "insecure_no_signature"])
        .required(true),
    after_help = "Example:\n  \
        kyb unpack registry.example.com/team/job:v1 ./dump --key team.pub"
)]
pub(super) struct Unpack {
    /// What to unpack.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Where to. Must not exist, or be empty.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(flatten)]
    trust: Trust,
    /// Unpack whoever made it.
    #[arg(long)]
    insecure_no_signature: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Unpack {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let trusted = self.trust.read().await?;
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        let mut warning = None;
        if !self.insecure_no_signature {
            let found = trusted.check(&store, &stored, &self.reference).await?;
            warning = (!found.is_signed()).then(|| found.tell());
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
            "warning": warning,
        });
        let mut text = format!(
            "unpacked {digest}\ninto     {}, {}",
            self.directory.display(),
            bytes(sizes.dump_bytes)
        );
        if let Some(warning) = &warning {
            text = format!("{text}\n{warning}");
        }
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
