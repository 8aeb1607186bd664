//! Waiting for something outside this process that nobody announces.

use std::time::Duration;

use tokio::time::Instant;

/// Counts the looks at something that may still change.
///
/// ```text
/// let mut patience = Patience::new(limit, every);
/// while patience.once_more().await {
///     if it_happened() { return Ok(()); }
/// }
/// ```
#[derive(Debug)]
pub(crate) struct Patience {
    end: Instant,
    every: Duration,
    looked: bool,
}

impl Patience {
    /// Looks for at most `limit`, and once at least.
    pub(crate) fn new(limit: Duration, every: Duration) -> Self {
        Self { end: Instant::now() + limit, every, looked: false }
    }

    /// Waits until it is time for the next look; false when the limit is over.
    pub(crate) async fn once_more(&mut self) -> bool {
        if !self.looked {
            self.looked = true;
            return true;
        }
        if Instant::now() >= self.end {
            return false;
        }
        wait(self.every).await;
        true
    }
}

/// Pauses between attempts at what may take for ever, each longer than the one before.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    last: Option<Duration>,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(250);
    /// An attempt costs a few calls that fail at once.
    const LONGEST: Duration = Duration::from_secs(4);

    /// Whether there was no pause yet.
    pub(crate) const fn is_first(&self) -> bool {
        self.last.is_none()
    }

    /// Waits for the next attempt.
    pub(crate) async fn pause(&mut self) {
        let next = self.last.map_or(Self::FIRST, |last| (last * 2).min(Self::LONGEST));
        self.last = Some(next);
        wait(next).await;
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place that waits: cgroups, tracers and a dead containerd send no events"
)]
async fn wait(time: Duration) {
    tokio::time::sleep(time).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_ends_after_the_limit() {
        let mut patience = Patience::new(Duration::from_secs(1), Duration::from_millis(100));
        let mut looks = 0;
        while patience.once_more().await {
            looks += 1;
        }
        assert!((10..=12).contains(&looks), "{looks}");
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_up_to_a_bound() {
        let (mut pauses, begun) = (Pauses::default(), Instant::now());
        assert!(pauses.is_first());
        for _ in 0..6 {
            pauses.pause().await;
        }
        let seconds = begun.elapsed().as_secs_f64();
        assert!(!pauses.is_first() && (11.7..12.0).contains(&seconds), "{seconds}");
    }

    #[tokio::test(start_paused = true)]
    async fn it_looks_at_least_once() {
        let mut patience = Patience::new(Duration::ZERO, Duration::from_secs(1));
        assert!(patience.once_more().await && !patience.once_more().await);
    }
}
