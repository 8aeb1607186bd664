//! Uploads: sessions that take bytes in, prove them, and commit them.
//!
//! ```text
//! open ──▶ Open(progress) ──append──▶ Open(progress) ──finish──▶ Closed     file becomes a blob
//!             ▲                                  └──cancel────▶ Closed      file removed
//!  restart or │ read again
//!  forgotten  │
//! ─────────▶ Dormant
//! ```
//!
//! A session is known by its file. The hash and the checksums of what is in the file are kept in
//! memory, so that a commit reads nothing; after a restart they are made again from the file.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use axum::body::Body;
use kybernate_spec::{Algorithm, Digest, RepositoryName};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, watch};

use self::append::{Appended, Target, append};
use self::progress::Progress;
use crate::app::blocking;
use crate::config::NotifyAction;
use crate::notify::{Happening, Notices, Origin, Subject};
use crate::places::Places;
use crate::quota::Allowance;
use crate::range::ContentRange;
use crate::store::{Commit, Sink, Store, StoreError, UploadFile, UploadId};
use crate::trace;

mod append;
mod progress;
mod room;

pub(crate) use self::append::{next_frame, next_paced};

/// Sessions known at once. Idle ones cost ~1 KiB each.
const SESSIONS_MAX: usize = 10_000;

/// The unfinished uploads of a store.
#[derive(Debug)]
pub struct Uploads {
    store: Arc<Store>,
    notices: Notices,
    /// Where those who add to uploads have places.
    receiving: Places,
    // Held for a look-up only, never across an `.await`, hence not a tokio mutex.
    sessions: Mutex<HashMap<UploadId, Arc<Session>>>,
}

/// The body of a request that adds to an upload.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    /// The bytes.
    pub(crate) body: &'a mut Body,
    /// Where they belong, when the client says so.
    pub(crate) range: Option<ContentRange>,
    /// How many they are, when the client says so.
    pub(crate) length: Option<u64>,
    /// What others are told of where they come from.
    pub(crate) origin: Option<Origin>,
}

/// Why an upload could not go on.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// There is no such upload, any more or yet.
    #[error("no such upload")]
    Unknown,
    /// Too many uploads are open.
    #[error("too many uploads are open")]
    TooMany,
    /// The chunk does not follow what is there.
    #[error("the chunk does not begin at byte {received}")]
    OutOfOrder {
        /// How many bytes are there.
        received: u64,
    },
    /// The body has not as many bytes as its `Content-Range` says.
    #[error("the body has not the length its Content-Range says")]
    Length,
    /// The bytes are not what the client says they are. The upload is gone.
    #[error("the content has digest {actual}, not {expected}")]
    Digest {
        /// What the client says.
        expected: Digest,
        /// What was received.
        actual: Digest,
    },
    /// No byte came for too long.
    #[error("the client sent nothing for too long")]
    Stalled,
    /// The connection ended before the body did.
    #[error("the client went away")]
    Interrupted,
    /// Another request on the same upload took over.
    #[error("another request took the upload over")]
    Superseded,
    /// The store failed. The upload is gone.
    #[error(transparent)]
    Store(#[from] StoreError),
}

#[derive(Debug)]
struct Session {
    file: UploadFile,
    // Held across a whole body, hence a tokio mutex; a newer request asks the holder to let go.
    state: Arc<AsyncMutex<Held>>,
    arrivals: watch::Sender<u64>,
    /// Bytes in the file that will stay, for whoever asks while the state is held.
    received: AtomicU64,
}

/// The right to change an upload, until a newer request asks for it.
#[derive(Debug)]
struct Turn {
    held: OwnedMutexGuard<Held>,
    superseded: watch::Receiver<u64>,
}

#[derive(Debug)]
struct Held {
    state: State,
    /// What the repository has room for, until the upload is over.
    allowance: Allowance,
}

#[derive(Debug)]
enum State {
    Dormant,
    Open(Box<Progress>),
    Closed,
}

impl Uploads {
    pub(crate) fn new(store: Arc<Store>, notices: Notices, receiving: Places) -> Self {
        Self { store, notices, receiving, sessions: Mutex::default() }
    }

    /// Returns how many uploads are begun and not ended, of those touched since the start.
    pub fn open_count(&self) -> usize {
        self.lock().len()
    }

