//! A pagemap read in order: which address each page of a pages file has, and back.

use std::fmt;
use std::io::BufReader;
use std::path::Path;

use fs_err as fs;

use crate::criu::{ImageError, ImageReader, Magic, PagemapEntry, PagemapHead};

const PAGE_BYTES: u64 = 4096;

/// What the pages of one file are the memory of, whatever the file is called: ids in CRIU's file
/// names change from dump to dump.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MemoryKey {
    /// A process, by its id in the innermost namespace.
    Process(u32),
    /// Shared memory, by its lowest mapper: a process and an address in it.
    Shared(u32, u64),
}

/// Walks one pagemap forwards. Both questions must be asked in ascending order; what is asked out
/// of order is not found, which costs bytes and nothing else.
pub(crate) struct PagemapWalk {
    reader: ImageReader<BufReader<fs::File>>,
    pages_id: Option<u32>,
    current: Stretch,
    ended: bool,
}

/// Consecutive pages of the pages file with consecutive addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stretch {
    /// Address of the first page.
    pub(crate) address: u64,
    /// Number of the first page in the pages file.
    pub(crate) first_page: u64,
    /// Number of pages.
    pub(crate) pages: u64,
}

impl PagemapWalk {
    /// Opens the pagemap `name` of a dump directory.
    pub(crate) fn open(directory: &Path, name: &str) -> Result<Self, ImageError> {
        let file = fs::File::open(directory.join(name))?;
        let mut reader = ImageReader::new(BufReader::new(file), Magic::PAGEMAP)?;
        let pages_id = reader.next_message::<PagemapHead>()?.map(|head| head.pages_id);
        let ended = pages_id.is_none();
        Ok(Self { reader, pages_id, current: Stretch::default(), ended })
    }

    /// Returns the number of the pages file, when the pagemap says one.
    pub(crate) const fn pages_id(&self) -> Option<u32> {
        self.pages_id
    }

    /// Goes on to the next stretch, for those who want them all.
    pub(crate) fn next_stretch(&mut self) -> Result<Option<Stretch>, ImageError> {
        if !self.ended {
            self.advance()?;
        }
        Ok((!self.ended).then_some(self.current))
    }

    /// Returns the address of a page of the file.
    pub(super) fn address_of(&mut self, page: u64) -> Result<Option<u64>, ImageError> {
        while !self.ended && page >= self.current.first_page + self.current.pages {
            self.advance()?;
        }
        let Stretch { address, first_page, pages } = self.current;
        let within = page.checked_sub(first_page).filter(|within| *within < pages);
        Ok(within.map(|within| address + within * PAGE_BYTES))
    }

    /// Returns the page of the file that holds an address.
    pub(super) fn page_of(&mut self, address: u64) -> Result<Option<u64>, ImageError> {
        while !self.ended && address >= self.current.end() {
            self.advance()?;
        }
        let Stretch { address: start, first_page, pages } = self.current;
        let within = address.checked_sub(start).map(|bytes| bytes / PAGE_BYTES);
        Ok(within.filter(|within| *within < pages).map(|within| first_page + within))
    }

    fn advance(&mut self) -> Result<(), ImageError> {
        let next = self.current.first_page + self.current.pages;
        while let Some(entry) = self.reader.next_message::<PagemapEntry>()? {
            if !entry.is_present() {
                continue;
            }
            let pages = entry.page_count();
            let length = pages.checked_mul(PAGE_BYTES);
            let fits = entry.address.is_multiple_of(PAGE_BYTES)
                && length.is_some_and(|length| entry.address.checked_add(length).is_some());
            // CRIU writes them in ascending order. Anything else must not match a page twice.
            if !fits || entry.address < self.current.end() || next.checked_add(pages).is_none() {
                break;
            }
            self.current = Stretch { address: entry.address, first_page: next, pages };
            return Ok(());
        }
        self.ended = true;
        self.current = Stretch { first_page: next, ..Stretch::default() };
        Ok(())
    }
}

impl Stretch {
    const fn end(&self) -> u64 {
        self.address + self.pages * PAGE_BYTES
    }
}

impl fmt::Debug for PagemapWalk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagemapWalk").field("current", &self.current).finish_non_exhaustive()
    }
}
