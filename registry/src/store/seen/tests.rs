use super::*;

const PERIOD: Duration = Duration::from_secs(100);

fn name(text: &str) -> RepositoryName {
    text.parse().unwrap()
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + seconds)
}

#[test]
fn what_was_seen_is_known_for_a_period_and_forgotten_after_two() {
    let seen = Seen::default();
    let digest = Digest::of(b"a");
    seen.turn(at(0), PERIOD);
    seen.note(&name("a"), &digest);
    for (seconds, known) in [(0, true), (99, true), (100, true), (199, true), (200, false)] {
        seen.turn(at(seconds), PERIOD);
        assert_eq!(seen.contains(&name("a"), &digest), known, "after {seconds} s");
    }
}

#[test]
fn one_repository_s_looks_keep_nothing_in_another() {
    let seen = Seen::default();
    for number in 0..1000u32 {
        seen.note(&name("a"), &Digest::of(&number.to_le_bytes()));
    }
    let known = |repository: &str| {
        let known =
            |number: &u32| seen.contains(&name(repository), &Digest::of(&number.to_le_bytes()));
        (0..1000u32).filter(known).count()
    };
    assert_eq!((known("a"), known("b")), (1000, 0));
}

#[test]
fn a_million_looks_leave_few_false_answers() {
    let seen = Seen::default();
    let digest = |number: u32| Digest::of(&number.to_le_bytes());
    (0..1_000_000).for_each(|number| seen.note(&name("a"), &digest(number)));
    let wrong = (2_000_000..2_010_000u32).filter(|n| seen.contains(&name("a"), &digest(*n)));
    assert!(wrong.count() < 400);
}
