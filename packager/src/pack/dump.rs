//! What is in a dump directory, and whether it is whole.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::memory_keys::memory_keys;
use super::pagemap::MemoryKey;
use super::parents::{Flat, Parts};
use crate::criu::{
    ImageError, ImageReader, Inventory, Magic, Memory, NameClass, PagemapEntry, PagemapHead,
    Process, classify, process_id,
};
use crate::images_pack;

const PAGE_BYTES: u64 = 4096;
/// Mappings at least this large get shards of their own, so that equal ones have equal digests.
const OWN_SHARD_BYTES: u64 = 64 << 20;
/// Most processes and threads of one dump: the kernel's default limit of process ids.
const THREADS_MAX: u64 = 4 << 20;

/// The files of a dump directory, before anything but its parents is looked at.
#[derive(Debug)]
pub(super) struct Listing {
    directory: PathBuf,
    seen: BTreeMap<String, Stamp>,
    files: BTreeMap<String, u64>,
    flat: Flat,
}

/// What tells that a file is still the same: its number, length, and time of the last change.
type Stamp = (u64, u64, (i64, i64));

/// A dump directory that was found whole.
#[derive(Debug)]
pub(super) struct Dump {
    directory: PathBuf,
    seen: BTreeMap<String, Stamp>,
    /// What its parents have of it.
    flat: Flat,
    /// Files that go into the pack, by name, with their sizes.
    pub(super) small: Vec<(String, u64)>,
    /// Files that go into shards, by name.
    pub(super) bulk: Vec<BulkFile>,
    /// Number of processes.
    pub(super) processes: u32,
    /// Number of threads.
    pub(super) threads: u32,
}

/// A file that goes into shards.
#[derive(Debug)]
pub(super) struct BulkFile {
    pub(super) name: String,
    pub(super) length: u64,
    /// How the file is cut, by offset and without gaps.
    pub(super) pieces: Vec<Piece>,
    /// What it is the memory of, and the pagemap that says which address each page has.
    pub(super) memory: Option<(MemoryKey, String)>,
}

/// A stretch of a bulk file whose pages go to the same shard, or shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// First byte after the stretch.
    pub(super) end: u64,
    /// The shard of its own that it belongs to; `None` shares shards with other small mappings.
    pub(super) own: Option<OwnShard>,
}

/// One shard of a large mapping, within its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnShard {
    mapping: u64,
    number: u64,
}

/// Why a directory cannot be packed.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} is no dump that can be packed")]
pub struct DumpError {
    /// The directory, or the file in it.
    pub path: PathBuf,
    /// What is wrong.
    #[source]
    pub kind: DumpErrorKind,
}

