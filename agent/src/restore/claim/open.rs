//! The claims that have not come to their end: one whose kybernate-runc was killed makes room for the
//! next attempt.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::process::Known;

/// How long the end of an earlier claim for the same container may take. kybernate-runc waits for both
/// (`CLAIM_LIMIT`).
const END_LIMIT: Duration = Duration::from_secs(20);

/// containerd's namespace and id of the new container.
pub(super) type Key = (String, String);

/// The claims whose containers are busy.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    // Held for a look-up only.
    all: Mutex<BTreeMap<Key, Open>>,
}

#[derive(Debug)]
struct Open {
    /// The operation's id.
    operation: String,
    /// Takes how the restore went, once.
    settled: Option<oneshot::Sender<String>>,
    /// Cancelled when all that was prepared for it is gone.
    ended: CancellationToken,
    owner: Owner,
    /// Cancelled when what the pod was given is gone, where its container may start afresh then.
    cleared: Option<CancellationToken>,
}

/// Who makes a claim.
#[derive(Debug)]
pub(super) struct Owner {
    /// Of the pod's container, whatever its id is this time.
    pub(super) note: PathBuf,
    /// The kybernate-runc, where it is known.
    pub(super) caller: Option<Known>,
}

/// A claim that has been told how its restore went.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) operation: String,
    /// What to wait for when it failed and the container may start afresh.
    pub(super) cleared: Option<CancellationToken>,
    /// Nothing is cleared after this.
    pub(super) ended: CancellationToken,
}

/// A claim that is among the open ones for as long as this lives.
#[derive(Debug)]
pub(super) struct Opened<'a> {
    claims: &'a Claims,
    key: Key,
}

impl Claims {
    fn all(&self) -> MutexGuard<'_, BTreeMap<Key, Open>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens one, and returns how its restore went when somebody says so. It must be dropped before
    /// `ended` is cancelled.
    pub(super) fn open(
        &self,
        key: Key,
        operation: &str,
        owner: Owner,
        (ended, cleared): (CancellationToken, Option<CancellationToken>),
    ) -> (Opened<'_>, oneshot::Receiver<String>) {
        let (sender, settled) = oneshot::channel();
        let operation = operation.to_owned();
        let open = Open { operation, settled: Some(sender), ended, owner, cleared };
        self.all().insert(key.clone(), open);
        (Opened { claims: self, key }, settled)
    }

    /// Says how a restore went, to the operation that waits to hear that, if one does.
    pub(super) fn settle(&self, key: &Key, problem: String) -> Option<Settled> {
        let mut all = self.all();
        let open = all.get_mut(key)?;
        open.settled.take()?.send(problem).ok()?;
        Some(Settled {
            operation: open.operation.clone(),
            cleared: open.cleared.clone(),
            ended: open.ended.clone(),
        })
    }

    /// Has an earlier claim for the same container come to its end: whoever made it was killed before it
    /// could settle, and has been cleaned up after by who asks now.
    pub(super) async fn supersede(&self, key: &Key) {
        self.replace(|of, _open| of == key).await;
    }

    /// Does the same for a container that is created once more under another id. While the earlier
    /// kybernate-runc is there, only what `moves` makes room: it starts nothing afresh.
    pub(super) async fn supersede_pods(&self, note: &Path, moves: bool) {
        let is_over = |open: &Open| moves || !open.owner.caller.is_some_and(Known::is_there);
        self.replace(|_key, open| open.owner.note == note && is_over(open)).await;
    }

    async fn replace(&self, is_it: impl Fn(&Key, &Open) -> bool) {
        let found = {
            let mut all = self.all();
            let found = all.iter_mut().find(|(key, open)| is_it(key, open));
            // Nobody says any more how it went: what was noted decides.
            found.map(|(key, open)| (key.1.clone(), drop(open.settled.take()), open.ended.clone()))
        };
        let Some((container, (), ended)) = found else { return };
        if tokio::time::timeout(END_LIMIT, ended.cancelled()).await.is_err() {
            tracing::warn!(container, "an earlier claim does not end");
        }
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.claims.all().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn key(container: &str) -> Key {
        ("k8s.io".to_owned(), container.to_owned())
    }

    fn owner(caller: Option<Known>) -> Owner {
        Owner { note: "/note".into(), caller }
    }

    #[tokio::test]
    async fn a_claim_is_settled_once_and_open_until_its_end() {
        let (claims, ended) = (Claims::default(), CancellationToken::new());
        assert!(claims.settle(&key("main"), String::new()).is_none(), "there is none");
        let cleared = CancellationToken::new();
        let with = (ended.clone(), Some(cleared.clone()));
        let (open, settled) = claims.open(key("main"), "7", owner(None), with);
        let told = claims.settle(&key("main"), "why".to_owned()).unwrap();
        assert_eq!(told.operation, "7");
        assert!(claims.settle(&key("main"), "again".to_owned()).is_none());
        assert_eq!(settled.await.unwrap(), "why");
        // What it has left is taken away now: who starts afresh waits for that, and the next one for all.
        cleared.cancel();
        told.cleared.unwrap().cancelled().await;
        drop(open);
        ended.cancel();
        claims.supersede(&key("main")).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_attempt_waits_for_the_end_of_the_one_before() {
        type Next = fn(Arc<Claims>) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
        let nexts: [Next; 2] = [
            |claims| Box::pin(async move { claims.supersede(&key("main")).await }),
            |claims| {
                Box::pin(async move { claims.supersede_pods(Path::new("/note"), false).await })
            },
        ];
        for next in nexts {
            for settles in [true, false] {
                let (claims, ended) = (Arc::new(Claims::default()), CancellationToken::new());
                let with = (ended.clone(), None);
                let (open, settled) = claims.open(key("main"), "7", owner(None), with);
                if settles {
                    claims.settle(&key("main"), "failed".to_owned()).unwrap();
                }
                let mut next = next(Arc::clone(&claims));
                let early = tokio::time::timeout(END_LIMIT / 2, &mut next).await;
                assert!(early.is_err(), "it did not wait");
                assert_eq!(settled.await.ok().as_deref(), settles.then_some("failed"));
                drop(open);
                ended.cancel();
                next.await;
            }
        }
    }

    #[tokio::test]
    async fn who_restores_it_still_is_not_in_the_way_of_its_own() {
        let claims = Claims::default();
        let with = (CancellationToken::new(), None);
        let us = Known::of(std::process::id());
        let (_open, mut settled) = claims.open(key("main"), "7", owner(us), with);
        claims.supersede_pods(Path::new("/note"), false).await;
        settled.try_recv().unwrap_err();
    }
}
