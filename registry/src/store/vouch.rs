//! What others put in place is durable before something that needs it is acknowledged.
//!
//! A blob can be seen as soon as it has its name, which is before its directories are synced: a
//! client that sees it leaves it out and pushes the manifest that names it. On a file system where
//! the sync of one directory says nothing of another (btrfs), power loss would then leave the
//! manifest and take the blob. So who acknowledges a manifest syncs what is being put in place just
//! then, and, after a process that was killed, what that one may not have synced any more.

use std::io;

use kybernate_spec::{Digest, RepositoryName};

use super::Store;
use crate::manifest::References;

impl Store {
    /// Makes sure that what a manifest refers to, which is there, survives power loss.
    pub(super) fn vouch_for(
        &self,
        repository: &RepositoryName,
        references: &References,
    ) -> io::Result<()> {
        let links = |digest: &Digest| self.layout.blob_links(repository, digest.algorithm());
        let manifest_links =
            |digest: &Digest| self.layout.manifest_links(repository, digest.algorithm());
        let (blobs, manifests) = self.parts(repository, references)?;
        let blobs = blobs.iter().map(|digest| (digest, links(digest)));
        let manifests = manifests.iter().map(|digest| (digest, manifest_links(digest)));
        for (digest, links) in blobs.chain(manifests) {
            // It was seen before this: whoever put it there holds it until it is synced.
            let under_way = self.house.pins.is_held(digest);
            for dir in [self.layout.shelf(digest), links] {
                if under_way {
                    self.directories.sync(&dir)?;
                } else if self.was_killed {
                    self.directories.sync_once(&dir)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