/// What is wrong with a dump directory.
#[derive(Debug, thiserror::Error)]
pub enum DumpErrorKind {
    /// The directory or a file could not be read.
    #[error("it cannot be read")]
    Io(#[from] std::io::Error),
    /// A file every dump has is missing.
    #[error("{0} is missing")]
    Missing(String),
    /// The dump needs the images of an earlier one, and does not say where they are.
    #[error("it is incremental, its pages are partly in a parent's images, but has no parent link")]
    Incremental,
    /// The parent's directory is not there.
    #[error("its parent is not there: put the parent's directory where this link leads")]
    ParentMissing,
    /// The parent's directory is not where parents may be.
    #[error("it leads to {parent:?}: parents must lie beneath {around:?}, put them there")]
    ParentElsewhere {
        /// Where the link leads.
        parent: PathBuf,
        /// The directory that holds the dump.
        around: PathBuf,
    },
    /// A directory is among its own parents.
    #[error("the parents lead round in a circle")]
    ParentCircle,
    /// A page is said to be in a parent's images, and is in none.
    #[error("the page at {0:#x} is in none of the parents")]
    NotInParents(u64),
    /// Entries of a pagemap are not in order.
    #[error("its entry at {0:#x} is out of order, or no page begins there")]
    Disordered(u64),
    /// There is a file that CRIU and runc do not write.
    #[error("{0:?} is none of CRIU's images, or no regular file")]
    Foreign(String),
    /// An image could not be decoded.
    #[error("an image cannot be decoded")]
    Image(#[from] ImageError),
    /// A pages file is shorter or longer than its pagemap says.
    #[error("it has {actual} bytes, but its pagemap {pagemap} describes {expected}")]
    Truncated {
        /// The pagemap's name.
        pagemap: String,
        /// Bytes the pagemap describes.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// It is not what it was when packing began.
    #[error("it was changed, added or removed meanwhile: pack it when nothing writes there")]
    Changed,
    /// More than any dump has.
    #[error("it has more {0} than any dump")]
    TooMany(&'static str),
}

impl BulkFile {
    /// Whether it holds device memory.
    pub(super) fn is_device(&self) -> bool {
        classify(&self.name) == NameClass::Device
    }
}

impl Listing {
    /// Lists `directory`. What its parents have of it is written down in `scratch`.
    pub(super) fn of(directory: &Path, scratch: &Path) -> Result<Self, DumpError> {
        let wrong = |kind| DumpError { path: directory.to_owned(), kind };
        let seen = list(directory).map_err(wrong)?;
        let mut files: BTreeMap<_, _> =
            seen.iter().map(|(name, (_, length, _))| (name.clone(), *length)).collect();
        let pagemaps = files.keys().map(String::as_str).filter(|name| name.starts_with("pagemap-"));
        let flat = Flat::of(directory, pagemaps, scratch)?;
        files.extend(flat.files().map(|(name, bytes)| (name.to_owned(), bytes)));
        Ok(Self { directory: directory.to_owned(), seen, files, flat })
    }

    /// Returns the apparent bytes of the files that will be shards.
    pub(super) fn bulk_bytes(&self) -> u64 {
        let bulk = self.files.iter().filter(|(name, length)| is_bulk(name, **length));
        bulk.map(|(_, length)| length).sum()
    }
}

impl Dump {
    /// Looks at every file. `shard_bytes` tells how large mappings are cut.
    pub(super) fn scan(listing: Listing, shard_bytes: u64) -> Result<Self, DumpError> {
        let Listing { directory, seen, files, flat } = listing;
        let wrong = |kind| DumpError { path: directory.clone(), kind };
        for needed in ["inventory.img", "pstree.img"] {
            if !files.contains_key(needed) {
                return Err(wrong(DumpErrorKind::Missing(needed.to_owned())));
            }
        }
        let within = |name: &str| {
            let path = directory.join(name);
            move |kind| DumpError { path, kind }
        };
        read_inventory(&directory).map_err(within("inventory.img"))?;
        let (processes, threads) =
            read_processes(&directory, &files).map_err(within("pstree.img"))?;
        let names = files.keys().map(String::as_str);
        let mut keys = memory_keys(&directory, names).map_err(within("mm-*.img"))?;
        let mut maps = BTreeMap::new();
        for name in files.keys().filter(|name| name.starts_with("pagemap-")) {
            let mappings = own_mappings(&directory, &flat, name).map_err(within(name))?;
            let place = flat.directory_of(name).unwrap_or(&directory);
            let map = read_pagemap(place, name, &files, &mappings, shard_bytes);
            let map = map.map_err(within(name))?;
            let pages = format!("pages-{}.img", map.pages_id);
            let Some(actual) = files.get(&pages).copied() else {
                return Err(wrong(DumpErrorKind::Missing(pages)));
            };
            if actual != map.bytes {
                let (pagemap, expected) = (name.clone(), map.bytes);
                let kind = DumpErrorKind::Truncated { pagemap, expected, actual };
                return Err(within(&pages)(kind));
            }
            let memory = keys.remove(name).map(|key| (key, name.clone()));
            maps.insert(pages, (map.pieces, memory));
        }
        let (mut small, mut bulk) = (Vec::new(), Vec::new());
        for (name, length) in files {
            if is_bulk(&name, length) {
                let map = maps.remove(&name);
                let unmapped = || (uncharted(&name, length, shard_bytes), None);
                let (pieces, memory) = map.unwrap_or_else(unmapped);
                bulk.push(BulkFile { name, length, pieces, memory });
            } else {
                small.push((name, length));
            }
        }
        Ok(Self { directory, seen, flat, small, bulk, processes, threads })
    }

    /// Fails when a file was changed, added or removed since the directory was listed: what was read
    /// is then no dump, or not all of one.
    pub(super) fn check_unchanged(&self) -> Result<(), DumpError> {
        let wrong = |path: PathBuf, kind| DumpError { path, kind };
        let now = list(&self.directory).map_err(|kind| wrong(self.directory.clone(), kind))?;
        let mut names = self.seen.keys().chain(now.keys());
        match names.find(|name| self.seen.get(*name) != now.get(*name)) {
            None => Ok(()),
            Some(name) => Err(wrong(self.directory.join(name), DumpErrorKind::Changed)),
        }
    }

    /// Returns the directory that a file is in: another one than the dump's when it had to be written
    /// anew.
    pub(super) fn directory_of(&self, name: &str) -> &Path {
        self.flat.directory_of(name).unwrap_or(&self.directory)
    }

    /// Returns where a file is.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory_of(name).join(name)
    }

    /// Returns of what a pages file is put together, when parents have some of it.
    pub(super) fn parts(&self, name: &str) -> Option<&Parts> {
        self.flat.parts(name)
    }

    /// Returns the bytes of all bulk files.
    pub(super) fn bulk_bytes(&self) -> u64 {
        self.bulk.iter().map(|file| file.length).sum()
    }

    /// Returns the bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.bulk_bytes() + self.small.iter().map(|(_, length)| length).sum::<u64>()
    }
}

/// Whether a file goes into shards.
fn is_bulk(name: &str, length: u64) -> bool {
    matches!(classify(name), NameClass::Pages | NameClass::Device)
        || length > images_pack::FILE_BYTES_MAX
}

fn list(directory: &Path) -> Result<BTreeMap<String, Stamp>, DumpErrorKind> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let metadata = entry.metadata()?;
        match classify(&name) {
            NameClass::Leftover => {}
            NameClass::Foreign if name == "parent" && metadata.is_symlink() => {}
            NameClass::Pages | NameClass::Device | NameClass::Image if metadata.is_file() => {
                let changed = (metadata.mtime(), metadata.mtime_nsec());
                files.insert(name, (metadata.ino(), metadata.size(), changed));
            }
            _ => return Err(DumpErrorKind::Foreign(name)),
        }
    }
    Ok(files)
}

