use std::io::Write;
use std::sync::{Arc, Mutex};

use super::*;

/// What is logged while `work` runs.
fn logged(work: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().map_err(|_poisoned| io::ErrorKind::Other)?.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, work);
    let bytes = log.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn content_that_was_taken_while_it_was_looked_at_is_not_called_corrupt() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let digest = Digest::of(b"content");
    store.put_content(&digest, b"content").unwrap();
    let blob = store.content(&digest).unwrap().unwrap();
    fs::remove_file(store.layout.blob(&digest)).unwrap();
    let told = logged(|| store.quarantine(&digest, &blob.file, "its checksums are missing"));
    assert_eq!((told.as_str(), store.metrics.corrupt.get()), ("", 0));

    // Pushed again since: it is another file.
    store.put_content(&digest, b"content").unwrap();
    let told = logged(|| store.quarantine(&digest, &blob.file, "it was another one"));
    assert_eq!((told.as_str(), store.metrics.corrupt.get()), ("", 0));
    let blob = store.content(&digest).unwrap().unwrap();
    let told = logged(|| store.quarantine(&digest, &blob.file, "it is this one"));
    assert!(told.contains("it is this one"), "{told}");
    assert_eq!(store.metrics.corrupt.get(), 1);
    assert!(store.content(&digest).unwrap().is_none());
}
