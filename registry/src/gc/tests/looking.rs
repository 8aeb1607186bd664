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
