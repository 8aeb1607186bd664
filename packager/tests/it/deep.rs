//! `kyb verify --deep`, and each kind of damage that it finds.

use std::io::Write as _;

use bytes::Bytes;
use kybernate_packager::key::SigningKey;
use kybernate_packager::sign::sign;
use kybernate_packager::store::Store;
use kybernate_spec::{Annotations, Descriptor, Digest, Index, Location, Manifest, media_type};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::artifact::{noise, put, put_document};
use crate::dump::dump;
use crate::kyb::{Ran, kyb};
use crate::registry::{Registry, open};

const PAGES: usize = 1500;

/// A checkpoint with everything that one can have, in the layout `layout` with the tag `v1`, signed
/// with `ours.key`.
struct Scene {
    scratch: TempDir,
    store: Store,
    key: SigningKey,
    index: Index,
}

fn tar(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_size(u64::try_from(content.len()).unwrap());
    header.set_mode(0o644);
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_data(&mut header, name, content).unwrap();
    builder.into_inner().unwrap()
}

fn gzip(content: &[u8]) -> Bytes {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap().into()
}

/// Stores an image with a compressed and a plain layer.
async fn image(store: &Store) -> Descriptor {
    let layers = [tar("bin/sh", b"shell"), tar("etc/motd", b"hello")];
    let config = json!({
        "architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": layers.each_ref().map(|l| Digest::of(l))},
    });
    let [first, second] = layers;
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: put(store, media_type::OCI_CONFIG, config.to_string().into()).await,
        layers: vec![
            put(store, media_type::OCI_LAYER_GZIP, gzip(&first)).await,
            put(store, media_type::OCI_LAYER_TAR, second.into()).await,
        ],
        subject: None,
        annotations: Annotations::new(),
    };
    put_document(store, media_type::OCI_MANIFEST, &manifest).await
}

impl Scene {
    async fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        dump(scratch.path(), PAGES);
        let key = SigningKey::generate().unwrap();
        key.write_files(&scratch.path().join("ours"), b"secret").unwrap();
        fs_err::write(scratch.path().join("shm.tar"), tar("queue", &noise(9000, 3))).unwrap();
        fs_err::write(scratch.path().join("diff.tar"), tar("tmp/x", &noise(9000, 4))).unwrap();
        let location: Location =
            format!("oci:{}:v1", scratch.path().join("layout").display()).parse().unwrap();
        let store = open(&location).await;
        let image = image(&store).await;
        let line = format!(
            "pack dump oci:layout:v1 --image oci:layout@{} --rootfs-diff diff.tar \
             --volume /dev/shm=shm.tar --page-hashes --sign-key ours.key",
            image.digest
        );
        let packed = kyb(scratch.path(), line.split_whitespace()).await;
        assert_eq!(packed.code, 0, "{packed:?}");
        let index = store.resolve(&location).await.unwrap();
        let index = serde_json::from_slice(&index.content).unwrap();
        Self { scratch, store, key, index }
    }

    async fn verify(&self, reference: &str) -> Ran {
        let line = format!("verify {reference} --key ours.pub --deep --json");
        kyb(self.scratch.path(), line.split(' ')).await
    }

    async fn manifest(&self, role: Role) -> Manifest {
        let stored = self.store.manifest(&self.index.manifests[role.place()].digest).await.unwrap();
        serde_json::from_slice(&stored.content).unwrap()
    }

    async fn content(&self, blob: &Descriptor) -> Vec<u8> {
        crate::artifact::read(self.store.blob(blob).await.unwrap()).await.unwrap()
    }

    /// Stores the checkpoint with another manifest, signed like the first: whoever made it wrong
    /// also signed it.
    async fn with(&self, role: Role, changed: &Manifest) -> String {
        let described = put_document(&self.store, media_type::OCI_MANIFEST, changed).await;
        let mut index = self.index.clone();
        let child = &mut index.manifests[role.place()];
        (child.digest, child.size) = (described.digest, described.size);
        let index = put_document(&self.store, media_type::OCI_INDEX, &index).await;
        sign(&self.store, &index, &self.key).await.unwrap();
        format!("oci:layout@{}", index.digest)
    }

    /// Replaces the layer of one type in the checkpoint manifest.
    async fn with_layer(&self, kind: &str, change: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut manifest = self.manifest(Role::Checkpoint).await;
        let place = manifest.layers.iter().position(|layer| layer.media_type == kind).unwrap();
        let layer = &mut manifest.layers[place];
        let mut content = self.content(layer).await;
        change(&mut content);
        let stored = put(&self.store, kind, content.into()).await;
        (layer.digest, layer.size) = (stored.digest, stored.size);
        self.with(Role::Checkpoint, &manifest).await
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Runnable,
    Checkpoint,
}

