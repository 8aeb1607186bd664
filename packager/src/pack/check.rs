//! What no reader would take is refused before anything is stored.

use std::collections::BTreeSet;

use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::page_index::{SHARD_BYTES_MAX, index_bytes_max};
use kybernate_spec::{Descriptor, Reason};

use super::dump::Dump;
use super::{PackError, PackRequest, to_json};
use crate::artifact::{self, ArtifactError};
use crate::images_pack;

/// Checks what is known of a checkpoint before its pages are.
pub(super) fn check(request: &PackRequest, dump: &Dump) -> Result<(), PackError> {
    let unreadable = |reason, text: String| {
        Err(PackError::Unreadable(Box::new(ArtifactError::Shape(reason, text))))
    };
    let mut destinations = BTreeSet::new();
    for volume in &request.volumes {
        let destination = &volume.destination;
        let places: Vec<&str> = artifact::places(destination).collect();
        if !artifact::is_destination(destination) || !destinations.insert(places) {
            let text = format!("a volume's destination is {destination:?}, or two volumes' is");
            return unreadable(Reason::Volume, text);
        }
    }
    let files = dump.small.len();
    if !u32::try_from(files).is_ok_and(|files| files <= images_pack::FILES_MAX) {
        let text = format!("the dump has {files} small files, more than a pack of images may");
        return unreadable(Reason::Header, text);
    }
    let images = dump.small.iter().map(|(name, bytes)| (&**name, *bytes));
    let bytes = images_pack::packed_bytes(images);
    if bytes > SHARD_BYTES_MAX {
        let text = format!(
            "the dump's small files have {bytes} bytes together, a pack of images has at most 256 MiB"
        );
        return unreadable(Reason::BlobTooLarge, text);
    }
    check_device(&request.config, dump)?;
    check_config(&request.config)
}

/// The facts must name the dump's device memory, and no other: whoever restores it goes by them.
fn check_device(config: &CheckpointConfig, dump: &Dump) -> Result<(), PackError> {
    let files = dump.bulk.iter().filter(|file| file.is_device());
    let files: BTreeSet<(&str, u64)> = files.map(|file| (&*file.name, file.length)).collect();
    let streams = &config.device.streams;
    let named = streams.iter().map(|stream| (&*stream.file, stream.bytes)).collect();
    let Some((name, bytes)) = files.symmetric_difference(&named).next() else { return Ok(()) };
    let text = format!(
        "of {name:?} with {bytes} bytes of device memory the dump or the facts say nothing"
    );
    Err(PackError::Unreadable(Box::new(ArtifactError::Shape(Reason::Device, text))))
}

fn check_config(config: &CheckpointConfig) -> Result<(), PackError> {
    for time in [&config.created, &config.not_after].into_iter().flatten() {
        if let Err(error) = time.parse::<jiff::Timestamp>() {
            return Err(PackError::Time(time.clone(), error));
        }
    }
    let content = to_json("config", config)?;
    artifact::check_config(&content).map_err(|error| PackError::Unreadable(Box::new(error)))
}

/// Checks that a page index is not larger than its files allow.
pub(super) fn check_index(index: &Descriptor, bulk_bytes: u64) -> Result<(), PackError> {
    if index.size <= index_bytes_max(bulk_bytes) {
        return Ok(());
    }
    let text = format!("its page index has {} bytes, more than its files allow", index.size);
    Err(PackError::Unreadable(Box::new(ArtifactError::Shape(Reason::IndexTooLarge, text))))
}