    /// Begins an upload.
    pub async fn open(
        &self,
        repository: &RepositoryName,
        algorithm: Algorithm,
    ) -> Result<UploadId, UploadError> {
        self.make_place().await?;
        let id = UploadId::random(SystemTime::now())
            .map_err(StoreError::during("choose an upload's id"))?;
        let file = self.store.upload_file(repository, &id);
        let made = file.clone();
        blocking(&self.store, move |_| made.create().map(drop)).await?;
        let state = State::Open(Box::new(Progress::new(algorithm)));
        self.lock().insert(id.clone(), Arc::new(Session::new(file, state, 0)));
        Ok(id)
    }

    /// Returns how many bytes an upload has.
    pub async fn received(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
    ) -> Result<u64, UploadError> {
        match self.known(repository, id)? {
            Ok(session) => Ok(session.received.load(Ordering::Relaxed)),
            Err(file) => self.length(file).await,
        }
    }

    /// Adds the body of a PATCH and returns how many bytes the upload has then. What came before
    /// an interruption is kept. Not cancellation-safe: run it in a task of its own.
    pub(crate) async fn patch(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
        arrival: Arrival<'_>,
    ) -> Result<u64, UploadError> {
        let session = self.session(repository, id).await?;
        let mut turn = session.take_over().await;
        let before = self.progress(id, &session, &mut turn, repository).await?;
        before.expects(&arrival)?;
        let bytes = before.received.saturating_add(arrival.length.unwrap_or(0));
        self.allow(&mut turn.held.allowance, repository, None, bytes).await?;
        let result = self.try_patch(&session, &mut turn, before, arrival, repository).await;
        let result = self.or_forget(id, &session, &mut turn, result).await?;
        turn.held.allowance.settle(session.received.load(Ordering::Relaxed));
        result
    }

    /// The outer error ends the upload, the inner one only the request.
    async fn try_patch(
        &self,
        session: &Session,
        turn: &mut Turn,
        before: Progress,
        arrival: Arrival<'_>,
        repository: &RepositoryName,
    ) -> Result<Result<u64, UploadError>, UploadError> {
        let start = before.received;
        let appending = self.append(session, turn, before, arrival, repository);
        let Appended { outcome, remainder } = appending.await?;
        if let Err(refused @ (UploadError::Length | UploadError::Store(_))) = outcome {
            remainder.rewind(start).await?;
            return Ok(Err(refused));
        }
        let progress = remainder.flush(&self.store).await?;
        let received = progress.received;
        session.received.store(received, Ordering::Relaxed);
        turn.held.state = State::Open(Box::new(progress));
        Ok(outcome.map(|()| received))
    }

    /// Adds the body of a PUT, proves the digest and commits. An interrupted body counts as never
    /// sent. Not cancellation-safe: run it in a task of its own.
    ///
    /// A client that lost the reply may repeat the request: a blob that the repository has is
    /// success, as [`UploadError::Unknown`] with [`Uploads::is_there`] tells.
    pub(crate) async fn finish(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
        digest: &Digest,
        arrival: Arrival<'_>,
    ) -> Result<(), UploadError> {
        let session = self.session(repository, id).await?;
        let mut turn = session.take_over().await;
        let before = self.progress(id, &session, &mut turn, repository).await?;
        before.expects(&arrival)?;
        let bytes = before.received.saturating_add(arrival.length.unwrap_or(0));
        let allowed = self.allow(&mut turn.held.allowance, repository, Some(digest), bytes).await;
        self.or_forget(id, &session, &mut turn, allowed.map_err(UploadError::from)).await?;
        let target = (repository, digest);
        let result = self.try_finish(&session, &mut turn, before, arrival, target).await;
        let result = self.or_forget(id, &session, &mut turn, result).await?;
        turn.held.allowance.settle(session.received.load(Ordering::Relaxed));
        result?;
        turn.held.close();
        self.lock().remove(id);
        Ok(())
    }

