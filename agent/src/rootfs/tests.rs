//! Which names are told, and of which it is said that nobody may have them.

use std::os::unix::fs::symlink;

use fs_err as fs;

use super::*;
use crate::gate::Memory;

#[test]
fn a_root_is_found_by_what_is_written_to() {
    let lines = "9 1 0:40 / /run/c/one/rootfs rw - overlay overlay rw,lowerdir=/l,upperdir=/s/1\n\
                 8 1 0:41 / /run/c/two/rootfs rw - overlay overlay rw,upperdir=/s/2,workdir=/w\n\
                 7 1 8:1 /s/3 /run/c/three/rootfs rw - ext4 /dev/root rw\n\
                 6 1 8:1 /etc /run/c/two/rootfs/etc rw - ext4 /dev/root rw\n";
    let mounts: Vec<_> = mounts::read(lines.as_bytes()).collect();
    let root = |option: &str, usual: &str| {
        let options = vec![option.to_owned()];
        let mount =
            Mount { kind: String::new(), source: String::new(), target: String::new(), options };
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
        // None of them is another's, or a part of it.
        source: format!("/none{}", place.replace('/', "-")).into(),
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
    let names = Names::look_up(root.path(), &binds(&all), &Others::default()).unwrap();
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
    let names = Names::look_up(root.path(), binds, &Others::default()).unwrap();
    names.clashes().into_iter().collect()
}

#[test]
fn a_name_that_is_not_the_places_alone_is_told() {
    let of = |links: &[(&str, &str)], all: &[&str]| told(links, &binds(all)).join("; ");
    assert_eq!(of(&[], &["/var/run/token", "/data", "/dev/shm", "/run/x", "/dev//own"]), "");
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
    assert!(found.join("; ").contains("\"/v\" leads by way of \"/v\""), "{found:?}");
    // The token covers A, and the link within that.
    let token = "/run/secrets/token";
    let links = [("a", "/run/secrets/token/x"), ("run/secrets/token/x/l", "/nv"), ("v", "/a/l")];
    let found = told(&links, &binds(&["/a", token, "/v"])).join("; ");
    assert!(found.contains("by way of \"/run/secrets/token/x/l\""), "{found}");
    assert!(found.contains("\"/a\" is mounted first, and hidden by"), "{found}");
    // A device gets its name in the same way, and may have no volume's.
    let links = [("p", "/x/y/z"), ("dev/zero", "/x/y/z/l"), ("dev/full", "../data")];
    let found = told(&links, &binds(&["/p", "/x/y", "/data"])).join("; ");
    for reason in [
        "\"/p\" is mounted first, and hidden by what is mounted on \"/x/y\"",
        "leads \"/dev/full\" to \"/data\", where the new container has \"/data\"",
    ] {
        assert!(found.contains(reason), "{found}");
    }
    let found = told(&[("c", "d/x/../../cc")], &binds(&["/d", "/c"])).join("; ");
    assert!(found.contains("\"/c\" leads by way of \"/d/x\""), "{found}");

    let held = tempfile::tempdir().unwrap();
    symlink("/nv", held.path().join("v")).unwrap();
    fs::create_dir(held.path().join("there")).unwrap();
    let below = |rest: &str, read_only| {
        let above = Bind { source: held.path().into(), read_only, ..binds(&["/a"]).remove(0) };
        told(&[], &[vec![above], binds(&[&format!("/a/{rest}")])].concat()).join("; ")
    };
    for read_only in [false, true] {
        assert!(below("v", read_only).contains("is behind a link in what is mounted on \"/a\""));
        assert!(below("v/x", read_only).contains("is behind a link"));
        assert_eq!(below("there", read_only), "");
    }
    assert_eq!(below("new/one", false), "");
    // In the middle one, which is made in.
    let read_only =
        Bind { source: held.path().into(), read_only: true, ..binds(&["/a"]).remove(0) };
    let three = [vec![read_only], binds(&["/a/there", "/a/there/new"])].concat();
    assert_eq!(told(&[], &three), [""; 0]);
    // Of what is none, no place is made, and nothing is mounted there.
    let dev = Bind { source: held.path().into(), read_only: true, ..binds(&["/dev"]).remove(0) };
    let shm = Bind { source: held.path().join("there"), ..binds(&["/shm"]).remove(0) };
    assert_eq!(told(&[], &[dev, shm]), [""; 0]);
    // What is mounted in one is in the other.
    let twice = ["/s1", "/s2"].map(|place| Bind {
        source: held.path().join(if place == "/s1" { "" } else { "there" }),
        ..binds(&[place]).remove(0)
    });
    let found = told(&[], &[&twice[..], &binds(&["/s1/k"])].concat()).join("; ");
    assert!(found.contains("\"/s1/k\" is within \"/s1\", of which \"/s2\" is a part"), "{found}");
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

/// What runc does with mounts before a restore (`prepareCriuRestoreMounts`), and what the kernel makes of
/// that: a simulation, with directories for mounts.
struct Runc<'a> {
    root: &'a Path,
    mounts: Vec<Simulated<'a>>,
    /// Places that it made in what is for reading only.
    made: Vec<PathBuf>,
}

struct Simulated<'a> {
    bind: &'a Bind,
    /// Which mount it is on, of which `None` is the root file system, and where on that.
    on: (Option<usize>, PathBuf),
    is_there: bool,
}

