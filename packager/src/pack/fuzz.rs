//! What [`crate::fuzz`] cannot reach from outside.

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::os::unix::fs::symlink;
use std::path::Path;

use fs_err as fs;

use super::dump::{Dump, Listing};
use super::pagemap::PagemapWalk;

/// Bytes of the pages files, of a dump and of its parent.
const PAGES_BYTES: u64 = 16 * 4096;

/// Looks at a dump directory as packing it does.
pub(crate) fn scan(dump: &Path, scratch: &Path) {
    let Ok(listing) = Listing::of(dump, scratch) else { return };
    let bulk = listing.bulk_bytes();
    let Ok(dump) = Dump::scan(listing, 64 << 20) else { return };
    assert_eq!(dump.bulk_bytes(), bulk);
    for file in &dump.bulk {
        let end = file.pieces.last().map_or(0, |piece| piece.end);
        assert!(end == file.length || file.pieces.is_empty(), "it is cut elsewhere");
    }
}

/// The pagemaps of a dump and of its parent: two bytes with the length of the first, then both.
pub fn parents(bytes: &[u8]) {
    let Some((length, rest)) = bytes.split_first_chunk() else { return };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (own, parent) = rest.split_at(length);
    let Ok(place) = tempfile::tempdir() else { return };
    let made = || {
        for (name, pagemap) in [("dump", own), ("parent", parent)] {
            let directory = place.path().join(name);
            fs::create_dir(&directory)?;
            fs::write(directory.join("pagemap-1.img"), pagemap)?;
            fs::File::create(directory.join("pages-1.img"))?.set_len(PAGES_BYTES)?;
        }
        symlink("../parent", place.path().join("dump/parent"))?;
        fs::create_dir(place.path().join("scratch"))
    };
    if made().is_err() {
        return;
    }
    let (dump, scratch) = (place.path().join("dump"), place.path().join("scratch"));
    let Ok(listing) = Listing::of(&dump, &scratch) else { return };
    let flat = scratch.join("flat");
    if let Ok(mut walk) = PagemapWalk::open(&flat, "pagemap-1.img") {
        let mut pages = 0;
        while let Ok(Some(stretch)) = walk.next_stretch() {
            pages += stretch.pages;
        }
        assert_eq!(listing.bulk_bytes(), pages * 4096, "pages are named that are not there");
    }
}
