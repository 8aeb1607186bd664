//! Work on threads that may block, and that ends when nobody waits for it any more.
//!
//! A thread goes on when the future that waits for it is dropped, as by Ctrl-C or by an operation
//! that is cancelled: it would read, hash and compress for seconds, or fill a directory that is
//! being removed. So long work gets a [`Wanted`] and asks it between two pieces.

use std::io::{self, Read};

use futures::stream::{StreamExt as _, TryStreamExt as _};
use tokio::task::JoinHandle;
use tokio_util::io::{StreamReader, SyncIoBridge};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::leftovers::Scratch;
use crate::store::BlobStream;

tokio::task_local! {
    /// Where the work that begins now may write, and who counts it.
    static KEPT: (Scratch, TaskTracker);
}

/// Whether somebody waits for the work on a thread. Cheap to clone; clones know the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    token: CancellationToken,
}

/// Work under way on a thread. Dropped, it tells the work that nobody waits for it.
#[derive(Debug)]
pub(crate) struct Working<T> {
    thread: JoinHandle<io::Result<T>>,
    wanted: Wanted,
    guard: DropGuard,
}

/// A reader that ends with an error when nobody waits for what is read.
#[derive(Debug)]
pub(crate) struct WhileWanted<R> {
    inner: R,
    wanted: Wanted,
}

/// Runs `work`, and keeps a directory as long as any thread that it began works on: nobody fills what
/// is being removed. It ends when all of them have; dropped, it leaves the directory to the last.
pub(crate) async fn keeping<F: Future>(scratch: Scratch, work: F) -> F::Output {
    let threads = TaskTracker::new();
    let done = KEPT.scope((scratch, threads.clone()), work).await;
    // What failed has told the others to stop.
    threads.close();
    threads.wait().await;
    done
}

/// Begins `work` on a thread that may block. It does not begin at all when nobody waits for it once
/// a thread is free.
pub(crate) fn spawn<T: Send + 'static>(
    work: impl FnOnce(&Wanted) -> T + Send + 'static,
) -> Working<T> {
    let wanted = Wanted::default();
    let (asked, guard) = (wanted.clone(), wanted.token.clone().drop_guard());
    // The directory is let go before it is said.
    let kept = KEPT.try_with(|(scratch, threads)| (scratch.clone(), threads.token())).ok();
    let thread = tokio::task::spawn_blocking(move || {
        asked.check()?;
        let done = work(&asked);
        drop(kept);
        Ok(done)
    });
    Working { thread, wanted, guard }
}

/// Runs `work` on a thread that may block, from now on.
pub(crate) fn blocking<T: Send + 'static, W>(
    work: W,
) -> impl Future<Output = io::Result<T>> + use<T, W>
where
    W: FnOnce(&Wanted) -> io::Result<T> + Send + 'static,
{
    // Not an `async fn`: that would hold the work, which may be large.
    let working = spawn(work);
    async move { working.end().await? }
}

impl<T> Working<T> {
    /// Waits for the end. When the future is dropped, the work is told.
    pub(crate) async fn end(self) -> io::Result<T> {
        let Self { thread, guard, .. } = self;
        let ended = thread.await.map_err(io::Error::other);
        drop(guard);
        ended?
    }

    /// Tells the work that it can stop.
    pub(crate) fn stop(&self) {
        self.wanted.token.cancel();
    }
}

impl Wanted {
    /// Fails when nobody waits any more.
    pub(crate) fn check(&self) -> io::Result<()> {
        if self.token.is_cancelled() {
            return Err(io::Error::other("nobody waits for it any more"));
        }
        Ok(())
    }

    /// Reads from `inner` as long as somebody waits.
    pub(crate) fn reader<R>(&self, inner: R) -> WhileWanted<R> {
        WhileWanted { inner, wanted: self.clone() }
    }

    /// Reads a stream as long as somebody waits, also one that is not going on. To be called where
    /// blocking is allowed.
    pub(crate) fn stream(&self, stream: BlobStream) -> WhileWanted<impl Read + use<>> {
        let stream = stream.map_err(io::Error::other);
        let stream = stream.take_until(self.token.clone().cancelled_owned()).boxed();
        self.reader(SyncIoBridge::new(StreamReader::new(stream)))
    }
}