impl Role {
    fn place(self) -> usize {
        usize::from(self == Self::Checkpoint)
    }
}

/// Fails unless the checkpoint is refused, for this reason and with these words.
fn refused(ran: &Ran, reason: Option<&str>, why: &str) {
    ran.ended(2, "refused (integrity)");
    assert!(ran.told.contains(why), "{why:?} is missing: {ran:?}");
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(told["error"]["reason"], json!(reason), "{told}");
}

#[tokio::test]
async fn everything_is_counted() {
    let scene = Scene::new().await;
    let told = scene.verify("oci:layout:v1").await.json();
    let read = &told["read"];
    assert_eq!((&read["pages"], &read["pageHashes"]), (&json!(PAGES), &json!(PAGES)));
    assert_eq!((&read["chunks"], &read["files"]), (&json!(2), &json!(5)));
    assert_eq!((&read["layers"], &read["volumes"]), (&json!(3), &json!(1)));
    assert_eq!((&read["bulkFiles"], &read["manifests"]), (&json!(1), &json!(3)));
    assert_eq!(read["bytes"], told["bytesRead"]);
    // Without page hashes, image and volume there is less; what is no checkpoint has digests only.
    let plain = kyb(scene.scratch.path(), ["pack", "dump", "oci:layout:v2"]).await;
    assert_eq!(plain.code, 0, "{plain:?}");
    let line = "sign oci:layout:v2 --key ours.key";
    assert_eq!(kyb(scene.scratch.path(), line.split(' ')).await.code, 0);
    let told = scene.verify("oci:layout:v2").await.json();
    let read = &told["read"];
    assert_eq!((&read["pages"], &read["pageHashes"]), (&json!(PAGES), &json!(0)));
    assert_eq!((&read["layers"], &read["volumes"]), (&json!(0), &json!(0)));
    let image = image(&scene.store).await;
    sign(&scene.store, &image, &scene.key).await.unwrap();
    let told = scene.verify(&format!("oci:layout@{}", image.digest)).await.json();
    assert_eq!((&told["read"]["chunks"], &told["read"]["blobs"]), (&json!(0), &json!(3)));
}

/// Whatever the index leads to is read: one changed byte anywhere is found, and a missing blob too.
#[tokio::test]
async fn a_changed_byte_of_any_part_is_found() {
    let scene = Scene::new().await;
    let blobs = scene.scratch.path().join("layout/blobs/sha256");
    let mut parts = vec![];
    for role in [Role::Runnable, Role::Checkpoint] {
        let manifest = scene.manifest(role).await;
        parts.push(scene.index.manifests[role.place()].clone());
        parts.extend(manifest.layers);
        parts.push(manifest.config);
    }
    assert_eq!(parts.len(), 2 + 3 + 1 + 5 + 1);
    for part in parts {
        let path = blobs.join(part.digest.hex());
        let content = fs_err::read(&path).unwrap();
        let mut changed = content.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 1;
        fs_err::write(&path, &changed).unwrap();
        let found = scene.verify("oci:layout:v1").await;
        assert_eq!(found.code, 2, "{} of {}: {found:?}", part.media_type, part.digest);
        fs_err::write(&path, &content[..content.len() - 1]).unwrap();
        let found = scene.verify("oci:layout:v1").await;
        assert_ne!(found.code, 0, "{} of {}: {found:?}", part.media_type, part.digest);
        fs_err::remove_file(&path).unwrap();
        let found = scene.verify("oci:layout:v1").await;
        assert_eq!(found.code, 1, "{} of {}: {found:?}", part.media_type, part.digest);
        fs_err::write(&path, &content).unwrap();
    }
    assert_eq!(scene.verify("oci:layout:v1").await.code, 0);
}

#[tokio::test]
async fn pages_that_are_not_what_the_page_index_says_are_found() {
    let scene = Scene::new().await;
    let shard = scene.with_layer(media_type::PAGES, |content| content[5_000_000] ^= 1).await;
    refused(&scene.verify(&shard).await, Some("chunk-hash"), "chunk 1 of shard");
    let hashes = scene.with_layer(media_type::PAGE_HASHES, |content| content[16 * 1030] ^= 1).await;
    refused(&scene.verify(&hashes).await, None, "page 1030 of shard");
    let index = scene
        .with_layer(media_type::PAGE_INDEX, |content| {
            content.pop();
        })
        .await;
    refused(&scene.verify(&index).await, Some("truncated"), "");
    let longer = scene.with_layer(media_type::PAGE_INDEX, |content| content.push(0)).await;
    refused(&scene.verify(&longer).await, Some("trailing"), "");
}

