//! `kyb verify`

use clap::{ArgGroup, Args};
use kybernate_packager::progress::Progress;
use kybernate_packager::unpack::deep::{Proven, read_everything};
use kybernate_spec::Location;

use super::trust::Trust;
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Check who signed a checkpoint.
///
/// One good signature by one of the keys is enough. Signatures are those of `kyb sign` and of
/// `cosign sign --key`. A policy says which keys count for which repositories and namespaces, and
/// whether it only warns; what none of its rules speaks of is refused, and so is what is past its
/// own `notAfter`.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("trusted").args(["keys", "policy"]).required(true),
    after_help = "Example:\n  \
        kyb verify registry.example.com/team/job:v1 --key team.pub\n  \
        kyb verify registry.example.com/team/job:v1 --policy policy.toml"
)]
pub(super) struct Verify {
    /// What to verify.
    #[arg(value_name = "REF")]
    reference: Location,
    #[command(flatten)]
    trust: Trust,
    /// Read every byte of the checkpoint too, and prove chunks, pages, files, layers and volumes.
    #[arg(long)]
    deep: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Verify {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let trusted = self.trust.read().await?;
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        let found = trusted.check(&store, &stored, &self.reference).await?;
        let word = if found.is_signed() { "verified " } else { "tolerated" };
        let mut text = format!("{word} {digest}\n{}", found.tell());
        let mut read = None;
        if self.deep {
            let progress = Progress::default();
            let reading = read_everything(&store, stored, &progress);
            let all = terminal.show(&progress, Box::pin(reading)).await?;
            text = format!("{text}\n{}", told(&all));
            read = Some(all);
        }
        let facts = found.facts(&digest, read.as_ref());
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

fn told(read: &Proven) -> String {
    let Proven { manifests, blobs, files, bulk_files, chunks, pages, layers, volumes, .. } = read;
    format!(
        "read      {}, every byte is as signed\n          \
         {manifests} manifests, {blobs} blobs; {files} small files, {bulk_files} with pages; \
         {chunks} chunks, {pages} pages, {} of them by their own hash; {layers} layers, \
         {volumes} volumes",
        bytes(read.bytes),
        read.page_hashes,
    )
}
