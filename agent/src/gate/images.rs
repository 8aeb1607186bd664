//! The open files of CRIU's images, as far as they are judged, and the descriptors that lead to them
//! (CRIU, `images/fdinfo.proto`), namespaces that come from outside, and cgroups. Whatever else they
//! have is skipped unread; the other messages are the packager's.

use kybernate_packager::criu::Magic;

pub(super) const FILES: Magic = Magic(0x5630_3138);
pub(super) const GHOST_FILE: Magic = Magic(0x5258_3605);
pub(super) const REMAPS: Magic = Magic(0x5913_3954);
pub(super) const DESCRIPTORS: Magic = Magic(0x5621_3732);
pub(super) const NETWORK: Magic = Magic(0x5593_3752);
pub(super) const PIDS: Magic = Magic(0x6115_7326);
pub(super) const CGROUPS: Magic = Magic::CGROUPS;

/// `netns-NUMBER.img`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Network {
    /// By which name whoever restores hands it over; then there is nothing else.
    #[prost(string, optional, tag = "8")]
    pub(super) external: Option<String>,
}

/// `pidns-NUMBER.img`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Pids {
    #[prost(string, optional, tag = "1")]
    pub(super) external: Option<String>,
}

/// One descriptor of a process.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Descriptor {
    /// The label that `SELinux` is told to give to the socket.
    #[prost(string, optional, tag = "5")]
    pub(super) label: Option<String>,
}

/// One open file.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct File {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(uint32, tag = "2")]
    pub(super) id: u32,
    #[prost(message, optional, tag = "3")]
    pub(super) regular: Option<RegularFile>,
    #[prost(message, optional, tag = "4")]
    pub(super) inet: Option<InetSocket>,
    #[prost(message, optional, tag = "7")]
    pub(super) netlink: Option<NetlinkSocket>,
    #[prost(message, optional, tag = "16")]
    pub(super) socket: Option<UnixSocket>,
}

/// A socket of the internet (`images/sk-inet.proto`).
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct InetSocket {
    /// `SOCK_…`
    #[prost(uint32, tag = "4")]
    pub(super) kind: u32,
}

/// A socket to the kernel (`images/sk-netlink.proto`).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct NetlinkSocket {
    /// `NETLINK_…`
    #[prost(uint32, tag = "3")]
    pub(super) protocol: u32,
    /// What it listens to, a bit for each.
    #[prost(uint32, repeated, packed = "false", tag = "8")]
    pub(super) groups: Vec<u32>,
    /// Whom it is connected to: a socket, and groups.
    #[prost(uint32, tag = "9")]
    pub(super) to_port: u32,
    #[prost(uint32, tag = "10")]
    pub(super) to_groups: u32,
}

/// A socket of the machine (`images/sk-unix.proto`).
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct UnixSocket {
    /// With a zero at its beginning where it is no path, and at its end where it is one.
    #[prost(bytes = "vec", tag = "11")]
    pub(super) name: Vec<u8>,
    /// From where the path goes.
    #[prost(string, optional, tag = "14")]
    pub(super) directory: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RegularFile {
    #[prost(uint32, tag = "1")]
    pub(super) id: u32,
    #[prost(string, tag = "6")]
    pub(super) name: String,
    #[prost(sint32, optional, tag = "7")]
    pub(super) mount: Option<i32>,
    #[prost(bool, optional, tag = "9")]
    pub(super) external: Option<bool>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) mode: Option<u32>,
}

/// A file that has no name, or not the one it was open by (`images/remap-file-path.proto`).
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct Remap {
    /// The file.
    #[prost(uint32, tag = "1")]
    pub(super) file: u32,
    /// What it is made of: another file, where it is linked.
    #[prost(uint32, tag = "2")]
    pub(super) of: u32,
    #[prost(int32, optional, tag = "3")]
    pub(super) kind: Option<i32>,
}

/// `cgroup.img` (CRIU, `images/cgroup.proto`). What CRIU has as strings are bytes here: the kernel
/// takes any in a name.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Cgroups {
    #[prost(message, repeated, tag = "1")]
    pub(super) sets: Vec<CgroupSet>,
    #[prost(message, repeated, tag = "2")]
    pub(super) hierarchies: Vec<Hierarchy>,
}

/// Where a thread is in all hierarchies.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct CgroupSet {
    #[prost(uint32, tag = "1")]
    pub(super) id: u32,
    #[prost(message, repeated, tag = "2")]
    pub(super) places: Vec<Place>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Place {
    /// The hierarchy: controllers, or nothing for version 2.
    #[prost(bytes = "vec", tag = "1")]
    pub(super) hierarchy: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) path: Vec<u8>,
    /// How much of the path is outside of the processes' cgroup namespace.
    #[prost(uint32, optional, tag = "3")]
    pub(super) outside: Option<u32>,
}

/// The cgroups of one hierarchy.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Hierarchy {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub(super) names: Vec<Vec<u8>>,
    #[prost(message, repeated, tag = "2")]
    pub(super) cgroups: Vec<Cgroup>,
    #[prost(bool, optional, tag = "3")]
    pub(super) threaded: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Cgroup {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) name: Vec<u8>,
    /// Those within it, each a `Cgroup`: looked into only where CRIU would follow them.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(super) children: Vec<Vec<u8>>,
    #[prost(message, repeated, tag = "3")]
    pub(super) properties: Vec<Property>,
    #[prost(message, optional, tag = "4")]
    pub(super) permissions: Option<Permissions>,
}

/// A file of a cgroup and what is in it.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Property {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) name: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(message, optional, tag = "3")]
    pub(super) permissions: Option<Permissions>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct Permissions {
    #[prost(uint32, tag = "1")]
    pub(super) mode: u32,
    #[prost(uint32, tag = "2")]
    pub(super) uid: u32,
    #[prost(uint32, tag = "3")]
    pub(super) gid: u32,
}

/// `GhostFileEntry`: a file that has no name any more.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct GhostFile {
    #[prost(uint32, tag = "1")]
    pub(super) user: u32,
    #[prost(uint32, tag = "2")]
    pub(super) group: u32,
    #[prost(uint32, tag = "3")]
    pub(super) mode: u32,
    /// Of a symbolic link: where it leads.
    #[prost(string, optional, tag = "11")]
    pub(super) target: Option<String>,
}
