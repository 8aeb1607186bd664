//! The open files of CRIU's images, as far as they are judged, and the descriptors that lead to them
//! (CRIU, `images/fdinfo.proto`), and namespaces that come from outside. Whatever else they have is skipped unread; the other messages are the
//! packager's.

use kybernate_packager::criu::Magic;

pub(super) const FILES: Magic = Magic(0x5630_3138);
pub(super) const DESCRIPTORS: Magic = Magic(0x5621_3732);
pub(super) const NETWORK: Magic = Magic(0x5593_3752);
pub(super) const PIDS: Magic = Magic(0x6115_7326);

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
    #[prost(message, optional, tag = "3")]
    pub(super) regular: Option<RegularFile>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RegularFile {
    #[prost(string, tag = "6")]
    pub(super) name: String,
    #[prost(bool, optional, tag = "9")]
    pub(super) external: Option<bool>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) mode: Option<u32>,
}
