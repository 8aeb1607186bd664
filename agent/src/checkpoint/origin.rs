//! The parts of the image that a container was started from.

use futures::future::BoxFuture;
use kybernate_packager::store::{
    BlobSource, BlobStream, ConnectOptions, Store, StoreError, StoreErrorKind,
};
use kybernate_spec::{Descriptor, Location, Reference, chain};

use crate::restore::CHECKPOINT_LABEL;
use crate::runtime::{ContentSource, Image, Namespace};

/// Reads an image from containerd. Of one that was restored, containerd has not all layers: they are
/// where the checkpoint came from.
#[derive(Debug)]
pub(super) struct Parts {
    here: ContentSource,
    origin: Option<Location>,
    plain_http: bool,
}

impl Parts {
    pub(super) fn of(image: &Image, namespace: &Namespace, plain_http: bool) -> Self {
        let restored = image.labels.contains_key(CHECKPOINT_LABEL);
        let origin = restored.then(|| image.name.parse::<Reference>().ok()).flatten();
        let (here, origin) =
            (ContentSource::new(namespace.clone()), origin.map(Location::Registry));
        Self { here, origin, plain_http }
    }

    async fn fetch(&self, origin: &Location, blob: &Descriptor) -> Result<BlobStream, StoreError> {
        let connect = ConnectOptions { plain_http: self.plain_http, notes: None };
        Store::open(origin, &connect).await?.blob(blob).await
    }
}

impl BlobSource for Parts {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(async move {
            let (missing, origin) = match (self.here.open(descriptor).await, &self.origin) {
                (Err(missing), Some(origin))
                    if matches!(missing.kind, StoreErrorKind::NotFound) =>
                {
                    (missing, origin)
                }
                (opened, _) => return opened,
            };
            self.fetch(origin, descriptor).await.map_err(|error| {
                // The image is gone, as where containerd lacks a layer of any other.
                tracing::warn!(error = %chain(&error), "failed to fetch a layer from where it came");
                missing
            })
        })
    }
}
