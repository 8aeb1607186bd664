//! Images of containerd, and the leases that keep content while it is worked on.

use std::collections::HashMap;
use std::time::Duration;

use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    self as api, CreateImageRequest, DeleteImageRequest, GetImageRequest,
};
use containerd_client::types;
use kybernate_spec::Descriptor;
use tonic::transport::Channel;

use super::{Namespace, RuntimeError, RuntimeErrorKind};

/// After this time containerd drops a lease by itself: when we died over it.
const LEASE_LIFE: Duration = Duration::from_hours(24);

/// An image as containerd names it.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) target: Descriptor,
    pub(crate) labels: HashMap<String, String>,
}

/// When containerd collects garbage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collect {
    /// At once: there may be much of it.
    Now,
    /// After so many changes, or when something else asks for it.
    Later,
}

impl Namespace {
    /// Returns an image.
    pub(crate) async fn image(&self, name: &str) -> Result<Image, RuntimeError> {
        let request = self.quick(GetImageRequest { name: name.to_owned() });
        let answer = self.images().get(request).await;
        let answer = answer.map_err(|s| self.error("find image", name, s))?;
        let image = answer.into_inner().image.unwrap_or_default();
        let target = image.target.as_ref().and_then(from_containerd).ok_or_else(|| {
            let kind = RuntimeErrorKind::Answer("the image has no usable target");
            RuntimeError { operation: "find image", subject: name.to_owned(), kind }
        })?;
        Ok(Image { name: image.name, target, labels: image.labels })
    }

    /// Creates an image. Returns whether it is new: a name that is taken stays as it is.
    pub(crate) async fn create_image(&self, image: &Image) -> Result<bool, RuntimeError> {
        let request = self.quick(CreateImageRequest {
            image: Some(api::Image {
                name: image.name.clone(),
                labels: image.labels.clone(),
                target: Some(to_containerd(&image.target)),
                ..api::Image::default()
            }),
            ..CreateImageRequest::default()
        });
        let mut images = self.images();
        match self.make(async move { images.create(request).await }).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == tonic::Code::AlreadyExists => Ok(false),
            Err(status) => Err(self.error("create image", &image.name, status)),
        }
    }

    /// Deletes an image and, before it returns, what only it needed.
    pub(crate) async fn delete_image(&self, name: &str) -> Result<(), RuntimeError> {
        let message = DeleteImageRequest { name: name.to_owned(), sync: true, target: None };
        let answer = self.images().delete(self.quick(message)).await;
        answer.map_err(|s| self.error("delete image", name, s)).map(drop)
    }

    /// Takes a lease: what is made through the returned namespace is kept from containerd's garbage
    /// collector until [`Namespace::end_lease`], or for a day when we die over it.
    pub(crate) async fn lease(&self, id: &str) -> Result<Self, RuntimeError> {
        let expires = jiff::Timestamp::now().checked_add(LEASE_LIFE);
        let expires = expires.unwrap_or(jiff::Timestamp::MAX).to_string();
        let labels = HashMap::from([("containerd.io/gc.expire".to_owned(), expires)]);
        let request = self.quick(api::CreateRequest { id: id.to_owned(), labels });
        let mut leases = LeasesClient::new(self.channel());
        let answer = self.make(async move { leases.create(request).await }).await;
        answer.map_err(|s| self.error("take lease", id, s))?;
        Ok(Self { lease: Some(id.into()), ..self.clone() })
    }

    /// Ends a lease by its name, if there is one. What only it kept goes when containerd collects
    /// garbage: with [`Collect::Now`], before this returns.
    pub(crate) async fn end_lease(&self, id: &str, when: Collect) -> Result<(), RuntimeError> {
        let sync = when == Collect::Now;
        let request = self.quick(api::DeleteRequest { id: id.to_owned(), sync });
        match LeasesClient::new(self.channel()).delete(request).await {
            Err(status) if status.code() != tonic::Code::NotFound => {
                Err(self.error("end lease", id, status))
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn images(&self) -> ImagesClient<Channel> {
        ImagesClient::new(self.channel())
    }
}

/// Returns a descriptor in containerd's words.
pub(super) fn to_containerd(descriptor: &Descriptor) -> types::Descriptor {
    types::Descriptor {
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.to_string(),
        size: i64::try_from(descriptor.size).unwrap_or(i64::MAX),
        annotations: HashMap::new(),
    }
}

fn from_containerd(descriptor: &types::Descriptor) -> Option<Descriptor> {
    let digest = descriptor.digest.parse().ok()?;
    let size = u64::try_from(descriptor.size).ok()?;
    Some(Descriptor::new(&descriptor.media_type, digest, size))
}
