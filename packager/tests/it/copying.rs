//! `copy` between registries and layouts.

use std::path::{Path, PathBuf};

use kybernate_packager::copy::{CopyError, copy};
use kybernate_packager::key::SigningKey;
use kybernate_packager::listing::{ListError, remove};
use kybernate_packager::progress::Progress;
use kybernate_packager::sign::sign;
use kybernate_packager::store::{Store, StoreErrorKind};
use kybernate_packager::verify::verify_signature;
use kybernate_spec::{Descriptor, Digest, Location, Manifest, media_type};

use crate::artifact::{checkpoint, noise, put, put_document, read};
use crate::cosign::Tools;
use crate::proxy::Proxy;
use crate::registry::{Registry, open};

/// A signed checkpoint of three blobs.
async fn signed(store: &Store, key: &SigningKey) -> Descriptor {
    let layers = [noise(3 << 20, 1), noise(2 << 20, 2), noise(1 << 20, 3)];
    let index = checkpoint(store, &layers).await;
    sign(store, &index, key).await.unwrap();
    index
}

/// Whether everything is at `location`, signature included.
async fn check(location: &Location, index: &Descriptor, key: &SigningKey) {
    let store = open(location).await;
    let stored = store.resolve(location).await.unwrap();
    assert_eq!(stored.descriptor.digest, index.digest);
    verify_signature(&store, &index.digest, &[key.public().clone()]).await.unwrap();
    let index: kybernate_spec::Index = serde_json::from_slice(&stored.content).unwrap();
    let child = store.manifest(&index.manifests[0].digest).await.unwrap();
    let child: Manifest = serde_json::from_slice(&child.content).unwrap();
    for layer in &child.layers {
        read(store.blob(layer).await.unwrap()).await.unwrap();
    }
}

/// Returns the layers of a checkpoint.
async fn layers(store: &Store, index: &Descriptor) -> Vec<Descriptor> {
    let index = store.manifest(&index.digest).await.unwrap();
    let index: kybernate_spec::Index = serde_json::from_slice(&index.content).unwrap();
    let child = store.manifest(&index.manifests[0].digest).await.unwrap();
    serde_json::from_slice::<Manifest>(&child.content).unwrap().layers
}

#[tokio::test]
async fn a_copy_is_whole_in_every_direction() {
    let key = SigningKey::generate().unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let layout: Location = format!("oci:{}:v1", scratch.path().display()).parse().unwrap();
    let registries = Registry::all();
    let first = registries[0].open("a/b").await;
    let index = signed(&first, &key).await;
    let mut stops: Vec<Location> = vec![layout];
    stops.extend(registries.iter().rev().map(|registry| registry.at("c/d:v1")));
    let mut source = first;
    for stop in &stops {
        let target = open(stop).await;
        let root = source.manifest(&index.digest).await.unwrap();
        let copied = copy(&source, root, &target, stop.tag(), &Progress::default()).await.unwrap();
        assert_eq!((copied.manifests, copied.referrers), (3, 1));
        check(stop, &index, &key).await;
        source = target;
    }
    // Once more: everything is there.
    let target = open(&stops[0]).await;
    let root = source.manifest(&index.digest).await.unwrap();
    let again = copy(&source, root, &target, stops[0].tag(), &Progress::default()).await.unwrap();
    assert_eq!((again.blobs_sent, again.bytes_sent), (0, 0));
}

#[tokio::test]
async fn a_registry_mounts_instead_of_being_sent_bytes() {
    for registry in Registry::all() {
        let key = SigningKey::generate().unwrap();
        let source = registry.open("a/b").await;
        let index = signed(&source, &key).await;
        let location = registry.at("c/d:v1");
        let target = open(&location).await;
        let root = source.manifest(&index.digest).await.unwrap();
        let copied =
            copy(&source, root, &target, location.tag(), &Progress::default()).await.unwrap();
        assert_eq!((copied.blobs_sent, copied.bytes_sent), (0, 0), "{copied:?}");
        check(&location, &index, &key).await;
    }
}

