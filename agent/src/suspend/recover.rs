//! What an earlier agent suspended, or was about to.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::finish::Effort;
use super::ledger::Phase;
use super::{Found, SuspendError, Suspended, Wanted, conclude, find, hold, let_run, put_back};
use crate::app::App;
use crate::operations::{Conclusion, Driver, Kind, OperationsError, Record, Sizes, Suspension};

/// How long a new agent waits for a GPU's driver before it serves.
const GPU_LIMIT: Duration = Duration::from_secs(30);

/// How long a new agent finishes what an earlier one had begun before it serves.
const FINISH_LIMIT: Duration = Duration::from_secs(10);

/// Why what was asked for is not done.
const BEFORE_SUSPENDED: &str = "the agent ended before the container was suspended";
const BEFORE_RESUMED: &str = "the agent ended before the container was resumed";

/// An operation of an earlier agent.
type Begun = (Record, Driver);

/// Looks at what an earlier agent suspended, and forgets what is not paused any more. What it had
/// begun is brought to its end, with its operation; what takes longer, in the background.
pub(crate) async fn recover(app: &Arc<App>) {
    let begun = app.operations.interrupted(|record| record.kind.is_in_place());
    let wanted = |record: &Record| Wanted {
        container: record.container.clone(),
        namespace: record.namespace.clone(),
    };
    let mut operations: BTreeMap<Wanted, Vec<Begun>> = BTreeMap::new();
    for one in begun {
        operations.entry(wanted(&one.0)).or_default().push(one);
    }
    let finished = TaskTracker::new();
    for known in app.suspended.all() {
        if known.phase != Phase::Suspended {
            // The last one: others before it had ended, but for telling so.
            let operation = operations.get_mut(&known.wanted()).and_then(Vec::pop);
            go_on(app, known, operation, finished.token());
            continue;
        }
        recover_one(app, known).await;
    }
    for (whom, begun) in operations {
        let known = app.suspended.get(&whom);
        for (record, driver) in begun {
            driver.close(Some(as_it_is(&record, &driver, known.as_ref()))).await;
        }
    }
    finished.close();
    if tokio::time::timeout(FINISH_LIMIT, finished.wait()).await.is_err() {
        tracing::warn!("what an earlier agent had begun is finished in the background");
    }
}

/// Ends an operation of which nothing is under way: what is written down says whether it was done.
fn as_it_is(record: &Record, driver: &Driver, known: Option<&Suspended>) -> Conclusion {
    let is_done = (record.kind == Kind::Suspend) == known.is_some();
    if is_done {
        driver.note(|record| record.suspension = Some(Suspension::of(known, false)));
        return Conclusion::done(Sizes::default());
    }
    let why = if record.kind == Kind::Suspend { BEFORE_SUSPENDED } else { BEFORE_RESUMED };
    driver.ends(Conclusion::failed(why.to_owned(), None))
}

/// Goes on with what was begun until it is done, or the agent ends. `until` is dropped then.
fn go_on(app: &Arc<App>, known: Suspended, operation: Option<Begun>, until: impl Send + 'static) {
    tracing::warn!(
        container = known.container,
        phase = ?known.phase,
        "an earlier agent ended in the middle of this"
    );
    let busy = app.reserve(&known.namespace, &known.container).ok();
    let work = Arc::clone(app);
    app.tasks.spawn(move |ends| async move {
        let began = match operation {
            Some((record, driver)) => {
                let is_cancelled = record.cancelled.is_some();
                Some((record.kind, is_cancelled, driver))
            }
            // An agent that kept no operations of this kind.
            None => begin(&work, &known).await,
        };
        let Some((kind, is_cancelled, driver)) = began else { return };
        let conclusion =
            if kind == Kind::Suspend && (is_cancelled || known.phase == Phase::Resuming) {
                go_back(&work, &driver, &known, &ends).await
            } else {
                driver.bounded(go_ahead(&work, &driver, known, &ends)).await
            };
        drop(busy);
        driver.close(conclusion).await;
        drop(until);
    });
}

/// Begins an operation for what is written down.
async fn begin(app: &App, known: &Suspended) -> Option<(Kind, bool, Driver)> {
    let kind = match known.phase {
        Phase::Suspending | Phase::Suspended => Kind::Suspend,
        Phase::Resuming => Kind::Resume,
    };
    let begun = app.operations.begin(known.wanted().subject(kind)).await;
    // It stays written down: a resume sees to it.
    let told = |error: &OperationsError| {
        tracing::error!(error = %chain(error), container = known.container, "not gone on with");
    };
    Some((kind, false, begun.inspect_err(told).ok()?))
}

/// Brings what was begun to its end.
async fn go_ahead(
    app: &App,
    driver: &Driver,
    known: Suspended,
    ends: &CancellationToken,
) -> Option<Conclusion> {
    let effort = Effort::later(driver, ends);
    let done = match known.phase {
        Phase::Suspending | Phase::Suspended => hold(app, driver, known, effort).await,
        Phase::Resuming => {
            let ran = let_run(app, &known, effort).await;
            ran.map(|()| Suspension::of(Some(&known), false))
        }
    };
    conclude(driver, done)
}

/// Lets a container run whose suspension was cancelled, or given up.
async fn go_back(
    app: &App,
    driver: &Driver,
    known: &Suspended,
    ends: &CancellationToken,
) -> Option<Conclusion> {
    match put_back(app, driver, known, ends).await {
        Ok(()) => Some(driver.ends(Conclusion::failed(BEFORE_SUSPENDED.to_owned(), None))),
        Err(error) => conclude(driver, Err(error)),
    }
}

async fn recover_one(app: &App, known: Suspended) {
    let wanted = known.wanted();
    let namespace = app.containerd.namespace(&wanted.namespace);
    let kept = match find(app, &namespace, &wanted).await {
        Ok(Found::Suspended(_)) => {
            tracing::info!(container = wanted.container, "still suspended");
            return;
        }
        Ok(Found::Runs { .. }) => {
            let back = app.gpus.bring_back(&known.gpu);
            match tokio::time::timeout(GPU_LIMIT, back).await {
                Ok(Ok(())) => app.suspended.forget(&wanted).await,
                // It stays written down, for a resume to try again.
                tried => {
                    let container = &wanted.container;
                    tracing::error!(?tried, container, "its GPU memory is still away");
                    return;
                }
            }
        }
        Ok(Found::Paused | Found::Other(_)) => app.suspended.forget(&wanted).await,
        Err(SuspendError::Runtime(error)) if error.is_not_found() => {
            app.suspended.forget(&wanted).await
        }
        // Asked again when somebody wants something of it.
        Err(error) => {
            tracing::warn!(error = %chain(&error), container = wanted.container, "not known");
            return;
        }
    };
    if let Err(error) = kept {
        tracing::error!(error = %chain(&error), "failed to forget a suspension");
    }
}
