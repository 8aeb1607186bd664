//! Looking at files without waiting for the disk.
//!
//! A hop to the blocking pool costs more than a look at a few small files that the kernel has in
//! memory, which is where those lie that are asked for often. So whoever reads may first *glance*:
//! within [`glance`] every function of this module answers from the kernel's caches, or with
//! [`io::ErrorKind::WouldBlock`], upon which the same work is done again where blocking is allowed.
//! Nothing is kept here, so nothing can be out of date.
//!
//! Whether a thread glances is a property of the thread, as it is with the runtime's own rule about
//! blocking: a parameter would have to go through every function that reads.

use std::cell::Cell;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use fs_err as fs;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::checksum::DIGEST_CHECKED_MAX;

thread_local! {
    static GLANCES: Cell<bool> = const { Cell::new(false) };
}

/// Ends a glance, also when the work panics.
struct Glance;

impl Drop for Glance {
    fn drop(&mut self) {
        GLANCES.set(false);
    }
}

/// Runs `work`, which must not block and gets [`io::ErrorKind::WouldBlock`] where it would.
pub(crate) fn glance<T>(work: impl FnOnce() -> T) -> T {
    GLANCES.set(true);
    let _until_here = Glance;
    work()
}

/// Fails within a glance: what comes next blocks.
pub(super) fn blocks() -> io::Result<()> {
    if GLANCES.get() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
}

/// Opens a file to read.
pub(super) fn open(path: &Path) -> io::Result<fs::File> {
    if GLANCES.get() { open_cached(path, OFlags::RDONLY) } else { fs::File::open(path) }
}

/// Returns what is known of a file without its content.
pub(super) fn metadata(path: &Path) -> io::Result<std::fs::Metadata> {
    if GLANCES.get() { open_cached(path, OFlags::PATH)?.metadata() } else { fs::metadata(path) }
}

/// Reads a small file whole. Within a glance a larger one would block.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    if !GLANCES.get() {
        return fs::read(path);
    }
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > DIGEST_CHECKED_MAX {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    read_exact_at(file.file(), &mut bytes, 0)?;
    Ok(bytes)
}

/// Fills `bytes` from `offset` on.
pub(super) fn read_exact_at(file: &std::fs::File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    if !GLANCES.get() {
        return file.read_exact_at(bytes, offset);
    }
    let wanted = bytes.len();
    if wanted == 0 {
        return Ok(());
    }
    // A short read may be the end of the file or of what is in memory: the other way tells.
    match preadv2(file, &mut [IoSliceMut::new(bytes)], offset, ReadWriteFlags::NOWAIT) {
        Ok(read) if read == wanted => Ok(()),
        _ => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Opens what the kernel finds in its cache of names (openat2(2), `RESOLVE_CACHED`).
fn open_cached(path: &Path, flags: OFlags) -> io::Result<fs::File> {
    match openat2(CWD, path, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED) {
        Ok(file) => Ok(fs::File::from_parts(file.into(), path)),
        Err(error @ (Errno::NOENT | Errno::NOTDIR)) => Err(error.into()),
        // Not in the cache, or a kernel before 5.12, or a sandbox: the other way works or tells.
        Err(_) => Err(io::ErrorKind::WouldBlock.into()),
    }
}

#[cfg(test)]
mod tests;
