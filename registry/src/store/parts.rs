//! Manifests that lack a part: what reading every content again does not show.

use std::collections::BTreeSet;
use std::io;
use std::sync::PoisonError;

use kybernate_spec::{Digest, RepositoryName};

use super::manifest::ManifestRecord;
use super::{Store, StoreError, is_there, read_record};
use crate::gc::LinkKind;
use crate::manifest::References;

impl Store {
    /// Lists all repositories, in order. Blocks.
    pub(crate) fn repositories_in_order(&self) -> Result<Vec<RepositoryName>, StoreError> {
        self.all_repositories().map_err(StoreError::during("list repositories"))
    }

    /// Lists the manifests of a repository, in no order. Blocks.
    pub(crate) fn manifests_of(
        &self,
        repository: &RepositoryName,
    ) -> Result<Vec<Digest>, StoreError> {
        let mut manifests = Vec::new();
        let listed = self.each_link(repository, LinkKind::Manifest, |digest| {
            manifests.push(digest);
            Ok(())
        });
        listed.map_err(StoreError::during("list manifests"))?;
        Ok(manifests)
    }

    /// Returns what a manifest names and its repository does not have, or the manifest itself when
    /// that cannot be read. Nobody counts as having been shown anything. Blocks.
    pub(crate) fn lacks(
        &self,
        repository: &RepositoryName,
        manifest: &Digest,
    ) -> Result<Vec<Digest>, StoreError> {
        let look = || -> io::Result<Vec<Digest>> {
            let lacking = self.missing_parts(repository, manifest)?;
            if lacking.is_empty() {
                return Ok(lacking);
            }
            // Somebody may take it away just now, the manifest first and then its parts.
            let lock = self.repository_lock(repository);
            let _held = lock.read().unwrap_or_else(PoisonError::into_inner);
            self.missing_parts(repository, manifest)
        };
        look().map_err(StoreError::during("look for the parts of a manifest"))
    }

    fn missing_parts(
        &self,
        repository: &RepositoryName,
        manifest: &Digest,
    ) -> io::Result<Vec<Digest>> {
        let link = self.layout.manifest_link(repository, manifest);
        if !is_there(&link)? {
            return Ok(Vec::new());
        }
        let (Some(record), Some(content)) =
            (read_record::<ManifestRecord>(&link)?, self.read_content(manifest)?)
        else {
            return Ok(vec![manifest.clone()]);
        };
        // What could not be read when it was pushed names nothing.
        let Ok((_, references)) = References::parse(Some(&record.media_type), &content) else {
            return Ok(Vec::new());
        };
        let (blobs, manifests) = self.parts(repository, &references)?;
        let blobs = blobs.into_iter();
        let blobs = blobs.map(|blob| (self.layout.blob_link(repository, &blob), blob));
        let manifests = manifests.into_iter();
        let manifests =
            manifests.map(|child| (self.layout.manifest_link(repository, &child), child));
        let mut missing = BTreeSet::new();
        for (link, part) in blobs.chain(manifests) {
            if !(is_there(&link)? && is_there(&self.layout.blob(&part))?) {
                missing.insert(part);
            }
        }
        Ok(missing.into_iter().collect())
    }
}
