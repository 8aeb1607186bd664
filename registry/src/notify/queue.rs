//! What is kept for whom. Knows nothing of disks and networks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Event;
use crate::config::NotifyEndpoint;

/// Events in order, and how far each endpoint is.
#[derive(Debug)]
pub(super) struct Queue {
    keep: usize,
    next: u64,
    entries: BTreeMap<u64, Entry>,
    cursors: Vec<Cursor>,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) event: Arc<Event>,
    /// Whether what it tells of is done.
    pub(super) good: bool,
}

/// How far an endpoint is.
#[derive(Debug)]
pub(super) struct Cursor {
    pub(super) endpoint: NotifyEndpoint,
    /// The first number it has not got.
    pub(super) next: u64,
    /// What it will not get, and was not told of.
    pub(super) lost: u64,
    /// What is on its way to it.
    taken: Option<u64>,
}

/// An event on its way.
#[derive(Debug, Clone)]
pub(super) struct Parcel {
    pub(super) number: u64,
    pub(super) event: Arc<Event>,
    /// How many events before it could not be kept.
    pub(super) lost: u64,
}

impl Queue {
    pub(super) fn new(keep: usize, endpoints: &[NotifyEndpoint]) -> Self {
        let cursor = |endpoint: &NotifyEndpoint| Cursor {
            endpoint: endpoint.clone(),
            next: 0,
            lost: 0,
            taken: None,
        };
        let cursors = endpoints.iter().map(cursor).collect();
        Self { keep, next: 0, entries: BTreeMap::new(), cursors }
    }

    /// Returns the number that the next event gets.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Returns how many events are kept.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.entries.iter().map(|(number, entry)| (*number, entry))
    }

    pub(super) fn cursors(&self) -> &[Cursor] {
        &self.cursors
    }

    /// Adds an event. Returns how often one was lost to make room for it.
    pub(super) fn push(&mut self, number: u64, event: Arc<Event>, good: bool) -> u64 {
        self.next = self.next.max(number + 1);
        self.entries.insert(number, Entry { event, good });
        let mut lost = 0;
        while self.entries.len() > self.keep {
            let Some((number, Entry { event, .. })) = self.entries.pop_first() else { break };
            for cursor in &mut self.cursors {
                let awaited = cursor.next <= number && cursor.taken != Some(number);
                if awaited && cursor.wants(&event) {
                    cursor.lost += 1;
                    lost += 1;
                }
                cursor.next = cursor.next.max(number + 1);
            }
        }
        lost
    }

    /// What an event tells of was done, or was not.
    pub(super) fn settle(&mut self, number: u64, good: bool) {
        if good {
            if let Some(entry) = self.entries.get_mut(&number) {
                entry.good = true;
            }
        } else {
            self.entries.remove(&number);
        }
    }

    /// Returns what an endpoint gets next, unless that is not settled yet.
    pub(super) fn take(&mut self, endpoint: usize) -> Option<Parcel> {
        let cursor = self.cursors.get_mut(endpoint)?;
        let mut from = cursor.next;
        for (number, Entry { event, good }) in self.entries.range(cursor.next..) {
            if cursor.wants(event) {
                if !good {
                    break;
                }
                cursor.next = from;
                cursor.taken = Some(*number);
                let (number, event, lost) = (*number, Arc::clone(event), cursor.lost);
                return Some(Parcel { number, event, lost });
            }
            from = number + 1;
        }
        cursor.next = from;
        self.trim();
        None
    }

    /// An endpoint has got an event, and knows of so many lost.
    pub(super) fn delivered(&mut self, endpoint: usize, number: u64, lost: u64) {
        if let Some(cursor) = self.cursors.get_mut(endpoint) {
            cursor.next = cursor.next.max(number + 1);
            cursor.lost = cursor.lost.saturating_sub(lost);
            cursor.taken = None;
            self.next = self.next.max(cursor.next);
            self.trim();
        }
    }

    /// Says how far an endpoint is. No number before that is given again: where all was delivered
    /// this is all that is left of the numbers.
    pub(super) fn place(&mut self, endpoint: usize, next: u64, lost: u64) {
        if let Some(cursor) = self.cursors.get_mut(endpoint) {
            (cursor.next, cursor.lost) = (next, lost);
            self.next = self.next.max(next);
        }
    }

    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.cursors.iter().position(|cursor| cursor.endpoint.name == name)
    }

    /// Forgets what everybody has.
    pub(super) fn trim(&mut self) {
        let first = self.cursors.iter().map(|cursor| cursor.next).min().unwrap_or(self.next);
        while let Some(entry) = self.entries.first_entry() {
            // What is not settled stays: it is settled by its number.
            if *entry.key() >= first || !entry.get().good {
                break;
            }
            entry.remove();
        }
    }
}

impl Cursor {
    fn wants(&self, event: &Event) -> bool {
        self.endpoint.wants(event.action, event.pushed_blob, event.target.repository.as_str())
    }
}

#[cfg(test)]
pub(super) mod tests;
