//! Where artifacts are kept: a registry or an image layout, behind one type.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use kybernate_spec::{Descriptor, Digest, Location, Reason, RepositoryName, Tag};

use crate::checked::length;
use crate::layout::Layout;
use crate::remote::Remote;

/// How much of a registry's words is shown.
const TOLD_CHARS_MAX: usize = 300;

/// Bytes of a blob, in order.
pub type BlobStream = BoxStream<'static, Result<Bytes, StoreError>>;

/// Something blobs can be read from, as often as an upload has to be repeated.
pub trait BlobSource: fmt::Debug + Send + Sync {
    /// Opens the blob. What comes is checked by the receiver, or by the stream itself, which then
    /// ends with [`StoreErrorKind::Mismatch`].
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>>;

    /// Opens the blob at a byte. What comes is not checked by the stream. Without an implementation
    /// of its own, what comes before that byte is read and dropped.
    fn open_at<'a>(
        &'a self,
        descriptor: &'a Descriptor,
        offset: u64,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async move {
            let stream = self.open(descriptor).await?;
            Ok(if offset == 0 { stream } else { skip(stream, offset) })
        })
    }
}

/// Drops the first bytes of a stream.
fn skip(stream: BlobStream, bytes: u64) -> BlobStream {
    let mut left = bytes;
    stream
        .try_filter_map(move |mut bytes| {
            let drop = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            let kept = bytes.split_off(drop);
            left -= length(&bytes);
            std::future::ready(Ok((!kept.is_empty()).then_some(kept)))
        })
        .boxed()
}

/// How to reach a registry.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Speak plain HTTP also to hosts that are not loopback.
    pub plain_http: bool,
    /// A directory of the user's own for notes of uploads under way, so that another run goes on
    /// with them. Made when it is needed.
    pub notes: Option<PathBuf>,
}

/// One repository of a registry, or one image layout.
#[derive(Clone, Debug)]
pub enum Store {
    /// A repository of a registry.
    Registry(Remote),
    /// An image layout on disk.
    Layout(Layout),
}

/// A manifest or index as it is stored.
#[derive(Clone, Debug)]
pub struct StoredManifest {
    /// Its media type, digest and size.
    pub descriptor: Descriptor,
    /// Its bytes, checked against the digest.
    pub content: Bytes,
}

/// Why a store could not do something.
#[derive(Debug, thiserror::Error)]
#[error("failed to {operation} {subject}")]
pub struct StoreError {
    /// What was tried, as "pull blob".
    pub operation: &'static str,
    /// With what: a reference, a digest, a path.
    pub subject: String,
    /// What happened.
    #[source]
    pub kind: StoreErrorKind,
}

