//! Why a reader refuses an artifact (`spec/artifact.md`, "Reasons").

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a reader refuses an artifact: a closed list, so that two readers can be compared and a
/// program can tell what is wrong without reading a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// What is named is something else than a checkpoint index.
    NotACheckpoint,
    /// Something that is named is not there.
    Missing,
    /// The bytes do not match their digest or size.
    DigestMismatch,
    /// A JSON document is larger than allowed.
    DocumentTooLarge,
    /// A JSON document is malformed, lacks a member, or has one twice.
    Document,
    /// The index has other children than it may.
    Children,
    /// The checkpoint manifest or its config is of another type, or the manifest has a subject.
    Manifest,
    /// The checkpoint manifest has other layers than it may.
    Layers,
    /// A blob is larger than its kind may be.
    BlobTooLarge,
    /// A volume has no usable destination, or another volume has the same one.
    Volume,
    /// A version, hash, flag, encoding or record that this version does not know.
    Unsupported,
    /// The files have more bytes than the reader accepts.
    TooLarge,
    /// The page index has more bytes than its files allow.
    IndexTooLarge,
    /// A binary blob does not begin as it must.
    Header,
    /// A binary blob ends too early.
    Truncated,
    /// Bytes follow the end of a binary blob.
    Trailing,
    /// A file has a name that no file of a dump has.
    FileName,
    /// The files of the pack are not in strictly ascending order.
    FileOrder,
    /// Two files have one name.
    FileTwice,
    /// A file of the pack is too large for it.
    FileSize,
    /// A record has a length that its kind cannot have, or is empty where it must not be.
    Record,
    /// There are more, fewer or other records than announced, or in another order.
    Records,
    /// The chunks of a shard have gaps or wrong sizes.
    ChunkTable,
    /// The page index and the manifest list different shards.
    Shards,
    /// A page lies beyond its shard.
    PageRange,
    /// The pages of a segment overlap, are out of order, or pass the end of the file.
    PageOrder,
    /// A page of a shard is used twice.
    PageTwice,
    /// Declared sizes do not add up.
    Sizes,
    /// The facts name other device memory than there is.
    Device,
    /// A chunk does not match its hash.
    ChunkHash,
}

impl Reason {
    /// Every reason, in the order of the specification.
    pub const ALL: [Self; 30] = [
        Self::NotACheckpoint,
        Self::Missing,
        Self::DigestMismatch,
        Self::DocumentTooLarge,
        Self::Document,
        Self::Children,
        Self::Manifest,
        Self::Layers,
        Self::BlobTooLarge,
        Self::Volume,
        Self::Unsupported,
        Self::TooLarge,
        Self::IndexTooLarge,
        Self::Header,
        Self::Truncated,
        Self::Trailing,
        Self::FileName,
        Self::FileOrder,
        Self::FileTwice,
        Self::FileSize,
        Self::Record,
        Self::Records,
        Self::ChunkTable,
        Self::Shards,
        Self::PageRange,
        Self::PageOrder,
        Self::PageTwice,
        Self::Sizes,
        Self::Device,
        Self::ChunkHash,
    ];

    /// Returns the identifier, as specification, test vectors and `kyb --json` write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotACheckpoint => "not-a-checkpoint",
            Self::Missing => "missing",
            Self::DigestMismatch => "digest-mismatch",
            Self::DocumentTooLarge => "document-too-large",
            Self::Document => "document",
            Self::Children => "children",
            Self::Manifest => "manifest",
            Self::Layers => "layers",
            Self::BlobTooLarge => "blob-too-large",
            Self::Volume => "volume",
            Self::Unsupported => "unsupported",
            Self::TooLarge => "too-large",
            Self::IndexTooLarge => "index-too-large",
            Self::Header => "header",
            Self::Truncated => "truncated",
            Self::Trailing => "trailing",
            Self::FileName => "file-name",
            Self::FileOrder => "file-order",
            Self::FileTwice => "file-twice",
            Self::FileSize => "file-size",
            Self::Record => "record",
            Self::Records => "records",
            Self::ChunkTable => "chunk-table",
            Self::Shards => "shards",
            Self::PageRange => "page-range",
            Self::PageOrder => "page-order",
            Self::PageTwice => "page-twice",
            Self::Sizes => "sizes",
            Self::Device => "device",
            Self::ChunkHash => "chunk-hash",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_what_serde_writes_and_each_is_listed_once() {
        for (position, reason) in Reason::ALL.iter().enumerate() {
            let text = serde_json::to_string(reason).unwrap();
            assert_eq!(text, format!("\"{reason}\""));
            assert!(!Reason::ALL[..position].contains(reason), "{reason}");
        }
    }

    /// The table of the specification is the list, in its order.
    #[test]
    fn the_specification_lists_the_same_reasons() {
        let prose = include_str!("../artifact.md");
        let (_, table) = prose.split_once("| reason | what is wrong |").unwrap();
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let listed: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
        assert_eq!(listed, Reason::ALL.map(Reason::as_str));
    }
}
