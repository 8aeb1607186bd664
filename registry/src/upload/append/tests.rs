use std::convert::Infallible;
use std::future::pending;

use futures::{StreamExt as _, stream};

use super::*;

/// A body that sends a byte after each of these pauses, and then never ends.
fn body(pauses: impl IntoIterator<Item = Duration, IntoIter: Send + 'static>) -> Body {
    let bytes = stream::iter(pauses).then(async |pause| {
        let _over = tokio::time::timeout(pause, pending::<()>()).await;
        Ok::<_, Infallible>(Bytes::from_static(b"x"))
    });
    Body::from_stream(bytes.chain(stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn a_body_may_take_its_time_and_not_fall_silent() {
    let almost = SILENCE_MAX.checked_sub(Duration::from_secs(1)).unwrap();
    let mut slow = body(vec![almost; 100]);
    for _ in 0..100 {
        assert_eq!(next_frame(&mut slow).await.unwrap().unwrap(), "x");
    }
    let began = Instant::now();
    assert!(matches!(next_frame(&mut slow).await, Err(UploadError::Stalled)));
    assert_eq!(began.elapsed(), SILENCE_MAX);
}
