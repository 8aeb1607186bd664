//! The messages of CRIU's images that say what a container was doing (CRIU, `images/*.proto`).
//! Only the fields we show are declared; prost skips the rest.

use crate::criu::Magic;

pub(super) mod around;
pub(super) mod files;

pub(super) const CORE: Magic = Magic(0x5505_3847);
pub(super) const IDS: Magic = Magic(0x5443_2030);
pub(super) const FS: Magic = Magic(0x5140_3912);

/// The whole dump.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Inventory {
    #[prost(uint32, tag = "1")]
    pub(super) img_version: u32,
    /// The namespaces of whoever dumped.
    #[prost(message, optional, tag = "3")]
    pub(super) root_ids: Option<Ids>,
    /// 0 none, 1 `SELinux`, 2 `AppArmor`.
    #[prost(int32, optional, tag = "6")]
    pub(super) lsm: Option<i32>,
    #[prost(message, optional, tag = "12")]
    pub(super) plugins: Option<Plugins>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Plugins {
    #[prost(string, repeated, tag = "12")]
    pub(super) names: Vec<String>,
}

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

/// What a process shares with others, by numbers that mean something within one dump only.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Ids {
    #[prost(uint32, tag = "2")]
    pub(super) files: u32,
    #[prost(uint32, tag = "3")]
    pub(super) fs: u32,
    #[prost(uint32, optional, tag = "5")]
    pub(super) pid: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub(super) network: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub(super) ipc: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub(super) uts: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub(super) mount: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) user: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub(super) cgroup: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub(super) time: Option<u32>,
}

/// One thread; the first one of a process also stands for the process.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Core {
    #[prost(message, optional, tag = "3")]
    pub(super) process: Option<ProcessCore>,
    #[prost(message, optional, tag = "4")]
    pub(super) ids: Option<Ids>,
    #[prost(message, optional, tag = "5")]
    pub(super) thread: Option<ThreadCore>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ProcessCore {
    /// 1 alive, 2 dead, 3 stopped, 6 zombie.
    #[prost(uint32, tag = "1")]
    pub(super) state: u32,
    #[prost(uint32, tag = "2")]
    pub(super) exit_code: u32,
    #[prost(string, tag = "6")]
    pub(super) comm: String,
    /// Signals sent to the process.
    #[prost(message, optional, tag = "10")]
    pub(super) signals: Option<Signals>,
    /// Where older versions had it.
    #[prost(int32, optional, tag = "11")]
    pub(super) old_seccomp_mode: Option<i32>,
    #[prost(int32, optional, tag = "14")]
    pub(super) oom_score_adj: Option<i32>,
    /// Which cgroups, in older versions.
    #[prost(uint32, optional, tag = "9")]
    pub(super) cgroups: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ThreadCore {
    /// Signals sent to the thread.
    #[prost(message, optional, tag = "9")]
    pub(super) signals: Option<Signals>,
    #[prost(message, optional, tag = "10")]
    pub(super) credentials: Option<Credentials>,
    /// 0 none, 1 strict, 2 filter.
    #[prost(int32, optional, tag = "11")]
    pub(super) seccomp_mode: Option<i32>,
    #[prost(string, optional, tag = "13")]
    pub(super) comm: Option<String>,
    #[prost(uint32, optional, tag = "16")]
    pub(super) cgroups: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Signals {
    #[prost(message, repeated, tag = "1")]
    pub(super) queue: Vec<Signal>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Signal {
    /// `siginfo_t`, as the kernel has it.
    #[prost(bytes = "vec", tag = "1")]
    pub(super) info: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Credentials {
    #[prost(uint32, tag = "1")]
    pub(super) uid: u32,
    #[prost(uint32, tag = "2")]
    pub(super) gid: u32,
    #[prost(uint32, tag = "3")]
    pub(super) euid: u32,
    #[prost(uint32, tag = "4")]
    pub(super) egid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub(super) inheritable: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub(super) permitted: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub(super) effective: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub(super) bounding: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "14")]
    pub(super) groups: Vec<u32>,
    #[prost(string, optional, tag = "15")]
    pub(super) lsm_profile: Option<String>,
    #[prost(uint32, optional, tag = "18")]
    pub(super) no_new_privs: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub(super) ambient: Vec<u32>,
}

/// The memory of one process.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Memory {
    /// An address in the first thread's stack.
    #[prost(uint64, tag = "5")]
    pub(super) stack: u64,
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
