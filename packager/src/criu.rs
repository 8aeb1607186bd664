//! CRIU's images: their names, their framing, and the messages that tell where memory is.
//!
//! An image is a magic number or two, then records of a length and a protobuf message (CRIU,
//! `images/` and `criu/include/magic.h`). Only the fields we use are declared; prost skips the
//! rest.

use std::io::{self, Read, Write};

mod capability;
pub mod cgroups;
pub mod messages;
mod name;

pub use self::capability::{capability_names, is_capability};
pub use self::name::{NameClass, classify, device_file, device_of, process_id};

/// Largest message accepted: a process with a million mappings has an `mm` message of 60 MB.
const MESSAGE_BYTES_MAX: u32 = 128 << 20;

/// First word of an image since CRIU 2.0.
const COMMON_MAGIC: u32 = 0x5456_4319;

/// The type of an image, by its magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Magic(pub u32);

impl Magic {
    /// `inventory.img`: the one file every dump has.
    pub const INVENTORY: Self = Self(0x5831_3116);
    /// `pstree.img`: the processes.
    pub const PSTREE: Self = Self(0x5027_3030);
    /// `mm-PID.img`: the mappings of a process.
    pub const MM: Self = Self(0x5749_2820);
    /// `pagemap-*.img`: which pages are in which `pages-*.img`.
    pub const PAGEMAP: Self = Self(0x5608_4025);
    /// `files.img`: what is open.
    pub const FILES: Self = Self(0x5630_3138);
    /// `cgroup.img`: which cgroups it was in.
    pub const CGROUPS: Self = Self(0x5938_3330);
    /// `memfd.img`: files in memory.
    pub const MEMFD: Self = Self(0x4845_3499);
}

/// Reads the records of one image.
#[derive(Debug)]
pub struct ImageReader<R> {
    input: R,
    record_bytes_max: u32,
}

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Reading failed, or the image ends within a record.
    #[error("the image ends early or cannot be read")]
    Io(#[from] io::Error),
    /// The image is of another type.
    #[error("it does not begin as such an image does (magic {0:#010x})")]
    Magic(u32),
    /// A record is longer than any CRIU writes.
    #[error("a record of {0} bytes is longer than any CRIU writes")]
    TooLong(u32),
    /// A record is no such message.
    #[error("a record cannot be decoded")]
    Decode(#[from] prost::DecodeError),
}

impl<R: Read> ImageReader<R> {
    /// Checks that the image is of type `magic`.
    pub fn new(mut input: R, magic: Magic) -> Result<Self, ImageError> {
        let mut word = read_word(&mut input)?;
        if word == COMMON_MAGIC {
            word = read_word(&mut input)?;
        }
        if word == magic.0 {
            Ok(Self { input, record_bytes_max: MESSAGE_BYTES_MAX })
        } else {
            Err(ImageError::Magic(word))
        }
    }

    /// Accepts only smaller records than CRIU's largest.
    #[must_use]
    pub fn with_limit(self, record_bytes_max: u32) -> Self {
        Self { record_bytes_max: record_bytes_max.min(MESSAGE_BYTES_MAX), ..self }
    }

    /// Leaves out bytes that are no record: some images have raw data between their records.
    pub fn skip(&mut self, bytes: u64) -> Result<(), ImageError> {
        let skipped = io::copy(&mut (&mut self.input).take(bytes), &mut io::sink())?;
        if skipped == bytes {
            Ok(())
        } else {
            Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
        }
    }

    /// Returns the next record, or `None` at the end of the image.
    pub fn next_message<M: prost::Message + Default>(&mut self) -> Result<Option<M>, ImageError> {
        let mut length = [0; 4];
        let mut filled = 0;
        while let Some(rest) = length.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest)? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(ImageError::Io(io::ErrorKind::UnexpectedEof.into())),
                read => filled += read,
            }
        }
        let length = u32::from_le_bytes(length);
        if length > self.record_bytes_max {
            return Err(ImageError::TooLong(length));
        }
        let mut message = Vec::new();
        let read = (&mut self.input).take(u64::from(length)).read_to_end(&mut message)?;
        if u32::try_from(read) != Ok(length) {
            return Err(ImageError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(Some(M::decode(&*message)?))
    }
}

