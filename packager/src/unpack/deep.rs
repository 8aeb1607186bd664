//! Reads all of an artifact and proves each part in the way that it is proven when it is used.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use futures::stream::{self, TryStreamExt as _};
use kybernate_spec::page_index::{CHUNK_BYTES, Chunk, PAGE_BYTES};
use kybernate_spec::{Descriptor, Digest, Hasher, Manifest};
use serde::{Deserialize, Serialize};

use super::pages::{Incoming, extents_of, hash_of};
use super::plan::{Extent, Plan};
use super::{Limits, UnpackError, as_store_error, contradiction, download, plan, read_images};
use crate::artifact::{ArtifactError, Checkpoint, Volume};
use crate::checked::{collect, length};
use crate::copy::PARALLEL;
use crate::pack::base::{PAGE_HASH_BYTES, page_hash};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::{Store, StoreError, StoredManifest};
use crate::walk::{Follow, Walk, WalkError};
use crate::wanted;

/// What was read and found right.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Proven {
    /// Bytes of manifests and blobs.
    pub bytes: u64,
    /// Manifests and indexes.
    pub manifests: u64,
    /// Blobs, each once.
    pub blobs: u64,
    /// Small files of the dump.
    pub files: u64,
    /// Files of the dump whose pages are in shards.
    pub bulk_files: u64,
    /// Chunks of shards, those of a base among them, each by its hash.
    pub chunks: u64,
    /// Pages that files of the dump have there.
    pub pages: u64,
    /// Pages compared with the page hashes of the artifact.
    pub page_hashes: u64,
    /// Layers of the runnable image, each by what it is when it is not compressed.
    pub layers: u64,
    /// Volumes whose tar is whole.
    pub volumes: u64,
}

/// Why an artifact was not read to its end, or found wrong.
#[derive(Debug, thiserror::Error)]
pub enum DeepError {
    /// Something could not be read, or is not what its digest says.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// It breaks a rule of the format.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The dump cannot be unpacked.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A page has another hash than the artifact says.
    #[error("page {page} of shard {shard} does not match the artifact's page hashes")]
    PageHash {
        /// The shard's digest.
        shard: Digest,
        /// The page within the shard, from 0.
        page: u32,
    },
    /// The runnable image would not unpack to what its config says.
    #[error("the runnable image {image} is wrong: {what}")]
    Image {
        /// The image's manifest.
        image: Digest,
        /// What is wrong.
        what: String,
    },
    /// A volume cannot be unpacked.
    #[error("the volume of {0:?} is no whole tar")]
    Volume(String, #[source] io::Error),
    /// A local file could not be read or written.
    #[error("failed to {0}")]
    Io(&'static str, #[source] io::Error),
}

impl From<StoreError> for DeepError {
    fn from(error: StoreError) -> Self {
        Self::Unpack(UnpackError::Store(error))
    }
}

/// Reads everything that an artifact leads to but its signatures. Of a checkpoint also what the
/// bytes mean is proven: files, chunks, pages, layers, volumes. The page index and the page hashes
/// are kept in a file without a name in the directory for temporary files meanwhile.
pub async fn read_everything(
    store: &Store,
    root: StoredManifest,
    progress: &Progress,
) -> Result<Proven, DeepError> {
    progress.step("read");
    let walk = Walk::from(store, root.clone(), Follow::Content).await?;
    let manifests: u64 = walk.manifests.iter().map(|manifest| manifest.descriptor.size).sum();
    let blobs: u64 = walk.blobs.iter().map(|blob| blob.size).sum();
    progress.expect(blobs);
    let mut proven = Proven {
        bytes: manifests.saturating_add(blobs),
        manifests: count(walk.manifests.len()),
        blobs: count(walk.blobs.len()),
        ..Proven::default()
    };
    let name = root.descriptor.digest.to_string();
    let read = match Checkpoint::of(store, root, &name).await {
        Ok(checkpoint) => {
            let deep = Deep { store, checkpoint: &checkpoint, progress };
            deep.read(&mut proven).await?
        }
        // An image, or whatever else was signed: its digests are all there is to prove.
        Err(ArtifactError::NotACheckpoint(..)) => BTreeSet::new(),
        Err(error) => return Err(error.into()),
    };
    let rest = walk.blobs.iter().filter(|blob| !read.contains(&blob.digest));
    stream::iter(rest.map(Ok))
        .try_for_each_concurrent(PARALLEL, |blob| async move {
            let mut content = store.blob(blob).await?;
            while let Some(bytes) = content.try_next().await? {
                progress.advance(length(&bytes));
            }
            Ok::<_, StoreError>(())
        })
        .await?;
    progress.finish();
    Ok(proven)
}

/// One checkpoint.
struct Deep<'a> {
    store: &'a Store,
    checkpoint: &'a Checkpoint,
    progress: &'a Progress,
}

/// The part of an image's config that counts here.
#[derive(Deserialize)]
struct ImageConfig {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<Digest>,
}

impl Deep<'_> {
    /// Returns the blobs that were read.
    async fn read(&self, proven: &mut Proven) -> Result<BTreeSet<Digest>, DeepError> {
        let Checkpoint { images, page_index, shards, page_hashes, volumes, .. } = self.checkpoint;
        let mut read: BTreeSet<Digest> = shards.iter().map(|shard| shard.digest.clone()).collect();
        read.extend([images.digest.clone(), page_index.digest.clone()]);
        let names = self.files().await?;
        proven.files = count(names.len());
        let plan = self.plan(&names).await?;
        proven.bulk_files = count(plan.files.len());
        let hashes = match page_hashes {
            None => None,
            Some(layer) => {
                read.insert(layer.digest.clone());
                let file = download(self.store, layer, &scratch()).await?;
                self.progress.advance(layer.size);
                Some(Arc::new(file))
            }
        };
        for (number, shard) in (0..).zip(shards) {
            self.shard(number, shard, &plan, hashes.as_ref(), proven).await?;
        }
        if let Some(runnable) = &self.checkpoint.runnable {
            self.image(runnable, &mut read, proven).await?;
        }
        for volume in volumes {
            read.extend(volume.parts.iter().map(|part| part.digest.clone()));
            self.volume(volume).await?;
            proven.volumes += 1;
        }
        Ok(read)
    }

