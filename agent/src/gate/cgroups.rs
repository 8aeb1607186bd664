//! What CRIU would do with the cgroups of a dump, if it were let (`manage-cgroups=soft`, and
//! `cgroup-root` at the cgroup of the new container; `criu/cgroup.c` of 4.1.1 to 4.2.1).
//!
//! It makes every directory that is named and not there, writes properties into those that it has
//! made, gives all of them the permissions of the dump, and moves processes to where their set says.
//! Paths are made of what the image says, `..` included. `cgroup-root` takes the place of the
//! first directory of a hierarchy where a set's path begins with it, and of nothing else.
//!
//! So only one form of dump is let through, the usual one, of which nothing is left but the new
//! root: one cgroup of version 2 without others in it, which is where the processes' cgroup namespace
//! begins, and sets that all say so. CRIU writes one for the first process with its threads, and one
//! more for each other thread. That cgroup is there, since the runtime has made it and CRIU is in it,
//! and CRIU skips the properties of what is there.

use std::collections::BTreeSet;

use prost::Message as _;

use super::images::{Cgroup, CgroupSet, Cgroups, Hierarchy, Permissions, Place, Property};

/// What CRIU writes down of a cgroup of version 2.
const PROPERTIES: [&[u8]; 5] = [
    SUBTREE_CONTROL,
    b"cgroup.max.descendants",
    b"cgroup.max.depth",
    b"cgroup.freeze",
    b"cgroup.type",
];

/// The property that lists controllers.
const SUBTREE_CONTROL: &[u8] = b"cgroup.subtree_control";

/// CRIU puts what is in there and what shall be together in 1024 bytes, with a letter more for each
/// word, and looks at no end.
const CONTROLLERS_BYTES_MAX: usize = 256;

/// CRIU reads no more of any property.
const VALUE_BYTES_MAX: usize = 1024;

/// CRIU puts paths of cgroups together in 4096 bytes of its stack, and looks at no end, also when it is
/// told to leave cgroups alone. The new root is in front of them. The kernel tells no longer ones than
/// that, and people make none of half the length.
const PATH_BYTES_MAX: usize = 2048;

/// CRIU puts the names of a hierarchy together in 128 bytes, with `none,` before them and a letter more
/// for each. All that the kernel knows are not as long.
const NAMES_BYTES_MAX: usize = 120;

/// The kernel knows sixteen, and people give few a name.
const HIERARCHIES_MAX: usize = 64;

const ENDS_WITHIN: &str = "a name in it has an end within";

/// As the kernel makes cgroups for root.
const PERMISSIONS: (u32, u32, u32) = (0o755, 0, 0);

/// How deep cgroups are looked into. The kernel has a limit for paths, and people none for this.
const DEPTH_MAX: usize = 64;

/// Bits of a mode beside its permissions.
const DIRECTORY: u32 = 0o040_000;

/// Finds what leads CRIU beyond the end of what it has in memory or to files that are no cgroup's, or has
/// it look for a name for ever, however it is told to treat cgroups: it replaces roots and puts paths
/// together in any case. A CRIU writes none of this down.
pub(super) fn wrong(image: &Cgroups) -> Option<&'static str> {
    if image.hierarchies.len() > HIERARCHIES_MAX {
        return Some("there are too many hierarchies of cgroups");
    }
    // It writes into them at the end of a restore, without a directory in which they would be.
    if image.sets.is_empty() && !image.hierarchies.is_empty() {
        return Some("there are hierarchies of cgroups, and nobody is in any");
    }
    let mut places = image.sets.iter().flat_map(|set| &set.places);
    let hierarchy = || image.hierarchies.iter().find_map(wrong_hierarchy);
    hierarchy().or_else(|| places.find_map(|place| wrong_place(place, &image.hierarchies)))
}

fn wrong_hierarchy(one: &Hierarchy) -> Option<&'static str> {
    let bytes = one.names.iter().fold(0, |sum: usize, name| sum.saturating_add(name.len() + 1));
    if bytes > NAMES_BYTES_MAX {
        return Some("the names of a hierarchy of cgroups are too long");
    }
    // It looks for an empty name in another again and again, and finds it.
    if one.names.is_empty() || one.names.len() > 1 && one.names.iter().any(Vec::is_empty) {
        return Some("a hierarchy of cgroups has no name");
    }
    if one.names.iter().any(|name| name.contains(&0)) {
        return Some(ENDS_WITHIN);
    }
    // It is the name of a directory, but for what names it for the kernel.
    let is_path = |name: &Vec<u8>| {
        let name = name.strip_prefix(b"name=").unwrap_or(name);
        name.contains(&b'/') || name == b"." || name == b".."
    };
    if one.names.iter().any(is_path) {
        return Some("the name of a hierarchy of cgroups is a path");
    }
    one.cgroups.iter().find_map(|cgroup| wrong_cgroup(cgroup, PATH_BYTES_MAX, DEPTH_MAX))
}

