//! Which page goes to which shard.
//!
//! Others look through the bulk files ([`super::seen`]); here every page's place is decided, in
//! order, and each shard is handed on when it is full. What is handed on are stretches of the files, at most
//! 65,536 pages of them, so that memory does not grow with the dump.

use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use fs_err as fs;
use kybernate_spec::media_type;
use kybernate_spec::page_index::{
    self, PAGE_BYTES, PAGES_PER_SEGMENT, Place, Run, SEGMENT_BYTES, SHARDS_MAX,
};

use super::base::{Lookup, OpenBase};
use super::dump::{BulkFile, Dump, OwnShard, Piece};
use super::local::LocalPages;
use super::parents::OpenParts;
use super::seen::{Lookers, Looking, Seen, Segment};
use crate::wanted::Wanted;

/// An open bulk file.
#[derive(Debug)]
pub(super) struct OpenFile {
    content: Content,
    length: u64,
}

#[derive(Debug)]
enum Content {
    /// All in one file.
    Whole(fs::File),
    /// In the dump's file and in those of its parents.
    Parts(OpenParts),
}

/// Consecutive pages of a bulk file that are consecutive in a shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    file: u32,
    first_page: u32,
    pages: u32,
}

/// One shard: which pages of which files it holds.
#[derive(Debug)]
pub(super) struct ShardPlan {
    /// Its place in the manifest.
    pub(super) number: u16,
    /// Of pages, or of device memory: never of both.
    pub(super) media_type: &'static str,
    stretches: Vec<Stretch>,
    pages: u32,
}

/// Reads the files of a dump and places their pages.
#[derive(Debug)]
pub(super) struct Planner<'a> {
    dump: &'a Dump,
    files: &'a [Arc<OpenFile>],
    shard_pages: u32,
    shared: Option<ShardPlan>,
    own: Option<(OwnShard, ShardPlan)>,
    shards: u32,
    base: Option<&'a OpenBase>,
    /// Pages of each of the base's shards that are used again.
    used: Vec<u32>,
    /// Where the hash of every stored page is written.
    hashes: Option<io::BufWriter<fs::File>>,
}

/// What became of all pages.
#[derive(Debug)]
pub(super) struct Planned {
    /// Number of shards, the base's first: all of them, also those that are not used.
    pub(super) shards: u32,
    /// Pages of each of the base's shards that are used again.
    pub(super) used: Vec<u32>,
}

/// Opens the bulk files of a dump.
pub(super) fn open_files(dump: &Dump) -> io::Result<Vec<Arc<OpenFile>>> {
    let open = |bulk: &BulkFile| {
        let content = match dump.parts(&bulk.name) {
            Some(parts) => Content::Parts(parts.open()?),
            None => Content::Whole(fs::File::open(dump.path(&bulk.name))?),
        };
        Ok(Arc::new(OpenFile { content, length: bulk.length }))
    };
    dump.bulk.iter().map(open).collect()
}

impl OpenFile {
    /// Fills `buffer` from `offset`. The rest of the file's last page reads as zeros.
    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let available = self.length.saturating_sub(offset);
        let wanted = u64::try_from(buffer.len()).map_err(io::Error::other)?.min(available);
        let (content, padding) =
            buffer.split_at_mut(usize::try_from(wanted).map_err(io::Error::other)?);
        match &self.content {
            Content::Whole(file) => file.file().read_exact_at(content, offset)?,
            Content::Parts(parts) => parts.read_exact_at(content, offset)?,
        }
        padding.fill(0);
        Ok(())
    }
}

/// One file while its pages are placed, in order.
#[derive(Debug)]
struct FileWalk<'a> {
    number: u32,
    file: &'a Arc<OpenFile>,
    length: u64,
    media_type: &'static str,
    /// Pieces that are not behind us.
    pieces: &'a [Piece],
    lookup: Option<Lookup>,
}

impl FileWalk<'_> {
    /// Pages of a segment, with the rest of the file's last one.
    fn pages(&self, segment: u64) -> u16 {
        let left = self.length - segment * u64::from(SEGMENT_BYTES);
        let pages = left.min(u64::from(SEGMENT_BYTES)).div_ceil(u64::from(PAGE_BYTES));
        u16::try_from(pages).unwrap_or(PAGES_PER_SEGMENT)
    }

    /// Returns what is to be looked through; asked for in ascending order.
    fn segment(&mut self, number: u64) -> io::Result<Segment> {
        let pages = self.pages(number);
        let known = match &mut self.lookup {
            Some(lookup) => lookup.known(number, pages)?,
            None => Vec::new(),
        };
        let offset = number * u64::from(SEGMENT_BYTES);
        Ok(Segment { file: Arc::clone(self.file), offset, pages, known })
    }

    fn own_shard(&mut self, page: u32) -> Option<OwnShard> {
        let offset = u64::from(page) * u64::from(PAGE_BYTES);
        while let [piece, rest @ ..] = self.pieces
            && offset >= piece.end
        {
            self.pieces = rest;
        }
        self.pieces.first().and_then(|piece| piece.own)
    }
}

