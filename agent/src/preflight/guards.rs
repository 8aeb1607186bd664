//! Pages that a process has made guards of by `madvise(2)` (`MADV_GUARD_INSTALL`, Linux 6.13), as glibc
//! 2.42 does below the stack of each thread. CRIU before 4.2 takes them for pages with content, and
//! fails when it reads the first one.

use std::io;
use std::ops::Range;
use std::path::Path;

use fs_err as fs;
use fs_err::os::unix::fs::FileExt as _;

use super::view::{View, read};
use crate::process::is_gone;

/// The first CRIU that knows them, and the first kernel of which it can ask where they are
/// (`PAGE_IS_GUARD` of `PAGEMAP_SCAN`; `ioctl_pagemap_scan(2)`).
const CRIU: [u64; 2] = [4, 2];
const KERNEL: [u64; 2] = [6, 16];

/// The first kernel that tells of them.
const TELLS: [u64; 2] = [6, 15];

/// Whether there may be some that this CRIU does not find with this kernel, and we do.
pub(super) fn are_to_be_found(criu: &[u64], kernel: &[u64]) -> bool {
    let is_known = criu >= CRIU.as_slice() && kernel >= KERNEL.as_slice();
    kernel >= TELLS.as_slice() && !is_known
}

/// The bit of an entry of `/proc/PID/pagemap` that says so, since Linux 6.15
/// (`Documentation/admin-guide/mm/pagemap.rst`).
const GUARD: u64 = 1 << 58;
const ENTRY_BYTES: usize = 8;

/// Entries looked at of all processes: those of 128 GiB, at 17 ms a GiB (AMD EPYC, Linux 6.18).
const ENTRIES_MAX: usize = 32 << 20;
const ENTRIES_AT_ONCE: usize = 128 << 10;

/// Looks through the pages of processes, up to a bound.
struct Looker {
    entries_left: usize,
    buffer: Vec<u8>,
}

/// Finds which processes have such pages.
pub(super) fn find(view: &mut View, proc: &Path) {
    let buffer = vec![0; ENTRY_BYTES * ENTRIES_AT_ONCE];
    let mut looker = Looker { entries_left: ENTRIES_MAX, buffer };
    let View { processes, missed, .. } = view;
    for process in processes {
        let directory = proc.join(process.pid.to_string());
        let maps = read(&directory.join("maps")).unwrap_or_default();
        let mut ranges: Vec<_> = maps.lines().filter_map(anonymous).collect();
        // Stacks are small, and large ranges may be of addresses alone.
        ranges.sort_by_key(ExactSizeIterator::len);
        let found = fs::File::open(directory.join("pagemap")).and_then(|pagemap| {
            for pages in ranges {
                if looker.finds(&pagemap, pages)? {
                    return Ok(true);
                }
            }
            Ok(false)
        });
        match found {
            Ok(found) => process.guarded = found,
            // What has ended meanwhile has none.
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(error) => missed.push(format!("guard pages of process {}: {error}", process.pid)),
        }
    }
    if looker.entries_left == 0 {
        missed.push("guard pages beyond 128 GiB of memory".to_owned());
    }
}

impl Looker {
    /// Whether one of the pages is a guard.
    fn finds(&mut self, pagemap: &fs::File, pages: Range<usize>) -> io::Result<bool> {
        let Range { mut start, end } = pages;
        while start < end && self.entries_left > 0 {
            let count = end.saturating_sub(start).min(self.entries_left).min(ENTRIES_AT_ONCE);
            let part = self.buffer.get_mut(..ENTRY_BYTES * count).unwrap_or_default();
            let place = u64::try_from(start * ENTRY_BYTES).map_err(io::Error::other)?;
            pagemap.read_exact_at(part, place)?;
            if part.as_chunks().0.iter().any(|entry| u64::from_ne_bytes(*entry) & GUARD != 0) {
                return Ok(true);
            }
            start += count;
            self.entries_left -= count;
        }
        Ok(false)
    }
}

/// Returns the pages of a line of `proc_pid_maps(5)` that maps memory of no file and can be touched.
fn anonymous(line: &str) -> Option<Range<usize>> {
    let mut words = line.split_whitespace();
    let (range, permissions) = (words.next()?, words.next()?);
    let (inode, name) = (words.nth(2)?, words.next().unwrap_or_default());
    // The kernel's own ([vdso] and the like) cannot be guards.
    if permissions.starts_with("---") || inode != "0" || name.starts_with("[v") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let page_bytes = rustix::param::page_size();
    let page = |address| Some(usize::from_str_radix(address, 16).ok()? / page_bytes);
    Some(page(start)?..page(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_no_file_is_looked_at() {
        let line = "7f0000000000-7f0000010000 rw-p 00000000 00:00 0";
        let page_bytes = rustix::param::page_size();
        let pages = 0x7f00_0000_0000 / page_bytes..0x7f00_0001_0000 / page_bytes;
        assert_eq!(anonymous(line), Some(pages));
        assert!(anonymous(&format!("{line} [stack]")).is_some());
        for other in [
            "7f0000000000-7f0000001000 ---p 00000000 00:00 0",
            "7f0000000000-7f0000001000 r--p 00000000 00:00 0 [vvar]",
            "7f0000000000-7f0000001000 r--p 00000000 fd:01 77 /usr/lib/libc.so.6",
            "",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }
}