#[tokio::test]
async fn a_second_try_sends_only_what_is_missing() {
    let Some(source_registry) = Registry::docker() else { return };
    for registry in Registry::all() {
        let key = SigningKey::generate().unwrap();
        let source = source_registry.open("a/b").await;
        let index = signed(&source, &key).await;
        let location = registry.at("c/d:v1");
        let root = source.manifest(&index.digest).await.unwrap();
        // The first try is killed when most has been sent.
        let proxy = Proxy::stalling(registry.address(), 6 << 20).await;
        let target = open(&proxy.at("c/d:v1")).await;
        let progress = Progress::default();
        tokio::select! {
            done = copy(&source, root.clone(), &target, location.tag(), &progress) => {
                panic!("it got through: {done:?}")
            }
            () = proxy.stalled() => drop(proxy),
        }
        let target = open(&location).await;
        let missing = target.resolve(&location).await.unwrap_err();
        assert!(matches!(missing.kind, StoreErrorKind::NotFound), "{missing:?}");
        // How many were acknowledged by then is the registry's business.
        let mut there = 0;
        for layer in layers(&source, &index).await {
            there += usize::from(target.has_blob(&layer).await.unwrap());
        }
        let copied =
            copy(&source, root, &target, location.tag(), &Progress::default()).await.unwrap();
        assert!(copied.blobs_sent > 0 && copied.blobs_present >= there, "{there} {copied:?}");
        check(&location, &index, &key).await;
    }
}

#[tokio::test]
async fn checkpoints_of_an_image_are_not_part_of_the_image() {
    let Some(registry) = Registry::docker() else { return };
    let source = registry.open("a/b").await;
    let (image, _) = under_an_image(&source).await;
    let scratch = tempfile::tempdir().unwrap();
    let location: Location = format!("oci:{}:v1", scratch.path().display()).parse().unwrap();
    let target = open(&location).await;
    let root = source.manifest(&image.digest).await.unwrap();
    let copied = copy(&source, root, &target, location.tag(), &Progress::default()).await.unwrap();
    assert_eq!((copied.manifests, copied.referrers), (1, 0));
}

/// A checkpoint under its source image, signed.
async fn under_an_image(store: &Store) -> (Descriptor, Descriptor) {
    let image = put_image(store).await;
    let child = put_image(store).await;
    let index = kybernate_spec::Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        manifests: vec![child],
        subject: Some(image.bare()),
        annotations: kybernate_spec::Annotations::new(),
    };
    let index = put_document(store, media_type::OCI_INDEX, &index).await;
    sign(store, &index, &SigningKey::generate().unwrap()).await.unwrap();
    (image, index)
}

fn tagged(place: &Location, tag: &str, digest: &Digest) -> Location {
    let mut place = place.at(digest);
    let tag = Some(tag.parse().unwrap());
    match &mut place {
        Location::Registry(reference) => reference.tag = tag,
        Location::Layout(layout) => layout.tag = tag,
    }
    place
}

#[tokio::test]
async fn an_image_is_not_removed_with_its_checkpoints() {
    let scratch = tempfile::tempdir().unwrap();
    let layout = format!("oci:{}", scratch.path().join("layout").display());
    let registries = Registry::all();
    let places = registries.iter().map(|registry| registry.at("a/b"));
    for place in places.chain([layout.parse().unwrap()]) {
        let store = open(&place).await;
        let (image, index) = under_an_image(&store).await;
        let error = remove(&store, &place.at(&image.digest)).await.unwrap_err();
        assert!(error.to_string().contains("is no checkpoint"), "{error}");
        store.manifest(&index.digest).await.unwrap();
        let listed = store.referrers(&image.digest, None).await.unwrap();
        assert_eq!(listed.len(), 1);
        let error = remove(&store, &place).await.unwrap_err();
        assert!(matches!(error, ListError::Unnamed), "{error}");
        // Of a tag and a digest that do not belong together, one is a slip.
        store.tag(&index, &"v1".parse().unwrap()).await.unwrap();
        store.tag(&image, &"base".parse().unwrap()).await.unwrap();
        for (tag, named) in [("base", image.digest.to_string()), ("v2", "nothing".to_owned())] {
            let error = remove(&store, &tagged(&place, tag, &index.digest)).await.unwrap_err();
            assert!(error.to_string().contains(&format!("names {named}")), "{error}");
        }
        // The other way round it goes, and the image stays.
        let removed = remove(&store, &tagged(&place, "v1", &index.digest)).await.unwrap();
        assert_eq!(removed.referrers.len(), 1);
        store.manifest(&image.digest).await.unwrap();
    }
}

#[tokio::test]
async fn a_removal_that_was_cut_off_is_finished_by_the_next() {
    let Some(registry) = Registry::docker() else { return };
    let place = registry.at("a/b");
    let store = open(&place).await;
    let (_, index) = under_an_image(&store).await;
    let signatures = store.referrers(&index.digest, None).await.unwrap();
    let Store::Registry(remote) = &store else { panic!("{store:?}") };
    remote.delete_manifest(&index.digest).await.unwrap();
    let removed = remove(&store, &place.at(&index.digest)).await.unwrap();
    assert_eq!(removed.referrers, [signatures[0].digest.clone()]);
    let error = store.manifest(&signatures[0].digest).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error}");
    let error = remove(&store, &place.at(&index.digest)).await.unwrap_err();
    assert!(kybernate_spec::chain(&error).to_string().contains("not found"), "{error}");
}

