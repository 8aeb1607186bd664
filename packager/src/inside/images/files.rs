//! Open files.

use crate::criu::Magic;

pub(in super::super) const FDINFO: Magic = Magic(0x5621_3732);
pub(in super::super) const FILES: Magic = Magic(0x5630_3138);
pub(in super::super) const REMAPS: Magic = Magic(0x5913_3954);
pub(in super::super) const MEMFDS: Magic = Magic(0x4845_3499);
pub(in super::super) const TTYS: Magic = Magic(0x5945_3036);
pub(in super::super) const TCP_STREAM: Magic = Magic(0x5146_5506);
pub(in super::super) const LOCKS: Magic = Magic(0x5432_3616);

/// One descriptor of a table.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Descriptor {
    /// Which open file.
    #[prost(uint32, tag = "1")]
    pub(in super::super) id: u32,
    /// 1: closed on exec.
    #[prost(uint32, tag = "2")]
    pub(in super::super) flags: u32,
    #[prost(uint32, tag = "4")]
    pub(in super::super) fd: u32,
}

/// One open file, of whatever kind.
#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct File {
    #[prost(int32, tag = "1")]
    pub(in super::super) kind: i32,
    #[prost(uint32, tag = "2")]
    pub(in super::super) id: u32,
    #[prost(message, optional, tag = "3")]
    pub(in super::super) regular: Option<Regular>,
    #[prost(message, optional, tag = "4")]
    pub(in super::super) inet: Option<Inet>,
    #[prost(message, optional, tag = "5")]
    pub(in super::super) namespace: Option<NamespaceFile>,
    #[prost(message, optional, tag = "6")]
    pub(in super::super) packet: Option<Packet>,
    #[prost(message, optional, tag = "7")]
    pub(in super::super) netlink: Option<Netlink>,
    #[prost(message, optional, tag = "8")]
    pub(in super::super) eventfd: Option<Eventfd>,
    #[prost(message, optional, tag = "9")]
    pub(in super::super) epoll: Option<Epoll>,
    #[prost(message, optional, tag = "10")]
    pub(in super::super) signalfd: Option<Signalfd>,
    #[prost(message, optional, tag = "11")]
    pub(in super::super) tun: Option<Tun>,
    #[prost(message, optional, tag = "12")]
    pub(in super::super) timerfd: Option<Timerfd>,
    #[prost(message, optional, tag = "13")]
    pub(in super::super) inotify: Option<Inotify>,
    #[prost(message, optional, tag = "14")]
    pub(in super::super) fanotify: Option<Fanotify>,
    #[prost(message, optional, tag = "16")]
    pub(in super::super) unix: Option<Unix>,
    #[prost(message, optional, tag = "17")]
    pub(in super::super) fifo: Option<Fifo>,
    #[prost(message, optional, tag = "18")]
    pub(in super::super) pipe: Option<Pipe>,
    #[prost(message, optional, tag = "19")]
    pub(in super::super) tty: Option<Tty>,
    #[prost(message, optional, tag = "20")]
    pub(in super::super) memfd: Option<Memfd>,
    #[prost(message, optional, tag = "21")]
    pub(in super::super) bpf: Option<BpfMap>,
    #[prost(message, optional, tag = "22")]
    pub(in super::super) pidfd: Option<Pidfd>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Regular {
    #[prost(uint32, tag = "2")]
    pub(in super::super) flags: u32,
    #[prost(uint64, tag = "3")]
    pub(in super::super) position: u64,
    #[prost(string, tag = "6")]
    pub(in super::super) name: String,
    #[prost(uint64, optional, tag = "8")]
    pub(in super::super) size: Option<u64>,
    #[prost(bool, optional, tag = "9")]
    pub(in super::super) external: Option<bool>,
    #[prost(uint32, optional, tag = "10")]
    pub(in super::super) mode: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Inet {
    #[prost(uint32, tag = "2")]
    pub(in super::super) inode: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) family: u32,
    #[prost(uint32, tag = "4")]
    pub(in super::super) kind: u32,
    #[prost(uint32, tag = "5")]
    pub(in super::super) protocol: u32,
    #[prost(uint32, tag = "6")]
    pub(in super::super) state: u32,
    #[prost(uint32, tag = "7")]
    pub(in super::super) local_port: u32,
    #[prost(uint32, tag = "8")]
    pub(in super::super) remote_port: u32,
    #[prost(uint32, tag = "10")]
    pub(in super::super) backlog: u32,
    /// One word for IPv4, four for IPv6, each in network order.
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub(in super::super) local: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub(in super::super) remote: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Unix {
    #[prost(uint32, tag = "2")]
    pub(in super::super) inode: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) kind: u32,
    #[prost(uint32, tag = "4")]
    pub(in super::super) state: u32,
    #[prost(uint32, tag = "7")]
    pub(in super::super) backlog: u32,
    #[prost(uint32, tag = "8")]
    pub(in super::super) peer: u32,
    /// A path, or an abstract name that begins with NUL.
    #[prost(bytes = "vec", tag = "11")]
    pub(in super::super) name: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Netlink {
    #[prost(uint32, tag = "3")]
    pub(in super::super) protocol: u32,
    #[prost(uint32, tag = "7")]
    pub(in super::super) port: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Packet {
    #[prost(uint32, tag = "2")]
    pub(in super::super) kind: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) protocol: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Eventfd {
    #[prost(uint64, tag = "4")]
    pub(in super::super) counter: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Epoll {
    #[prost(message, repeated, tag = "4")]
    pub(in super::super) watched: Vec<Watched>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Watched {
    #[prost(uint32, tag = "2")]
    pub(in super::super) fd: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Signalfd {
    #[prost(uint64, tag = "4")]
    pub(in super::super) mask: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Timerfd {
    #[prost(uint32, tag = "4")]
    pub(in super::super) clock: u32,
    /// When it goes off next: seconds and nanoseconds, both 0 when it is not set.
    #[prost(uint64, tag = "7")]
    pub(in super::super) seconds: u64,
    #[prost(uint64, tag = "8")]
    pub(in super::super) nanoseconds: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Inotify {
    #[prost(message, repeated, tag = "5")]
    pub(in super::super) watches: Vec<Empty>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Fanotify {
    #[prost(message, repeated, tag = "6")]
    pub(in super::super) marks: Vec<Empty>,
}

/// Something that is only counted.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Empty {}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct NamespaceFile {
    /// The namespace's flag of clone(2).
    #[prost(uint32, tag = "3")]
    pub(in super::super) flag: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct Tun {
    #[prost(string, optional, tag = "2")]
    pub(in super::super) device: Option<String>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Fifo {
    #[prost(uint32, tag = "2")]
    pub(in super::super) pipe: u32,
    /// Its path, as an open file.
    #[prost(uint32, optional, tag = "3")]
    pub(in super::super) file: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Pipe {
    #[prost(uint32, tag = "2")]
    pub(in super::super) pipe: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) flags: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Tty {
    #[prost(uint32, tag = "2")]
    pub(in super::super) info: u32,
    /// Its path, as an open file.
    #[prost(uint32, optional, tag = "6")]
    pub(in super::super) file: Option<u32>,
}

/// A terminal (`tty-info.img`).
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct TtyInfo {
    #[prost(uint32, tag = "1")]
    pub(in super::super) id: u32,
    /// 1 pseudo terminal, 2 console, 3 virtual, 4 controlling, 5 external, 6 serial.
    #[prost(int32, tag = "2")]
    pub(in super::super) kind: i32,
    #[prost(uint32, tag = "6")]
    pub(in super::super) session: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Memfd {
    #[prost(uint32, tag = "2")]
    pub(in super::super) flags: u32,
    #[prost(uint64, tag = "3")]
    pub(in super::super) position: u64,
    /// Which one of `memfd.img`.
    #[prost(uint32, tag = "5")]
    pub(in super::super) inode: u32,
}

/// The content of a memory file (`memfd.img`).
#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct MemfdInode {
    #[prost(string, tag = "1")]
    pub(in super::super) name: String,
    #[prost(uint64, tag = "4")]
    pub(in super::super) size: u64,
    /// Which shared memory holds it.
    #[prost(uint32, tag = "5")]
    pub(in super::super) shared: u32,
    #[prost(uint64, tag = "7")]
    pub(in super::super) id: u64,
    #[prost(uint32, optional, tag = "8")]
    pub(in super::super) huge: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(in super::super) struct BpfMap {
    #[prost(string, tag = "13")]
    pub(in super::super) name: String,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Pidfd {
    #[prost(int32, tag = "4")]
    pub(in super::super) pid: i32,
}

/// A file that is not where its name says (`remap-fpath.img`).
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Remap {
    #[prost(uint32, tag = "1")]
    pub(in super::super) file: u32,
    /// 0 a link elsewhere, 1 deleted and kept in the dump, 2 of a process that has ended.
    #[prost(int32, optional, tag = "3")]
    pub(in super::super) kind: Option<i32>,
}

/// What is under way in a connection (`tcp-stream-N.img`).
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct TcpStream {
    #[prost(uint32, tag = "1")]
    pub(in super::super) receive_queue: u32,
    #[prost(uint32, tag = "3")]
    pub(in super::super) send_queue: u32,
}

/// A lock on a file.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(in super::super) struct Lock {
    /// 1 POSIX, 2 flock, 32 lease, 1024 of an open file.
    #[prost(uint32, tag = "1")]
    pub(in super::super) flags: u32,
    /// 0 read, 1 write.
    #[prost(uint32, tag = "2")]
    pub(in super::super) kind: u32,
    #[prost(int32, tag = "3")]
    pub(in super::super) pid: i32,
    #[prost(int32, tag = "4")]
    pub(in super::super) fd: i32,
    #[prost(int64, tag = "5")]
    pub(in super::super) start: i64,
    /// 0: to the end.
    #[prost(int64, tag = "6")]
    pub(in super::super) length: i64,
}
