//! Copies an artifact whole: children, blobs and referrers, only what is missing, the tag last.

use std::fmt;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use kybernate_spec::{Descriptor, Digest, Tag, chain};

use crate::checked::length;
use crate::progress::Progress;
use crate::store::{BlobSource, BlobStream, Store, StoreError, StoredManifest};
use crate::walk::{Follow, Walk, WalkError};

/// Blobs in flight at a time: enough to fill a link, few enough for 256 MiB blobs.
pub(crate) const PARALLEL: usize = 4;

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
    /// What there is to copy could not be found out.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// All is copied and tagged but for referrers that the source lists and cannot give: signatures,
    /// most often.
    #[error("the copy is whole but for what refers to it: {}", Missing(.0))]
    Incomplete(Vec<(Digest, StoreError)>),
}

/// Names what is missing, each with the reason.
struct Missing<'a>(&'a [(Digest, StoreError)]);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (digest, error)) in self.0.iter().enumerate() {
            let opening = if position == 0 { "" } else { "; " };
            write!(f, "{opening}{digest} is not copied ({})", chain(error))?;
        }
        Ok(())
    }
}

/// What happened to one blob.
#[derive(Debug)]
pub(crate) enum Sent {
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

/// Copies `root` from `source` to `target`, then points `tag` at it. Safe to repeat. Referrers that
/// cannot be had do not hold up the rest, but the copy ends with [`CopyError::Incomplete`].
pub async fn copy(
    source: &Store,
    root: StoredManifest,
    target: &Store,
    tag: Option<&Tag>,
    progress: &Progress,
) -> Result<Copied, CopyError> {
    let descriptor = root.descriptor.clone();
    progress.step("look");
    let walk = Walk::from(source, root, Follow::ContentAndReferrers).await?;
    progress.step("copy");
    let mut copied =
        Copied { manifests: walk.manifests.len(), referrers: walk.referrers, ..Copied::default() };
    let mut sending = stream::iter(&walk.blobs)
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
    for manifest in walk.manifests {
        target.put_manifest(&manifest.descriptor, manifest.content).await?;
    }
    if let Some(tag) = tag {
        progress.step("tag");
        target.tag(&descriptor, tag).await?;
    }
    progress.finish();
    if walk.missing.is_empty() { Ok(copied) } else { Err(CopyError::Incomplete(walk.missing)) }
}

/// Makes sure that `target` has a blob of `source`.
pub(crate) async fn send(
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

impl Counted<'_> {
    fn count(&self, stream: BlobStream) -> BlobStream {
        let progress = self.progress.clone();
        let counted = stream.inspect_ok(move |bytes| {
            progress.advance(length(bytes));
            progress.transfer(length(bytes));
        });
        counted.boxed()
    }
}

impl BlobSource for Counted<'_> {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async { Ok(self.count(self.store.blob(descriptor).await?)) })
    }

    fn open_at<'a>(
        &'a self,
        descriptor: &'a Descriptor,
        offset: u64,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async move {
            if offset == 0 {
                return self.open(descriptor).await;
            }
            let rest = self.store.blob_range(descriptor, offset, descriptor.size - offset);
            Ok(self.count(rest.await?))
        })
    }
}
