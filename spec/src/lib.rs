//! Names, media types, digests, facts and page index of a checkpoint artifact.
//!
//! This crate is the Rust reading of `spec/artifact.md`. It does no input or output of its own,
//! starts no task and reads no clock, so that the registry, the packager and the agent can all
//! depend on it and on nothing of each other.
//!
//! Reading order: [`Digest`], [`Reference`] and [`Location`] name things; [`Descriptor`],
//! [`Manifest`] and [`Index`] tie them together with [`media_type`] and [`annotation`];
//! [`checkpoint`] has the facts and [`page_index`] says where each page is; [`gpu`] has how GPUs are
//! called; [`Reason`] is why an
//! artifact is refused.

pub mod annotation;
pub mod checkpoint;
mod digest;
pub mod document;
pub mod gpu;
mod manifest;
pub mod media_type;
mod name;
pub mod page_index;
mod reason;
mod reference;
mod report;

pub use self::digest::{Algorithm, Digest, DigestError, Hasher};
pub use self::manifest::{Annotations, Descriptor, Index, MANIFEST_BYTES_MAX, Manifest, Platform};
pub use self::name::{NameError, RepositoryName, Tag, TagError};
pub use self::reason::Reason;
pub use self::reference::{
    LayoutReference, Location, Reference, ReferenceError, ReferenceErrorKind, without_credentials,
};
pub use self::report::chain;
