//! Manifests (distribution specification, "Pulling manifests", "Pushing Manifests").

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG, LOCATION};
use http::{HeaderName, HeaderValue, StatusCode};
use kybernate_spec::{
    Algorithm, Digest, Hasher, MANIFEST_BYTES_MAX, RepositoryName, Tag, TagError,
};
use tokio::sync::OwnedSemaphorePermit;

use super::blob::entity_tag;
use super::{CONTENT_DIGEST, Call, digest, repository};
use crate::condition::WriteConditions;
use crate::config::NotifyAction;
use crate::error::ApiError;
use crate::manifest::References;
use crate::notify::{Happening, Subject};
use crate::places::{Pace, until_sent};
use crate::quota::Room;
use crate::store::{NewManifest, Store, StoreError, StoredManifest};
use crate::upload::next_paced;

const SUBJECT: HeaderName = HeaderName::from_static("oci-subject");
const TAG: HeaderName = HeaderName::from_static("oci-tag");

/// The largest manifest that is sent without a place: hardly any is larger.
const UNCOUNTED_MAX: u64 = 64 << 10;

/// Tags one PUT may set; the specification asks for ten.
const TAGS_MAX: usize = 100;

/// What stands last in a manifest's path.
enum Reference {
    Tag(Tag),
    Digest(Digest),
    /// No tag can have this name, so there is no such manifest.
    Neither(TagError),
}

impl Reference {
    fn parse(text: &str) -> Result<Self, ApiError> {
        if text.contains(':') {
            return digest(text).map(Self::Digest);
        }
        Ok(text.parse().map_or_else(Self::Neither, Self::Tag))
    }

    fn resolve(&self, name: &RepositoryName, store: &Store) -> Result<Option<Digest>, StoreError> {
        match self {
            Self::Tag(tag) => store.tag(name, tag),
            Self::Digest(digest) => Ok(Some(digest.clone())),
            Self::Neither(_) => Ok(None),
        }
    }
}

pub(super) async fn head(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    let (repository, reference) = (repository(name)?, Reference::parse(text)?);
    let found = call.look(move |store| match reference.resolve(&repository, store)? {
        Some(digest) => store.manifest(&repository, &digest),
        None => Ok(None),
    });
    let manifest = found.await?.ok_or(ApiError::ManifestUnknown)?;
    Ok(describe(&manifest, StatusCode::OK.into_response()))
}

pub(super) async fn get(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    let (repository, reference) = (repository(name)?, Reference::parse(text)?);
    let pulled = repository.clone();
    let found = call.look(move |store| match reference.resolve(&repository, store)? {
        Some(digest) => store.read_manifest_of(&repository, &digest, UNCOUNTED_MAX),
        None => Ok(None),
    });
    let (manifest, content) = found.await?.ok_or(ApiError::ManifestUnknown)?;
    let (content, place) = if let Some(content) = content {
        (content, None)
    } else {
        // Held whole while the client takes it, so there are only so many.
        let place = call.app.sending.take().await?;
        let (repository, digest) = (pulled.clone(), manifest.digest.clone());
        let found = call.on_store(move |store| store.read_manifest(&repository, &digest));
        (found.await?.ok_or(ApiError::ManifestUnknown)?.1, Some(place))
    };
    call.app.pulls.remember(&pulled, &manifest.digest);
    mention(call, &pulled, text, &manifest).await;
    let response = describe(&manifest, content.into_response());
    Ok(match place {
        Some(place) => until_sent(place, response),
        None => response,
    })
}