#[tokio::test]
async fn a_pack_that_is_not_what_it_says_is_found() {
    let scene = Scene::new().await;
    let pack = scene.with_layer(media_type::IMAGES_PACK, |content| content[0] ^= 1).await;
    refused(&scene.verify(&pack).await, Some("header"), "no pack of images");
    let cut = scene.with_layer(media_type::IMAGES_PACK, |content| content.truncate(100)).await;
    refused(&scene.verify(&cut).await, Some("truncated"), "");
    let name = scene
        .with_layer(media_type::IMAGES_PACK, |content| {
            // The first file's name, after the header and its lengths.
            content[26] = b'!';
        })
        .await;
    refused(&scene.verify(&name).await, Some("file-name"), "");
}

#[tokio::test]
async fn facts_that_do_not_add_up_are_found() {
    let scene = Scene::new().await;
    let mut manifest = scene.manifest(Role::Checkpoint).await;
    let content = scene.content(&manifest.config).await;
    let mut facts: Value = serde_json::from_slice(&content).unwrap();
    let bytes = facts["sizes"]["dumpBytes"].as_u64().unwrap();
    facts["sizes"]["dumpBytes"] = json!(bytes + 1);
    let kind = media_type::CHECKPOINT_CONFIG;
    manifest.config = put(&scene.store, kind, facts.to_string().into()).await;
    let changed = scene.with(Role::Checkpoint, &manifest).await;
    refused(&scene.verify(&changed).await, Some("sizes"), "do not add up");
}

#[tokio::test]
async fn an_image_that_would_not_unpack_to_its_config_is_found() {
    let scene = Scene::new().await;
    let good = scene.manifest(Role::Runnable).await;
    let config: Value = serde_json::from_slice(&scene.content(&good.config).await).unwrap();
    let with_config = async |change: &dyn Fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config["rootfs"]["diff_ids"]);
        let kind = media_type::OCI_CONFIG;
        let config = put(&scene.store, kind, config.to_string().into()).await;
        let changed = scene.with(Role::Runnable, &Manifest { config, ..good.clone() }).await;
        scene.verify(&changed).await
    };
    for layer in 0..3 {
        let found = with_config(&|ids| ids[layer] = json!(Digest::of(b"another"))).await;
        refused(&found, None, &format!("layer {} is sha256:", good.layers[layer].digest));
    }
    let fewer = with_config(&|ids| ids.as_array_mut().unwrap().truncate(2)).await;
    refused(&fewer, None, "2 diff ids for 3 layers");
    // Layers that are not what their type says.
    for layer in [0, 2] {
        let mut manifest = good.clone();
        let kind = manifest.layers[layer].media_type.clone();
        manifest.layers[layer] = put(&scene.store, &kind, noise(3000, 9)).await;
        let found = scene.with(Role::Runnable, &manifest).await;
        refused(&scene.verify(&found).await, None, "does not unpack");
    }
}

#[tokio::test]
async fn a_volume_that_is_no_tar_is_found() {
    let scene = Scene::new().await;
    for cut in [None, Some(5000)] {
        let volume = scene
            .with_layer(media_type::VOLUME, |content| match cut {
                None => content[0] ^= 1,
                Some(length) => content.truncate(length),
            })
            .await;
        refused(&scene.verify(&volume).await, None, "the volume of \"/dev/shm\" is no whole tar");
    }
}

/// A registry's copy is read as the layout is, an increment with what it has of its base.
#[tokio::test]
async fn an_increment_is_read_with_the_shards_of_its_base() {
    for registry in Registry::all() {
        let scratch = tempfile::tempdir().unwrap();
        dump(scratch.path(), PAGES);
        let run = async |line: String| kyb(scratch.path(), line.split(' ')).await;
        assert_eq!(run("keygen ours --type ed25519".to_owned()).await.code, 0);
        let at = format!("{}/a/b", registry.address());
        let more = "--page-hashes --sign-key ours.key";
        assert_eq!(run(format!("pack dump {at}:v1 {more}")).await.code, 0);
        let pages = scratch.path().join("dump/pages-1.img");
        let mut content = fs_err::read(&pages).unwrap();
        content[4096 * 1200] ^= 1;
        fs_err::write(&pages, content).unwrap();
        assert_eq!(run(format!("pack dump {at}:v2 --base {at}:v1 {more}")).await.code, 0);
        let told = run(format!("verify {at}:v2 --key ours.pub --deep --json")).await.json();
        assert_eq!(told["read"]["pages"], json!(PAGES));
        assert_eq!(told["read"]["pageHashes"], json!(PAGES));
        assert_eq!(told["read"]["chunks"], json!(3));
    }
}