impl ShardPlan {
    const fn new(number: u16, media_type: &'static str) -> Self {
        Self { number, media_type, stretches: Vec::new(), pages: 0 }
    }

    /// Returns the bytes of the shard.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.pages) * u64::from(PAGE_BYTES)
    }

    /// Fills `buffer` from any byte of the shard on; fails where the shard ends before.
    pub(super) fn read_at(
        &self,
        files: &[Arc<OpenFile>],
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let page_bytes = u64::from(PAGE_BYTES);
        let (mut skip, mut rest) = (offset, buffer);
        for stretch in &self.stretches {
            if rest.is_empty() {
                break;
            }
            let bytes = u64::from(stretch.pages) * page_bytes;
            if skip >= bytes {
                skip -= bytes;
                continue;
            }
            let wanted = u64::try_from(rest.len()).map_err(io::Error::other)?;
            let length = wanted.min(bytes - skip);
            let (part, after) =
                rest.split_at_mut(usize::try_from(length).map_err(io::Error::other)?);
            let file = usize::try_from(stretch.file).ok().and_then(|file| files.get(file));
            let file = file.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            file.read_at(part, u64::from(stretch.first_page) * page_bytes + skip)?;
            rest = after;
            skip = 0;
        }
        if rest.is_empty() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn push(&mut self, file: u32, page: u32) -> Option<u16> {
        let place = u16::try_from(self.pages).ok()?;
        match self.stretches.last_mut() {
            Some(last) if last.file == file && last.first_page + last.pages == page => {
                last.pages += 1;
            }
            _ => self.stretches.push(Stretch { file, first_page: page, pages: 1 }),
        }
        self.pages += 1;
        Some(place)
    }
}

impl<'a> Planner<'a> {
    /// `base` is where pages are looked for first; `hashes` is where the hash of every stored page
    /// goes.
    pub(super) fn new(
        dump: &'a Dump,
        files: &'a [Arc<OpenFile>],
        shard_bytes: u64,
        base: Option<&'a OpenBase>,
        hashes: Option<fs::File>,
    ) -> io::Result<Self> {
        let shard_pages = u32::try_from(shard_bytes / u64::from(PAGE_BYTES)).unwrap_or(1);
        let known = base.map_or(0, |base| base.shards.len());
        Ok(Self {
            dump,
            files,
            shard_pages,
            shared: None,
            own: None,
            shards: u32::try_from(known).map_err(io::Error::other)?,
            base,
            used: vec![0; known],
            hashes: hashes.map(io::BufWriter::new),
        })
    }

    /// Reads everything once, writes each file's records to `index` and hands full shards to
    /// `emit`.
    pub(super) fn run(
        mut self,
        index: &mut impl Write,
        wanted: &Wanted,
        mut emit: impl FnMut(ShardPlan) -> io::Result<()>,
    ) -> io::Result<Planned> {
        let looking = Looking {
            local: self.base.and_then(LocalPages::of),
            hashes: self.hashes.is_some() || self.base.is_some_and(OpenBase::is_remote),
        };
        std::thread::scope(|scope| {
            let mut lookers = Lookers::start(scope, &looking);
            for (number, (file, bulk)) in self.files.iter().zip(&self.dump.bulk).enumerate() {
                let number = u32::try_from(number).map_err(io::Error::other)?;
                page_index::write_file(index, &bulk.name, bulk.length)?;
                if let Some((_, plan)) = self.own.take() {
                    emit(plan)?;
                }
                let walk = self.begin_file(number, file, bulk)?;
                self.place_file(walk, &mut lookers, index, wanted, &mut emit)?;
            }
            Ok::<_, io::Error>(())
        })?;
        for plan in
            [self.own.take().map(|(_, plan)| plan), self.shared.take()].into_iter().flatten()
        {
            emit(plan)?;
        }
        if let Some(mut hashes) = self.hashes {
            hashes.flush()?;
        }
        Ok(Planned { shards: self.shards, used: self.used })
    }

