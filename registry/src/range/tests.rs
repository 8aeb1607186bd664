use proptest::prelude::*;

use super::*;

#[track_caller]
fn check(header: &str, length: u64, expected: Wanted) {
    assert_eq!(Wanted::of(Some(header), length), expected, "{header} of {length}");
}

#[test]
fn single_open_and_suffix_ranges() {
    check("bytes=0-0", 10, Wanted::Part(0..1));
    check("bytes=2-5", 10, Wanted::Part(2..6));
    check("bytes=2-99", 10, Wanted::Part(2..10));
    check("bytes=2-", 10, Wanted::Part(2..10));
    check("bytes=-3", 10, Wanted::Part(7..10));
    check("bytes=-30", 10, Wanted::Part(0..10));
    check("bytes=0-99999999999999999999999", 10, Wanted::Part(0..10));
    assert_eq!(Wanted::of(None, 10), Wanted::Whole);
}

#[test]
fn what_cannot_be_satisfied() {
    check("bytes=10-", 10, Wanted::Unsatisfiable);
    check("bytes=10-12", 10, Wanted::Unsatisfiable);
    check("bytes=500-0", 1000, Wanted::Unsatisfiable);
    check("bytes=-0", 10, Wanted::Unsatisfiable);
    check("bytes=0-", 0, Wanted::Unsatisfiable);
    check("bytes=-1", 0, Wanted::Unsatisfiable);
    check("bytes=99999999999999999999999-", 10, Wanted::Unsatisfiable);
}

#[test]
fn what_may_be_ignored() {
    for header in ["", "bytes=", "bytes=-", "bytes=a-b", "bytes=0-1,x", "lines=0-1", "bytes=+1-2"] {
        check(header, 10, Wanted::Whole);
    }
    check(&format!("bytes={}", ["0-0"; 17].join(",")), 100, Wanted::Whole);
    check("bytes=0-7,2-9", 10, Wanted::Whole);
}

#[test]
fn several_ranges() {
    check("bytes=0-1,3-4", 10, Wanted::Several(vec![0..2, 3..5]));
    check("bytes=-2, 0-0 ,4-4", 10, Wanted::Several(vec![8..10, 0..1, 4..5]));
    check("bytes=0-1,30-", 10, Wanted::Part(0..2));
    check("bytes=10-,30-40", 10, Wanted::Unsatisfiable);
}

#[test]
fn chunks_of_an_upload() {
    let chunk = |start, length| Some(ContentRange { start, length });
    assert_eq!(ContentRange::parse("0-9"), chunk(0, 10));
    assert_eq!(ContentRange::parse("bytes 10-19/*"), chunk(10, 10));
    assert_eq!(ContentRange::parse("5-5"), chunk(5, 1));
    for wrong in ["", "-", "5-", "-5", "9-5", "0--1", "a-b", "0-18446744073709551615"] {
        assert_eq!(ContentRange::parse(wrong), None, "{wrong}");
    }
}

proptest! {
    #[test]
    fn a_part_is_never_empty_nor_beyond_the_end(header in "bytes=[0-9]{0,21}-[0-9]{0,21}", length: u64) {
        if let Wanted::Part(part) = Wanted::of(Some(&header), length) {
            prop_assert!(part.start < part.end && part.end <= length);
        }
    }
}
