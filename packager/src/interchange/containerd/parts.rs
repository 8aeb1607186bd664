//! What containerd's index is made of, wherever it goes: into an image layout, or into the content
//! store of a node.

use std::io::{self, Write};
use std::path::PathBuf;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::{Annotations, Descriptor, Index, annotation, media_type};
use prost::Message as _;
use serde_json::Value;

use super::{Any, CONFIG, FORMAT, RUNTIME, SNAPSHOTTER, SPEC_TYPE};
use crate::artifact::Checkpoint;
use crate::interchange::image::Images;
use crate::interchange::{ExportError, local};
use crate::pack::upload::HashingWriter;
use crate::store::Store;

/// The runtime that restores it.
const RUNTIME_NAME: &str = "io.containerd.runc.v2";
/// The snapshotter that containerd has by default.
const SNAPSHOTTER_NAME: &str = "overlayfs";

/// What an index is made of beside the dump and its specification.
#[derive(Debug)]
pub struct Parts {
    images: Images,
}

/// The blobs that an index names beside the container image.
#[derive(Clone, Debug)]
pub struct Blobs {
    /// CRIU's images, a tar.
    pub criu: Descriptor,
    /// The runtime specification.
    pub specification: Descriptor,
    /// What the container had written.
    pub layer: Descriptor,
}

impl Parts {
    /// Finds the container image of a checkpoint. Only small documents are read.
    pub async fn find(store: &Store, checkpoint: &Checkpoint) -> Result<Self, ExportError> {
        Ok(Self { images: Images::find(FORMAT, store, checkpoint).await? })
    }

    /// Returns the container image, and what goes on it.
    pub(super) const fn images(&self) -> &Images {
        &self.images
    }

    /// Returns the container image's manifest: the source's, or the runnable image's where nothing
    /// leads to that.
    pub const fn image(&self) -> &Descriptor {
        &self.images.base
    }

    /// Returns about how many bytes the container's layer takes.
    pub fn layer_bytes(&self) -> u64 {
        self.images.diff.as_ref().map_or(0, |diff| diff.size)
    }

    /// Writes what the container had written, compressed as containerd wants it: it looks for gzip
    /// and nothing else. Without anything it is a layer without files, so that `--rw` finds one.
    pub async fn write_layer<W>(&self, store: &Store, writer: W) -> Result<W, ExportError>
    where
        W: Write + Send + 'static,
    {
        let source = match &self.images.diff {
            Some(layer) => Some((store.blob(layer).await?, layer.media_type.clone())),
            None => None,
        };
        local("write the container's layer", move |wanted| {
            let source = source.map(|(stream, kind)| (wanted.stream(stream), kind));
            let mut encoder = GzEncoder::new(writer, Compression::fast());
            match source {
                Some((mut stream, kind)) if kind == media_type::OCI_LAYER_ZSTD => {
                    io::copy(&mut zstd::Decoder::new(&mut stream)?, &mut encoder)?;
                    // A stream tells at its end whether it was what its digest says.
                    io::copy(&mut stream, &mut io::sink())?;
                }
                Some((mut stream, kind)) if kind == media_type::OCI_LAYER_TAR => {
                    io::copy(&mut stream, &mut encoder)?;
                }
                Some((_, kind)) => {
                    let text = format!("the container's layer is of type {kind:?}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                None => encoder.write_all(&[0; 1024])?,
            }
            encoder.finish()
        })
        .await
    }

    /// Writes the same into a new file that only we can read.
    pub async fn layer_file(
        &self,
        store: &Store,
        path: PathBuf,
    ) -> Result<Descriptor, ExportError> {
        let file = local("make a file for the container's layer", move |_| {
            let mut options = fs::OpenOptions::new();
            options.write(true).create_new(true).mode(0o600).open(path)
        });
        let written = self.write_layer(store, HashingWriter::new(file.await?)).await?;
        Ok(written.describe(media_type::OCI_LAYER_GZIP))
    }

    /// Makes the index. `image` is what containerd calls the image that the container is made of.
    pub fn index(&self, blobs: Blobs, image: &str) -> Index {
        let Blobs { criu, specification, layer } = blobs;
        Index {
            schema_version: 2,
            media_type: Some(media_type::OCI_INDEX.to_owned()),
            artifact_type: None,
            // containerd looks at one entry only when it wants the root file system of an index: the
            // first of its own platform has to be the image.
            manifests: [self.images.base.bare(), criu, specification, layer]
                .into_iter()
                .map(|entry| Descriptor { platform: Some(self.images.platform.clone()), ..entry })
                .collect(),
            subject: None,
            annotations: Annotations::from([
                (annotation::REF_NAME.to_owned(), image.to_owned()),
                (RUNTIME.to_owned(), RUNTIME_NAME.to_owned()),
                (SNAPSHOTTER.to_owned(), SNAPSHOTTER_NAME.to_owned()),
            ]),
        }
    }
}

/// Writes a runtime specification as containerd keeps it.
pub fn specification(specification: &Value) -> (Descriptor, Bytes) {
    let any = Any {
        type_url: SPEC_TYPE.to_owned(),
        // As `serde_json::to_vec`, which for a `Value` does not fail.
        value: specification.to_string().into_bytes(),
    };
    let content = any.encode_to_vec();
    (Descriptor::of(CONFIG, &content), content.into())
}
