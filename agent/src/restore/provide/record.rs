//! A provided checkpoint in containerd: its image record, and the index that this leads to.

use std::collections::HashMap;

use kybernate_spec::{Descriptor, Index, MANIFEST_BYTES_MAX, document, media_type};

use super::REQUEST_LABEL;
use crate::restore::CHECKPOINT_LABEL;
use crate::restore::image::Held;
use crate::runtime::{Image, Namespace, RuntimeError, WriteContentError};

/// What has an image's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    /// An image of the same checkpoint, made for the same request.
    Same,
    /// Something else.
    Other,
}

/// Looks whether an image is there already. What is left of one whose content somebody has removed
/// goes, so that it can be made again.
pub(super) async fn look(namespace: &Namespace, wanted: &Image) -> Result<Found, RuntimeError> {
    let found = match namespace.image(&wanted.name).await {
        Ok(found) => found,
        Err(error) if error.is_not_found() => return Ok(Found::Nothing),
        Err(error) => return Err(error),
    };
    let same = |label: &str| found.labels.get(label) == wanted.labels.get(label);
    if !same(CHECKPOINT_LABEL) || !same(REQUEST_LABEL) {
        return Ok(Found::Other);
    }
    if is_whole(namespace, &found.target).await? {
        return Ok(Found::Same);
    }
    tracing::warn!(image = found.name, "content of a provided checkpoint is missing");
    namespace.delete_image(&found.name).await?;
    Ok(Found::Nothing)
}

/// Whether the content store has everything that an index names.
async fn is_whole(namespace: &Namespace, target: &Descriptor) -> Result<bool, RuntimeError> {
    if !namespace.has_content(&target.digest).await? {
        return Ok(false);
    }
    let read = namespace.read_small(target, MANIFEST_BYTES_MAX).await;
    let index = read.ok().and_then(|content| document::parse::<Index>(&content).ok());
    let Some(index) = index else { return Ok(false) };
    for entry in &index.manifests {
        if !namespace.has_content(&entry.digest).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes the index, and tells containerd's garbage collector what it leads to.
pub(super) async fn write_index(
    index: &Index,
    content: Vec<u8>,
    leased: &Namespace,
) -> Result<Descriptor, WriteContentError> {
    let descriptor = Descriptor::of(media_type::OCI_INDEX, &content);
    leased.write_blob(&descriptor, &Held(content.into())).await?;
    let entries = index.manifests.iter().enumerate();
    let labels: HashMap<String, String> = entries
        .map(|(number, entry)| {
            (format!("containerd.io/gc.ref.content.{number}"), entry.digest.to_string())
        })
        .collect();
    leased.label_content(&descriptor.digest, labels).await?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::fake::Fake;
    use containerd_client::services::v1::{self as containerd, GetImageResponse};
    use containerd_client::types;
    use prost::Message as _;
    use tonic::Status;

    fn image(checkpoint: &str, request: &str) -> Image {
        let labels = [(CHECKPOINT_LABEL, checkpoint), (REQUEST_LABEL, request)];
        Image {
            name: "example.com/job:v1".to_owned(),
            target: Descriptor::of(media_type::OCI_INDEX, b"{}"),
            labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        }
    }

    /// Looks for an image in a containerd that has one, whose content is gone.
    async fn looked(wanted: Image, there: bool) -> (Found, Vec<String>) {
        let fake = Fake::start(move |method, _| match method {
            "Images/Get" if there => {
                let found = image("sha256:1", "one");
                let target = types::Descriptor {
                    media_type: found.target.media_type,
                    digest: found.target.digest.to_string(),
                    size: 2,
                    ..types::Descriptor::default()
                };
                let image = containerd::Image {
                    name: found.name,
                    labels: found.labels,
                    target: Some(target),
                    ..containerd::Image::default()
                };
                Ok(GetImageResponse { image: Some(image) }.encode_to_vec())
            }
            "Images/Delete" => Ok(Vec::new()),
            _ => Err(Status::not_found("no such thing")),
        });
        let namespace = fake.app().containerd.namespace("default");
        (look(&namespace, &wanted).await.unwrap(), fake.asked())
    }

    #[tokio::test]
    async fn an_image_of_somebody_else_stays() {
        for other in [image("sha256:2", "one"), image("sha256:1", "two")] {
            let (found, asked) = looked(other, true).await;
            assert_eq!((found, asked), (Found::Other, vec!["Images/Get".to_owned()]));
        }
    }

    #[tokio::test]
    async fn what_has_lost_its_content_is_made_again() {
        let (found, asked) = looked(image("sha256:1", "one"), true).await;
        assert_eq!(found, Found::Nothing);
        assert_eq!(asked.last().unwrap(), "Images/Delete");
        assert_eq!(looked(image("sha256:1", "one"), false).await.0, Found::Nothing);
    }
}
