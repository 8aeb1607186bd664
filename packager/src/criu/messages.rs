//! The messages of CRIU's images that say who the processes are and what is around them. The
//! identity gate of the agent and `inside` read the same ones.

use super::Magic;

/// `core-TID.img`: a thread.
pub const CORE: Magic = Magic(0x5505_3847);
/// `ids-PID.img`: what a process shares with others.
pub const IDS: Magic = Magic(0x5443_2030);
/// `seccomp.img`: all filters.
pub const SECCOMP: Magic = Magic(0x6441_3049);
/// `mountpoints-NUMBER.img`: the mounts of a mount namespace.
pub const MOUNTS: Magic = Magic(0x5556_3928);

/// What a process shares with others, by numbers that mean something within one dump only.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Ids {
    /// Its table of descriptors.
    #[prost(uint32, tag = "2")]
    pub files: u32,
    /// Its root and working directory.
    #[prost(uint32, tag = "3")]
    pub fs: u32,
    /// PID namespace.
    #[prost(uint32, optional, tag = "5")]
    pub pid: Option<u32>,
    /// Network namespace.
    #[prost(uint32, optional, tag = "6")]
    pub network: Option<u32>,
    /// IPC namespace.
    #[prost(uint32, optional, tag = "7")]
    pub ipc: Option<u32>,
    /// UTS namespace.
    #[prost(uint32, optional, tag = "8")]
    pub uts: Option<u32>,
    /// Mount namespace.
    #[prost(uint32, optional, tag = "9")]
    pub mount: Option<u32>,
    /// User namespace.
    #[prost(uint32, optional, tag = "10")]
    pub user: Option<u32>,
    /// Cgroup namespace.
    #[prost(uint32, optional, tag = "11")]
    pub cgroup: Option<u32>,
    /// Time namespace.
    #[prost(uint32, optional, tag = "12")]
    pub time: Option<u32>,
}

/// One thread; the first one of a process also stands for the process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Core {
    /// What is the process's, when this is its first thread.
    #[prost(message, optional, tag = "3")]
    pub process: Option<ProcessCore>,
    /// What it shares, in older versions.
    #[prost(message, optional, tag = "4")]
    pub ids: Option<Ids>,
    /// What is the thread's own.
    #[prost(message, optional, tag = "5")]
    pub thread: Option<ThreadCore>,
}

/// What is the same for all threads.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessCore {
    /// 1 alive, 2 dead, 3 stopped, 6 zombie.
    #[prost(uint32, tag = "1")]
    pub state: u32,
    /// What a dead one ended with.
    #[prost(uint32, tag = "2")]
    pub exit_code: u32,
    /// Its name: any bytes.
    #[prost(bytes = "vec", tag = "6")]
    pub comm: Vec<u8>,
    /// How much it may have of what.
    #[prost(message, optional, tag = "8")]
    pub limits: Option<Limits>,
    /// Signals sent to the process.
    #[prost(message, optional, tag = "10")]
    pub signals: Option<Signals>,
    /// Where older versions had it.
    #[prost(int32, optional, tag = "11")]
    pub old_seccomp_mode: Option<i32>,
    /// And the filter.
    #[prost(uint32, optional, tag = "12")]
    pub old_seccomp_filter: Option<u32>,
    /// How readily the kernel ends it when memory runs out.
    #[prost(int32, optional, tag = "14")]
    pub oom_score_adj: Option<i32>,
    /// Which cgroups, in older versions.
    #[prost(uint32, optional, tag = "9")]
    pub cgroups: Option<u32>,
}

/// A process's limits (getrlimit(2)), by the kernel's numbers.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Limits {
    /// In the order of those numbers.
    #[prost(message, repeated, tag = "1")]
    pub all: Vec<Limit>,
}

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Limit {
    /// What counts now.
    #[prost(uint64, tag = "1")]
    pub current: u64,
    /// As much it can be without `CAP_SYS_RESOURCE`.
    #[prost(uint64, tag = "2")]
    pub most: u64,
}

/// What each thread has of its own.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ThreadCore {
    /// How much it gives way to others: less than 0 before them.
    #[prost(sint32, optional, tag = "3")]
    pub nice: Option<i32>,
    /// How it is scheduled (`sched(7)`).
    #[prost(uint32, optional, tag = "4")]
    pub policy: Option<u32>,
    /// Signals sent to the thread.
    #[prost(message, optional, tag = "9")]
    pub signals: Option<Signals>,
    /// Who it is.
    #[prost(message, optional, tag = "10")]
    pub credentials: Option<Credentials>,
    /// 0 none, 1 strict, 2 filter.
    #[prost(int32, optional, tag = "11")]
    pub seccomp_mode: Option<i32>,
    /// Which filter of `seccomp.img`.
    #[prost(uint32, optional, tag = "12")]
    pub seccomp_filter: Option<u32>,
    /// Its name: any bytes.
    #[prost(bytes = "vec", optional, tag = "13")]
    pub comm: Option<Vec<u8>>,
    /// Which cgroups it is in.
    #[prost(uint32, optional, tag = "16")]
    pub cgroups: Option<u32>,
}

