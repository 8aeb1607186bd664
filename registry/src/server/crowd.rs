//! Places for connections, and what happens when all are taken.
//!
//! Whoever opens connections and says nothing, or begins a request and never ends its head, must not
//! keep out who has something to ask. When a connection finds no place, those in no request lose
//! theirs. Clients that keep connections for later open them anew.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::response::Response;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::places::until_sent;

/// How long one who waits for a place leaves those in requests to end them before all are looked
/// at again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The places for connections.
#[derive(Debug)]
pub(super) struct Crowd {
    places: Arc<Semaphore>,
    full: Notify,
}

/// Counts the requests of one connection whose replies are not yet sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Business(Arc<AtomicUsize>);

/// A request that counts until the value is dropped.
#[derive(Debug)]
pub(super) struct Busy(Arc<AtomicUsize>);

impl Crowd {
    pub(super) fn new(places: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(places)), full: Notify::new() }
    }

    /// Takes a place, from one in no request when there is none.
    pub(super) async fn enter(&self) -> io::Result<OwnedSemaphorePermit> {
        loop {
            let place = Arc::clone(&self.places);
            if let Ok(place) = Arc::clone(&place).try_acquire_owned() {
                return Ok(place);
            }
            self.full.notify_waiters();
            if let Ok(place) = tokio::time::timeout(LOOK_AGAIN, place.acquire_owned()).await {
                return place.map_err(io::Error::other);
            }
        }
    }

    /// Returns when somebody waits for a place.
    pub(super) async fn is_full(&self) {
        self.full.notified().await;
    }
}

impl Business {
    /// Counts a request.
    pub(super) fn begin(&self) -> Busy {
        self.0.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(&self.0))
    }

    /// Whether no request is under way.
    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

impl Busy {
    /// Counts until the last byte of the reply is sent.
    pub(super) fn until_sent(self, response: Response) -> Response {
        until_sent(self, response)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
