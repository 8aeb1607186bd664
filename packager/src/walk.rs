//! Finds everything that belongs to an artifact.

use std::collections::BTreeSet;

use futures::future::BoxFuture;
use kybernate_spec::{Descriptor, Digest, media_type};

use crate::checked::length;
use crate::outline::Outline;
use crate::store::{Store, StoreError, StoredManifest};

/// How many steps from the root are followed, by child or by referrer: index, child, signature,
/// signature of the signature, and one more.
const DEPTH_MAX: usize = 5;

/// Manifests of one artifact at most.
const MANIFESTS_MAX: usize = 10_000;

/// Bytes of all of them at most: they are held until all is known. Those of a checkpoint have less
/// than 20 MiB.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// Why an artifact could not be walked.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    /// Something could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A manifest does not parse.
    #[error("failed to parse manifest {0}")]
    Malformed(Digest, #[source] serde_json::Error),
    /// There is more than a checkpoint ever has.
    #[error(
        "the artifact leads to more than {MANIFESTS_MAX} manifests, or more than 64 MiB of them"
    )]
    TooMany,
    /// Its manifests nest deeper than a checkpoint's ever do.
    #[error("the artifact nests more than {DEPTH_MAX} manifests deep")]
    TooDeep,
}

/// Which edges are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follow {
    /// From a manifest to what it names.
    Content,
    /// Also from a manifest to what refers to it.
    ContentAndReferrers,
}

/// What belongs to an artifact. Whatever a manifest names comes before it.
#[derive(Debug)]
pub(crate) struct Walk {
    /// Manifests and indexes; referrers come after what they refer to.
    pub(crate) manifests: Vec<StoredManifest>,
    /// Blobs, each once; one that is said to have two sizes is there with both, to be refused.
    pub(crate) blobs: Vec<Descriptor>,
    /// How many of the manifests were found as referrers.
    pub(crate) referrers: usize,
    /// Referrers that are listed but cannot be had, each with the reason.
    pub(crate) missing: Vec<(Digest, StoreError)>,
    follow: Follow,
    bytes: u64,
    seen_manifests: BTreeSet<Digest>,
    seen_blobs: BTreeSet<(Digest, u64)>,
}

impl Walk {
    /// Walks everything from `root` on.
    pub(crate) async fn from(
        store: &Store,
        root: StoredManifest,
        follow: Follow,
    ) -> Result<Self, WalkError> {
        let mut walk = Self {
            manifests: Vec::new(),
            blobs: Vec::new(),
            referrers: 0,
            missing: Vec::new(),
            follow,
            bytes: 0,
            seen_manifests: BTreeSet::new(),
            seen_blobs: BTreeSet::new(),
        };
        walk.add(store, root, 0).await?;
        Ok(walk)
    }

    fn add<'a>(
        &'a mut self,
        store: &'a Store,
        manifest: StoredManifest,
        depth: usize,
    ) -> BoxFuture<'a, Result<(), WalkError>> {
        Box::pin(async move {
            let digest = manifest.descriptor.digest.clone();
            if !self.seen_manifests.insert(digest.clone()) {
                return Ok(());
            }
            if depth > DEPTH_MAX {
                return Err(WalkError::TooDeep);
            }
            self.bytes += length(&manifest.content);
            if self.seen_manifests.len() > MANIFESTS_MAX || self.bytes > MANIFEST_BYTES_MAX {
                return Err(WalkError::TooMany);
            }
            let outline = Outline::parse(&manifest.content, Some(&manifest.descriptor.media_type))
                .map_err(|error| WalkError::Malformed(digest.clone(), error))?;
            for child in outline.manifests {
                let child = store.manifest_of(&child).await?;
                self.add(store, child, depth + 1).await?;
            }
            for blob in outline.blobs {
                if self.seen_blobs.insert((blob.digest.clone(), blob.size)) {
                    self.blobs.push(blob);
                }
            }
            self.manifests.push(manifest);
            if self.follow == Follow::ContentAndReferrers && depth < DEPTH_MAX {
                self.add_referrers(store, &digest, depth).await?;
            }
            Ok(())
        })
    }

    async fn add_referrers(
        &mut self,
        store: &Store,
        digest: &Digest,
        depth: usize,
    ) -> Result<(), WalkError> {
        for referrer in store.referrers(digest, None).await? {
            let referrer = match store.manifest(&referrer.digest).await {
                // It alone is to blame: a list under a fallback tag may name what was deleted since.
                Err(error) if error.kind.is_about_content() => {
                    if self.seen_manifests.insert(referrer.digest.clone()) {
                        self.missing.push((referrer.digest, error));
                    }
                    continue;
                }
                other => other?,
            };
            // Checkpoints hang under their source image, but are not part of it.
            if referrer.descriptor.artifact_type.as_deref() == Some(media_type::CHECKPOINT) {
                continue;
            }
            let new = !self.seen_manifests.contains(&referrer.descriptor.digest);
            self.referrers += usize::from(new);
            self.add(store, referrer, depth + 1).await?;
        }
        Ok(())
    }
}
