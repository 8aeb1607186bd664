//! Uploads (distribution specification, "Pushing blobs").

use std::sync::{Arc, PoisonError};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, EXPECT, LOCATION, RANGE};
use http::{HeaderName, StatusCode};
use kybernate_spec::{Algorithm, Digest, RepositoryName};
use tokio::sync::OwnedSemaphorePermit;

use super::{CONTENT_DIGEST, Call, digest, linger, parameter, repository};
use crate::access::action::Action;
use crate::app::AppState;
use crate::config::NotifyAction;
use crate::error::{ApiError, received_range};
use crate::notify::{Happening, Subject};
use crate::quota::Room;
use crate::range::ContentRange;
use crate::store::UploadId;
use crate::upload::{Arrival, UploadError, next_frame};

const UPLOAD_ID: HeaderName = HeaderName::from_static("docker-upload-uuid");

/// Begins an upload, or does all of it: by mount, or with the body of the POST.
pub(super) async fn post(
    call: Call<'_>,
    name: &str,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let repository = repository(name)?;
    let query = call.query()?;
    if let Some(mount) = parameter(&query, "mount") {
        let wanted = digest(mount)?;
        if try_mount(call, &repository, parameter(&query, "from"), &wanted).await? {
            return Ok(created(&repository, &wanted));
        }
        return begin(call, &repository, wanted.algorithm()).await;
    }
    if let Some(text) = parameter(&query, "digest") {
        let push = Push::of(call, digest(text)?).await?;
        let id = call.app.uploads.open(&repository, push.digest.algorithm()).await?;
        return complete(call, Target { repository, id }, push.whole(), body).await;
    }
    let algorithm = match parameter(&query, "digest-algorithm") {
        Some(name) => name.parse().map_err(ApiError::Digest)?,
        None => Algorithm::Sha256,
    };
    begin(call, &repository, algorithm).await
}

/// Tells how much is there.
pub(super) async fn get(call: Call<'_>, name: &str, id: &str) -> Result<Response, ApiError> {
    let target = Target::parse(name, id)?;
    let received = call.app.uploads.received(&target.repository, &target.id).await?;
    Ok(progress(StatusCode::NO_CONTENT, &target, received))
}

/// Adds a chunk.
pub(super) async fn patch(
    call: Call<'_>,
    name: &str,
    id: &str,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let target = Target::parse(name, id)?;
    let (range, length) = (content_range(call)?, call.content_length());
    let place = call.app.receiving.take().await?;
    let Some(mut body) = body.take() else { return Err(ApiError::Body) };
    let at = target.clone();
    let app = Arc::clone(call.app);
    let work = async move {
        let arrival = Arrival { body: &mut body, range, length, origin: None };
        (app.uploads.patch(&at.repository, &at.id, arrival).await, body)
    };
    let received = detached(call, place, work).await.map_err(|error| error.at(&target))?;
    Ok(progress(StatusCode::ACCEPTED, &target, received))
}

/// Ends an upload, with or without a last chunk.
pub(super) async fn put(
    call: Call<'_>,
    name: &str,
    id: &str,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let target = Target::parse(name, id)?;
    let query = call.query()?;
    let digest = digest(parameter(&query, "digest").ok_or(ApiError::NoDigest)?)?;
    complete(call, target, Push::of(call, digest).await?, body).await
}