    /// The outer error ends the upload, the inner one only the request.
    async fn try_finish(
        &self,
        session: &Session,
        turn: &mut Turn,
        before: Progress,
        arrival: Arrival<'_>,
        (repository, digest): (&RepositoryName, &Digest),
    ) -> Result<Result<(), UploadError>, UploadError> {
        let (start, origin) = (before.received, arrival.origin.clone());
        let before = before.or_for(digest.algorithm());
        let appending = self.append(session, turn, before, arrival, repository);
        let Appended { outcome, remainder } = appending.await?;
        if outcome.is_err() {
            remainder.rewind(start).await?;
            return Ok(outcome);
        }
        let commit = remainder.finish(&self.store, digest, repository, &session.file).await?;
        let (length, notices) = (commit.length, self.notices.clone());
        let commit = Arc::new(commit);
        let commit_if_there = |known: bool| {
            let (commit, origin, notices) = (Arc::clone(&commit), origin.clone(), notices.clone());
            move |store: &Arc<Store>| {
                let Commit { repository, digest, length, .. } = &*commit;
                let put = || {
                    // What took no room since the repository has it is not taken out from here on.
                    let held = known.then(|| store.repository_lock(repository).read());
                    let _held = held.map(|held| held.unwrap_or_else(PoisonError::into_inner));
                    if known && store.blob(repository, digest)?.is_none() {
                        return Ok(false);
                    }
                    store.commit(&commit).map(|()| true)
                };
                let subject = Subject::Pushed { digest: digest.clone(), size: *length };
                let (action, repository) = (NotifyAction::Push, repository.clone());
                let news = [Happening { action, repository, subject, tag: None }];
                notices.telling(news, origin.as_ref(), put, |done| *done)
            }
        };
        let known = turn.held.allowance.is_of_known();
        if !blocking(&self.store, commit_if_there(known)).await? {
            // It was taken out while it was sent again.
            self.allow(&mut turn.held.allowance, repository, None, length).await?;
            blocking(&self.store, commit_if_there(false)).await?;
        }
        Ok(Ok(()))
    }

    /// Whether a repository has a blob already, and will have it after power loss.
    pub async fn is_there(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let (repository, digest) = (repository.clone(), digest.clone());
        blocking(&self.store, move |store| store.has_durably(&repository, &digest)).await
    }

    /// Gives an upload up.
    pub async fn cancel(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
    ) -> Result<(), UploadError> {
        let session = self.session(repository, id).await?;
        let mut turn = session.take_over().await;
        if matches!(turn.held.state, State::Closed) {
            return Err(UploadError::Unknown);
        }
        self.forget(id, &session, &mut turn).await;
        Ok(())
    }

    /// Forgets uploads that were left alone for too long, here and on disk.
    pub async fn expire(&self, now: SystemTime) -> Result<(), StoreError> {
        let sessions: Vec<_> = self.lock().values().cloned().collect();
        let sweeping = blocking(&self.store, move |store| {
            let (mut busy, mut ended) = (HashSet::new(), HashSet::new());
            for session in sessions.iter().filter(|session| session.file.is_left_alone(now)) {
                // Somebody sends to it, if only a few bytes a minute, which are not yet written.
                let Ok(mut held) = session.state.try_lock() else {
                    busy.insert(session.file.clone());
                    continue;
                };
                held.close();
                session.file.remove();
                ended.insert(session.file.clone());
            }
            let swept = store.sweep(now, &|upload| busy.contains(upload));
            store.quotas().retain_dormant(UploadFile::exists);
            Ok((swept, ended))
        });
        let (swept, ended) = sweeping.await?;
        self.lock().retain(|_, session| !ended.contains(&session.file));
        swept
    }

    async fn append(
        &self,
        session: &Session,
        turn: &mut Turn,
        before: Progress,
        arrival: Arrival<'_>,
        repository: &RepositoryName,
    ) -> Result<Appended, UploadError> {
        let (file, received) = (session.file.clone(), before.received);
        let more = arrival.length.or(arrival.range.map(|range| range.length)).unwrap_or(u64::MAX);
        let opening = blocking(&self.store, move |_| Sink::open(&file, received, more));
        let file = opening.await?.ok_or(UploadError::Unknown)?;
        let superseded = turn.superseded.clone();
        let target = Target {
            uploads: self,
            file: Arc::new(file),
            upload: &session.file,
            repository,
            allowance: &mut turn.held.allowance,
        };
        trace::part_of("upload.receive", append(target, before, arrival, superseded)).await
    }