/// The same for a cgroup, and those within it, of whose paths there is `room` for that many bytes.
fn wrong_cgroup(cgroup: &Cgroup, room: usize, depth: usize) -> Option<&'static str> {
    let Some(room) = room.checked_sub(cgroup.name.len() + 1) else {
        return Some("the path of a cgroup is too long");
    };
    let mut names = cgroup.properties.iter().map(|property| &property.name).chain([&cgroup.name]);
    if names.any(|name| name.contains(&0)) {
        return Some(ENDS_WITHIN);
    }
    let too_long = |property: &Property| {
        let listed = property.name == SUBTREE_CONTROL;
        property.value.len() > if listed { CONTROLLERS_BYTES_MAX } else { VALUE_BYTES_MAX }
    };
    if cgroup.properties.iter().any(too_long) {
        return Some("a property of a cgroup is too long");
    }
    cgroup.children.iter().find_map(|child| match Cgroup::decode(&**child) {
        Ok(child) if depth > 0 => wrong_cgroup(&child, room, depth - 1),
        Ok(_) => Some("cgroups are too deep within each other"),
        Err(_) => Some("a cgroup cannot be decoded"),
    })
}

fn wrong_place(place: &Place, hierarchies: &[Hierarchy]) -> Option<&'static str> {
    let Place { hierarchy, path, outside } = place;
    if path.contains(&0) || hierarchy.contains(&0) {
        return Some(ENDS_WITHIN);
    }
    // CRIU leaves the first letter out.
    if !path.starts_with(b"/") {
        return Some("the path of a cgroup does not begin at its hierarchy");
    }
    if path.len() > PATH_BYTES_MAX || hierarchy.len() > NAMES_BYTES_MAX {
        return Some("the path of a cgroup is too long");
    }
    let outside = outside.map_or(0, |outside| usize::try_from(outside).unwrap_or(usize::MAX));
    let replaced = hierarchies.iter().filter(|one| is_of(hierarchy, &one.names));
    let mut roots = replaced.flat_map(|one| &one.cgroups).map(|root| root.name.len() + 1);
    (outside > path.len() || roots.any(|root| outside > root))
        .then_some("a cgroup namespace begins beyond the end of its cgroup's path")
}

/// Whether CRIU takes the `hierarchy` of a set for the one with these names: it looks for each of them
/// at the end of a word, and asks not where it begins.
fn is_of(hierarchy: &[u8], names: &[Vec<u8>]) -> bool {
    let ends = |name: &[u8]| {
        hierarchy.windows(name.len()).enumerate().any(|(at, found)| {
            let next = hierarchy.get(at + name.len());
            found == name && next.is_none_or(|next| *next == b',')
        })
    };
    match names {
        [name] if name.is_empty() => hierarchy.is_empty(),
        // Nobody looks for an empty one: `wrong_hierarchy` comes first.
        names => names.iter().all(|name| !name.is_empty() && ends(name)),
    }
}

/// Returns the sets of cgroups that threads are in. CRIU counts from one: zero is none.
pub(super) fn sets(image: &Cgroups) -> BTreeSet<u32> {
    image.sets.iter().map(|set| set.id).filter(|id| *id != 0).collect()
}

/// Returns the sets that threads may be in, when the image has that form.
pub(super) fn own(image: &Cgroups) -> Option<BTreeSet<u32>> {
    let [hierarchy] = &*image.hierarchies else { return None };
    let ([name], [cgroup]) = (&*hierarchy.names, &*hierarchy.cgroups) else { return None };
    let unified = name.is_empty() && hierarchy.threaded != Some(true);
    let sets: BTreeSet<u32> = image.sets.iter().map(|set| set.id).collect();
    // To CRIU, none is none, and the first of two is both.
    let known = !sets.is_empty() && !sets.contains(&0) && sets.len() == image.sets.len();
    let within = image.sets.iter().all(|set| is_root(set, cgroup));
    (unified && known && within && is_plain(cgroup)).then_some(sets)
}

/// Whether of a set's path nothing is left but the new root.
fn is_root(set: &CgroupSet, cgroup: &Cgroup) -> bool {
    let [place] = &*set.places else { return false };
    let outside = place.outside.and_then(|outside| usize::try_from(outside).ok());
    place.hierarchy.is_empty()
        && outside == Some(place.path.len())
        && place.path.strip_prefix(b"/") == Some(&*cgroup.name)
        && !cgroup.name.is_empty()
}

/// Whether nothing would be changed of a cgroup that a runtime has made, and nothing that matters of
/// one that CRIU has.
fn is_plain(cgroup: &Cgroup) -> bool {
    let usual =
        |found: &Permissions| (found.mode & !DIRECTORY, found.uid, found.gid) == PERMISSIONS;
    let roots = |found: &Permissions| (found.mode & 0o022, found.uid, found.gid) == (0, 0, 0);
    let known = |property: &Property| {
        PROPERTIES.contains(&&*property.name) && property.permissions.as_ref().is_none_or(roots)
    };
    cgroup.children.is_empty()
        && cgroup.permissions.as_ref().is_none_or(usual)
        && cgroup.properties.iter().all(known)
}
