//! Two memories side by side, in the order of their addresses.

use std::collections::{BTreeMap, BTreeSet};

use kybernate_spec::page_index::Place;

use super::fetch::Chunks;
use super::side::Side;
use super::{
    Change, Difference, DifferenceError, PAGE_BYTES, PageCounts, ProcessDifference,
    RegionDifference,
};
use crate::inside::{MappedRegion, Process};
use crate::pack::base::PAGE_HASH_BYTES;
use crate::stored::{Piece, Pieces, StoredAt, StoredError};
use crate::wanted::Wanted;

/// Pages of a chunk.
const CHUNK_PAGES: u64 = 1024;

/// The chunks with pages that only their content can tell apart.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) from: Chunks,
    pub(super) to: Chunks,
}

/// How pages that are stored in two places are told apart.
pub(super) enum Ask<'a> {
    /// Not at all: it is noted where they are.
    Places(&'a mut Pending),
    /// By their hashes, which are at hand.
    Hashes,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.from.is_empty()
    }
}

/// What is at an address.
#[derive(Clone, Copy)]
enum State {
    Absent,
    Zero,
    Stored(StoredAt),
}

/// Where what is counted belongs.
struct Account {
    total: PageCounts,
    regions: Vec<RegionDifference>,
}

/// Compares all memory of both.
pub(super) fn compare(
    from: &Side,
    to: &Side,
    ask: &mut Ask<'_>,
    wanted: &Wanted,
) -> Result<Difference, DifferenceError> {
    let mut judge = Judge { from, to, ask, wanted };
    let mut total = PageCounts::default();
    let mut processes = Vec::new();
    let by_pid = |side: &Side| -> BTreeMap<u32, usize> {
        let numbered = side.inside.processes.iter().enumerate();
        numbered.map(|(at, process)| (process.pid, at)).collect()
    };
    let (old, new) = (by_pid(from), by_pid(to));
    let pids: BTreeSet<u32> = old.keys().chain(new.keys()).copied().collect();
    for pid in pids {
        let before = old.get(&pid).and_then(|at| from.inside.processes.get(*at));
        let after = new.get(&pid).and_then(|at| to.inside.processes.get(*at));
        let mut account = Account::of(pid, before, after);
        let pagemap = format!("pagemap-{pid}.img");
        walk((Some(&pagemap), Some(&pagemap)), &mut judge, &mut account)?;
        total.add(&account.total);
        let change = change(before.is_some(), after.is_some());
        let name = after.or(before).map(|process| process.name.clone()).unwrap_or_default();
        processes.push(ProcessDifference {
            pid,
            name,
            change,
            pages: account.total,
            regions: account.regions,
        });
    }
    let shared = shared(&mut judge, &mut total)?;
    let based = to.checkpoint.config.lineage.base.as_ref() == Some(from.digest());
    Ok(Difference {
        from: from.digest().clone(),
        to: to.digest().clone(),
        based,
        pages: total,
        processes,
        shared,
        fetched_bytes: 0,
    })
}

/// Compares memory that several processes may share.
fn shared(
    judge: &mut Judge<'_, '_>,
    total: &mut PageCounts,
) -> Result<Vec<RegionDifference>, DifferenceError> {
    let (old, new) = (judge.from.shared(), judge.to.shared());
    let keys: BTreeSet<(u32, u64)> = old.keys().chain(new.keys()).copied().collect();
    let mut found = Vec::new();
    for key in keys {
        let (before, after) = (old.get(&key), new.get(&key));
        let Some(region) = after.or(before).map(|shared| shared.region) else { continue };
        let mut account = Account { total: PageCounts::default(), regions: Vec::new() };
        let pagemaps = (
            before.map(|shared| shared.pagemap.as_str()),
            after.map(|shared| shared.pagemap.as_str()),
        );
        walk(pagemaps, judge, &mut account)?;
        total.add(&account.total);
        let change = change(before.is_some(), after.is_some());
        found.push(RegionDifference { pages: account.total, ..described(key.0, region, change) });
    }
    Ok(found)
}

const fn change(before: bool, after: bool) -> Change {
    match (before, after) {
        (false, true) => Change::Added,
        (true, false) => Change::Removed,
        _ => Change::Kept,
    }
}

fn described(pid: u32, region: &MappedRegion, change: Change) -> RegionDifference {
    RegionDifference {
        pid,
        start: region.start,
        end: region.end,
        kind: region.kind,
        path: region.path.clone(),
        change,
        pages: PageCounts::default(),
    }
}

