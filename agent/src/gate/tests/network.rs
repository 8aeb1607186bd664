//! Whose network CRIU locks while it restores.

use super::*;

fn summary_of(images: &[(String, Vec<u8>)], also: &str) -> Summary {
    summarise(images, &[also.to_owned()]).unwrap()
}

#[test]
fn a_network_is_locked_for_connections_alone() {
    let images = Dump::default().images();
    assert!(
        summary_of(&images, "mm-1.img").locks_in_vain(),
        "as CRIU does when it is told nothing"
    );
    for kept in ["tcp-stream-1a.img", "iptables-9.img", "ip6tables-9.img", "nftables-9.img"] {
        assert!(!summary_of(&images, kept).locks_in_vain(), "{kept}");
    }
    for (method, locks) in [(0, true), (1, true), (NO_LOCK, false)] {
        let mut dump = Dump::default();
        dump.inventory.network_lock = Some(method);
        assert_eq!(summary_of(&dump.images(), "mm-1.img").locks_in_vain(), locks, "{method}");
    }
}

#[test]
fn a_dump_that_locks_nothing_is_the_same_otherwise() {
    let mut dump = Dump::default();
    (dump.inventory.network_lock, dump.inventory.lsm) = (Some(1), Some(2));
    let before = dump.images();
    let place = tempfile::tempdir().unwrap();
    for (name, bytes) in &before {
        fs_err::write(place.path().join(name), bytes).unwrap();
    }
    unlock(place.path()).unwrap();
    let read = |name: &String| fs_err::read(place.path().join(name)).unwrap();
    let after: Vec<_> = before.iter().map(|(name, _)| (name.clone(), read(name))).collect();
    let (was, is) = (summary_of(&before, "mm-1.img"), summary_of(&after, "mm-1.img"));
    assert_eq!((was.network_lock, is.network_lock), (1, NO_LOCK));
    assert_eq!(Summary { network_lock: 1, ..is }, was);
    let changed = before.iter().zip(&after).filter(|(before, after)| before != after);
    let changed: Vec<_> = changed.map(|((name, _), _)| name).collect();
    assert_eq!(changed, ["inventory.img"]);

    // What is no image is not made one.
    fs_err::write(place.path().join("inventory.img"), b"short").unwrap();
    assert!(unlock(place.path()).is_err());
    assert_eq!(fs_err::read(place.path().join("inventory.img")).unwrap(), b"short");
}