/// The inventory of a dump.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Inventory {
    /// 1 or 2; anything else is from a CRIU we do not know.
    #[prost(uint32, tag = "1")]
    pub img_version: u32,
    /// The namespaces of whoever dumped.
    #[prost(message, optional, tag = "3")]
    pub root_ids: Option<messages::Ids>,
    /// 0 none, 1 `SELinux`, 2 `AppArmor`.
    #[prost(int32, optional, tag = "6")]
    pub lsm: Option<i32>,
    /// Whether TCP connections were closed, which a restore has to be told.
    #[prost(bool, optional, tag = "10")]
    pub tcp_close: Option<bool>,
    /// How the network was locked, which a restore does again ([`NO_LOCK`]).
    #[prost(uint32, optional, tag = "11")]
    pub network_lock: Option<u32>,
    /// Plugins that took part; each must be there on restore.
    #[prost(message, optional, tag = "12")]
    pub plugins: Option<Plugins>,
}

/// The lock of a dump that locks nothing (`enum NETWORK_LOCK_METHOD` since 3.19).
pub const NO_LOCK: u32 = 2;

/// Names of CRIU plugins.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Plugins {
    /// The names.
    #[prost(string, repeated, tag = "12")]
    pub names: Vec<String>,
}

/// One process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Process {
    /// Its id in the innermost namespace.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// Its parent's.
    #[prost(uint32, tag = "2")]
    pub ppid: u32,
    /// Its threads', its own among them.
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// The memory of one process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Memory {
    /// Its mappings, by address.
    #[prost(message, repeated, tag = "14")]
    pub mappings: Vec<Mapping>,
}

/// One mapping.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Mapping {
    /// First address.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// First address after it.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// What shared memory or file it maps; 0 for private memory.
    #[prost(uint64, tag = "4")]
    pub shared: u64,
    /// What kind of mapping it is, as bits.
    #[prost(uint32, tag = "7")]
    pub status: u32,
}

/// An open file.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct OpenFile {
    /// What mappings and descriptors call it.
    #[prost(uint32, tag = "2")]
    pub id: u32,
    /// When it is a file in memory.
    #[prost(message, optional, tag = "20")]
    pub memfd: Option<Memfd>,
}

/// An open file in memory.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Memfd {
    /// What it is open of.
    #[prost(uint32, tag = "5")]
    pub inode: u32,
}

/// A file in memory, open or mapped any number of times.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct MemfdInode {
    /// The number of the shared memory that is its content.
    #[prost(uint32, tag = "5")]
    pub shared: u32,
    /// What open files call it.
    #[prost(uint64, tag = "7")]
    pub id: u64,
}

/// First record of a pagemap: which pages file it describes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct PagemapHead {
    /// The number in `pages-N.img`.
    #[prost(uint32, required, tag = "1")]
    pub pages_id: u32,
}

/// Further records of a pagemap: consecutive pages.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct PagemapEntry {
    /// Address of the first page.
    #[prost(uint64, required, tag = "1")]
    pub address: u64,
    /// Number of pages, as CRIU before 4.2 has it.
    #[prost(uint32, required, tag = "2")]
    pub compat_pages: u32,
    /// The pages are in the parent's images.
    #[prost(bool, optional, tag = "3")]
    pub in_parent: Option<bool>,
    /// 1 in the parent, 2 lazy, 4 present.
    #[prost(uint32, optional, tag = "4")]
    pub flags: Option<u32>,
    /// Number of pages.
    #[prost(uint64, optional, tag = "5")]
    pub pages: Option<u64>,
}

impl PagemapEntry {
    /// Returns the number of pages.
    pub fn page_count(&self) -> u64 {
        self.pages.unwrap_or_else(|| u64::from(self.compat_pages))
    }

    /// Whether the pages are in an earlier dump's images.
    pub fn is_in_parent(&self) -> bool {
        self.in_parent == Some(true) || self.flags.is_some_and(|flags| flags & 1 != 0)
    }

    /// Whether the pages are in the pages file. Before flags existed, all were.
    pub fn is_present(&self) -> bool {
        self.flags.map_or_else(|| !self.is_in_parent(), |flags| flags & 4 != 0)
    }

    /// Returns the entry for when the pages have come from the parent's images into the pages file.
    #[must_use]
    pub fn in_its_own(self) -> Self {
        Self { in_parent: None, flags: Some((self.flags.unwrap_or(0) & !1) | 4), ..self }
    }
}

/// Begins an image of type `magic`, of which there is one in a file.
pub fn write_magic(out: &mut impl Write, magic: Magic) -> io::Result<()> {
    out.write_all(&COMMON_MAGIC.to_le_bytes())?;
    out.write_all(&magic.0.to_le_bytes())
}

/// Adds an encoded message to an image.
pub fn write_record(out: &mut impl Write, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(message)
}

fn read_word(input: &mut impl Read) -> Result<u32, ImageError> {
    let mut word = [0; 4];
    input.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

#[cfg(test)]
mod tests;
