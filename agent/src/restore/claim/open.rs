//! The claims that have not come to their end: one whose kybernate-runc was killed makes room for the
//! next attempt.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

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
    /// Of the pod's container, whatever its id is this time.
    note: PathBuf,
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
        note: PathBuf,
        ended: CancellationToken,
    ) -> (Opened<'_>, oneshot::Receiver<String>) {
        let (sender, settled) = oneshot::channel();
        let operation = operation.to_owned();
        self.all().insert(key.clone(), Open { operation, settled: Some(sender), ended, note });
        (Opened { claims: self, key }, settled)
    }

    /// Says how a restore went. Returns the operation that waited to hear that, if one did.
    pub(super) fn settle(&self, key: &Key, problem: String) -> Option<String> {
        let mut all = self.all();
        let open = all.get_mut(key)?;
        open.settled.take()?.send(problem).ok()?;
        Some(open.operation.clone())
    }

    /// Has an earlier claim for the same container come to its end: whoever made it was killed before it
    /// could settle, and has been cleaned up after by who asks now.
    pub(super) async fn supersede(&self, key: &Key) {
        self.replace(|of, _note| of == key).await;
    }

    /// Does the same for a container that is created once more under another id.
    pub(super) async fn supersede_pods(&self, note: &Path) {
        self.replace(|_key, of| of == note).await;
    }

    async fn replace(&self, is_it: impl Fn(&Key, &Path) -> bool) {
        let found = {
            let mut all = self.all();
            let found = all.iter_mut().find(|(key, open)| is_it(key, &open.note));
            found.map(|(key, open)| (key.1.clone(), open.settled.take(), open.ended.clone()))
        };
        let Some((container, settled, ended)) = found else { return };
        // It may have settled just now.
        drop(settled.map(|settled| settled.send("kybernate-runc was killed".to_owned())));
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

    #[tokio::test]
    async fn a_claim_is_settled_once_and_open_until_its_end() {
        let (claims, ended) = (Claims::default(), CancellationToken::new());
        assert_eq!(claims.settle(&key("main"), String::new()), None, "there is none");
        let (open, settled) = claims.open(key("main"), "7", "/note".into(), ended.clone());
        assert_eq!(claims.settle(&key("main"), "why".to_owned()).as_deref(), Some("7"));
        assert_eq!(claims.settle(&key("main"), "again".to_owned()), None);
        assert_eq!(settled.await.unwrap(), "why");
        // What it has left is taken away now: the next one waits for that.
        drop(open);
        ended.cancel();
        claims.supersede(&key("main")).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_attempt_waits_for_the_end_of_the_one_before() {
        type Next = fn(Arc<Claims>) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
        let nexts: [Next; 2] = [
            |claims| Box::pin(async move { claims.supersede(&key("main")).await }),
            |claims| Box::pin(async move { claims.supersede_pods(Path::new("/note")).await }),
        ];
        for next in nexts {
            for settles in [true, false] {
                let (claims, ended) = (Arc::new(Claims::default()), CancellationToken::new());
                let (open, settled) = claims.open(key("main"), "7", "/note".into(), ended.clone());
                if settles {
                    claims.settle(&key("main"), "failed".to_owned()).unwrap();
                }
                let mut next = next(Arc::clone(&claims));
                let early = tokio::time::timeout(END_LIMIT / 2, &mut next).await;
                assert!(early.is_err(), "it did not wait");
                let told = if settles { "failed" } else { "kybernate-runc was killed" };
                assert_eq!(settled.await.unwrap(), told);
                drop(open);
                ended.cancel();
                next.await;
            }
        }
    }
}
