use super::*;

fn limits(
    rate: Option<u32>,
    burst: Option<u32>,
    concurrent: Option<u32>,
) -> (Arc<Limits>, Instant) {
    let now = Instant::now();
    let settings =
        LimitSettings { requests_per_second: rate, burst, concurrent_requests: concurrent };
    (Limits::new(&settings, now).unwrap(), now)
}

fn name(name: &str) -> Client {
    Client::Name(name.to_owned())
}

#[test]
fn a_burst_is_let_in_and_then_a_rate() {
    let (limits, start) = limits(Some(10), Some(5), None);
    let enter =
        |millis: u64| limits.enter(name("a"), start + Duration::from_millis(millis)).is_ok();
    assert!((0..5).all(|_| enter(0)));
    assert!(!enter(0) && !enter(99));
    assert!(enter(100) && !enter(100));
    assert!(limits.enter(name("b"), start).is_ok(), "others are not affected");
    assert!((0..5).all(|_| enter(10_000)) && !enter(10_000), "no more than a burst is saved up");
    let refused = limits.enter(name("a"), start + Duration::from_secs(10)).unwrap_err();
    assert_eq!((refused.0.as_millis(), refused.seconds()), (100, 1));
}

#[test]
fn requests_in_progress_are_counted_until_they_end() {
    let (limits, now) = limits(None, None, Some(2));
    let first = limits.enter(name("a"), now).unwrap();
    let _second = limits.enter(name("a"), now).unwrap();
    assert!(limits.enter(name("a"), now).is_err());
    drop(first);
    assert!(limits.enter(name("a"), now).is_ok());
}

#[test]
fn too_many_clients_share_an_account() {
    let (limits, now) = limits(Some(1), Some(1), None);
    for number in 0..CLIENTS_MAX {
        limits.enter(name(&number.to_string()), now).unwrap();
    }
    limits.enter(name("one more"), now).unwrap();
    limits.enter(name("and another"), now).unwrap_err();
    assert_eq!(limits.lock().accounts.len(), CLIENTS_MAX + 1);
    // Those who rest are forgotten, and there is room.
    let later = now + Duration::from_secs(5);
    limits.enter(name("and another"), later).unwrap();
    assert_eq!(limits.lock().accounts.len(), 1);
}

#[test]
fn nothing_is_counted_without_limits() {
    assert!(Limits::new(&LimitSettings::default(), Instant::now()).is_none());
}

#[test]
fn an_address_is_what_a_client_cannot_choose() {
    let of = |text: &str| Client::of(text.parse().unwrap());
    assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
    assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    assert_ne!(of("10.0.0.2"), of("10.0.0.1"));
}
