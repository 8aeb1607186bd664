//! One repository of a registry.
//!
//! `scheme` finds out whether it speaks TLS, `tokens` answers its challenges. Requests go over
//! `documents`, which sees the headers that the specification gives a meaning to and bounds what it
//! reads; `upload` and `download` move blobs and go on where a transfer broke off.

mod blobs;
mod credentials;
mod documents;
mod download;
mod error;
pub mod login;
mod notes;
mod patience;
mod referrers;
mod scheme;
mod tags;
mod tls;
mod tokens;
mod upload;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use kybernate_spec::{
    Descriptor, Digest, Hasher, MANIFEST_BYTES_MAX, Reference, RepositoryName, Tag,
};

use self::blobs::Begun;
use self::documents::Documents;
use self::notes::Notes;
pub(crate) use self::referrers::fallback_tag;
use self::scheme::Scheme;
use crate::checked::{checked, length};
use crate::outline::Outline;
use crate::store::{
    BlobSource, BlobStream, ConnectOptions, StoreError, StoreErrorKind, StoredManifest,
};

/// What is asked for when a manifest is read.
const MANIFEST_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// One repository of a registry. Cheap to clone; clones share connections and tokens.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    registry: Box<str>,
    repository: RepositoryName,
    documents: Documents,
    notes: Option<Notes>,
    begun: Begun,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Remote").field(&format_args!("{}", self.name())).finish()
    }
}

/// Returns a repository as oci-client names it, which knows where Docker's own registry is.
fn image(reference: &Reference) -> oci_client::Reference {
    let (registry, repository) = (reference.registry.to_string(), reference.repository.to_string());
    oci_client::Reference::with_tag(registry, repository, "latest".to_owned())
}

impl Remote {
    /// Finds out how the registry wants to be spoken to. Credentials come from Docker's
    /// `config.json` and its helpers. Plain HTTP is for when `options` say so, and for loopback
    /// where nobody speaks TLS.
    pub async fn connect(
        reference: &Reference,
        options: &ConnectOptions,
    ) -> Result<Self, StoreError> {
        let registry = reference.registry.clone();
        let auth = credentials::find(&registry).await;
        let scheme = Scheme::of(reference, options);
        let documents =
            Documents::connect(scheme, &image(reference), auth).await.map_err(|kind| {
                StoreError {
                    operation: "connect to registry",
                    subject: format!("{registry} over {}", scheme.failed(&kind)),
                    kind,
                }
            })?;
        let repository = reference.repository.clone();
        let notes = options.notes.as_deref().map(Notes::at);
        let begun = Begun::default();
        Ok(Self { shared: Arc::new(Shared { registry, repository, documents, notes, begun }) })
    }

    /// Returns the repository's name within its registry.
    pub fn repository(&self) -> &RepositoryName {
        &self.shared.repository
    }

    /// Returns the registry's host, with its port if one was written.
    pub fn registry(&self) -> &str {
        &self.shared.registry
    }

    /// Finds the manifest that `tag` names, or `latest`.
    pub async fn resolve(&self, tag: Option<&Tag>) -> Result<StoredManifest, StoreError> {
        let tag = tag.map_or("latest", Tag::as_str);
        self.fetch_manifest(tag, None)
            .await
            .map_err(|kind| self.error("pull manifest", &format!(":{tag}"), kind))
    }

    /// Returns the manifest with this digest, checked.
    pub async fn manifest(&self, digest: &Digest) -> Result<StoredManifest, StoreError> {
        self.fetch_manifest(&digest.to_string(), Some(digest))
            .await
            .map_err(|kind| self.error("pull manifest", &format!("@{digest}"), kind))
    }

    /// Stores a manifest by its digest. When it has a subject and the registry keeps no list of
    /// referrers, the list under the fallback tag is updated.
    pub async fn put_manifest(
        &self,
        descriptor: &Descriptor,
        content: Bytes,
    ) -> Result<(), StoreError> {
        let failed = |kind| self.error("push manifest", &format!("@{}", descriptor.digest), kind);
        let size = length(&content);
        if size > MANIFEST_BYTES_MAX {
            return Err(failed(StoreErrorKind::TooLarge { size, limit: MANIFEST_BYTES_MAX }));
        }
        let outline = Outline::parse(&content, Some(&descriptor.media_type))
            .map_err(|error| failed(StoreErrorKind::Malformed(error)))?;
        let path = format!("manifests/{}", descriptor.digest);
        let listed = self
            .shared
            .documents
            .put(&path, &descriptor.media_type, content)
            .await
            .map_err(failed)?;
        match &outline.subject {
            Some(subject) if !listed => self
                .list_under_fallback_tag(&subject.digest, outline.referrer(descriptor))
                .await
                .map_err(failed),
            _ => Ok(()),
        }
    }

