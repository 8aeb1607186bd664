use super::*;

/// Captures a directory and lists what the tar has: path, type, and target or content.
fn check(directory: &Path, tree: Tree) -> Vec<(String, EntryType, String)> {
    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("x.tar");
    let bytes = capture(directory, tree, &tar, &AtomicBool::new(false)).unwrap();
    assert_eq!(bytes, fs::metadata(&tar).unwrap().len());
    let mut archive = tar::Archive::new(fs::File::open(&tar).unwrap());
    let mut found = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        let kind = entry.header().entry_type();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        if let Some(target) = entry.link_name().unwrap() {
            text = target.display().to_string();
        }
        found.push((path, kind, text));
    }
    found
}

fn paths(found: &[(String, EntryType, String)]) -> Vec<&str> {
    found.iter().map(|(path, ..)| &**path).collect()
}

#[test]
fn files_links_and_directories_are_captured_in_order() {
    let top = tempfile::tempdir().unwrap();
    fs::create_dir(top.path().join("d")).unwrap();
    fs::write(top.path().join("d/file"), "content").unwrap();
    fs::hard_link(top.path().join("d/file"), top.path().join("e")).unwrap();
    std::os::unix::fs::symlink("../nowhere", top.path().join("f")).unwrap();

    let found = check(top.path(), Tree::Upper);
    assert_eq!(paths(&found), ["d/", "d/file", "e", "f"]);
    assert_eq!(found[1].2, "content");
    assert_eq!((found[2].1, &*found[2].2), (EntryType::Link, "d/file"));
    assert_eq!((found[3].1, &*found[3].2), (EntryType::Symlink, "../nowhere"));
}

#[test]
fn long_and_foreign_names_survive() {
    let top = tempfile::tempdir().unwrap();
    let long = "n".repeat(200);
    fs::write(top.path().join(&long), "1").unwrap();
    fs::write(top.path().join("grün"), "2").unwrap();
    std::os::unix::fs::symlink(&long, top.path().join("z")).unwrap();

    let found = check(top.path(), Tree::Whole);
    assert_eq!(paths(&found), ["grün", &*long, "z"]);
    assert_eq!(found[2].2, long);
}

#[test]
fn what_overlayfs_deleted_becomes_a_whiteout() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let top = tempfile::tempdir().unwrap();
    let device = |path: &Path| {
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::CharacterDevice, mode, 0).unwrap();
    };
    device(&top.path().join("gone"));
    fs::create_dir(top.path().join("new")).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    let opaque = top.path().join("new");
    if rustix::fs::setxattr(&opaque, "trusted.overlay.opaque", b"y", flags).is_err() {
        return;
    }
    fs::write(top.path().join("new/a"), "a").unwrap();

    assert_eq!(
        paths(&check(top.path(), Tree::Upper)),
        [".wh.gone", "new/", "new/.wh..wh..opq", "new/a"]
    );
    assert_eq!(paths(&check(top.path(), Tree::Whole)), ["gone", "new/", "new/a"]);

    rustix::fs::setxattr(&opaque, "trusted.overlay.redirect", b"/x", flags).unwrap();
    let out = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let refused = capture(top.path(), Tree::Upper, &out.path().join("x.tar"), &stop);
    assert!(refused.unwrap_err().source.to_string().contains("redirect_dir"));
}

#[test]
fn it_stops_when_told() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("a"), "a").unwrap();
    let out = tempfile::tempdir().unwrap();
    let stopped =
        capture(top.path(), Tree::Upper, &out.path().join("x.tar"), &AtomicBool::new(true));
    assert!(stopped.is_err());
}

#[test]
fn a_link_at_the_top_is_not_followed() {
    let top = tempfile::tempdir().unwrap();
    let link = top.path().join("link");
    std::os::unix::fs::symlink("/etc", &link).unwrap();
    let out = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    capture(&link, Tree::Whole, &out.path().join("x.tar"), &stop).unwrap_err();
}

#[test]
fn sizes_are_summed_up() {
    let top = tempfile::tempdir().unwrap();
    fs::create_dir(top.path().join("d")).unwrap();
    fs::write(top.path().join("d/a"), [0; 100]).unwrap();
    fs::write(top.path().join("b"), [0; 11]).unwrap();
    assert_eq!(apparent_bytes(top.path()), 111);
}

#[test]
fn a_large_file_is_no_reason_to_go_on() {
    let stop = AtomicBool::new(false);
    let mut content = UntilStopped { content: io::repeat(1), stop: &stop };
    content.read_exact(&mut [0; 4096]).unwrap();
    stop.store(true, Ordering::Relaxed);
    let error = io::copy(&mut content, &mut io::sink()).unwrap_err();
    assert!(error.to_string().contains("stopped"), "{error}");
}