impl<'a> Runc<'a> {
    fn new(root: &'a Path) -> Self {
        Self { root, mounts: Vec::new(), made: Vec::new() }
    }

    /// Returns the mount that a path without links is on, and where on that.
    fn find(&self, path: &Path) -> (Option<usize>, PathBuf) {
        let mut at = (None, PathBuf::new());
        for part in path {
            at.1.push(part);
            while let Some(over) =
                self.mounts.iter().rposition(|mount| mount.is_there && mount.on == at)
            {
                at = (Some(over), PathBuf::new());
            }
        }
        at
    }

    /// Returns where a path without links really is.
    fn real(&self, path: &Path) -> PathBuf {
        let (mount, rest) = self.find(path);
        let top = mount.map_or(self.root, |mount| &self.mounts[mount].bind.source);
        top.join(rest)
    }

    /// `SecureJoin`: where a place is, with all its links followed as things are.
    fn join(&self, place: &str) -> Option<PathBuf> {
        let (mut reached, mut to_come) = (PathBuf::new(), PathBuf::from(place));
        for _ in 0..1000 {
            let now = to_come;
            let mut parts = now.components();
            let Some(part) = parts.next() else { return Some(reached) };
            let rest = parts.as_path().to_owned();
            if part == Component::ParentDir {
                reached.pop();
            }
            to_come = rest.clone();
            let Component::Normal(name) = part else { continue };
            let Ok(target) = fs::read_link(self.real(&reached.join(name))) else {
                reached.push(name);
                continue;
            };
            if target.is_absolute() {
                reached.clear();
            }
            to_come = target.join(rest);
        }
        None
    }

    /// Makes a place. Returns what it is called, unless runc gives up.
    fn make(&mut self, place: &str) -> Option<PathBuf> {
        let place = self.join(place)?;
        let mut way = PathBuf::new();
        for part in &place {
            way.push(part);
            let real = self.real(&way);
            if fs::symlink_metadata(&real).is_err() {
                let on = self.find(&way).0.map(|mount| self.mounts[mount].bind);
                self.made.extend(on.filter(|on| on.read_only).map(|_| real.clone()));
                fs::create_dir(&real).ok()?;
            }
        }
        Some(place)
    }

    fn mount(&mut self, bind: &'a Bind) -> Option<PathBuf> {
        let place = self.make(&bind.place)?;
        self.mounts.push(Simulated { bind, on: self.find(&place), is_there: true });
        Some(place)
    }

