//! Where the root file system of a task is on the node, and where links in it lead: by the path that a
//! place has there, before anything is mounted, the runtime calls what it hands to CRIU from outside
//! (runc's `addCriuDumpMount` and `addCriuRestoreMount`, of 1.1 to 1.5). What is restored is the
//! checkpoint's own, which may lead `/var/run` to `/run`, or one volume's place to that of another.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;

use crate::mounts;
use crate::runtime::Mount;

/// Where the runtime mounts what is no volume, and what hides files has its name.
const RUNTIMES: [&str; 3] = ["/dev/", "/proc/", "/sys/"];

/// What the runtime hands to CRIU for each container, beside the devices of the specification.
const DEVICES: [&str; 6] =
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
}

impl Names {
    /// Looks up the places of binds in a root file system, `others` in which nothing of the node is
    /// mounted, and those of the specification's `devices`, of which no name is kept. What is in the binds by then is looked at too: the runtime mounts each of them for a
    /// while, makes the places of the next in it, and goes by whatever links it finds.
    pub(crate) fn look_up(
        root: &Path,
        binds: &[Bind],
        others: impl IntoIterator<Item = String>,
        devices: &[String],
    ) -> io::Result<Self> {
        let mut names = Self::default();
        let mut walks = BTreeMap::new();
        for place in binds.iter().map(|bind| bind.place.clone()).chain(others) {
            match walk(root, &place)? {
                Ok(walk) => {
                    names.all.insert(place.clone(), walk.name.clone());
                    walks.insert(place, walk);
                }
                Err(reason) => drop(names.reasons.insert(reason)),
            }
        }
        for device in DEVICES.into_iter().chain(devices.iter().map(|device| &**device)) {
            // One that leads nowhere has its place for a name.
            if let Ok(walk) = walk(root, device)?
                && walk.name.contains(NAME_END)
            {
                names.reasons.extend(walk.wrong(device, root, None));
            }
        }
        for (place, walk) in &walks {
            let others = walks.iter().filter(|(other, _)| *other != place);
            let twin = others.clone().find(|(_, its)| its.name == walk.name);
            let twin = twin.map(|(other, _)| &**other);
            names.reasons.extend(walk.wrong(place, root, twin));
            for bind in binds {
                let Some(above) = walks.get(&bind.place) else { continue };
                names.reasons.extend(walk.wrong_within(place, bind, above)?);
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

    /// Returns what is wrong where another one may be mounted, and may not be.
    fn wrong_within(&self, place: &str, bind: &Bind, above: &Self) -> io::Result<Option<String>> {
        let top = &*above.name;
        let led = self.links.iter().find(|link| within(link, top).is_some());
        if let Some(link) = led {
            return Ok(Some(format!(
                "the link {link:?} in its root file system leads {place:?}, and is hidden by what \
                 the new container has on {:?}",
                bind.place
            )));
        }
        let Some(rest) = within(&self.name, top).filter(|rest| !rest.is_empty()) else {
            return Ok(None);
        };
        let told = |what: &str| Ok(Some(format!("{place:?} is {what} {:?}", bind.place)));
        let mut way = bind.source.clone();
        for part in rest.split('/') {
            way.push(part);
            match fs::symlink_metadata(&way) {
                Ok(found) if found.is_symlink() => {
                    return told("behind a link in what is mounted on");
                }
                Ok(_) => {}
                Err(error) if is_absent(&error) && bind.read_only => {
                    return told("missing in what is mounted for reading only on");
                }
                Err(error) if is_absent(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

/// Follows a place through the links of a root file system, as runc's `SecureJoin` does: what is not
/// there is no link. An inner error says why it leads nowhere.
fn walk(root: &Path, place: &str) -> io::Result<Result<Walk, String>> {
    let (mut links, mut reached, mut left) = (Vec::new(), PathBuf::new(), PathBuf::from(place));
    loop {
        let mut parts = left.components();
        let Some(part) = parts.next() else { break };
        let rest = parts.as_path().to_owned();
        match part {
            Component::ParentDir => drop(reached.pop()),
            Component::Normal(name) => {
                let here = reached.join(name);
                match fs::read_link(root.join(&here)) {
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
                        left = target.join(rest);
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
        left = rest;
    }
    Ok(reached
        .to_str()
        .map(|name| Walk { name: format!("/{name}"), links })
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
mod tests {
    use std::os::unix::fs::symlink;

    use fs_err as fs;

    use super::*;

    #[test]
    fn a_root_is_found_by_what_is_written_to() {
        let lines = "9 1 0:40 / /run/c/one/rootfs rw - overlay overlay rw,lowerdir=/l,upperdir=/s/1\n\
                     8 1 0:41 / /run/c/two/rootfs rw - overlay overlay rw,upperdir=/s/2,workdir=/w\n\
                     7 1 8:1 /s/3 /run/c/three/rootfs rw - ext4 /dev/root rw\n\
                     6 1 8:1 /etc /run/c/two/rootfs/etc rw - ext4 /dev/root rw\n";
        let mounts: Vec<_> = mounts::read(lines.as_bytes()).collect();
        let root = |option: &str, usual: &str| {
            let options = vec![option.to_owned()];
            let mount = Mount {
                kind: String::new(),
                source: String::new(),
                target: String::new(),
                options,
            };
            find(&[mount], Path::new(usual), &mounts).map_err(|error| error.to_string())
        };
        // Where containerd has it is not always known.
        assert_eq!(root("upperdir=/s/2", "/elsewhere"), Ok("/run/c/two/rootfs".into()));
        assert_eq!(root("rbind", "/run/c/three/rootfs"), Ok("/run/c/three/rootfs".into()));
        assert!(root("upperdir=/s/9", "/run/c/one/rootfs").unwrap_err().contains("/run/c/one"));
        assert!(root("rbind", "/run/c").unwrap_err().contains("not mounted"));
    }

    fn binds(all: &[&str]) -> Vec<Bind> {
        let bind = |place: &&str| Bind {
            place: (*place).to_owned(),
            source: "/none".into(),
            read_only: false,
        };
        all.iter().map(bind).collect()
    }

    /// A root file system with `/var/run` as most have it, and what an attacker adds.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for directory in ["var", "run", "data", "sys/fs"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        for (link, target) in [
            ("var/run", "/run"),
            ("secret", "../../data"),
            ("null", "dev/null"),
            ("sys/fs/cgroup", "/data"),
            ("loop", "loop"),
        ] {
            symlink(target, root.path().join(link)).unwrap();
        }
        root
    }

    #[test]
    fn a_place_has_the_name_to_which_links_lead() {
        let root = root();
        let all = ["/var/run/token", "/data/", "/none/such", "/var/run/../x", "/secret"];
        let names = Names::look_up(root.path(), &binds(&all), [], &[]).unwrap();
        let expected = ["/run/token", "/data", "/none/such", "/x", "/data"];
        for (place, name) in all.iter().zip(expected) {
            assert_eq!(names.of(place), name, "{place}");
        }
        assert_eq!(names.of("/elsewhere"), "/elsewhere");
    }

    /// Returns what is told of binds in a root file system with these links.
    fn told(links: &[(&str, &str)], binds: &[Bind]) -> Vec<String> {
        let root = root();
        for (link, target) in links {
            let link = root.path().join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(target, link).unwrap();
        }
        let names = Names::look_up(root.path(), binds, [], &[]).unwrap();
        names.clashes().into_iter().collect()
    }

    #[test]
    fn a_name_that_is_not_the_places_alone_is_told() {
        let of = |links: &[(&str, &str)], all: &[&str]| told(links, &binds(all)).join("; ");
        assert_eq!(of(&[], &["/var/run/token", "/data", "/dev/shm", "/run/x", "/dev//tty"]), "");
        assert_eq!(of(&[], &["/run", "/var/run/token", "/run/none/such"]), "", "in an empty one");
        for (all, reason) in [
            (["/secret", "/data"], "leads \"/secret\" to \"/data\", where the new container has"),
            (["/sys/fs/cgroup/cpu", "/data/cpu"], "to \"/data/cpu\", where the new container has"),
            (["/null", "/data"], "to \"/dev/null\", where the runtime has its own"),
            (["/loop/x", "/data"], "lead round in a circle from \"/loop/x\""),
        ] {
            let found = of(&[], &all);
            assert!(found.contains(reason), "{found}");
        }
        assert!(of(&[("x", "/y]:/run/z")], &["/x"]).contains("CRIU takes a part for the name"));
        // Of a device, too.
        for (link, target) in [("dev", "/x]:/run"), ("dev/zero", "../x]:/run")] {
            let found = of(&[(link, target)], &[]);
            assert!(found.contains("CRIU takes a part for the name"), "{found}");
        }
        assert_eq!(of(&[("dev/random", "urandom")], &["/data"]), "");
        assert!(of(&[("a", "/")], &["/a"]).contains("leads \"/a\" to \"/\", which is all of it"));
    }

    /// The runtime mounts all of them for a while, and looks each place up again before it unmounts it:
    /// what it does not find then stays, and leads the next.
    #[test]
    fn links_that_a_bind_hides_or_has_are_told() {
        // A covers everything, and has other links.
        let found = told(&[("a", "/"), ("v", "/nv"), ("x", "/nx")], &binds(&["/a", "/v", "/x"]));
        assert!(found.join("; ").contains("leads \"/v\", and is hidden by"), "{found:?}");
        // The token covers A, and the link within that.
        let token = "/run/secrets/token";
        let links =
            [("a", "/run/secrets/token/x"), ("run/secrets/token/x/l", "/nv"), ("v", "/a/l")];
        let found = told(&links, &binds(&["/a", token, "/v"])).join("; ");
        assert!(found.contains("the link \"/run/secrets/token/x/l\""), "{found}");

        let held = tempfile::tempdir().unwrap();
        symlink("/nv", held.path().join("v")).unwrap();
        fs::create_dir(held.path().join("there")).unwrap();
        let below = |rest: &str, read_only| {
            let above = Bind { source: held.path().into(), read_only, ..binds(&["/a"]).remove(0) };
            told(&[], &[vec![above], binds(&[&format!("/a/{rest}")])].concat()).join("; ")
        };
        for read_only in [false, true] {
            assert!(
                below("v", read_only).contains("is behind a link in what is mounted on \"/a\"")
            );
            assert!(below("v/x", read_only).contains("is behind a link"));
            assert_eq!(below("there", read_only), "");
        }
        assert_eq!(below("new/one", false), "");
        // As root, on the node.
        assert!(below("new", true).contains("is missing in what is mounted for reading only"));
    }

    proptest::proptest! {
        /// Kata Containers' own, made after runc's.
        #[test]
        fn places_are_looked_up_as_others_do(
            links in proptest::collection::vec(("[abc]{1}(/[abc]{1}){0,2}", "/?([abc.]{1,2}/?){1,3}"), 0..6),
            place in "(/[abc.]{1,2}){1,4}",
        ) {
            let root = tempfile::tempdir().unwrap();
            for (link, target) in links {
                let link = root.path().join(link);
                // What is there already stays.
                drop(link.parent().map(fs::create_dir_all));
                drop(symlink(target, link));
            }
            let own = walk(root.path(), &place).unwrap().ok().map(|walk| walk.name);
            let theirs = safe_path::scoped_resolve(root.path(), &place).ok();
            let theirs = theirs.map(|path| format!("/{}", path.display()));
            proptest::prop_assert_eq!(own, theirs);
        }
    }
}
