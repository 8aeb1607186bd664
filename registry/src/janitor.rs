//! What is done in the background while the registry serves: uploads end, garbage goes, content is
//! read again.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use crate::app::{AppState, blocking};
use crate::gc::{self, Scope};
use crate::scrub;
use crate::store::{Store, StoreError};

/// How often uploads and corrupt content past their life are swept.
const SWEEP_EVERY: Duration = Duration::from_mins(10);
/// A collection in the background rests three times as long as it works: a quarter of a core.
const REST: u32 = 3;
/// Longest rest between two steps of a collection.
const REST_MAX: Duration = Duration::from_secs(1);
/// How often it is looked whether a pass of scrubbing is due.
const SCRUB_LOOK_EVERY: Duration = Duration::from_mins(10);

/// Starts everything that is done in the background.
pub(crate) fn start(app: &AppState) {
    if let Err(error) = app.store.serve_gc(app.config.gc.settings()) {
        tracing::warn!(error = %chain(&error), "`gc` without a server will not know what is set here");
    }
    let sweeping = Arc::clone(app);
    app.tasks.spawn(|cancel| sweep(sweeping, cancel));
    if app.config.gc.enabled {
        let collecting = Arc::clone(app);
        app.tasks.spawn(|cancel| collect(collecting, cancel));
    }
    if app.config.scrub.enabled {
        let scrubbing = Arc::clone(app);
        app.tasks.spawn(|cancel| scrub(scrubbing, cancel));
    }
}

async fn sweep(app: AppState, cancel: CancellationToken) {
    let mut ticks = tokio::time::interval(SWEEP_EVERY);
    loop {
        tokio::select! {
            _tick = ticks.tick() => {}
            () = cancel.cancelled() => return,
        }
        if let Err(error) = app.uploads.expire(SystemTime::now()).await {
            tracing::error!(error = %chain(&error), "failed to sweep");
        }
    }
}

async fn collect(app: AppState, cancel: CancellationToken) {
    while wait(&cancel, app.config.gc.interval.0).await {
        let everything = app.config.gc.everything.0;
        let collected = stoppable(&app.store, &cancel, move |store, pace| {
            let now = SystemTime::now();
            let scope = if store.is_everything_due(now, everything)? {
                Scope::Everything
            } else {
                Scope::Noted
            };
            run(store, scope, now, pace)
        });
        match collected.await {
            Ok(summary) if summary.is_idle() => tracing::debug!(?summary, "no garbage"),
            Ok(summary) => tracing::info!(
                condemned = summary.condemned,
                revived = summary.revived,
                removed = summary.removed,
                removed_bytes = summary.removed_bytes,
                skipped = summary.skipped,
                duration_ms = summary.duration_ms,
                "collected garbage"
            ),
            Err(error) => {
                tracing::error!(error = %chain(&error), "failed to collect garbage");
            }
        }
    }
}

fn run(
    store: &Store,
    scope: Scope,
    now: SystemTime,
    pace: &Pace,
) -> Result<gc::Summary, StoreError> {
    let run = gc::Run {
        store,
        scope,
        dry_run: false,
        now,
        tell: &mut |_| {},
        pace: &mut |worked| pace.rest((worked * REST).min(REST_MAX)),
    };
    run.collect()
}

async fn scrub(app: AppState, cancel: CancellationToken) {
    let interval = app.config.scrub.interval.0;
    let rate = app.config.scrub.rate.0;
    while wait(&cancel, SCRUB_LOOK_EVERY.min(interval)).await {
        let scrubbed = stoppable(&app.store, &cancel, move |store, pace| {
            let now = scrub::seconds(SystemTime::now());
            let due = store.scrubbing(|pass| {
                Ok(!pass.done || now.saturating_sub(pass.began) >= interval.as_secs())
            })?;
            let run = scrub::Run {
                store,
                restart: false,
                rate: Some(rate),
                tell: &mut |_| {},
                rest: &mut |time| pace.rest(time),
            };
            due.then(|| run.scrub()).transpose()
        });
        match scrubbed.await {
            Ok(Some(pass)) if pass.done => tracing::info!(
                contents = pass.contents,
                bytes = pass.bytes,
                corrupt = pass.corrupt,
                repaired = pass.repaired,
                incomplete = pass.incomplete,
                unreadable = pass.unreadable,
                "read everything again"
            ),
            Ok(_) => {}
            Err(error) => tracing::error!(error = %chain(&error), "failed to scrub"),
        }
    }
}

/// Waits, and returns whether to go on.
async fn wait(cancel: &CancellationToken, time: Duration) -> bool {
    tokio::time::timeout(time, cancel.cancelled()).await.is_err()
}

/// Runs `work`, which blocks, and asks it to stop when `cancel` says so or the future is dropped.
pub(crate) async fn stoppable<T: Send + 'static>(
    store: &Arc<Store>,
    cancel: &CancellationToken,
    work: impl FnOnce(&Arc<Store>, &Pace) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let pace = Pace::default();
    let stop = Stop(pace.clone());
    let mut working = std::pin::pin!(blocking(store, move |store| work(store, &pace)));
    tokio::select! {
        outcome = working.as_mut() => outcome,
        () = cancel.cancelled() => {
            drop(stop);
            working.await
        }
    }
}

/// Rests on a thread that may block, until asked to stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace(Arc<(Mutex<bool>, Condvar)>);

impl Pace {
    /// Rests and returns whether to go on. Blocks.
    pub(crate) fn rest(&self, time: Duration) -> bool {
        let (stopped, changed) = &*self.0;
        let stopped = stopped.lock().unwrap_or_else(PoisonError::into_inner);
        if *stopped || time.is_zero() {
            return !*stopped;
        }
        let waited = changed.wait_timeout_while(stopped, time, |stopped| !*stopped);
        let (stopped, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !*stopped
    }
}

/// Asks to stop when it is dropped.
#[derive(Debug)]
struct Stop(Pace);

impl Drop for Stop {
    fn drop(&mut self) {
        let (stopped, changed) = &*self.0.0;
        *stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }
}
