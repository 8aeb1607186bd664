//! A repository of a registry, whichever registry it is.

use bytes::Bytes;
use kybernate_packager::store::{ConnectOptions, Store, StoreErrorKind};
use kybernate_spec::{Annotations, Descriptor, Digest, Location, Manifest, media_type};

use crate::artifact::{checkpoint, noise, put, put_document, read};
use crate::proxy::Proxy;
use crate::registry::{Registry, nobodys_address, open};

#[tokio::test]
async fn what_was_pushed_is_pulled_whole_and_in_part() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let content = noise(3 << 20, 1);
        let described = Descriptor::of(media_type::PAGES, &content);
        assert!(!store.has_blob(&described).await.unwrap());
        let blob = put(&store, media_type::PAGES, content.clone()).await;
        assert!(store.has_blob(&blob).await.unwrap());
        assert_eq!(read(store.blob(&blob).await.unwrap()).await.unwrap(), content);
        let part = store.blob_range(&blob, 1 << 20, 12345).await.unwrap();
        assert_eq!(read(part).await.unwrap(), content[1 << 20..(1 << 20) + 12345]);
        let last = store.blob_range(&blob, blob.size - 1, 1).await.unwrap();
        assert_eq!(read(last).await.unwrap(), content[content.len() - 1..]);
    }
}

#[tokio::test]
async fn an_empty_blob_is_a_blob() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let blob = put(&store, media_type::VOLUME, Bytes::new()).await;
        assert!(store.has_blob(&blob).await.unwrap());
        assert!(read(store.blob(&blob).await.unwrap()).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_tag_names_what_it_was_pointed_at() {
    for registry in Registry::all() {
        let location = registry.at("a/b:v1");
        let store = open(&location).await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        let before = store.resolve(&location).await.unwrap_err();
        assert!(matches!(before.kind, StoreErrorKind::NotFound), "{before:?}");
        store.tag(&index, location.tag().unwrap()).await.unwrap();
        let resolved = store.resolve(&location).await.unwrap();
        assert_eq!(resolved.descriptor.digest, index.digest);
        assert_eq!(resolved.descriptor.artifact_type.as_deref(), Some(media_type::CHECKPOINT));
        let by_digest = store.resolve(&location.at(&index.digest)).await.unwrap();
        assert_eq!(by_digest.content, resolved.content);
    }
}

#[tokio::test]
async fn a_blob_is_mounted_from_a_repository_that_has_it() {
    for registry in Registry::all() {
        let blob = put(&registry.open("a/source").await, media_type::PAGES, noise(1000, 1)).await;
        let store = registry.open("a/target").await;
        assert!(store.mount_blob(&blob, &"a/source".parse().unwrap()).await.unwrap());
        assert!(store.has_blob(&blob).await.unwrap());
        let absent = Descriptor::of(media_type::PAGES, b"absent");
        assert!(!store.mount_blob(&absent, &"a/source".parse().unwrap()).await.unwrap());
    }
}

#[tokio::test]
async fn referrers_are_listed_also_without_a_list_of_the_registry() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        assert!(store.referrers(&index.digest, None).await.unwrap().is_empty());
        let mut pushed = Vec::new();
        for artifact_type in ["text/plain", "text/html"] {
            let referrer = Manifest {
                schema_version: 2,
                media_type: Some(media_type::OCI_MANIFEST.to_owned()),
                artifact_type: Some(artifact_type.to_owned()),
                config: put(&store, media_type::OCI_EMPTY, Bytes::from_static(b"{}")).await,
                layers: Vec::new(),
                subject: Some(index.bare()),
                annotations: Annotations::from([("a".to_owned(), "b".to_owned())]),
            };
            pushed.push(put_document(&store, media_type::OCI_MANIFEST, &referrer).await.digest);
        }
        let mut all: Vec<Digest> = Vec::new();
        for entry in store.referrers(&index.digest, None).await.unwrap() {
            assert_eq!(entry.annotations.get("a").map(String::as_str), Some("b"));
            all.push(entry.digest);
        }
        all.sort();
        pushed.sort();
        assert_eq!(all, pushed);
        let plain = store.referrers(&index.digest, Some("text/plain")).await.unwrap();
        assert_eq!(plain.len(), 1);
    }
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let absent = Descriptor::of(media_type::PAGES, b"absent");
        let error = store.blob(&absent).await.err().unwrap();
        assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error:?}");
        let error = store.manifest(&absent.digest).await.unwrap_err();
        assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error:?}");
        let told = kybernate_spec::chain(&error).to_string();
        assert!(told.contains(&absent.digest.to_string()), "{told}");
    }
}

#[tokio::test]
async fn content_that_does_not_match_is_not_taken() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let promised = Descriptor::of(media_type::PAGES, b"good");
        let source = crate::artifact::Memory(Bytes::from_static(b"evil"));
        let error = store.put_blob(&promised, &source).await.unwrap_err();
        assert!(matches!(error.kind, StoreErrorKind::Disputed(_)), "{error:?}");
        assert!(!store.has_blob(&promised).await.unwrap());
    }
}

#[tokio::test]
async fn a_cut_upload_is_repeated_and_a_cut_download_resumed() {
    for registry in Registry::all() {
        let content = noise(8 << 20, 1);
        let proxy = Proxy::start(registry.address(), &[5 << 20]).await;
        let store = open(&proxy.at("a/b")).await;
        let blob = put(&store, media_type::PAGES, content.clone()).await;
        assert_eq!(proxy.cuts_left(), 0, "nothing was cut");

        let proxy = Proxy::start(registry.address(), &[2 << 20, 3 << 20, 1 << 20]).await;
        let store = open(&proxy.at("a/b")).await;
        let pulled = read(store.blob(&blob).await.unwrap()).await.unwrap();
        assert!(pulled == content, "the content differs");
        assert_eq!(proxy.cuts_left(), 0, "nothing was cut");
        // Resumed, not begun again: what passed is little more than the blob.
        assert!(proxy.passed() < 10 << 20, "{} bytes passed", proxy.passed());
    }
}

#[tokio::test]
async fn a_registry_that_is_away_is_an_error_that_names_it() {
    let (_taken, address) = nobodys_address();
    let location: Location = format!("{address}/a/b:v1").parse().unwrap();
    let error = Store::open(&location, &ConnectOptions::default()).await.unwrap_err();
    let told = kybernate_spec::chain(&error).to_string();
    assert!(told.contains(&address.to_string()) && told.contains("refused"), "{told}");
}
