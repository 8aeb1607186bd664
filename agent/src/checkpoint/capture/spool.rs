//! The tar file that a capture writes: a container is frozen meanwhile, so nothing waits for anything.
//!
//! A tar is one thing after the other, but where each of them goes is known beforehand. Headers and
//! small files are written by who walks; what is large is copied by threads, each stretch to its place:
//!
//! ```text
//!  walk:     header │ small file │ header │ (room) │ header │ small file │ …
//!  threads:                                  ▲ stretches of the large file
//! ```
//!
//! What a [`Draft`](super::draft::Draft) has is not copied once more: the tar is in [`Pieces`] then.
//! What was never written is a hole and reads as zeros: holes of a file stay holes, and what somebody
//! else cut off while it was read is zeros. Nothing is synced: the tar is gone when the artifact is there.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

use fs_err as fs;
use kybernate_packager::pack::Pieces;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::CaptureError;

/// Up to this many bytes a file is copied by who walks: handing it over would take as long.
const SMALL_BYTES: u64 = 128 << 10;

/// How much is written at once, and read.
const BUFFER_BYTES: usize = 1 << 20;

/// What a thread copies before it takes the next stretch.
const STRETCH_BYTES: u64 = 32 << 20;

/// Stretches that wait for a thread: each may hold a file open.
const WAITING_MAX: usize = 64;

/// Threads beside the one that walks: more of them copy no faster from one disk into memory.
const THREADS_MAX: usize = 4;

/// Size of a tar's block: what does not fill one is padded.
const BLOCK_BYTES: u64 = 512;

/// Where the tar goes, and who copies.
pub(super) struct Spool<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    shared: &'env Shared<'env>,
    /// Headers and small files that are not written yet.
    pending: Vec<u8>,
    /// Where they go.
    at: u64,
    /// What was written up to here is in a piece.
    pieced: u64,
    pieces: Pieces,
    /// Made when the first large file comes.
    copiers: Option<Copiers<'scope>>,
}

/// What the threads share.
pub(super) struct Shared<'env> {
    out: File,
    path: Arc<Path>,
    stop: &'env AtomicBool,
    /// The first that went wrong. Whoever finds it ends.
    failed: Mutex<Option<CaptureError>>,
    has_failed: AtomicBool,
}

struct Copiers<'scope> {
    stretches: SyncSender<Stretch>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
}

/// A part of a large file.
struct Stretch {
    file: Arc<File>,
    from: u64,
    end: u64,
    /// Where in the tar the file's first byte goes.
    base: u64,
    /// What the file is called.
    place: Arc<Path>,
}

impl<'env> Shared<'env> {
    /// Makes a new file to write to.
    pub(super) fn create(path: &Path, stop: &'env AtomicBool) -> io::Result<Self> {
        let (out, _) = fs::File::create_new(path)?.into_parts();
        let (path, failed) = (path.into(), Mutex::new(None));
        Ok(Self { out, path, stop, failed, has_failed: AtomicBool::new(false) })
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.has_failed.load(Ordering::Relaxed)
    }

