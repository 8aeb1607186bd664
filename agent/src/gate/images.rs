//! The open files of CRIU's images, as far as they are judged (CRIU, `images/fdinfo.proto`). Whatever
//! else a file has is skipped unread; the other messages are the packager's.

use kybernate_packager::criu::Magic;

pub(super) const FILES: Magic = Magic(0x5630_3138);

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
