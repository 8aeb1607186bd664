//! Files under construction: a tar whose members' sizes are known only when they are written, and
//! an image layout, as a directory or as such a tar.
//!
//! What is made lies in a directory of its own beside the target and gets its name as a whole at the
//! end. What is there already is never replaced. Everything here blocks.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::{Descriptor, Digest, Index};
use rustix::fs::{CWD, RenameFlags};

use crate::checked::length;
use crate::leftovers::Scratch;
use crate::pack::upload::HashingWriter;
use crate::unpack::{BLOCK_BYTES, padded, tar_header};
use crate::wanted::Wanted;

/// How the names of what is not finished begin.
const PREFIX: &str = ".kybernate-export-";
/// Content of `oci-layout` (image specification, "Image Layout").
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
/// Bytes hashed at a time.
const PIECE: usize = 1 << 20;

/// A place to write at, in a file.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// The file.
    pub(crate) file: Arc<fs::File>,
    /// Where in it the first byte goes.
    pub(crate) base: u64,
}

/// A tar under construction.
#[derive(Debug)]
pub(crate) struct TarOutput {
    scratch: Scratch,
    target: PathBuf,
    file: Arc<fs::File>,
    /// Where the next header goes.
    position: u64,
}

/// An image layout under construction.
#[derive(Debug)]
pub(crate) struct LayoutOutput {
    kind: Kind,
    written: BTreeSet<Digest>,
}

#[derive(Debug)]
enum Kind {
    Tar(TarOutput),
    Directory { scratch: Scratch, target: PathBuf, slots: u32 },
}

/// A blob that is being written into a layout.
#[derive(Debug)]
pub(crate) struct Blob {
    slot: Slot,
    /// The file's own name, where a blob is a file.
    path: Option<PathBuf>,
}

impl Slot {
    /// Reads what was written.
    pub(crate) fn reader(&self, length: u64) -> impl Read + use<> {
        ReadAt { slot: self.clone(), position: 0 }.take(length)
    }

    /// Writes from the beginning on.
    pub(crate) fn writer(&self) -> WriteAt {
        WriteAt { slot: self.clone(), position: 0 }
    }
}

impl TarOutput {
    /// Begins a tar that will be `target`, which must not exist.
    pub(crate) fn begin(target: &Path) -> io::Result<Self> {
        let (scratch, target) = begin(target)?;
        let file = Arc::new(create(&scratch.path().join("tar"))?);
        Ok(Self { scratch, target, file, position: 0 })
    }

    /// Returns a directory for temporary files on the same file system.
    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns where members can be written, headers included; [`Self::end_at`] says how far.
    pub(crate) fn raw(&self) -> Slot {
        Slot { file: Arc::clone(&self.file), base: self.position }
    }

    /// Goes on after members that were written to [`Self::raw`].
    pub(crate) const fn end_at(&mut self, position: u64) {
        self.position = position;
    }

    /// Returns how long it is so far.
    pub(crate) const fn position(&self) -> u64 {
        self.position
    }

    /// Returns where the content of the next member goes.
    pub(crate) fn slot(&self) -> Slot {
        let base = self.position.saturating_add(BLOCK_BYTES);
        Slot { file: Arc::clone(&self.file), base }
    }

    /// Makes a member of the `length` bytes that were written to [`Self::slot`].
    pub(crate) fn seal(&mut self, name: &str, length: u64) -> io::Result<()> {
        let header = tar_header(name, length)?;
        self.file.file().write_all_at(header.as_bytes(), self.position)?;
        self.position += BLOCK_BYTES + padded(length);
        Ok(())
    }

    /// Adds a small member.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.slot().writer().write_all(content)?;
        self.seal(name, length(content))
    }

    /// Adds a directory.
    pub(crate) fn add_directory(&mut self, name: &str) -> io::Result<()> {
        let mut header = tar_header(name, 0)?;
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o700);
        header.set_cksum();
        self.file.file().write_all_at(header.as_bytes(), self.position)?;
        self.position += BLOCK_BYTES;
        Ok(())
    }

    /// Gives the tar its name.
    pub(crate) fn finish(self) -> io::Result<()> {
        // Two blocks of zeros end a tar; and what was left of a slot is cut off.
        self.file.set_len(self.position)?;
        self.file.set_len(self.position + 2 * BLOCK_BYTES)?;
        self.file.sync_all()?;
        publish(&self.scratch.path().join("tar"), &self.target)
    }
}

