//! CRIU's own increments. The pages files of a dump whose `parent` link leads to an earlier one hold
//! only what has changed since (`--track-mem`, pre-dumps). Here all of them become what one full dump
//! would have been: pagemaps that have everything themselves, and for each pages file a list of which
//! stretch of it lies in which directory. No page is copied for that.
//!
//! It is read as CRIU reads it (`criu/pagemap.c`): behind `pagemap-X.img` is the file of the same name
//! in the directory that `parent` leads to; the chain ends where there is none. What an entry says to
//! be in the parent is looked for there by its address, however the parent's entries are cut.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use prost::Message as _;
use rustix::io::Errno;

use super::dump::{DumpError, DumpErrorKind, open};
use crate::criu::{self, ImageReader, Magic, PagemapEntry, PagemapHead};

const PAGE_BYTES: u64 = 4096;

/// Longest chain of parents. CRIU has no limit; each restore from a chain opens all of it.
const PARENTS_MAX: usize = 128;

/// What became of the pagemaps of a dump that has parents. Empty for all others.
#[derive(Debug, Default)]
pub(super) struct Flat {
    /// Where the pagemaps are that were written anew.
    directory: PathBuf,
    pagemaps: BTreeSet<String>,
    pages: BTreeMap<String, Parts>,
}

/// A pages file, put together.
#[derive(Debug)]
pub(super) struct Parts {
    /// The dump's own file and its parents'.
    files: Vec<PathBuf>,
    extents: Arc<[Extent]>,
}

/// Consecutive pages of the whole that are consecutive in one of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    /// First page of the whole that comes after.
    end: u32,
    /// First page in the file.
    first: u32,
    file: u16,
}

/// An open pages file that is put together.
#[derive(Debug)]
pub(super) struct OpenParts {
    files: Vec<fs::File>,
    extents: Arc<[Extent]>,
}

impl Flat {
    /// Follows the parents of a dump. What has to be written is written into `scratch`.
    pub(super) fn of<'a>(
        dump: &Path,
        pagemaps: impl Iterator<Item = &'a str>,
        scratch: &Path,
    ) -> Result<Self, DumpError> {
        let chain = chain(dump)?;
        if chain.len() < 2 {
            return Ok(Self::default());
        }
        let mut flat = Self { directory: scratch.join("flat"), ..Self::default() };
        let made = fs::create_dir(&flat.directory);
        made.map_err(|error| DumpError { path: flat.directory.clone(), kind: error.into() })?;
        for name in pagemaps {
            let needs = needs_parent(dump, name);
            let needs = needs.map_err(|kind| DumpError { path: dump.join(name), kind })?;
            if needs {
                let (pages, parts) = flatten(&chain, name, &flat.directory.join(name))?;
                flat.pagemaps.insert(name.to_owned());
                flat.pages.insert(pages, parts);
            }
        }
        Ok(flat)
    }

    /// Returns the files that are put together, with their bytes.
    pub(super) fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.pages.iter().map(|(name, parts)| (&**name, parts.bytes()))
    }

    /// Returns where a pagemap is that was written anew.
    pub(super) fn directory_of(&self, name: &str) -> Option<&Path> {
        self.pagemaps.contains(name).then_some(&self.directory)
    }

    /// Returns of what a pages file is put together.
    pub(super) fn parts(&self, name: &str) -> Option<&Parts> {
        self.pages.get(name)
    }
}

impl Parts {
    fn bytes(&self) -> u64 {
        self.extents.last().map_or(0, |last| u64::from(last.end) * PAGE_BYTES)
    }

    pub(super) fn open(&self) -> io::Result<OpenParts> {
        let files = self.files.iter().map(fs::File::open).collect::<Result<_, _>>()?;
        Ok(OpenParts { files, extents: Arc::clone(&self.extents) })
    }
}

impl OpenParts {
    /// Fills `buffer` from `offset` on; fails where the whole ends before.
    pub(super) fn read_exact_at(&self, buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        let mut rest = buffer;
        while !rest.is_empty() {
            let end = |extent: &Extent| u64::from(extent.end) * PAGE_BYTES;
            let at = self.extents.partition_point(|extent| end(extent) <= offset);
            let extent = self.extents.get(at).ok_or(io::ErrorKind::UnexpectedEof)?;
            let begin =
                at.checked_sub(1).and_then(|before| self.extents.get(before)).map_or(0, end);
            let left = usize::try_from(end(extent) - offset).unwrap_or(usize::MAX);
            let (part, after) = rest.split_at_mut(left.min(rest.len()));
            let file = self.files.get(usize::from(extent.file)).ok_or(io::ErrorKind::NotFound)?;
            let within = u64::from(extent.first) * PAGE_BYTES + (offset - begin);
            file.file().read_exact_at(part, within)?;
            offset += u64::try_from(part.len()).map_err(io::Error::other)?;
            rest = after;
        }
        Ok(())
    }
}

