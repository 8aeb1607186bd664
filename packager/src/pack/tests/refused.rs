//! What no reader would take is not made.

use futures::future::BoxFuture;
use kybernate_spec::checkpoint::CONFIG_BYTES_MAX;

use super::*;
use crate::store::{BlobSource, BlobStream, StoredManifest};

/// Packs what `change` makes of a good request; returns why that was refused, and that nothing was
/// stored.
async fn refusal(change: impl FnOnce(&mut PackRequest)) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &[(0, noise(MIB, 1))]);
    let mut request = request(&dump);
    change(&mut request);
    let layout = scratch.path().join("layout");
    let (_, store) = open(&layout).await;
    let error = pack(request, &store, &Progress::default()).await.unwrap_err();
    assert!(!layout.exists(), "something was stored");
    kybernate_spec::chain(&error).to_string()
}

#[tokio::test]
async fn facts_that_no_reader_takes_are_refused() {
    let version = refusal(|request| request.config.version = "2.0".to_owned()).await;
    assert!(version.contains("format version \"2.0\""), "{version}");
    let time = refusal(|request| request.config.not_after = Some("tomorrow".to_owned())).await;
    assert!(time.contains("\"tomorrow\" among the facts is no time"), "{time}");
    let time = refusal(|request| request.config.created = Some("2026-11-21".to_owned())).await;
    assert!(time.contains("is no time"), "{time}");
    let long = usize::try_from(CONFIG_BYTES_MAX).unwrap();
    let large = refusal(|request| request.config.source.cluster = Some("x".repeat(long))).await;
    assert!(large.contains("its config is larger than 1 MiB"), "{large}");
}

#[tokio::test]
async fn volumes_that_no_reader_takes_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let tar = scratch.path().join("tar");
    fs::write(&tar, [0; 1024]).unwrap();
    let long = format!("/{}", "x".repeat(4096));
    for destinations in [vec!["data"], vec!["/a/../b"], vec![long.as_str()], vec!["/a", "/a"]] {
        let volume = |destination: &&str| VolumeCapture {
            destination: (*destination).to_owned(),
            tar: tar.clone(),
        };
        let told = refusal(|request| request.volumes = destinations.iter().map(volume).collect());
        assert!(told.await.contains("a volume's destination is"));
    }
}

#[tokio::test]
async fn more_small_files_than_a_pack_of_images_holds_are_refused() {
    let told = refusal(|request| {
        for number in 0..260 {
            let file = fs::File::create(request.dump.join(format!("fdinfo-{number}.img"))).unwrap();
            file.set_len(MIB).unwrap();
        }
    });
    assert!(told.await.contains("a pack of images has at most 256 MiB"));
}

/// Gives out the same bytes for every blob.
#[derive(Debug)]
struct Same(Bytes);

impl BlobSource for Same {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let content = self.0.clone();
        Box::pin(async move {
            let stream: BlobStream = Box::pin(futures::stream::iter([Ok(content)]));
            Ok(stream)
        })
    }
}

/// Has nothing.
#[derive(Debug)]
struct Gone;

impl BlobSource for Gone {
    fn open<'a>(&'a self, blob: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let subject = blob.digest.to_string();
        let kind = crate::store::StoreErrorKind::NotFound;
        Box::pin(async { Err(StoreError { operation: "read blob", subject, kind }) })
    }
}

#[tokio::test]
async fn layers_are_gone_only_when_their_source_lacks_them() {
    let config = Descriptor::of(media_type::OCI_CONFIG, b"{}");
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config,
        layers: Vec::new(),
        subject: None,
        annotations: Annotations::new(),
    };
    let content = Bytes::from(serde_json::to_vec(&manifest).unwrap());
    let descriptor = Descriptor::of(media_type::OCI_MANIFEST, &content);
    let image = |blobs: Arc<dyn BlobSource>| SourceImage {
        manifest: StoredManifest { descriptor: descriptor.clone(), content: content.clone() },
        blobs,
        mount_from: None,
    };
    assert!(runnable::is_incomplete(&image(Arc::new(Gone))).await);
    assert!(!runnable::is_incomplete(&image(Arc::new(Same(Bytes::from("{}"))))).await);
}