impl LayoutOutput {
    /// Begins a layout: a tar when the name of `target` ends with `.tar`, else a directory. It must
    /// not exist.
    pub(crate) fn begin(target: &Path) -> io::Result<Self> {
        let kind = if target.extension().is_some_and(|extension| extension == "tar") {
            Kind::Tar(TarOutput::begin(target)?)
        } else {
            let (scratch, target) = begin(target)?;
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(scratch.path().join("layout/blobs/sha256"))?;
            Kind::Directory { scratch, target, slots: 0 }
        };
        Ok(Self { kind, written: BTreeSet::new() })
    }

    /// Returns a directory for temporary files on the same file system.
    pub(crate) fn scratch(&self) -> &Path {
        match &self.kind {
            Kind::Tar(tar) => tar.scratch(),
            Kind::Directory { scratch, .. } => scratch.path(),
        }
    }

    /// Begins a blob. One is written at a time.
    pub(crate) fn blob(&mut self) -> io::Result<Blob> {
        match &mut self.kind {
            Kind::Tar(tar) => Ok(Blob { slot: tar.slot(), path: None }),
            Kind::Directory { scratch, slots, .. } => {
                *slots += 1;
                let path = scratch.path().join(format!("layout/blobs/{slots}"));
                let file = Arc::new(create(&path)?);
                Ok(Blob { slot: Slot { file, base: 0 }, path: Some(path) })
            }
        }
    }

    /// Whether a blob is there already.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.written.contains(digest)
    }

    /// Ends a blob of `length` bytes.
    pub(crate) fn seal(
        &mut self,
        blob: Blob,
        length: u64,
        media_type: &str,
        wanted: &Wanted,
    ) -> io::Result<Descriptor> {
        let reader = wanted.reader(blob.slot.reader(length));
        let mut reader = io::BufReader::with_capacity(PIECE, reader);
        let mut sink = HashingWriter::new(io::sink());
        io::copy(&mut reader, &mut sink)?;
        let descriptor = sink.describe(media_type);
        if descriptor.size != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let new = self.written.insert(descriptor.digest.clone());
        match (&mut self.kind, &blob.path) {
            // Its place is the next blob's.
            (Kind::Tar(tar), _) if !new => tar.file.set_len(tar.position)?,
            (Kind::Tar(tar), _) => tar.seal(&blob_name(&descriptor.digest), length)?,
            (Kind::Directory { .. }, Some(path)) if !new => fs::remove_file(path)?,
            (Kind::Directory { scratch, .. }, Some(path)) => {
                blob.slot.file.sync_all()?;
                let name = blob_name(&descriptor.digest);
                fs::rename(path, scratch.path().join("layout").join(name))?;
            }
            (Kind::Directory { .. }, None) => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(descriptor)
    }

    /// Adds a blob that is held in memory.
    pub(crate) fn add(&mut self, media_type: &str, content: &[u8]) -> io::Result<Descriptor> {
        let blob = self.blob()?;
        blob.slot().writer().write_all(content)?;
        self.seal(blob, length(content), media_type, &Wanted::default())
    }

    /// Gives the layout its name.
    pub(crate) fn finish(self, index: &Index) -> io::Result<()> {
        let index = serde_json::to_vec(index)?;
        match self.kind {
            Kind::Tar(mut tar) => {
                tar.add("oci-layout", LAYOUT)?;
                tar.add("index.json", &index)?;
                tar.finish()
            }
            Kind::Directory { scratch, target, .. } => {
                let layout = scratch.path().join("layout");
                for (name, content) in [("oci-layout", LAYOUT), ("index.json", &index)] {
                    let mut file = create(&layout.join(name))?;
                    file.write_all(content)?;
                    file.sync_all()?;
                }
                publish(&layout, &target)
            }
        }
    }
}

