//! Who has how many bytes of a tier, and what has to go for something new. No file is touched here.

use std::collections::{BTreeMap, BTreeSet};

use kybernate_spec::Digest;

use super::Wish;
use super::record::Record;

/// Names that are remembered of one checkpoint.
const REFERENCES_MAX: usize = 8;

/// One tier's account.
#[derive(Debug)]
pub(super) struct Ledger {
    budget: u64,
    entries: BTreeMap<Digest, Entry>,
    making: BTreeMap<Digest, Making>,
    /// Being removed: their bytes are not free yet.
    leaving: BTreeMap<Digest, Entry>,
}

/// A staged checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) bytes: u64,
    /// By which it was asked for, the latest first.
    pub(super) references: Vec<String>,
    pub(super) used_at: jiff::Timestamp,
    /// Operations that read it.
    pub(super) users: BTreeSet<String>,
    /// It is not what was staged, and goes when nobody reads it any more.
    pub(super) is_spoilt: bool,
}

/// A checkpoint that is being staged.
#[derive(Clone, Debug)]
struct Making {
    bytes: u64,
    operation: String,
}

/// How a wish stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It is there.
    Present,
    /// There is room.
    Reserved,
    /// These have left the account and are to be removed first.
    Evict(Vec<Digest>),
    /// Somebody else stages or removes it, or something else is being removed.
    Wait,
}

impl Entry {
    pub(super) fn new(record: Record) -> Self {
        Self {
            bytes: record.bytes,
            references: record.references,
            used_at: record.used_at,
            users: BTreeSet::new(),
            is_spoilt: false,
        }
    }
}

impl Ledger {
    pub(super) fn new(budget: u64, found: Vec<Record>) -> Self {
        let entries = found.into_iter().map(|record| (record.digest.clone(), Entry::new(record)));
        let (making, leaving) = (BTreeMap::new(), BTreeMap::new());
        Self { budget, entries: entries.collect(), making, leaving }
    }

    /// Returns how many bytes are taken or promised.
    pub(super) fn used(&self) -> u64 {
        let kept = self.entries.values().chain(self.leaving.values()).map(|entry| entry.bytes);
        kept.chain(self.making.values().map(|making| making.bytes)).fold(0, u64::saturating_add)
    }

    pub(super) const fn entries(&self) -> &BTreeMap<Digest, Entry> {
        &self.entries
    }

    /// Returns who stages a checkpoint just now.
    pub(super) fn maker(&self, digest: &Digest) -> Option<&str> {
        self.making.get(digest).map(|making| &*making.operation)
    }

    /// Asks for room; what cannot go is the error.
    pub(super) fn reserve(&mut self, wish: &Wish) -> Result<Room, Vec<String>> {
        let Wish { digest, bytes, operation, .. } = wish;
        if let Some(entry) = self.entries.get_mut(digest) {
            if !entry.is_spoilt {
                entry.used_at = jiff::Timestamp::now();
                return Ok(Room::Present);
            }
            // Who reads it ends.
            let leaves = self.leave(digest);
            return Ok(if leaves { Room::Evict(vec![digest.clone()]) } else { Room::Wait });
        }
        if self.making.contains_key(digest) || self.leaving.contains_key(digest) {
            return Ok(Room::Wait);
        }
        let room = self.room(*bytes, None)?;
        if room == Room::Reserved {
            let making = Making { bytes: *bytes, operation: operation.clone() };
            self.making.insert(digest.clone(), making);
        }
        Ok(room)
    }

    /// Asks for what something that is being staged takes in fact.
    pub(super) fn enlarge(&mut self, digest: &Digest, bytes: u64) -> Result<Room, Vec<String>> {
        let before = self.making.get(digest).map_or(0, |making| making.bytes);
        let room = self.room(bytes.saturating_sub(before), Some(digest))?;
        if let Some(making) = self.making.get_mut(digest).filter(|_| room == Room::Reserved) {
            making.bytes = bytes;
        }
        Ok(room)
    }

