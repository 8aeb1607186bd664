//! Judges files that are held by a name which was deleted: what CRIU copies, what it makes a name for, and
//! what would not come back.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::check::Check;
use super::rules::{Context, GHOST_BYTES, name};
use super::view::{Process, View};
use crate::links::{self, FileId, Held, How};
use crate::mounts::Mount;

/// What becomes of a file.
enum Fate {
    /// It is copied.
    Copied,
    /// It is copied, after CRIU has tried to link it, which it has to be told.
    Tried,
    /// It is linked, which CRIU has to be told.
    Linked,
    /// It does not come back, since.
    Lost(&'static str),
}

/// Looks for other names of what is held so: where they have to be, if the files are to come back.
/// `captured` are mounts and their directories, `upper` is that of the root file system.
pub(super) fn find_names(view: &mut View, captured: &[(String, PathBuf)], upper: Option<&Path>) {
    let mounts = mounts(view);
    let place = |held: &Held| match mounts.get(&held.mount?) {
        Some(mount) if is_root(mount) => Some(None),
        Some(mount) => captured.iter().position(|(point, _)| mount.point == **point).map(Some),
        None => None,
    };
    let candidates = || {
        let all = view.processes.iter().flat_map(|process| &process.held);
        all.filter(|held| held.links > 0)
    };
    let at = |wanted| candidates().filter(move |held| place(held) == Some(wanted));
    let stamps: BTreeSet<_> = at(None).map(|held| held.stamp).collect();
    let inodes: BTreeSet<_> = at(None).map(Held::inode).collect();
    let stamps = upper.map(|upper| links::named(upper, &stamps, links::by_stamp));
    let inodes = upper.map(|upper| links::named(upper, &inodes, links::by_inode));
    let (stamps, inodes) = (stamps.unwrap_or_default(), inodes.unwrap_or_default());
    let mut numbers: BTreeMap<usize, BTreeSet<FileId>> = BTreeMap::new();
    for (index, (_, directory)) in captured.iter().enumerate() {
        let wanted: BTreeSet<_> = at(Some(index)).map(|held| held.file).collect();
        numbers.insert(index, links::named(directory, &wanted, links::by_number));
    }
    let is_named = |held: &Held| match place(held) {
        Some(None) => stamps.contains(&held.stamp) || inodes.contains(&held.inode()),
        Some(Some(index)) => numbers.get(&index).is_some_and(|found| found.contains(&held.file)),
        None => false,
    };
    let named: BTreeSet<_> =
        candidates().filter(|held| is_named(held)).map(|held| held.file).collect();
    for held in view.processes.iter_mut().flat_map(|process| &mut process.held) {
        held.named = held.links > 0 && named.contains(&held.file);
    }
}

/// Whether CRIU has to be told to link.
pub(super) fn needs_links(view: &View) -> bool {
    let mounts = mounts(view);
    let inside = |held: &Held| held.mount.is_some_and(|id| mounts.contains_key(&id));
    let mut all = view.processes.iter().flat_map(|process| &process.held);
    all.any(|held| held.links > 0 && inside(held))
}

/// Says what is wrong with what is held so.
pub(super) fn of_all(view: &View, context: &Context, say: &mut impl FnMut(Check, String)) {
    let mounts = mounts(view);
    // Names that several files had are nobody's in a dump.
    let mut names: BTreeMap<(Option<u64>, &str), BTreeSet<FileId>> = BTreeMap::new();
    for held in view.processes.iter().flat_map(|process| &process.held) {
        if held.links > 0 {
            names.entry((held.mount, &held.name)).or_default().insert(held.file);
        }
    }
    for (process, held) in view
        .processes
        .iter()
        .flat_map(|process| process.held.iter().map(move |held| (process, held)))
    {
        let mount = held.mount.and_then(|id| mounts.get(&id)).copied();
        of_held(process, held, mount, context, say);
        let is_captured = mount.is_some_and(|mount| is_captured(mount, context));
        let others = names.get(&(held.mount, &*held.name)).map_or(0, BTreeSet::len);
        if is_captured && held.links > 0 && others > 1 {
            say(Check::LinkedFile, format!("{}; another one had that name too", at(process, held)));
        }
    }
}

fn of_held(
    process: &Process,
    held: &Held,
    mount: Option<&Mount>,
    context: &Context,
    say: &mut impl FnMut(Check, String),
) {
    let at = || at(process, held);
    let lost = |reason: &str| format!("{}; {reason}", at());
    let Some(mount) = mount else {
        // What is mapped of no mount of its is memory, which CRIU takes as such; so is a memfd.
        if held.how != How::Mapping && held.links > 0 {
            say(Check::LinkedFile, lost("it is outside of the container"));
        }
        return;
    };
    let fate = fate(held, mount, context);
    let limit = context.options.bytes("ghost-limit").unwrap_or(GHOST_BYTES);
    if matches!(fate, Fate::Copied | Fate::Tried) && held.length > limit {
        say(Check::DeletedFile, format!("{}, {} bytes", at(), held.length));
    }
    match fate {
        Fate::Copied => {}
        Fate::Lost(reason) => say(Check::LinkedFile, lost(reason)),
        Fate::Linked | Fate::Tried if context.own_options || context.options.has(links::OPTION) => {
        }
        Fate::Linked | Fate::Tried => say(Check::LinkRemap, at()),
    }
}

fn at(process: &Process, held: &Held) -> String {
    format!("{} of {}: {}", held.how, name(process), held.name)
}

fn fate(held: &Held, mount: &Mount, context: &Context) -> Fate {
    if mount.read_only && !is_root(mount) {
        return Fate::Lost("its mount is for reading only, and no restore writes there");
    }
    if held.links == 0 {
        return Fate::Copied;
    }
    if held.is_directory() {
        return Fate::Lost("it is a directory");
    }
    if is_captured(mount, context) {
        return if held.named {
            Fate::Linked
        } else {
            Fate::Lost("its other name is not on its mount")
        };
    }
    if is_root(mount) {
        // One of the image has no name in what was written, and none at all.
        return if held.named {
            Fate::Lost("it was written by the container, and comes back as two files")
        } else {
            Fate::Tried
        };
    }
    let bound = context.bound.iter().any(|place| mount.point == **place);
    if mount.kind == "tmpfs" && !bound {
        // CRIU takes all of it.
        return Fate::Linked;
    }
    Fate::Lost("its mount does not go along")
}

fn is_captured(mount: &Mount, context: &Context) -> bool {
    context.captured.iter().any(|place| mount.point == **place)
}

fn is_root(mount: &Mount) -> bool {
    mount.point == *"/" && mount.kind == "overlay"
}

fn mounts(view: &View) -> BTreeMap<u64, &Mount> {
    let all = view.processes.iter().flat_map(|process| &process.mounts);
    all.map(|mount| (mount.id, mount)).collect()
}
