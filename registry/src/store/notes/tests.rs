use super::*;
use crate::store::Store;

fn name(text: &str) -> RepositoryName {
    text.parse().unwrap()
}

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn names(notes: &Notes, now: u64) -> Vec<String> {
    notes.due(at(now)).iter().map(ToString::to_string).collect()
}

#[test]
fn notes_outlive_the_process_and_are_due_at_their_time() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("candidates.log");
    let notes = Notes::open(path.clone()).unwrap();
    notes.repository(&name("a"), at(30));
    notes.repository(&name("a"), at(20));
    notes.repository(&name("a"), at(40));
    notes.repository(&name("b/c"), at(25));
    notes.content(&Digest::of(b"x"));
    notes.content(&Digest::of(b"x"));
    for notes in [&notes, &Notes::open(path.clone()).unwrap()] {
        assert_eq!(names(notes, 19), [""; 0]);
        assert_eq!(names(notes, 20), ["a"]);
        assert_eq!(names(notes, 25), ["a", "b/c"]);
        assert_eq!(notes.contents(), [Digest::of(b"x")]);
    }
    let lines = fs::read_to_string(&path).unwrap();
    assert_eq!(lines.lines().filter(|line| !line.is_empty()).count(), 4, "{lines}");
}

#[test]
fn a_torn_or_damaged_line_is_skipped_and_spoils_no_other() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("candidates.log");
    let whole = line("repository 5 a") + &line("repository 5 b").replace('b', "c");
    fs::write(&path, whole + &line("repository 5 torn")[..30]).unwrap();
    let notes = Notes::open(path.clone()).unwrap();
    assert_eq!(names(&notes, 5), ["a"]);
    notes.repository(&name("later"), at(5));
    assert_eq!(names(&Notes::open(path).unwrap(), 5), ["a", "later"]);
}

#[test]
fn what_happens_while_it_is_looked_at_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let notes = &store.house.notes;
    notes.repository(&name("a"), at(1));
    notes.repository(&name("b"), at(1));
    notes.content(&Digest::of(b"x"));
    notes.take(&name("a"));
    notes.take(&name("b"));
    notes.take_content(&Digest::of(b"x"));
    let path = store.layout.candidates();
    assert_eq!(
        names(&Notes::open(path.clone()).unwrap(), 1),
        ["a", "b"],
        "a killed one looks again"
    );
    notes.repository(&name("b"), at(7));
    store.settle_notes().unwrap();
    notes.repository(&name("c"), at(8));
    let again = Notes::open(path).unwrap();
    assert_eq!(names(&again, 9), ["b", "c"]);
    assert_eq!(again.contents(), []);
}
