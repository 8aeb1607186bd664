//! The messages of CRIU's images that say who the processes are and what is around them (CRIU,
//! `images/*.proto`). Only the fields we judge are declared; prost skips the rest.

use kybernate_packager::criu::Magic;

pub(super) const CORE: Magic = Magic(0x5505_3847);
pub(super) const IDS: Magic = Magic(0x5443_2030);
pub(super) const SECCOMP: Magic = Magic(0x6441_3049);
pub(super) const MOUNTS: Magic = Magic(0x5556_3928);
pub(super) const FILES: Magic = Magic(0x5630_3138);

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
    #[prost(bool, optional, tag = "10")]
    pub(super) tcp_close: Option<bool>,
    #[prost(message, optional, tag = "12")]
    pub(super) plugins: Option<Plugins>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Plugins {
    #[prost(string, repeated, tag = "12")]
    pub(super) names: Vec<String>,
}

/// Which namespaces a process is in, by numbers that mean something within one dump only.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct Ids {
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
    /// Where older versions had it.
    #[prost(int32, optional, tag = "11")]
    pub(super) old_seccomp_mode: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ThreadCore {
    #[prost(message, optional, tag = "10")]
    pub(super) credentials: Option<Credentials>,
    /// 0 none, 1 strict, 2 filter.
    #[prost(int32, optional, tag = "11")]
    pub(super) seccomp_mode: Option<i32>,
    /// Which filter of `seccomp.img`.
    #[prost(uint32, optional, tag = "12")]
    pub(super) seccomp_filter: Option<u32>,
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
    #[prost(uint32, tag = "5")]
    pub(super) suid: u32,
    #[prost(uint32, tag = "6")]
    pub(super) sgid: u32,
    #[prost(uint32, tag = "7")]
    pub(super) fsuid: u32,
    #[prost(uint32, tag = "8")]
    pub(super) fsgid: u32,
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
    #[prost(string, optional, tag = "16")]
    pub(super) lsm_socket: Option<String>,
    #[prost(uint32, optional, tag = "18")]
    pub(super) no_new_privs: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub(super) ambient: Vec<u32>,
}

/// All seccomp filters.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Seccomp {
    #[prost(message, repeated, tag = "1")]
    pub(super) filters: Vec<SeccompFilter>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SeccompFilter {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) program: Vec<u8>,
    /// The filter installed before this one.
    #[prost(uint32, optional, tag = "2")]
    pub(super) previous: Option<u32>,
}

/// One mount.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Mount {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(uint32, tag = "2")]
    pub(super) id: u32,
    #[prost(uint32, tag = "4")]
    pub(super) parent: u32,
    #[prost(uint32, tag = "5")]
    pub(super) flags: u32,
    #[prost(string, tag = "6")]
    pub(super) root: String,
    #[prost(string, tag = "7")]
    pub(super) path: String,
    #[prost(bool, optional, tag = "12")]
    pub(super) with_plugin: Option<bool>,
    #[prost(bool, optional, tag = "13")]
    pub(super) external: Option<bool>,
    #[prost(uint32, optional, tag = "17")]
    pub(super) super_flags: Option<u32>,
    /// By which name the one who restores knows what to mount.
    #[prost(string, optional, tag = "18")]
    pub(super) external_key: Option<String>,
}

/// One open file.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct File {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "3")]
    pub(super) regular: Option<RegularFile>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RegularFile {
    #[prost(string, tag = "6")]
    pub(super) name: String,
    #[prost(bool, optional, tag = "9")]
    pub(super) external: Option<bool>,
}
