//! The pack of all small files of a dump: one blob instead of hundreds.
//!
//! ```text
//! magic "KYBFILES" | version u16 | zero u16 | files u32
//! per file, by name: name length u16 | size u64 | name | bytes
//! ```
//!
//! A table of regular files and nothing else: no modes, owners, links or directories that a reader
//! would have to mistrust.

use std::io::{self, Read, Write};

use kybernate_spec::Reason;

use crate::checked::length;
use crate::criu::{NameClass, classify};

/// Largest file of a pack: larger ones go to shards.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// Most files of a pack: a dozen per process, for thousands of processes.
pub const FILES_MAX: u32 = 1 << 20;
/// Bytes before all files.
const HEADER_BYTES: u64 = 16;
/// Bytes before a file's name.
const FILE_HEADER_BYTES: u64 = 10;
const MAGIC: [u8; 8] = *b"KYBFILES";
const VERSION: u16 = 1;

/// Why a pack was refused.
#[derive(Debug, thiserror::Error)]
pub enum ImagesPackError {
    /// The bytes end too early, or reading them failed.
    #[error("input failed or ended early")]
    Io(#[from] io::Error),
    /// It does not begin as a pack does.
    #[error("it is no pack of images")]
    Magic,
    /// It is of a later version.
    #[error("its version is {0}, this program reads {VERSION}")]
    Version(u16),
    /// A file is not one CRIU reads, comes twice or out of order, or is too large.
    #[error("file {name:?} {what}")]
    File {
        /// The file's name.
        name: String,
        /// What is wrong with it.
        what: &'static str,
        /// The rule it breaks.
        reason: Reason,
    },
    /// Bytes follow the last file, or there are too many files.
    #[error("{1}")]
    Illegal(Reason, &'static str),
}

impl ImagesPackError {
    /// Returns the rule that is broken; `None` when reading failed.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Some(Reason::Truncated)
            }
            Self::Io(_) => None,
            Self::Magic => Some(Reason::Header),
            Self::Version(_) => Some(Reason::Unsupported),
            Self::File { reason, .. } | Self::Illegal(reason, _) => Some(*reason),
        }
    }
}

/// Returns the bytes of a pack of these files: the name of each, and its bytes.
pub fn packed_bytes<'a>(files: impl Iterator<Item = (&'a str, u64)>) -> u64 {
    files.fold(HEADER_BYTES, |sum, (name, bytes)| {
        sum.saturating_add(FILE_HEADER_BYTES).saturating_add(length(name.as_bytes()) + bytes)
    })
}

/// Begins a pack of `files` files.
pub fn write_header(out: &mut impl Write, files: u32) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&[0, 0])?;
    out.write_all(&files.to_le_bytes())
}

/// Adds one file. Files come by name, in order.
pub fn write_file(out: &mut impl Write, name: &str, content: &[u8]) -> io::Result<()> {
    let length = u16::try_from(name.len()).map_err(io::Error::other)?;
    let size = u64::try_from(content.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&size.to_le_bytes())?;
    out.write_all(name.as_bytes())?;
    out.write_all(content)
}

/// Reads a pack, handing each file to `each`, and returns the bytes of all files.
///
/// Reads to the end of `input`, so that a stream which checks itself at its end has done so.
pub fn read(
    mut input: impl Read,
    mut each: impl FnMut(&str, &[u8]) -> io::Result<()>,
) -> Result<u64, ImagesPackError> {
    let mut header = [0; 16];
    input.read_exact(&mut header)?;
    let [magic @ .., v0, v1, z0, z1, n0, n1, n2, n3] = header;
    let version = u16::from_le_bytes([v0, v1]);
    if magic == MAGIC && version != VERSION {
        return Err(ImagesPackError::Version(version));
    }
    if magic != MAGIC || [z0, z1] != [0, 0] {
        return Err(ImagesPackError::Magic);
    }
    let files = u32::from_le_bytes([n0, n1, n2, n3]);
    if files > FILES_MAX {
        return Err(ImagesPackError::Illegal(
            Reason::Header,
            "it announces more files than any dump has",
        ));
    }
    let mut last = String::new();
    let mut content = Vec::new();
    let mut total = 0_u64;
    for _ in 0..files {
        let name = read_file(&mut input, &last, &mut content)?;
        each(&name, &content)?;
        total += u64::try_from(content.len()).unwrap_or(u64::MAX);
        last = name;
    }
    if input.read(&mut [0])? != 0 {
        return Err(ImagesPackError::Illegal(Reason::Trailing, "bytes follow the last file"));
    }
    Ok(total)
}

fn read_file(
    input: &mut impl Read,
    last: &str,
    content: &mut Vec<u8>,
) -> Result<String, ImagesPackError> {
    let mut lengths = [0; 10];
    input.read_exact(&mut lengths)?;
    let [l0, l1, size @ ..] = lengths;
    let size = u64::from_le_bytes(size);
    let mut name = vec![0; usize::from(u16::from_le_bytes([l0, l1]))];
    input.read_exact(&mut name)?;
    let name = String::from_utf8_lossy(&name).into_owned();
    let wrong = |reason, what| Err(ImagesPackError::File { name: name.clone(), what, reason });
    if classify(&name) != NameClass::Image {
        return wrong(Reason::FileName, "is none of CRIU's images");
    }
    if *name <= *last {
        return wrong(Reason::FileOrder, "comes twice or out of order");
    }
    if size > FILE_BYTES_MAX {
        return wrong(Reason::FileSize, "is larger than 1 MiB");
    }
    content.clear();
    let read = input.take(size).read_to_end(content)?;
    if u64::try_from(read) != Ok(size) {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