/// Signals that wait.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Signals {
    /// In the order they came.
    #[prost(message, repeated, tag = "1")]
    pub queue: Vec<Signal>,
}

/// A signal that waits.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Signal {
    /// `siginfo_t`, as the kernel has it.
    #[prost(bytes = "vec", tag = "1")]
    pub info: Vec<u8>,
}

/// Who a thread is (`credentials(7)`, `capabilities(7)`).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Credentials {
    /// Real user.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    /// Real group.
    #[prost(uint32, tag = "2")]
    pub gid: u32,
    /// Effective user.
    #[prost(uint32, tag = "3")]
    pub euid: u32,
    /// Effective group.
    #[prost(uint32, tag = "4")]
    pub egid: u32,
    /// Saved user.
    #[prost(uint32, tag = "5")]
    pub suid: u32,
    /// Saved group.
    #[prost(uint32, tag = "6")]
    pub sgid: u32,
    /// User for files.
    #[prost(uint32, tag = "7")]
    pub fsuid: u32,
    /// Group for files.
    #[prost(uint32, tag = "8")]
    pub fsgid: u32,
    /// Capabilities that a program may get, in words of 32 bits.
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub inheritable: Vec<u32>,
    /// Capabilities it may use.
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub permitted: Vec<u32>,
    /// Capabilities it uses.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub effective: Vec<u32>,
    /// Capabilities it may ever get.
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub bounding: Vec<u32>,
    /// Further groups.
    #[prost(uint32, repeated, packed = "false", tag = "14")]
    pub groups: Vec<u32>,
    /// Profile of the security module.
    #[prost(string, optional, tag = "15")]
    pub lsm_profile: Option<String>,
    /// What the security module gives to its sockets.
    #[prost(string, optional, tag = "16")]
    pub lsm_socket: Option<String>,
    /// 1: it gains no privileges by running programs.
    #[prost(uint32, optional, tag = "18")]
    pub no_new_privs: Option<u32>,
    /// Capabilities that programs keep.
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub ambient: Vec<u32>,
}

/// All seccomp filters.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Seccomp {
    /// By their numbers.
    #[prost(message, repeated, tag = "1")]
    pub filters: Vec<SeccompFilter>,
}

/// One seccomp filter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SeccompFilter {
    /// Its program, for the kernel.
    #[prost(bytes = "vec", tag = "1")]
    pub program: Vec<u8>,
    /// The filter installed before this one.
    #[prost(uint32, optional, tag = "2")]
    pub previous: Option<u32>,
    /// How it is installed (`SECCOMP_FILTER_FLAG_…`).
    #[prost(uint32, optional, tag = "3")]
    pub flags: Option<u32>,
}

/// One mount.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MountEntry {
    /// Type of the file system, by CRIU's numbers.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// Number of the mount.
    #[prost(uint32, tag = "2")]
    pub id: u32,
    /// Which file system it is one of: all with the same number are of one.
    #[prost(uint32, tag = "3")]
    pub device: u32,
    /// Number of the one it stands on.
    #[prost(uint32, tag = "4")]
    pub parent: u32,
    /// Of this mount; 1 is read-only.
    #[prost(uint32, tag = "5")]
    pub flags: u32,
    /// Which directory of the file system.
    #[prost(string, tag = "6")]
    pub root: String,
    /// Where it is, with a dot before it.
    #[prost(string, tag = "7")]
    pub path: String,
    /// What is mounted.
    #[prost(string, tag = "8")]
    pub source: String,
    /// What the file system is told, as `size=64k`.
    #[prost(string, tag = "9")]
    pub options: String,
    /// Number of the group that it shares what is mounted below it with; 0 is none.
    #[prost(uint32, optional, tag = "10")]
    pub shared: Option<u32>,
    /// Number of the group from which it gets what is mounted there; 0 is none.
    #[prost(uint32, optional, tag = "11")]
    pub master: Option<u32>,
    /// Whether a plugin mounts it.
    #[prost(bool, optional, tag = "12")]
    pub with_plugin: Option<bool>,
    /// Whether the one who restores provides it.
    #[prost(bool, optional, tag = "13")]
    pub external: Option<bool>,
    /// The type's name, when it is none that CRIU has a number for.
    #[prost(string, optional, tag = "14")]
    pub kind_name: Option<String>,
    /// Whether what is mounted was deleted.
    #[prost(bool, optional, tag = "16")]
    pub deleted: Option<bool>,
    /// Of the file system.
    #[prost(uint32, optional, tag = "17")]
    pub super_flags: Option<u32>,
    /// By which name the one who restores knows what to mount.
    #[prost(string, optional, tag = "18")]
    pub external_key: Option<String>,
}
