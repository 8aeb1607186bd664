//! Signs a checkpoint: a cosign bundle as a referrer of its index.

use std::fmt;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use kybernate_spec::{Annotations, Descriptor, Manifest, annotation, media_type};

use crate::bundle::{self, CONTENT, PREDICATE, SignBundleError};
use crate::key::{KeyError, SigningKey};
use crate::store::{BlobSource, BlobStream, Store, StoreError};

/// The content of the empty descriptor.
pub(crate) const EMPTY: &[u8] = b"{}";

/// File name of the bundle; oras skips layers without one.
const TITLE: &str = "signature.sigstore.json";

/// Why something could not be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The key does not sign.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The statement or manifest could not be written as JSON.
    #[error("failed to write the signature")]
    Json(#[source] serde_json::Error),
    /// The signature could not be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A blob held in memory.
pub(crate) struct Memory(Bytes);

/// Signs `target`, which must be stored already, and stores the signature beside it. Returns the
/// signature's manifest. Every call makes another signature; they do not replace each other.
pub async fn sign(
    store: &Store,
    target: &Descriptor,
    key: &SigningKey,
) -> Result<Descriptor, SignError> {
    let bundle = bundle::sign(&target.digest, key).map_err(|error| match error {
        SignBundleError::Key(error) => SignError::Key(error),
        SignBundleError::Json(error) => SignError::Json(error),
    })?;
    let layer = Descriptor::of(media_type::SIGSTORE_BUNDLE, &bundle);
    let config = Descriptor::of(media_type::OCI_EMPTY, EMPTY);
    put(store, &layer, Bytes::from(bundle)).await?;
    put(store, &config, Bytes::from_static(EMPTY)).await?;
    let mut subject = target.bare();
    subject.artifact_type = None;
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some(media_type::SIGSTORE_BUNDLE.to_owned()),
        config,
        layers: vec![layer.with_annotation(annotation::TITLE, TITLE)],
        subject: Some(subject),
        annotations: Annotations::from([
            (annotation::BUNDLE_CONTENT.to_owned(), CONTENT.to_owned()),
            (annotation::BUNDLE_PREDICATE.to_owned(), PREDICATE.to_owned()),
        ]),
    };
    let content = serde_json::to_vec(&manifest).map_err(SignError::Json)?;
    let mut descriptor = Descriptor::of(media_type::OCI_MANIFEST, &content);
    descriptor.artifact_type = manifest.artifact_type;
    store.put_manifest(&descriptor, Bytes::from(content)).await?;
    Ok(descriptor)
}

/// Stores a small blob, unless it is there.
pub(crate) async fn put(
    store: &Store,
    descriptor: &Descriptor,
    content: Bytes,
) -> Result<(), StoreError> {
    if store.has_blob(descriptor).await? {
        return Ok(());
    }
    store.put_blob(descriptor, &Memory(content)).await
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.0.len())
    }
}

impl BlobSource for Memory {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let content = self.0.clone();
        Box::pin(async move { Ok(stream::iter([Ok(content)]).boxed()) })
    }
}
