use std::time::Duration;

use super::*;

fn known() -> Known {
    Known::new(&[7; 32])
}

fn nobody() -> Arc<Identity> {
    Arc::new(Identity::default())
}

#[test]
fn what_is_remembered_is_bounded_and_the_oldest_goes_first() {
    let known = known();
    let marks: Vec<_> =
        (0..=ENTRIES_MAX.get()).map(|number| known.mark(&["basic", &number.to_string()])).collect();
    for mark in &marks {
        known.remember(*mark, &nobody(), None);
    }
    let now = SystemTime::UNIX_EPOCH;
    assert_eq!(known.lock().len(), ENTRIES_MAX.get());
    assert!(known.find(&marks[0], now).is_none());
    assert!(known.find(&marks[1], now).is_some());
    assert!(known.find(marks.last().unwrap(), now).is_some());
}

#[test]
fn what_has_a_time_is_forgotten_then() {
    let known = known();
    let mark = known.mark(&["token"]);
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(10);
    known.remember(mark, &nobody(), Some(end));
    assert!(known.find(&mark, end - Duration::from_secs(1)).is_some());
    assert!(known.find(&mark, end).is_none());
    assert_eq!(known.lock().len(), 0);
}

/// Credentials are neither kept nor shown, parts do not run into each other, and another key makes
/// other marks: what one process remembers is of no use to anybody else.
#[test]
fn marks_stand_for_credentials_and_do_not_hold_them() {
    let known = known();
    let mark = known.mark(&["basic", "alice", "secret"]);
    assert_eq!(mark, known.mark(&["basic", "alice", "secret"]));
    for other in [&["basic", "alice", "Secret"], &["basic", "alices", "ecret"]] {
        assert_ne!(mark, known.mark(other));
    }
    assert_ne!(mark, Known::new(&[8; 32]).mark(&["basic", "alice", "secret"]));
    known.remember(mark, &nobody(), None);
    assert!(!mark.windows(6).any(|part| part == b"secret"));
    assert!(!format!("{known:?}").contains("secret"));
}
