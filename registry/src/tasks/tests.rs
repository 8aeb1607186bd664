use super::*;

/// The clock is paused, so thirty seconds of grace pass in no time and never flake.
#[tokio::test(start_paused = true)]
async fn a_task_that_ignores_the_token_does_not_hold_up_shutdown() {
    let tasks = Tasks::default();
    tasks.spawn(|_cancel| std::future::pending());
    tasks.spawn(async |cancel: CancellationToken| cancel.cancelled().await);

    assert!(!tasks.shut_down(Duration::from_secs(30)).await);
}

#[tokio::test]
async fn work_outlives_whoever_awaits_it() {
    let tasks = Tasks::default();
    let (done, seen) = tokio::sync::oneshot::channel();
    drop(tasks.run(async move { done.send(()) }));

    seen.await.unwrap();
    assert!(tasks.shut_down(Duration::from_secs(30)).await);
}
