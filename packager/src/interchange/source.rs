//! Where an image of others is read: a registry, an image layout, or a layout in a tar.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use fs_err as fs;
use futures::future::BoxFuture;
use kybernate_spec::{
    Descriptor, Digest, Index, Location, MANIFEST_BYTES_MAX, annotation, document, media_type,
};

use super::ImportError;
use super::foreign::{ForeignError, Members};
use crate::checked::{checked, collect};
use crate::pack::upload::FileSource;
use crate::store::{BlobSource, BlobStream, Store, StoreError, StoreErrorKind};

/// Annotation with the name that an importing containerd gives an image.
const IMAGE_NAME: &str = "io.containerd.image.name";

/// Where a foreign image is read.
#[derive(Clone, Debug)]
pub enum ForeignSource {
    /// A registry, or an image layout in a directory.
    Store(Store),
    /// An image layout in a tar.
    Archive(Arc<Archive>),
}

/// An image layout in a tar. It is read where it lies.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    index: Index,
    /// Where each blob is, by the digest in its name.
    blobs: BTreeMap<String, (u64, u64)>,
}

impl Archive {
    /// Looks at all headers of a tar. Blocks.
    pub fn open(path: &Path) -> Result<Self, ForeignError> {
        let file = fs::File::open(path)?;
        let mut members = Members::new(std::io::BufReader::new(file));
        let (mut index, mut blobs) = (None, BTreeMap::new());
        while let Some(member) = members.next_file()? {
            if member.name == "index.json" {
                let content = members.small_content(&member, MANIFEST_BYTES_MAX)?;
                let parsed = document::parse_index(&content)
                    .map_err(|error| ForeignError::Content(format!("index.json: {error}")))?;
                index = Some(parsed);
            } else if let Some(name) = member.name.strip_prefix("blobs/") {
                blobs.insert(name.replace('/', ":"), (member.offset, member.bytes));
            }
        }
        let missing = || ForeignError::Content("it is no image layout".to_owned());
        Ok(Self { path: path.to_owned(), index: index.ok_or_else(missing)?, blobs })
    }

    fn source(&self, descriptor: &Descriptor) -> Result<FileSource, StoreError> {
        let error = |kind| StoreError {
            operation: "read blob",
            subject: format!("{}@{}", self.path.display(), descriptor.digest),
            kind,
        };
        match self.blobs.get(&descriptor.digest.to_string()) {
            Some((offset, bytes)) if *bytes == descriptor.size => {
                Ok(FileSource { path: self.path.clone(), offset: *offset })
            }
            Some((_, bytes)) => {
                let wrong = format!("{bytes} bytes instead of {}", descriptor.size);
                Err(error(StoreErrorKind::Mismatch(wrong)))
            }
            None => Err(error(StoreErrorKind::NotFound)),
        }
    }
}

impl ForeignSource {
    /// Returns the indexes that may be meant: the one that `location` names, else those listed in
    /// the tar.
    pub(super) async fn indexes(
        &self,
        location: Option<&Location>,
    ) -> Result<Vec<(String, Index)>, ImportError> {
        let parse = |content: &[u8]| {
            document::parse_index(content)
                .map_err(|error| ForeignError::Content(format!("the index: {error}")))
        };
        match (self, location) {
            (Self::Store(store), Some(location)) => {
                let stored = store.resolve(location).await?;
                if stored.descriptor.media_type != media_type::OCI_INDEX {
                    let kind = &stored.descriptor.media_type;
                    let text = format!("{location} is no index: its type is {kind:?}");
                    return Err(ForeignError::Content(text).into());
                }
                Ok(vec![(location.to_string(), parse(&stored.content)?)])
            }
            (Self::Store(_), None) => Ok(Vec::new()),
            (Self::Archive(archive), _) => {
                let mut found = Vec::new();
                let listed = archive.index.manifests.iter();
                for entry in listed.filter(|entry| entry.media_type == media_type::OCI_INDEX) {
                    let names = &entry.annotations;
                    let name = names.get(IMAGE_NAME).or_else(|| names.get(annotation::REF_NAME));
                    let name = name.map_or_else(|| entry.digest.to_string(), Clone::clone);
                    found.push((name, parse(&self.small(entry).await?)?));
                }
                Ok(found)
            }
        }
    }

    /// Reads a small blob, checked.
    pub(super) async fn small(&self, descriptor: &Descriptor) -> Result<Bytes, StoreError> {
        if let Self::Store(store) = self
            && (descriptor.is_manifest() || descriptor.is_index())
        {
            return Ok(store.manifest(&descriptor.digest).await?.content);
        }
        collect(self.blob(descriptor).await?, descriptor, MANIFEST_BYTES_MAX).await
    }

    /// Reads a blob, checked.
    pub(super) async fn blob(&self, descriptor: &Descriptor) -> Result<BlobStream, StoreError> {
        match self {
            Self::Store(store) => store.blob(descriptor).await,
            Self::Archive(archive) => {
                let stream = archive.source(descriptor)?.open(descriptor).await?;
                Ok(checked(stream, descriptor))
            }
        }
    }

    /// Whether a manifest or index is there.
    pub(super) async fn find(&self, descriptor: &Descriptor) -> Result<Option<Bytes>, StoreError> {
        match self.small(descriptor).await {
            Ok(content) if Digest::of(&content) == descriptor.digest => Ok(Some(content)),
            Ok(_) => Ok(None),
            Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl BlobSource for ForeignSource {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(self.blob(descriptor))
    }
}
