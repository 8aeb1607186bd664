//! The layers of an image become snapshots of containerd's, one on the other.
//!
//! Two ways lead there. What a container had written, our own kind of layer, is unpacked by this agent
//! while it comes, and is kept nowhere else: whoever packs the container again finds it in the registry
//! that it came from. Any other goes into containerd's content store, and containerd unpacks it; so does
//! one that the agent does not know how to (`spec/decisions/0057`).

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

use futures::future::{self, BoxFuture};
use futures::stream::{self, StreamExt as _};
use futures::{FutureExt as _, TryStreamExt as _};
use kybernate_packager::store::{BlobSource, BlobStream, Store, StoreError};
use kybernate_spec::{Descriptor, Digest, chain, media_type};
use tokio::sync::mpsc;
use tokio_util::io::{StreamReader, SyncIoBridge};
use tokio_util::sync::CancellationToken;

use super::image::{ImageError, SNAPSHOTTER};
use crate::layer::{self, LayerError};
use crate::operations::{Driver, Made};
use crate::runtime::{Mount, Namespace};

/// How many layers come into the content store at once.
const AT_ONCE: usize = 2;

/// The namespace of containerd's CRI plugin.
const CRI_NAMESPACE: &str = "k8s.io";

/// Which layers containerd's content store gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// All, for whoever reads the image there.
    All,
    /// Those that have to be there to be unpacked.
    Needed,
}

impl Kept {
    /// Returns what of a store's images is kept in one of containerd's namespaces. A layout's may be gone
    /// when they are asked for again, and containerd's CRI plugin does not know an image any more that is
    /// not whole when it starts.
    pub(super) fn of(store: &Store, namespace: &str) -> Self {
        match store {
            Store::Registry(_) if namespace != CRI_NAMESPACE => Self::Needed,
            Store::Registry(_) | Store::Layout(_) => Self::All,
        }
    }
}

/// What brings the layers of one image.
#[derive(Clone, Copy)]
pub(super) struct Layers<'a> {
    pub(super) store: &'a Store,
    /// Has a lease.
    pub(super) leased: &'a Namespace,
    pub(super) driver: &'a Driver,
    pub(super) kept: Kept,
}

/// One of them.
struct Layer<'a> {
    descriptor: &'a Descriptor,
    diff_id: &'a Digest,
    /// Name of the snapshot below.
    parent: Option<Digest>,
    /// Name of its snapshot.
    chain: Digest,
    /// Whether it is unpacked while it comes.
    direct: bool,
}

