use std::fs::File;
use std::os::unix::fs::symlink;

use super::*;

/// Returns what this process holds of files in a directory.
fn ours(directory: &Path) -> Vec<Held> {
    let all = held(Path::new("/proc/self")).into_iter();
    let canonical = fs::canonicalize(directory).unwrap();
    all.filter(|held| Path::new(&held.name).starts_with(&canonical)).collect()
}

#[test]
fn what_is_held_by_a_deleted_name_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| directory.path().join(name));
    let file = File::create(&one).unwrap();
    assert_eq!(ours(directory.path()), []);
    fs::hard_link(&one, &two).unwrap();
    fs::remove_file(&one).unwrap();
    let held = ours(directory.path());
    let [held] = &*held else { panic!("{held:?}") };
    assert!(matches!(held.how, How::Descriptor(_)) && held.links == 1 && held.mount.is_some());
    assert!(held.name.ends_with("/one"), "{held:?}");
    let wanted = BTreeSet::from([held.file]);
    assert_eq!(named(directory.path(), &wanted, by_number), wanted);
    let stamps = BTreeSet::from([held.stamp]);
    assert_eq!(named(directory.path(), &stamps, by_stamp), stamps);
    fs::remove_file(&two).unwrap();
    assert_eq!(named(directory.path(), &wanted, by_number), BTreeSet::new());
    assert_eq!(ours(directory.path())[0].links, 0);
    drop(file);
}

#[test]
fn names_are_read_as_criu_writes_them() {
    for (name, expected) in [
        ("link_remap.7", Some(7)),
        ("link_remap.0", Some(0)),
        ("link_remap.4294967295", Some(u32::MAX)),
        ("link_remap.4294967296", None),
        ("link_remap.07", None),
        ("link_remap.+7", None),
        ("link_remap.", None),
        ("link_remap.7x", None),
        ("xlink_remap.7", None),
    ] {
        assert_eq!(number(name), expected, "{name}");
    }
}

#[test]
fn what_a_killed_criu_left_is_removed_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("d/gone")).unwrap();
    let file = File::create(at("d/gone/one")).unwrap();
    fs::write(at("d/other"), "").unwrap();
    for name in ["two", "d/link_remap.7", "d/link_remap.x", "d/sub", "link_remap.8"] {
        fs::hard_link(at("d/gone/one"), at(name)).unwrap();
    }
    // Another file, whoever made it.
    fs::hard_link(at("d/other"), at("d/link_remap.9")).unwrap();
    symlink("two", at("d/link_remap.10")).unwrap();
    // CRIU goes up to a directory that is there.
    fs::remove_dir_all(at("d/gone")).unwrap();
    let own = [std::process::id()];
    assert_eq!(remove_left(Path::new("/proc"), &own).unwrap(), 1);
    let mut left: Vec<String> = fs::read_dir(at("d"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned())
        .collect();
    left.sort_unstable();
    assert_eq!(left, ["link_remap.10", "link_remap.9", "link_remap.x", "other", "sub"]);
    assert!(at("link_remap.8").exists() && at("two").exists());
    assert_eq!(remove_left(Path::new("/proc"), &own).unwrap(), 0);
    assert_eq!(remove_left(Path::new("/proc"), &[0]).unwrap(), 0, "nobody");
    drop(file);
}