/// Returns the dump's directory and those of its parents, the nearest first.
///
/// A link in a dump that somebody else made must not lead to memory that was not given with it, so
/// every parent lies beneath the directory that holds the dump, whatever way the link takes there.
fn chain(dump: &Path) -> Result<Vec<PathBuf>, DumpError> {
    let wrong = |path: &Path, kind| DumpError { path: path.to_owned(), kind };
    let canonical = fs::canonicalize(dump).map_err(|error| wrong(dump, error.into()))?;
    let around = canonical.parent().unwrap_or(&canonical).to_owned();
    let mut chain = vec![canonical];
    while let Some(last) = chain.last() {
        let link = last.join("parent");
        match fs::symlink_metadata(&link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(wrong(&link, error.into())),
            Ok(metadata) if metadata.is_symlink() => {}
            Ok(_) => return Err(wrong(last, DumpErrorKind::Foreign("parent".to_owned()))),
        }
        let parent = follow(&link).map_err(|kind| wrong(&link, kind))?;
        if !parent.starts_with(&around) {
            return Err(wrong(&link, DumpErrorKind::ParentElsewhere { parent, around }));
        }
        if chain.contains(&parent) {
            return Err(wrong(&link, DumpErrorKind::ParentCircle));
        }
        if chain.len() > PARENTS_MAX {
            return Err(wrong(dump, DumpErrorKind::TooMany("parents")));
        }
        chain.push(parent);
    }
    Ok(chain)
}

