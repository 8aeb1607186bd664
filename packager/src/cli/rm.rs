//! `kyb rm`

use clap::Args;
use kybernate_packager::listing::{ListError, Removed, remove};
use kybernate_packager::store::{Store, StoreError, StoreErrorKind};
use kybernate_spec::Location;

use super::page::Page;
use super::{Connection, Failure};
use crate::terminal::Terminal;

/// Remove a tag, or a checkpoint with its tags and signatures.
///
/// With a tag only the tag goes. With a digest the checkpoint's index goes, with every tag that
/// names it, and then its signatures and other referrers. Its bytes go when the registry collects
/// garbage; in an image layout they stay. What is no checkpoint is not removed by its digest.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb rm registry.example.com/team/job:v1")]
pub(super) struct Rm {
    /// What to remove, with its tag or its digest.
    #[arg(value_name = "REF")]
    reference: Location,
    #[command(flatten)]
    connection: Connection,
}

impl Rm {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        if self.reference.tag().is_none() && self.reference.digest().is_none() {
            return Err(Failure::usage("say which tag or digest is to be removed"));
        }
        let store = self.connection.open(&self.reference).await?;
        let removed = match remove(&store, &self.reference).await {
            Err(ListError::Store(error))
                if self.reference.digest().is_none() && is_unsupported(&error) =>
            {
                return Err(self.by_digest(&store, error).await);
            }
            other => other?,
        };
        terminal.print_page(&removed, &tell(&removed)).map_err(Failure::failed)
    }

    /// Says how else it can be done, where a registry does not remove tags alone.
    async fn by_digest(&self, store: &Store, error: StoreError) -> Failure {
        let Ok(stored) = store.resolve(&self.reference).await else { return error.into() };
        // docker-registry says of a tag that it is no digest.
        let begin = match error.kind {
            StoreErrorKind::Disputed(_) => "the registry removes no tags by themselves".to_owned(),
            _ => format!("{}: it may remove no tags by themselves", kybernate_spec::chain(&error)),
        };
        Failure::failed(format!(
            "{begin}; with the digest {} the checkpoint is removed, and all its tags",
            stored.descriptor.digest
        ))
    }
}

/// Whether a registry has answered that it does not do such a thing.
const fn is_unsupported(error: &StoreError) -> bool {
    matches!(error.kind, StoreErrorKind::Registry(_) | StoreErrorKind::Disputed(_))
}

fn tell(removed: &Removed) -> Page {
    let mut page = Page::default();
    let signatures = removed.signatures.len();
    let others = removed.referrers.len().saturating_sub(signatures);
    let digest = &removed.digest;
    let what = if others == 0 {
        format!("{digest}, with {signatures} signatures")
    } else {
        format!("{digest}, with {signatures} signatures and {others} other referrers")
    };
    if let Some(tag) = &removed.tag {
        page.fact("removed", format!("the tag {tag}"));
        page.fact("left", what);
        return page;
    }
    page.fact("removed", what);
    for referrer in &removed.referrers {
        let is_signature = removed.signatures.contains(referrer);
        let kind = if is_signature { "  signature" } else { "  referrer" };
        page.fact(kind, referrer.to_string());
    }
    page
}
