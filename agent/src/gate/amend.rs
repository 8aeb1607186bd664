//! Says in a dump what CRIU cannot be told otherwise.
//!
//! **Files without a name** are made at the top of their mount (see [`super::remaps`]). CRIU makes each beside the name of the first file that is open as it, links it to the names of all of
//! them from within the container, opens it there and removes it again. So a file that nobody has open
//! is put before the first: its name is one directly below the mount. What the images have is not
//! touched; a record is added at the end of `files.img`, and one before all others in `remap-fpath.img`.
//!
//! **The network** is not locked: CRIU locks that which it restores into as the dump was locked
//! (`network_lock_method` of `inventory.img`), whatever it is told.

use std::io::{self, Write as _};
use std::path::Path;

use fs_err as fs;
use kybernate_packager::criu::NO_LOCK;
use kybernate_spec::Digest;
use prost::Message as _;

use super::remaps::{CopyFact, GHOST, REGULAR};

/// What most images begin with, before the magic of their kind (`criu/include/magic.h`).
const COMMON: [u8; 4] = 0x5456_4319_u32.to_le_bytes();

/// A file, with all that CRIU wants of one.
#[derive(Clone, PartialEq, prost::Message)]
struct File {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, required, tag = "3")]
    regular: Regular,
}

/// `images/regfile.proto`.
#[derive(Clone, PartialEq, prost::Message)]
struct Regular {
    #[prost(uint32, required, tag = "1")]
    id: u32,
    #[prost(uint32, required, tag = "2")]
    flags: u32,
    #[prost(uint64, required, tag = "3")]
    position: u64,
    #[prost(message, required, tag = "5")]
    owner: Owner,
    #[prost(string, required, tag = "6")]
    name: String,
    #[prost(sint32, required, tag = "7")]
    mount: i32,
}

/// Who is told of signals: nobody (`images/fown.proto`).
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Owner {
    #[prost(uint32, required, tag = "1")]
    uid: u32,
    #[prost(uint32, required, tag = "2")]
    euid: u32,
    #[prost(uint32, required, tag = "3")]
    signal: u32,
    #[prost(uint32, required, tag = "4")]
    kind: u32,
    #[prost(uint32, required, tag = "5")]
    pid: u32,
}

/// `images/remap-file-path.proto`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Remap {
    #[prost(uint32, required, tag = "1")]
    file: u32,
    #[prost(uint32, required, tag = "2")]
    of: u32,
    #[prost(int32, required, tag = "3")]
    kind: i32,
}

/// A part of `images/inventory.proto`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Lock {
    #[prost(uint32, optional, tag = "11")]
    method: Option<u32>,
}

/// Has CRIU lock no network when it restores a dump, whose inventory has one record.
pub(super) fn unlock(images: &Path) -> io::Result<()> {
    let path = images.join("inventory.img");
    let before = fs::read(&path)?;
    // Behind the magic of its kind, before which there is no other, and the record's length.
    let record = before.get(8..).ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut after = before.get(..4).unwrap_or_default().to_vec();
    // Of a field that is there twice the last one counts.
    frame(&mut after, &[record, &Lock { method: Some(NO_LOCK) }.encode_to_vec()].concat())?;
    fs::write(path, after)
}

/// Adds to a dump what has CRIU make these copies at the top of their mounts.
pub(super) fn amend(images: &Path, copies: &[CopyFact]) -> io::Result<()> {
    let (mut files, mut remaps) = (Vec::new(), Vec::new());
    for copy in copies {
        add(&mut files, &file(copy))?;
        let remap = Remap { file: copy.spare, of: copy.number, kind: GHOST };
        add(&mut remaps, &remap)?;
    }
    let path = images.join("files.img");
    fs::OpenOptions::new().append(true).open(path)?.write_all(&files)?;
    let path = images.join("remap-fpath.img");
    let before = fs::read(&path)?;
    let header = if before.starts_with(&COMMON) { 8 } else { 4 };
    let (head, rest) = before.split_at_checked(header).ok_or(io::ErrorKind::UnexpectedEof)?;
    fs::write(path, [head, &remaps, rest].concat())
}

fn file(copy: &CopyFact) -> File {
    // Two restores into one volume are no nearer to each other than their files' names were. Two files
    // may have had the same one.
    let digest = Digest::of(format!("{} {}", copy.name, copy.number).as_bytes());
    let name = format!("{}/kybernate-{:.16}", copy.top, digest.hex());
    let regular = Regular {
        id: copy.spare,
        flags: 0,
        position: 0,
        owner: Owner::default(),
        name,
        mount: copy.mount,
    };
    File { kind: REGULAR, id: copy.spare, regular }
}

fn add(records: &mut Vec<u8>, message: &impl prost::Message) -> io::Result<()> {
    frame(records, &message.encode_to_vec())
}

/// Adds a record, framed as CRIU does.
fn frame(records: &mut Vec<u8>, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    records.extend(length.to_le_bytes());
    records.extend(bytes);
    Ok(())
}
