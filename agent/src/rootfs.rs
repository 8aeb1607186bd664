//! Where the root file system of a task is on the node, and where links in it lead: by the path that a
//! place has there, the runtime calls what it hands to CRIU from outside (runc's `addCriuDumpMount` and
//! `addCriuRestoreMount`, of 1.1 to 1.5). What is restored is the checkpoint's own, which may lead
//! `/var/run` to `/run`, or one volume's place to that of another. The runtime looks when it has mounted
//! all volumes for a while, of which some may be left: so a place must have one name, whatever is mounted
//! (`spec/decisions/0076`).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;

use crate::gate::{Paths, leads_out};
use crate::mounts;
use crate::runtime::Mount;

mod made;
mod opened;

/// Where the runtime mounts what is no volume, and what hides files has its name.
const RUNTIMES: [&str; 3] = ["/dev/", "/proc/", "/sys/"];

/// What the runtime hands to CRIU for each container, beside the devices of the specification.
pub(crate) const DEVICES: [&str; 6] =
    ["/dev/null", "/dev/random", "/dev/full", "/dev/tty", "/dev/zero", "/dev/urandom"];

/// As many links as the runtime follows for one place.
const LINKS_MAX: usize = 255;

/// What ends a name for CRIU: it looks for `mnt[NAME]`, and takes what is behind the colon after that.
pub(crate) const NAME_END: char = ']';

/// What is mounted from the node.
#[derive(Clone, Debug)]
pub(crate) struct Bind {
    pub(crate) place: String,
    pub(crate) source: PathBuf,
    pub(crate) read_only: bool,
}

/// What a container has beside binds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Others {
    /// Places of what comes from outside too.
    pub(crate) external: Vec<String>,
    /// Places of the specification's devices.
    pub(crate) devices: Vec<String>,
    /// Places of other mounts, which the runtime makes.
    pub(crate) mounts: Vec<String>,
    /// By which CRIU goes here, or in binds, as root: no link is on the way to a file that it opens, but
    /// there may be to a socket.
    pub(crate) paths: Paths,
}

/// What the runtime does at a place before a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Nothing,
    /// Makes it where it is missing.
    Makes,
    /// Makes it, and mounts something there for a while.
    Mounts,
}

/// The names of places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    all: BTreeMap<String, String>,
    reasons: BTreeSet<String>,
}

/// A place that was looked up.
struct Walk {
    name: String,
    /// Where the links on the way are, each without a link in it.
    links: Vec<String>,
    /// What was left by `..`.
    left: Vec<String>,
}

/// A bind with its walk, and where its source really is: on which device, and where on that.
struct Bound<'a> {
    bind: &'a Bind,
    walk: &'a Walk,
    real: (u64, PathBuf),
}

impl Names {
    /// Looks up the places of binds in a root file system, and of what comes from outside beside them; of
    /// devices and other mounts no name is kept. What is in the binds by then is looked at too: the
    /// runtime mounts each of them for a while, makes the places of the next in it, and goes by whatever
    /// links it finds.
    pub(crate) fn look_up(root: &Path, binds: &[Bind], others: &Others) -> io::Result<Self> {
        let mut names = Self::default();
        let mut walks = BTreeMap::new();
        for place in binds.iter().map(|bind| &bind.place).chain(&others.external) {
            match walk(root, place)? {
                Ok(walk) => {
                    names.all.insert(place.clone(), walk.name.clone());
                    walks.insert(place.clone(), walk);
                }
                Err(reason) => drop(names.reasons.insert(reason)),
            }
        }
        let mounts = mounts::own()?;
        let bound = binds.iter().filter_map(|bind| {
            let real = real(&bind.source, &mounts);
            walks.get(&bind.place).map(|walk| Bound { bind, walk, real })
        });
        let bound: Vec<Bound<'_>> = bound.collect();
        for (place, walk) in &walks {
            let others = walks.iter().filter(|(other, _)| *other != place);
            let twin = others.clone().find(|(_, its)| its.name == walk.name);
            names.reasons.extend(walk.wrong(place, root, twin.map(|(other, _)| &**other)));
            let is_bind = binds.iter().any(|bind| bind.place == *place);
            let does = if is_bind { Does::Mounts } else { Does::Nothing };
            names.reasons.extend(walk.wrong_beside(place, does, &bound)?);
        }
        for place in others.mounts.iter().filter(|place| !walks.contains_key(*place)) {
            match walk(root, place)? {
                Ok(walk) => {
                    names.reasons.extend(walk.wrong_beside(place, Does::Makes, &bound)?);
                }
                Err(reason) => drop(names.reasons.insert(reason)),
            }
        }
        let known = others.devices.iter().map(|device| &**device);
        for device in DEVICES.into_iter().chain(known).filter(|device| !walks.contains_key(*device))
        {
            // One that leads nowhere has its place for a name.
            let Ok(walk) = walk(root, device)? else { continue };
            let twin = bound.iter().find(|bound| bound.walk.name == walk.name);
            if twin.is_some() || walk.name == "/" || walk.name.contains(NAME_END) {
                let twin = twin.map(|bound| &*bound.bind.place);
                names.reasons.extend(walk.wrong(device, root, twin));
            }
            names.reasons.extend(walk.wrong_beside(device, Does::Nothing, &bound)?);
        }
        names.reasons.extend(hidden(&bound));
        names.reasons.extend(opened::led_elsewhere(root, &bound, &others.paths.opened)?);
        for place in &others.paths.made {
            // What `..` leaves is passed by the kernel, too.
            let is_led =
                |walk: Walk| leads_out(&walk.name) || walk.left.iter().any(|left| leads_out(left));
            let read = |here: &Path| made::link(here, root, &bound, &others.paths.memory);
            if follow(place, read)?.map_or(true, is_led) {
                names
                    .reasons
                    .insert(format!("a link leads {place:?}, which CRIU makes, elsewhere"));
            }
        }
        Ok(names)
    }

