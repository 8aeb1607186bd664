use proptest::prelude::*;

use super::*;
use crate::config::NotifyAction;
use crate::notify::queue::tests::{endpoints, event};

fn open(directory: &Path, is_true: bool) -> Outbox {
    let metrics = NotifyMetrics::default();
    Outbox::open(directory, 100, &endpoints(&[""]), metrics, &|_| is_true).unwrap()
}

fn push() -> Event {
    event(NotifyAction::Push, "a")
}

fn waiting(outbox: &Outbox) -> Vec<String> {
    let inner = outbox.lock();
    inner.queue.entries().map(|(_, entry)| entry.event.id.clone()).collect()
}

/// Ends as a kill does: nothing is settled.
fn kill(intent: Intent<'_>) -> String {
    let mut intent = intent;
    let number = std::mem::take(&mut intent.numbers)[0];
    let inner = intent.outbox.lock();
    inner.queue.entries().find(|(at, _)| *at == number).unwrap().1.event.id.clone()
}

#[test]
fn what_was_done_when_it_was_killed_is_told_and_what_was_not_is_not() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    outbox.intend(vec![push()]).settle(true);
    outbox.intend(vec![push()]).settle(false);
    let unsettled = kill(outbox.intend(vec![push()]));
    let done = waiting(&outbox)[0].clone();
    drop(outbox);

    for _ in 0..2 {
        assert_eq!(waiting(&open(&directory, true)), [done.clone(), unsettled.clone()]);
    }
    let outbox = open(&directory, true);
    let gone = kill(outbox.intend(vec![push()]));
    drop(outbox);
    let left = waiting(&open(&directory, false));
    assert!(!left.contains(&gone) && left.contains(&done), "{left:?}");
}

/// What undoes an event that was acknowledged, and is told to nobody itself, comes after the word
/// that the event was true.
#[test]
fn what_became_of_events_is_on_the_disk_before_what_is_not_told() {
    let root = tempfile::tempdir().unwrap();
    let outbox = open(&root.path().join("notify"), true);
    let synced = || *outbox.synced.lock().unwrap();
    outbox.intend(vec![push()]).settle(true);
    let settled = outbox.lock().written;
    assert!(synced() < settled);
    outbox.remember();
    assert_eq!(synced(), settled);
    // Only lines of what is settled are waited for.
    outbox.mention(event(NotifyAction::Pull, "a"));
    outbox.remember();
    assert_eq!(synced(), settled);
}

#[tokio::test]
async fn what_was_delivered_is_not_delivered_again() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    outbox.intend(vec![push(), push()]).settle(true);
    let first = outbox.next(0).await;
    outbox.delivered(0, &first);
    drop(outbox);
    let outbox = open(&directory, true);
    let second = outbox.next(0).await;
    assert_eq!((first.number, second.number), (0, 1));
    outbox.delivered(0, &second);
    drop(outbox);
    assert_eq!(waiting(&open(&directory, true)), Vec::<String>::new());
}

/// Where everything was delivered only the endpoints' places are left in the file, and numbers go
/// on from there.
#[test]
fn what_happens_after_starts_with_nothing_to_tell_is_told() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    outbox.intend(vec![push(), push(), push()]).settle(true);
    for number in 0..3 {
        let parcel = outbox.lock().queue.take(0).unwrap();
        assert_eq!(parcel.number, number);
        outbox.delivered(0, &parcel);
    }
    drop(outbox);
    for _ in 0..3 {
        assert_eq!(waiting(&open(&directory, true)), Vec::<String>::new());
    }
    // One that is new to the file begins where the others are.
    let metrics = NotifyMetrics::default();
    let both = endpoints(&["", ""]);
    let outbox = Outbox::open(&directory, 100, &both, metrics, &|_| true).unwrap();
    outbox.intend(vec![push()]).settle(true);
    let mut inner = outbox.lock();
    let numbers = [0, 1].map(|endpoint| inner.queue.take(endpoint).map(|parcel| parcel.number));
    assert_eq!(numbers, [Some(3), Some(3)]);
}

#[test]
fn a_new_endpoint_is_told_from_now_on_and_an_old_one_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    open(&directory, true).intend(vec![push()]).settle(true);
    let metrics = NotifyMetrics::default();
    let both = endpoints(&["", ""]);
    let outbox = Outbox::open(&directory, 100, &both, metrics, &|_| true).unwrap();
    let mut inner = outbox.lock();
    assert_eq!(inner.queue.take(0).unwrap().number, 0);
    assert!(inner.queue.take(1).is_none());
}

#[test]
fn a_torn_or_foreign_line_costs_that_line() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    outbox.intend(vec![push(), push()]).settle(true);
    let all = waiting(&outbox);
    drop(outbox);
    let path = directory.join("outbox.log");
    let text = fs::read_to_string(&path).unwrap();
    for end in 0..text.len() {
        fs::write(&path, &text[..end]).unwrap();
        let left = waiting(&open(&directory, true));
        assert!(all.starts_with(&left), "{end} {left:?}");
    }
    fs::write(&path, format!("\u{0}what\n{text}")).unwrap();
    assert_eq!(waiting(&open(&directory, true)), all);
}

#[test]
fn the_file_does_not_grow_without_end() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    for _ in 0..4000 {
        outbox.mention(push());
    }
    let length = fs::metadata(directory.join("outbox.log")).unwrap().len();
    assert!(length < REWRITE_BYTES_MIN + (1 << 16), "{length}");
    assert_eq!(waiting(&outbox).len(), 100);
    let kept = waiting(&outbox);
    drop(outbox);
    assert_eq!(waiting(&open(&directory, true)), kept);
}

#[test]
fn the_push_of_a_blob_stays_one_when_it_is_read_again() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("notify");
    let outbox = open(&directory, true);
    let mut blob = push();
    blob.pushed_blob = true;
    outbox.intend(vec![blob, push()]).settle(true);
    drop(outbox);
    for _ in 0..2 {
        let outbox = open(&directory, true);
        let inner = outbox.lock();
        let blobs: Vec<_> =
            inner.queue.entries().map(|(_, entry)| entry.event.pushed_blob).collect();
        // The endpoint has not asked for blobs, and what it waits for is kept with the rest.
        assert_eq!(blobs, [true, false]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Whatever became of the file, what is whole in it is kept, in order, and nothing else comes
    /// out of it; and what is read is written so that it is read again.
    #[test]
    fn any_damage_costs_no_more_than_the_lines_it_hits(
        at in any::<prop::sample::Index>(),
        junk in prop::collection::vec(any::<u8>(), 0..40),
        cut in 0..400usize,
    ) {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("notify");
        let outbox = open(&directory, true);
        outbox.intend(vec![push(), push(), push()]).settle(true);
        let all = waiting(&outbox);
        drop(outbox);
        let path = directory.join("outbox.log");
        let mut bytes = fs::read(&path).unwrap();
        let start = at.index(bytes.len());
        let end = (start + cut).min(bytes.len());
        bytes.splice(start..end, junk);
        fs::write(&path, bytes).unwrap();
        let left = waiting(&open(&directory, true));
        let mut kept = all.iter();
        prop_assert!(left.iter().all(|id| kept.any(|known| known == id)), "{:?} of {:?}", left, all);
        prop_assert_eq!(waiting(&open(&directory, true)), left);
    }
}
