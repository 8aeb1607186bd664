//! A checkpoint that moves, and who has it: a pod that says so takes it in its registry, so that no other
//! pod gets it, on whatever node (`spec/decisions/0064`).

use std::io;
use std::path::Path;
use std::sync::Arc;

use kybernate_packager::claim::{Claimant, claim, release};
use kybernate_packager::store::{ConnectOptions, Store};
use kybernate_spec::{Location, chain};

use super::left::LOOK_EVERY;
use super::{ACCEPT_LIMIT, Admitted, ClaimError, Driven, GRACE};
use crate::app::{App, Busy, Rejection};
use crate::operations::{Driver, Made, Record};
use crate::orphan;
use crate::patience::Patience;
use crate::restore::pod::Pod;

/// In place of containerd's namespace: what is reserved is a pod's container, by its note.
const PODS: &str = "pods:";

/// Makes sure that a pod's container is restored once at a time, under whatever id: a kubelet tries
/// again with another one, and an attempt that has failed may be about to let go of what both call
/// their own, or to empty the directories that both are given.
pub(super) async fn alone(app: &Arc<App>, pod: &Pod, moves: bool) -> Result<Busy, Rejection> {
    app.claims.supersede_pods(pod.note(), moves).await;
    let reserved = app.reserve(PODS, &pod.note().display().to_string());
    reserved.map_err(|rejection| match rejection {
        Rejection::Busy(_) => Rejection::Busy(pod.name().to_owned()),
        other => other,
    })
}

/// Does the same for what an earlier agent has left of a claim. What moves is let go of by who reserves it
/// then ([`let_go_again`]).
pub(crate) fn reserve_claimed(app: &Arc<App>, record: &Record) -> Option<Busy> {
    let moves = record.made.iter().any(|made| matches!(made, Made::Taken { .. }));
    let note = record.made.iter().find_map(|made| match made {
        Made::Claimed { note, .. } if !moves => Some(note),
        _ => None,
    });
    app.reserve(PODS, &note?.display().to_string()).ok()
}

/// Reserves for a moment what [`reserve_claimed`] leaves to others.
pub(super) fn reserve_moved(
    app: &Arc<App>,
    record: &Record,
    note: &Path,
) -> Result<Option<Busy>, Rejection> {
    if !record.made.iter().any(|made| matches!(made, Made::Taken { .. })) {
        return Ok(None);
    }
    app.reserve(PODS, &note.display().to_string()).map(Some)
}

/// Takes the checkpoint for a pod that wants nobody else to have it.
pub(super) async fn take(driven: Driven<'_>, admitted: &Admitted) -> Result<(), ClaimError> {
    let Some(claimant) = driven.claimant else { return Ok(()) };
    driven.driver.step("claim");
    let note = driven.pod.note().to_owned();
    driven.driver.will_make(Made::Taken { claimant: claimant.clone(), note }).await?;
    Ok(claim(&admitted.store, &admitted.checkpoint.stored.descriptor, claimant).await?)
}

/// Lets others have the checkpoint of a container that was not restored, now or before, unless an attempt
/// that an earlier agent has left may yet come to its end.
pub(super) async fn let_go(driven: Driven<'_>) {
    let Driven { app, driver, claim, pod, claimant } = driven;
    let Some(claimant) = claimant else { return };
    // Our own has said that it failed, and may start afresh just now.
    let mut others = app.operations.takers(pod.note());
    others.retain(|taker| *taker != claim.key());
    if settles(app, others, pod.note()).await {
        give_back(app, driver, &claim.location, claimant, pod.note()).await;
    } else {
        stays_taken(driver);
    }
}

/// The same for one that an earlier agent took. Whoever else restores the pod's container may come to
/// its end yet, and calls it its own: an attempt of ours, or one that a dead agent has left.
pub(super) async fn let_go_again(app: &Arc<App>, driver: &Driver, record: &Record) {
    let taken = record.made.iter().find_map(|made| match made {
        Made::Taken { claimant, note } => Some((claimant, note)),
        _ => None,
    });
    let Some((claimant, note)) = taken else { return };
    let Ok(_alone) = app.reserve(PODS, &note.display().to_string()) else {
        // It goes on with it, or lets go.
        return;
    };
    // Once: one that is closed meanwhile has left it to us.
    if !settles(app, app.operations.takers(note), note).await {
        return stays_taken(driver);
    }
    match record.reference.parse() {
        Ok(location) => give_back(app, driver, &location, claimant, note).await,
        Err(error) => tracing::warn!(operation.id = driver.id(), %error, "nobody's checkpoint"),
    }
}

fn stays_taken(driver: &Driver) {
    tracing::warn!(operation.id = driver.id(), "a checkpoint stays taken");
    let told = "the checkpoint stays taken by this pod: a restore that nobody ends may succeed";
    driver.note(|record| record.warnings.push(told.to_owned()));
}

/// Waits until a pod's container runs, or nothing that these have begun for it can come to run any more.
/// Returns whether it came to that.
async fn settles(app: &App, takers: Vec<(String, String)>, note: &Path) -> bool {
    let mut looks = Patience::new(app.config.pods.restore_limit + GRACE, LOOK_EVERY);
    while looks.once_more().await {
        let (takers, note) = (takers.clone(), note.to_owned());
        let looked = tokio::task::spawn_blocking(move || {
            let mut may_run = false;
            for (namespace, container) in takers {
                may_run |= orphan::may_run(&namespace, &container)?;
            }
            Ok::<_, io::Error>(!may_run || note.try_exists()?)
        });
        if looked.await.ok().and_then(Result::ok).unwrap_or(false) {
            return true;
        }
    }
    false
}

async fn give_back(
    app: &App,
    driver: &Driver,
    location: &Location,
    claimant: &Claimant,
    note: &Path,
) {
    let note = note.to_owned();
    let runs = tokio::task::spawn_blocking(move || note.try_exists()).await;
    // Where nobody can say, it may run.
    if runs.ok().and_then(Result::ok).unwrap_or(true) {
        return;
    }
    let connect = ConnectOptions { plain_http: app.config.is_plain_http(location), notes: None };
    let released = async {
        let store = Store::open(location, &connect).await?;
        let index = store.resolve(location).await?.descriptor;
        release(&store, &index, claimant).await
    };
    match tokio::time::timeout(ACCEPT_LIMIT, released).await {
        Ok(Ok(_)) => {}
        // It stays with this pod, which may try again.
        Ok(Err(error)) => {
            let error = chain(&error).to_string();
            tracing::warn!(operation.id = driver.id(), error, "a checkpoint stays taken");
            let told = format!("the checkpoint stays taken by this pod: {error}");
            driver.note(|record| record.warnings.push(told));
        }
        Err(_late) => tracing::warn!(operation.id = driver.id(), "a checkpoint stays taken"),
    }
}