pub(super) async fn put(
    call: Call<'_>,
    name: &str,
    text: &str,
    body: &mut Option<Body>,
) -> Result<Response, ApiError> {
    let repository = repository(name)?;
    let reference = Reference::parse(text)?;
    let tags = tags(call, &reference)?;
    let content_type = call.header(CONTENT_TYPE).map(essence).filter(|text| !text.is_empty());
    let (content, place) = collect(call, body).await?;
    let digest = prove(reference, &content)?;
    let (media_type, references) =
        References::parse(content_type, &content).map_err(ApiError::Manifest)?;
    let subject = references.subject.clone();
    let reply = created(&repository, &digest, subject.as_ref(), &tags);
    let new = NewManifest { digest, media_type, content, references, tags };
    let (notices, origin) = (call.app.notices.clone(), call.origin());
    let conditions = WriteConditions::of(&call.parts.headers);
    let missing = call.on_store(move |store| {
        // The content is held until here, also when the client is gone.
        let _place = place;
        let room = || Room::for_manifest(store, &repository, &new);
        let put = || match &conditions {
            None => store.put_manifest_within(&repository, &new, room).map(Some),
            Some(conditions) => {
                let goes =
                    |there: Option<&Digest>| conditions.allow(there.map(entity_tag).as_deref());
                store.put_manifest_if(&repository, &new, goes, room)
            }
        };
        let done = |missing: &Option<Vec<_>>| missing.as_ref().is_some_and(Vec::is_empty);
        notices.telling(pushes(&repository, &new), Some(&origin), put, done)
    });
    match missing.await? {
        None => Err(ApiError::Precondition),
        Some(missing) if missing.is_empty() => Ok(reply),
        Some(missing) => Err(ApiError::MissingReferences(missing)),
    }
}

pub(super) async fn delete(call: Call<'_>, name: &str, text: &str) -> Result<Response, ApiError> {
    let (repository, reference) = (repository(name)?, Reference::parse(text)?);
    let (notices, origin) = (call.app.notices.clone(), call.origin());
    let conditions = WriteConditions::of(&call.parts.headers);
    let place = call.app.may_delete().await?;
    let removed = call.on_store(move |store| {
        let _place = place;
        let (subject, tag) = match &reference {
            Reference::Tag(tag) => (Subject::Tag, Some(tag.clone())),
            Reference::Digest(digest) => (Subject::Digest(digest.clone()), None),
            Reference::Neither(_) => return Ok(Some(false)),
        };
        let goes = |there: &Digest| match &conditions {
            None => true,
            Some(conditions) => conditions.allow(Some(&entity_tag(there))),
        };
        let delete = || match &reference {
            Reference::Tag(tag) => store.delete_tag_if(&repository, tag, goes),
            Reference::Digest(digest) => store.delete_manifest_if(&repository, digest, goes),
            Reference::Neither(_) => Ok(Some(false)),
        };
        let (action, repository) = (NotifyAction::Delete, repository.clone());
        let news = [Happening { action, repository, subject, tag }];
        notices.telling(news, Some(&origin), delete, |removed| *removed == Some(true))
    });
    match removed.await? {
        None => Err(ApiError::Precondition),
        Some(true) => Ok(StatusCode::ACCEPTED.into_response()),
        Some(false) => Err(ApiError::ManifestUnknown),
    }
}

/// Returns what a PUT does: each of its tags is set, or there is one more manifest.
fn pushes(repository: &RepositoryName, new: &NewManifest) -> Vec<Happening> {
    let push = |tag: Option<&Tag>| Happening {
        action: NotifyAction::Push,
        repository: repository.clone(),
        subject: Subject::Manifest {
            digest: new.digest.clone(),
            media_type: new.media_type.clone(),
            size: u64::try_from(new.content.len()).unwrap_or(u64::MAX),
        },
        tag: tag.cloned(),
    };
    if new.tags.is_empty() {
        return vec![push(None)];
    }
    new.tags.iter().map(|tag| push(Some(tag))).collect()
}

/// Tells of a pull, where somebody asked for that.
async fn mention(
    call: Call<'_>,
    repository: &RepositoryName,
    text: &str,
    manifest: &StoredManifest,
) {
    let action = NotifyAction::Pull;
    if !call.app.notices.wants_pulls(repository.as_str()) {
        return;
    }
    let StoredManifest { digest, media_type, size } = manifest.clone();
    let subject = Subject::Manifest { digest, media_type, size };
    let news =
        Happening { action, repository: repository.clone(), subject, tag: text.parse().ok() };
    let (notices, origin) = (call.app.notices.clone(), call.origin());
    let writing = call.on_store(move |_| {
        notices.mention(news, Some(&origin));
        Ok(())
    });
    if writing.await.is_err() {
        tracing::warn!("a pull is not told of");
    }
}

