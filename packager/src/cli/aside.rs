//! Waiting for what may never come: a person at a terminal, the other end of a pipe.

use std::io;

use tokio::sync::oneshot;

/// Runs `work` on a thread of its own, so that an interruption ends the command meanwhile. Nobody
/// waits for the thread then.
pub(super) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (done, result) = oneshot::channel();
    // No blocking task: the end of a runtime waits for those.
    std::thread::Builder::new().spawn(move || {
        // Nobody waits any more.
        let _late = done.send(work());
    })?;
    result.await.map_err(io::Error::other)
}
