//! Files that are held by names which were deleted: of a made tree, whose files have names still.

use std::path::PathBuf;

use super::super::linked;
use super::*;

/// Where a file is held, and what is found out about it.
struct Scene {
    tree: Tree,
    file: PathBuf,
}

impl Scene {
    /// A descriptor of a file on one of the mounts of the tree.
    fn new(mount: u64) -> Self {
        let tree = Tree::new();
        let file = tree.directory.path().join("10/x (deleted)");
        fs::write(&file, "x").unwrap();
        tree.open(10, 3, file.to_str().unwrap(), &format!("mnt_id:\t{mount}\n"));
        Self { tree, file }
    }

    /// Returns what is found, when these are looked into for other names.
    fn found(&self, captured: &[(String, PathBuf)], upper: Option<&Path>) -> (Vec<String>, bool) {
        let mut view = View::of(self.tree.directory.path(), 10, &[10]);
        linked::find_names(&mut view, captured, upper);
        let id = |finding: &Finding| finding.check.words().id.to_owned();
        let mut found: Vec<String> = judge(&view, &self.tree.subject).iter().map(id).collect();
        found.dedup();
        (found, linked::needs_links(&view))
    }
}

#[test]
fn what_comes_back_needs_the_option_and_the_rest_is_refused() {
    // The container's root, its own tmpfs, a mount of the node, and none of its mounts.
    for (mount, finding) in
        [(100, "link-remap"), (103, "link-remap"), (104, "linked-file"), (15, "linked-file")]
    {
        let mut scene = Scene::new(mount);
        assert_eq!(scene.found(&[], None), (vec![finding.to_owned()], mount != 15), "{mount}");
        scene.tree.subject.own_options = true;
        let left = if finding == "link-remap" { vec![] } else { vec![finding.to_owned()] };
        assert_eq!(scene.found(&[], None).0, left, "{mount}");
    }
}

#[test]
fn what_the_container_wrote_to_its_root_would_become_two_files() {
    let mut scene = Scene::new(100);
    scene.tree.subject.own_options = true;
    let upper = scene.file.parent().unwrap().to_owned();
    assert_eq!(scene.found(&[], Some(&upper)).0, ["linked-file"]);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(scene.found(&[], Some(empty.path())).0, [""; 0], "it is the image's");
}

#[test]
fn a_captured_mount_must_have_the_other_name() {
    let mut scene = Scene::new(103);
    scene.tree.subject.own_options = true;
    scene.tree.subject.bound.push("/dev/shm".to_owned());
    assert_eq!(scene.found(&[], None).0, ["linked-file"], "it does not go along");
    scene.tree.subject.captured.push("/dev/shm".to_owned());
    let at = |directory: &Path| [("/dev/shm".to_owned(), directory.to_owned())];
    assert_eq!(scene.found(&at(scene.file.parent().unwrap()), None).0, [""; 0]);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(scene.found(&at(empty.path()), None).0, ["linked-file"]);
}

#[test]
fn mappings_are_looked_at_as_descriptors_are() {
    let mut tree = Tree::new();
    let file = tree.directory.path().join("10/sem.x (deleted)");
    fs::write(&file, vec![1; (1 << 20) + 1]).unwrap();
    fs::create_dir(tree.directory.path().join("10/map_files")).unwrap();
    symlink(&file, tree.directory.path().join("10/map_files/7000-8000")).unwrap();
    let line = "00007000-00008000 rw-s 00000000 00:35 5    /dev/shm/sem.x (deleted)\n";
    tree.write("maps", line);
    // It is on none of the container's mounts: memory that processes share has such a name too.
    assert_eq!(tree.found(), [""; 0]);
    let held = crate::links::held(&tree.directory.path().join("10"));
    let mount = held[0].mount.unwrap();
    tree.write("mountinfo", &MOUNTS.replace("100", &mount.to_string()));
    let found = tree.found();
    let [large, linked] = &*found else { panic!("{found:?}") };
    assert!(large.starts_with("deleted-file: a mapping of process 10"), "{large}");
    assert!(linked.starts_with("link-remap: a mapping of process 10"), "{linked}");
    assert!(linked.ends_with("/10/sem.x"), "{linked}");
    tree.subject.own_options = true;
    assert_eq!(tree.found().len(), 1);
}

#[test]
fn what_is_linked_may_be_large() {
    for (mount, expected) in [(103, &[][..]), (100, &["deleted-file"])] {
        let mut scene = Scene::new(mount);
        scene.tree.subject.own_options = true;
        fs::write(&scene.file, vec![1; (1 << 20) + 1]).unwrap();
        assert_eq!(scene.found(&[], None).0, expected, "{mount}");
    }
}

#[test]
fn names_that_two_files_had_are_nobodys() {
    let mut scene = Scene::new(103);
    scene.tree.subject.own_options = true;
    scene.tree.subject.captured.push("/dev/shm".to_owned());
    let top = scene.tree.directory.path().join("10");
    let captured = [("/dev/shm".to_owned(), top.clone())];
    assert_eq!(scene.found(&captured, None).0, [""; 0]);
    // The same name, of another file.
    let other = top.join("other");
    fs::hard_link(&scene.file, &other).unwrap();
    scene.tree.open(10, 4, "pipe:[9]", "");
    let mut view = View::of(scene.tree.directory.path(), 10, &[10]);
    linked::find_names(&mut view, &captured, None);
    let mut twin = view.processes[0].held[0].clone();
    twin.file.inode += 1;
    view.processes[0].held.push(twin);
    let found = judge(&view, &scene.tree.subject);
    assert!(found[0].subject.ends_with("another one had that name too"), "{found:?}");
}
