//! How far a long operation is, for whoever wants to show it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Counts the bytes and times the steps of one operation. Cheap to clone; all clones count
/// together.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    done: AtomicU64,
    total: AtomicU64,
    transferred: AtomicU64,
    // Held for a push onto a short list only, never across an `.await`.
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    finished: Vec<Step>,
    current: Option<(&'static str, SystemTime, Instant)>,
}

/// A finished step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name.
    pub name: &'static str,
    /// When it began.
    pub began: SystemTime,
    /// How long it took.
    pub took: Duration,
}

/// One look at a [`Progress`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The step under way; empty before the first and after the last.
    pub step: &'static str,
    /// Bytes done of this step.
    pub done: u64,
    /// Bytes to do in this step, as far as they are known.
    pub total: u64,
    /// Bytes that crossed the network, over all steps.
    pub transferred: u64,
    /// Finished steps with their times.
    pub times: Vec<(&'static str, Duration)>,
}

impl Progress {
    /// Ends the step under way and begins the next.
    pub fn step(&self, name: &'static str) {
        self.turn(Some(name));
    }

    /// Ends the last step.
    pub fn finish(&self) {
        self.turn(None);
    }

    /// Adds bytes to what this step has to do.
    pub fn expect(&self, bytes: u64) {
        self.shared.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes to what this step has done.
    pub fn advance(&self, bytes: u64) {
        self.shared.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes to what crossed the network.
    pub fn transfer(&self, bytes: u64) {
        self.shared.transferred.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns how things stand.
    pub fn snapshot(&self) -> Snapshot {
        let steps = self.shared.steps.lock().unwrap_or_else(PoisonError::into_inner);
        Snapshot {
            step: steps.current.map_or("", |(name, ..)| name),
            done: self.shared.done.load(Ordering::Relaxed),
            total: self.shared.total.load(Ordering::Relaxed),
            transferred: self.shared.transferred.load(Ordering::Relaxed),
            times: steps.finished.iter().map(|step| (step.name, step.took)).collect(),
        }
    }

    /// Returns the finished steps.
    pub fn steps(&self) -> Vec<Step> {
        self.shared.steps.lock().unwrap_or_else(PoisonError::into_inner).finished.clone()
    }

    fn turn(&self, next: Option<&'static str>) {
        let mut steps = self.shared.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((name, began, clock)) = steps.current.take() {
            steps.finished.push(Step { name, began, took: clock.elapsed() });
        }
        steps.current = next.map(|name| (name, SystemTime::now(), Instant::now()));
        self.shared.done.store(0, Ordering::Relaxed);
        self.shared.total.store(0, Ordering::Relaxed);
    }
}
