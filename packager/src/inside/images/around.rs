//! What is around the processes.

use crate::criu::Magic;
pub(in super::super) use crate::criu::messages::{MOUNTS, MountEntry};

pub(in super::super) const CGROUP: Magic = Magic::CGROUPS;
pub(in super::super) const UTS: Magic = Magic(0x5447_3203);
pub(in super::super) const NETWORK: Magic = Magic(0x5593_3752);
pub(in super::super) const NETWORK_DEVICES: Magic = Magic(0x5737_3951);
pub(in super::super) const USER: Magic = Magic(0x5547_4906);
pub(in super::super) const PID: Magic = Magic(0x6115_7326);
pub(in super::super) const SHARED_MEMORY: Magic = Magic(0x4628_3044);
pub(in super::super) const MESSAGES: Magic = Magic(0x5545_3737);
pub(in super::super) const SEMAPHORES: Magic = Magic(0x5957_3019);

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Cgroups {
    #[prost(message, repeated, tag = "1")]
    pub(in super::super) sets: Vec<CgroupSet>,
}

/// Where processes are in all hierarchies.
#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct CgroupSet {
    #[prost(uint32, tag = "1")]
    pub(in super::super) id: u32,
    #[prost(message, repeated, tag = "2")]
    pub(in super::super) places: Vec<CgroupPlace>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct CgroupPlace {
    #[prost(string, tag = "1")]
    pub(in super::super) hierarchy: String,
    #[prost(string, tag = "2")]
    pub(in super::super) path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Uts {
    #[prost(string, tag = "1")]
    pub(in super::super) host_name: String,
    #[prost(string, tag = "2")]
    pub(in super::super) domain_name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct NetworkEntry {
    #[prost(string, optional, tag = "8")]
    pub(in super::super) external_key: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct NetworkDevice {
    /// 1 loopback, 2 veth, 3 tun, 4 external, 6 bridge, 7 macvlan, 8 sit.
    #[prost(int32, tag = "1")]
    pub(in super::super) kind: i32,
    #[prost(string, tag = "5")]
    pub(in super::super) name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct UserEntry {
    #[prost(message, repeated, tag = "1")]
    pub(in super::super) uids: Vec<IdRange>,
    #[prost(message, repeated, tag = "2")]
    pub(in super::super) gids: Vec<IdRange>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct IdRange {
    #[prost(uint32, tag = "1")]
    pub(in super::super) first: u32,
    #[prost(uint32, tag = "2")]
    pub(in super::super) outside: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) count: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct PidEntry {
    #[prost(string, optional, tag = "1")]
    pub(in super::super) external_key: Option<String>,
}

/// What every object of System V has.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct IpcHead {
    #[prost(uint32, tag = "1")]
    pub(in super::super) key: u32,
    #[prost(uint32, tag = "2")]
    pub(in super::super) uid: u32,
    #[prost(uint32, tag = "6")]
    pub(in super::super) mode: u32,
    #[prost(uint32, tag = "7")]
    pub(in super::super) id: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct SharedMemoryEntry {
    #[prost(message, optional, tag = "1")]
    pub(in super::super) head: Option<IpcHead>,
    #[prost(uint64, tag = "2")]
    pub(in super::super) size: u64,
    /// Whether its content is among the pages; otherwise it follows in this image.
    #[prost(bool, optional, tag = "3")]
    pub(in super::super) in_pages: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct MessagesEntry {
    #[prost(message, optional, tag = "1")]
    pub(in super::super) head: Option<IpcHead>,
    #[prost(uint32, tag = "3")]
    pub(in super::super) count: u32,
}

/// The head of one message; its text follows, padded to eight bytes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct MessageEntry {
    #[prost(uint32, tag = "2")]
    pub(in super::super) length: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct SemaphoresEntry {
    #[prost(message, optional, tag = "1")]
    pub(in super::super) head: Option<IpcHead>,
    /// How many; their values follow, 16 bits each, padded to eight bytes.
    #[prost(uint32, tag = "2")]
    pub(in super::super) count: u32,
}
