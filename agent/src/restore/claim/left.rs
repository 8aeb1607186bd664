//! A claim whose agent has ended: kybernate-runc may go on without it, and notes when the container
//! runs. The next agent waits for that, and does what the first one would have done then.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kybernate_spec::chain;

use super::{ClaimError, GRACE, given, taken};
use crate::app::App;
use crate::operations::{Conclusion, Driver, Made, Record, Sizes};
use crate::orphan;
use crate::patience::Patience;
use crate::restore::bring::is_temporary;

/// How often it is looked whether it is still at it.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often in a row nobody is seen to create the container before nobody does: who has just ended may
/// have said how it went, or containerd does not know yet that it runs.
pub(super) const ALONE_LOOKS: u32 = 5;

/// Waits until nobody works on what was claimed, and returns how the restore went when it succeeded:
/// then what its container needs is kept. Else what the pod's directories were given is taken away for the next
/// one, unless a container has begun with it or runs beside it.
pub(crate) async fn finish(app: &Arc<App>, driver: &Driver, record: &Record) -> Option<Conclusion> {
    let finished = finish_claimed(app, driver, record).await;
    if finished.is_none() {
        taken::let_go_again(app, driver, record).await;
    }
    finished
}

async fn finish_claimed(app: &Arc<App>, driver: &Driver, record: &Record) -> Option<Conclusion> {
    let claimed = record.made.iter().find_map(|made| match made {
        Made::Claimed { note } => Some(note.clone()),
        _ => None,
    });
    let note = claimed?;
    let mut looks = Patience::new(app.config.pods.restore_limit + GRACE, LOOK_EVERY);
    let mut alone = 0;
    while alone < ALONE_LOOKS && looks.once_more().await {
        alone = if is_created(record).await { 0 } else { alone + 1 };
        if driver.is_cancelled() {
            orphan::end_restore(&record.namespace, &record.container).await;
        }
    }
    if super::is_noted(note.clone(), driver.id()).await {
        let conclusion = Conclusion::done(Sizes::default());
        let kept = driver.update(|record| record.keep(is_temporary, &conclusion)).await;
        if let Err(error) = kept {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
        return Some(conclusion);
    }
    if let Err(error) = empty(app, driver, record, &note).await {
        let error = chain(&error).to_string();
        tracing::warn!(container = record.container, error, "what its pod was given stays");
    }
    None
}

/// Whether somebody is creating the container.
async fn is_created(record: &Record) -> bool {
    let (namespace, id) = (record.namespace.clone(), record.container.clone());
    let looked = tokio::task::spawn_blocking(move || orphan::is_created(&namespace, &id)).await;
    looked.ok().and_then(Result::ok).unwrap_or(false)
}

/// Takes away what no container has begun with, where none runs that has it.
async fn empty(
    app: &Arc<App>,
    driver: &Driver,
    record: &Record,
    note: &Path,
) -> Result<(), ClaimError> {
    let of = (&*record.namespace, note, driver.id());
    let left = match taken::reserve_moved(app, record, note) {
        Ok(_alone) => given::take_back_of(app, of).await?,
        // Another try is under way, which begins with that.
        Err(_busy) => return Ok(()),
    };
    if !left.is_empty() {
        let container = &record.container;
        tracing::warn!(container, ?left, "what its pod was given stays: it is in use");
    }
    Ok(())
}