impl Layers<'_> {
    /// Makes sure that containerd has all layers unpacked, and returns the name of the snapshot with all
    /// of them. While one is unpacked, others come.
    pub(super) async fn bring(
        &self,
        descriptors: &[Descriptor],
        diff_ids: &[Digest],
    ) -> Result<Option<Digest>, ImageError> {
        if let Some(whole) = self.whole(diff_ids).await? {
            self.driver.progress.advance(descriptors.iter().map(|layer| layer.size).sum());
            return Ok(Some(whole));
        }
        let layers = self.look(descriptors, diff_ids).await?;
        let (tell, mut there) = mpsc::channel(layers.len().max(1));
        let (mut known, mut writes) = (HashSet::new(), Vec::new());
        for layer in &layers {
            writes.push(if !layer.direct && known.insert(&layer.descriptor.digest) {
                self.leased.write_blob(layer.descriptor, self).boxed()
            } else {
                // It needs none, or it comes before this one, and containerd takes one write of a blob
                // at a time.
                future::ready(Ok(())).boxed()
            });
        }
        let come = async move {
            let mut writes = stream::iter(writes).buffered(AT_ONCE);
            while let Some(written) = writes.next().await {
                written?;
                // There is room for all.
                tell.try_send(()).unwrap_or_default();
            }
            Ok::<_, ImageError>(())
        };
        let be_unpacked = async {
            for layer in &layers {
                if there.recv().await.is_none() {
                    break;
                }
                if !self.leased.has_snapshot(SNAPSHOTTER, &layer.chain.to_string()).await? {
                    self.unpack(layer).await?;
                } else if layer.direct {
                    // Another one's stands on it, or somebody was quicker.
                    self.driver.progress.advance(layer.descriptor.size);
                }
            }
            Ok(())
        };
        tokio::try_join!(come, be_unpacked)?;
        Ok(layers.into_iter().next_back().map(|layer| layer.chain))
    }

    /// Returns the name of the snapshot with all layers, when it is there and nothing else is needed.
    async fn whole(&self, diff_ids: &[Digest]) -> Result<Option<Digest>, ImageError> {
        let name = |parent: Option<Digest>, diff_id| Some(chain_of(parent.as_ref(), diff_id));
        let whole = diff_ids.iter().fold(None, name).filter(|_| self.kept == Kept::Needed);
        let Some(whole) = whole else { return Ok(None) };
        let there = self.leased.has_snapshot(SNAPSHOTTER, &whole.to_string()).await?;
        Ok(there.then_some(whole))
    }

    /// Decides about each layer. What the content store has needs not come.
    async fn look<'l>(
        &self,
        descriptors: &'l [Descriptor],
        diff_ids: &'l [Digest],
    ) -> Result<Vec<Layer<'l>>, ImageError> {
        let mut layers: Vec<Layer<'_>> = Vec::new();
        for (descriptor, diff_id) in descriptors.iter().zip(diff_ids) {
            let parent = layers.last().map(|layer| layer.chain.clone());
            let direct = self.kept == Kept::Needed
                && parent.is_some()
                && descriptor.media_type == media_type::OCI_LAYER_ZSTD
                && !self.leased.has_content(&descriptor.digest).await?;
            let chain = chain_of(parent.as_ref(), diff_id);
            layers.push(Layer { descriptor, diff_id, parent, chain, direct });
        }
        Ok(layers)
    }

    async fn unpack(&self, layer: &Layer<'_>) -> Result<(), ImageError> {
        let Self { leased, driver, .. } = self;
        let key = format!("kybernate-{}-{}", driver.id(), layer.chain);
        let made = Made::Snapshot { snapshotter: SNAPSHOTTER.to_owned(), key: key.clone() };
        driver.will_make(made).await?;
        let mut mounts = leased.prepare(SNAPSHOTTER, &key, layer.parent.as_ref()).await?;
        if layer.direct && !self.apply(layer, &mounts).await? {
            // What of it was made is no beginning.
            leased.remove_snapshot(SNAPSHOTTER, &key).await?;
            driver.progress.expect(layer.descriptor.size);
            leased.write_blob(layer.descriptor, self).await?;
            mounts = leased.prepare(SNAPSHOTTER, &key, layer.parent.as_ref()).await?;
            leased.apply(layer.descriptor, mounts, layer.diff_id).await?;
        } else if !layer.direct {
            leased.apply(layer.descriptor, mounts, layer.diff_id).await?;
        }
        match leased.commit(SNAPSHOTTER, &key, &layer.chain).await {
            // Somebody else unpacked the same layers meanwhile.
            Err(error) if error.already_exists() => {
                leased.remove_snapshot(SNAPSHOTTER, &key).await?;
                Ok(())
            }
            done => Ok(done?),
        }
    }

    /// Unpacks a layer while it comes. Returns whether it is there, whole and the one that the image
    /// means: when it is not, containerd is to say what is wrong with it.
    async fn apply(&self, layer: &Layer<'_>, mounts: &[Mount]) -> Result<bool, ImageError> {
        let Some(upper) = upper_of(mounts) else { return Ok(false) };
        let Layer { descriptor, diff_id, .. } = layer;
        // What it is without compression proves it: to prove it twice costs as much as to unpack it.
        let come = self.store.blob_range(descriptor, 0, descriptor.size).await?;
        // Dropped, this ends what is read, and what was made is removed when the thread has ended.
        let wanted = CancellationToken::new();
        let _ends = wanted.clone().drop_guard();
        let come = self.count(come).map_err(io::Error::other);
        let come = come.take_until(wanted.clone().cancelled_owned()).boxed();
        let (come, bytes) = (SyncIoBridge::new(StreamReader::new(come)), descriptor.size);
        let applied = move || layer::apply(come, bytes, &upper, &wanted);
        let applied = self.driver.spawn_blocking(applied).await.map_err(io::Error::other);
        let why = match applied.map_err(LayerError::Read).and_then(|applied| applied) {
            Ok(found) if found == **diff_id => return Ok(true),
            Ok(found) => format!("it is {found} without compression"),
            Err(LayerError::Read(error)) => match error.downcast::<StoreError>() {
                Ok(error) => return Err(error.into()),
                Err(error) => chain(&LayerError::Read(error)).to_string(),
            },
            // Once all of it was proven, what comes out is what its signer wanted, as a sparse file.
            Err(error @ (LayerError::Unknown(_) | LayerError::Swells)) => error.to_string(),
            // containerd would fail at it, too.
            Err(error @ LayerError::Make { .. }) => {
                return Err(ImageError::Layer(descriptor.digest.clone(), error));
            }
        };
        tracing::warn!(layer.digest = %descriptor.digest, why, "leaving a layer to containerd");
        Ok(false)
    }

    fn count(&self, stream: BlobStream) -> BlobStream {
        let progress = self.driver.progress.clone();
        let counted = stream.inspect_ok(move |bytes| {
            let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
            progress.advance(length);
            progress.transfer(length);
        });
        counted.boxed()
    }
}

