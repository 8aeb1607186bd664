//! The workload's container image, as an OCI image layout that registries and containerd take.
//!
//! Two layers: a file system with busybox, and on it the workload. The same busybox and workload
//! give the same bytes: no time, owner or order of this machine gets in.

mod layer;
#[cfg(test)]
mod tests;

use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use fs_err as fs;
use kybernate_spec::{
    Annotations, Descriptor, Digest, Index, Manifest, Platform, Reference, ReferenceError, Tag,
    TagError, media_type,
};
use serde_json::json;

use self::layer::{Layer, Place};

/// The workload, a static program: see `workload/main.rs`.
pub const WORKLOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/workload"));

/// Annotation of the tag (image specification, "Pre-Defined Annotation Keys").
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Annotation that `ctr image import` names the image after.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// The tag a reference without one means.
const DEFAULT_TAG: &str = "latest";
/// The time of everything in the image.
const CREATED: &str = "1970-01-01T00:00:00Z";
/// `imageLayoutVersion` of the image specification.
const LAYOUT_MARKER: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;

/// An image that was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The manifest, as `index.json` has it.
    pub manifest: Descriptor,
    /// The configuration.
    pub config: Descriptor,
    /// The layers, lowest first: the base and the workload.
    pub layers: Vec<Descriptor>,
}

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
#[error("failed to build the workload's image: {step}")]
pub struct ImageError {
    step: &'static str,
    #[source]
    kind: ImageErrorKind,
}

/// What went wrong while an image was built.
#[derive(Debug, thiserror::Error)]
pub enum ImageErrorKind {
    /// A file could not be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A document could not be written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The name has a `/`, but is no reference.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The name has no `/`, but is no tag.
    #[error(transparent)]
    Tag(#[from] TagError),
}

/// What an image starts.
struct Starts {
    entrypoint: &'static [&'static str],
    arguments: &'static [&'static str],
}

const WORKS: Starts =
    Starts { entrypoint: &["/workload", "run", "--state", "/state"], arguments: &["--mib", "256"] };
const PAUSES: Starts = Starts { entrypoint: &["/workload", "pause"], arguments: &[] };

/// What the image is called: in the layout, and in containerd when a full reference was given.
struct Name {
    tag: String,
    containerd: Option<String>,
}

/// Builds the image into the directory `layout`, and calls it `name`: a tag, or a full reference.
///
/// `busybox` is a static busybox for this machine's architecture. Files of an earlier build are
/// replaced; blobs only that one had stay.
pub fn build(layout: &Path, busybox: &Path, name: &str) -> Result<Built, ImageError> {
    let busybox = fs::read(busybox).map_err(during("read busybox"))?;
    let layers = [
        layer::base(&busybox).map_err(during("write the base layer"))?,
        layer::workload(WORKLOAD).map_err(during("write the workload's layer"))?,
    ];
    write_layout(layout, name, layers, &WORKS)
}

/// Builds the image of the container that holds a pod's namespaces: a program that does nothing.
pub fn build_pause(layout: &Path, name: &str) -> Result<Built, ImageError> {
    let layers = [layer::workload(WORKLOAD).map_err(during("write the workload's layer"))?];
    write_layout(layout, name, layers, &PAUSES)
}

fn write_layout<const N: usize>(
    layout: &Path,
    name: &str,
    layers: [Layer; N],
    starts: &Starts,
) -> Result<Built, ImageError> {
    let name = Name::parse(name).map_err(during("parse the name"))?;
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(during("create the layout"))?;
    for layer in &layers {
        let blob = blobs.join(layer.place.descriptor.digest.hex());
        fs::write(blob, &layer.compressed).map_err(during("write a layer"))?;
    }
    let run = json!({
        "Env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"],
        "Entrypoint": starts.entrypoint,
        "Cmd": starts.arguments,
        "WorkingDir": "/",
    });
    write_documents(layout, name, &layers.map(|layer| layer.place), &run)
}

/// Builds an image whose only layer is the content of a tar, and calls it `name`.
pub fn build_of(layout: &Path, tar: &Path, name: &str) -> Result<Built, ImageError> {
    let name = Name::parse(name).map_err(during("parse the name"))?;
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(during("create the layout"))?;
    let blob = blobs.join("layer");
    let (descriptor, diff_id) = layer::of_tar(tar, &blob).map_err(during("compress the layer"))?;
    let done = fs::rename(blob, blobs.join(descriptor.digest.hex()));
    done.map_err(during("name the layer"))?;
    let place = Place { descriptor, diff_id, created_by: "kybernate-conformance: packages" };
    let run = json!({ "Env": ["PATH=/usr/bin:/usr/sbin"], "WorkingDir": "/" });
    write_documents(layout, name, &[place], &run)
}