    fn fail(&self, error: CaptureError) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get_or_insert(error);
        drop(failed);
        self.give_up();
    }

    /// Ends the threads early.
    pub(super) fn give_up(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Returns what went wrong in a thread.
    pub(super) fn failure(self) -> Option<CaptureError> {
        self.failed.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies stretches until there are no more. Goes on taking them when nothing is to be copied any
    /// more, so that nobody waits for a place in the queue.
    fn work(&self, stretches: &Mutex<Receiver<Stretch>>) {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let next = stretches.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(stretch) = next else { return };
            if self.is_over() {
                continue;
            }
            if let Err(source) = self.copy(&stretch, &mut buffer) {
                self.fail(CaptureError { path: stretch.place.to_path_buf(), source });
            }
        }
    }

    /// Copies what of a stretch is no hole.
    fn copy(&self, stretch: &Stretch, buffer: &mut [u8]) -> io::Result<()> {
        let Stretch { file, from, end, base, .. } = stretch;
        let mut at = *from;
        while let Some(data) = data_after(file, at, *end)? {
            at = data;
            let hole = hole_after(file, at, *end);
            while at < hole {
                if self.is_over() {
                    return Err(stopped());
                }
                let length = usize::try_from(hole - at).unwrap_or(usize::MAX).min(buffer.len());
                let part = buffer.get_mut(..length).unwrap_or_default();
                let read = match file.read_at(part, at) {
                    // Somebody cut it meanwhile: the rest is zeros.
                    Ok(0) => return Ok(()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    read => read?,
                };
                self.out.write_all_at(part.get(..read).unwrap_or_default(), base + at)?;
                at += u64::try_from(read).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }
}

impl<'scope, 'env> Spool<'scope, 'env> {
    pub(super) fn new(scope: &'scope Scope<'scope, 'env>, shared: &'env Shared<'env>) -> Self {
        let pending = Vec::with_capacity(2 * BUFFER_BYTES);
        Self { scope, shared, pending, at: 0, pieced: 0, pieces: Pieces::default(), copiers: None }
    }

    /// Returns where the next byte goes.
    pub(super) fn position(&self) -> u64 {
        self.at.saturating_add(u64::try_from(self.pending.len()).unwrap_or(u64::MAX))
    }

    /// Adds the content of a file, and its padding, that lies in another file.
    pub(super) fn borrow(&mut self, path: &Arc<Path>, from: u64, length: u64) {
        self.end_piece();
        self.pieces.push(path, from, length.next_multiple_of(BLOCK_BYTES));
    }

    fn end_piece(&mut self) {
        let end = self.position();
        self.pieces.push(&self.shared.path, self.pieced, end.saturating_sub(self.pieced));
        self.pieced = end;
    }

    /// Fails when the capture is to end.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.shared.is_over() { Err(stopped()) } else { Ok(()) }
    }

    /// Adds the content of a file, exactly as much as its header says, and pads it.
    pub(super) fn content(&mut self, file: File, length: u64, place: &Path) -> io::Result<()> {
        let padded = length.next_multiple_of(BLOCK_BYTES);
        if length <= SMALL_BYTES {
            return self.small(&file, length, padded);
        }
        self.flush()?;
        let (file, place) = (Arc::new(file), Arc::from(place));
        let mut from = 0;
        while from < length {
            self.check()?;
            let end = length.min(from + STRETCH_BYTES);
            let (file, place, base) = (Arc::clone(&file), Arc::clone(&place), self.at);
            self.hand_over(Stretch { file, from, end, base, place })?;
            from = end;
        }
        self.at += padded;
        Ok(())
    }

    fn small(&mut self, file: &File, length: u64, padded: u64) -> io::Result<()> {
        let size = |bytes| usize::try_from(bytes).map_err(io::Error::other);
        let begin = self.pending.len();
        self.pending.resize(begin + size(padded)?, 0);
        let mut rest = self.pending.get_mut(begin..begin + size(length)?).unwrap_or_default();
        let mut at = 0;
        while !rest.is_empty() {
            match file.read_at(rest, at) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let read = read?;
                    at += u64::try_from(read).map_err(io::Error::other)?;
                    rest = rest.get_mut(read..).unwrap_or_default();
                }
            }
        }
        self.flush_large()
    }

    fn hand_over(&mut self, stretch: Stretch) -> io::Result<()> {
        let (scope, shared) = (self.scope, self.shared);
        let copiers = self.copiers.get_or_insert_with(|| Copiers::start(scope, shared));
        let given = copiers.stretches.send(stretch);
        given.map_err(|_nobody| io::Error::other("no thread copies any more"))
    }

    fn flush_large(&mut self) -> io::Result<()> {
        if self.pending.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    /// Waits until everything is there. Returns where it is.
    pub(super) fn finish(mut self) -> io::Result<Pieces> {
        self.flush()?;
        if let Some(Copiers { stretches, threads }) = self.copiers.take() {
            drop(stretches);
            for thread in threads {
                thread.join().map_err(|_panic| io::Error::other("a thread that copied ended"))?;
            }
        }
        self.check()?;
        // The last file's padding may be all that was not written.
        self.shared.out.set_len(self.at)?;
        self.end_piece();
        Ok(self.pieces)
    }
}

impl Write for Spool<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        self.flush_large()?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.shared.out.write_all_at(&self.pending, self.at)?;
        self.at += u64::try_from(self.pending.len()).map_err(io::Error::other)?;
        self.pending.clear();
        Ok(())
    }
}

