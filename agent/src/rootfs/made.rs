//! Links on the way to what CRIU makes.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::{Bound, within};
use crate::gate::Memory;

/// Returns where a link leads that CRIU comes upon in a root file system, with what is bound there and
/// what it has itself filled by then. `here` is below the root, and no link is on the way to it.
pub(super) fn link(
    here: &Path,
    root: &Path,
    bound: &[Bound<'_>],
    memory: &Memory,
) -> io::Result<PathBuf> {
    let Some(path) = here.to_str().map(|here| format!("/{here}")) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let rest = |top: &str| within(&path, top).map(str::to_owned);
    let binds = bound.iter().map(|one| (&*one.walk.name, Some(&*one.bind.source)));
    let all = binds.chain(memory.places.iter().map(|place| (&**place, None)));
    let nearest = all
        .filter_map(|(top, source)| Some((rest(top)?, top.len(), source)))
        .max_by_key(|(_, length, _)| *length);
    match nearest {
        // It is mounted there.
        Some((rest, ..)) if rest.is_empty() => Err(io::ErrorKind::InvalidInput.into()),
        Some((rest, _, Some(source))) => fs::read_link(source.join(rest)),
        Some((_, _, None)) => {
            let target = memory.links.get(&path).map(PathBuf::from);
            target.ok_or_else(|| io::ErrorKind::InvalidInput.into())
        }
        None => fs::read_link(root.join(here)),
    }
}
