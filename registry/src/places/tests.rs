use super::*;

#[tokio::test(start_paused = true)]
async fn who_waits_too_long_is_sent_away() {
    let places = Places::new(1);
    let place = places.take().await.unwrap();
    assert!(!places.are_wanted());
    let began = Instant::now();
    assert_eq!(places.take().await.unwrap_err(), Full);
    assert_eq!(began.elapsed(), WAIT_MAX);
    drop(place);
    drop(places.take().await.unwrap());
    assert!(places.are_wanted(), "who was sent away comes again");
    tokio::time::advance(WANTED_FOR).await;
    assert!(!places.are_wanted());
}

#[tokio::test(start_paused = true)]
async fn slow_is_who_keeps_others_waiting() {
    let places = Places::new(0);
    let mut pace = Pace::new(&places);
    pace.moved(PACE_TIME * 10, 1);
    assert!(!pace.is_too_slow(PACE_TIME), "nobody else wants its place");
    places.want();
    assert!(pace.is_too_slow(Duration::ZERO));
    pace.moved(Duration::ZERO, PACE_BYTES);
    assert!(!pace.is_too_slow(Duration::ZERO), "it goes on");
    // A byte now and then is not going on.
    for _ in 0..PACE_TIME.as_secs() {
        pace.moved(Duration::from_secs(1), 1);
    }
    assert!(pace.is_too_slow(Duration::ZERO));
    let mut fast = Pace::new(&places);
    for _ in 0..100 {
        fast.moved(PACE_TIME / 2, PACE_BYTES);
        assert!(!fast.is_too_slow(Duration::ZERO));
    }
    assert!(fast.is_too_slow(PACE_TIME));
}