    /// Decides whether so many bytes more fit, or what has to go, least recently used first. What
    /// `own` has is no reason against it.
    fn room(&mut self, more: u64, own: Option<&Digest>) -> Result<Room, Vec<String>> {
        let fits = |used: u64| used.saturating_add(more) <= self.budget;
        let used = self.used();
        if fits(used) {
            return Ok(Room::Reserved);
        }
        let going = self.leaving.values().map(|entry| entry.bytes).fold(0, u64::saturating_add);
        let mut after = used.saturating_sub(going);
        let mut idle: Vec<(&Digest, &Entry)> =
            self.entries.iter().filter(|(_, entry)| entry.users.is_empty()).collect();
        idle.sort_by_key(|(_, entry)| (!entry.is_spoilt, entry.used_at));
        let mut victims = Vec::new();
        for (digest, entry) in idle {
            if fits(after) {
                break;
            }
            after = after.saturating_sub(entry.bytes);
            victims.push(digest.clone());
        }
        if !fits(after) {
            return Err(self.pinned(own));
        }
        for digest in &victims {
            self.leave(digest);
        }
        Ok(if victims.is_empty() { Room::Wait } else { Room::Evict(victims) })
    }

    /// Says what cannot go, and why.
    fn pinned(&self, own: Option<&Digest>) -> Vec<String> {
        let used = self.entries.iter().filter(|(_, entry)| !entry.users.is_empty());
        let used = used.map(|(digest, entry)| {
            let users: Vec<&str> = entry.users.iter().map(String::as_str).collect();
            format!("{digest} ({} bytes, read by {})", entry.bytes, users.join(" and "))
        });
        let making = self.making.iter().filter(|(digest, _)| Some(*digest) != own);
        let making = making.map(|(digest, making)| {
            format!("{digest} ({} bytes, being staged by {})", making.bytes, making.operation)
        });
        used.chain(making).collect()
    }

    /// Takes a checkpoint that nobody uses out of the account; its bytes are free when it has
    /// [`Self::left`]. Returns whether it was there so.
    pub(super) fn leave(&mut self, digest: &Digest) -> bool {
        let idle = self.entries.get(digest).is_some_and(|entry| entry.users.is_empty());
        if idle && let Some(entry) = self.entries.remove(digest) {
            self.leaving.insert(digest.clone(), entry);
        }
        idle
    }

    /// Notes that the files of a checkpoint are gone, or that they could not be removed.
    pub(super) fn left(&mut self, digest: &Digest, gone: bool) {
        if let Some(entry) = self.leaving.remove(digest).filter(|_| !gone) {
            self.entries.insert(digest.clone(), entry);
        }
    }

    /// Notes that something was staged.
    pub(super) fn keep(&mut self, digest: &Digest, entry: Entry) {
        self.making.remove(digest);
        self.entries.insert(digest.clone(), entry);
    }

    /// Gives back the room of something that was not staged.
    pub(super) fn release(&mut self, digest: &Digest) {
        self.making.remove(digest);
    }

    /// Notes that a checkpoint is not what was staged: nobody gets it any more.
    pub(super) fn spoil(&mut self, digest: &Digest) {
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.is_spoilt = true;
        }
    }

    /// Notes that `user` reads a checkpoint. Returns whether it is there.
    pub(super) fn begin_use(&mut self, digest: &Digest, user: &str) -> bool {
        let Some(entry) = self.entries.get_mut(digest).filter(|entry| !entry.is_spoilt) else {
            return false;
        };
        entry.used_at = jiff::Timestamp::now();
        entry.users.insert(user.to_owned())
    }

    /// Notes that `user` has read it.
    pub(super) fn end_use(&mut self, digest: &Digest, user: &str) {
        if let Some(entry) = self.entries.get_mut(digest) {
            entry.users.remove(user);
        }
    }

    /// Adds a name of a checkpoint. Returns all of them when that changed something.
    pub(super) fn refer(&mut self, digest: &Digest, reference: &str) -> Option<Vec<String>> {
        let entry = self.entries.get_mut(digest)?;
        if entry.references.first().is_some_and(|first| first == reference) {
            return None;
        }
        entry.references.retain(|known| known != reference);
        entry.references.insert(0, reference.to_owned());
        entry.references.truncate(REFERENCES_MAX);
        Some(entry.references.clone())
    }
}

#[cfg(test)]
mod tests;