    fn begin_file(
        &self,
        number: u32,
        file: &'a Arc<OpenFile>,
        bulk: &'a BulkFile,
    ) -> io::Result<FileWalk<'a>> {
        let lookup = match self.base {
            Some(base) => base.lookup(self.dump, bulk)?,
            None => None,
        };
        let (length, pieces) = (bulk.length, &*bulk.pieces);
        let media_type = if bulk.is_device() { media_type::DEVICE } else { media_type::PAGES };
        Ok(FileWalk { number, file, length, media_type, pieces, lookup })
    }

    /// Has the segments of a file looked through, some at a time, and places their pages in order.
    fn place_file(
        &mut self,
        mut walk: FileWalk<'_>,
        lookers: &mut Lookers,
        index: &mut impl Write,
        wanted: &Wanted,
        emit: &mut impl FnMut(ShardPlan) -> io::Result<()>,
    ) -> io::Result<()> {
        let segments = page_index::segments(walk.length);
        let mut given = 0;
        for segment in 0..segments {
            wanted.check()?;
            while given < segments && lookers.has_room() {
                lookers.give(walk.segment(given)?)?;
                given += 1;
            }
            let seen = lookers.take().ok_or(io::ErrorKind::UnexpectedEof)??;
            let runs = self.place(&seen, segment, &mut walk, emit)?;
            page_index::write_segment(index, walk.pages(segment), &runs)?;
        }
        Ok(())
    }

    /// Gives every page of a segment that is not zero a place.
    fn place(
        &mut self,
        seen: &[Seen],
        segment: u64,
        walk: &mut FileWalk<'_>,
        emit: &mut impl FnMut(ShardPlan) -> io::Result<()>,
    ) -> io::Result<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        let first = u32::try_from(segment * u64::from(PAGES_PER_SEGMENT))
            .map_err(|_too_large| io::Error::from(io::ErrorKind::FileTooLarge))?;
        for seen in seen {
            let page = seen.page;
            let place = self.place_page(seen, first + u32::from(page), walk, emit)?;
            match runs.last_mut() {
                Some(run)
                    if run.first + run.pages == page
                        && run.place.shard == place.shard
                        && run.place.page.checked_add(run.pages) == Some(place.page) =>
                {
                    run.pages += 1;
                }
                _ => runs.push(Run { first: page, pages: 1, place }),
            }
        }
        Ok(runs)
    }

    /// Takes a page's place in the base, or gives it one in a new shard.
    fn place_page(
        &mut self,
        seen: &Seen,
        page: u32,
        walk: &mut FileWalk<'_>,
        emit: &mut impl FnMut(ShardPlan) -> io::Result<()>,
    ) -> io::Result<Place> {
        if let (Some(out), Some(hash)) = (&mut self.hashes, &seen.hash) {
            out.write_all(hash)?;
        }
        let is_there = |place: &Place| self.base.is_some_and(|base| !base.is_given_up(place.shard));
        if let Some(place) = seen.same.filter(is_there) {
            if let Some(used) = self.used.get_mut(usize::from(place.shard)) {
                *used += 1;
            }
            return Ok(place);
        }
        // What has changed since the base is little, of all mappings: it shares shards. Device memory
        // is not looked for in the base, and has shards that are equal as a whole.
        let shares = self.base.is_some() && walk.media_type == media_type::PAGES;
        let own = if shares { None } else { walk.own_shard(page) };
        self.next_place(own, walk, page, emit)
    }

    fn next_place(
        &mut self,
        own: Option<OwnShard>,
        walk: &FileWalk<'_>,
        page: u32,
        emit: &mut impl FnMut(ShardPlan) -> io::Result<()>,
    ) -> io::Result<Place> {
        let full = self.shard_pages;
        let mut plan = match own {
            None => self.shared.take(),
            Some(own) => match self.own.take() {
                Some((current, plan)) if current == own => Some(plan),
                Some((_, plan)) => {
                    emit(plan)?;
                    None
                }
                None => None,
            },
        };
        if let Some(done) = plan.take_if(|plan| plan.pages == full) {
            emit(done)?;
        }
        let mut plan = match plan {
            Some(plan) => plan,
            None => self.begin(walk.media_type)?,
        };
        let shard = plan.number;
        let stored = plan.push(walk.number, page).ok_or_else(too_large)?;
        match own {
            None => self.shared = Some(plan),
            Some(own) => self.own = Some((own, plan)),
        }
        Ok(Place { shard, page: stored })
    }

    fn begin(&mut self, media_type: &'static str) -> io::Result<ShardPlan> {
        if self.shards == SHARDS_MAX {
            return Err(too_large());
        }
        let plan =
            ShardPlan::new(u16::try_from(self.shards).map_err(io::Error::other)?, media_type);
        self.shards += 1;
        Ok(plan)
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "the dump needs more than 65,536 shards")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_read_from_any_byte_on() {
        let scratch = tempfile::tempdir().unwrap();
        let page = usize::try_from(PAGE_BYTES).unwrap();
        let content: Vec<u8> =
            (0..8 * page + 100).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let path = scratch.path().join("pages-1.img");
        fs::write(&path, &content).unwrap();
        let length = u64::try_from(content.len()).unwrap();
        let whole = Content::Whole(fs::File::open(&path).unwrap());
        let file = OpenFile { content: whole, length };
        let files = [Arc::new(file)];
        let mut plan = ShardPlan::new(0, media_type::PAGES);
        let mut expected = Vec::new();
        for number in [1_u32, 2, 5, 8] {
            plan.push(0, number);
            let begin = usize::try_from(number).unwrap() * page;
            let end = content.len().min(begin + page);
            expected.extend(&content[begin..end]);
        }
        // The rest of the file's last page.
        expected.resize(4 * page, 0);
        for (begin, end) in
            [(0, 4 * page), (1, page), (page - 1, 2 * page + 3), (3 * page + 99, 4 * page)]
        {
            let mut read = vec![7; end - begin];
            plan.read_at(&files, u64::try_from(begin).unwrap(), &mut read).unwrap();
            assert!(read == expected[begin..end], "{begin}..{end}");
        }
        let beyond = plan.read_at(&files, u64::try_from(4 * page - 1).unwrap(), &mut [0; 2]);
        assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