/// Returns the tags a PUT sets: the one it names, or those of its `tag` parameters.
fn tags(call: Call<'_>, reference: &Reference) -> Result<Vec<Tag>, ApiError> {
    if let Reference::Tag(tag) = reference {
        return Ok(vec![tag.clone()]);
    }
    let query = call.query()?;
    let tags = query.iter().filter(|(key, _)| key == "tag");
    let tags: Result<Vec<Tag>, _> = tags.map(|(_, value)| value.parse()).collect();
    let tags = tags.map_err(ApiError::Tag)?;
    if tags.len() > TAGS_MAX { Err(ApiError::Malformed("list of tags")) } else { Ok(tags) }
}

/// Returns the digest of what is pushed, which must be the one it is pushed under.
fn prove(reference: Reference, content: &[u8]) -> Result<Digest, ApiError> {
    let expected = match reference {
        Reference::Digest(digest) => Some(digest),
        Reference::Tag(_) => None,
        Reference::Neither(error) => return Err(ApiError::Tag(error)),
    };
    let algorithm = expected.as_ref().map_or(Algorithm::Sha256, Digest::algorithm);
    let mut hasher = Hasher::new(algorithm);
    hasher.update(content);
    let actual = hasher.finish();
    match expected {
        Some(expected) if expected != actual => Err(ApiError::ManifestDigest { expected, actual }),
        _ => Ok(actual),
    }
}

/// Reads a manifest's body, which is held whole and therefore bounded.
async fn collect(
    call: Call<'_>,
    body: &mut Option<Body>,
) -> Result<(Bytes, OwnedSemaphorePermit), ApiError> {
    let too_large = |length| length > MANIFEST_BYTES_MAX;
    if call.content_length().is_some_and(too_large) {
        return Err(ApiError::ManifestSize);
    }
    let place = call.app.receiving.take().await?;
    let mut moving = Pace::new(&call.app.receiving);
    let Some(body) = body else { return Err(ApiError::Body) };
    let mut content = BytesMut::new();
    while let Some(bytes) = next_paced(body, &mut moving).await? {
        content.extend_from_slice(&bytes);
        if u64::try_from(content.len()).is_ok_and(too_large) {
            return Err(ApiError::ManifestSize);
        }
    }
    Ok((content.freeze(), place))
}

/// Returns a media type without its parameters, which a registry should ignore.
fn essence(content_type: &str) -> &str {
    content_type.split_once(';').map_or(content_type, |(essence, _)| essence).trim()
}

fn describe(manifest: &StoredManifest, mut response: Response) -> Response {
    let digest = manifest.digest.to_string();
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, HeaderValue::from(manifest.size));
    let texts = [
        (CONTENT_TYPE, manifest.media_type.clone()),
        (ETAG, entity_tag(&manifest.digest)),
        (CONTENT_DIGEST, digest),
    ];
    for (name, text) in texts {
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(name, value);
        }
    }
    response
}

fn created(
    repository: &RepositoryName,
    digest: &Digest,
    subject: Option<&Digest>,
    tags: &[Tag],
) -> Response {
    let headers = [
        (LOCATION, format!("/v2/{repository}/manifests/{digest}")),
        (CONTENT_DIGEST, digest.to_string()),
    ];
    let mut response = (StatusCode::CREATED, headers).into_response();
    let subject = subject.map(|subject| (SUBJECT, subject.to_string()));
    let tags = tags.iter().map(|tag| (TAG, tag.to_string()));
    for (name, text) in subject.into_iter().chain(tags) {
        if let Ok(value) = HeaderValue::try_from(text) {
            response.headers_mut().append(name, value);
        }
    }
    response
}