impl Account {
    /// Lists the mappings after, and those before where there is none any more.
    fn of(pid: u32, before: Option<&Process>, after: Option<&Process>) -> Self {
        let none: &[MappedRegion] = &[];
        let old = before.map_or(none, |process| &process.regions);
        let new = after.map_or(none, |process| &process.regions);
        let mut regions: Vec<RegionDifference> = Vec::with_capacity(new.len());
        let own = |region: &&MappedRegion| region.shared.is_none();
        for region in new.iter().filter(own) {
            let was = overlaps(old, region);
            regions.push(described(pid, region, change(was, true)));
        }
        for region in old.iter().filter(own).filter(|region| !overlaps(new, region)) {
            regions.push(described(pid, region, Change::Removed));
        }
        regions.sort_by_key(|region| region.start);
        Self { total: PageCounts::default(), regions }
    }

    /// Returns which mapping an address is in, and how many pages from there on are in the same.
    fn at(&self, address: u64, pages: u64) -> (Option<usize>, u64) {
        let after = self.regions.partition_point(|region| region.start <= address);
        let within = after.checked_sub(1);
        let within =
            within.filter(|at| self.regions.get(*at).is_some_and(|region| address < region.end));
        let end = match within {
            Some(at) => self.regions.get(at).map(|region| region.end),
            None => self.regions.get(after).map(|region| region.start),
        };
        let room = end.map_or(pages, |end| end.saturating_sub(address).div_ceil(PAGE_BYTES));
        (within, pages.min(room.max(1)))
    }

    /// Counts pages that are in one state before and in one after.
    fn count(
        &mut self,
        stretch: Stretch,
        judge: &mut Judge<'_, '_>,
    ) -> Result<(), DifferenceError> {
        let Stretch { mut address, mut pages, mut before, mut after } = stretch;
        while pages > 0 {
            let (region, here) = self.at(address, pages);
            let counts = judge.counts(before, after, here)?;
            self.total.add(&counts);
            if let Some(region) = region.and_then(|at| self.regions.get_mut(at)) {
                region.pages.add(&counts);
            }
            address = address.saturating_add(here * PAGE_BYTES);
            pages -= here;
            (before, after) = (before.skip(here), after.skip(here));
        }
        Ok(())
    }
}

/// Pages that follow one another, in one state before and in one after.
struct Stretch {
    address: u64,
    pages: u64,
    before: State,
    after: State,
}

/// Decides what became of pages.
struct Judge<'a, 'b> {
    from: &'a Side,
    to: &'a Side,
    ask: &'a mut Ask<'b>,
    /// Asked between two stretches.
    wanted: &'a Wanted,
}

impl Judge<'_, '_> {
    fn counts(
        &mut self,
        before: State,
        after: State,
        pages: u64,
    ) -> Result<PageCounts, DifferenceError> {
        let none = PageCounts::default();
        Ok(match (before, after) {
            (State::Stored(old), State::Stored(new)) => self.both(old, new, pages)?,
            (State::Stored(_), State::Zero) => PageCounts { zeroed: pages, ..none },
            (State::Stored(_), State::Absent) => PageCounts { removed: pages, ..none },
            (_, State::Stored(_)) => PageCounts { added: pages, ..none },
            _ => none,
        })
    }

    fn both(
        &mut self,
        old: StoredAt,
        new: StoredAt,
        pages: u64,
    ) -> Result<PageCounts, DifferenceError> {
        let none = PageCounts::default();
        let shards = (self.from.shard(old.place), self.to.shard(new.place));
        if shards.0 == shards.1 && old.place.page == new.place.page {
            return Ok(PageCounts { unchanged: pages, ..none });
        }
        match self.ask {
            Ask::Places(pending) => {
                note(&mut pending.from, old.place, pages);
                note(&mut pending.to, new.place, pages);
                Ok(PageCounts { unknown: pages, ..none })
            }
            Ask::Hashes => {
                let failed = |error| DifferenceError::Io("read the hashes of pages", error);
                let old = self.from.hashes(old, pages).map_err(failed)?;
                let new = self.to.hashes(new, pages).map_err(failed)?;
                let pairs = old.chunks(PAGE_HASH_BYTES).zip(new.chunks(PAGE_HASH_BYTES));
                let same = pairs.filter(|(old, new)| old == new).count();
                let unchanged = u64::try_from(same).unwrap_or(0);
                Ok(PageCounts { unchanged, changed: pages.saturating_sub(unchanged), ..none })
            }
        }
    }
}