impl std::fmt::Debug for Layers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Layers")
    }
}

impl BlobSource for Layers<'_> {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async move { Ok(self.count(self.store.blob(descriptor).await?)) })
    }
}

/// Returns the name of a snapshot with a layer on others (image specification, "Layer `ChainID`").
fn chain_of(parent: Option<&Digest>, diff_id: &Digest) -> Digest {
    match parent {
        None => diff_id.clone(),
        Some(parent) => Digest::of(format!("{parent} {diff_id}").as_bytes()),
    }
}

/// Returns the directory that a snapshot's own files are in, when it is an overlay without anything
/// that the agent would have to heed.
fn upper_of(mounts: &[Mount]) -> Option<PathBuf> {
    let [mount] = mounts else { return None };
    let is_plain = |option: &String| {
        option != "userxattr" && !option.starts_with("uidmap=") && !option.starts_with("gidmap=")
    };
    if mount.kind != "overlay" || !mount.options.iter().all(is_plain) {
        return None;
    }
    mount.option("upperdir").map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_named_by_all_layers_below() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(chain_of(None, &a), a);
        assert_eq!(chain_of(Some(&a), &b), Digest::of(format!("{a} {b}").as_bytes()));
    }

    #[test]
    fn only_a_plain_overlay_is_written_to() {
        let mount = |kind: &str, options: &[&str]| Mount {
            kind: kind.to_owned(),
            source: kind.to_owned(),
            target: String::new(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
        };
        let plain = mount("overlay", &["workdir=/w", "upperdir=/u", "lowerdir=/l"]);
        assert_eq!(upper_of(std::slice::from_ref(&plain)), Some(PathBuf::from("/u")));
        assert_eq!(upper_of(&[plain.clone(), plain]), None);
        assert_eq!(upper_of(&[mount("overlay", &["upperdir=/u", "userxattr"])]), None);
        assert_eq!(upper_of(&[mount("overlay", &["upperdir=/u", "uidmap=0:1:2"])]), None);
        assert_eq!(upper_of(&[mount("bind", &["rw"])]), None);
    }
}
