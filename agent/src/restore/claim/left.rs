//! A claim whose agent has ended: kybernate-runc may go on without it, and notes when the container
//! runs. The next agent waits for that, and does what the first one would have done then.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kybernate_spec::chain;

use super::{GRACE, fill, taken, uses};
use crate::app::App;
use crate::operations::{Conclusion, Driver, Made, Record, Sizes};
use crate::orphan;
use crate::patience::Patience;
use crate::restore::bring::is_temporary;
use crate::restore::noted::Note;
use crate::restore::pod::took_back;

/// How often it is looked whether it is still at it.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often in a row nobody is seen to create the container before nobody does: who has just ended may
/// have said how it went, or containerd does not know yet that it runs.
pub(super) const ALONE_LOOKS: u32 = 5;

/// Waits until nobody works on what was claimed, and returns how the restore went when it succeeded:
/// then what its container needs is kept. Else the pod's directories are emptied for the next one,
/// unless a container runs that has them, started afresh or beside it.
pub(crate) async fn finish(app: &Arc<App>, driver: &Driver, record: &Record) -> Option<Conclusion> {
    let finished = finish_claimed(app, driver, record).await;
    if finished.is_none() {
        taken::let_go_again(app, driver, record).await;
    }
    finished
}

async fn finish_claimed(app: &App, driver: &Driver, record: &Record) -> Option<Conclusion> {
    let claimed = record.made.iter().find_map(|made| match made {
        Made::Claimed { note, filled } => Some((note.clone(), filled.clone())),
        _ => None,
    });
    let (note, filled) = claimed?;
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
    if empty(app, record, filled).await {
        took_back(Note { file: note, operation: driver.id().to_owned() }.of_given()).await;
    }
    None
}

/// Whether somebody is creating the container.
async fn is_created(record: &Record) -> bool {
    let (namespace, id) = (record.namespace.clone(), record.container.clone());
    let looked = tokio::task::spawn_blocking(move || orphan::is_created(&namespace, &id)).await;
    looked.ok().and_then(Result::ok).unwrap_or(false)
}

/// Returns whether nothing is there any more.
async fn empty(app: &App, record: &Record, filled: Vec<PathBuf>) -> bool {
    if filled.is_empty() {
        return true;
    }
    match uses::are_used(app, &record.namespace, &filled, None).await {
        Ok(false) => fill::empty_all(filled).await,
        used => {
            let container = &record.container;
            tracing::warn!(?used, container, "what its pod was given stays: it may be in use");
            false
        }
    }
}
