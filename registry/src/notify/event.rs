//! What is told, in the form that distribution's registry has made common.

use std::time::SystemTime;

use kybernate_spec::{Digest, RepositoryName, Tag};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::config::{Address, NotifyAction};
use crate::store::{Store, StoreError};

/// The media type of [`Envelope`].
pub(super) const MEDIA_TYPE: &str = "application/vnd.docker.distribution.events.v1+json";

/// What blobs are called whose kind nobody said.
const BLOB: &str = "application/octet-stream";

/// What happens in a repository.
#[derive(Debug, Clone)]
pub(crate) struct Happening {
    /// What.
    pub(crate) action: NotifyAction,
    /// Where.
    pub(crate) repository: RepositoryName,
    /// To what.
    pub(crate) subject: Subject,
    /// Under which tag.
    pub(crate) tag: Option<Tag>,
}

/// What something happens to.
#[derive(Debug, Clone)]
pub(crate) enum Subject {
    /// A manifest that is there, or will be.
    Manifest {
        /// Its digest.
        digest: Digest,
        /// Its media type.
        media_type: String,
        /// Its length in bytes.
        size: u64,
    },
    /// A manifest of which only the digest is known.
    Digest(Digest),
    /// A blob that comes from another repository.
    Blob {
        /// Its digest.
        digest: Digest,
        /// Where it comes from.
        from: RepositoryName,
    },
    /// A blob that will be there.
    Pushed {
        /// Its digest.
        digest: Digest,
        /// Its length in bytes.
        size: u64,
    },
    /// Nothing but the tag.
    Tag,
}

impl Happening {
    /// Whether it is the push of a blob, of which most want to hear nothing.
    pub(super) fn is_pushed_blob(&self) -> bool {
        matches!(self.subject, Subject::Pushed { .. })
    }
}

/// The request that makes something happen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Its id, as in logs.
    pub(crate) id: String,
    /// Where it comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) addr: Option<String>,
    /// The host it was sent to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<String>,
    /// Its method.
    pub(crate) method: String,
    /// The client's program.
    pub(crate) useragent: String,
    /// Who sent it.
    #[serde(skip)]
    pub(crate) actor: Option<String>,
    /// How it was sent.
    #[serde(skip)]
    pub(crate) scheme: &'static str,
}

/// One event.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Event {
    /// Whether it is the push of a blob; the outbox keeps it beside the event, whose form is not
    /// ours.
    #[serde(skip)]
    pub(super) pushed_blob: bool,
    pub(super) id: String,
    timestamp: String,
    pub(super) action: NotifyAction,
    pub(super) target: Target,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<Origin>,
    actor: Actor,
    source: Source,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Target {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<Digest>,
    /// The size again, as old receivers know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    length: Option<u64>,
    pub(super) repository: RepositoryName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from_repository: Option<RepositoryName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tag: Option<Tag>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Actor {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// The registry that tells.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Source {
    addr: String,
    #[serde(rename = "instanceID")]
    instance: String,
}

/// What is posted.
#[derive(Debug, Serialize)]
pub(super) struct Envelope<'a> {
    pub(super) events: [&'a Event; 1],
    /// How many events before these could not be kept.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) lost: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Source {
    /// Returns what this process calls itself; another instance after each start.
    pub(super) fn here(listen: &Address) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let port = listen.port().unwrap_or_default();
        Self { addr: format!("{host}:{port}"), instance: Uuid::new_v4().to_string() }
    }
}

impl Event {
    pub(super) fn new(happening: Happening, origin: Option<&Origin>, source: &Source) -> Self {
        let pushed_blob = happening.is_pushed_blob();
        let Happening { action, repository, subject, tag } = happening;
        let (media_type, size, digest, from) = match subject {
            Subject::Manifest { digest, media_type, size } => {
                (Some(media_type), Some(size), Some(digest), None)
            }
            Subject::Digest(digest) => (None, None, Some(digest), None),
            Subject::Blob { digest, from } => {
                (Some(BLOB.to_owned()), None, Some(digest), Some(from))
            }
            Subject::Pushed { digest, size } => {
                (Some(BLOB.to_owned()), Some(size), Some(digest), None)
            }
            Subject::Tag => (None, None, None, None),
        };
        let of_blob = pushed_blob || action == NotifyAction::Mount;
        let kind = if of_blob { "blobs" } else { "manifests" };
        let host = origin.and_then(|origin| Some((origin.scheme, origin.host.as_deref()?)));
        let there = digest.as_ref().filter(|_| action != NotifyAction::Delete);
        let url = host.zip(there).map(|((scheme, host), digest)| {
            format!("{scheme}://{host}/v2/{repository}/{kind}/{digest}")
        });
        let target = Target {
            media_type,
            size,
            digest,
            length: size,
            repository,
            from_repository: from,
            url,
            tag,
        };
        Self {
            pushed_blob,
            id: Uuid::new_v4().to_string(),
            timestamp: humantime::format_rfc3339_micros(SystemTime::now()).to_string(),
            action,
            target,
            request: origin.cloned(),
            actor: Actor { name: origin.and_then(|origin| origin.actor.clone()) },
            source: source.clone(),
        }
    }

    /// Whether what it tells of is so now: what is asked of an event that was under way when the
    /// process died. Blocks.
    pub(super) fn is_true(&self, store: &Store) -> Result<bool, StoreError> {
        let Target { repository, digest, tag, .. } = &self.target;
        match (self.action, tag, digest) {
            (NotifyAction::Push, Some(tag), digest) => Ok(store.tag(repository, tag)? == *digest),
            (NotifyAction::Push, None, Some(digest)) if self.pushed_blob => {
                Ok(store.blob(repository, digest)?.is_some())
            }
            (NotifyAction::Push, None, Some(digest)) => {
                Ok(store.manifest(repository, digest)?.is_some())
            }
            (NotifyAction::Delete, Some(tag), _) => Ok(store.tag(repository, tag)?.is_none()),
            (NotifyAction::Delete, None, Some(digest)) => {
                Ok(store.manifest(repository, digest)?.is_none())
            }
            (NotifyAction::Mount, _, Some(digest)) => Ok(store.blob(repository, digest)?.is_some()),
            (NotifyAction::Pull, ..)
            | (NotifyAction::Push | NotifyAction::Delete | NotifyAction::Mount, None, None) => {
                Ok(true)
            }
            (NotifyAction::Mount, Some(_), None) => Ok(true),
        }
    }
}
