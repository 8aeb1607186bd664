use bytes::Bytes;
use kybernate_spec::{Descriptor, media_type};

use super::*;
use crate::store::NewManifest;

fn name() -> RepositoryName {
    "a".parse().unwrap()
}

/// Shows a blob as a push does just before it syncs.
fn show(store: &Store, content: &[u8]) -> Digest {
    let digest = Digest::of(content);
    store.put_content(&digest, content).unwrap();
    store.enter_link(&name(), &digest).unwrap();
    digest
}

/// Pushes a manifest that names the two blobs and returns how many directories were synced.
fn put(store: &Store, note: &str) -> u64 {
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": Descriptor::of(media_type::OCI_EMPTY, b"{}"),
        "layers": [Descriptor::of(media_type::OCI_LAYER_TAR, b"layer")],
        "annotations": { "note": note },
    });
    let content = Bytes::from(manifest.to_string());
    let (media_type, references) = References::parse(None, &content).unwrap();
    let digest = Digest::of(&content);
    let new = NewManifest { digest, media_type, content, references, tags: Vec::new() };
    let before = store.metrics().sync.count();
    assert!(store.put_manifest(&name(), &new).unwrap().is_empty());
    store.metrics().sync.count() - before
}

#[test]
fn a_manifest_waits_for_the_blobs_that_others_are_still_syncing() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    show(&store, b"{}");
    let layer = show(&store, b"layer");
    put(&store, "the first one makes directories");
    let alone = put(&store, "nobody pushes");
    let held = store.hold(&layer);
    assert_eq!(put(&store, "somebody pushes its layer"), alone + 2, "its shelf and its link");
    drop(held);
    assert_eq!(put(&store, "nobody any more"), alone);
}

#[test]
fn what_a_killed_process_may_not_have_synced_is_synced_once() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    show(&store, b"{}");
    show(&store, b"layer");
    put(&store, "the first one makes directories");
    let alone = put(&store, "as it always is");
    // A store that is dropped without an index that answers leaves no seal, as one killed does.
    drop(store);
    let store = Store::open(root.path()).unwrap();
    assert!(store.was_killed);
    put(&store, "directories are looked at again");
    assert_eq!(put(&store, "and only once"), alone);

    let another = tempfile::tempdir().unwrap();
    assert!(!Store::open(another.path()).unwrap().was_killed, "there was none before");
}