/// What happened to a store's operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreErrorKind {
    /// There is no such manifest, blob, tag or layout.
    #[error("not found")]
    NotFound,
    /// The content does not match its digest or size.
    #[error("the content does not match its digest: {0}")]
    Mismatch(String),
    /// The registry says that what it was given has another digest, or that what was asked for is
    /// none. Nobody takes its word for that.
    #[error("the registry says that the digest is wrong, which its own log may explain{0}")]
    Disputed(Told),
    /// The registry wants other credentials.
    #[error("not authorised: log in, or check the repository's name{0}")]
    Unauthorized(Told),
    /// The registry knows who asks and does not allow it.
    #[error("not allowed: {}", .0.before("ask for access, or log in as somebody who has it"))]
    Denied(Told),
    /// The registry has no room.
    #[error("the registry's storage is full")]
    Full,
    /// The registry, or whatever is before it, takes no request of this size.
    #[error(
        "the registry, or a proxy before it, takes no requests of this size: raise its limit to at least 256 MiB"
    )]
    RequestTooLarge,
    /// The document is larger than a reader accepts.
    #[error("it has {size} bytes, at most {limit} are accepted")]
    TooLarge {
        /// Bytes of the document.
        size: u64,
        /// Bytes accepted.
        limit: u64,
    },
    /// The document is not what it should be.
    #[error("it is malformed")]
    Malformed(#[source] serde_json::Error),
    /// Reading or writing a file failed.
    #[error("input or output failed")]
    Io(#[source] std::io::Error),
    /// The registry is busy and has said when to ask again.
    #[error("the registry is busy: it wants to be asked again in {} s", .after.as_secs())]
    Busy {
        /// When to ask again (`Retry-After`).
        after: Duration,
        /// What it answered.
        #[source]
        answer: oci_client::errors::OciDistributionError,
    },
    /// The registry could not be reached or answered with an error.
    #[error("the registry could not be asked")]
    Registry(#[source] oci_client::errors::OciDistributionError),
}

/// A registry's own words on why it refuses; shown shortened, and with nothing in them that a
/// terminal acts upon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told(Box<str>);

impl Told {
    /// Reads the messages of an error document; anything else has none.
    pub fn of(document: &str) -> Self {
        #[derive(serde::Deserialize)]
        struct Document {
            errors: Vec<Entry>,
        }
        #[derive(serde::Deserialize)]
        struct Entry {
            #[serde(default)]
            message: String,
        }
        let entries = serde_json::from_str(document).map_or(Vec::new(), |d: Document| d.errors);
        let messages: Vec<String> = entries.into_iter().map(|entry| entry.message).collect();
        let text = messages.join("; ");
        Self(text.trim_matches([';', ' ']).chars().take(TOLD_CHARS_MAX).collect())
    }

    /// Returns the words, and then what helps where they are about who asks.
    fn before(&self, advice: &str) -> String {
        match &*self.0 {
            "" => advice.to_owned(),
            words => format!("the registry says {words:?}; where that is about who asks: {advice}"),
        }
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (the registry says {:?})", self.0) }
    }
}

impl StoreError {
    /// Returns why whoever asked refuses the content; `None` when reading or writing failed.
    pub const fn reason(&self) -> Option<Reason> {
        match self.kind {
            StoreErrorKind::NotFound => Some(Reason::Missing),
            StoreErrorKind::Mismatch(_) => Some(Reason::DigestMismatch),
            StoreErrorKind::TooLarge { .. } => Some(Reason::DocumentTooLarge),
            StoreErrorKind::Malformed(_) => Some(Reason::Document),
            StoreErrorKind::Disputed(_)
            | StoreErrorKind::Unauthorized(_)
            | StoreErrorKind::Denied(_)
            | StoreErrorKind::Full
            | StoreErrorKind::RequestTooLarge
            | StoreErrorKind::Io(_)
            | StoreErrorKind::Busy { .. }
            | StoreErrorKind::Registry(_) => None,
        }
    }
}

impl StoreErrorKind {
    /// Whether what was asked for is to blame, and not the way to it or the place.
    pub const fn is_about_content(&self) -> bool {
        matches!(
            self,
            Self::NotFound | Self::Mismatch(_) | Self::TooLarge { .. } | Self::Malformed(_)
        )
    }
}

impl From<std::io::Error> for StoreErrorKind {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl Store {
    /// Opens the repository or layout of `location`. A layout is made when `location` is written
    /// to for the first time.
    pub async fn open(location: &Location, options: &ConnectOptions) -> Result<Self, StoreError> {
        match location {
            Location::Registry(reference) => {
                Ok(Self::Registry(Remote::connect(reference, options).await?))
            }
            Location::Layout(layout) => Ok(Self::Layout(Layout::at(&layout.directory))),
        }
    }

    /// Finds the manifest that `location`'s digest or tag names.
    pub async fn resolve(&self, location: &Location) -> Result<StoredManifest, StoreError> {
        match (self, location.digest()) {
            (_, Some(digest)) => self.manifest(digest).await,
            (Self::Registry(remote), None) => remote.resolve(location.tag()).await,
            (Self::Layout(layout), None) => layout.resolve(location.tag()).await,
        }
    }

    /// Returns the manifest with this digest, checked, of at most
    /// [`kybernate_spec::MANIFEST_BYTES_MAX`].
    pub async fn manifest(&self, digest: &Digest) -> Result<StoredManifest, StoreError> {
        match self {
            Self::Registry(remote) => remote.manifest(digest).await,
            Self::Layout(layout) => layout.manifest(digest).await,
        }
    }

    /// Returns the manifest that a descriptor leads to, digest and size compared.
    pub async fn manifest_of(&self, descriptor: &Descriptor) -> Result<StoredManifest, StoreError> {
        let stored = self.manifest(&descriptor.digest).await?;
        let size = stored.descriptor.size;
        if size == descriptor.size {
            return Ok(stored);
        }
        Err(StoreError {
            operation: "read manifest",
            subject: descriptor.digest.to_string(),
            kind: StoreErrorKind::Mismatch(format!("{size} bytes instead of {}", descriptor.size)),
        })
    }

    /// Stores a manifest by its digest; everything it names must be there.
    pub async fn put_manifest(
        &self,
        descriptor: &Descriptor,
        content: Bytes,
    ) -> Result<(), StoreError> {
        match self {
            Self::Registry(remote) => remote.put_manifest(descriptor, content).await,
            Self::Layout(layout) => layout.put_manifest(descriptor, content).await,
        }
    }

    /// Points `tag` at a stored manifest.
    pub async fn tag(&self, descriptor: &Descriptor, tag: &Tag) -> Result<(), StoreError> {
        match self {
            Self::Registry(remote) => remote.tag(descriptor, tag).await,
            Self::Layout(layout) => layout.tag(descriptor, tag).await,
        }
    }

    /// Finds the manifest that a tag names.
    pub async fn resolve_tag(&self, tag: &Tag) -> Result<StoredManifest, StoreError> {
        match self {
            Self::Registry(remote) => remote.resolve(Some(tag)).await,
            Self::Layout(layout) => layout.resolve(Some(tag)).await,
        }
    }

    /// Lists the tags; at most as many as a registry shows on a thousand pages.
    pub async fn tags(&self) -> Result<Vec<Tag>, StoreError> {
        match self {
            Self::Registry(remote) => remote.tags().await,
            Self::Layout(layout) => {
                Ok(layout.tags().await?.into_iter().map(|(tag, _digest)| tag).collect())
            }
        }
    }

    /// Removes a tag, and nothing else.
    pub async fn delete_tag(&self, tag: &Tag) -> Result<(), StoreError> {
        match self {
            Self::Registry(remote) => remote.delete_tag(tag).await,
            Self::Layout(layout) => layout.delete_tag(tag).await,
        }
    }

    /// Removes a manifest with every tag that names it, and then its referrers. It may be gone
    /// already when some of those are left.
    pub async fn delete_manifest(
        &self,
        digest: &Digest,
        referrers: &[Digest],
    ) -> Result<(), StoreError> {
        match self {
            Self::Registry(remote) => {
                match remote.delete_manifest(digest).await {
                    Err(error)
                        if matches!(error.kind, StoreErrorKind::NotFound)
                            && !referrers.is_empty() => {}
                    other => other?,
                }
                for referrer in referrers {
                    match remote.delete_manifest(referrer).await {
                        // A registry may have done so by itself.
                        Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => {}
                        other => other?,
                    }
                }
                remote.delete_fallback_list(digest).await
            }
            Self::Layout(layout) => {
                let all: Vec<Digest> = std::iter::once(digest).chain(referrers).cloned().collect();
                layout.delete_manifests(&all).await
            }
        }
    }

    /// Whether the blob is there.
    pub async fn has_blob(&self, descriptor: &Descriptor) -> Result<bool, StoreError> {
        match self {
            Self::Registry(remote) => remote.has_blob(descriptor).await,
            Self::Layout(layout) => layout.has_blob(descriptor).await,
        }
    }

    /// Asks the registry to link a blob of another of its repositories. Returns whether it did;
    /// a layout never does.
    pub async fn mount_blob(
        &self,
        descriptor: &Descriptor,
        from: &RepositoryName,
    ) -> Result<bool, StoreError> {
        match self {
            Self::Registry(remote) => remote.mount_blob(descriptor, from).await,
            Self::Layout(_) => Ok(false),
        }
    }

    /// Stores a blob read from `source` (not when it is there already: ask first). What arrives is
    /// checked against the digest by the registry, or by the layout.
    pub async fn put_blob(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        match self {
            Self::Registry(remote) => remote.put_blob(descriptor, source).await,
            Self::Layout(layout) => layout.put_blob(descriptor, source).await,
        }
    }

    /// Reads a whole blob; the stream ends with [`StoreErrorKind::Mismatch`] when the bytes are
    /// not what the descriptor says.
    pub async fn blob(&self, descriptor: &Descriptor) -> Result<BlobStream, StoreError> {
        match self {
            Self::Registry(remote) => remote.blob(descriptor).await,
            Self::Layout(layout) => layout.blob(descriptor).await,
        }
    }

    /// Reads `length` bytes of a blob from `offset`. The bytes are **not** checked: for shards,
    /// whose chunks the page index proves.
    pub async fn blob_range(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        length: u64,
    ) -> Result<BlobStream, StoreError> {
        match self {
            Self::Registry(remote) => remote.blob_range(descriptor, offset, length).await,
            Self::Layout(layout) => layout.blob_range(descriptor, offset, length).await,
        }
    }

    /// Whether [`Self::blob_range`] reads no more of this blob than it is asked for: some registries, or
    /// proxies before them, always answer with all of it.
    pub async fn gives_parts(&self, descriptor: &Descriptor) -> Result<bool, StoreError> {
        match self {
            Self::Registry(remote) => remote.gives_parts(descriptor).await,
            Self::Layout(_) => Ok(true),
        }
    }

    /// Opens a blob as a file where it is one on this machine, **not** checked. Blocks.
    pub(crate) fn local_blob(&self, digest: &Digest) -> Option<std::io::Result<fs_err::File>> {
        match self {
            Self::Registry(_) => None,
            Self::Layout(layout) => layout.open_blob(digest),
        }
    }

    /// Lists the manifests whose subject is `digest`, also where the registry has only the
    /// fallback tag. With `artifact_type`, only those; an entry without one is kept.
    pub async fn referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, StoreError> {
        match self {
            Self::Registry(remote) => remote.referrers(digest, artifact_type).await,
            Self::Layout(layout) => layout.referrers(digest, artifact_type).await,
        }
    }
}

impl BlobSource for Store {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(self.blob(descriptor))
    }
}