/// Notes which chunks hold pages.
fn note(chunks: &mut Chunks, first: Place, pages: u64) {
    let page = u64::from(first.page);
    let last = page.saturating_add(pages.saturating_sub(1));
    let noted = chunks.entry(first.shard).or_default();
    noted.extend(
        (page / CHUNK_PAGES..=last / CHUNK_PAGES).filter_map(|at| usize::try_from(at).ok()),
    );
}

impl State {
    const fn of(piece: &Piece) -> Self {
        match piece.stored {
            Some(stored) => Self::Stored(stored),
            None => Self::Zero,
        }
    }

    /// Returns the state of what follows some pages on.
    fn skip(self, pages: u64) -> Self {
        match self {
            Self::Stored(StoredAt { place, ordinal }) => {
                let page = place.page.saturating_add(u16::try_from(pages).unwrap_or(u16::MAX));
                let place = Place { page, ..place };
                Self::Stored(StoredAt { place, ordinal: ordinal.saturating_add(pages) })
            }
            other => other,
        }
    }
}

/// One memory, piece by piece.
struct Cursor {
    pieces: Option<Pieces>,
    piece: Option<Piece>,
}

impl Cursor {
    fn open(side: &Side, pagemap: Option<&str>) -> Result<Self, StoredError> {
        let pieces = match pagemap {
            None => None,
            Some(pagemap) => side.stored.walk_if_there(pagemap)?,
        };
        let mut cursor = Self { pieces, piece: None };
        cursor.next()?;
        Ok(cursor)
    }

    fn next(&mut self) -> Result<(), StoredError> {
        self.piece = match &mut self.pieces {
            Some(pieces) => pieces.next_piece()?,
            None => None,
        };
        Ok(())
    }

    /// Returns the state of an address, which is not before the piece at hand.
    fn state(&self, address: u64) -> State {
        let here = self.piece.as_ref().filter(|piece| piece.address == address);
        here.map_or(State::Absent, State::of)
    }

    /// Returns where the state at an address ends.
    fn until(&self, address: u64) -> Option<u64> {
        let piece = self.piece.as_ref()?;
        Some(if piece.address > address { piece.address } else { piece.end() })
    }

    /// Leaves pages behind.
    fn pass(&mut self, address: u64, pages: u64) -> Result<(), StoredError> {
        let Some(piece) = self.piece.filter(|piece| piece.address == address) else {
            return Ok(());
        };
        if piece.pages <= pages {
            return self.next();
        }
        let stored = match State::of(&piece).skip(pages) {
            State::Stored(stored) => Some(stored),
            State::Absent | State::Zero => None,
        };
        let address = address.saturating_add(pages * PAGE_BYTES);
        self.piece = Some(Piece { address, pages: piece.pages - pages, stored });
        Ok(())
    }
}

/// Walks one memory of both, which `pagemaps` describe.
fn walk(
    pagemaps: (Option<&str>, Option<&str>),
    judge: &mut Judge<'_, '_>,
    account: &mut Account,
) -> Result<(), DifferenceError> {
    let mut old = Cursor::open(judge.from, pagemaps.0)?;
    let mut new = Cursor::open(judge.to, pagemaps.1)?;
    loop {
        judge.wanted.check().map_err(|error| DifferenceError::Io("compare", error))?;
        let starts = [&old.piece, &new.piece].into_iter().flatten().map(|piece| piece.address);
        let Some(address) = starts.min() else { return Ok(()) };
        let ends = [old.until(address), new.until(address)];
        let end = ends.into_iter().flatten().min().unwrap_or(address);
        // Addresses are those of pages, so there is at least one.
        let pages = (end.saturating_sub(address) / PAGE_BYTES).max(1);
        let (before, after) = (old.state(address), new.state(address));
        account.count(Stretch { address, pages, before, after }, judge)?;
        old.pass(address, pages)?;
        new.pass(address, pages)?;
    }
}

/// Whether a mapping of `regions`, which are in order, has an address of `region`.
fn overlaps(regions: &[MappedRegion], region: &MappedRegion) -> bool {
    let first = regions.partition_point(|other| other.end <= region.start);
    regions.get(first).is_some_and(|other| other.start < region.end)
}
