//! Looking through the pages of a dump, on several cores: which are not zero, which hash they have,
//! and which the base has too.
//!
//! All this depends on a page's content and address alone, so the segments of a file are looked
//! through at the same time. Where a page goes depends on those before it: that is decided after,
//! in order, by [`super::shards`].

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, available_parallelism};

use kybernate_spec::page_index::Place;

use super::base::{Known, PageHash, page_hash};
use super::local::{LocalPages, Proven};
use super::shards::OpenFile;

/// Threads that look through pages. Each may hold a chunk of the base, and what packing may have
/// resident does not grow with the machine.
const LOOKERS_MAX: usize = 4;

/// Pages read at once: few enough that they are looked at where the kernel has just put them, in a
/// core's own cache.
const PIECE_PAGES: usize = 32;

/// Segments that wait for a thread, each without its content.
const WAITING: usize = 2;

/// A segment to be looked through.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) file: Arc<OpenFile>,
    /// Where it begins in the file.
    pub(super) offset: u64,
    pub(super) pages: u16,
    /// Which of its pages the base has at the same addresses, in ascending order.
    pub(super) known: Vec<(u16, Known)>,
}

/// A page that is not zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// Its number within the segment.
    pub(super) page: u16,
    /// Its hash, when hashes are stored or compared.
    pub(super) hash: Option<PageHash>,
    /// Where the base stores the same content.
    pub(super) same: Option<Place>,
}

/// How to look.
#[derive(Debug)]
pub(super) struct Looking<'a> {
    /// Pages of the base, when they are on this machine.
    pub(super) local: Option<LocalPages<'a>>,
    /// Whether every page's hash is wanted.
    pub(super) hashes: bool,
}

/// A thread, and the segments that it was given. What it sees comes in the order of those.
#[derive(Debug)]
struct Looker {
    given: SyncSender<Segment>,
    seen: Receiver<io::Result<Vec<Seen>>>,
}

/// Several threads that take turns. They end when this is dropped.
#[derive(Debug)]
pub(super) struct Lookers {
    all: Vec<Looker>,
    /// Who is to answer next, the first first.
    turns: VecDeque<usize>,
    next: usize,
}

impl Lookers {
    /// Starts the threads.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        looking: &'scope Looking<'_>,
    ) -> Self {
        let threads = if looking.is_work() {
            available_parallelism().map_or(1, |cores| cores.get().min(LOOKERS_MAX))
        } else {
            1
        };
        let lookers = (0..threads).map(|_| {
            let (given, segments) = sync_channel(WAITING);
            let (answers, seen) = sync_channel(WAITING);
            scope.spawn(move || looking.look(&segments, &answers));
            Looker { given, seen }
        });
        Self { all: lookers.collect(), turns: VecDeque::new(), next: 0 }
    }

    /// Whether one more can be given without waiting for an answer first.
    pub(super) fn has_room(&self) -> bool {
        self.turns.len() < self.all.len() * WAITING
    }

    /// Gives a segment to the thread whose turn it is.
    pub(super) fn give(&mut self, segment: Segment) -> io::Result<()> {
        let looker = self.all.get(self.next).ok_or_else(ended)?;
        looker.given.send(segment).map_err(|_ended| ended())?;
        self.turns.push_back(self.next);
        self.next = (self.next + 1) % self.all.len();
        Ok(())
    }

    /// Returns what was seen in the segment given first of those not returned yet; `None` when there
    /// is none.
    pub(super) fn take(&mut self) -> Option<io::Result<Vec<Seen>>> {
        let looker = self.all.get(self.turns.pop_front()?)?;
        Some(looker.seen.recv().unwrap_or_else(|_ended| Err(ended())))
    }
}

impl Looking<'_> {
    /// Whether there is more to do than to look for zeros.
    const fn is_work(&self) -> bool {
        self.local.is_some() || self.hashes
    }

    fn look(&self, segments: &Receiver<Segment>, seen: &SyncSender<io::Result<Vec<Seen>>>) {
        let mut buffer = vec![0; PIECE_PAGES * 4096];
        for segment in segments {
            if seen.send(self.look_through(&segment, &mut buffer)).is_err() {
                return;
            }
        }
    }

    fn look_through(&self, segment: &Segment, buffer: &mut [u8]) -> io::Result<Vec<Seen>> {
        if let Some(local) = &self.local {
            local.ahead(segment.known.iter().map(|(_, known)| known.place))?;
        }
        let mut known = segment.known.iter().peekable();
        let mut chunk = None;
        let mut all = Vec::with_capacity(usize::from(segment.pages));
        for first in (0..segment.pages).step_by(PIECE_PAGES) {
            let pages = usize::from(segment.pages - first).min(PIECE_PAGES);
            let content = buffer.get_mut(..pages * 4096).unwrap_or_default();
            segment.file.read_at(content, segment.offset + u64::from(first) * 4096)?;
            for (page, content) in (first..).zip(content.chunks(4096)) {
                while known.next_if(|(at, _)| *at < page).is_some() {}
                if is_zero(content) {
                    continue;
                }
                let hash = self.hashes.then(|| page_hash(content));
                let same = match known.next_if(|(at, _)| *at == page) {
                    Some((_, known)) => self.is_same(*known, content, hash, &mut chunk)?,
                    None => None,
                };
                all.push(Seen { page, hash, same });
            }
        }
        Ok(all)
    }

    /// Returns where the base stores a page, when it is the same.
    fn is_same(
        &self,
        known: Known,
        content: &[u8],
        hash: Option<PageHash>,
        chunk: &mut Option<Arc<Proven>>,
    ) -> io::Result<Option<Place>> {
        let same = match &self.local {
            Some(local) => {
                let Range { start, end } = local.find(known.place, chunk)?;
                let page = chunk.as_deref().and_then(Proven::content);
                page.and_then(|chunk| chunk.get(start..end)) == Some(content)
            }
            None => hash.is_some() && hash == known.hash,
        };
        Ok(same.then_some(known.place))
    }
}

/// Whether all bytes are zero. Compared by the C library, which is as fast without optimisation: a
/// loop of our own was a tenth of all that the end-to-end tests compute.
fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|chunk| ZEROS.starts_with(chunk))
}

fn ended() -> io::Error {
    io::Error::other("a thread that reads the dump has ended")
}
