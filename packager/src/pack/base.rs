//! An earlier checkpoint of the same container: which of its pages are where, by what they are the
//! memory of.
//!
//! A page that is found unchanged is not stored again; the new page index points at the base's shard.
//! Looking in the wrong place costs bytes and nothing else: what is compared is the content.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fs_err as fs;
use kybernate_spec::page_index::{
    Chunk, Cursor, Header, PAGE_BYTES, PAGES_PER_SEGMENT, Place, Reader, Record, Run,
    index_bytes_max,
};
use kybernate_spec::{Descriptor, Digest, Reason};

use super::PackError;
use super::dump::{BulkFile, Dump};
use super::memory_keys::memory_keys;
use super::pagemap::{MemoryKey, PagemapWalk};
use crate::artifact::Checkpoint;
use crate::criu::{ImageReader, Magic, PagemapHead};
use crate::progress::Progress;
use crate::store::Store;
use crate::unpack::{UnpackError, unpack_memory_images};
use crate::wanted::{self, Wanted};

/// Bytes of a page's hash: the first half of BLAKE3's 32.
pub(crate) const PAGE_HASH_BYTES: usize = 16;

/// A page's hash.
pub(crate) type PageHash = [u8; PAGE_HASH_BYTES];

/// An earlier checkpoint of the same container. Whoever asks for it has verified that it can be
/// trusted as much as the new one: where only its page hashes are compared, its shards are taken
/// at their word.
#[derive(Clone, Debug)]
pub struct Base {
    /// Where it is.
    pub store: Store,
    /// What it is.
    pub checkpoint: Checkpoint,
}

/// A base whose indexes are at hand.
#[derive(Debug)]
pub(super) struct OpenBase {
    pub(super) digest: Digest,
    pub(super) generation: u32,
    pub(super) store: Store,
    pub(super) shards: Vec<Descriptor>,
    pub(super) tables: Vec<Vec<Chunk>>,
    directory: PathBuf,
    index: PathBuf,
    header: Header,
    shard_pages: Vec<u32>,
    files: BTreeMap<MemoryKey, KnownFile>,
    /// Page hashes, when the pages themselves are not on this machine.
    hashes: Option<PathBuf>,
    /// Shards that are gone or damaged: no new checkpoint may list them. Held for a look only.
    unfit: Mutex<BTreeSet<u16>>,
}

/// A pages file of the base.
#[derive(Clone, Debug)]
struct KnownFile {
    pagemap: String,
    /// Where its segments begin in the page index.
    cursor: Cursor,
    /// Pages stored before its first: where its hashes begin.
    stored_before: u64,
}

/// A page of the base that has the address of a new one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) place: Place,
    /// Its hash, when its content is not on this machine.
    pub(super) hash: Option<PageHash>,
}

/// Finds the pages of one new file in the base.
#[derive(Debug)]
pub(super) struct Lookup {
    addresses: PagemapWalk,
    known: PagemapWalk,
    reader: Reader<BufReader<fs::File>>,
    /// Segments read so far; the last of them is at hand.
    segments: u64,
    runs: Vec<Run>,
    /// Pages stored before the segment at hand, and in it.
    stored: (u64, u64),
    hashes: Option<Hashes>,
}

/// The hashes of the segment at hand.
#[derive(Debug)]
struct Hashes {
    file: fs::File,
    content: Vec<u8>,
    fresh: bool,
}

impl OpenBase {
    /// Fetches everything but the pages.
    pub(super) async fn open(
        base: &Base,
        scratch: &Path,
        progress: &Progress,
    ) -> Result<Self, PackError> {
        let wrong = |kind| PackError::Io("make a directory for the base", kind);
        let directory = scratch.join("base");
        fs::create_dir(&directory).map_err(wrong)?;
        let checkpoint = &base.checkpoint;
        if checkpoint.page_index.size > index_bytes_max(checkpoint.config.sizes.bulk_bytes) {
            let text = "its page index is larger than its files allow".to_owned();
            let error = UnpackError::Contradiction(Reason::IndexTooLarge, text);
            return Err(PackError::Base(Box::new(error)));
        }
        let hashes = match (&base.store, &checkpoint.page_hashes) {
            (Store::Layout(_), _) => None,
            (Store::Registry(_), Some(layer)) => {
                let path = scratch.join("base-hashes");
                fetch(&base.store, layer, &path).await?;
                Some(path)
            }
            (Store::Registry(_), None) => return Err(PackError::NoPageHashes),
        };
        let index = scratch.join("base-index");
        fetch(&base.store, &checkpoint.page_index, &index).await?;
        unpack_memory_images(&base.store, checkpoint, &directory, progress)
            .await
            .map_err(|error| PackError::Base(Box::new(error)))?;
        let opened = Self {
            digest: checkpoint.stored.descriptor.digest.clone(),
            generation: checkpoint.config.lineage.generation,
            store: base.store.clone(),
            shards: checkpoint.shards.clone(),
            tables: Vec::new(),
            directory,
            index,
            header: Header { hash: super::CHUNK_HASH, shards: 0, files: 0 },
            shard_pages: Vec::new(),
            files: BTreeMap::new(),
            hashes,
            unfit: Mutex::default(),
        };
        let scanned = wanted::blocking(move |wanted| opened.scan(wanted)).await;
        scanned.map_err(|kind| PackError::Io("read the base", kind))
    }