impl<'scope> Copiers<'scope> {
    fn start<'env>(scope: &'scope Scope<'scope, 'env>, shared: &'env Shared<'env>) -> Self {
        let (stretches, waiting) = sync_channel(WAITING_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        let count = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let start = |_| {
            let waiting = Arc::clone(&waiting);
            scope.spawn(move || shared.work(&waiting))
        };
        Self { stretches, threads: (0..count).map(start).collect() }
    }
}

/// Returns where data begins at or after `at`; `None` when there is none before `end`.
fn data_after(file: &File, at: u64, end: u64) -> io::Result<Option<u64>> {
    if at >= end {
        return Ok(None);
    }
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => Ok((data < end).then_some(data)),
        Err(Errno::NXIO) => Ok(None),
        // A file system that knows no holes has none.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(at)),
        Err(error) => Err(error.into()),
    }
}

/// Returns where the data at `at` ends.
fn hole_after(file: &File, at: u64, end: u64) -> u64 {
    match rustix::fs::seek(file, SeekFrom::Hole(at)) {
        // Never where we are: it would be asked for ever.
        Ok(hole) if hole > at => hole.min(end),
        Ok(_) | Err(_) => end,
    }
}

/// Not of the kind `Interrupted`, after which everybody reads on.
fn stopped() -> io::Error {
    io::Error::other("it was stopped")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds one file to a spool, and returns what is there then.
    #[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
    fn check(file: File, length: u64, stop: bool) -> Result<Vec<u8>, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("spool");
        let stop = AtomicBool::new(stop);
        let shared = Shared::create(&path, &stop).unwrap();
        let done = std::thread::scope(|scope| {
            let mut spool = Spool::new(scope, &shared);
            spool.content(file, length, Path::new("d/file")).and_then(|()| spool.finish())
        });
        if let Some(failed) = shared.failure() {
            return Err(format!("{failed}: {}", failed.source));
        }
        let pieces = done.map_err(|error| error.to_string())?;
        let written = fs::read(&path).unwrap();
        let mut whole = Pieces::default();
        whole.push(&path.into(), 0, u64::try_from(written.len()).unwrap());
        assert_eq!(pieces, whole);
        Ok(written)
    }

    fn file(content: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    }

    #[test]
    fn what_was_cut_meanwhile_is_zeros() {
        for length in [1_000, SMALL_BYTES + 1, STRETCH_BYTES + 1] {
            let written = check(file(b"rest"), length, false).unwrap();
            assert_eq!(written.len() % 512, 0);
            assert!(written.len() >= usize::try_from(length).unwrap());
            assert!(written.starts_with(b"rest") && written[4..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn what_grew_meanwhile_is_cut() {
        let length = SMALL_BYTES + 512;
        let written = check(file(&vec![7; 1 << 20]), length, false).unwrap();
        assert_eq!(written, vec![7; usize::try_from(length).unwrap()]);
    }

    #[test]
    fn a_large_file_is_no_reason_to_go_on() {
        // The longest that a file system knows, which takes days: nearly all of it is a hole.
        for length in [1 << 20, i64::MAX.unsigned_abs()] {
            let error = check(file(&vec![7; 1 << 20]), length, true).unwrap_err();
            assert!(error.contains("stopped"), "{error}");
        }
    }

    #[test]
    fn what_goes_wrong_in_a_thread_is_told_with_the_file() {
        let directory = tempfile::tempdir().unwrap();
        // Whatever the file system says of holes in a directory, it cannot be read.
        let no_file = fs::File::open(directory.path()).unwrap().into_parts().0;
        let error = check(no_file, 500 * STRETCH_BYTES, false).unwrap_err();
        assert!(error.contains("d/file"), "{error}");
    }
}
