//! What cannot be looked at is not what is not there.

use std::os::unix::fs::symlink;

use super::*;

impl House {
    fn fails(&self, scope: Scope) {
        let (mut tell, mut pace) = (|_: &Event| {}, |_: Duration| true);
        let run = Run {
            store: &self.store,
            scope,
            dry_run: false,
            now: self.began + HOUR * 100,
            tell: &mut tell,
            pace: &mut pace,
        };
        run.collect().unwrap_err();
    }
}

/// One repository holds content that another has lost, and its links cannot be read while garbage
/// is looked for.
#[test]
fn content_stays_while_it_cannot_be_told_who_links_it() {
    for below in ["_blobs", "_blobs/sha256"] {
        let house = House::hasty();
        house.image("kept", &["layer"], &["v1"]);
        house.push("gone", b"layer");
        assert!(house.store.unlink(&name("gone"), &Digest::of(b"layer")).unwrap());

        let links = house.root.path().join("repositories/kept").join(below);
        let aside = house.root.path().join("aside");
        fs_err::rename(&links, &aside).unwrap();
        // To look through it is an error, as on a disk that is away.
        symlink(&links, &links).unwrap();
        for scope in [Scope::Noted, Scope::Everything] {
            house.fails(scope);
        }
        fs_err::remove_file(&links).unwrap();
        fs_err::rename(&aside, &links).unwrap();
        house.noted(HOUR * 100);
        assert!(house.has_blob("kept", b"layer"), "{below}");
    }
}

/// The disk of all repositories is away, or that of some: what they link is nobody's to remove.
#[test]
fn content_stays_while_repositories_are_away() {
    let house = House::hasty();
    house.image("team/a", &["layer"], &["v1"]);
    house.image("b", &["other"], &["v1"]);
    house.push("b", b"layer");
    assert!(house.store.unlink(&name("b"), &Digest::of(b"layer")).unwrap());
    let (root, aside) = (house.root.path(), house.root.path().join("aside"));
    for place in ["repositories", "repositories/team"] {
        let place = root.join(place);
        fs_err::rename(&place, &aside).unwrap();
        let nowhere = root.join("nowhere");
        symlink(&nowhere, &place).unwrap();
        house.fails(Scope::Noted);
        house.fails(Scope::Everything);
        fs_err::remove_file(&place).unwrap();
        fs_err::rename(&aside, &place).unwrap();
    }
    let place = root.join("repositories");
    fs_err::rename(&place, &aside).unwrap();
    house.fails(Scope::Everything);
    // What a disk is mounted on.
    fs_err::create_dir(&place).unwrap();
    house.fails(Scope::Everything);
    fs_err::remove_dir(&place).unwrap();
    fs_err::rename(&aside, &place).unwrap();
    house.noted(HOUR * 100);
    assert!(house.has_blob("team/a", b"layer") && house.has_blob("b", b"other"));
}

/// Links that lead back up would show everything again and again, and two of them without an end.
#[test]
fn a_repository_that_leads_back_is_no_other() {
    let house = House::hasty();
    house.image("team/a", &["layer"], &["v1"]);
    let root = house.root.path().join("repositories");
    symlink(&root, root.join("team/one")).unwrap();
    symlink("..", root.join("team/a/two")).unwrap();
    symlink(".", root.join("team/a/three")).unwrap();
    let listed = house.store.all_repositories().unwrap();
    assert_eq!(listed, [name("team/a")]);
    assert_eq!(house.everything(HOUR * 100).repositories, 1);
}

/// What an operator has moved to another disk is served, so it is looked at.
#[test]
fn a_repository_behind_a_symbolic_link_keeps_its_content() {
    let house = House::hasty();
    let image = house.image("team/a", &["layer"], &["v1"]);
    let (place, elsewhere) =
        (house.root.path().join("repositories/team"), house.root.path().join("elsewhere"));
    fs_err::rename(&place, &elsewhere).unwrap();
    symlink(&elsewhere, &place).unwrap();
    for _ in 0..2 {
        house.everything(HOUR * 100);
    }
    assert!(house.has_blob("team/a", b"layer") && house.has_manifest("team/a", &image));
}

/// Whoever collects without a server keeps what the server would.
#[test]
fn what_the_server_keeps_is_known_without_it() {
    let house = House::hasty();
    assert_eq!(house.store.served_gc().unwrap(), None);
    for untagged in [None, Some(HOUR * 7)] {
        let settings = Settings { grace: HOUR, untagged, quarantine: HOUR * 3 };
        house.store.serve_gc(settings).unwrap();
        assert_eq!(house.store.served_gc().unwrap(), Some(settings));
    }
}