#[tokio::test]
async fn what_oras_copied_is_still_signed() {
    let (Some(tools), Some(registry)) = (Tools::find(), Registry::docker()) else { return };
    let key = SigningKey::generate().unwrap();
    let source = registry.open("a/b").await;
    let index = signed(&source, &key).await;
    let from = format!("{}/a/b@{}", registry.address(), index.digest);
    let layout = tools.home().join("layout");
    let to = format!("{}:v1", layout.display());
    tools.succeed("oras", &["copy", "-r", "--from-plain-http", &from, "--to-oci-layout", &to]);
    let location: Location = format!("oci:{}:v1", layout.display()).parse().unwrap();
    check(&location, &index, &key).await;

    // And a layout of ours, copied on by oras.
    let ours = tools.home().join("ours");
    let location: Location = format!("oci:{}:v1", ours.display()).parse().unwrap();
    let target = open(&location).await;
    let root = source.manifest(&index.digest).await.unwrap();
    copy(&source, root, &target, location.tag(), &Progress::default()).await.unwrap();
    let from = format!("{}:v1", ours.display());
    let to = format!("{}/e/f:v1", registry.address());
    tools.succeed("oras", &["copy", "-r", "--from-oci-layout", &from, "--to-plain-http", &to]);
    check(&registry.at("e/f:v1"), &index, &key).await;
}

async fn put_image(store: &Store) -> Descriptor {
    let image = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: put(store, media_type::OCI_CONFIG, "{}".into()).await,
        layers: vec![put(store, media_type::OCI_LAYER_TAR, noise(1024, 9)).await],
        subject: None,
        annotations: kybernate_spec::Annotations::new(),
    };
    put_document(store, media_type::OCI_MANIFEST, &image).await
}

#[tokio::test]
async fn a_referrer_that_cannot_be_had_is_named_and_the_rest_is_copied() {
    let scratch = tempfile::tempdir().unwrap();
    let kept: Location =
        format!("oci:{}:v1", scratch.path().join("kept").display()).parse().unwrap();
    let damaged_layout = open(&kept).await;
    let registries = Registry::all();
    let mut sources = vec![(damaged_layout, scratch.path().join("kept/blobs/sha256"))];
    for registry in &registries {
        sources.push((registry.open("a/b").await, registry.data()));
    }
    for (number, (source, blobs)) in sources.into_iter().enumerate() {
        let key = SigningKey::generate().unwrap();
        let index = checkpoint(&source, &[noise(1000, 1)]).await;
        let lost = sign(&source, &index, &key).await.unwrap();
        let damaged = sign(&source, &index, &SigningKey::generate().unwrap()).await.unwrap();
        let kept = sign(&source, &index, &SigningKey::generate().unwrap()).await.unwrap();
        let (lost_file, damaged_file) = (find(&blobs, &lost), find(&blobs, &damaged));
        fs_err::remove_file(lost_file).unwrap();
        let content = fs_err::read_to_string(&damaged_file).unwrap();
        let changed = content.replace("dsse-envelope", "dsse-envelop3");
        assert_ne!(content, changed);
        fs_err::write(&damaged_file, changed).unwrap();

        let error = verify_signature(&source, &index.digest, &[key.public().clone()]).await;
        let told = error.unwrap_err().to_string();
        assert!(told.contains(lost.digest.hex()) && told.contains(damaged.digest.hex()), "{told}");

        let place = scratch.path().join(format!("copy-{number}"));
        let location: Location = format!("oci:{}:v1", place.display()).parse().unwrap();
        let target = open(&location).await;
        let root = source.manifest(&index.digest).await.unwrap();
        let copied = copy(&source, root, &target, location.tag(), &Progress::default()).await;
        let CopyError::Incomplete(missing) = copied.unwrap_err() else { panic!("no such error") };
        let mut missing: Vec<_> = missing.into_iter().map(|(digest, _)| digest).collect();
        missing.sort();
        let mut expected = vec![lost.digest, damaged.digest];
        expected.sort();
        assert_eq!(missing, expected);
        assert_eq!(target.resolve(&location).await.unwrap().descriptor.digest, index.digest);
        target.manifest(&kept.digest).await.unwrap();
    }
}

/// Finds the file in which a registry or a layout keeps a manifest.
fn find(directory: &Path, descriptor: &Descriptor) -> PathBuf {
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs_err::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            } else if fs_err::read(entry.path())
                .is_ok_and(|content| Digest::of(&content) == descriptor.digest)
            {
                return entry.path();
            }
        }
    }
    panic!("{} is nowhere", descriptor.digest)
}
