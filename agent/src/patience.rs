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
    looks: u32,
    at_least: u32,
}

impl Patience {
    /// Looks for at most `limit`, and once at least.
    pub(crate) fn new(limit: Duration, every: Duration) -> Self {
        Self { end: Instant::now() + limit, every, looks: 0, at_least: 1 }
    }

    /// Looks as often at least, also when the limit is over: time passes, too, while this machine, or this
    /// process, stands still.
    pub(crate) const fn at_least(mut self, looks: u32) -> Self {
        self.at_least = looks;
        self
    }

    /// Waits until it is time for the next look; false when the limit is over.
    pub(crate) async fn once_more(&mut self) -> bool {
        if self.looks >= self.at_least && Instant::now() >= self.end {
            return false;
        }
        if self.looks > 0 {
            wait(self.every).await;
        }
        self.looks = self.looks.saturating_add(1);
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

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_stood_still_looks_some_more() {
        let every = Duration::from_millis(3);
        let mut patience = Patience::new(Duration::from_secs(1), every).at_least(5);
        assert!(patience.once_more().await);
        tokio::time::advance(Duration::from_mins(1)).await;
        for look in 2..=5 {
            assert!(patience.once_more().await, "{look}");
        }
        assert!(!patience.once_more().await);
    }
}
