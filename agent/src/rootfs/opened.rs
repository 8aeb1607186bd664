//! Links on the way to files that CRIU opens.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;

use super::{Bound, within};

/// As many are told.
const TOLD_MAX: usize = 8;

const PLACE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Nothing but names on the way, the last one included.
const NAMES: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Returns the files to which links lead, in a root file system and in what is bound there. The kernel told
/// each of these paths of an open file, so there was none: who makes one leads CRIU, which opens it as root,
/// to wherever that points.
pub(super) fn led_elsewhere(
    root: &Path,
    bound: &[Bound<'_>],
    files: &[String],
) -> io::Result<Vec<String>> {
    let mut led = Vec::new();
    let Some(top) = at(root)? else { return Ok(led) };
    let tops: io::Result<Vec<_>> =
        bound.iter().map(|one| Ok((&*one.walk.name, at(&one.bind.source)?))).collect();
    let tops = tops?;
    for file in files {
        let nearest = tops.iter().filter_map(|(name, top)| Some((within(file, name)?, name, top)));
        let nearest = nearest.max_by_key(|(_, name, _)| name.len());
        let (rest, from) = match nearest {
            Some((rest, _, from)) => (rest, from.as_ref()),
            None => (file.trim_start_matches('/'), Some(&top)),
        };
        let Some(from) = from.filter(|_| !rest.is_empty()) else { continue };
        // What is not there, or cannot be looked at, is CRIU's to fail at.
        let found = openat2(from, rest, PLACE, Mode::empty(), NAMES);
        if found.is_err_and(|error| error == Errno::LOOP) && led.len() < TOLD_MAX {
            led.push(format!("a link leads its open file {file:?} elsewhere"));
        }
    }
    Ok(led)
}

/// Opens a place of the node, if it is there.
fn at(place: &Path) -> io::Result<Option<OwnedFd>> {
    match open(place, PLACE, Mode::empty()) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