    /// Returns the session of an upload, or the file of one that may have begun before a restart.
    fn known(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
    ) -> Result<Result<Arc<Session>, UploadFile>, UploadError> {
        if id.is_expired(SystemTime::now()) {
            return Err(UploadError::Unknown);
        }
        let file = self.store.upload_file(repository, id);
        match self.lock().get(id) {
            Some(session) if session.file == file => Ok(Ok(Arc::clone(session))),
            Some(_of_another_repository) => Err(UploadError::Unknown),
            None => Ok(Err(file)),
        }
    }

    /// Returns the length of an upload's file.
    async fn length(&self, file: UploadFile) -> Result<u64, UploadError> {
        let length = blocking(&self.store, move |_| file.length()).await?;
        length.ok_or(UploadError::Unknown)
    }

    /// Returns the session of an upload, also of one that was begun before a restart.
    async fn session(
        &self,
        repository: &RepositoryName,
        id: &UploadId,
    ) -> Result<Arc<Session>, UploadError> {
        let file = match self.known(repository, id)? {
            Ok(session) => return Ok(session),
            Err(file) => file,
        };
        let length = self.length(file.clone()).await?;
        self.make_place().await?;
        let mut sessions = self.lock();
        let session = sessions
            .entry(id.clone())
            .or_insert_with(|| Arc::new(Session::new(file, State::Dormant, length)));
        Ok(Arc::clone(session))
    }

    /// Returns where the upload stands; one from before a restart is read again.
    async fn progress(
        &self,
        id: &UploadId,
        session: &Session,
        turn: &mut Turn,
        repository: &RepositoryName,
    ) -> Result<Progress, UploadError> {
        match &turn.held.state {
            State::Open(progress) => Ok(Progress::clone(progress)),
            State::Closed => Err(UploadError::Unknown),
            State::Dormant => {
                let (file, repository) = (session.file.clone(), repository.clone());
                let waking = blocking(&self.store, move |store| {
                    let Some(progress) = Progress::read(store, &file)? else { return Ok(None) };
                    let woken = Allowance::wake(store, &repository, &file, progress.received);
                    Ok(Some((progress, woken)))
                });
                let Some((progress, allowance)) = waking.await? else {
                    // It ended after its file was seen: the session is of nothing.
                    turn.held.close();
                    self.lock().remove(id);
                    return Err(UploadError::Unknown);
                };
                let state = State::Open(Box::new(progress.clone()));
                *turn.held = Held { state, allowance };
                Ok(progress)
            }
        }
    }

    /// Gives the upload up when `result` is an error: after one, its file is not what we think.
    async fn or_forget<T>(
        &self,
        id: &UploadId,
        session: &Session,
        turn: &mut Turn,
        result: Result<T, UploadError>,
    ) -> Result<T, UploadError> {
        if result.is_err() {
            self.forget(id, session, turn).await;
        }
        result
    }

    async fn forget(&self, id: &UploadId, session: &Session, turn: &mut Turn) {
        turn.held.close();
        self.lock().remove(id);
        let file = session.file.clone();
        let removing = blocking(&self.store, move |store| {
            store.quotas().retain_dormant(|upload| *upload != file);
            file.remove();
            Ok(())
        });
        if let Err(error) = removing.await {
            tracing::error!(error = %kybernate_spec::chain(&error), "failed to remove an upload");
        }
    }

    /// Makes sure that one more upload may be known.
    async fn make_place(&self) -> Result<(), UploadError> {
        let is_full = || self.lock().len() >= SESSIONS_MAX;
        if is_full() && !self.put_to_sleep().await? && !self.give_up_empty().await? {
            return Err(UploadError::TooMany);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<UploadId, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    fn new(file: UploadFile, state: State, received: u64) -> Self {
        let held = Held { state, allowance: Allowance::default() };
        let state = Arc::new(AsyncMutex::new(held));
        Self { file, state, arrivals: watch::Sender::new(0), received: received.into() }
    }

    /// Asks whoever holds the upload to let go and waits for it: a client that comes again has
    /// given its earlier connection up, also when we have not noticed.
    async fn take_over(&self) -> Turn {
        self.arrivals.send_modify(|count| *count = count.wrapping_add(1));
        let superseded = self.arrivals.subscribe();
        Turn { held: Arc::clone(&self.state).lock_owned().await, superseded }
    }
}

impl Held {
    /// Ends the upload, which takes no room any more.
    fn close(&mut self) {
        *self = Self { state: State::Closed, allowance: Allowance::default() };
    }
}

#[cfg(test)]
mod tests;