/// Writes everything of the layout but the layers, which are there.
fn write_documents(
    layout: &Path,
    name: Name,
    layers: &[Place],
    run: &serde_json::Value,
) -> Result<Built, ImageError> {
    let blobs = layout.join("blobs/sha256");
    let config = document(&configuration(layers, run))?;
    let config_descriptor = Descriptor::of(media_type::OCI_CONFIG, &config);
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: config_descriptor.clone(),
        layers: layers.iter().map(|layer| layer.descriptor.clone()).collect(),
        subject: None,
        annotations: Annotations::new(),
    };
    let text = document(&manifest)?;
    let descriptor = name.annotate(Descriptor::of(media_type::OCI_MANIFEST, &text));
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: None,
        manifests: vec![descriptor.clone()],
        subject: None,
        annotations: Annotations::new(),
    };
    let index = document(&index)?;

    let write = |path: &Path, bytes: &[u8]| fs::write(path, bytes).map_err(during("write a file"));
    write(&blobs.join(config_descriptor.digest.hex()), &config)?;
    write(&blobs.join(descriptor.digest.hex()), &text)?;
    write(&layout.join("oci-layout"), LAYOUT_MARKER.as_bytes())?;
    write(&layout.join("index.json"), &index)?;
    Ok(Built { manifest: descriptor, config: config_descriptor, layers: manifest.layers })
}

/// Writes the layout as one tar, for `ctr image import FILE` and `skopeo copy oci-archive:FILE`.
///
/// Only what `built` names gets in, so that an earlier build leaves no trace.
pub fn archive(layout: &Path, built: &Built, file: &Path) -> Result<(), ImageError> {
    write_archive(layout, built, file).map_err(during("write the archive"))
}

impl Name {
    fn parse(text: &str) -> Result<Self, ImageErrorKind> {
        if !text.contains('/') {
            let tag: Tag = text.parse()?;
            return Ok(Self { tag: tag.as_str().to_owned(), containerd: None });
        }
        let reference: Reference = text.parse()?;
        let tag = reference.tag.as_ref().map_or(DEFAULT_TAG, Tag::as_str).to_owned();
        let containerd = format!("{}/{}:{tag}", reference.registry, reference.repository);
        Ok(Self { tag, containerd: Some(containerd) })
    }

    fn annotate(self, descriptor: Descriptor) -> Descriptor {
        let platform = Platform {
            architecture: architecture().to_owned(),
            os: "linux".to_owned(),
            os_version: None,
            os_features: Vec::new(),
            variant: None,
        };
        let descriptor = Descriptor { platform: Some(platform), ..descriptor };
        let descriptor = descriptor.with_annotation(REF_NAME, self.tag);
        match self.containerd {
            Some(name) => descriptor.with_annotation(CONTAINERD_NAME, name),
            None => descriptor,
        }
    }
}

/// This machine's architecture in Go's words.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn configuration(layers: &[Place], run: &serde_json::Value) -> serde_json::Value {
    let diff_ids: Vec<&Digest> = layers.iter().map(|layer| &layer.diff_id).collect();
    let history: Vec<_> = layers
        .iter()
        .map(|layer| json!({ "created": CREATED, "created_by": layer.created_by }))
        .collect();
    json!({
        "created": CREATED,
        "architecture": architecture(),
        "os": "linux",
        "config": run,
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
        "history": history,
    })
}

fn write_archive(layout: &Path, built: &Built, file: &Path) -> Result<(), ImageErrorKind> {
    let mut tar = tar::Builder::new(BufWriter::new(fs::File::create(file)?));
    let mut names = vec!["index.json".to_owned(), "oci-layout".to_owned()];
    let blobs = built.layers.iter().chain([&built.config, &built.manifest]);
    names.extend(blobs.map(|blob| format!("blobs/sha256/{}", blob.digest.hex())));
    names.sort_unstable();
    for name in ["blobs/", "blobs/sha256/"] {
        layer::append_dir(&mut tar, name, 0o755)?;
    }
    for name in names {
        layer::append_file(&mut tar, &name, 0o644, &fs::read(layout.join(&name))?)?;
    }
    tar.into_inner()?.flush()?;
    Ok(())
}

fn document(value: &impl serde::Serialize) -> Result<Vec<u8>, ImageError> {
    serde_json::to_vec(value).map_err(during("write a document"))
}

fn during<E: Into<ImageErrorKind>>(step: &'static str) -> impl Fn(E) -> ImageError {
    move |kind| ImageError { step, kind: kind.into() }
}