/// Returns where a link leads, when there is something.
fn follow(link: &Path) -> Result<PathBuf, DumpErrorKind> {
    match rustix::fs::stat(link) {
        Ok(_) => Ok(fs::canonicalize(link)?),
        Err(Errno::NOENT) => Err(DumpErrorKind::ParentMissing),
        Err(Errno::LOOP) => Err(DumpErrorKind::ParentCircle),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// Whether pages of a pagemap are in the parent.
fn needs_parent(dump: &Path, name: &str) -> Result<bool, DumpErrorKind> {
    let mut reader = open(dump, name, Magic::PAGEMAP)?;
    let _head: Option<PagemapHead> = reader.next_message()?;
    while let Some(entry) = reader.next_message::<PagemapEntry>()? {
        if entry.is_in_parent() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes the pagemap `name` anew, as one without parents; returns the name of its pages file, and
/// what that is put together of.
fn flatten(chain: &[PathBuf], name: &str, out: &Path) -> Result<(String, Parts), DumpError> {
    let mut levels = Vec::new();
    for directory in chain {
        match Level::open(directory, name)? {
            Some(level) => levels.push(level),
            None => break,
        }
    }
    let path = || chain.first().map_or_else(PathBuf::new, |directory| directory.join(name));
    let missing =
        || DumpError { path: path(), kind: DumpErrorKind::Missing("the pagemap".to_owned()) };
    let written = |error: io::Error| DumpError { path: out.to_owned(), kind: error.into() };
    let head = levels.first().ok_or_else(missing)?.head;
    let mut image = BufWriter::new(fs::File::create_new(out).map_err(written)?);
    criu::write_magic(&mut image, Magic::PAGEMAP).map_err(written)?;
    criu::write_record(&mut image, &head.encode_to_vec()).map_err(written)?;
    let mut extents = Vec::new();
    while let Some(entry) = levels.first_mut().ok_or_else(missing)?.advance()? {
        let message = if entry.message.is_in_parent() {
            find(&mut levels, 1, (entry.message.address, entry.end), &mut extents)?;
            entry.message.in_its_own()
        } else {
            if entry.message.is_present() {
                let pushed = push(&mut extents, 0, entry.first, entry.message.page_count());
                pushed.map_err(|kind| DumpError { path: path(), kind })?;
            }
            entry.message
        };
        criu::write_record(&mut image, &message.encode_to_vec()).map_err(written)?;
    }
    image.flush().map_err(written)?;
    for level in &mut levels {
        level.check()?;
    }
    let files = levels.into_iter().map(|level| level.pages).collect();
    Ok((format!("pages-{}.img", head.pages_id), Parts { files, extents: extents.into() }))
}

/// Finds the pages of some addresses at a level of the chain, or behind it. Asked for in ascending
/// order.
fn find(
    levels: &mut [Level],
    depth: u16,
    (mut address, end): (u64, u64),
    extents: &mut Vec<Extent>,
) -> Result<(), DumpError> {
    while address < end {
        let Some(level) = levels.get_mut(usize::from(depth)) else {
            let path = levels.last().map_or_else(PathBuf::new, |last| last.pagemap.clone());
            return Err(DumpError { path, kind: DumpErrorKind::NotInParents(address) });
        };
        let entry = level.seek(address)?;
        let stop = end.min(entry.end);
        if entry.message.is_in_parent() {
            find(levels, depth + 1, (address, stop), extents)?;
        } else if entry.message.is_present() {
            let first = entry.first + (address - entry.message.address) / PAGE_BYTES;
            let pages = (stop - address) / PAGE_BYTES;
            push(extents, depth, first, pages).map_err(|kind| level.wrong(kind))?;
        } else {
            return Err(level.wrong(DumpErrorKind::NotInParents(address)));
        }
        address = stop;
    }
    Ok(())
}

/// Adds pages to a whole.
fn push(extents: &mut Vec<Extent>, file: u16, first: u64, pages: u64) -> Result<(), DumpErrorKind> {
    let too_many = |_too_large| DumpErrorKind::TooMany("pages");
    let begin = extents.last().map_or(0, |last| last.end);
    let end = u32::try_from(u64::from(begin).saturating_add(pages)).map_err(too_many)?;
    let first = u32::try_from(first).map_err(too_many)?;
    let before = extents.iter().rev().nth(1).map_or(0, |extent| extent.end);
    match extents.last_mut() {
        Some(last)
            if last.file == file && last.first.checked_add(begin - before) == Some(first) =>
        {
            last.end = end;
        }
        _ if pages == 0 => {}
        _ => extents.push(Extent { end, first, file }),
    }
    Ok(())
}

/// One pagemap of a chain, read forwards.
struct Level {
    pagemap: PathBuf,
    pages: PathBuf,
    reader: ImageReader<BufReader<fs::File>>,
    head: PagemapHead,
    current: Option<Entry>,
    /// First address after all entries so far.
    end: u64,
    /// Pages in the pages file before the next entry's.
    stored: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    message: PagemapEntry,
    /// First address after it.
    end: u64,
    /// Number of its first page in the pages file.
    first: u64,
}

impl Level {
    /// Opens a pagemap; `None` where there is none of that name.
    fn open(directory: &Path, name: &str) -> Result<Option<Self>, DumpError> {
        let pagemap = directory.join(name);
        let wrong = |kind| DumpError { path: pagemap.clone(), kind };
        match fs::symlink_metadata(&pagemap) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(wrong(error.into())),
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(wrong(DumpErrorKind::Foreign(name.to_owned()))),
        }
        let mut reader = open(directory, name, Magic::PAGEMAP).map_err(wrong)?;
        let head = reader.next_message::<PagemapHead>().map_err(|error| wrong(error.into()))?;
        let head = head.ok_or_else(|| wrong(DumpErrorKind::Missing("its head".to_owned())))?;
        let pages = directory.join(format!("pages-{}.img", head.pages_id));
        Ok(Some(Self { pagemap, pages, reader, head, current: None, end: 0, stored: 0 }))
    }

    fn wrong(&self, kind: DumpErrorKind) -> DumpError {
        DumpError { path: self.pagemap.clone(), kind }
    }

    fn advance(&mut self) -> Result<Option<Entry>, DumpError> {
        let next = self.reader.next_message::<PagemapEntry>();
        let Some(message) = next.map_err(|error| self.wrong(error.into()))? else {
            self.current = None;
            return Ok(None);
        };
        let length = message.page_count().checked_mul(PAGE_BYTES);
        let end = length
            .and_then(|length| message.address.checked_add(length))
            .filter(|_| message.address >= self.end && message.address.is_multiple_of(PAGE_BYTES));
        let end = end.ok_or_else(|| self.wrong(DumpErrorKind::Disordered(message.address)))?;
        let first = self.stored;
        if message.is_present() {
            let stored = self.stored.checked_add(message.page_count());
            self.stored = stored.ok_or_else(|| self.wrong(DumpErrorKind::TooMany("pages")))?;
        }
        self.end = end;
        self.current = Some(Entry { message, end, first });
        Ok(self.current)
    }

    /// Goes on to the entry that has an address.
    fn seek(&mut self, address: u64) -> Result<Entry, DumpError> {
        let mut current = self.current;
        while current.is_none_or(|entry| entry.end <= address) {
            current = self.advance()?;
            if current.is_none() {
                break;
            }
        }
        let found = current.filter(|entry| entry.message.address <= address);
        found.ok_or_else(|| self.wrong(DumpErrorKind::NotInParents(address)))
    }

    /// Reads to the end, and checks that the pages file is what the pagemap says.
    fn check(&mut self) -> Result<(), DumpError> {
        while self.advance()?.is_some() {}
        let expected = self.stored.saturating_mul(PAGE_BYTES);
        let wrong = |kind| DumpError { path: self.pages.clone(), kind };
        let actual = match fs::symlink_metadata(&self.pages) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(_) => return Err(wrong(DumpErrorKind::Foreign("a link".to_owned()))),
            Err(error) => return Err(wrong(error.into())),
        };
        if actual == expected {
            return Ok(());
        }
        let name = self.pagemap.file_name().unwrap_or_default();
        let pagemap = name.to_string_lossy().into_owned();
        Err(wrong(DumpErrorKind::Truncated { pagemap, expected, actual }))
    }
}
