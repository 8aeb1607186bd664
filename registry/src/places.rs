//! Places for bodies on their way: they bound the memory that bodies take.
//!
//! A body has its place until its last byte has moved, and a client may take its time for that,
//! while there are places. When there are none, those who wait are told after a while to come again,
//! and those whose clients keep everything waiting lose theirs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// How long one waits for a place.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// How long places count as wanted after somebody waited: who was sent away comes again.
const WANTED_FOR: Duration = Duration::from_mins(1);
/// While places are wanted, a body has to move this much: 2 MiB, …
const PACE_BYTES: u64 = 2 << 20;
/// … in this time of waiting for its client, which makes 35 KiB/s.
const PACE_TIME: Duration = Duration::from_mins(1);

/// So many bodies at once.
#[derive(Debug, Clone)]
pub(crate) struct Places(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    free: Arc<Semaphore>,
    /// When somebody waited last. Held for a look only, hence not a tokio mutex.
    wanted: Mutex<Option<Instant>>,
}

/// All places are taken, and have been for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

/// How a body moves while its client is waited for.
#[derive(Debug)]
pub(crate) struct Pace {
    places: Places,
    waited: Duration,
    bytes: u64,
}

impl Places {
    pub(crate) fn new(places: usize) -> Self {
        let free = Arc::new(Semaphore::new(places));
        Self(Arc::new(Inner { free, wanted: Mutex::default() }))
    }

    /// Takes a place, which is given back when the returned value is dropped.
    pub(crate) async fn take(&self) -> Result<OwnedSemaphorePermit, Full> {
        let free = &self.0.free;
        if let Ok(place) = Arc::clone(free).try_acquire_owned() {
            return Ok(place);
        }
        self.want();
        let taken = tokio::time::timeout(WAIT_MAX, Arc::clone(free).acquire_owned()).await;
        self.want();
        taken.ok().and_then(Result::ok).ok_or(Full)
    }

    fn want(&self) {
        *self.0.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether somebody waits for a place, or was sent away without one shortly before.
    fn are_wanted(&self) -> bool {
        let wanted = *self.0.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.is_some_and(|wanted| wanted.elapsed() < WANTED_FOR)
    }
}

impl Pace {
    pub(crate) fn new(places: &Places) -> Self {
        Self { places: places.clone(), waited: Duration::ZERO, bytes: 0 }
    }

    /// Counts bytes that moved after the client was waited for.
    pub(crate) fn moved(&mut self, waited: Duration, bytes: u64) {
        self.waited += waited;
        self.bytes += bytes;
        if self.bytes >= PACE_BYTES {
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        }
    }

    /// Whether a body that is now waited for since `waiting` is too slow for those who want its
    /// place.
    pub(crate) fn is_too_slow(&self, waiting: Duration) -> bool {
        self.waited + waiting >= PACE_TIME && self.places.are_wanted()
    }
}

/// Keeps something until the last byte of a reply is sent.
pub(crate) fn until_sent<T: Send + 'static>(kept: T, response: Response) -> Response {
    // Of all adapters this one leaves the body's length as it is.
    response.map(|body| {
        Body::new(body.map_err(move |error| {
            let _kept = &kept;
            error
        }))
    })
}

#[cfg(test)]
mod tests;
