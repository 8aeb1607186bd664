//! Ctrl-C, or SIGTERM: it ends a command, unless that has something under way elsewhere which it ends first.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// Who is told of an interruption.
#[derive(Debug)]
pub(crate) struct Interrupts {
    claimed: AtomicBool,
    count: watch::Sender<u32>,
}

/// The right to be told, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    interrupts: &'a Interrupts,
    seen: watch::Receiver<u32>,
}

impl Interrupts {
    /// Nobody has claimed any.
    pub(crate) fn new() -> Self {
        Self { claimed: AtomicBool::new(false), count: watch::Sender::new(0) }
    }

    /// Passes one on; false when nobody wants to be told, and the command is to end.
    pub(crate) fn deliver(&self) -> bool {
        let claimed = self.claimed.load(Ordering::SeqCst);
        self.count.send_modify(|count| *count += u32::from(claimed));
        claimed
    }

    /// Wants to be told from now on.
    pub(crate) fn claim(&self) -> Claim<'_> {
        let seen = self.count.subscribe();
        self.claimed.store(true, Ordering::SeqCst);
        Claim { interrupts: self, seen }
    }
}

impl Claim<'_> {
    /// Waits for the next one.
    pub(crate) async fn next(&mut self) {
        // The sender lives as long as we do.
        if self.seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.interrupts.claimed.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_what_is_claimed_is_passed_on() {
        let interrupts = Interrupts::new();
        assert!(!interrupts.deliver());
        let mut claim = interrupts.claim();
        assert!(interrupts.deliver());
        claim.next().await;
        drop(claim);
        assert!(!interrupts.deliver());
    }
}