    /// Returns all names.
    pub(crate) fn all(&self) -> impl Iterator<Item = &String> {
        self.all.values()
    }

    /// Returns the name of a place; one that was not looked up is its own.
    pub(crate) fn of(&self, place: &str) -> String {
        self.all.get(place).map_or(place, |name| name).to_owned()
    }

    /// Returns why the runtime could take one for another, or make something where nobody may.
    pub(crate) fn clashes(&self) -> BTreeSet<String> {
        self.reasons.clone()
    }
}

impl Walk {
    /// Returns what is wrong with the name, beside that of `twin`.
    fn wrong(&self, place: &str, root: &Path, twin: Option<&str>) -> Option<String> {
        let name = &*self.name;
        let is_led = !self.links.is_empty();
        let why = match twin {
            Some(twin) => format!("where the new container has {twin:?}"),
            None if name.contains(NAME_END) => "of which CRIU takes a part for the name".to_owned(),
            None if is_led && RUNTIMES.iter().any(|top| name.starts_with(top)) => {
                "where the runtime has its own".to_owned()
            }
            None if name == "/" => "which is all of it".to_owned(),
            // The runtime takes the rest for the place then.
            None if Path::new(place).starts_with(root) => "which it has on the node".to_owned(),
            None => return None,
        };
        Some(if is_led {
            format!("a link in its root file system leads {place:?} to {name:?}, {why}")
        } else {
            format!("{place:?} is {name:?} in its root file system, {why}")
        })
    }

