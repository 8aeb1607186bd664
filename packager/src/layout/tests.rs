use std::os::unix::fs::symlink;

use futures::future::BoxFuture;
use kybernate_spec::{Manifest, annotation, media_type};

use super::*;

#[derive(Debug)]
struct Fixed(Bytes);

impl BlobSource for Fixed {
    fn open<'a>(&'a self, _: &'a Descriptor) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let content = self.0.clone();
        Box::pin(async { Ok(futures::stream::iter([Ok(content)]).boxed()) })
    }
}

fn manifest(subject: Option<Descriptor>) -> (Descriptor, Bytes) {
    let document = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some("text/plain".to_owned()),
        config: Descriptor::of(media_type::OCI_EMPTY, b"{}"),
        layers: Vec::new(),
        subject,
        annotations: kybernate_spec::Annotations::new(),
    };
    let content = Bytes::from(serde_json::to_vec(&document).unwrap());
    (Descriptor::of(media_type::OCI_MANIFEST, &content), content)
}

async fn read(stream: BlobStream) -> Result<Vec<u8>, StoreError> {
    stream
        .try_fold(Vec::new(), async |mut all, piece| {
            all.extend_from_slice(&piece);
            Ok(all)
        })
        .await
}

#[tokio::test]
async fn what_was_written_is_read_whole_and_in_part() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(&directory.path().join("new"));
    let content = Bytes::from(vec![7; 600 << 10]);
    let descriptor = Descriptor::of("application/octet-stream", &content);
    assert!(!layout.has_blob(&descriptor).await.unwrap());
    layout.put_blob(&descriptor, &Fixed(content.clone())).await.unwrap();
    assert!(layout.has_blob(&descriptor).await.unwrap());
    assert_eq!(read(layout.blob(&descriptor).await.unwrap()).await.unwrap(), content);
    let part = layout.blob_range(&descriptor, 300 << 10, 5).await.unwrap();
    assert_eq!(read(part).await.unwrap(), [7; 5]);
}

#[tokio::test]
async fn content_that_is_not_what_it_should_be_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let descriptor = Descriptor::of("application/octet-stream", b"good");
    for wrong in [&b"evil"[..], b"goo", b"good and more"] {
        let source = Fixed(Bytes::from_static(wrong));
        let error = layout.put_blob(&descriptor, &source).await.unwrap_err();
        assert!(matches!(error.kind, StoreErrorKind::Mismatch(_)), "{error:?}");
    }
    assert!(!layout.has_blob(&descriptor).await.unwrap());
    let unfinished = fs_err::read_dir(directory.path()).unwrap().filter(|entry| {
        entry.as_ref().unwrap().file_name().to_string_lossy().contains("unfinished")
    });
    assert_eq!(unfinished.count(), 0);
}

#[tokio::test]
async fn a_changed_byte_on_disk_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let content = Bytes::from_static(b"some pages");
    let descriptor = Descriptor::of("application/octet-stream", &content);
    layout.put_blob(&descriptor, &Fixed(content)).await.unwrap();
    let path = directory.path().join("blobs/sha256").join(descriptor.digest.hex());
    fs_err::write(path, b"Some pages").unwrap();
    let error = read(layout.blob(&descriptor).await.unwrap()).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::Mismatch(_)), "{error:?}");
}

#[tokio::test]
async fn a_link_is_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let layout = Layout::at(&directory.path().join("layout"));
    let content = Bytes::from_static(b"secret");
    let descriptor = Descriptor::of("application/octet-stream", &content);
    layout.put_blob(&descriptor, &Fixed(content.clone())).await.unwrap();
    let blobs = directory.path().join("layout/blobs");
    fs_err::rename(&blobs, outside.path().join("blobs")).unwrap();
    symlink(outside.path().join("blobs"), &blobs).unwrap();
    assert!(layout.has_blob(&descriptor).await.is_err());
    assert!(layout.blob(&descriptor).await.is_err());
    assert!(layout.put_blob(&descriptor, &Fixed(content)).await.is_err());
}

#[tokio::test]
async fn a_directory_with_other_things_in_it_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    fs_err::write(directory.path().join("thesis.txt"), "x").unwrap();
    let (descriptor, content) = manifest(None);
    let layout = Layout::at(directory.path());
    layout.put_manifest(&descriptor, content).await.unwrap_err();
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn a_tag_moves_and_what_it_named_stays() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let tag: Tag = "v1".parse().unwrap();
    let (first, content) = manifest(None);
    layout.put_manifest(&first, content).await.unwrap();
    layout.tag(&first, &tag).await.unwrap();
    let (second, content) = manifest(Some(first.bare()));
    layout.put_manifest(&second, content).await.unwrap();
    layout.tag(&second, &tag).await.unwrap();
    let found = layout.resolve(Some(&tag)).await.unwrap();
    assert_eq!(found.descriptor.digest, second.digest);
    assert_eq!(layout.resolve(None).await.unwrap().descriptor.digest, second.digest);
    layout.manifest(&first.digest).await.unwrap();
    let index = fs_err::read_to_string(directory.path().join("index.json")).unwrap();
    assert_eq!(index.matches(annotation::REF_NAME).count(), 1, "{index}");
    assert_eq!(index.matches(second.digest.hex()).count(), 1, "{index}");
}

