//! The messages of CRIU's images that say what a container was doing (CRIU, `images/*.proto`).
//! Only the fields we show are declared; prost skips the rest.

use crate::criu::Magic;
pub(super) use crate::criu::messages::{
    CORE, Core, Credentials, IDS, Ids, ProcessCore, Signal, Signals,
};

pub(super) mod around;
pub(super) mod files;

pub(super) const FS: Magic = Magic(0x5140_3912);

/// One process of the tree.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TreeEntry {
    #[prost(uint32, tag = "1")]
    pub(super) pid: u32,
    #[prost(uint32, tag = "2")]
    pub(super) ppid: u32,
    #[prost(uint32, tag = "3")]
    pub(super) pgid: u32,
    #[prost(uint32, tag = "4")]
    pub(super) sid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub(super) threads: Vec<u32>,
}

/// The memory of one process.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Memory {
    /// An address in the first thread's stack.
    #[prost(uint64, tag = "5")]
    pub(super) stack: u64,
    /// Where the arguments begin.
    #[prost(uint64, tag = "8")]
    pub(super) arguments: u64,
    /// The first address after them.
    #[prost(uint64, tag = "9")]
    pub(super) arguments_end: u64,
    /// The executable, as an open file.
    #[prost(uint32, tag = "12")]
    pub(super) executable: u32,
    #[prost(message, repeated, tag = "14")]
    pub(super) mappings: Vec<MemoryArea>,
}

/// One mapping.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct MemoryArea {
    #[prost(uint64, tag = "1")]
    pub(super) start: u64,
    #[prost(uint64, tag = "2")]
    pub(super) end: u64,
    #[prost(uint64, tag = "3")]
    pub(super) offset: u64,
    /// What shared memory or file it maps.
    #[prost(uint64, tag = "4")]
    pub(super) shared: u64,
    #[prost(uint32, tag = "5")]
    pub(super) protection: u32,
    #[prost(uint32, tag = "6")]
    pub(super) flags: u32,
    /// What kind of mapping it is, as bits.
    #[prost(uint32, tag = "7")]
    pub(super) status: u32,
}

/// Where a process is in the file system.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct FileSystem {
    /// Its working directory, as an open file.
    #[prost(uint32, tag = "1")]
    pub(super) working_directory: u32,
    /// Its root, as an open file.
    #[prost(uint32, tag = "2")]
    pub(super) root: u32,
}
