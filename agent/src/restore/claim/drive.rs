//! One claim from its beginning to its end: it is prepared, whoever asked is answered, and how the
//! restore goes is waited for.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kybernate_packager::agent_api as api;
use kybernate_spec::chain;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::left::{ALONE_LOOKS, LOOK_EVERY};
use super::{Claim, ClaimError, Driven, GRACE, Prepared, fill, given, is_noted, prepare, taken};
use crate::operations::{Cancelled, Conclusion, Made, Record, State, Stopped};
use crate::patience::Patience;
use crate::process::{self, Known};
use crate::restore::bring::is_temporary;
use crate::undo::{Undoing, undo};
use crate::{orphan, room, stage};

/// Why a restore is not cancelled any more.
const COMMITTED: &str = "the container runs: end it instead";

/// How long a runc may take to end whose kybernate-runc was killed. The next attempt waits for it.
const ORPHANS_LIMIT: Duration = Duration::from_secs(10);

/// Takes the answer to a claim.
type Answer = oneshot::Sender<Result<api::ClaimResponse, ClaimError>>;

/// Prepares, answers, and waits for the end.
pub(super) async fn drive(
    driven: Driven<'_>,
    (mut answer, settled): (Answer, oneshot::Receiver<String>),
    (cleared, cancel): (CancellationToken, &CancellationToken),
) -> Option<Conclusion> {
    let Driven { app, driver, claim, .. } = driven;
    let is_clear;
    let stopped = driver.stopped(cancel.clone());
    let prepared = until_given_up(stopped, &mut answer, |wanted| prepare(driven, wanted)).await;
    let conclusion = match prepared {
        Err(error) => {
            let told = room::explained(app, &claim.namespace, &error).await;
            let conclusion = driver.ends(Conclusion::failed(told, error.refused_by()));
            is_clear = !matches!(error, ClaimError::Left(_));
            if is_clear {
                given::is_gone(driven.pod.note(), driver.id()).await;
            }
            // It may start afresh now: the directories of its pod are as they were, or it is told.
            forget_given(driven, is_clear).await;
            // Whoever asked may have gone.
            drop(answer.send(Err(error)));
            conclusion
        }
        Ok(prepared) => {
            let limit = app.config.pods.restore_limit + GRACE;
            let work = PathBuf::from(&prepared.answer.work);
            let told = answer.send(Ok(prepared.answer.clone())).is_ok();
            let problem = tokio::select! {
                problem = said(told, settled, limit) => problem,
                () = cancel.cancelled() => return None,
                // Whoever would say it is dead.
                () = end_when_cancelled(driven, work.clone(), limit) => None,
            };
            if problem.is_none() && driven.claimant.is_none() {
                // A runc that whoever was killed has left would use what is taken away now.
                let looks = Patience::new(ORPHANS_LIMIT, LOOK_EVERY);
                until_alone(looks, true, || look(claim, work.clone())).await;
            }
            let conclusion;
            (conclusion, is_clear) = conclude(prepared, driver.id(), problem).await;
            if is_clear && conclusion.state != State::Done {
                given::is_gone(driven.pod.note(), driver.id()).await;
            }
            if conclusion.state == State::Done {
                // Whoever was quicker has come too late all the same.
                driver.commit(COMMITTED).unwrap_or_else(|Cancelled| {
                    tracing::info!(
                        operation.id = driver.id(),
                        "it runs: it was cancelled too late"
                    );
                });
            }
            driver.ends(conclusion)
        }
    };
    if conclusion.state == State::Done {
        let kept = driver.update(|record| record.keep(is_temporary, &conclusion)).await;
        if let Err(error) = kept {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
    } else if driven.claimant.is_none() {
        forget_given(driven, is_clear).await;
        // What is left to undo is the agent's own, and containerd may have to come back first.
        if is_clear {
            cleared.cancel();
        }
    } else {
        // It never starts afresh, and CRIU's options stay until nothing can start it any more.
        taken::let_go(driven).await;
    }
    let Claim { namespace, container, .. } = claim;
    let undoing = Undoing { namespace, container, conclusion: &conclusion };
    undo(app, driver, undoing, cancel).await.then_some(conclusion)
}

/// Removes what CRIU was to be told: who starts afresh writes there what it is told of that container.
/// Where the pod's directories `are_clear`, the next agent has nothing to take away there.
async fn forget_given(Driven { driver, .. }: Driven<'_>, are_clear: bool) {
    let mut given = driver.made().into_iter().filter_map(|made| match made {
        Made::Volume(directory) => Some(directory),
        _ => None,
    });
    let Some(directory) = given.next() else { return };
    let removed = tokio::task::spawn_blocking(move || stage::remove(&directory)).await;
    let removed = removed.map_err(io::Error::other).and_then(|removed| removed);
    let forget = |record: &mut Record| {
        record.made.retain(|made| match made {
            Made::Volume(_) => false,
            Made::Claimed { .. } => !are_clear,
            _ => true,
        });
    };
    // Where either fails, all of it goes at the end.
    let forgotten = match removed {
        Ok(()) => driver.update(forget).await.map_err(|error| chain(&error).to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = forgotten {
        tracing::warn!(operation.id = driver.id(), error, "CRIU's options stay until the end");
    }
}

/// Waits until the operation is cancelled, and ends the runc that restores, for as long as kybernate-runc
/// may start one: that notices it, and takes away what there is by then. Returns when nobody is there who
/// could, and no CRIU is at `work`.
async fn end_when_cancelled(driven: Driven<'_>, work: PathBuf, limit: Duration) {
    let Driven { driver, claim, .. } = driven;
    driver.cancelled().await;
    let looks = Patience::new(limit, LOOK_EVERY);
    until_alone(looks, claim.caller.is_some(), || look(claim, work.clone())).await;
}

/// Ends the runc that restores, when there is one, and returns who was there.
async fn look(claim: &Claim, work: PathBuf) -> Option<Look> {
    let (namespace, id, caller) = (claim.namespace.clone(), claim.container.clone(), claim.caller);
    let looked = tokio::task::spawn_blocking(move || {
        let creates = caller.is_some_and(Known::is_there) || orphan::is_created(&namespace, &id)?;
        Ok::<_, io::Error>(Look { creates, writes: process::writer(&work).is_some() })
    });
    let looked = looked.await.ok().and_then(Result::ok);
    orphan::end_restore(&claim.namespace, &claim.container).await;
    looked
}

/// What one look found.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Somebody creates the container.
    creates: bool,
    /// A CRIU restores it.
    writes: bool,
}

/// Looks until nobody is there any more. Where it is not `known` who was there, and nobody was seen, that
/// one has another name, and is waited for.
async fn until_alone<F>(mut looks: Patience, mut known: bool, mut look: impl FnMut() -> F)
where
    F: Future<Output = Option<Look>>,
{
    let mut alone = 0;
    while (!known || alone < ALONE_LOOKS) && looks.once_more().await {
        let Look { creates, writes } = look().await.unwrap_or(Look { creates: true, writes: true });
        known |= creates;
        alone = if creates || writes { 0 } else { alone + 1 };
    }
}

/// Prepares until nobody waits for the `answer`, or it is `stopped`: then it is told so, and ends by
/// itself, since what it has put into the pod has to go.
async fn until_given_up<T, F>(
    stopped: impl Future<Output = Stopped>,
    answer: &mut Answer,
    prepare: impl FnOnce(CancellationToken) -> F,
) -> Result<T, ClaimError>
where
    F: Future<Output = Result<T, ClaimError>>,
{
    let wanted = CancellationToken::new();
    let mut prepared = Box::pin(prepare(wanted.clone()));
    let reason = tokio::select! {
        prepared = &mut prepared => return prepared,
        stopped = stopped => stopped.into(),
        () = answer.closed() => ClaimError::GivenUp,
    };
    wanted.cancel();
    match prepared.await {
        Err(error) if !matches!(error, ClaimError::Left(_)) => Err(reason),
        prepared => prepared,
    }
}

/// Waits for what kybernate-runc says of the restore. When it had gone before it was `told` of the
/// dump, it restores nothing and says nothing.
async fn said(told: bool, settled: oneshot::Receiver<String>, limit: Duration) -> Option<String> {
    if !told {
        return None;
    }
    tokio::time::timeout(limit, settled).await.ok()?.ok()
}

/// Decides how it ended: `problem` is what kybernate-runc said, nothing when it was killed. Returns also
/// whether the pod's directories are as they were, when it failed.
async fn conclude(
    prepared: Prepared,
    operation: &str,
    problem: Option<String>,
) -> (Conclusion, bool) {
    let noted = is_noted(prepared.note, operation).await;
    let problem = match problem {
        Some(problem) if problem.is_empty() => None,
        None if noted => None,
        Some(problem) => Some(problem),
        None => Some("kybernate-runc did not say how the restore went".to_owned()),
    };
    let Some(problem) = problem else {
        return (Conclusion::done(prepared.sizes), true);
    };
    let is_clear = fill::empty_again(prepared.filled).await;
    (Conclusion::failed(problem, None), is_clear)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::io;
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn what_nobody_waits_for_ends_by_itself() {
        // What is begun is undone before the claim ends, and the reason is said.
        let undone = Mutex::new(0);
        let prepare = |wanted: CancellationToken| async {
            wanted.cancelled_owned().await;
            *undone.lock().unwrap() += 1;
            Err::<(), _>(ClaimError::Place(io::Error::other("cut short")))
        };
        let (mut answer, answered) = oneshot::channel();
        drop(answered);
        let ended = until_given_up(pending(), &mut answer, prepare).await.unwrap_err();
        assert!(matches!(ended, ClaimError::GivenUp), "{ended}");
        for stopped in [Stopped::AgentEnds, Cancelled.into()] {
            let (mut answer, _answered) = oneshot::channel();
            let stopped_now = std::future::ready(stopped);
            let ended = until_given_up(stopped_now, &mut answer, prepare).await.unwrap_err();
            assert!(matches!(ended, ClaimError::Stopped(why) if why == stopped), "{ended}");
        }
        assert_eq!(*undone.lock().unwrap(), 3);
        let (mut answer, _answered) = oneshot::channel();
        // While somebody waits it goes on to its end, and says itself why it failed.
        let done = until_given_up(pending(), &mut answer, |_| async { Ok(7) }).await;
        assert_eq!(done.unwrap(), 7);
        let prepare = |_| async { Err::<(), _>(ClaimError::Place(io::Error::other("full"))) };
        let failed = until_given_up(pending(), &mut answer, prepare).await.unwrap_err();
        assert!(matches!(failed, ClaimError::Place(_)), "{failed}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_restore_ends_when_nobody_is_left_who_could() {
        const LIMIT: Duration = Duration::from_mins(1);
        let (nobody, creates, writes) = (
            Look { creates: false, writes: false },
            Look { creates: true, writes: false },
            Look { creates: false, writes: true },
        );
        let looks_at = async |known: bool, found: &[Option<Look>]| {
            let mut count = 0;
            until_alone(Patience::new(LIMIT, LOOK_EVERY), known, || {
                count += 1;
                std::future::ready(found.get(count - 1).copied().unwrap_or(Some(nobody)))
            })
            .await;
            count
        };
        let alone = usize::try_from(ALONE_LOOKS).unwrap();
        // Whoever has just ended may have been quick, or dead before the first look.
        assert_eq!(looks_at(true, &[]).await, alone);
        assert_eq!(looks_at(false, &[Some(creates)]).await, 1 + alone);
        // The next one to create it, a CRIU, and a look that found nothing out begin it anew.
        let found = [creates, nobody, nobody, creates, writes].map(Some);
        assert_eq!(looks_at(true, &found).await, found.len() + alone);
        assert_eq!(looks_at(true, &[Some(nobody), None]).await, 2 + alone);
        // Under a name that nobody knows it may be there all the time.
        let all = looks_at(false, &[]).await;
        let most = usize::try_from(LIMIT.as_millis() / LOOK_EVERY.as_millis()).unwrap();
        assert!((most..=most + 2).contains(&all), "{all}");
    }

    #[tokio::test]
    async fn who_was_not_told_is_not_waited_for() {
        let (sender, settled) = oneshot::channel();
        let waited = tokio::time::timeout(Duration::ZERO, said(false, settled, GRACE)).await;
        assert_eq!(waited, Ok(None));
        drop(sender);

        let (sender, settled) = oneshot::channel();
        sender.send("CRIU failed".to_owned()).unwrap();
        assert_eq!(said(true, settled, GRACE).await, Some("CRIU failed".to_owned()));

        let (_unsettled, settled) = oneshot::channel();
        assert_eq!(said(true, settled, Duration::ZERO).await, None);
    }
}