pub(super) fn open(
    directory: &Path,
    name: &str,
    magic: Magic,
) -> Result<ImageReader<BufReader<fs::File>>, DumpErrorKind> {
    let file = fs::File::open(directory.join(name))?;
    Ok(ImageReader::new(BufReader::new(file), magic)?)
}

fn read_inventory(directory: &Path) -> Result<(), DumpErrorKind> {
    let mut reader = open(directory, "inventory.img", Magic::INVENTORY)?;
    match reader.next_message::<Inventory>()? {
        Some(inventory) if (1..=2).contains(&inventory.img_version) => Ok(()),
        _ => Err(DumpErrorKind::Missing("an inventory of image version 1 or 2".to_owned())),
    }
}

fn read_processes(
    directory: &Path,
    files: &BTreeMap<String, u64>,
) -> Result<(u32, u32), DumpErrorKind> {
    let mut reader = open(directory, "pstree.img", Magic::PSTREE)?;
    let (mut processes, mut threads) = (0_u32, 0_u64);
    while let Some(process) = reader.next_message::<Process>()? {
        let core = format!("core-{}.img", process.pid);
        if !files.contains_key(&core) {
            return Err(DumpErrorKind::Missing(core));
        }
        processes += 1;
        threads += u64::try_from(process.threads.len()).unwrap_or(u64::MAX).max(1);
        if threads > THREADS_MAX {
            return Err(DumpErrorKind::TooMany("threads"));
        }
    }
    if processes == 0 {
        return Err(DumpErrorKind::Missing("a process".to_owned()));
    }
    Ok((processes, u32::try_from(threads).unwrap_or(u32::MAX)))
}

/// What one pagemap says of its pages file.
struct Pagemap {
    pages_id: u32,
    bytes: u64,
    /// Bytes of the file: what is beyond is not cut into pieces.
    limit: u64,
    pieces: Vec<Piece>,
}

/// Returns the mappings of a pagemap's memory that get shards of their own, by address.
fn own_mappings(
    directory: &Path,
    flat: &Flat,
    name: &str,
) -> Result<Vec<(u64, u64)>, DumpErrorKind> {
    let place = flat.directory_of(name).unwrap_or(directory);
    match process_id(name, "pagemap") {
        Some(pid) => large_mappings(directory, pid),
        // Shared memory is one mapping, from address 0 of its own.
        None if extent(place, name)? >= OWN_SHARD_BYTES => Ok(vec![(0, u64::MAX)]),
        None => Ok(Vec::new()),
    }
}

