use std::os::unix::fs::MetadataExt as _;
use std::time::SystemTime;

use tempfile::TempDir;

use super::Sink;
use crate::store::{CHUNK_BYTES, CHUNK_LENGTH, Store, UploadFile, UploadId};

fn upload(store: &Store) -> UploadFile {
    let id = UploadId::random(SystemTime::UNIX_EPOCH).unwrap();
    let upload = store.upload_file(&"a/b".parse().unwrap(), &id);
    drop(upload.create().unwrap());
    upload
}

fn store(base: &std::path::Path) -> (TempDir, Store) {
    let root = tempfile::tempdir_in(base).unwrap();
    let store = Store::open(&root.path().join("store")).unwrap();
    (root, store)
}

/// Writes two whole chunks and a part, and reads them back.
fn check(base: &std::path::Path) {
    let (_root, store) = store(base);
    let upload = upload(&store);
    let sink = Sink::open(&upload, 0, 3 * CHUNK_LENGTH).unwrap().unwrap();
    for (number, length) in [(0, CHUNK_BYTES), (1, CHUNK_BYTES), (2, 5000)] {
        let mut buffer = store.buffer(CHUNK_BYTES);
        buffer.fill_from(&vec![b'a' + number; length]);
        sink.write(&buffer, u64::from(number) * CHUNK_LENGTH).unwrap();
    }
    sink.file().sync_data().unwrap();
    let mut file = upload.open().unwrap().unwrap();
    let mut found = Vec::new();
    std::io::Read::read_to_end(&mut file, &mut found).unwrap();
    assert_eq!(found.len(), 2 * CHUNK_BYTES + 5000, "nothing reserved counts as received");
    for (number, byte) in [(0, b'a'), (CHUNK_BYTES - 1, b'a'), (CHUNK_BYTES, b'b')] {
        assert_eq!(found[number], byte);
    }
    assert_eq!(found.last(), Some(&b'c'));

    // What was reserved and not used goes back.
    let length = sink.file().metadata().unwrap().len();
    sink.file().set_len(length).unwrap();
    let blocks = sink.file().metadata().unwrap().blocks() * 512;
    assert!(blocks < length + CHUNK_LENGTH, "{blocks} for {length}");
}

#[test]
fn chunks_are_written_whole_on_a_disk() {
    check(&std::env::temp_dir());
}

#[test]
fn chunks_are_written_whole_in_memory() {
    let memory = std::path::Path::new("/dev/shm");
    check(if memory.is_dir() { memory } else { std::path::Path::new("/var/tmp") });
}

#[test]
fn a_buffer_between_multiples_of_a_chunk_is_written_too() {
    let (_root, store) = store(&std::env::temp_dir());
    let upload = upload(&store);
    let sink = Sink::open(&upload, 7, u64::MAX - 7).unwrap().unwrap();
    let mut buffer = store.buffer(CHUNK_BYTES);
    buffer.fill_from(&vec![1; CHUNK_BYTES]);
    sink.write(&buffer, 7).unwrap();
    assert_eq!(sink.file().metadata().unwrap().len(), CHUNK_LENGTH + 7);
}

#[test]
fn an_upload_that_is_gone_has_no_sink() {
    let (_root, store) = store(&std::env::temp_dir());
    let upload = upload(&store);
    assert!(upload.remove());
    assert!(Sink::open(&upload, 0, 1).unwrap().is_none());
}
