//! The parts of the image that a container was started from.

use futures::future::BoxFuture;
use kybernate_packager::store::{
    BlobSource, BlobStream, ConnectOptions, Store, StoreError, StoreErrorKind,
};
use kybernate_spec::{Descriptor, Location, Reference};

use crate::restore::{ORIGIN_LABEL, PLAIN_HTTP_LABEL};
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
    pub(super) fn of(image: &Image, namespace: &Namespace) -> Self {
        let origin = image.labels.get(ORIGIN_LABEL).and_then(|name| name.parse::<Reference>().ok());
        Self {
            here: ContentSource::new(namespace.clone()),
            origin: origin.map(Location::Registry),
            plain_http: image.labels.contains_key(PLAIN_HTTP_LABEL),
        }
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
            match (self.here.open(descriptor).await, &self.origin) {
                (Err(StoreError { kind: StoreErrorKind::NotFound, .. }), Some(origin)) => {
                    self.fetch(origin, descriptor).await
                }
                (opened, _) => opened,
            }
        })
    }
}
