use std::io::ErrorKind;

use super::{blocks, glance, metadata, open, read, read_exact_at};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn what_was_just_written_is_seen_at_a_glance() {
    let dir = directory();
    let path = dir.path().join("file");
    fs_err::write(&path, b"content").unwrap();
    // The same answer where the kernel cannot glance.
    let seen = glance(|| read(&path));
    match seen {
        Ok(bytes) => assert_eq!(bytes, b"content"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
    assert_eq!(read(&path).unwrap(), b"content");
    assert!(glance(|| metadata(&path)).is_ok_and(|found| found.len() == 7));
    assert_eq!(metadata(&path).unwrap().len(), 7);
}

#[test]
fn a_missing_file_is_missing_or_unknown() {
    let path = directory().path().join("none");
    let error = glance(|| open(&path)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::WouldBlock), "{error}");
    assert_eq!(open(&path).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn more_than_there_is_is_not_told_by_a_glance() {
    let dir = directory();
    let path = dir.path().join("file");
    fs_err::write(&path, b"four").unwrap();
    let file = fs_err::File::open(&path).unwrap().into_file();
    let mut bytes = [0; 8];
    let error = glance(|| read_exact_at(&file, &mut bytes, 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    let error = read_exact_at(&file, &mut bytes, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_large_file_is_not_read_at_a_glance() {
    let dir = directory();
    let path = dir.path().join("file");
    fs_err::write(&path, vec![1; 100_000]).unwrap();
    assert_eq!(glance(|| read(&path)).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(read(&path).unwrap().len(), 100_000);
}

#[test]
fn a_glance_ends_with_its_work() {
    assert_eq!(glance(blocks).unwrap_err().kind(), ErrorKind::WouldBlock);
    blocks().unwrap();
    let panicked = std::panic::catch_unwind(|| glance(|| panic!("a bug")));
    assert!(panicked.is_err());
    blocks().unwrap();
}
