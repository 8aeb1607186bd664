//! Files of a layout. Everything here blocks.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

use bytes::Bytes;
use kybernate_spec::Digest;
use rustix::fs::{FlockOperation, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use tempfile::TempPath;

use crate::leftovers;

/// Name of the file that makes a directory a layout.
pub(super) const MARKER: &str = "oci-layout";

/// Content of that file.
const MARKER_CONTENT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// Bytes read at a time.
const PIECE: u64 = 256 << 10;

/// How the names of unfinished files begin. Whoever writes one holds a lock on it.
const UNFINISHED: &str = ".kyb-unfinished-";

/// A file being written, not yet part of the layout. It vanishes unless it is published.
#[derive(Debug)]
pub(super) struct Ingest {
    file: File,
    path: TempPath,
}

impl Ingest {
    /// Starts a file in the layout's directory.
    pub(super) fn begin(root: &Path) -> io::Result<Self> {
        // For its owner alone: what is in it is the memory of processes.
        let create = || tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(root);
        let file = leftovers::locked(create)?;
        let (file, path) = file.into_parts();
        Ok(Self { file, path })
    }

    /// Appends to the file.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Makes the file a blob.
    pub(super) fn publish_blob(self, root: &Path, digest: &Digest) -> io::Result<()> {
        let root = open_root(root)?;
        let blobs = make_directory(&root, "blobs")?;
        let directory = make_directory(&blobs, digest.algorithm().name())?;
        self.publish(&directory, digest.hex())
    }

    /// Syncs the file, gives it its name unless something has it, and syncs the name. What is locked
    /// by its name must stay the same file.
    pub(super) fn publish_new(self, directory: &OwnedFd, name: &str) -> io::Result<()> {
        self.file.sync_all()?;
        let (here, from) = (rustix::fs::CWD, &*self.path);
        match rustix::fs::renameat_with(here, from, directory, name, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(rustix::fs::fsync(directory)?),
            Err(Errno::EXIST) => Ok(()),
            // A file system that cannot tell, as NFS.
            Err(Errno::INVAL) => self.publish(directory, name),
            Err(error) => Err(error.into()),
        }
    }

    /// Syncs the file, gives it its name and syncs the name.
    fn publish(self, directory: &OwnedFd, name: &str) -> io::Result<()> {
        self.file.sync_all()?;
        rustix::fs::renameat(rustix::fs::CWD, &*self.path, directory, name)?;
        rustix::fs::fsync(directory)?;
        Ok(())
    }
}

/// Makes `root` a layout if it is none. A directory that has other things in it is refused.
pub(super) fn prepare(root: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
    leftovers::clear(root, UNFINISHED)?;
    if open_beneath(root, MARKER).is_ok() {
        return Ok(());
    }
    for entry in fs_err::read_dir(root)? {
        let name = entry?.file_name();
        let ours = name.to_string_lossy().starts_with(UNFINISHED) || name == MARKER;
        // Somebody else may have made it a layout since.
        if !ours && open_beneath(root, MARKER).is_err() {
            let text = format!("{} is neither empty nor an image layout", root.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
    }
    let mut ingest = Ingest::begin(root)?;
    ingest.write(MARKER_CONTENT)?;
    ingest.publish_new(&open_root(root)?, MARKER)
}

/// Replaces a file of the layout's own directory.
pub(super) fn write_file(root: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let mut ingest = Ingest::begin(root)?;
    ingest.write(content)?;
    ingest.publish(&open_root(root)?, name)
}

/// Stores a small blob.
pub(super) fn write_blob(root: &Path, digest: &Digest, content: &[u8]) -> io::Result<()> {
    let mut ingest = Ingest::begin(root)?;
    ingest.write(content)?;
    ingest.publish_blob(root, digest)
}

/// Opens a blob and returns its size.
pub(super) fn open_blob(root: &Path, digest: &Digest) -> io::Result<(File, u64)> {
    let file = open_beneath(root, &format!("blobs/{}/{}", digest.algorithm(), digest.hex()))?;
    let size = file.metadata()?.len();
    Ok((file, size))
}

/// Opens a regular file of the layout, following no link on the way.
pub(super) fn open_beneath(root: &Path, path: &str) -> io::Result<File> {
    let file = File::from(rustix::fs::openat2(
        open_root(root)?,
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?);
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let text = format!("{path:?} in the layout is not a regular file");
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

/// Holds the layout's lock until the file is dropped.
pub(super) fn lock(root: &Path) -> io::Result<File> {
    let file = open_beneath(root, MARKER)?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Reads a file of at most `limit` bytes.
pub(super) fn read_whole(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(limit).read_to_end(&mut content)?;
    Ok(content)
}

/// Hands `length` bytes from `offset` to `take`, piece by piece, until it returns false.
pub(super) fn read_range(
    file: &File,
    offset: u64,
    length: u64,
    mut take: impl FnMut(io::Result<Bytes>) -> bool,
) {
    let (mut next, end) = (offset, offset.saturating_add(length));
    while next < end {
        let size = usize::try_from(PIECE.min(end - next)).unwrap_or(usize::MAX);
        let mut piece = vec![0; size];
        let read = match file.read_at(&mut piece, next) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other,
        };
        let piece = read.map(|read| {
            piece.truncate(read);
            Bytes::from(piece)
        });
        next = match &piece {
            Ok(piece) => next.saturating_add(crate::checked::length(piece)),
            Err(_) => end,
        };
        if !take(piece) {
            return;
        }
    }
}

pub(super) fn open_root(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(root, flags, Mode::empty())?)
}

/// Opens a directory, and makes it first when it is missing.
fn make_directory(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
        Ok(()) => rustix::fs::fsync(parent)?,
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name, flags, Mode::empty())?)
}
