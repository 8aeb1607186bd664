use std::sync::Arc;

use axum::body::HttpBody as _;
use axum::response::IntoResponse as _;

use super::{Business, Crowd};

#[tokio::test(start_paused = true)]
async fn who_finds_no_place_gets_that_of_one_who_does_nothing() {
    let crowd = Arc::new(Crowd::new(1));
    let first = crowd.enter().await.unwrap();
    let idle = async {
        crowd.is_full().await;
        drop(first);
    };
    let (second, ()) = tokio::join!(crowd.enter(), idle);
    drop(second.unwrap());
}

#[tokio::test(start_paused = true)]
async fn one_who_was_busy_is_asked_again() {
    let crowd = Arc::new(Crowd::new(1));
    let first = crowd.enter().await.unwrap();
    let busy = async {
        crowd.is_full().await;
        crowd.is_full().await;
        drop(first);
    };
    let (second, ()) = tokio::join!(crowd.enter(), busy);
    drop(second.unwrap());
}

#[tokio::test]
async fn a_request_counts_until_its_reply_is_sent() {
    let business = Business::default();
    assert!(business.is_none());
    let response = business.begin().until_sent("content".into_response());
    assert_eq!(response.body().size_hint().exact(), Some(7), "the length stays");
    assert!(!business.is_none());
    drop(response);
    assert!(business.is_none());
}