/// Gives an upload up.
pub(super) async fn delete(call: Call<'_>, name: &str, id: &str) -> Result<Response, ApiError> {
    let target = Target::parse(name, id)?;
    call.app.uploads.cancel(&target.repository, &target.id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Mounts when the source is named and has the blob. Without a source only what the repository has
/// already counts: anything else would show blobs to whoever knows their digest.
async fn try_mount(
    call: Call<'_>,
    repository: &RepositoryName,
    from: Option<&str>,
    digest: &Digest,
) -> Result<bool, ApiError> {
    let from = match from.map(str::parse) {
        None => repository.clone(),
        Some(Ok(from)) => from,
        // The specification wants an upload where a mount cannot be.
        Some(Err(_malformed)) => return Ok(false),
    };
    // From a repository that the caller may not see nothing can be mounted, as from a missing one.
    let hidden = !call.caller.may(Action::Pull, from.as_str());
    let from = if hidden { call.app.access.hidden().clone() } else { from };
    let (repository, digest) = (repository.clone(), digest.clone());
    let (notices, origin) = (call.app.notices.clone(), call.origin());
    call.on_store(move |store| {
        let subject = Subject::Blob { digest: digest.clone(), from: from.clone() };
        let (action, to) = (NotifyAction::Mount, repository.clone());
        let news = [Happening { action, repository: to, subject, tag: None }];
        let mount = || {
            // Where there are quotas: what takes no room since it is there stays there.
            let lock = store.repository_lock(&repository);
            let held = store.quotas().are_set().then(|| lock.read());
            let _held = held.map(|held| held.unwrap_or_else(PoisonError::into_inner));
            let _room = Room::for_mount(store, &from, &repository, &digest)?;
            store.mount(&from, &repository, &digest)
        };
        // What is there already is not mounted.
        let news = news.into_iter().filter(|_| from != repository);
        notices.telling(news, Some(&origin), mount, |mounted| *mounted)
    })
    .await
}

async fn begin(
    call: Call<'_>,
    repository: &RepositoryName,
    algorithm: Algorithm,
) -> Result<Response, ApiError> {
    let id = call.app.uploads.open(repository, algorithm).await?;
    let target = Target { repository: repository.clone(), id };
    Ok(progress(StatusCode::ACCEPTED, &target, 0))
}

/// What ends an upload, with the place for its body.
struct Push {
    digest: Digest,
    range: Option<ContentRange>,
    place: OwnedSemaphorePermit,
    /// Nobody else knows the upload, so nobody can go on with it.
    whole: bool,
}

impl Push {
    /// Reads everything that may be wrong, and waits for a place, before anything is begun.
    async fn of(call: Call<'_>, digest: Digest) -> Result<Self, ApiError> {
        let range = content_range(call)?;
        Ok(Self { digest, range, place: call.app.receiving.take().await?, whole: false })
    }

    fn whole(self) -> Self {
        Self { whole: true, ..self }
    }
}

async fn complete(
    call: Call<'_>,
    target: Target,
    push: Push,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let Push { digest, range, place, whole } = push;
    let length = call.content_length();
    let Some(mut body) = body.take() else { return Err(ApiError::Body) };
    let (at, wanted, app) = (target.clone(), digest.clone(), Arc::clone(call.app));
    let origin = Some(call.origin());
    let work = async move {
        let arrival = Arrival { body: &mut body, range, length, origin };
        let outcome = app.uploads.finish(&at.repository, &at.id, &wanted, arrival).await;
        let outcome = match outcome {
            Err(UploadError::Unknown) => repeated(&app, &at, &wanted, &mut body).await,
            outcome => outcome,
        };
        if outcome.is_err() && whole {
            // It may be gone already.
            drop(app.uploads.cancel(&at.repository, &at.id).await);
        }
        (outcome, body)
    };
    detached(call, place, work).await.map_err(|error| error.at(&target))?;
    Ok(created(&target.repository, &digest))
}

/// Answers a PUT on an upload that is not there: the client may have lost the reply to the same
/// request, and then the blob is there.
async fn repeated(
    app: &AppState,
    target: &Target,
    digest: &Digest,
    body: &mut Body,
) -> Result<(), UploadError> {
    if !app.uploads.is_there(&target.repository, digest).await? {
        return Err(UploadError::Unknown);
    }
    // To the end, since this is a success: not every client reads a reply before it has sent all.
    while next_frame(body).await?.is_some() {}
    Ok(())
}

/// Runs work on a body in a task of its own: what has arrived is kept and what has begun is
/// finished, also when the client goes away and the request's own future is dropped.
async fn detached<T: Send + 'static>(
    call: Call<'_>,
    place: OwnedSemaphorePermit,
    work: impl Future<Output = (Result<T, UploadError>, Body)> + Send + 'static,
) -> Result<T, Failure> {
    let app = Arc::clone(call.app);
    let waits_to_send = call.parts.headers.contains_key(EXPECT);
    let running = call.app.tasks.run(async move {
        let (outcome, body) = work.await;
        drop(place);
        if outcome.is_err() && !waits_to_send {
            linger(&app, body);
        }
        outcome
    });
    match running.await {
        Ok(outcome) => outcome.map_err(Failure::Upload),
        Err(error) => Err(Failure::Task(error)),
    }
}

#[derive(Debug)]
enum Failure {
    Upload(UploadError),
    Task(tokio::task::JoinError),
}

impl Failure {
    fn at(self, target: &Target) -> ApiError {
        match self {
            Self::Upload(error) => ApiError::Upload { location: Some(target.location()), error },
            Self::Task(error) => ApiError::Task(error),
        }
    }
}

fn content_range(call: Call<'_>) -> Result<Option<ContentRange>, ApiError> {
    let Some(header) = call.header(CONTENT_RANGE) else { return Ok(None) };
    ContentRange::parse(header).map(Some).ok_or(ApiError::Malformed("Content-Range"))
}

/// An upload as the path names it.
#[derive(Clone)]
struct Target {
    repository: RepositoryName,
    id: UploadId,
}

impl Target {
    fn parse(name: &str, id: &str) -> Result<Self, ApiError> {
        let repository = repository(name)?;
        match id.parse() {
            Ok(id) => Ok(Self { repository, id }),
            // An id we never gave out is as unknown as one that has ended.
            Err(crate::store::UploadIdError) => Err(UploadError::Unknown.into()),
        }
    }

    fn location(&self) -> String {
        format!("/v2/{}/blobs/uploads/{}", self.repository, self.id.secret())
    }
}

fn progress(status: StatusCode, target: &Target, received: u64) -> Response {
    let headers = [
        (LOCATION, target.location()),
        (UPLOAD_ID, target.id.secret().to_owned()),
        (RANGE, received_range(received)),
    ];
    let mut response = (status, headers).into_response();
    if status != StatusCode::NO_CONTENT {
        response.headers_mut().insert(CONTENT_LENGTH, 0.into());
    }
    response
}

fn created(repository: &RepositoryName, digest: &Digest) -> Response {
    let headers = [
        (LOCATION, format!("/v2/{repository}/blobs/{digest}")),
        (CONTENT_DIGEST, digest.to_string()),
    ];
    (StatusCode::CREATED, headers).into_response()
}