impl<R: Read> Read for WhileWanted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wanted.check()?;
        let read = self.inner.read(buffer)?;
        if read == 0 {
            // A stream that was given up is at no end.
            self.wanted.check()?;
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Longest a test waits for what must happen.
    const LIMIT: Duration = Duration::from_secs(30);

    /// Runs `test` on a runtime with one thread for work that blocks, and waits until all such work
    /// has ended.
    fn joined<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
        let (done, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().max_blocking_threads(1).build().unwrap();
            runtime.block_on(test());
            // Waits for work that has begun, however long that takes.
            drop(runtime);
            done.send(()).unwrap();
        });
        ended.recv_timeout(LIMIT).expect("a thread works on");
        thread.join().unwrap();
    }

    #[test]
    fn work_that_is_not_waited_for_stops() {
        joined(async || {
            let (begun, begins) = tokio::sync::oneshot::channel();
            let work = blocking(move |wanted| {
                begun.send(()).unwrap();
                let mut endless = wanted.reader(io::repeat(0));
                io::copy(&mut endless, &mut io::sink())
            });
            tokio::select! {
                ended = work => panic!("it ended: {ended:?}"),
                begins = begins => begins.unwrap(),
            }
        });
    }

    #[test]
    fn work_in_the_queue_never_begins() {
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        joined(async move || {
            let (release, released) = mpsc::channel::<()>();
            let first = spawn(move |_| released.recv().is_ok());
            let waiting: Vec<_> = (0..100)
                .map(|_| {
                    let count = Arc::clone(&counted);
                    spawn(move |_| count.fetch_add(1, Ordering::Relaxed))
                })
                .collect();
            drop(waiting);
            release.send(()).unwrap();
            assert!(first.end().await.unwrap());
        });
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_stream_that_stands_still_is_given_up() {
        joined(async || {
            let (begun, begins) = tokio::sync::oneshot::channel();
            let work = blocking(move |wanted| {
                begun.send(()).unwrap();
                let mut stalled = wanted.stream(futures::stream::pending().boxed());
                io::copy(&mut stalled, &mut io::sink())
            });
            tokio::select! {
                ended = work => panic!("it ended: {ended:?}"),
                begins = begins => begins.unwrap(),
            }
        });
    }

    #[test]
    fn a_directory_stays_as_long_as_somebody_fills_it() {
        let top = tempfile::tempdir().unwrap();
        let scratch = Scratch::begin(top.path(), ".x-").unwrap();
        let path = scratch.path().to_owned();
        let (at, there) = (path.clone(), path.clone());
        joined(async move || {
            let (begun, begins) = tokio::sync::oneshot::channel();
            let (release, released) = mpsc::channel::<()>();
            let work = keeping(scratch.clone(), async {
                blocking(move |_| {
                    begun.send(()).unwrap();
                    released.recv().unwrap();
                    fs_err::write(at.join("late"), "")
                })
                .await
            });
            tokio::select! {
                ended = work => panic!("it ended: {ended:?}"),
                begins = begins => begins.unwrap(),
            }
            drop(scratch);
            assert!(there.exists(), "it is gone while somebody works in it");
            release.send(()).unwrap();
        });
        assert!(!path.exists(), "it is left behind");
    }

    #[test]
    fn what_fails_ends_when_all_of_its_threads_have() {
        joined(async || {
            let top = tempfile::tempdir().unwrap();
            let scratch = Scratch::begin(top.path(), ".x-").unwrap();
            let failing = keeping(scratch.clone(), async {
                let (begun, begins) = tokio::sync::oneshot::channel();
                let endless = blocking(move |wanted| {
                    begun.send(()).unwrap();
                    io::copy(&mut wanted.reader(io::repeat(0)), &mut io::sink())
                });
                let fails = async {
                    begins.await.map_err(|_gone| "nobody began")?;
                    Err("it fails")
                };
                tokio::select! {
                    ended = endless => panic!("it ended: {ended:?}"),
                    failed = fails => failed,
                }
            });
            let failed: Result<(), &str> = failing.await;
            assert_eq!(failed, Err("it fails"));
            drop(scratch);
            assert_eq!(fs_err::read_dir(top.path()).unwrap().count(), 0);
        });
    }

    #[tokio::test]
    async fn what_is_waited_for_is_read_to_its_end() {
        let pieces = futures::stream::iter([Ok(bytes::Bytes::from_static(b"ab"))]);
        let read = blocking(move |wanted| {
            let mut text = String::new();
            wanted.stream(pieces.boxed()).read_to_string(&mut text)?;
            wanted.reader(&b"cd"[..]).read_to_string(&mut text)?;
            Ok(text)
        });
        assert_eq!(read.await.unwrap(), "abcd");
    }
}
