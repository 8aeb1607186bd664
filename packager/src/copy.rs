//! Copies an artifact whole: children, blobs and referrers, only what is missing, the tag last.

use std::collections::BTreeSet;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use kybernate_spec::{Descriptor, Digest, Tag, media_type};

use crate::checked::length;
use crate::outline::Outline;
use crate::progress::Progress;
use crate::store::{BlobSource, BlobStream, Store, StoreError, StoreErrorKind, StoredManifest};

/// Blobs in flight at a time: enough to fill a link, few enough for 256 MiB blobs.
const PARALLEL: usize = 4;

/// How many steps from the root are followed, by child or by referrer: index, child, signature,
/// signature of the signature, and one more.
const DEPTH_MAX: usize = 5;

/// Manifests copied at most.
const MANIFESTS_MAX: usize = 10_000;

/// What was copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Manifests and indexes, referrers included.
    pub manifests: usize,
    /// Of those, the ones that came as referrers.
    pub referrers: usize,
    /// Blobs that were sent.
    pub blobs_sent: usize,
    /// Blobs that were there.
    pub blobs_present: usize,
    /// Blobs that the registry linked from its other repository.
    pub blobs_mounted: usize,
    /// Bytes of the blobs that were sent.
    pub bytes_sent: u64,
}

/// Why a copy was not finished. What arrived stays and is not sent again by a second try.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Something could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A manifest does not parse.
    #[error("failed to parse manifest {0}")]
    Malformed(Digest, #[source] serde_json::Error),
    /// There is more than a checkpoint ever has.
    #[error("the artifact leads to more than {MANIFESTS_MAX} manifests")]
    TooMany,
    /// Its manifests nest deeper than a checkpoint's ever do.
    #[error("the artifact nests more than {DEPTH_MAX} manifests deep")]
    TooDeep,
}

/// What there is to copy, in the order of writing: whatever a manifest names comes before it.
#[derive(Default)]
struct Plan {
    manifests: Vec<StoredManifest>,
    blobs: Vec<Descriptor>,
    seen_manifests: BTreeSet<Digest>,
    seen_blobs: BTreeSet<Digest>,
    referrers: usize,
}

/// What happened to one blob.
enum Sent {
    Present,
    Mounted,
    Bytes(u64),
}

/// A blob source that counts what passes.
#[derive(Debug)]
struct Counted<'a> {
    store: &'a Store,
    progress: &'a Progress,
}

/// Copies `root` from `source` to `target`, then points `tag` at it. Safe to repeat.
pub async fn copy(
    source: &Store,
    root: StoredManifest,
    target: &Store,
    tag: Option<&Tag>,
    progress: &Progress,
) -> Result<Copied, CopyError> {
    let descriptor = root.descriptor.clone();
    progress.step("look");
    let mut plan = Plan::default();
    plan.add(source, root, 0).await?;
    progress.step("copy");
    let mut copied =
        Copied { manifests: plan.manifests.len(), referrers: plan.referrers, ..Copied::default() };
    let mut sending = stream::iter(&plan.blobs)
        .map(|blob| send(source, target, blob, progress))
        .buffer_unordered(PARALLEL);
    while let Some(sent) = sending.try_next().await? {
        match sent {
            Sent::Present => copied.blobs_present += 1,
            Sent::Mounted => copied.blobs_mounted += 1,
            Sent::Bytes(bytes) => {
                copied.blobs_sent += 1;
                copied.bytes_sent = copied.bytes_sent.saturating_add(bytes);
            }
        }
    }
    for manifest in plan.manifests {
        target.put_manifest(&manifest.descriptor, manifest.content).await?;
    }
    if let Some(tag) = tag {
        progress.step("tag");
        target.tag(&descriptor, tag).await?;
    }
    progress.finish();
    Ok(copied)
}

impl Plan {
    /// Adds a manifest with everything below it and, after it, what refers to it.
    fn add<'a>(
        &'a mut self,
        source: &'a Store,
        manifest: StoredManifest,
        depth: usize,
    ) -> BoxFuture<'a, Result<(), CopyError>> {
        Box::pin(async move {
            let digest = manifest.descriptor.digest.clone();
            if !self.seen_manifests.insert(digest.clone()) {
                return Ok(());
            }
            if depth > DEPTH_MAX {
                return Err(CopyError::TooDeep);
            }
            if self.manifests.len() >= MANIFESTS_MAX {
                return Err(CopyError::TooMany);
            }
            let outline = Outline::parse(&manifest.content, Some(&manifest.descriptor.media_type))
                .map_err(|error| CopyError::Malformed(digest.clone(), error))?;
            for child in outline.manifests {
                let child = source.manifest(&child.digest).await?;
                self.add(source, child, depth + 1).await?;
            }
            for blob in outline.blobs {
                if self.seen_blobs.insert(blob.digest.clone()) {
                    self.blobs.push(blob);
                }
            }
            self.manifests.push(manifest);
            self.add_referrers(source, &digest, depth).await
        })
    }

    async fn add_referrers(
        &mut self,
        source: &Store,
        digest: &Digest,
        depth: usize,
    ) -> Result<(), CopyError> {
        if depth >= DEPTH_MAX {
            return Ok(());
        }
        for referrer in source.referrers(digest, None).await? {
            let referrer = match source.manifest(&referrer.digest).await {
                // A list under a fallback tag may name what was deleted since.
                Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => continue,
                other => other?,
            };
            // Checkpoints hang under their source image, but are not part of it.
            if referrer.descriptor.artifact_type.as_deref() == Some(media_type::CHECKPOINT) {
                continue;
            }
            self.referrers +=
                usize::from(!self.seen_manifests.contains(&referrer.descriptor.digest));
            self.add(source, referrer, depth + 1).await?;
        }
        Ok(())
    }
}

async fn send(
    source: &Store,
    target: &Store,
    blob: &Descriptor,
    progress: &Progress,
) -> Result<Sent, StoreError> {
    if target.has_blob(blob).await? {
        return Ok(Sent::Present);
    }
    if let (Store::Registry(from), Store::Registry(to)) = (source, target)
        && from.registry() == to.registry()
        && target.mount_blob(blob, from.repository()).await?
    {
        return Ok(Sent::Mounted);
    }
    progress.expect(blob.size);
    target.put_blob(blob, &Counted { store: source, progress }).await?;
    Ok(Sent::Bytes(blob.size))
}

impl BlobSource for Counted<'_> {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async {
            let progress = self.progress.clone();
            let stream = self.store.blob(descriptor).await?;
            let counted = stream.inspect_ok(move |bytes| {
                progress.advance(length(bytes));
                progress.transfer(length(bytes));
            });
            Ok(counted.boxed())
        })
    }
}