    /// Points `tag` at a stored manifest.
    pub async fn tag(&self, descriptor: &Descriptor, tag: &Tag) -> Result<(), StoreError> {
        let stored = self.manifest(&descriptor.digest).await?;
        let path = format!("manifests/{tag}");
        self.shared
            .documents
            .put(&path, &stored.descriptor.media_type, stored.content)
            .await
            .map(|_listed| ())
            .map_err(|kind| self.error("tag", &format!(":{tag}"), kind))
    }

    /// Whether the blob is there.
    pub async fn has_blob(&self, descriptor: &Descriptor) -> Result<bool, StoreError> {
        self.find_blob(&descriptor.digest)
            .await
            .map_err(|kind| self.error("look for blob", &format!("@{}", descriptor.digest), kind))
    }

    /// Asks the registry to link a blob of its repository `from`. Returns whether it did.
    pub async fn mount_blob(
        &self,
        descriptor: &Descriptor,
        from: &RepositoryName,
    ) -> Result<bool, StoreError> {
        self.link_blob(&descriptor.digest, from)
            .await
            .map_err(|kind| self.error("mount blob", &format!("@{}", descriptor.digest), kind))
    }

    /// Stores a blob. After a break it goes on where the registry says that it stands, also where an
    /// earlier run was killed, when notes are kept ([`ConnectOptions::notes`]).
    pub async fn put_blob(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), StoreError> {
        self.upload(descriptor, source).await
    }

    /// Reads a whole blob, checked against its digest.
    pub async fn blob(&self, descriptor: &Descriptor) -> Result<BlobStream, StoreError> {
        let stream = self.blob_range(descriptor, 0, descriptor.size).await?;
        Ok(checked(stream, descriptor))
    }

    /// Reads a part of a blob, **not** checked. A cut connection is resumed where it broke.
    pub async fn blob_range(
        &self,
        descriptor: &Descriptor,
        offset: u64,
        length: u64,
    ) -> Result<BlobStream, StoreError> {
        self.download(descriptor, offset, length).await
    }

    /// Lists the manifests whose subject is `digest`.
    pub async fn referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, StoreError> {
        self.list_referrers(digest, artifact_type)
            .await
            .map_err(|kind| self.error("list referrers of", &format!("@{digest}"), kind))
    }

    async fn fetch_manifest(
        &self,
        reference: &str,
        digest: Option<&Digest>,
    ) -> Result<StoredManifest, StoreErrorKind> {
        let path = format!("manifests/{reference}");
        let document = self.shared.documents.get(&path, MANIFEST_TYPES, MANIFEST_BYTES_MAX).await?;
        let outline = Outline::parse(&document.content, document.media_type.as_deref())
            .map_err(StoreErrorKind::Malformed)?;
        let computed = match digest {
            None => Digest::of(&document.content),
            Some(digest) => {
                let mut hasher = Hasher::new(digest.algorithm());
                hasher.update(&document.content);
                hasher.finish()
            }
        };
        if digest.is_some_and(|digest| *digest != computed) {
            return Err(StoreErrorKind::Mismatch(format!("it is {computed}")));
        }
        let size = length(&document.content);
        let mut descriptor = Descriptor::new(&outline.media_type, computed, size);
        descriptor.artifact_type = outline.own_artifact_type();
        Ok(StoredManifest { descriptor, content: document.content })
    }

    fn name(&self) -> String {
        format!("{}/{}", self.shared.registry, self.shared.repository)
    }

    fn error(&self, operation: &'static str, suffix: &str, kind: StoreErrorKind) -> StoreError {
        StoreError { operation, subject: format!("{}{suffix}", self.name()), kind }
    }
}
