//! Content that is being linked at this moment, so that nobody takes it away meanwhile.
//!
//! A push puts content in place and then enters a link to it; a mount reads one link and enters
//! another. Whoever collects garbage looks for links and then removes. Between the two looks of
//! either the other could act, and an acknowledged push would lose its content. So who links
//! *holds* the digest, and who removes does so only while nobody holds it and nobody has held it
//! since the look for links began.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kybernate_spec::Digest;

use super::{STRIPES, pick};

/// Who holds which digest.
#[derive(Debug)]
pub(crate) struct Pins {
    // Held for a look-up, or for the one rename or unlink that must not meet a new holder.
    stripes: [Mutex<HashMap<Digest, Pin>>; STRIPES],
}

#[derive(Debug, Default)]
struct Pin {
    holders: u32,
    watchers: u32,
    /// Somebody has held it since it is watched.
    used: bool,
}

/// A digest that is held until the value is dropped.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    pins: &'a Pins,
    digest: Digest,
}

/// A digest whose holders are noticed until the value is dropped.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    pins: &'a Pins,
    digest: Digest,
}

impl Default for Pins {
    fn default() -> Self {
        Self { stripes: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl Pins {
    /// Holds a digest: from now on neither its content nor its links are taken away.
    pub(crate) fn hold(&self, digest: &Digest) -> Hold<'_> {
        let mut stripe = self.stripe(digest);
        let pin = stripe.entry(digest.clone()).or_default();
        pin.holders += 1;
        pin.used = true;
        Hold { pins: self, digest: digest.clone() }
    }

    /// Runs `work` unless somebody holds the digest; nobody can begin to until it is done.
    pub(crate) fn unless_held<T>(&self, digest: &Digest, work: impl FnOnce() -> T) -> Option<T> {
        let stripe = self.stripe(digest);
        let held = stripe.get(digest).is_some_and(|pin| pin.holders > 0);
        (!held).then(work)
    }

    /// Whether somebody holds the digest.
    pub(crate) fn is_held(&self, digest: &Digest) -> bool {
        self.stripe(digest).get(digest).is_some_and(|pin| pin.holders > 0)
    }

    /// Begins to notice who holds the digest.
    pub(crate) fn watch(&self, digest: &Digest) -> Watch<'_> {
        let mut stripe = self.stripe(digest);
        let pin = stripe.entry(digest.clone()).or_default();
        pin.watchers += 1;
        if pin.watchers == 1 {
            pin.used = pin.holders > 0;
        }
        Watch { pins: self, digest: digest.clone() }
    }

    fn stripe(&self, digest: &Digest) -> MutexGuard<'_, HashMap<Digest, Pin>> {
        let stripe = pick(&self.stripes, digest.hex().as_bytes());
        stripe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_go(&self, digest: &Digest, change: impl FnOnce(&mut Pin)) {
        if let Entry::Occupied(mut entry) = self.stripe(digest).entry(digest.clone()) {
            change(entry.get_mut());
            if entry.get().holders == 0 && entry.get().watchers == 0 {
                entry.remove();
            }
        }
    }
}

impl Watch<'_> {
    /// Runs `work` unless somebody holds the digest or has held it since it is watched; nobody can
    /// begin to until it is done.
    pub(crate) fn unless_used<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let stripe = self.pins.stripe(&self.digest);
        let used = stripe.get(&self.digest).is_none_or(|pin| pin.used);
        (!used).then(work)
    }

    pub(crate) fn digest(&self) -> &Digest {
        &self.digest
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.pins.let_go(&self.digest, |pin| pin.holders = pin.holders.saturating_sub(1));
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.pins.let_go(&self.digest, |pin| pin.watchers = pin.watchers.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests;
