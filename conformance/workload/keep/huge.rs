//! Memory in huge pages: of the process alone, and such as it could share.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sys;
use crate::Failure;

/// A word of every one is known by where it is; the first of each counts.
pub(super) struct Huge {
    maps: Vec<&'static [AtomicU64]>,
}

impl Huge {
    /// Maps `mib` MiB of each kind, unless it is none.
    pub(super) fn new(mib: usize) -> io::Result<Self> {
        let mut maps = Vec::new();
        for is_shared in [false, true] {
            if mib == 0 {
                break;
            }
            let place = sys::huge(is_shared, mib << 20)?;
            // SAFETY: mapped for ever, aligned to a page, and nobody sees but atomics.
            let words = unsafe {
                std::slice::from_raw_parts(place.cast::<AtomicU64>(), (mib << 20) / 8)
            };
            for (at, word) in (0..).zip(words).skip(1) {
                word.store(content(at), Ordering::Relaxed);
            }
            maps.push(words);
        }
        Ok(Self { maps })
    }

    pub(super) fn tick(&self, count: u64) -> Result<(), Failure> {
        for words in &self.maps {
            let [first, rest @ ..] = words else { continue };
            let is = |(at, word): (u64, &AtomicU64)| word.load(Ordering::Relaxed) == content(at);
            if !(1..).zip(rest).all(is) || first.swap(count, Ordering::Relaxed) != count - 1 {
                return Err("a huge page has other content".into());
            }
        }
        Ok(())
    }
}

const fn content(at: u64) -> u64 {
    at.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