    /// Reads the pack; returns the names of its files.
    async fn files(&self) -> Result<BTreeSet<String>, UnpackError> {
        let note = |names: &mut BTreeSet<String>, name: &str, _: &[u8]| {
            names.insert(name.to_owned());
            Ok(())
        };
        read_images(self.store, self.checkpoint, self.progress, BTreeSet::new(), note).await
    }

    /// Reads the page index.
    async fn plan(&self, names: &BTreeSet<String>) -> Result<Arc<Plan>, UnpackError> {
        let Self { store, checkpoint, progress } = self;
        let limits = Limits { dump_bytes_max: u64::MAX };
        let plan = plan(|_| true, store, checkpoint, &scratch(), limits, progress).await?;
        progress.advance(checkpoint.page_index.size);
        let twice = plan.files.iter().any(|file| names.contains(&file.name));
        if twice { Err(contradiction()) } else { Ok(plan) }
    }

    /// Reads a shard from its beginning to its end.
    async fn shard(
        &self,
        number: u16,
        shard: &Descriptor,
        plan: &Arc<Plan>,
        hashes: Option<&Arc<File>>,
        proven: &mut Proven,
    ) -> Result<(), DeepError> {
        let Some(table) = plan.shards.get(usize::from(number)) else { return Ok(()) };
        let reading = Arc::clone(plan);
        let extents = wanted::spawn(move |_| reading.extents(number)).end().await;
        let extents: Arc<[Extent]> = extents.map_err(failed)??.into();
        let mut incoming = Incoming::new(self.store.blob(shard).await?);
        for (at, chunk) in table.chunks.iter().enumerate() {
            let content = incoming.take(shard, chunk.stored_bytes).await?;
            let job = Job {
                content,
                chunk: *chunk,
                number: u32::try_from(at).unwrap_or(u32::MAX),
                extents: Arc::clone(&extents),
                hashes: hashes.map(Arc::clone),
            };
            let hash = plan.hash();
            match blocking(move || job.check(|content| hash_of(hash, content))).await {
                Ok(Found::Right { pages, compared }) => {
                    proven.pages += pages;
                    proven.page_hashes += compared;
                }
                Ok(Found::Chunk) => {
                    return Err(
                        UnpackError::Chunk { shard: shard.digest.clone(), chunk: at }.into()
                    );
                }
                Ok(Found::Page(page)) => {
                    return Err(DeepError::PageHash { shard: shard.digest.clone(), page });
                }
                Err(error) => return Err(DeepError::Io("compare page hashes", error)),
            }
            proven.chunks += 1;
            self.progress.advance(u64::from(chunk.stored_bytes));
        }
        // At its end the stream compares the digest.
        Ok(incoming.end().await?)
    }

    /// Unpacks the layers of the runnable image, to nowhere.
    async fn image(
        &self,
        runnable: &Descriptor,
        read: &mut BTreeSet<Digest>,
        proven: &mut Proven,
    ) -> Result<(), DeepError> {
        let image = || runnable.digest.clone();
        let wrong = |what: String| DeepError::Image { image: image(), what };
        let stored = self.store.manifest(&runnable.digest).await?;
        let manifest: Manifest = serde_json::from_slice(&stored.content)
            .map_err(|error| wrong(format!("its manifest: {error}")))?;
        let config = self.store.blob(&manifest.config).await?;
        let config = collect(config, &manifest.config, kybernate_spec::MANIFEST_BYTES_MAX).await?;
        self.progress.advance(length(&config));
        let config: ImageConfig = serde_json::from_slice(&config)
            .map_err(|error| wrong(format!("its config: {error}")))?;
        let diff_ids = config.rootfs.diff_ids;
        if diff_ids.len() != manifest.layers.len() {
            let (ids, layers) = (diff_ids.len(), manifest.layers.len());
            return Err(wrong(format!("its config has {ids} diff ids for {layers} layers")));
        }
        read.insert(manifest.config.digest.clone());
        for (layer, diff_id) in manifest.layers.iter().zip(diff_ids) {
            let found = self.layer(layer, &diff_id).await?;
            match found {
                Ok(found) if found == diff_id => {}
                Ok(found) => {
                    let layer = &layer.digest;
                    return Err(wrong(format!("layer {layer} is {found} and not {diff_id}")));
                }
                Err(error) => {
                    return Err(wrong(format!("layer {} does not unpack: {error}", layer.digest)));
                }
            }
            self.progress.advance(layer.size);
            read.insert(layer.digest.clone());
            proven.layers += 1;
        }
        Ok(())
    }

