use super::*;
use crate::staging::Tier;

fn digest(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

fn wish(name: &str, bytes: u64) -> Wish {
    Wish {
        tier: Tier::Ram,
        digest: digest(name),
        bytes,
        operation: format!("op-{name}"),
        reference: name.to_owned(),
    }
}

fn entry(bytes: u64, used_at: &str) -> Entry {
    let used_at = used_at.parse().unwrap();
    Entry {
        bytes,
        references: vec!["r".to_owned()],
        used_at,
        users: BTreeSet::new(),
        is_spoilt: false,
    }
}

/// A budget of 100 with three checkpoints of 30, `b` unused for longest.
fn ledger() -> Ledger {
    let mut ledger = Ledger::new(100, Vec::new());
    for (name, day) in [("a", 2), ("b", 1), ("c", 3)] {
        ledger.keep(&digest(name), entry(30, &format!("2026-01-0{day}T00:00:00Z")));
    }
    ledger
}

#[test]
fn what_fits_takes_nobodys_place() {
    let mut ledger = ledger();
    assert_eq!(ledger.reserve(&wish("d", 10)), Ok(Room::Reserved));
    assert_eq!((ledger.used(), ledger.maker(&digest("d"))), (100, Some("op-d")));
    ledger.release(&digest("d"));
    assert_eq!((ledger.used(), ledger.maker(&digest("d"))), (90, None));
}

#[test]
fn what_was_used_least_recently_goes_first_and_no_more_than_needed() {
    let mut ledger = ledger();
    let evicted = ledger.reserve(&wish("d", 60)).unwrap();
    assert_eq!(evicted, Room::Evict(vec![digest("b"), digest("a")]));
    // Their bytes are taken until they are gone, and nobody can take them up.
    assert_eq!(ledger.used(), 90);
    assert!(!ledger.begin_use(&digest("b"), "op"));
    assert_eq!(ledger.reserve(&wish("d", 60)), Ok(Room::Wait));
    assert_eq!(ledger.reserve(&wish("b", 1)), Ok(Room::Wait));
    ledger.left(&digest("b"), true);
    ledger.left(&digest("a"), true);
    assert_eq!(ledger.reserve(&wish("d", 60)), Ok(Room::Reserved));
    assert_eq!(ledger.used(), 90);
}

#[test]
fn what_is_spoilt_is_given_to_nobody_and_goes_first() {
    let mut ledger = ledger();
    assert!(ledger.begin_use(&digest("c"), "restore-1"));
    for name in ["a", "c"] {
        ledger.spoil(&digest(name));
        assert!(!ledger.begin_use(&digest(name), "restore-2"), "{name}");
    }
    // It is staged anew once its files are gone, and its reader has ended.
    assert_eq!(ledger.reserve(&wish("c", 30)), Ok(Room::Wait));
    ledger.end_use(&digest("c"), "restore-1");
    assert_eq!(ledger.reserve(&wish("c", 30)), Ok(Room::Evict(vec![digest("c")])));
    ledger.left(&digest("c"), true);
    assert_eq!(ledger.reserve(&wish("c", 30)), Ok(Room::Reserved));
    // `b` was not used for longer.
    assert_eq!(ledger.reserve(&wish("d", 30)), Ok(Room::Evict(vec![digest("a")])));
}

#[test]
fn what_is_read_stays_and_is_named() {
    let mut ledger = ledger();
    assert!(ledger.begin_use(&digest("b"), "restore-1"));
    assert!(ledger.begin_use(&digest("a"), "restore-2"));
    let evicted = ledger.reserve(&wish("d", 40)).unwrap();
    assert_eq!(evicted, Room::Evict(vec![digest("c")]));
    ledger.left(&digest("c"), true);
    assert_eq!(ledger.reserve(&wish("d", 40)), Ok(Room::Reserved));
    let pinned = ledger.reserve(&wish("e", 10)).unwrap_err().join("\n");
    for part in ["read by restore-1", "read by restore-2", "being staged by op-d"] {
        assert!(pinned.contains(part), "{part} is missing in {pinned}");
    }
    assert!(!ledger.leave(&digest("b")));
    ledger.end_use(&digest("b"), "restore-1");
    assert!(ledger.leave(&digest("b")));
}

#[test]
fn what_can_never_fit_evicts_nothing() {
    let mut ledger = ledger();
    assert_eq!(ledger.reserve(&wish("d", 101)), Err(Vec::new()));
    assert_eq!((ledger.used(), ledger.entries().len()), (90, 3));
}

#[test]
fn one_makes_it_and_the_others_wait() {
    let mut ledger = Ledger::new(100, Vec::new());
    assert_eq!(ledger.reserve(&wish("a", 10)), Ok(Room::Reserved));
    assert_eq!(ledger.reserve(&wish("a", 10)), Ok(Room::Wait));
    ledger.keep(&digest("a"), entry(12, "2026-01-01T00:00:00Z"));
    assert_eq!(ledger.reserve(&wish("a", 10)), Ok(Room::Present));
    assert_eq!(ledger.used(), 12);
}

#[test]
fn what_turns_out_larger_needs_room_too() {
    let mut ledger = ledger();
    assert_eq!(ledger.reserve(&wish("d", 10)), Ok(Room::Reserved));
    assert_eq!(ledger.enlarge(&digest("d"), 8), Ok(Room::Reserved));
    assert_eq!(ledger.enlarge(&digest("d"), 20), Ok(Room::Evict(vec![digest("b")])));
    ledger.left(&digest("b"), true);
    assert_eq!(ledger.enlarge(&digest("d"), 20), Ok(Room::Reserved));
    assert_eq!(ledger.enlarge(&digest("d"), 101), Err(Vec::new()));
}

#[test]
fn what_could_not_be_removed_is_still_there() {
    let mut ledger = ledger();
    assert!(ledger.leave(&digest("a")));
    ledger.left(&digest("a"), false);
    assert_eq!((ledger.used(), ledger.entries().len()), (90, 3));
}

#[test]
fn the_latest_name_is_the_first_and_old_ones_are_forgotten() {
    let mut ledger = ledger();
    assert_eq!(ledger.refer(&digest("a"), "r"), None);
    for number in 0..20 {
        ledger.refer(&digest("a"), &format!("r{number}"));
    }
    let names = ledger.refer(&digest("a"), "r15").unwrap();
    assert_eq!((names.len(), &*names[0], &*names[1]), (REFERENCES_MAX, "r15", "r19"));
}
