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
    check(" Bytes=2-5 ", 10, Wanted::Part(2..6));
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

proptest! {
    /// Whatever a client writes, no part is empty or beyond the end, and all of them together are
    /// no longer than the content.
    #[test]
    fn any_range_is_parts_of_the_content_or_left_out(
        header in "(bytes=)?[0-9a,\\- ]{0,60}|.{0,40}", length in prop_oneof![0..200u64, any::<u64>()],
    ) {
        let parts = match Wanted::of(Some(&header), length) {
            Wanted::Whole | Wanted::Unsatisfiable => Vec::new(),
            Wanted::Part(part) => vec![part],
            Wanted::Several(parts) => {
                prop_assert!((2..=RANGES_MAX).contains(&parts.len()));
                parts
            }
        };
        let mut total = 0u64;
        for part in parts {
            prop_assert!(part.start < part.end && part.end <= length, "{part:?}");
            total = total.checked_add(part.end - part.start).unwrap();
        }
        prop_assert!(total <= length);
    }

    #[test]
    fn a_chunks_range_is_read_back(start: u64, length in 1..=u64::MAX, size in "(/[0-9*]{1,5})?") {
        let Some(last) = start.checked_add(length - 1) else { return Ok(()) };
        for before in ["", "bytes ", "bytes=", " "] {
            let read = ContentRange::parse(&format!("{before}{start}-{last}{size}"));
            prop_assert_eq!(read, Some(ContentRange { start, length }));
        }
    }

    #[test]
    fn any_chunks_range_is_read_or_refused(header in "(bytes[ =])?[0-9]{0,22}-?[0-9]{0,22}|.{0,40}") {
        if let Some(ContentRange { start, length }) = ContentRange::parse(&header) {
            prop_assert!(length > 0 && start.checked_add(length - 1).is_some());
        }
    }
}
