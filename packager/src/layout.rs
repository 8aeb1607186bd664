//! An OCI image layout: a directory with `oci-layout`, `index.json` and `blobs/<algorithm>/<hex>`.
//!
//! Whatever is written is synced and renamed into place, so that a reader sees the whole of it or
//! nothing; `index.json` is replaced under a lock. Whatever is read as a whole is checked. No path
//! leads out of the directory, whatever links somebody put into it.

mod files;
mod index;
mod list;

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::stream::{StreamExt, TryStreamExt};
use kybernate_spec::{Descriptor, Digest, Hasher, MANIFEST_BYTES_MAX, Tag};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::checked::{checked, length};
use crate::outline::Outline;
use crate::store::{BlobSource, BlobStream, StoreError, StoreErrorKind, StoredManifest};

/// Pieces on their way between the runtime and the thread that reads or writes a file.
const PIECES: usize = 8;

/// One image layout. Nothing is read or made before the first operation.
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// Names the layout in `directory`.
    pub fn at(directory: &Path) -> Self {
        Self { root: directory.to_owned() }
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        &self.root
    }

    /// Finds the manifest that `tag` names. Without a tag: `latest`, else the only one there is.
    pub async fn resolve(&self, tag: Option<&Tag>) -> Result<StoredManifest, StoreError> {
        let subject = self.name(tag.map_or(String::new(), |tag| format!(":{tag}")));
        let tag = tag.cloned();
        self.run("read", subject, move |root| {
            let entry = index::resolve(root, tag.as_ref())?;
            load(root, &entry.digest, Some(&entry))
        })
        .await
    }

    /// Returns the manifest with this digest, checked.
    pub async fn manifest(&self, digest: &Digest) -> Result<StoredManifest, StoreError> {
        let digest = digest.clone();
        let subject = self.name(format!("@{digest}"));
        self.run("read manifest", subject, move |root| load(root, &digest, None)).await
    }

    /// Stores a manifest. An index, and whatever has a subject, is listed in `index.json` without a
    /// tag, so that other tools find it too and do not take it for garbage.
    pub async fn put_manifest(
        &self,
        descriptor: &Descriptor,
        content: Bytes,
    ) -> Result<(), StoreError> {
        let descriptor = descriptor.clone();
        let subject = self.name(format!("@{}", descriptor.digest));
        self.run("write manifest", subject, move |root| {
            let size = length(&content);
            if size > MANIFEST_BYTES_MAX {
                return Err(StoreErrorKind::TooLarge { size, limit: MANIFEST_BYTES_MAX });
            }
            check(&descriptor.digest, &content)?;
            let outline = Outline::parse(&content, Some(&descriptor.media_type))
                .map_err(StoreErrorKind::Malformed)?;
            files::prepare(root)?;
            files::write_blob(root, &descriptor.digest, &content)?;
            if outline.subject.is_none() && !descriptor.is_index() {
                return Ok(());
            }
            index::update(root, |index| index::list(index, outline.referrer(&descriptor)))
        })
        .await
    }

    /// Points `tag` at a stored manifest.
    pub async fn tag(&self, descriptor: &Descriptor, tag: &Tag) -> Result<(), StoreError> {
        let (descriptor, tag) = (descriptor.clone(), tag.clone());
        self.run("tag", self.name(format!(":{tag}")), move |root| {
            let stored = load(root, &descriptor.digest, Some(&descriptor))?;
            let entry = Descriptor {
                platform: descriptor.platform.clone(),
                annotations: descriptor.annotations.clone(),
                ..stored.descriptor
            };
            index::update(root, |index| index::point(index, entry, &tag))
        })
        .await
    }

    /// Lists the tags, each with what it names.
    pub async fn tags(&self) -> Result<Vec<(Tag, Digest)>, StoreError> {
        self.run("list the tags of", self.name(String::new()), move |root| {
            Ok(index::tags(&index::read(root)?))
        })
        .await
    }

    /// Removes a tag. What it named stays listed without one.
    pub async fn delete_tag(&self, tag: &Tag) -> Result<(), StoreError> {
        let tag = tag.clone();
        self.run("delete tag", self.name(format!(":{tag}")), move |root| {
            index::change(root, |index| index::untag(index, &tag))
        })
        .await
    }

    /// Removes manifests from the list of what the layout holds, and their tags. Their blobs stay.
    pub async fn delete_manifests(&self, digests: &[Digest]) -> Result<(), StoreError> {
        let digests = digests.to_vec();
        let subject = digests.first().map_or_else(String::new, |digest| format!("@{digest}"));
        self.run("delete manifest", self.name(subject), move |root| {
            index::change(root, |index| index::forget(index, &digests))
        })
        .await
    }

    /// Whether the blob is there, with the right size.
    pub async fn has_blob(&self, descriptor: &Descriptor) -> Result<bool, StoreError> {
        let descriptor = descriptor.clone();
        let subject = self.name(format!("@{}", descriptor.digest));
        self.run("look for blob", subject, move |root| {
            match files::open_blob(root, &descriptor.digest) {
                Ok((_file, size)) => Ok(size == descriptor.size),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Stores a blob, checked while it is written.
    pub async fn put_blob(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        let subject = self.name(format!("@{}", descriptor.digest));
        let stream = checked(source.open(descriptor).await?, descriptor);
        let (sender, mut pieces) = mpsc::channel::<Bytes>(PIECES);
        // Ends when the sender is dropped, also when this future is.
        let root = self.root.clone();
        let writer = tokio::task::spawn_blocking(move || {
            files::prepare(&root)?;
            let mut ingest = files::Ingest::begin(&root)?;
            while let Some(bytes) = pieces.blocking_recv() {
                ingest.write(&bytes)?;
            }
            Ok::<_, io::Error>(ingest)
        });
        let forwarded = forward(stream, sender).await;
        let failed = |error: io::Error| StoreError {
            operation: "write blob",
            subject: subject.clone(),
            kind: error.into(),
        };
        let written = writer.await.map_err(|error| failed(error.into()))?;
        forwarded?;
        let ingest = written.map_err(failed)?;
        let digest = descriptor.digest.clone();
        self.run("write blob", subject.clone(), move |root| Ok(ingest.publish_blob(root, &digest)?))
            .await
    }

    /// Reads a whole blob, checked against its digest.
    pub async fn blob(&self, descriptor: &Descriptor) -> Result<BlobStream, StoreError> {
        let stream = self.blob_range(descriptor, 0, descriptor.size).await?;
        Ok(checked(stream, descriptor))
    }

    /// Reads a part of a blob, **not** checked.
    pub async fn blob_range(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        length: u64,
    ) -> Result<BlobStream, StoreError> {
        let (digest, expected) = (descriptor.digest.clone(), descriptor.size);
        let subject = self.name(format!("@{digest}"));
        let file = self
            .run("read blob", subject.clone(), move |root| {
                let (file, size) = files::open_blob(root, &digest).map_err(missing)?;
                if size == expected {
                    return Ok(file);
                }
                let wrong = format!("{size} bytes instead of {expected}");
                Err(StoreErrorKind::Mismatch(wrong))
            })
            .await?;
        let (sender, receiver) = mpsc::channel(PIECES);
        // Ends when the receiver is dropped. Nobody waits for it: what it has to say goes through
        // the channel.
        let _reader = tokio::task::spawn_blocking(move || {
            files::read_range(&file, offset, length, |piece| sender.blocking_send(piece).is_ok());
        });
        let stream = ReceiverStream::new(receiver).map_err(move |error: io::Error| StoreError {
            operation: "read blob",
            subject: subject.clone(),
            kind: error.into(),
        });
        Ok(stream.boxed())
    }

    /// Opens a blob as a file, **not** checked; `None` when it is not there. Blocks.
    pub(crate) fn open_blob(&self, digest: &Digest) -> Option<io::Result<fs_err::File>> {
        match files::open_blob(&self.root, digest) {
            Ok((file, _size)) => {
                let path = self.root.join(digest.to_string());
                Some(Ok(fs_err::File::from_parts(file, path)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Lists the manifests whose subject is `digest`, among those that `index.json` leads to.
    pub async fn referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, StoreError> {
        let (wanted, artifact_type) = (digest.clone(), artifact_type.map(ToOwned::to_owned));
        let subject = self.name(format!("@{digest}"));
        self.run("list referrers of", subject, move |root| {
            index::referrers(root, &wanted, artifact_type.as_deref())
        })
        .await
    }

    /// Runs `work` where blocking is allowed.
    async fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        subject: String,
        work: impl FnOnce(&Path) -> Result<T, StoreErrorKind> + Send + 'static,
    ) -> Result<T, StoreError> {
        let root = self.root.clone();
        tokio::task::spawn_blocking(move || work(&root))
            .await
            .unwrap_or_else(|aborted| Err(StoreErrorKind::Io(aborted.into())))
            .map_err(|kind| StoreError { operation, subject, kind })
    }

    fn name(&self, suffix: String) -> String {
        format!("oci:{}{suffix}", self.root.display())
    }
}

/// Hands a stream's pieces to whoever writes them. When nobody takes them any more, the writer has
/// failed and says why itself.
async fn forward(mut stream: BlobStream, pieces: mpsc::Sender<Bytes>) -> Result<(), StoreError> {
    while let Some(bytes) = stream.try_next().await? {
        if pieces.send(bytes).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Reads and checks a manifest. What it is comes from itself, else from `entry`.
fn load(
    root: &Path,
    digest: &Digest,
    entry: Option<&Descriptor>,
) -> Result<StoredManifest, StoreErrorKind> {
    let (file, size) = files::open_blob(root, digest).map_err(missing)?;
    if size > MANIFEST_BYTES_MAX {
        return Err(StoreErrorKind::TooLarge { size, limit: MANIFEST_BYTES_MAX });
    }
    let content = Bytes::from(files::read_whole(file, MANIFEST_BYTES_MAX)?);
    check(digest, &content)?;
    let declared = entry.map(|entry| entry.media_type.as_str());
    let outline = Outline::parse(&content, declared).map_err(StoreErrorKind::Malformed)?;
    let mut descriptor = Descriptor::new(&outline.media_type, digest.clone(), length(&content));
    descriptor.artifact_type = outline.own_artifact_type();
    Ok(StoredManifest { descriptor, content })
}

fn check(digest: &Digest, content: &[u8]) -> Result<(), StoreErrorKind> {
    let mut hasher = Hasher::new(digest.algorithm());
    hasher.update(content);
    let computed = hasher.finish();
    if computed == *digest {
        return Ok(());
    }
    Err(StoreErrorKind::Mismatch(format!("it is {computed}")))
}

fn missing(error: io::Error) -> StoreErrorKind {
    match error.kind() {
        io::ErrorKind::NotFound => StoreErrorKind::NotFound,
        _ => StoreErrorKind::Io(error),
    }
}

#[cfg(test)]
mod tests;