    /// Returns the digest of a layer as it is when it is not compressed.
    async fn layer(
        &self,
        layer: &Descriptor,
        diff_id: &Digest,
    ) -> Result<Result<Digest, io::Error>, DeepError> {
        let packed = self.store.blob(layer).await?;
        let (kind, hasher) = (layer.media_type.clone(), Hasher::new(diff_id.algorithm()));
        let unpacked =
            wanted::blocking(move |wanted| hash_unpacked(wanted.stream(packed), &kind, hasher));
        match unpacked.await.map_err(as_store_error) {
            Ok(digest) => Ok(Ok(digest)),
            Err(Ok(error)) => Err(error.into()),
            Err(Err(error)) => Ok(Err(error)),
        }
    }

    async fn volume(&self, volume: &Volume) -> Result<(), DeepError> {
        let bytes = volume.read(self.store);
        let read = wanted::blocking(move |wanted| {
            let mut archive = tar::Archive::new(wanted.stream(bytes));
            for entry in archive.entries()? {
                io::copy(&mut entry?, &mut io::sink())?;
            }
            io::copy(&mut archive.into_inner(), &mut io::sink())
        });
        read.await.map_err(|error| match as_store_error(error) {
            Ok(error) => error.into(),
            Err(error) => DeepError::Volume(volume.destination.clone(), error),
        })?;
        self.progress.advance(volume.parts.iter().map(|part| part.size).sum());
        Ok(())
    }
}

/// One chunk of a shard, to be compared with everything that is said about it.
struct Job {
    content: Vec<u8>,
    chunk: Chunk,
    number: u32,
    extents: Arc<[Extent]>,
    hashes: Option<Arc<File>>,
}

/// What came out of that.
enum Found {
    Right { pages: u64, compared: u64 },
    Chunk,
    Page(u32),
}

impl Job {
    fn check(&self, hash: impl Fn(&[u8]) -> [u8; 32]) -> io::Result<Found> {
        if hash(&self.content) != self.chunk.hash {
            return Ok(Found::Chunk);
        }
        let first = self.number * (CHUNK_BYTES / PAGE_BYTES);
        let end = first + CHUNK_BYTES / PAGE_BYTES;
        let (mut pages, mut compared) = (0, 0);
        for extent in extents_of(&self.extents, self.number) {
            let from = extent.shard_page.max(first);
            let to = (extent.shard_page + extent.pages).min(end);
            pages += u64::from(to - from);
            let Some(hashes) = &self.hashes else { continue };
            let mut expected = vec![0; bytes_of(to - from, PAGE_HASH_BYTES)];
            let ordinal = extent.ordinal + u64::from(from - extent.shard_page);
            hashes.read_exact_at(&mut expected, ordinal * count(PAGE_HASH_BYTES))?;
            let size = bytes_of(PAGE_BYTES, 1);
            let content = self.content.get(bytes_of(from - first, size)..).unwrap_or_default();
            let found = (from..to).zip(content.chunks(size)).zip(expected.chunks(PAGE_HASH_BYTES));
            for ((page, content), expected) in found {
                if page_hash(content) != *expected {
                    return Ok(Found::Page(page));
                }
                compared += 1;
            }
        }
        Ok(Found::Right { pages, compared })
    }
}

/// Where files without a name go: beside this.
fn scratch() -> std::path::PathBuf {
    tempfile::env::temp_dir().join("dump")
}

fn hash_unpacked(packed: impl Read, media_type: &str, hasher: Hasher) -> io::Result<Digest> {
    struct Hashing(Hasher);
    impl io::Write for Hashing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hashing = Hashing(hasher);
    if media_type.ends_with("gzip") {
        io::copy(&mut flate2::read::MultiGzDecoder::new(packed), &mut hashing)?;
    } else if media_type.ends_with("zstd") {
        io::copy(&mut zstd::Decoder::new(packed)?, &mut hashing)?;
    } else {
        let mut packed = packed;
        io::copy(&mut packed, &mut hashing)?;
    }
    Ok(hashing.0.finish())
}

const fn failed(error: io::Error) -> DeepError {
    DeepError::Io("read", error)
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn bytes_of(number: u32, size: usize) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(size)
}