#[tokio::test]
async fn an_images_config_is_what_its_digest_says() {
    let scratch = tempfile::tempdir().unwrap();
    let (_, store) = open(&scratch.path().join("layout")).await;
    let config = r#"{"architecture":"amd64","os":"linux","rootfs":{"diff_ids":[]}}"#;
    let described = Descriptor::of(media_type::OCI_CONFIG, config.as_bytes());
    // It is there already, so nothing that is sent is compared with it.
    store.put_blob(&described, &BytesSource(Bytes::from(config))).await.unwrap();
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: described,
        layers: Vec::new(),
        subject: None,
        annotations: Annotations::new(),
    };
    let content = Bytes::from(serde_json::to_vec(&manifest).unwrap());
    let descriptor = Descriptor::of(media_type::OCI_MANIFEST, &content);
    let image = |given: &str| SourceImage {
        manifest: StoredManifest { descriptor: descriptor.clone(), content: content.clone() },
        blobs: Arc::new(Same(Bytes::from(given.to_owned()))),
        mount_from: None,
    };
    let dump = dump(scratch.path(), &[(0, noise(MIB, 1))]);
    let other = config.replace("amd64", "arm64");
    let with = PackRequest { image: Some(image(&other)), ..request(&dump) };
    let error = pack(with, &store, &Progress::default()).await.unwrap_err();
    assert!(kybernate_spec::chain(&error).to_string().contains("does not match its digest"));
    let with = PackRequest { image: Some(image(config)), ..request(&dump) };
    assert!(pack(with, &store, &Progress::default()).await.unwrap().runnable);
}

#[tokio::test]
async fn nothing_is_written_into_the_dump_or_read_from_there() {
    let scratch = tempfile::tempdir().unwrap();
    let top = scratch.path();
    let dump = dump(top, &[(0, noise(MIB, 1))]);
    let before = files(&dump);
    std::os::unix::fs::symlink(&dump, top.join("link")).unwrap();
    std::os::unix::fs::symlink(dump.join("not/yet"), top.join("ahead")).unwrap();
    fs::create_dir(top.join("beside")).unwrap();
    for place in ["dump/layout", "dump", "link/a/b", "beside/../dump/x", "ahead", "ahead/more"] {
        let (_, store) = open(&top.join(place)).await;
        let error = pack(request(&dump), &store, &Progress::default()).await.unwrap_err();
        let told = error.to_string();
        assert!(told.contains("lies inside the dump") && told.contains(place), "{place}: {told}");
        // The dump may be named by a link too.
        let by_link = pack(request(&top.join("link")), &store, &Progress::default()).await;
        assert!(matches!(by_link, Err(PackError::InDump { .. })), "{place}: {by_link:?}");
        assert!(files(&dump) == before, "{place}: the dump was changed");
    }
    let (location, store) = open(&top.join("layout")).await;
    let inside = PackRequest { scratch: Some(dump.clone()), ..request(&dump) };
    let told = pack(inside, &store, &Progress::default()).await.unwrap_err().to_string();
    assert!(told.contains("temporary files"), "{told}");
    assert!(!top.join("layout").exists(), "something was stored");
    pack_and_tag(request(&dump), &location, &store).await;

    // A base inside, as somebody may have put it there.
    fs::rename(top.join("layout"), dump.join("layout")).unwrap();
    let (location, base) = open(&top.join("link/layout")).await;
    let checkpoint = Checkpoint::open(&base, &location).await.unwrap();
    let base = Some(Base { store: base, checkpoint });
    let (_, store) = open(&top.join("next")).await;
    let error = pack(PackRequest { base, ..request(&dump) }, &store, &Progress::default()).await;
    assert!(error.unwrap_err().to_string().starts_with("the base"));
    assert!(!top.join("next").exists(), "something was stored");
}
