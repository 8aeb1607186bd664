//! Room for uploads where repositories have quotas.
//!
//! What was received counts until its upload has ended, and a client that went away ends nothing.
//! So that it does not keep everybody out for the life of an upload, one that was left alone for a
//! while is given up when a push to the same repository would not fit otherwise, the one left
//! longest first.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use kybernate_spec::{Digest, RepositoryName};

use super::{AsyncMutex, Held, Session, State, Uploads};
use crate::app::blocking;
use crate::quota::Allowance;
use crate::store::{StoreError, StoreErrorKind, UploadFile};

/// How long an upload is left alone before it may make place for another: one that has nothing is
/// given up then, one that has something is forgotten until somebody goes on with it.
const PLACE_IDLE: Duration = Duration::from_mins(1);

impl Uploads {
    /// Forgets uploads that were left alone, as a restart would: their files are read again when
    /// somebody goes on with them. So whoever begins very many keeps nobody else from beginning one.
    /// Returns whether there were any.
    pub(super) async fn put_to_sleep(&self) -> Result<bool, StoreError> {
        let all: Vec<_> =
            self.lock().iter().map(|(id, session)| (id.clone(), session.file.clone())).collect();
        let now = SystemTime::now();
        let idle = blocking(&self.store, move |_| {
            let idle = |file: &UploadFile| file.idle(now).is_some_and(|idle| idle >= PLACE_IDLE);
            Ok(all.into_iter().filter(|(_, file)| idle(file)).map(|(id, _)| id).collect::<Vec<_>>())
        });
        let idle = idle.await?;
        let mut sessions = self.lock();
        let before = sessions.len();
        for id in idle {
            // Whoever has a handle is about to go on with it; nobody gets one meanwhile.
            let alone = sessions.get(&id).is_some_and(|session| Arc::strong_count(session) == 1);
            let session = if alone { sessions.remove(&id) } else { None };
            let Some(Session { file, state, received, .. }) = session.and_then(Arc::into_inner)
            else {
                continue;
            };
            let held = Arc::into_inner(state).map(AsyncMutex::into_inner);
            if let Some(Held { allowance, .. }) = held {
                allowance.put_to_sleep(file, received.into_inner());
            }
        }
        Ok(sessions.len() < before)
    }

    /// Gives up the oldest upload that nothing was sent to, when it is old enough. Returns whether
    /// there was one.
    pub(super) async fn give_up_empty(&self) -> Result<bool, StoreError> {
        let now = SystemTime::now();
        let mut empty: Vec<_> = self
            .lock()
            .iter()
            .filter(|(_, session)| session.received.load(Ordering::Relaxed) == 0)
            .filter_map(|(id, session)| Some((id.age(now)?, id.clone(), Arc::clone(session))))
            .filter(|(age, ..)| *age >= PLACE_IDLE)
            .collect();
        empty.sort_by_key(|(age, ..)| Reverse(*age));
        let given_up = empty.into_iter().find_map(|(_, id, session)| {
            // Somebody sends to it now.
            let mut held = session.state.try_lock().ok()?;
            held.close();
            Some((id, session.file.clone()))
        });
        let Some((id, file)) = given_up else { return Ok(false) };
        self.lock().remove(&id);
        blocking(&self.store, move |_| {
            file.remove();
            Ok(true)
        })
        .await
    }

    /// Makes sure that an upload may have `bytes` in all, as [`Allowance::widen`] does.
    pub(super) async fn allow(
        &self,
        allowance: &mut Allowance,
        repository: &RepositoryName,
        known: Option<&Digest>,
        bytes: u64,
    ) -> Result<(), StoreError> {
        loop {
            let allowed = allowance.widen(&self.store, repository, known, bytes).await;
            if !is_full(&allowed) || !self.give_up_idle(repository).await? {
                return allowed;
            }
        }
    }

    /// Makes sure that `bytes` in all are allowed, as [`Allowance::cover`] does.
    pub(super) async fn cover(
        &self,
        allowance: &mut Allowance,
        repository: &RepositoryName,
        bytes: u64,
    ) -> Result<(), StoreError> {
        loop {
            let covered = allowance.cover(bytes).await;
            if !is_full(&covered) || !self.give_up_idle(repository).await? {
                return covered;
            }
        }
    }

    /// Gives up the upload of a repository that was left alone longest, when that is long enough.
    /// Returns whether there was one.
    async fn give_up_idle(&self, repository: &RepositoryName) -> Result<bool, StoreError> {
        let sessions: Vec<_> = self.lock().values().cloned().collect();
        let repository = repository.clone();
        let given_up = blocking(&self.store, move |store| {
            let (now, mark) = (SystemTime::now(), UploadFile::mark(&repository));
            let idle =
                |file: &UploadFile| file.idle(now).filter(|idle| *idle >= store.quotas().idle());
            let sessions = sessions.iter().filter(|session| session.file.has_mark(&mark));
            let of_sessions = sessions.filter_map(|session| {
                Some((idle(&session.file)?, session.file.clone(), Some(Arc::clone(session))))
            });
            let dormant = store.quotas().dormant(&repository);
            let dormant = dormant.into_iter().filter_map(|file| Some((idle(&file)?, file, None)));
            let mut all: Vec<_> = of_sessions.chain(dormant).collect();
            all.sort_by_key(|(idle, ..)| Reverse(*idle));
            let end = |(_, file, session): (_, UploadFile, Option<Arc<Session>>)| {
                if let Some(session) = &session {
                    // Somebody has come back to it.
                    let mut held = session.state.try_lock().ok()?;
                    if matches!(held.state, State::Closed) {
                        return None;
                    }
                    held.close();
                }
                store.quotas().retain_dormant(|upload| *upload != file);
                file.remove();
                Some(file)
            };
            Ok(all.into_iter().find_map(end))
        });
        let Some(file) = given_up.await? else { return Ok(false) };
        self.lock().retain(|_, session| session.file != file);
        tracing::info!("an upload that was left alone makes room for another push");
        Ok(true)
    }
}

fn is_full(outcome: &Result<(), StoreError>) -> bool {
    outcome.as_ref().is_err_and(|error| matches!(error.kind, StoreErrorKind::Quota { .. }))
}
