//! Where the root file system of a task is on the node, and where links in it lead: by the path that a
//! place has there, before anything is mounted, the runtime calls what it hands to CRIU from outside
//! (runc's `addCriuDumpMount` and `addCriuRestoreMount`, of 1.1 to 1.5). What is restored is the
//! checkpoint's own, which may lead `/var/run` to `/run`, or one volume's place to that of another.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::mounts;
use crate::runtime::Mount;

/// Where the runtime mounts what is no volume, and what hides files has its name.
const RUNTIMES: [&str; 3] = ["/dev/", "/proc/", "/sys/"];

/// The names of places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(BTreeMap<String, String>);

impl Names {
    /// Looks places up in a root file system.
    pub(crate) fn look_up(root: &Path, places: BTreeSet<String>) -> io::Result<Self> {
        let look_up = |place: String| {
            let found = safe_path::scoped_resolve(root, &place)?;
            let name = found.to_str().ok_or_else(|| {
                io::Error::other(format!("a link leads {place:?} to what is no text"))
            })?;
            Ok((place, format!("/{name}")))
        };
        places.into_iter().map(look_up).collect::<io::Result<_>>().map(Self)
    }

    /// Returns all names.
    pub(crate) fn all(&self) -> impl Iterator<Item = &String> {
        self.0.values()
    }

    /// Returns the name of a place; one that was not looked up is its own.
    pub(crate) fn of(&self, place: &str) -> String {
        self.0.get(place).map_or(place, |name| name).to_owned()
    }

    /// Returns why one could be taken for another.
    pub(crate) fn clashes(&self) -> BTreeSet<String> {
        let led = self.0.iter().filter(|(place, name)| place.trim_end_matches('/') != **name);
        let reason = |(place, name): (&String, &String)| {
            let other = self.0.iter().find(|(other, its)| *other != place && *its == name);
            let is_the_runtimes = RUNTIMES.iter().any(|top| name.starts_with(top));
            let taken = match other {
                Some((other, _)) => format!("where the new container has {other:?}"),
                None if is_the_runtimes => "where the runtime has its own".to_owned(),
                None => return None,
            };
            Some(format!("a link in its root file system leads {place:?} to {name:?}, {taken}"))
        };
        led.filter_map(reason).collect()
    }
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

    fn places(places: &[&str]) -> BTreeSet<String> {
        places.iter().map(ToString::to_string).collect()
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
        let names = Names::look_up(root.path(), places(&all)).unwrap();
        let expected = ["/run/token", "/data", "/none/such", "/x", "/data"];
        for (place, name) in all.iter().zip(expected) {
            assert_eq!(names.of(place), name, "{place}");
        }
        assert_eq!(names.of("/elsewhere"), "/elsewhere");
        Names::look_up(root.path(), places(&["/loop/x"])).unwrap_err();
        Names::look_up(&root.path().join("none"), places(&["/data"])).unwrap_err();
    }

    #[test]
    fn two_with_one_name_are_told() {
        let root = root();
        let clashes = |all: &[&str]| Names::look_up(root.path(), places(all)).unwrap().clashes();
        assert!(clashes(&["/var/run/token", "/data", "/dev/shm", "/run/x"]).is_empty());
        for (all, told) in [
            (["/secret", "/data"], "leads \"/secret\" to \"/data\", where the new container has"),
            (["/sys/fs/cgroup/cpu", "/data/cpu"], "to \"/data/cpu\", where the new container has"),
            (["/null", "/data"], "to \"/dev/null\", where the runtime has its own"),
        ] {
            let found: Vec<_> = clashes(&all).into_iter().collect();
            assert!(found.len() == 1 && found[0].contains(told), "{found:?}");
        }
    }
}
