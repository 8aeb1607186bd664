//! Memory that two processes share, of each kind that there is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sys;

/// Of each kind: two pages, so that it is not one of a smaller kind.
const LENGTH: usize = 8192;
/// Where POSIX shared memory is kept.
const NAMED: &str = "/dev/shm/keep";

/// One number in each kind of memory.
pub(super) struct Shared {
    numbers: [(&'static str, &'static AtomicU64); 4],
}

impl Shared {
    pub(super) fn new() -> io::Result<Self> {
        let sized = |file: File| file.set_len(LENGTH as u64).map(|()| file);
        let file = sized(sys::memory_file()?.into())?;
        let mut options = OpenOptions::new();
        let named = sized(options.read(true).write(true).create(true).truncate(true).open(NAMED)?)?;
        // SAFETY: mapped for ever, aligned to a page, and nobody sees but atomics.
        let number = |place: *mut std::ffi::c_void| unsafe { &*place.cast::<AtomicU64>() };
        Ok(Self {
            numbers: [
                ("anonymous", number(sys::share(None, LENGTH)?)),
                ("memfd", number(sys::share(Some(file.as_raw_fd()), LENGTH)?)),
                ("POSIX", number(sys::share(Some(named.as_raw_fd()), LENGTH)?)),
                ("System V", number(sys::segment(LENGTH)?)),
            ],
        })
    }

    pub(super) fn write(&self, value: u64) {
        for (_, number) in &self.numbers {
            number.store(value, Ordering::SeqCst);
        }
    }

    /// Returns the value that all of them have.
    pub(super) fn read(&self) -> Option<u64> {
        let value = self.numbers[0].1.load(Ordering::SeqCst);
        self.other_than(value).is_none().then_some(value)
    }

    /// Returns the kind of a memory that does not have this value.
    pub(super) fn other_than(&self, value: u64) -> Option<&'static str> {
        let mut numbers = self.numbers.iter();
        numbers.find(|(_, n)| n.load(Ordering::SeqCst) != value).map(|(kind, _)| *kind)
    }
}