impl Blob {
    /// Returns where it is written.
    pub(crate) const fn slot(&self) -> &Slot {
        &self.slot
    }
}

/// Writes to a slot, one piece after the other.
#[derive(Debug)]
pub(crate) struct WriteAt {
    slot: Slot,
    position: u64,
}

impl WriteAt {
    /// Returns how much was written.
    pub(crate) const fn position(&self) -> u64 {
        self.position
    }
}

impl Write for WriteAt {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let place = self.slot.base.saturating_add(self.position);
        let written = self.slot.file.file().write_at(content, place)?;
        self.position += u64::try_from(written).map_err(io::Error::other)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct ReadAt {
    slot: Slot,
    position: u64,
}

impl Read for ReadAt {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let place = self.slot.base.saturating_add(self.position);
        let read = self.slot.file.file().read_at(buffer, place)?;
        self.position += u64::try_from(read).map_err(io::Error::other)?;
        Ok(read)
    }
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/{}/{}", digest.algorithm(), digest.hex())
}

/// Makes the directory in which something is built that will be `target`.
fn begin(target: &Path) -> io::Result<(Scratch, PathBuf)> {
    let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let target = parent.join(name);
    if fs::symlink_metadata(&target).is_ok() {
        return Err(exists(&target));
    }
    Ok((Scratch::begin(&parent, PREFIX)?, target))
}

/// Creates a file that only we can read: what is in it is somebody's memory.
fn create(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// Moves what was built to where nothing is.
fn publish(from: &Path, target: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, target, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => Err(exists(target)),
        other => Ok(other?),
    }
}

fn exists(target: &Path) -> io::Error {
    let text = format!("{} exists, and nothing is overwritten", target.display());
    io::Error::new(io::ErrorKind::AlreadyExists, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kybernate_spec::{Annotations, media_type};

    fn index(manifests: Vec<Descriptor>) -> Index {
        Index {
            schema_version: 2,
            media_type: Some(media_type::OCI_INDEX.to_owned()),
            artifact_type: None,
            manifests,
            subject: None,
            annotations: Annotations::new(),
        }
    }

    fn fill(mut out: LayoutOutput) {
        let first = out.add("text/plain", b"first").unwrap();
        assert_eq!(out.add("text/plain", b"first").unwrap(), first);
        assert!(out.has(&first.digest));
        let blob = out.blob().unwrap();
        blob.slot().writer().write_all(&[7; 1000]).unwrap();
        let second = out.seal(blob, 1000, "text/plain", &Wanted::default()).unwrap();
        out.finish(&index(vec![first, second])).unwrap();
    }

    #[test]
    fn a_layout_is_the_same_as_a_tar_and_as_a_directory() {
        let top = tempfile::tempdir().unwrap();
        let (tar, directory) = (top.path().join("a.tar"), top.path().join("a"));
        fill(LayoutOutput::begin(&tar).unwrap());
        fill(LayoutOutput::begin(&directory).unwrap());
        let mut members = Vec::new();
        let mut archive = tar::Archive::new(fs::File::open(&tar).unwrap());
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            assert_eq!(fs::read(directory.join(&name)).unwrap(), content, "{name}");
            members.push(name);
        }
        assert_eq!(members.len(), 4, "{members:?}");
        let left = fs::read_dir(top.path()).unwrap().count();
        assert_eq!(left, 2, "nothing else is left");
    }

    #[test]
    fn nothing_is_overwritten_and_nothing_half_is_left() {
        let top = tempfile::tempdir().unwrap();
        let target = top.path().join("a.tar");
        let mut out = LayoutOutput::begin(&target).unwrap();
        out.add("text/plain", b"x").unwrap();
        drop(out);
        assert_eq!(fs::read_dir(top.path()).unwrap().count(), 0);
        let late = LayoutOutput::begin(&target).unwrap();
        fs::write(&target, "mine").unwrap();
        let told = late.finish(&index(Vec::new())).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(LayoutOutput::begin(&target).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&target).unwrap(), b"mine");
    }
}