#[tokio::test]
async fn referrers_are_found_by_their_subject() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let (subject, content) = manifest(None);
    layout.put_manifest(&subject, content).await.unwrap();
    let (referrer, content) = manifest(Some(subject.bare()));
    layout.put_manifest(&referrer, content).await.unwrap();
    let found = layout.referrers(&subject.digest, Some("text/plain")).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].digest, referrer.digest);
    assert!(layout.referrers(&subject.digest, Some("text/html")).await.unwrap().is_empty());
}

#[tokio::test]
async fn many_writers_lose_no_entry() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let (subject, content) = manifest(None);
    layout.put_manifest(&subject, content).await.unwrap();
    let writers = (0..16).map(|number| {
        let layout = layout.clone();
        let mut subject = subject.bare();
        subject.annotations.insert("number".to_owned(), number.to_string());
        async move {
            let (referrer, content) = manifest(Some(subject));
            layout.put_manifest(&referrer, content).await
        }
    });
    futures::future::try_join_all(writers).await.unwrap();
    assert_eq!(layout.referrers(&subject.digest, None).await.unwrap().len(), 16);
}

#[tokio::test]
async fn many_may_begin_a_layout_at_once() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..32 {
        let layout = Layout::at(&directory.path().join(round.to_string()));
        let writers = (0_u8..8).map(|number| {
            let content = Bytes::from(vec![number; 10]);
            let descriptor = Descriptor::of("application/octet-stream", &content);
            let layout = layout.clone();
            async move { layout.put_blob(&descriptor, &Fixed(content)).await }
        });
        futures::future::try_join_all(writers).await.unwrap();
    }
}

#[test]
fn what_makes_a_layout_is_never_replaced() {
    use std::os::unix::fs::MetadataExt as _;
    let directory = tempfile::tempdir().unwrap();
    files::prepare(directory.path()).unwrap();
    let marker = directory.path().join(files::MARKER);
    let before = fs_err::metadata(&marker).unwrap().ino();
    let mut again = files::Ingest::begin(directory.path()).unwrap();
    again.write(b"{}").unwrap();
    let root = files::open_root(directory.path()).unwrap();
    again.publish_new(&root, files::MARKER).unwrap();
    assert_eq!(fs_err::metadata(&marker).unwrap().ino(), before);
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

/// More checkpoints than are looked into have children that need no look.
#[tokio::test]
async fn a_large_layout_has_its_referrers() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(directory.path());
    let (subject, content) = manifest(None);
    layout.put_manifest(&subject, content).await.unwrap();
    let child = |number: usize| {
        Descriptor::of(media_type::OCI_MANIFEST, number.to_string().as_bytes()).bare()
    };
    let index = kybernate_spec::Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: Some(media_type::CHECKPOINT.to_owned()),
        manifests: (0..11_000).map(child).collect(),
        subject: Some(subject.bare()),
        annotations: kybernate_spec::Annotations::new(),
    };
    let content = Bytes::from(serde_json::to_vec(&index).unwrap());
    let checkpoint = Descriptor::of(media_type::OCI_INDEX, &content);
    layout.put_manifest(&checkpoint, content).await.unwrap();
    let (referrer, content) = manifest(Some(checkpoint.bare()));
    layout.put_manifest(&referrer, content).await.unwrap();
    let found = layout.referrers(&checkpoint.digest, Some("text/plain")).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(layout.referrers(&subject.digest, None).await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_empty_place_has_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::at(&directory.path().join("absent"));
    let error = layout.resolve(None).await.unwrap_err();
    assert!(matches!(error.kind, StoreErrorKind::NotFound), "{error:?}");
    assert!(!layout.directory().exists());
}

#[tokio::test]
async fn a_layout_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("layout");
    let layout = Layout::at(&root);
    let content = Bytes::from_static(b"a password, as a process has it");
    let descriptor = Descriptor::of("a/b", &content);
    layout.put_blob(&descriptor, &Fixed(content)).await.unwrap();
    let (manifest, content) = manifest(None);
    layout.put_manifest(&manifest, content).await.unwrap();
    let mut left = vec![root];
    let mut files = 0;
    while let Some(path) = left.pop() {
        let metadata = fs_err::symlink_metadata(&path).unwrap();
        let mode = metadata.permissions().mode() & 0o777;
        if metadata.is_dir() {
            assert_eq!(mode, 0o700, "{}", path.display());
            left.extend(fs_err::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            assert_eq!(mode, 0o600, "{}", path.display());
            files += 1;
        }
    }
    assert!(files >= 3, "{files} files");
}
