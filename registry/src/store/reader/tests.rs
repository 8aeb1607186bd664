use std::path::Path;

use super::*;

/// Reading from it fails with EIO, as from a device that is away.
const UNREADABLE: &str = "/proc/self/mem";

fn store() -> (tempfile::TempDir, Arc<Store>) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    (root, Arc::new(store))
}

fn corrupt(root: &Path) -> usize {
    fs_err::read_dir(root.join("corrupt")).unwrap().count()
}

#[tokio::test]
async fn what_the_device_cannot_read_is_not_called_corrupt_and_stays() {
    let (root, store) = store();
    let digest = Digest::of(b"content");
    let file = fs_err::File::open(UNREADABLE).unwrap();
    let blob = OpenBlob { digest, file, length: 7, table: None };
    let error = BlobReader::new(Arc::clone(&store), blob, 0, 7).next().await.unwrap_err();
    let ReadError::Io(_, error) = error else { panic!("{error:?}") };
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_eq!(corrupt(root.path()), 0);
}

#[test]
fn scrubbing_leaves_what_the_device_cannot_read() {
    let (root, store) = store();
    let digest = Digest::of(b"content");
    let path = store.layout.blob(&digest);
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::os::unix::fs::symlink(UNREADABLE, &path).unwrap();
    store.prove(&digest, &mut |_| true).unwrap_err();
    assert!(path.is_symlink());
    assert_eq!(corrupt(root.path()), 0);
}
