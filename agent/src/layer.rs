//! A layer of a container image becomes the upper directory of an overlay while it comes.
//!
//! ```text
//!  runtime:   the layer's bytes, as they come
//!  decoder:   zstd                                           ─ parts of 256 KiB ─▶
//!  hasher:    SHA-256 of what comes out                      ─ the same parts ─▶
//!  writer:    tar; files, directories, whiteouts of overlayfs
//! ```
//!
//! This is privileged, and what comes is not proven before its end. So it knows only layers as
//! [`capture`](crate::checkpoint) writes them, depth first and each thing once: it makes every directory
//! itself, holds it by descriptor and follows no link. Anything else is [`LayerError::Unknown`], and
//! whoever asked leaves the layer to containerd, or refuses what it wanted to know of its links. The
//! directory counts for nothing until the returned digest was compared.

use std::ffi::OsString;
use std::io::{self, BufRead, Read};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use kybernate_spec::{Algorithm, Digest, Hasher};
use tar::{Entry, EntryType};
use tokio_util::sync::CancellationToken;

mod about;
mod tree;

pub(crate) use self::about::{
    ATTRIBUTE_RECORD, DEFAULT_ACL, RECORDS_BYTES_MAX, is_attribute, read_records,
};
use self::about::{About, Records};
use self::tree::Tree;

/// What the decoder hands over at once.
const PART_BYTES: usize = 256 << 10;

/// Parts that wait for the writer.
const PARTS_WAITING_MAX: usize = 4;

/// Largest window that is decoded (RFC 8878, 3.1.1.1.2), as a power of two: what every decoder must
/// support is 8 MiB.
const WINDOW_LOG_MAX: u32 = 23;

/// Bytes of a layer that come out of one byte of it, beyond [`PLAIN_BYTES_FREE`]: nobody has proven
/// yet what comes, and a disk is filled fast. Of logs some 25 do; of what is sparse, any number.
const PLAIN_PER_BYTE_MAX: u64 = 64;

/// Bytes of a layer that always come out of it.
const PLAIN_BYTES_FREE: u64 = 256 << 20;

/// A link in a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Below the root.
    pub(crate) place: PathBuf,
    pub(crate) target: PathBuf,
    /// Whether it is one more name of a file, which may be a symbolic link.
    pub(crate) is_hard: bool,
}

