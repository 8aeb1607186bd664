use proptest::prelude::*;

use super::*;
use crate::config::NotifyAction;
use crate::notify::event::Source;
use crate::notify::{Happening, Subject};

pub(in crate::notify) fn event(action: NotifyAction, repository: &str) -> Event {
    let source: Source = serde_json::from_str(r#"{"addr": "h:1", "instanceID": "i"}"#).unwrap();
    let (repository, subject) = (repository.parse().unwrap(), Subject::Tag);
    let tag = Some("t".parse().unwrap());
    Event::new(Happening { action, repository, subject, tag }, None, &source)
}

pub(in crate::notify) fn endpoints(texts: &[&str]) -> Vec<NotifyEndpoint> {
    let endpoint = |(number, text): (usize, &&str)| {
        toml::from_str(&format!("name = \"e{number}\"\nurl = \"http://h\"\n{text}")).unwrap()
    };
    texts.iter().enumerate().map(endpoint).collect()
}

fn push(queue: &mut Queue, good: bool) -> u64 {
    let number = queue.next();
    queue.push(number, Arc::new(event(NotifyAction::Push, "a")), good);
    number
}

#[test]
fn each_endpoint_gets_what_it_wants_in_order() {
    let endpoints = endpoints(&["", "repositories = [\"b/*\"]", "actions = [\"delete\"]"]);
    let mut queue = Queue::new(10, &endpoints);
    let news =
        [(NotifyAction::Push, "a"), (NotifyAction::Push, "b/c"), (NotifyAction::Delete, "a")];
    for (number, (action, repository)) in (0..).zip(news) {
        queue.push(number, Arc::new(event(action, repository)), true);
    }
    let mut got = |endpoint| {
        let mut numbers = Vec::new();
        while let Some(parcel) = queue.take(endpoint) {
            numbers.push(parcel.number);
            queue.delivered(endpoint, parcel.number, parcel.lost);
        }
        numbers
    };
    assert_eq!([got(0), got(1), got(2)], [vec![0, 1, 2], vec![1], vec![2]]);
    assert_eq!(queue.entries().count(), 0, "what everybody has is forgotten");
}

#[test]
fn what_is_under_way_holds_up_what_comes_after_it() {
    let mut queue = Queue::new(10, &endpoints(&[""]));
    let (first, second) = (push(&mut queue, false), push(&mut queue, true));
    assert!(queue.take(0).is_none());
    queue.settle(first, false);
    assert_eq!(queue.take(0).unwrap().number, second);
}

#[test]
fn who_misses_events_is_told_how_many_once() {
    let mut queue = Queue::new(2, &endpoints(&["", "actions = [\"delete\"]"]));
    for _ in 0..5 {
        push(&mut queue, true);
    }
    let parcel = queue.take(0).unwrap();
    assert_eq!((parcel.number, parcel.lost), (3, 3));
    // Two more while it is on its way: it is not lost, and the one after it is.
    push(&mut queue, true);
    push(&mut queue, true);
    queue.delivered(0, parcel.number, parcel.lost);
    let parcel = queue.take(0).unwrap();
    assert_eq!((parcel.number, parcel.lost), (5, 1));
    queue.delivered(0, parcel.number, parcel.lost);
    assert_eq!(queue.take(0).unwrap().lost, 0);
    assert_eq!(queue.cursors()[1].lost, 0, "it wanted none of them");
}

proptest! {
    /// Whatever happens, each endpoint gets each event once, or it is counted as lost.
    #[test]
    fn delivered_and_lost_are_all_there_is(
        steps in proptest::collection::vec((0..4u8, 0..2usize), 1..200),
        keep in 1..8usize,
    ) {
        let mut queue = Queue::new(keep, &endpoints(&["", ""]));
        let (mut pushed, mut got) = (0u64, [0u64; 2]);
        let mut lost = [0u64; 2];
        let mut step = |queue: &mut Queue, endpoint: usize| {
            let Some(parcel) = queue.take(endpoint) else { return false };
            queue.delivered(endpoint, parcel.number, parcel.lost);
            got[endpoint] += 1;
            lost[endpoint] += parcel.lost;
            true
        };
        for (kind, endpoint) in steps {
            if kind < 2 {
                push(&mut queue, true);
                pushed += 1;
            } else {
                step(&mut queue, endpoint);
            }
        }
        for endpoint in 0..2 {
            while step(&mut queue, endpoint) {}
        }
        for endpoint in 0..2 {
            prop_assert_eq!(got[endpoint] + lost[endpoint], pushed);
        }
        prop_assert_eq!(queue.entries().count(), 0);
    }
}
