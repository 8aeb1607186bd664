//! Where a CRIU that is told nothing about cgroups would be led: it makes, owns and enters what the
//! image names, but for what begins with the root of its hierarchy, which a runtime replaces by the new
//! container's cgroup (runc before 1.2 only where there are cgroups of version 1).

use std::collections::BTreeSet;

use prost::Message as _;

use super::{Cgroup, Cgroups, DEPTH_MAX, Hierarchy, Place};

/// The hierarchies of which a runtime says where the new container is. For any other name CRIU goes by
/// the dump's paths, and `unified` is where it finds version 2.
const HIERARCHIES: [&[u8]; 20] = [
    b"",
    b"name=elogind",
    b"name=openrc",
    b"name=systemd",
    b"blkio",
    b"cpu",
    b"cpuacct",
    b"cpuset",
    b"debug",
    b"devices",
    b"dmem",
    b"freezer",
    b"hugetlb",
    b"memory",
    b"misc",
    b"net_cls",
    b"net_prio",
    b"perf_event",
    b"pids",
    b"rdma",
];

/// Returns a name by which it would come to others than the new container's cgroup, or out of cgroups
/// altogether, in an image that is not `wrong`.
pub(in crate::gate) fn stray(image: &Cgroups) -> Option<String> {
    let mut names = BTreeSet::new();
    let mut all = image.hierarchies.iter().flat_map(|one| &one.names);
    let unknown = all.find(|name| !HIERARCHIES.contains(&&***name) || !names.insert(*name));
    let place = || places(image).find(|place| !is_replaced(place, &image.hierarchies));
    let root = || image.hierarchies.iter().find_map(|one| stray_root(one, image));
    let found = unknown.cloned().or_else(|| place().map(|place| place.path.clone()));
    found.or_else(root).map(|found| String::from_utf8_lossy(&found).into_owned())
}

/// Returns a cgroup that somebody is in, as the image says.
pub(in crate::gate) fn named(image: &Cgroups) -> Option<String> {
    places(image).next().map(|place| String::from_utf8_lossy(&place.path).into_owned())
}

fn places(image: &Cgroups) -> impl Iterator<Item = &Place> {
    image.sets.iter().flat_map(|set| &set.places)
}

/// Whether a place is in the cgroup that takes the place of its hierarchy's root, or within that.
fn is_replaced(place: &Place, hierarchies: &[Hierarchy]) -> bool {
    let own = hierarchies.iter().find(|one| one.names.join(&b',') == place.hierarchy);
    let Some(root) = own.and_then(|one| one.cgroups.first()) else { return false };
    // CRIU puts the rest, without a letter between, behind the new root: what it is of a path behind
    // its root, or behind where the namespace begins.
    let ends = |rest: &[u8]| rest.is_empty() || rest.starts_with(b"/");
    let rest = place.path.strip_prefix(b"/").and_then(|path| path.strip_prefix(&*root.name));
    let outside = usize::try_from(place.outside.unwrap_or(0)).ok();
    rest.is_some_and(ends)
        && outside.and_then(|at| place.path.get(at..)).is_some_and(ends)
        && !leads_away(&place.path)
}

/// Returns a name in a hierarchy that leads elsewhere, of cgroups or of what is in them.
fn stray_root(one: &Hierarchy, image: &Cgroups) -> Option<Vec<u8>> {
    let [root] = &*one.cgroups else { return one.cgroups.get(1).map(|second| second.name.clone()) };
    // It is replaced when somebody is in it; all places are well by now.
    let hierarchy = one.names.join(&b',');
    let is_used = places(image).any(|place| place.hierarchy == hierarchy);
    (!is_used).then(|| root.name.clone()).or_else(|| leads(root, DEPTH_MAX))
}

/// Returns a name of a cgroup, or of one within it, that leads out of it.
fn leads(cgroup: &Cgroup, depth: usize) -> Option<Vec<u8>> {
    let is_path = |name: &[u8]| name.contains(&b'/') || leads_away(name);
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

/// Whether a path leads to what is above its beginning.
fn leads_away(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').any(|part| part == b"..")
}
