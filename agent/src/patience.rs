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
        self.pause().await;
        true
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that polls: cgroups and tracers send no events"
    )]
    async fn pause(&self) {
        tokio::time::sleep(self.every).await;
    }
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
    async fn it_looks_at_least_once() {
        let mut patience = Patience::new(Duration::ZERO, Duration::from_secs(1));
        assert!(patience.once_more().await && !patience.once_more().await);
    }
}
