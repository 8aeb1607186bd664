//! How long to wait for a registry, and how often to ask again. There is no limit on the time a
//! whole transfer takes, only on the time without progress.

use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::time::timeout;

use super::error::is_transient;
use crate::store::StoreErrorKind;

/// Longest wait for a connection.
pub(super) const CONNECT: Duration = Duration::from_secs(15);

/// Longest wait for the next bytes of a transfer, or for a reply that needs no transfer.
pub(super) const STALL: Duration = Duration::from_mins(1);

/// Longest wait for the reply after the last byte of an upload: registries on object storage copy
/// the blob to its final key before they answer.
const COMMIT: Duration = Duration::from_mins(5);

/// How often a request is repeated at most.
pub(super) const REPEATS: usize = 5;

/// How often the first request to a registry is repeated: one that is away is told soon.
const REPEATS_FIRST: usize = 2;

/// Longest pause that a registry may ask for. Whoever wants to wait longer can come back.
const PAUSE_MAX: Duration = Duration::from_mins(10);

/// From which length on a pause is told: whoever waits wants to know for what.
const PAUSE_TOLD: Duration = Duration::from_secs(10);

/// How much longer failures without progress between them are borne.
#[derive(Debug)]
pub(super) struct Patience {
    pauses: ExponentialBackoff,
}

impl Default for Patience {
    /// Pauses of 0.2, 0.4, 0.8, 1.6 and 3.2 seconds, each with up to as much again at random.
    fn default() -> Self {
        Self::with(REPEATS)
    }
}

impl Patience {
    fn with(repeats: usize) -> Self {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(200))
            .with_max_delay(Duration::from_secs(5))
            .with_max_times(repeats)
            .with_jitter();
        Self { pauses: pauses.build() }
    }

    /// Pauses when the failure may pass, at least as long as the registry wants; gives it back when
    /// it will not pass, or when there were too many.
    pub(super) async fn wait(&mut self, kind: StoreErrorKind) -> Result<(), StoreErrorKind> {
        let wanted = match &kind {
            StoreErrorKind::Busy { after, .. } if *after > PAUSE_MAX => return Err(kind),
            StoreErrorKind::Busy { after, .. } => *after,
            kind if is_transient(kind) => Duration::ZERO,
            _ => return Err(kind),
        };
        let Some(pause) = self.pauses.next() else { return Err(kind) };
        let pause = pause.max(wanted);
        tell(&kind, pause);
        #[expect(clippy::disallowed_methods, reason = "between attempts, as the registry asks")]
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Says in the log that a request is repeated.
fn tell(kind: &StoreErrorKind, pause: Duration) {
    let reason = kybernate_spec::chain(kind);
    let pause_s = pause.as_secs();
    if pause >= PAUSE_TOLD {
        tracing::warn!(%reason, pause_s, "the registry is asked again after a pause");
    } else {
        tracing::debug!(%reason, pause_ms = pause.as_millis(), "the registry is asked again");
    }
}

/// Makes the first request to a registry, and again while the failure may pass.
pub(super) async fn persist_briefly<T, F>(attempt: impl FnMut() -> F) -> Result<T, StoreErrorKind>
where
    F: Future<Output = Result<T, StoreErrorKind>>,
{
    persist_with(Patience::with(REPEATS_FIRST), attempt).await
}

/// Makes an attempt, and again after a growing pause while the failure may pass.
pub(super) async fn persist<T, F>(attempt: impl FnMut() -> F) -> Result<T, StoreErrorKind>
where
    F: Future<Output = Result<T, StoreErrorKind>>,
{
    persist_with(Patience::default(), attempt).await
}

async fn persist_with<T, F>(
    mut patience: Patience,
    mut attempt: impl FnMut() -> F,
) -> Result<T, StoreErrorKind>
where
    F: Future<Output = Result<T, StoreErrorKind>>,
{
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(kind) => patience.wait(kind).await?,
        }
    }
}

/// Waits for `future`, at most [`STALL`].
pub(super) async fn within_stall<T, E: Into<StoreErrorKind>>(
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, StoreErrorKind> {
    match timeout(STALL, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_elapsed) => Err(stalled(STALL)),
    }
}

/// Waits for an upload as long as `sent` grows, then for the registry to acknowledge `total`.
pub(super) async fn while_moving<T, E: Into<StoreErrorKind>>(
    sent: &AtomicU64,
    total: u64,
    upload: impl Future<Output = Result<T, E>>,
) -> Result<T, StoreErrorKind> {
    let mut upload = pin!(upload);
    let mut seen = None;
    loop {
        let before = sent.load(Ordering::Relaxed);
        if seen == Some(before) {
            return Err(stalled(if before < total { STALL } else { COMMIT }));
        }
        seen = Some(before);
        let limit = if before < total { STALL } else { COMMIT };
        match timeout(limit, &mut upload).await {
            Ok(result) => return result.map_err(Into::into),
            Err(_elapsed) => {}
        }
    }
}

fn stalled(after: Duration) -> StoreErrorKind {
    let text = format!("no progress for {} s", after.as_secs());
    StoreErrorKind::Io(io::Error::new(io::ErrorKind::TimedOut, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_moves_may_take_for_ever() {
        let sent = AtomicU64::new(0);
        let slow = async {
            let mut ticks = tokio::time::interval(STALL / 2);
            for _ in 0..100 {
                ticks.tick().await;
                sent.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, StoreErrorKind>(())
        };
        while_moving(&sent, 1000, slow).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_stands_still_is_given_up() {
        let sent = AtomicU64::new(0);
        let stuck = std::future::pending::<Result<(), StoreErrorKind>>();
        let error = while_moving(&sent, 1000, stuck).await.unwrap_err();
        assert!(is_transient(&error), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_counted() {
        let mut attempts = 0;
        let result = persist(|| {
            attempts += 1;
            std::future::ready(Err::<(), _>(stalled(STALL)))
        });
        result.await.unwrap_err();
        assert_eq!(attempts, REPEATS + 1);
    }
}
