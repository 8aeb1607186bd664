//! What is not waited for stops.

use std::sync::mpsc;
use std::time::Duration;

use super::*;

/// Longest a test waits for what must happen. Reading what is read here takes far longer.
const LIMIT: Duration = Duration::from_mins(1);

/// A dump that takes minutes to read: 70 MiB of content, then 2 TiB of holes.
fn endless(directory: &Path) -> PathBuf {
    let dump = dump(directory, &[(0x10_0000, noise(70 * MIB, 1))]);
    let holes = fs::File::create(dump.join("tmpfs-7.tar.gz.img")).unwrap();
    holes.set_len(2 << 40).unwrap();
    dump
}

/// Whether the thread that reads the pages has begun.
fn is_reading(scratch: &Path) -> bool {
    let entries = fs::read_dir(scratch).unwrap();
    entries.into_iter().any(|entry| entry.unwrap().path().join("page-index.records").exists())
}

/// Waits for a thread that ends once nothing works on.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    let in_time = ended.recv_timeout(LIMIT) != Err(mpsc::RecvTimeoutError::Timeout);
    assert!(in_time, "a thread works on");
    thread.join().unwrap();
}

#[test]
fn a_pack_that_is_dropped_stops_reading() {
    in_time(|| {
        let top = tempfile::tempdir().unwrap();
        let scratch = top.path().join("scratch");
        fs::create_dir(&scratch).unwrap();
        let request =
            PackRequest { scratch: Some(scratch.clone()), ..request(&endless(top.path())) };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (_, store) = open(&top.path().join("layout")).await;
            let progress = Progress::default();
            let begun = async {
                while !is_reading(&scratch) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                packed = pack(request, &store, &progress) => panic!("{packed:?}"),
                () = begun => {}
            }
        });
        // Waits for every thread that works.
        drop(runtime);
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
    });
}

#[test]
fn a_push_that_fails_stops_reading() {
    in_time(|| {
        let top = tempfile::tempdir().unwrap();
        let request = request(&endless(top.path()));
        let file = top.path().join("file");
        fs::write(&file, "").unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (_, store) = open(&file.join("layout")).await;
            let error = pack(request, &store, &Progress::default()).await.unwrap_err();
            assert!(matches!(error, PackError::Store(_)), "{error:?}");
        });
    });
}
