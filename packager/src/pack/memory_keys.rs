//! What the pages of a dump are the memory of, whatever their files are called.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::dump::{DumpErrorKind, memory, open};
use super::pagemap::MemoryKey;
use crate::criu::{Magic, Mapping, MemfdInode, OpenFile, process_id};

/// A mapping of a file in memory (CRIU, `criu/include/image.h`). Since CRIU 4.0 that is all memory
/// shared by `mmap`, of whatever making: its `shared` is an open file.
const MEMFD: u32 = 1 << 14;

/// Memory shared otherwise: by System V's calls, and by all means before. Its `shared` is the number
/// in the pagemap's name.
const ANON_SHARED: u32 = 1 << 8;

/// Returns what each pagemap among `names` is the memory of. Shared memory that nobody maps has no
/// key.
pub(super) fn memory_keys<'a>(
    directory: &Path,
    names: impl Iterator<Item = &'a str>,
) -> Result<BTreeMap<String, MemoryKey>, DumpErrorKind> {
    let (mut keys, mut shared, mut processes) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
    let mut has_memfds = false;
    for name in names {
        if let Some(pid) = process_id(name, "pagemap") {
            keys.insert(name.to_owned(), MemoryKey::Process(pid));
        } else if let Some(id) = name.strip_prefix("pagemap-shmem-") {
            let id = id.strip_suffix(".img").and_then(|id| id.parse::<u64>().ok());
            shared.extend(id.map(|id| (id, name)));
        }
        processes.extend(process_id(name, "mm"));
        has_memfds |= name == "memfd.img";
    }
    if shared.is_empty() {
        return Ok(keys);
    }
    let memfds = if has_memfds { memfds(directory)? } else { BTreeMap::new() };
    let number = |mapping: &Mapping| match mapping.status {
        status if status & MEMFD != 0 => memfds.get(&mapping.shared).copied(),
        status if status & ANON_SHARED != 0 => Some(mapping.shared),
        _ => None,
    };
    let mut mappers = BTreeMap::new();
    for pid in processes {
        for mapping in memory(directory, pid)?.mappings {
            if let Some(number) = number(&mapping) {
                mappers.entry(number).or_insert(MemoryKey::Shared(pid, mapping.start));
            }
        }
    }
    let keyed = shared
        .into_iter()
        .filter_map(|(id, name)| Some((name.to_owned(), mappers.get(&id)?.clone())));
    keys.extend(keyed);
    Ok(keys)
}

/// Returns the number of the shared memory behind each open file in memory, by the file's number.
fn memfds(directory: &Path) -> Result<BTreeMap<u64, u64>, DumpErrorKind> {
    let mut inodes = BTreeMap::new();
    let mut reader = open(directory, "memfd.img", Magic::MEMFD)?;
    while let Some(inode) = reader.next_message::<MemfdInode>()? {
        inodes.insert(inode.id, u64::from(inode.shared));
    }
    let mut files = BTreeMap::new();
    let mut reader = open(directory, "files.img", Magic::FILES)?;
    while let Some(file) = reader.next_message::<OpenFile>()? {
        let inode = file.memfd.and_then(|memfd| inodes.get(&u64::from(memfd.inode)));
        files.extend(inode.map(|shared| (u64::from(file.id), *shared)));
    }
    Ok(files)
}
