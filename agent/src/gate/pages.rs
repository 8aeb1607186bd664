//! Is all the memory there that a dump speaks of?
//!
//! CRIU reads what its pagemaps name. Where a file of pages ends before that, it asks again for what
//! is missing and never stops (`process_async_reads` in `criu/pagemap.c`, and the restorer).

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use fs_err as fs;
use kybernate_packager::criu::{ImageError, ImageReader, Magic, PagemapEntry, PagemapHead};
use kybernate_spec::page_index::PAGE_BYTES;

use super::{GateError, Summary};

/// How the names of pagemaps begin: those of processes and those of shared memory.
const PAGEMAP: &str = "pagemap-";

/// Whether a file says which memory is in which file of pages.
pub(super) fn is_pagemap(name: &str) -> bool {
    name.strip_prefix(PAGEMAP).is_some_and(|rest| rest.strip_suffix(".img").is_some())
}

/// Returns the number of the file of pages that a pagemap is about, and the bytes that must be there.
/// One entry is in memory at a time, however many there are.
pub(super) fn needed(content: impl Read) -> Result<(u32, u64), ImageError> {
    let mut reader = ImageReader::new(content, Magic::PAGEMAP)?;
    let head: Option<PagemapHead> = reader.next_message()?;
    let head = head.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let mut bytes = 0_u64;
    while let Some(entry) = reader.next_message::<PagemapEntry>()? {
        // What is said to be nowhere CRIU reads from here, too.
        if entry.is_present() || !entry.is_in_parent() {
            // CRIU before 4.2 reads one number, later ones the other where it is there.
            let pages = entry.page_count().max(u64::from(entry.compat_pages));
            let more = pages.saturating_mul(u64::from(PAGE_BYTES));
            bytes = bytes.saturating_add(more);
        }
    }
    Ok((head.pages_id, bytes))
}

/// Returns what is missing of the memory of a dump whose files of pages are in `images`, or elsewhere:
/// `others` are their names and lengths.
pub(crate) async fn lacking(
    summary: &Summary,
    images: &Path,
    others: BTreeMap<String, u64>,
) -> Result<Vec<String>, GateError> {
    let (needed, images) = (summary.memory.clone(), images.to_owned());
    let look = tokio::task::spawn_blocking(move || {
        let told = needed.into_iter().map(|(number, bytes)| {
            let name = format!("pages-{number}.img");
            let length = match others.get(&name) {
                Some(length) => Some(*length),
                None => length_of(&images.join(&name))?,
            };
            Ok(short(&name, bytes, length))
        });
        told.filter_map(Result::transpose).collect::<io::Result<Vec<String>>>()
    });
    look.await.map_err(io::Error::other).and_then(|told| told).map_err(GateError::Read)
}

/// Returns how long a file is; `None` when there is none.
fn length_of(path: &Path) -> io::Result<Option<u64>> {
    match fs::symlink_metadata(path) {
        Ok(found) => Ok(found.is_file().then_some(found.len())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn short(name: &str, needed: u64, length: Option<u64>) -> Option<String> {
    let remedy = "take a checkpoint anew, or pack the dump where it is whole";
    match length {
        _ if needed == 0 => None,
        None => Some(format!("{name:?} is missing, with {needed} bytes of memory: {remedy}")),
        Some(length) if length < needed => Some(format!(
            "{name:?} has {length} bytes, and its pagemap wants {needed} of it: {remedy}"
        )),
        Some(_) => None,
    }
}