    /// Returns what is wrong where binds may be mounted, and may not be.
    fn wrong_beside(
        &self,
        place: &str,
        does: Does,
        bound: &[Bound<'_>],
    ) -> io::Result<Vec<String>> {
        let mut reasons = Vec::new();
        for Bound { bind, walk, .. } in bound {
            let passes = |way: &&String| within(way, &walk.name).is_some();
            if let Some(way) = self.links.iter().chain(&self.left).find(passes) {
                reasons.push(format!(
                    "{place:?} leads by way of {way:?} in its root file system, which is hidden by what the \
                     new container has on {:?}",
                    bind.place
                ));
            }
        }
        let above = |bound: &&Bound<'_>| {
            within(&self.name, &bound.walk.name).is_some_and(|rest| !rest.is_empty())
        };
        for one in bound.iter().filter(above) {
            // What is missing is made in the nearest. That is mounted whenever this place is made, if it is
            // above it by the places in the specification too: of these the runtime passes over all that
            // are below a tmpfs.
            let is_nearer = |other: &Bound<'_>| {
                other.walk.name.len() > one.walk.name.len()
                    && within(place, &other.bind.place).is_some()
            };
            let makes = does != Does::Nothing && !bound.iter().filter(above).any(is_nearer);
            reasons.extend(self.wrong_within(place, one, makes)?);
            let shares = |other: &&Bound<'_>| {
                let ((device, path), (own_device, own)) = (&other.real, &one.real);
                let overlap = path.starts_with(own) || own.starts_with(path);
                other.bind.place != one.bind.place && device == own_device && overlap
            };
            if does == Does::Mounts
                && let Some(other) = bound.iter().find(shares)
            {
                reasons.push(format!(
                    "{place:?} is within {:?}, of which {:?} is a part or the whole once more: what is \
                     mounted in one is in the other too",
                    one.bind.place, other.bind.place
                ));
            }
        }
        Ok(reasons)
    }

    /// Returns what is wrong with it in the content of a bind; `makes` is whether the runtime makes it there.
    fn wrong_within(
        &self,
        place: &str,
        above: &Bound<'_>,
        makes: bool,
    ) -> io::Result<Option<String>> {
        let bind = above.bind;
        let told = |what: &str| Ok(Some(format!("{place:?} is {what} {:?}", bind.place)));
        let mut way = bind.source.clone();
        for part in within(&self.name, &above.walk.name).unwrap_or_default().split('/') {
            way.push(part);
            match fs::symlink_metadata(&way) {
                Ok(found) if found.is_symlink() => {
                    return told("behind a link in what is mounted on");
                }
                Ok(_) => {}
                Err(error) if is_absent(&error) && bind.read_only && makes => {
                    return told("missing in what is mounted for reading only on");
                }
                Err(error) if is_absent(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

/// Returns which binds another one hides that is mounted later: the runtime does not find them again.
fn hidden<'a>(bound: &'a [Bound<'a>]) -> impl Iterator<Item = String> + 'a {
    bound.iter().enumerate().flat_map(|(index, one)| {
        let later = bound.iter().skip(index + 1);
        let hides = later.filter(|other| {
            let rest = within(&one.walk.name, &other.walk.name);
            rest.is_some_and(|rest| !rest.is_empty())
        });
        hides.map(|other| {
            let (one, other) = (&one.bind.place, &other.bind.place);
            format!("{one:?} is mounted first, and hidden by what is mounted on {other:?}")
        })
    })
}

/// Returns where a directory really is: on which device, and where on that. One that is not there is
/// nowhere else.
fn real(source: &Path, mounts: &[mounts::Mount]) -> (u64, PathBuf) {
    let path = fs::canonicalize(source).unwrap_or_else(|_| source.to_owned());
    let under = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    let found = under.max_by_key(|mount| mount.point.components().count());
    let on = |mount: &mounts::Mount| {
        let rest = path.strip_prefix(&mount.point).unwrap_or(Path::new(""));
        (mount.device, mount.root.join(rest))
    };
    found.map_or_else(|| (0, path.clone()), on)
}

/// Follows a place through the links of a root file system, as runc's `SecureJoin` does: what is not
/// there is no link. An inner error says why it leads nowhere.
fn walk(root: &Path, place: &str) -> io::Result<Result<Walk, String>> {
    follow(place, |here| fs::read_link(root.join(here)))
}

/// Does the same with whatever `read` says where a link leads, by its path from the root on.
fn follow(
    place: &str,
    read: impl Fn(&Path) -> io::Result<PathBuf>,
) -> io::Result<Result<Walk, String>> {
    let (mut links, mut left) = (Vec::new(), Vec::new());
    let (mut reached, mut to_come) = (PathBuf::new(), PathBuf::from(place));
    loop {
        let mut parts = to_come.components();
        let Some(part) = parts.next() else { break };
        let rest = parts.as_path().to_owned();
        match part {
            Component::ParentDir => {
                let Some(way) = reached.to_str() else { return Ok(Err(no_text(place))) };
                left.extend((!way.is_empty()).then(|| format!("/{way}")));
                reached.pop();
            }
            Component::Normal(name) => {
                let here = reached.join(name);
                match read(&here) {
                    Ok(target) => {
                        let Some(link) = here.to_str() else { return Ok(Err(no_text(place))) };
                        links.push(format!("/{link}"));
                        if links.len() > LINKS_MAX {
                            let told = "links in its root file system lead round in a circle from";
                            return Ok(Err(format!("{told} {place:?}")));
                        }
                        if target.is_absolute() {
                            reached = PathBuf::new();
                        }
                        to_come = target.join(rest);
                        continue;
                    }
                    // It is no link.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => reached = here,
                    Err(error) if is_absent(&error) => reached = here,
                    Err(error) => return Err(error),
                }
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
        to_come = rest;
    }
    Ok(reached
        .to_str()
        .map(|name| Walk { name: format!("/{name}"), links, left })
        .ok_or_else(|| no_text(place)))
}

fn no_text(place: &str) -> String {
    format!("a link in its root file system leads {place:?} to what is no text")
}

/// Returns what is left of a path below another one; nothing for that itself.
fn within<'a>(path: &'a str, top: &str) -> Option<&'a str> {
    let rest = path.strip_prefix(top.trim_end_matches('/'))?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Returns where a root file system is mounted on the node: an overlay by the directory that is written
/// to, whatever containerd's own directory is called, and another one in its `usual` place.
pub(crate) fn mounted(rootfs: &[Mount], usual: &Path) -> io::Result<PathBuf> {
    find(rootfs, usual, &mounts::own()?)
}

fn find(rootfs: &[Mount], usual: &Path, mounts: &[mounts::Mount]) -> io::Result<PathBuf> {
    let upper = rootfs.iter().find_map(|mount| mount.option("upperdir"));
    let is_it = |mount: &&mounts::Mount| match upper {
        Some(upper) => {
            let mut options = mount.options.split(',');
            let is_upper = |option: &str| option.strip_prefix("upperdir=") == Some(upper);
            mount.kind == "overlay" && mount.root == *"/" && options.any(is_upper)
        }
        None => mount.point == usual,
    };
    let found = mounts.iter().rev().find(is_it).map(|mount| mount.point.clone());
    found.ok_or_else(|| io::Error::other(format!("it is not mounted at {}", usual.display())))
}

#[cfg(test)]
mod tests;