    /// Reads the page index once and remembers where each file's segments begin.
    fn scan(mut self, wanted: &Wanted) -> io::Result<Self> {
        let pagemaps = pagemaps(&self.directory)?;
        let mut reader =
            Reader::new(BufReader::new(fs::File::open(&self.index)?)).map_err(other)?;
        self.header = *reader.header();
        if self.header.hash != super::CHUNK_HASH {
            return Err(other("its chunks are hashed otherwise than new ones"));
        }
        let mut stored = 0;
        while let Some(record) = reader.next_record().map_err(other)? {
            wanted.check()?;
            match record {
                Record::Shard(chunks) => self.tables.push(chunks),
                Record::File { name, .. } => {
                    if let Some((key, pagemap)) = pagemaps.get(&name) {
                        let (cursor, pagemap) = (reader.cursor(), pagemap.clone());
                        let known = KnownFile { pagemap, cursor, stored_before: stored };
                        self.files.insert(key.clone(), known);
                    }
                }
                Record::Segment(runs) => stored += pages_of(&runs),
            }
        }
        self.shard_pages = reader.shard_pages().to_vec();
        let sizes = self.shard_pages.iter().map(|pages| u64::from(*pages) * u64::from(PAGE_BYTES));
        if !sizes.eq(self.shards.iter().map(|shard| shard.size)) {
            return Err(other("its page index and its manifest list different shards"));
        }
        if let Some(hashes) = &self.hashes {
            let width = u64::try_from(PAGE_HASH_BYTES).map_err(other)?;
            if fs::metadata(hashes)?.len() != stored * width {
                return Err(other("its page hashes are not one for each page"));
            }
        }
        Ok(self)
    }

    /// Whether pages are compared by their hashes.
    pub(super) const fn is_remote(&self) -> bool {
        self.hashes.is_some()
    }

    /// Notes that a shard is not what it should be.
    pub(super) fn give_up(&self, shard: u16) {
        let first = self.unfit.lock().unwrap_or_else(PoisonError::into_inner).insert(shard);
        if let Some(shard) = self.shards.get(usize::from(shard)).filter(|_| first) {
            let shard = &shard.digest;
            tracing::warn!(%shard, "gone or damaged in the base: its pages are stored again");
        }
    }

    /// Whether a shard was given up.
    pub(super) fn is_given_up(&self, shard: u16) -> bool {
        self.unfit.lock().unwrap_or_else(PoisonError::into_inner).contains(&shard)
    }

    /// Whether a blob is one of the shards that were given up: what is stored under its digest is
    /// not to be relied upon.
    pub(super) fn has_given_up(&self, digest: &Digest) -> bool {
        let unfit = self.unfit.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shards = unfit.iter().filter_map(|number| self.shards.get(usize::from(*number)));
        shards.any(|shard| shard.digest == *digest)
    }

    /// Prepares to find the pages of a new file; `None` when the base has no such memory.
    pub(super) fn lookup(&self, dump: &Dump, file: &BulkFile) -> io::Result<Option<Lookup>> {
        let Some((key, pagemap)) = &file.memory else { return Ok(None) };
        let Some(known) = self.files.get(key) else { return Ok(None) };
        let mut index = fs::File::open(&self.index)?;
        index.seek(SeekFrom::Start(known.cursor.position()))?;
        let input = BufReader::new(index);
        let reader = Reader::resume(input, self.header, known.cursor, self.shard_pages.clone());
        let hashes = match &self.hashes {
            Some(path) => {
                let file = fs::File::open(path)?;
                Some(Hashes { file, content: Vec::new(), fresh: false })
            }
            None => None,
        };
        Ok(Some(Lookup {
            addresses: PagemapWalk::open(dump.directory_of(pagemap), pagemap).map_err(other)?,
            known: PagemapWalk::open(&self.directory, &known.pagemap).map_err(other)?,
            reader,
            segments: 0,
            runs: Vec::new(),
            stored: (known.stored_before, 0),
            hashes,
        }))
    }
}