fn read_pagemap(
    directory: &Path,
    name: &str,
    files: &BTreeMap<String, u64>,
    mappings: &[(u64, u64)],
    shard_bytes: u64,
) -> Result<Pagemap, DumpErrorKind> {
    let mut reader = open(directory, name, Magic::PAGEMAP)?;
    let head: PagemapHead =
        reader.next_message()?.ok_or_else(|| DumpErrorKind::Missing("its head".to_owned()))?;
    let pages_id = head.pages_id;
    let limit = files.get(&format!("pages-{pages_id}.img")).copied().unwrap_or(0);
    let mut map = Pagemap { pages_id, bytes: 0, limit, pieces: Vec::new() };
    while let Some(entry) = reader.next_message::<PagemapEntry>()? {
        if entry.is_in_parent() {
            return Err(DumpErrorKind::Incremental);
        }
        if entry.is_present() {
            map.push(&entry, mappings, shard_bytes)?;
        }
    }
    Ok(map)
}

/// Returns the first address after all pages of a pagemap.
fn extent(directory: &Path, name: &str) -> Result<u64, DumpErrorKind> {
    let mut reader = open(directory, name, Magic::PAGEMAP)?;
    let _head: Option<PagemapHead> = reader.next_message()?;
    let mut extent = 0;
    while let Some(entry) = reader.next_message::<PagemapEntry>()? {
        let length = entry.page_count().saturating_mul(PAGE_BYTES);
        extent = extent.max(entry.address.saturating_add(length));
    }
    Ok(extent)
}

impl Pagemap {
    /// Cuts an entry where a shard of its mapping ends.
    fn push(
        &mut self,
        entry: &PagemapEntry,
        mappings: &[(u64, u64)],
        shard_bytes: u64,
    ) -> Result<(), DumpErrorKind> {
        let length = entry.page_count().checked_mul(PAGE_BYTES);
        let end = length.and_then(|length| entry.address.checked_add(length));
        let end = end.ok_or(DumpErrorKind::TooMany("pages"))?;
        let after = self.bytes.checked_add(end - entry.address);
        let after = after.ok_or(DumpErrorKind::TooMany("pages"))?;
        if after > self.limit {
            // Told as a whole when all of it is known.
            self.bytes = after;
            return Ok(());
        }
        let mut address = entry.address;
        while address < end {
            let (next, own) = match mapping_at(mappings, address) {
                Some((start, mapping_end)) => {
                    let number = (address - start) / shard_bytes;
                    let cut = start.saturating_add((number + 1).saturating_mul(shard_bytes));
                    let own = OwnShard { mapping: start, number };
                    (end.min(cut).min(mapping_end), Some(own))
                }
                None => (end.min(next_mapping(mappings, address)), None),
            };
            self.bytes += next - address;
            match self.pieces.last_mut() {
                Some(last) if last.own == own => last.end = self.bytes,
                _ => self.pieces.push(Piece { end: self.bytes, own }),
            }
            address = next;
        }
        Ok(())
    }
}

pub(super) fn memory(directory: &Path, pid: u32) -> Result<Memory, DumpErrorKind> {
    let mut reader = open(directory, &format!("mm-{pid}.img"), Magic::MM)?;
    Ok(reader.next_message()?.unwrap_or_default())
}

/// Returns the mappings of a process that get shards of their own, by address.
fn large_mappings(directory: &Path, pid: u32) -> Result<Vec<(u64, u64)>, DumpErrorKind> {
    let memory = memory(directory, pid)?;
    let large = memory
        .mappings
        .iter()
        .filter(|mapping| mapping.end.saturating_sub(mapping.start) >= OWN_SHARD_BYTES);
    Ok(large.map(|mapping| (mapping.start, mapping.end)).collect())
}

fn mapping_at(mappings: &[(u64, u64)], address: u64) -> Option<(u64, u64)> {
    let after = mappings.partition_point(|(start, _)| *start <= address);
    let candidate = after.checked_sub(1).and_then(|index| mappings.get(index)).copied()?;
    (address < candidate.1).then_some(candidate)
}

fn next_mapping(mappings: &[(u64, u64)], address: u64) -> u64 {
    let after = mappings.partition_point(|(start, _)| *start <= address);
    mappings.get(after).map_or(u64::MAX, |(start, _)| *start)
}

/// A file without a pagemap is one piece: of its own when it is large. Device memory is cut by offset
/// and always on its own, so that equal weights have equal digests.
fn uncharted(name: &str, length: u64, shard_bytes: u64) -> Vec<Piece> {
    if classify(name) == NameClass::Device {
        let piece = |number: u64| {
            let end = length.min((number + 1).saturating_mul(shard_bytes));
            Piece { end, own: Some(OwnShard { mapping: 0, number }) }
        };
        return (0..length.div_ceil(shard_bytes)).map(piece).collect();
    }
    let own = (length >= OWN_SHARD_BYTES).then_some(OwnShard { mapping: 0, number: 0 });
    vec![Piece { end: length, own }]
}