    /// Unmounts what it finds at the place of a bind.
    fn unmount(&mut self, bind: &Bind) {
        let Some(place) = self.join(&bind.place) else { return };
        if let (Some(top), rest) = self.find(&place)
            && rest.as_os_str().is_empty()
        {
            self.mounts[top].is_there = false;
            // They go with it.
            for index in top..self.mounts.len() {
                let below = self.mounts[index].on.0.is_some_and(|on| !self.mounts[on].is_there);
                self.mounts[index].is_there &= !below;
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(3000))]

    /// What is let in has one name for the runtime, whatever of it is mounted and left, and nothing is
    /// made where nobody may.
    #[test]
    fn what_is_let_in_has_one_name_whatever_is_mounted(
        wanted in proptest::collection::vec(
            ("(/[abc]){1,3}", proptest::bool::weighted(0.3), contents(2), proptest::bool::ANY),
            1..5,
        ),
        links in contents(4),
        // Some are tmpfs.
        mounts in proptest::collection::vec(("(/[abc]){1,2}", proptest::bool::ANY), 0..3),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        make(&root, &links);
        let mut binds: Vec<Bind> = Vec::new();
        for (number, (place, read_only, content, _)) in wanted.iter().enumerate() {
            let source = directory.path().join(number.to_string());
            make(&source, content);
            if binds.iter().all(|bind| bind.place != *place) {
                binds.push(Bind { place: place.clone(), source, read_only: *read_only });
            }
        }
        let places = mounts.iter().map(|(place, _)| place.clone());
        let others = Others { mounts: places.collect(), ..Others::default() };
        let names = Names::look_up(&root, &binds, &others).unwrap();
        if !names.clashes().is_empty() {
            return Ok(());
        }
        let own: BTreeSet<String> = binds.iter().map(|bind| names.of(&bind.place)).collect();
        proptest::prop_assert_eq!(own.len(), binds.len(), "two have one name");
        let on_tmpfs = |place: &str| {
            let tmpfs = mounts.iter().filter(|(_, is_tmpfs)| *is_tmpfs);
            tmpfs.into_iter().any(|(top, _)| place.starts_with(&format!("{top}/")))
        };
        let called = |bind: &Bind, place: Option<PathBuf>| {
            // It gives up where there is none.
            place.is_none_or(|place| Path::new("/").join(place) == *names.of(&bind.place))
        };
        let mut runc = Runc::new(&root);
        for bind in binds.iter().filter(|bind| !on_tmpfs(&bind.place)) {
            let place = runc.mount(bind);
            proptest::prop_assert!(called(bind, place.clone()), "{place:?} when mounted: {bind:?}");
            for (place, _) in mounts.iter().filter(|(place, _)| !on_tmpfs(place)) {
                drop(runc.make(place));
            }
        }
        for (bind, (.., unmounts)) in binds.iter().zip(&wanted) {
            if *unmounts {
                runc.unmount(bind);
            }
        }
        for bind in &binds {
            let place = runc.join(&bind.place);
            proptest::prop_assert!(called(bind, place.clone()), "{place:?} in the end: {bind:?}");
        }
        proptest::prop_assert!(runc.made.is_empty(), "it makes {:?}", runc.made);
    }
}

/// What may be in a file system: links, or directories.
fn contents(
    most: usize,
) -> impl proptest::strategy::Strategy<Value = Vec<(String, Option<String>)>> {
    let target = proptest::option::weighted(0.6, "/?([abc]|[.][.])(/([abc]|[.][.])){0,2}");
    proptest::collection::vec(("[abc](/[abc]){0,2}", target), 0..=most)
}

fn make(top: &Path, content: &[(String, Option<String>)]) {
    fs::create_dir(top).unwrap();
    let (links, directories): (Vec<_>, Vec<_>) =
        content.iter().partition(|(_, target)| target.is_some());
    // No link is there yet, by which one could get out of here.
    for (path, _) in directories {
        fs::create_dir_all(top.join(path)).unwrap();
    }
    for (path, target) in links {
        let path = top.join(path);
        let parent = path.parent().unwrap();
        let mut above = parent.ancestors().take_while(|above| above.starts_with(top));
        if above.all(|above| fs::symlink_metadata(above).is_ok_and(|found| found.is_dir())) {
            // What is there already stays.
            drop(symlink(target.as_deref().unwrap_or_default(), path));
        }
    }
}

#[test]
fn no_link_is_on_the_way_to_what_is_opened() {
    let (root, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for place in [root.path(), data.path()] {
        fs::create_dir_all(place.join("real/more")).unwrap();
        fs::write(place.join("real/file"), "").unwrap();
        symlink("/proc/self/fd/126/../..", place.join("led")).unwrap();
        symlink("/proc/self/fd/126/x", place.join("real/last")).unwrap();
    }
    symlink("/run", root.path().join("real/run")).unwrap();
    // What the image has where something is mounted is hidden.
    symlink("/etc", root.path().join("shown")).unwrap();
    let bind = Bind { place: "/data".into(), source: data.path().into(), read_only: false };
    let reasons = |opened: &[&str], made: &[&str]| {
        let of = |paths: &[&str]| paths.iter().map(ToString::to_string).collect();
        let link = ("/memory/led".to_owned(), "/proc/self/fd/126/x".to_owned());
        let memory = Memory { places: of(&["/memory"]), links: BTreeMap::from([link]) };
        let paths = Paths { opened: of(opened), made: of(made), memory };
        let others = Others { paths, ..Others::default() };
        Names::look_up(root.path(), std::slice::from_ref(&bind), &others).unwrap().clashes()
    };
    for path in
        ["/led/etc/shadow", "/real/last", "/data/led/etc/shadow", "/data/real/last", "/real/run/x"]
    {
        let told = reasons(&[path], &[]);
        assert!(told.iter().any(|reason| reason.contains(path)), "{path}: {told:?}");
    }
    let fine =
        ["/real/file", "/real/more", "/data/real/file", "/data", "/none/of/it", "/data/none"];
    assert_eq!(reasons(&fine, &[]), BTreeSet::new());
    // A socket's path is whatever its maker said, through links or not.
    assert_eq!(reasons(&[], &["/real/run/x.sock", "/real/x.sock", "x.sock"]), BTreeSet::new());
    // What the image has there is hidden, and what is in memory counts.
    symlink("/led", root.path().join("memory")).unwrap();
    assert_eq!(reasons(&[], &["/memory/more/x.sock"]), BTreeSet::new());
    symlink("memory/led", root.path().join("passed")).unwrap();
    symlink("../memory/led", data.path().join("passed")).unwrap();
    for led in ["/led", "/data/led", "/memory/led", "/passed", "/data/passed"] {
        assert_eq!(reasons(&[], &[&format!("{led}/run/x.sock")]).len(), 1, "{led}");
    }
}
