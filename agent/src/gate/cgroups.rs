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

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;

use super::images::{Cgroup, CgroupSet, Cgroups, Permissions, Place, Property};

/// What CRIU writes down of a cgroup of version 2.
const PROPERTIES: [&[u8]; 5] = [
    b"cgroup.subtree_control",
    b"cgroup.max.descendants",
    b"cgroup.max.depth",
    b"cgroup.freeze",
    b"cgroup.type",
];

/// CRIU puts them together in a buffer of 1024 bytes, with a letter more for each word.
const VALUE_BYTES_MAX: usize = 256;

/// As the kernel makes cgroups for root.
const PERMISSIONS: (u32, u32, u32) = (0o755, 0, 0);

/// How deep cgroups are looked into. The kernel has a limit for paths, and people none for this.
const DEPTH_MAX: usize = 64;

/// Bits of a mode beside its permissions.
const DIRECTORY: u32 = 0o040_000;

/// Finds what is wrong with it however CRIU is told to treat cgroups.
pub(super) fn wrong(image: &Cgroups) -> Option<String> {
    let mut places = image.sets.iter().flat_map(|set| &set.places);
    // To CRIU, a zero ends a path, and it reads on from there.
    let length = |path: &[u8]| path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
    let beyond = |outside: u32| usize::try_from(outside).unwrap_or(usize::MAX);
    places
        .any(|place| place.outside.is_some_and(|at| beyond(at) > length(&place.path)))
        .then(|| "a cgroup namespace begins beyond the end of its cgroup's path".to_owned())
}

/// Returns a name by which a CRIU that is told nothing (`soft`) would be led to other cgroups than one
/// tree for each hierarchy, which a runtime replaces by the new container's cgroup, or out of cgroups
/// altogether: it makes paths of all these words.
pub(super) fn stray(image: &Cgroups) -> Option<String> {
    let roots: BTreeSet<&[u8]> =
        image.hierarchies.iter().flat_map(|one| &one.cgroups).map(|cgroup| &*cgroup.name).collect();
    let within = |path: &[u8]| {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        roots.iter().any(|root| {
            let rest = path.strip_prefix(*root);
            rest.is_some_and(|rest| root.is_empty() || rest.is_empty() || rest.starts_with(b"/"))
        })
    };
    // A dump that was told to leave cgroups alone has no directories, and one place in each hierarchy.
    let mut first: BTreeMap<&[u8], &[u8]> = BTreeMap::new();
    let mut places = image.sets.iter().flat_map(|set| &set.places);
    let place = places.find_map(|Place { hierarchy, path, .. }| {
        let inside = if roots.is_empty() {
            *first.entry(hierarchy).or_insert(path) == &**path
        } else {
            within(path)
        };
        let fits = inside && !leads_away(path);
        is_path(hierarchy).then_some(hierarchy).or_else(|| (!fits).then_some(path))
    });
    let hierarchy = || {
        image.hierarchies.iter().find_map(|one| {
            let name = one.names.iter().find(|name| is_path(name));
            let second = one.cgroups.get(1).map(|cgroup| &cgroup.name);
            name.or(second).cloned().or_else(|| leads(one.cgroups.first()?, DEPTH_MAX))
        })
    };
    let found = place.cloned().or_else(hierarchy)?;
    Some(String::from_utf8_lossy(&found).into_owned())
}

/// Returns a name of a cgroup, or of one within it, that leads out of it.
fn leads(cgroup: &Cgroup, depth: usize) -> Option<Vec<u8>> {
    let property = || cgroup.properties.iter().map(|one| &one.name).find(|name| is_path(name));
    let own = leads_away(&cgroup.name).then_some(&cgroup.name);
    own.or_else(property).cloned().or_else(|| {
        cgroup.children.iter().find_map(|child| match Cgroup::decode(&**child) {
            Ok(child) if depth > 0 => leads(&child, depth - 1),
            // Nobody knows what is in there.
            _ => Some(cgroup.name.clone()),
        })
    })
}

/// Whether a path leads to what is above its beginning, or ends for CRIU where it does not for us.
fn leads_away(path: &[u8]) -> bool {
    path.contains(&0) || path.split(|byte| *byte == b'/').any(|part| part == b"..")
}

/// Whether a name is none.
fn is_path(name: &[u8]) -> bool {
    name.contains(&b'/') || leads_away(name)
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
    // To CRIU a zero ends it.
    place.hierarchy.is_empty()
        && outside == Some(place.path.len())
        && place.path.strip_prefix(b"/") == Some(&*cgroup.name)
        && !cgroup.name.is_empty()
        && !cgroup.name.contains(&0)
}

/// Whether nothing would be changed of a cgroup that a runtime has made, and nothing that matters of
/// one that CRIU has.
fn is_plain(cgroup: &Cgroup) -> bool {
    let usual =
        |found: &Permissions| (found.mode & !DIRECTORY, found.uid, found.gid) == PERMISSIONS;
    let roots = |found: &Permissions| (found.mode & 0o022, found.uid, found.gid) == (0, 0, 0);
    let known = |property: &Property| {
        PROPERTIES.contains(&&*property.name)
            && property.value.len() <= VALUE_BYTES_MAX
            && property.permissions.as_ref().is_none_or(roots)
    };
    cgroup.children.is_empty()
        && cgroup.permissions.as_ref().is_none_or(usual)
        && cgroup.properties.iter().all(known)
}