/// Why a layer is not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayerError {
    /// It may well be one, but has something that containerd has to unpack.
    #[error("it has {0}")]
    Unknown(&'static str),
    /// Far more comes out of it than any layer of its size has.
    #[error("much more comes out of the layer than out of any of its size")]
    Swells,
    /// The layer ends early, or what is in it is nothing that a layer has.
    #[error("failed to read the layer")]
    Read(#[source] io::Error),
    /// What it has cannot be made.
    #[error("failed to make {path:?}")]
    Make {
        /// Below the directory.
        path: PathBuf,
        /// What happened.
        #[source]
        source: io::Error,
    },
}

/// Unpacks a layer of so many bytes, compressed with zstd, into an empty upper directory and returns
/// the digest of what it is without compression. Ends early when nobody wants it any more, and says so
/// through `wanted` when it cannot go on: whoever fetches the layer ends then.
pub(crate) fn apply(
    layer: impl BufRead + Send,
    layer_bytes: u64,
    upper: &Path,
    wanted: &CancellationToken,
) -> Result<Digest, LayerError> {
    let limit = layer_bytes.saturating_mul(PLAIN_PER_BYTE_MAX).saturating_add(PLAIN_BYTES_FREE);
    let (to_hasher, decoded) = sync_channel(PARTS_WAITING_MAX);
    let (to_writer, hashed) = sync_channel(PARTS_WAITING_MAX);
    std::thread::scope(|scope| {
        let decoding = scope.spawn(move || decode(layer, limit, to_hasher, wanted));
        let hashing = scope.spawn(move || hash(decoded, to_writer));
        let mut parts = Parts { receiver: hashed, part: Vec::new(), at: 0, ended: false };
        let written = write(&mut parts, upper, wanted);
        // For who writes, a layer is torn where the decoder has come upon something.
        let is_cut_off = parts.ended && matches!(written, Ok(()) | Err(LayerError::Read(_)));
        if written.is_err() {
            wanted.cancel();
        }
        // Who sends to nobody ends.
        drop(parts);
        let digest = hashing.join();
        let decoded = decoding.join().unwrap_or_else(|_panic| Err(LayerError::Read(torn())));
        if is_cut_off {
            decoded?;
        }
        written?;
        digest.map_err(|_panic| LayerError::Read(torn()))
    })
}

fn write(parts: &mut Parts, upper: &Path, wanted: &CancellationToken) -> Result<(), LayerError> {
    let mut tree = Tree::open(upper, wanted)?;
    read_each(parts, |about, entry| {
        if wanted.is_cancelled() {
            return Err(LayerError::Read(unwanted()));
        }
        tree.add(about, entry)
    })?;
    tree.finish()
}

/// Reads the links of a layer, symbolic and hard, in the order of the tar: of one that has the form of our
/// own captures, which everybody reads in the same way.
pub(crate) fn read_links(tar: impl Read, mut each: impl FnMut(&Link)) -> Result<(), LayerError> {
    read_each(tar, |about, entry| {
        let kind = entry.header().entry_type();
        if kind.is_symlink() || kind.is_hard_link() {
            let target =
                PathBuf::from(OsString::from_vec(about.target.clone().unwrap_or_default()));
            each(&Link { place: about.path.clone(), target, is_hard: kind.is_hard_link() });
        }
        Ok(())
    })
}

/// Understands each entry of a tar, to its end.
fn read_each<R: Read>(
    mut tar: R,
    mut each: impl FnMut(&About, &mut Entry<'_, &mut R>) -> Result<(), LayerError>,
) -> Result<(), LayerError> {
    let mut archive = tar::Archive::new(&mut tar);
    let mut records = None;
    // Raw, since what comes before an entry may have any length.
    for entry in archive.entries().map_err(LayerError::Read)?.raw(true) {
        let mut entry = entry.map_err(LayerError::Read)?;
        if entry.header().entry_type() == EntryType::XHeader {
            records = Some(Records::read(&mut entry)?);
            continue;
        }
        each(&About::of(&entry, records.take())?, &mut entry)?;
    }
    if records.is_some() {
        return Err(LayerError::Unknown("records of nothing"));
    }
    let is_end = is_at_its_end(&mut tar).map_err(LayerError::Read)?;
    if is_end { Ok(()) } else { Err(LayerError::Unknown("something behind its end")) }
}

/// Reads what is behind the last entry of a tar, and returns whether it is nothing but zeros: all of it has
/// a part in the digest, and others may see more entries there.
pub(crate) fn is_at_its_end(tar: &mut impl Read) -> io::Result<bool> {
    let mut buffer = [0; 4096];
    loop {
        let read = tar.read(&mut buffer)?;
        if read == 0 {
            return Ok(true);
        }
        if buffer.iter().take(read).any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
}

/// Decodes a layer to its end.
fn decode(
    layer: impl BufRead,
    limit: u64,
    sender: SyncSender<Vec<u8>>,
    wanted: &CancellationToken,
) -> Result<(), LayerError> {
    let mut decoder = zstd::Decoder::with_buffer(layer).map_err(LayerError::Read)?;
    decoder.window_log_max(WINDOW_LOG_MAX).map_err(LayerError::Read)?;
    let mut left = limit;
    loop {
        if wanted.is_cancelled() {
            return Err(LayerError::Read(unwanted()));
        }
        let mut part = Vec::with_capacity(PART_BYTES);
        let room = u64::try_from(PART_BYTES).unwrap_or(u64::MAX);
        let read = decoder.by_ref().take(room).read_to_end(&mut part).map_err(LayerError::Read)?;
        if read == 0 {
            return Ok(());
        }
        let read = u64::try_from(read).unwrap_or(u64::MAX);
        left = left.checked_sub(read).ok_or(LayerError::Swells)?;
        // Whoever writes has had enough, and says why.
        if sender.send(part).is_err() {
            return Ok(());
        }
    }
}

/// Hands on what comes, and returns its digest.
fn hash(receiver: Receiver<Vec<u8>>, sender: SyncSender<Vec<u8>>) -> Digest {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    for part in receiver {
        hasher.update(&part);
        if sender.send(part).is_err() {
            break;
        }
    }
    hasher.finish()
}

/// What comes from the decoder, hashed.
struct Parts {
    receiver: Receiver<Vec<u8>>,
    part: Vec<u8>,
    /// What of it was read.
    at: usize,
    /// Whether nothing more comes.
    ended: bool,
}

impl Read for Parts {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.part.len() {
            let Ok(part) = self.receiver.recv() else {
                self.ended = true;
                return Ok(0);
            };
            (self.part, self.at) = (part, 0);
        }
        let mut rest = self.part.get(self.at..).unwrap_or_default();
        let read = rest.read(buffer)?;
        self.at += read;
        Ok(read)
    }
}

fn torn() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

fn unwanted() -> io::Error {
    io::Error::other("nobody waits for it any more")
}

#[cfg(test)]
mod tests;
