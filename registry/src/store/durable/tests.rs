use super::*;

#[test]
fn missing_parents_are_made_and_remembered() {
    let root = tempfile::tempdir().unwrap();
    let directories = Directories::default();
    directories.remember(root.path());
    let deep = root.path().join("a/b/c");

    directories.ensure(&deep).unwrap();
    directories.ensure(&deep).unwrap();

    assert!(deep.is_dir());
    assert_eq!(directories.known.lock().unwrap().len(), 4);
}

#[test]
fn a_file_in_the_way_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("a"), "").unwrap();
    Directories::default().ensure(&root.path().join("a/b")).unwrap_err();
}

#[test]
fn many_syncs_of_one_directory_leave_nothing_behind() {
    let root = tempfile::tempdir().unwrap();
    let directories = Directories::default();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| directories.sync(root.path()).unwrap());
        }
    });
    assert!(directories.syncing.lock().unwrap().is_empty());
}

#[test]
fn syncing_a_missing_directory_fails_for_everyone_who_asked() {
    let root = tempfile::tempdir().unwrap();
    let directories = Directories::default();
    let missing = root.path().join("missing");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| directories.sync(&missing).unwrap_err());
        }
    });
}
