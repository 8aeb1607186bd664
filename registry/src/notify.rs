//! Tells others what happens: events, posted to endpoints.
//!
//! An event is written down before what it tells of is done, and becomes good when that is done
//! ([`outbox`]). So every change that was made is told of, also when the process dies over it: what
//! was neither good nor void when it died is looked up in the store at the next start. Events have
//! ids, and one that was delivered just before a death is delivered again.
//!
//! [`queue`] decides what is kept for whom, [`deliver`] sends it, one event per request and
//! endpoint, in order.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kybernate_spec::chain;

pub(crate) use self::event::{Event, Happening, Origin, Subject};
pub(crate) use self::outbox::OpenError;

use self::event::Source;
use self::outbox::Outbox;
use crate::config::{Config, Notify, NotifyAction, NotifyEndpoint};
use crate::metrics::NotifyMetrics;
use crate::store::{Store, StoreError, line_sum};
use crate::tasks::Tasks;

mod deliver;
mod event;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod outbox;
mod queue;
mod sign;

/// Locks for repositories; two that share one merely wait for each other.
const ORDERS: usize = 64;

/// Where what happens is told; nothing is done while there is nobody to tell.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notices(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    endpoints: Arc<[NotifyEndpoint]>,
    source: Source,
    outbox: Arc<Outbox>,
    /// Held while a change is written down and made: what is told first happened first.
    orders: [Mutex<()>; ORDERS],
}

impl Notices {
    /// Opens the outbox of `store` and finds out what became of events that were under way. Blocks.
    pub(crate) fn open(
        config: &Config,
        store: &Store,
        metrics: NotifyMetrics,
    ) -> Result<Self, OpenError> {
        let Notify { keep, endpoint } = &config.notify;
        if endpoint.is_empty() {
            return Ok(Self(None));
        }
        let endpoints: Arc<[NotifyEndpoint]> = endpoint.clone().into();
        let resolve = |event: &Event| {
            event.is_true(store).unwrap_or_else(|error| {
                tracing::warn!(error = %chain(&error), event.id, "told although it is unsure");
                true
            })
        };
        let directory: PathBuf = store.notices();
        let outbox = Outbox::open(&directory, *keep, &endpoints, metrics, &resolve)?;
        let source = Source::here(&config.listen);
        let orders = std::array::from_fn(|_| Mutex::new(()));
        Ok(Self(Some(Arc::new(Inner { endpoints, source, outbox: Arc::new(outbox), orders }))))
    }

    /// Begins to deliver.
    pub(crate) fn start(&self, tasks: &Tasks) -> Result<(), reqwest::Error> {
        let Some(inner) = &self.0 else { return Ok(()) };
        for (number, endpoint) in inner.endpoints.iter().enumerate() {
            let sender = deliver::Sender::new(endpoint.clone())?;
            let outbox = Arc::clone(&inner.outbox);
            tasks.spawn(|cancel| deliver::deliver(outbox, number, sender, cancel));
        }
        Ok(())
    }

    /// Whether somebody is told of pulls from a repository.
    pub(crate) fn wants_pulls(&self, repository: &str) -> bool {
        let wants = |inner: &Arc<Inner>| inner.wants(NotifyAction::Pull, false, repository);
        self.0.as_ref().is_some_and(wants)
    }

    /// Does `work` and tells of it when it was done, as `done` says. Blocks.
    pub(crate) fn telling<T>(
        &self,
        news: impl IntoIterator<Item = Happening>,
        origin: Option<&Origin>,
        work: impl FnOnce() -> Result<T, StoreError>,
        done: impl FnOnce(&T) -> bool,
    ) -> Result<T, StoreError> {
        let Some(inner) = &self.0 else { return work() };
        let (wanted, untold): (Vec<_>, Vec<_>) = news.into_iter().partition(|news| {
            inner.wants(news.action, news.is_pushed_blob(), news.repository.as_str())
        });
        // A blob is the same whoever pushes it first.
        let ordered = wanted.iter().chain(&untold).find(|news| !news.is_pushed_blob());
        let _order = ordered.map(|news| inner.order(news.repository.as_str()));
        // It may undo what somebody is told of.
        if wanted.is_empty() && ordered.is_some() {
            inner.outbox.remember();
        }
        let events = wanted.into_iter().map(|news| Event::new(news, origin, &inner.source));
        let intent = inner.outbox.intend(events.collect());
        let outcome = work();
        intent.settle(outcome.as_ref().is_ok_and(done));
        outcome
    }

    /// Tells of what was only read; it may be lost when the process dies. Blocks.
    pub(crate) fn mention(&self, news: Happening, origin: Option<&Origin>) {
        if let Some(inner) = &self.0 {
            inner.outbox.mention(Event::new(news, origin, &inner.source));
        }
    }
}

impl Inner {
    /// Waits for the changes of a repository that are under way.
    fn order(&self, repository: &str) -> MutexGuard<'_, ()> {
        let [first, ..] = &self.orders;
        let at = usize::try_from(line_sum(repository.as_bytes())).unwrap_or(0) % ORDERS;
        let order = self.orders.get(at).unwrap_or(first);
        order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wants(&self, action: NotifyAction, pushed_blob: bool, repository: &str) -> bool {
        let mut endpoints = self.endpoints.iter();
        endpoints.any(|endpoint| endpoint.wants(action, pushed_blob, repository))
    }
}