impl Lookup {
    /// Returns what the base has at the addresses of a segment's pages, by their numbers in it.
    /// Segments are asked for in ascending order.
    pub(super) fn known(&mut self, segment: u64, pages: u16) -> io::Result<Vec<(u16, Known)>> {
        let first = segment * u64::from(PAGES_PER_SEGMENT);
        let mut all = Vec::with_capacity(usize::from(pages));
        for page in 0..pages {
            if let Some(known) = self.page(first + u64::from(page))? {
                all.push((page, known));
            }
        }
        Ok(all)
    }

    fn page(&mut self, page: u64) -> io::Result<Option<Known>> {
        let Some(address) = self.addresses.address_of(page).map_err(other)? else {
            return Ok(None);
        };
        let Some(known) = self.known.page_of(address).map_err(other)? else { return Ok(None) };
        let Some((place, ordinal)) = self.place(known)? else { return Ok(None) };
        let hash = match &mut self.hashes {
            Some(hashes) => hashes.of(ordinal, self.stored)?,
            None => None,
        };
        Ok(Some(Known { place, hash }))
    }

    /// Returns where a page of the base's file is stored, and its number among the segment's.
    fn place(&mut self, page: u64) -> io::Result<Option<(Place, u64)>> {
        let segment = page / u64::from(PAGES_PER_SEGMENT);
        while self.segments <= segment {
            let Some(Record::Segment(runs)) = self.reader.next_record().map_err(other)? else {
                return Ok(None);
            };
            self.segments += 1;
            let (before, within) = self.stored;
            self.stored = (before + within, pages_of(&runs));
            self.runs = runs;
            if let Some(hashes) = &mut self.hashes {
                hashes.fresh = false;
            }
        }
        if self.segments != segment + 1 {
            return Ok(None);
        }
        let wanted = u16::try_from(page % u64::from(PAGES_PER_SEGMENT)).map_err(other)?;
        let mut ordinal = 0;
        for run in &self.runs {
            match wanted.checked_sub(run.first) {
                Some(within) if within < run.pages => {
                    let stored = run.place.page.checked_add(within);
                    let place = stored.map(|page| Place { shard: run.place.shard, page });
                    return Ok(place.map(|place| (place, ordinal + u64::from(within))));
                }
                _ => ordinal += u64::from(run.pages),
            }
        }
        Ok(None)
    }
}

impl Hashes {
    fn of(&mut self, ordinal: u64, (before, pages): (u64, u64)) -> io::Result<Option<PageHash>> {
        if !self.fresh {
            let width = u64::try_from(PAGE_HASH_BYTES).map_err(other)?;
            self.content.resize(usize::try_from(pages * width).map_err(other)?, 0);
            self.file.file().read_exact_at(&mut self.content, before * width)?;
            self.fresh = true;
        }
        let ordinal = usize::try_from(ordinal).map_err(other)?;
        let mut all = self.content.chunks_exact(PAGE_HASH_BYTES);
        Ok(all.nth(ordinal).and_then(|hash| hash.try_into().ok()))
    }
}

/// Returns the hash of a page.
pub(crate) fn page_hash(content: &[u8]) -> PageHash {
    let hash: [u8; 32] = blake3::hash(content).into();
    let mut half = [0; PAGE_HASH_BYTES];
    half.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
    half
}

fn pages_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

/// Returns the key and the pagemap of each pages file that a directory of images describes.
fn pagemaps(directory: &Path) -> io::Result<BTreeMap<String, (MemoryKey, String)>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let keys = memory_keys(directory, names.iter().map(String::as_str)).map_err(other)?;
    let mut found = BTreeMap::new();
    for (pagemap, key) in keys {
        let file = BufReader::new(fs::File::open(directory.join(&pagemap))?);
        let mut reader = ImageReader::new(file, Magic::PAGEMAP).map_err(other)?;
        if let Some(head) = reader.next_message::<PagemapHead>().map_err(other)? {
            found.insert(format!("pages-{}.img", head.pages_id), (key, pagemap));
        }
    }
    Ok(found)
}

/// Writes a blob, checked, to a new file.
async fn fetch(store: &Store, blob: &Descriptor, path: &Path) -> Result<(), PackError> {
    let stream = store.blob(blob).await?;
    // To its end: there it is compared with its digest, and more than its size is refused before.
    let path = path.to_owned();
    let copied = wanted::blocking(move |wanted| {
        io::copy(&mut wanted.stream(stream), &mut fs::File::create_new(path)?)?;
        Ok(())
    });
    copied.await.map_err(|kind| PackError::Io("fetch the base", kind))
}

fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(error)
}
