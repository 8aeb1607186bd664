//! Which files are left to be read on demand.
//!
//! Only private memory is: CRIU ends when it cannot read that, but goes on without a word when it
//! cannot read shared memory (`do_restore_shmem_content`), which would be zeros then. And only what
//! can be read with few chunks in memory: a chunk that is needed again and again would be fetched
//! again and again.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::io::{self, BufReader};
use std::path::Path;

use fs_err as fs;
use kybernate_spec::page_index::{PAGE_BYTES, SEGMENT_BYTES};

use super::kept::{ChunkKey, KEPT};
use super::place::{chunks_of, u64_of};
use super::{LOOK_AHEAD, PagesFile, READ_BYTES_MAX};
use crate::criu::{ImageReader, Magic, NameClass, PagemapHead, classify};
use crate::unpack::plan::Plan;
use crate::unpack::{UnpackError, contradiction};
use crate::wanted::Wanted;

/// How many files may be left: their readers want chunks at the same time.
const FILES_MAX: usize = 4;

/// How many chunks may be fetched twice beside a quarter of all: after a large mapping, which has
/// shards of its own, what was read before it is gone on with.
const AGAIN: usize = 4;

/// Looks at all of the index, and returns the files that are left. What is found out chunk by chunk
/// when a dump is written must be known before its first page is read. `directory` has all images.
pub(super) fn choose(
    plan: &Plan,
    directory: &Path,
    wanted: &Wanted,
) -> Result<Vec<PagesFile>, UnpackError> {
    let stopped = |error| UnpackError::Io("unpack", error);
    for (number, _) in (0..=u16::MAX).zip(&plan.shards) {
        wanted.check().map_err(stopped)?;
        plan.extents(number)?;
    }
    let private = private(directory).map_err(|error| UnpackError::Io("look for memory", error))?;
    let mut left = Vec::new();
    for (number, file) in plan.files.iter().enumerate() {
        if classify(&file.name) != NameClass::Pages {
            continue;
        }
        if fs::symlink_metadata(directory.join(&file.name)).is_ok() {
            // The pack of images has a file of this name.
            return Err(contradiction());
        }
        if private.contains(&file.name) {
            let (name, length) = (file.name.clone(), file.length);
            left.push(PagesFile { name, length, number });
        }
    }
    let room = KEPT.checked_div(left.len()).unwrap_or_default().max(1);
    let mut fits = left.len() <= FILES_MAX;
    for file in &left {
        fits = fits && is_in_order(plan, file, room, wanted)?;
    }
    Ok(if fits { left } else { Vec::new() })
}

/// Returns the names of files that hold nothing but private memory, of one process each.
fn private(directory: &Path) -> io::Result<BTreeSet<String>> {
    let (mut private, mut others) = (BTreeSet::new(), BTreeSet::new());
    for entry in fs::read_dir(directory)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let Some(rest) = name.strip_prefix("pagemap-") else { continue };
        let id = rest.strip_suffix(".img");
        let is_process = id.is_some_and(|id| id.bytes().all(|byte| byte.is_ascii_digit()));
        let file = BufReader::new(fs::File::open(directory.join(&name))?);
        let head = ImageReader::new(file, Magic::PAGEMAP)
            .and_then(|mut image| image.next_message::<PagemapHead>());
        // One that cannot be read names nothing, and CRIU refuses it.
        let Ok(Some(head)) = head else { continue };
        let pages = format!("pages-{}.img", head.pages_id);
        // Two processes with one file would be two readers.
        if !is_process || !private.insert(pages.clone()) {
            others.insert(pages);
        }
    }
    Ok(&private - &others)
}

/// Whether one reader with so many chunks in memory fetches hardly any of a file twice, and never
/// needs many for one read.
fn is_in_order(
    plan: &Plan,
    file: &PagesFile,
    room: usize,
    wanted: &Wanted,
) -> Result<bool, UnpackError> {
    let (mut kept, mut all) = (VecDeque::<ChunkKey>::new(), HashSet::new());
    let (mut fetched, mut number) = (0, 0);
    let mut cursor = plan.files.get(file.number).ok_or_else(contradiction)?.start;
    let segments = file.length.div_ceil(SEGMENT_BYTES.into());
    let pages_per_read = u16::try_from(READ_BYTES_MAX / PAGE_BYTES).unwrap_or(u16::MAX);
    while number < segments {
        wanted.check().map_err(|error| UnpackError::Io("unpack", error))?;
        let count = usize::try_from(segments - number).unwrap_or(LOOK_AHEAD).min(LOOK_AHEAD);
        let (read, next) = plan.segments(cursor, count)?;
        if read.is_empty() {
            return Err(contradiction());
        }
        (number, cursor) = (number + u64_of(read.len()), next);
        for runs in read {
            let mut in_read: (u16, Vec<ChunkKey>) = (0, Vec::new());
            for run in runs {
                let read = run.first / pages_per_read;
                if in_read.0 != read {
                    in_read = (read, Vec::new());
                }
                for key in chunks_of(run) {
                    if !in_read.1.contains(&key) {
                        in_read.1.push(key);
                    }
                    if let Some(at) = kept.iter().position(|other| *other == key) {
                        kept.remove(at);
                    } else {
                        fetched += 1;
                        all.insert(key);
                    }
                    kept.push_back(key);
                    if kept.len() > room {
                        kept.pop_front();
                    }
                }
                if in_read.1.len() > room + 1 {
                    return Ok(false);
                }
            }
        }
    }
    Ok(fetched <= all.len() + all.len() / 4 + AGAIN)
}
