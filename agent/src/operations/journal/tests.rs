use super::*;
use crate::operations::{Kind, State};

fn record(id: &str, state: State, finished_at: Option<&str>) -> Record {
    let finished_at = finished_at.map(|time| time.parse().unwrap());
    let started_at = "2026-01-01T00:00:00Z".parse().unwrap();
    Record { state, finished_at, ..Record::new(id.to_owned(), Kind::Restore, started_at) }
}

/// Writes one that nothing is known of, as another process would.
fn write(journal: &Journal, record: &Record) -> Option<Lines> {
    let mut lines = None;
    journal.write(&mut lines, record).unwrap();
    lines
}

fn read_back(place: &Path) -> Vec<Record> {
    Journal::open(place).unwrap().1
}

/// The same record at the moment of its `number`th line.
fn at(number: u32) -> Record {
    Record { restored_pid: number, ..record("a", State::Running, None) }
}

#[test]
fn a_torn_line_is_passed_over_and_the_one_before_it_counts() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path()).unwrap();
    let mut lines = write(&journal, &at(1));
    let before = usize::try_from(lines.as_ref().unwrap().end).unwrap();
    journal.write(&mut lines, &at(2)).unwrap();
    let after = usize::try_from(lines.unwrap().end).unwrap();
    let file = directory.path().join("a.log");
    let whole = fs::read(&file).unwrap();
    assert_eq!(whole.len(), ROOM);
    // What was there, what another file had there, and where the disk has an end.
    for lost in [&b"\n"[..], b"\0", b"x", b""] {
        for kept in (before..after - 1).step_by(7) {
            let mut torn = whole[..kept].to_vec();
            torn.extend(lost.repeat(ROOM - kept));
            fs::write(&file, &torn).unwrap();
            assert_eq!(read_back(directory.path()), [at(1)], "{kept} bytes, then {lost:?}");
        }
    }
    for wrong in (before..after - 1).step_by(7) {
        let mut rotten = whole.clone();
        rotten[wrong] ^= 1;
        fs::write(&file, &rotten).unwrap();
        assert_eq!(read_back(directory.path()), [at(1)], "byte {wrong}");
    }
    // All but its line feed.
    fs::write(&file, &whole[..after - 1]).unwrap();
    assert_eq!(read_back(directory.path()), [at(2)]);
}

#[test]
fn what_is_not_understood_is_passed_over_and_what_was_being_made_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("operations");
    let (journal, _) = Journal::open(&place).unwrap();
    write(&journal, &at(1));
    let whole = fs::read(place.join("a.log")).unwrap();
    for length in 0..300 {
        fs::write(place.join("b.log"), &whole[..length]).unwrap();
        fs::write(place.join("c.new"), &whole[..length]).unwrap();
        assert_eq!(read_back(&place), [at(1)], "{length}");
        assert!(!place.join("c.new").exists());
    }
    fs::write(place.join("b.log"), &whole).unwrap();
    assert_eq!(read_back(&place).len(), 1, "a record under another name");
    // A later agent knows more: what it did last is not what it did before that.
    let later = br#"{"id":"a","kind":"teleport"}"#;
    let later = [Digest::of(later).to_string().as_bytes(), b" ", later, b"\n"].concat();
    let lines = [&line_of(&at(1)).unwrap()[..], &later].concat();
    fs::write(place.join("a.log"), lines).unwrap();
    assert_eq!(read_back(&place), []);
}

#[test]
fn records_of_earlier_agents_are_read_and_go_with_the_first_line() {
    let directory = tempfile::tempdir().unwrap();
    let (json, log) = (directory.path().join("a.json"), directory.path().join("a.log"));
    fs::write(&json, serde_json::to_vec_pretty(&at(1)).unwrap()).unwrap();
    assert_eq!(read_back(directory.path()), [at(1)]);
    // An agent that died at its first line.
    fs::write(&log, b"sha256:").unwrap();
    assert_eq!(read_back(directory.path()), [at(1)]);

    let (journal, _) = Journal::open(directory.path()).unwrap();
    write(&journal, &at(2));
    assert!(!json.exists());
    assert_eq!(read_back(directory.path()), [at(2)]);
    // One that died before it had removed the other.
    fs::write(&json, serde_json::to_vec_pretty(&at(1)).unwrap()).unwrap();
    assert_eq!(read_back(directory.path()), [at(2)]);
    journal.remove("a").unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_full_disk_loses_nothing_and_the_next_write_works() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path()).unwrap();
    let mut lines = write(&journal, &at(1));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    lines.as_mut().unwrap().file = full;
    let error = journal.write(&mut lines, &at(2)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_eq!(read_back(directory.path()), [at(1)]);
    journal.write(&mut lines, &at(3)).unwrap();
    journal.write(&mut lines, &at(4)).unwrap();
    assert_eq!(read_back(directory.path()), [at(4)]);
}

#[test]
fn a_line_that_was_not_synced_does_not_count() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path()).unwrap();
    let mut lines = write(&journal, &at(1)).unwrap();
    let end = lines.end;
    lines.file.seek(SeekFrom::Start(end)).unwrap();
    lines.file.write_all(&line_of(&at(2)).unwrap()).unwrap();
    assert_eq!(read_back(directory.path()), [at(2)]);
    lines.take_back();
    assert_eq!(read_back(directory.path()), [at(1)]);
}

#[test]
fn a_record_outgrows_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path()).unwrap();
    let mut lines = None;
    let mut wanted = at(0);
    for number in 0..64 {
        wanted.restored_pid = number;
        if number % 8 == 0 {
            wanted.warnings.push("w".repeat(ROOM / 3));
        }
        journal.write(&mut lines, &wanted).unwrap();
        assert_eq!(read_back(directory.path()), std::slice::from_ref(&wanted));
    }
    let length = fs::metadata(directory.path().join("a.log")).unwrap().len();
    assert!(length > u64::try_from(2 * ROOM).unwrap() && length <= FILE_BYTES_MAX, "{length}");
    // As much as is read back of any.
    wanted.warnings = vec!["w".repeat(usize::try_from(RECORD_BYTES_MAX).unwrap() - 1000)];
    journal.write(&mut lines, &wanted).unwrap();
    assert_eq!(read_back(directory.path()), [wanted]);
}

#[test]
fn only_root_can_read_it() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("operations");
    fs::create_dir(&place).unwrap();
    fs::set_permissions(&place, Permissions::from_mode(0o755)).unwrap();
    let (journal, _) = Journal::open(&place).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for _made_anew in 0..2 {
        write(&journal, &at(1));
        assert_eq!((mode(&place), mode(&place.join("a.log"))), (0o700, 0o600));
    }
}

#[test]
fn what_is_old_or_too_much_is_forgotten_unless_it_runs() {
    let now = "2026-06-01T00:00:00Z".parse().unwrap();
    let records = [
        record("a", State::Running, None),
        record("b", State::Done, Some("2026-03-01T00:00:00Z")),
        record("c", State::Failed, Some("2026-05-31T00:00:00Z")),
        // A clock that was wrong.
        record("d", State::Done, Some("2027-01-01T00:00:00Z")),
    ];
    assert_eq!(surplus(records.iter(), now), ["b"]);
    let many: Vec<Record> = (0..FINISHED_MAX + 2)
        .map(|n| record(&format!("{n:04}"), State::Done, Some("2026-05-31T00:00:00Z")))
        .collect();
    assert_eq!(surplus(many.iter(), now), ["0000", "0001"]);
}
