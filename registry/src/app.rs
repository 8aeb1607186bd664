//! What every handler can reach.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use crate::access::Access;
use crate::access::limit::Limits;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::notify::{Notices, OpenError};
use crate::places::{Full, Places};
use crate::quota::Quotas;
use crate::retention::Pulls;
use crate::store::{Rules, Store, StoreError, glance};
use crate::tasks::Tasks;
use crate::trace;
use crate::upload::Uploads;

/// Bodies sent at once; each holds at most two chunks of 1 MiB, or a manifest or list of 4 MiB.
const BODIES_SENT_MAX: usize = 256;
/// Bodies received at once; each holds at most two chunks of 1 MiB, or a manifest of 4 MiB.
const BODIES_RECEIVED_MAX: usize = 256;
/// Deletions at once where tags are immutable: each reads what all of those need, and there are only
/// so many threads that may block.
const DELETIONS_MAX: usize = 8;

/// Everything the registry is made of, built once and never changed.
#[derive(Debug)]
pub struct App {
    /// What was set.
    pub config: Config,
    /// Who may do what.
    pub access: Access,
    /// What is counted.
    pub metrics: Metrics,
    /// How much one client may ask for.
    pub(crate) limits: Option<Arc<Limits>>,
    /// Content.
    pub store: Arc<Store>,
    /// Unfinished uploads.
    pub uploads: Uploads,
    /// Work that shutdown waits for.
    pub tasks: Tasks,
    /// Cancelled when the end is announced: no more requests should come, and those that do are
    /// answered.
    pub(crate) leaving: CancellationToken,
    pub(crate) pulls: Pulls,
    pub(crate) notices: Notices,
    pub(crate) sending: Places,
    pub(crate) receiving: Places,
    deleting: Option<Places>,
}

/// A cheap handle to the [`App`].
pub type AppState = Arc<App>;

impl App {
    /// Builds a registry on `store`.
    pub fn new(
        config: Config,
        access: Access,
        store: Store,
        tasks: Tasks,
    ) -> Result<AppState, OpenError> {
        let mut store = store;
        let quotas = Quotas::new(config.quota.clone());
        store.govern(Rules { tags: config.tags.clone(), quotas });
        let metrics = Metrics::new(store.metrics());
        let notices = Notices::open(&config, &store, metrics.notify.clone())?;
        let store = Arc::new(store);
        let receiving = Places::new(BODIES_RECEIVED_MAX);
        Ok(Arc::new(Self {
            notices: notices.clone(),
            pulls: Pulls::new(&config.retention),
            deleting: (!config.tags.immutable.is_empty()).then(|| Places::new(DELETIONS_MAX)),
            limits: Limits::new(&config.limits, Instant::now()),
            config,
            access,
            metrics,
            uploads: Uploads::new(Arc::clone(&store), notices, receiving.clone()),
            store,
            tasks,
            leaving: CancellationToken::new(),
            sending: Places::new(BODIES_SENT_MAX),
            receiving,
        }))
    }
}

impl App {
    /// Waits for a place to delete content in, where there are only so many.
    pub(crate) async fn may_delete(&self) -> Result<Option<OwnedSemaphorePermit>, Full> {
        match &self.deleting {
            Some(places) => places.take().await.map(Some),
            None => Ok(None),
        }
    }
}

/// Runs `work`, which only reads: on the spot when all it wants is in memory, else where blocking is
/// allowed.
pub(crate) async fn looking<T: Send + 'static>(
    store: &Arc<Store>,
    work: impl Fn(&Arc<Store>) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match glance(|| work(store)) {
        Err(error) if error.would_block() => blocking(store, work).await,
        seen => seen,
    }
}

/// Runs `work`, which blocks, where blocking is allowed. Dropping the future does not stop it.
pub(crate) async fn blocking<T: Send + 'static>(
    store: &Arc<Store>,
    work: impl FnOnce(&Arc<Store>) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let store = Arc::clone(store);
    // What it logs belongs to the request.
    let (span, carried) = (Span::current(), trace::carried());
    let work = move || {
        let _request = carried.go_on();
        span.in_scope(|| work(&store))
    };
    let outcome = tokio::task::spawn_blocking(work).await;
    outcome.unwrap_or_else(|error| Err(StoreError::during("work")(io::Error::other(error))))
}
