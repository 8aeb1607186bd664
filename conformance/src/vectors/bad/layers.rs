//! Layers of the checkpoint manifest, and volumes.

#![expect(
    clippy::indexing_slicing,
    reason = "into documents made here; a wrong place fails the test that makes every vector"
)]

use kybernate_spec::{Reason, annotation, media_type};
use serde_json::{Value, json};

use super::super::artifact::{Artifact, Pool};

type Destinations = &'static [Option<&'static str>];

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    let unknown = "application/vnd.kybernate.checkpoint.";
    for (name, what, kind) in [
        ("layer-unknown", "a layer of a type that nobody knows", "later.v1"),
        ("layer-device", "a shard of device memory, of which the facts know nothing", "device.v1"),
        ("layer-pages-zstd", "a compressed shard, which is reserved", "pages.v1+zstd"),
        ("layer-pages-encrypted", "an encrypted shard, which is reserved", "pages.v1+encrypted"),
        ("layer-pages-2", "a shard of a later version", "pages.v2"),
    ] {
        let kind = format!("{unknown}{kind}");
        let artifact = Artifact::small()
            .manifest(move |manifest| manifest["layers"][2]["mediaType"] = json!(kind));
        pool.bad(name, "1", Reason::Layers, what, artifact)?;
    }
    let ordinary = Artifact::small().manifest(|manifest| {
        let mut layer = manifest["layers"][1].clone();
        layer["mediaType"] = json!(media_type::OCI_LAYER_TAR);
        push(manifest, layer);
    });
    pool.bad(
        "layer-tar",
        "1",
        Reason::Layers,
        "a container image's layer among the others",
        ordinary,
    )?;
    for (name, what, layer) in [
        ("no-page-index", "a manifest without page index", 0),
        ("no-pack", "a manifest without pack of images", 1),
    ] {
        let artifact = Artifact::small().manifest(move |manifest| {
            manifest["layers"].as_array_mut().map(|layers| layers.remove(layer));
        });
        pool.bad(name, "1", Reason::Layers, what, artifact)?;
    }
    for (name, what, layer) in [
        ("two-page-indexes", "a manifest with its page index twice", 0),
        ("two-packs", "a manifest with its pack of images twice", 1),
    ] {
        let artifact = Artifact::small().manifest(move |manifest| {
            let again = manifest["layers"][layer].clone();
            push(manifest, again);
        });
        pool.bad(name, "1", Reason::Layers, what, artifact)?;
    }
    let mut hashes = Artifact::small().manifest(|manifest| {
        let again = manifest["layers"][3].clone();
        push(manifest, again);
    });
    hashes.page_hashes = Some(vec![7; 32]);
    pool.bad("two-page-hashes", "1", Reason::Layers, "a manifest with page hashes twice", hashes)?;
    let no_layers = Artifact::small().manifest(|manifest| manifest["layers"] = json!([]));
    pool.bad("no-layers", "1", Reason::Layers, "a manifest without layers", no_layers)?;

    for (name, what, layer) in [
        ("pack-large", "a pack of more than 256 MiB, as its descriptor says", 1),
        ("shard-large", "a shard of more than 256 MiB, as its descriptor says", 2),
    ] {
        let artifact = Artifact::small().manifest(move |manifest| {
            manifest["layers"][layer]["size"] = json!((256 << 20) + 1);
        });
        pool.bad(name, "1", Reason::BlobTooLarge, what, artifact)?;
    }
    let mut short = Artifact::small();
    short.page_hashes = Some(vec![7; 16]);
    pool.bad("page-hashes-few", "5", Reason::Sizes, "one page hash for two pages", short)?;
    volumes(pool)
}

fn volumes(pool: &mut Pool) -> anyhow::Result<()> {
    let cases: [(&str, &str, Destinations); 8] = [
        ("volume-nowhere", "a volume without a destination", &[None]),
        ("volume-empty", "a volume with an empty destination", &[Some("")]),
        ("volume-relative", "a volume with a relative destination", &[Some("dev/shm")]),
        ("volume-above", "a volume whose destination goes up", &[Some("/dev/../../etc")]),
        ("volume-above-last", "a volume whose destination ends with going up", &[Some("/dev/..")]),
        ("volume-nul", "a volume with a NUL in its destination", &[Some("/dev/shm\0")]),
        ("volume-twice", "two volumes for one destination", &[Some("/dev/shm"), Some("/dev/shm")]),
        (
            "volume-twice-otherwise",
            "two volumes for one destination that is written in two ways",
            &[Some("/dev/shm"), Some("//dev/./shm/")],
        ),
    ];
    for (name, what, destinations) in cases {
        let mut artifact = Artifact::small();
        artifact.volumes = destinations.to_vec();
        pool.bad(name, "6", Reason::Volume, what, artifact)?;
    }
    let (one, other) = (Some("/dev/shm"), Some("/data"));
    let cases = [
        ("volume-part-order", "parts out of order", vec![one, one, one], vec!["0", "2", "1"]),
        ("volume-part-first", "a volume that begins with its second part", vec![one], vec!["1"]),
        (
            "volume-part-apart",
            "parts with another volume between",
            vec![one, other, one],
            vec!["0", "0", "1"],
        ),
        ("volume-part-twice", "a part twice", vec![one, one], vec!["0", "0"]),
        ("volume-part-number", "a part without a number", vec![one, one], vec!["0", "one"]),
        ("volume-part-sign", "a part whose number has a sign", vec![one, one], vec!["0", "+1"]),
        ("volume-part-zeros", "a part whose number begins with 0", vec![one, one], vec!["0", "01"]),
    ];
    for (name, what, destinations, parts) in cases {
        let mut artifact = Artifact::small();
        (artifact.volumes, artifact.volume_parts) = (destinations, parts);
        pool.bad(name, "6", Reason::Volume, what, artifact)?;
    }
    let mut long = Artifact::small().manifest(|manifest| {
        let path = format!("/{}", "a".repeat(4096));
        manifest["layers"][3]["annotations"][annotation::DESTINATION] = json!(path);
    });
    long.volumes = vec![Some("/")];
    pool.bad("volume-long", "6", Reason::Volume, "a destination of 4,097 bytes", long)
}

fn push(manifest: &mut Value, layer: Value) {
    if let Some(layers) = manifest["layers"].as_array_mut() {
        layers.push(layer);
    }
}
