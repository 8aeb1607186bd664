//! Artifacts to push around.

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use kybernate_packager::store::{BlobSource, BlobStream, Store, StoreError};
use kybernate_spec::{Annotations, Descriptor, Index, Manifest, annotation, media_type};

/// A blob held in memory.
#[derive(Clone, Debug)]
pub(crate) struct Memory(pub(crate) Bytes);

impl BlobSource for Memory {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let pieces: Vec<Result<Bytes, StoreError>> =
            self.0.chunks(64 << 10).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        Box::pin(async { Ok(stream::iter(pieces).boxed()) })
    }
}

/// Bytes that nothing compresses, the same for the same seed.
pub(crate) fn noise(bytes: usize, seed: u64) -> Bytes {
    let mut content = vec![0; bytes];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut content);
    content.into()
}

/// Stores a blob.
pub(crate) async fn put(store: &Store, media_type: &str, content: Bytes) -> Descriptor {
    let descriptor = Descriptor::of(media_type, &content);
    store.put_blob(&descriptor, &Memory(content)).await.unwrap();
    descriptor
}

/// Stores a checkpoint-shaped index with one child that has `layers`.
pub(crate) async fn checkpoint(store: &Store, layers: &[Bytes]) -> Descriptor {
    let mut described = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let layer = put(store, media_type::PAGES, layer.clone()).await;
        described.push(layer.with_annotation(annotation::TITLE, format!("pages-{number:05}")));
    }
    let child = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        config: put(store, media_type::CHECKPOINT_CONFIG, Bytes::from_static(b"{}")).await,
        layers: described,
        subject: None,
        annotations: Annotations::new(),
    };
    let child = put_document(store, media_type::OCI_MANIFEST, &child).await;
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        manifests: vec![child],
        subject: None,
        annotations: Annotations::new(),
    };
    put_document(store, media_type::OCI_INDEX, &index).await
}

/// Stores a manifest or index.
pub(crate) async fn put_document(
    store: &Store,
    media_type: &str,
    document: &impl serde::Serialize,
) -> Descriptor {
    let content = Bytes::from(serde_json::to_vec(document).unwrap());
    let descriptor = Descriptor::of(media_type, &content);
    store.put_manifest(&descriptor, content).await.unwrap();
    descriptor
}

/// Reads a stream to its end.
pub(crate) async fn read(stream: BlobStream) -> Result<Vec<u8>, StoreError> {
    let pieces: Vec<Bytes> = stream.try_collect().await?;
    Ok(pieces.concat())
}
