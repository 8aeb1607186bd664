//! What is packed goes nowhere into the dump itself: it would be part of what is packed, and the
//! directory no dump any more.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use super::{PackError, PackRequest};
use crate::store::Store;

/// Refuses places inside the dump. Blocks.
pub(super) fn check(dump: &Path, places: &[(&'static str, PathBuf)]) -> Result<(), PackError> {
    let Ok(inside) = std::fs::metadata(dump) else {
        // What is wrong with it is told by who reads it.
        return Ok(());
    };
    let dump = (inside.dev(), inside.ino());
    for (what, place) in places {
        let lies = is_beneath(place, dump);
        if lies.map_err(|kind| PackError::Io("find out where it is to be written", kind))? {
            return Err(PackError::InDump { what, place: place.clone() });
        }
    }
    Ok(())
}

/// Returns the places on this machine that a pack reads from or writes to beside the dump.
pub(super) fn places(request: &PackRequest, store: &Store) -> Vec<(&'static str, PathBuf)> {
    let layout = |store: &Store| match store {
        Store::Layout(layout) => Some(layout.directory().to_owned()),
        Store::Registry(_) => None,
    };
    let scratch = request.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let places = [
        ("the image layout", layout(store)),
        ("the base", request.base.as_ref().and_then(|base| layout(&base.store))),
        ("the directory for temporary files", Some(scratch)),
    ];
    places.into_iter().filter_map(|(what, place)| Some((what, place?))).collect()
}

/// Whether a path is a directory or beneath it, whatever links and mounts lead there. What of it does
/// not exist yet would be made where the rest of it is.
fn is_beneath(path: &Path, directory: (u64, u64)) -> io::Result<bool> {
    let mut existing = std::path::absolute(path)?;
    let mut real = loop {
        match std::fs::canonicalize(&existing) {
            Ok(real) => break real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A link that leads nowhere yet would be followed, or be refused, later.
                let link = std::fs::read_link(&existing).ok();
                let parent = existing.parent().map(Path::to_owned).ok_or(error)?;
                existing = link.map_or(parent.clone(), |target| lexically(&parent.join(target)));
            }
            // What is no directory is told by who writes there.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Ok(false),
            Err(error) => return Err(error),
        }
    };
    loop {
        let found = std::fs::metadata(&real)?;
        if (found.dev(), found.ino()) == directory {
            return Ok(true);
        }
        if !real.pop() {
            return Ok(false);
        }
    }
}

/// Takes `..` and `.` out of a path of which not all exists.
fn lexically(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}
