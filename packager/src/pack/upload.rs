//! Hashing shards and storing what is not there yet.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use fs_err as fs;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt as _};
use kybernate_spec::page_index::{CHUNK_BYTES, Chunk, Encoding};
use kybernate_spec::{Algorithm, Descriptor, Hasher};

use super::runnable::SourceImage;
use super::shards::{OpenFile, ShardPlan};
use crate::progress::Progress;
use crate::store::{BlobSource, BlobStream, Store, StoreError, StoreErrorKind};
use crate::wanted::Wanted;

/// Bytes read at once while a blob is sent: large enough that the hop to a blocking thread does
/// not show, small enough that a few uploads together stay small.
const READ_BYTES: u64 = 1 << 20;

/// A shard whose bytes are read from the dump as often as they are needed.
#[derive(Clone, Debug)]
pub(super) struct ShardSource {
    pub(super) plan: Arc<ShardPlan>,
    pub(super) files: Arc<[Arc<OpenFile>]>,
}

/// A blob that is a file, or a part of one.
#[derive(Clone, Debug)]
pub(crate) struct FileSource {
    pub(crate) path: PathBuf,
    /// Where the blob begins.
    pub(crate) offset: u64,
}

/// A blob that is held in memory, for what is a few KB.
#[derive(Clone, Debug)]
pub(crate) struct BytesSource(pub(crate) Bytes);

impl ShardSource {
    /// Hashes the shard: its digest, and the hash of each chunk.
    pub(super) fn hash(&self, wanted: &Wanted) -> io::Result<(Descriptor, Vec<Chunk>)> {
        let total = self.plan.bytes();
        let mut buffer = vec![0; usize::try_from(CHUNK_BYTES).map_err(io::Error::other)?];
        let mut hasher = Hasher::new(Algorithm::Sha256);
        let mut chunks = Vec::new();
        let mut offset = 0;
        while offset < total {
            wanted.check()?;
            let length = (total - offset).min(u64::from(CHUNK_BYTES));
            let content = slice(&mut buffer, length)?;
            self.plan.read_at(&self.files, offset, content)?;
            hasher.update(content);
            let plain_bytes = u32::try_from(length).map_err(io::Error::other)?;
            chunks.push(Chunk {
                stored_offset: offset,
                stored_bytes: plain_bytes,
                plain_bytes,
                encoding: Encoding::Raw,
                hash: blake3::hash(content).into(),
            });
            offset += length;
        }
        Ok((Descriptor::new(self.plan.media_type, hasher.finish(), total), chunks))
    }
}

impl BlobSource for ShardSource {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        self.open_at(descriptor, 0)
    }

    fn open_at<'a>(
        &'a self,
        descriptor: &'a Descriptor,
        offset: u64,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let source = self.clone();
        let total = descriptor.size;
        let read = move |offset, length| {
            let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
            source.plan.read_at(&source.files, offset, &mut content)?;
            Ok(content)
        };
        Box::pin(async move { Ok(stream_of("a shard".to_owned(), offset, total, read)) })
    }
}

impl BlobSource for FileSource {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        self.open_at(descriptor, 0)
    }

    fn open_at<'a>(
        &'a self,
        descriptor: &'a Descriptor,
        offset: u64,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let (path, begin) = (self.path.clone(), self.offset);
        let total = descriptor.size;
        Box::pin(async move {
            let name = path.display().to_string();
            let file = blocking(move || fs::File::open(path)).await;
            let file = Arc::new(file.map_err(|kind| read_error(&name, kind))?);
            let read = move |offset, length| {
                let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
                let offset = begin + offset;
                std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut content, offset)?;
                Ok(content)
            };
            Ok(stream_of(name, offset, total, read))
        })
    }
}

impl BlobSource for BytesSource {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let content = self.0.clone();
        Box::pin(async move { Ok(stream::iter([Ok(content)]).boxed()) })
    }
}

/// Where what is packed goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    pub(super) store: &'a Store,
    pub(super) progress: &'a Progress,
    /// Whether what the dump itself has is sent also where the store says that it is there
    /// (`spec/decisions/0082`).
    pub(super) resend: bool,
}

impl Target<'_> {
    /// Makes sure that the store has a blob of the dump: it is there and that is believed, or it is
    /// sent.
    pub(super) async fn store(
        self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        let is_there = !self.resend && self.store.has_blob(descriptor).await?;
        self.end(descriptor, source, is_there).await
    }

    /// Makes sure that the store has a blob of an image: it is there, or linked from another
    /// repository of the registry, or sent.
    pub(super) async fn store_image(
        self,
        descriptor: &Descriptor,
        image: &SourceImage,
    ) -> Result<(), StoreError> {
        let is_there = self.store.has_blob(descriptor).await?
            || match &image.mount_from {
                Some(from) => self.store.mount_blob(descriptor, from).await?,
                None => false,
            };
        self.end(descriptor, &*image.blobs, is_there).await
    }

    async fn end(
        self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
        is_there: bool,
    ) -> Result<(), StoreError> {
        if !is_there {
            self.store.put_blob(descriptor, source).await?;
            self.progress.transfer(descriptor.size);
        }
        self.progress.advance(descriptor.size);
        Ok(())
    }
}

/// Hashes a file without holding it.
pub(crate) fn hash_file(media_type: &str, path: &Path, wanted: &Wanted) -> io::Result<Descriptor> {
    let mut file = wanted.reader(fs::File::open(path)?);
    let mut sink = HashingWriter::new(io::sink());
    io::copy(&mut file, &mut sink)?;
    Ok(sink.describe(media_type))
}

/// Hashes what is written through it.
#[derive(Debug)]
pub(crate) struct HashingWriter<W> {
    inner: W,
    hasher: Hasher,
    bytes: u64,
}

impl<W> HashingWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, hasher: Hasher::new(Algorithm::Sha256), bytes: 0 }
    }

    pub(crate) fn describe(self, media_type: &str) -> Descriptor {
        Descriptor::new(media_type, self.hasher.finish(), self.bytes)
    }

    pub(crate) fn into_parts(self) -> (W, kybernate_spec::Digest, u64) {
        (self.inner, self.hasher.finish(), self.bytes)
    }
}

impl<W: io::Write> io::Write for HashingWriter<W> {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(content)?;
        self.hasher.update(content.get(..written).unwrap_or_default());
        self.bytes += u64::try_from(written).map_err(io::Error::other)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Runs `work` on a thread that may block: work so short that nobody stops it.
pub(crate) fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> impl Future<Output = io::Result<T>> {
    crate::wanted::blocking(|_| work())
}

fn stream_of(
    name: String,
    begin: u64,
    total: u64,
    read: impl Fn(u64, u64) -> io::Result<Vec<u8>> + Send + Sync + 'static,
) -> BlobStream {
    let read = Arc::new(read);
    stream::unfold(begin, move |offset| {
        let read = Arc::clone(&read);
        let name = name.clone();
        async move {
            if offset >= total {
                return None;
            }
            let length = READ_BYTES.min(total - offset);
            match blocking(move || read(offset, length)).await {
                Ok(content) => Some((Ok(Bytes::from(content)), offset + length)),
                Err(kind) => Some((Err(read_error(&name, kind)), total)),
            }
        }
    })
    .boxed()
}

fn read_error(subject: &str, kind: io::Error) -> StoreError {
    StoreError { operation: "read", subject: subject.to_owned(), kind: StoreErrorKind::Io(kind) }
}

fn slice(buffer: &mut [u8], length: u64) -> io::Result<&mut [u8]> {
    let length = usize::try_from(length).map_err(io::Error::other)?;
    buffer.get_mut(..length).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}
