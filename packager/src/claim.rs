//! Who has a checkpoint that moves. A workload that is moved goes on in one place: whoever restores it
//! takes it for itself first, with the tag `sha256-HEX.claim` in the checkpoint's repository. Of all
//! nodes that try, one gets it, since the tag is put with `If-None-Match: *` (RFC 9110, 13.1.2). A
//! registry that does not keep that condition is told by it, and nobody gets anything.
//!
//! The tag names a manifest whose subject is the checkpoint's index and whose annotations say who it is
//! (`io.kybernate.claim.*`).

use bytes::Bytes;
use kybernate_spec::{
    Annotations, Descriptor, Digest, Manifest, Tag, TagError, annotation, media_type,
};
use serde::{Deserialize, Serialize};

use crate::remote::{Remote, fallback_tag};
use crate::sign::{EMPTY, put};
use crate::store::{Store, StoreError, StoreErrorKind};

/// Who has taken a checkpoint for itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimant {
    /// The node that it runs on.
    pub node: String,
    /// Kubernetes' namespace, or containerd's.
    pub namespace: String,
    /// The pod's UID; the container's id without a pod.
    pub owner: String,
    /// The container's name.
    pub container: String,
}

/// Why a checkpoint is nobody's.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Somebody else has it.
    #[error(
        "it was moved already: {by} has taken it; when that is gone for good, remove the tag {tag:?} \
         (crane delete {repository}:{tag})"
    )]
    Taken {
        /// Who has it, in words.
        by: String,
        /// The tag that says so.
        tag: Tag,
        /// Where that is.
        repository: String,
    },
    /// The registry would give it to everybody.
    #[error(
        "{0} cannot keep two from moving it at once: it replaces a tag that was to be new (PUT with \
         If-None-Match)"
    )]
    Unkept(String),
    /// Only registries can.
    #[error("only what is in a registry can be moved")]
    NoRegistry,
    /// The registry did not answer as it should.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the tag names, or would name, is no manifest.
    #[error("failed to read or write who has it")]
    Json(#[source] serde_json::Error),
    /// Its digest makes no tag.
    #[error(transparent)]
    Tag(#[from] TagError),
}

impl ClaimError {
    /// Whether it is not to be had, however often it is tried.
    pub const fn is_refusal(&self) -> bool {
        matches!(self, Self::Taken { .. } | Self::Unkept(_) | Self::NoRegistry)
    }
}

impl Claimant {
    fn annotations(&self) -> Annotations {
        let Self { node, namespace, owner, container } = self;
        Annotations::from([
            (annotation::CLAIM_NODE.to_owned(), node.clone()),
            (annotation::CLAIM_NAMESPACE.to_owned(), namespace.clone()),
            (annotation::CLAIM_OWNER.to_owned(), owner.clone()),
            (annotation::CLAIM_CONTAINER.to_owned(), container.clone()),
        ])
    }

    fn manifest(&self, index: &Descriptor) -> Result<Bytes, ClaimError> {
        let empty = Descriptor::of(media_type::OCI_EMPTY, EMPTY);
        let mut subject = index.bare();
        subject.artifact_type = None;
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: Some(media_type::CLAIM.to_owned()),
            config: empty.clone(),
            layers: vec![empty],
            subject: Some(subject),
            annotations: self.annotations(),
        };
        serde_json::to_vec(&manifest).map(Bytes::from).map_err(ClaimError::Json)
    }
}

/// Takes a checkpoint for somebody, who may have it already.
pub async fn claim(
    store: &Store,
    index: &Descriptor,
    claimant: &Claimant,
) -> Result<(), ClaimError> {
    let Store::Registry(remote) = store else { return Err(ClaimError::NoRegistry) };
    let tag = tag_of(index)?;
    if let Some(held) = held(remote, &tag).await? {
        return judge(remote, tag, &held, claimant);
    }
    let unkept = || Err(ClaimError::Unkept(remote.registry().to_owned()));
    // What is there already changes nothing, and tells whether the registry looks.
    let stored = remote.manifest(&index.digest).await?;
    if remote.put_new(&index.digest.to_string(), &index.media_type, stored.content).await? {
        return unkept();
    }
    put(store, &Descriptor::of(media_type::OCI_EMPTY, EMPTY), Bytes::from_static(EMPTY)).await?;
    let content = claimant.manifest(index)?;
    // The second time, there is one: a registry that takes it again would have taken anybody's.
    for is_there in [false, true] {
        let put = remote.put_new(tag.as_str(), media_type::OCI_MANIFEST, content.clone()).await?;
        if put && is_there {
            return unkept();
        }
    }
    match held(remote, &tag).await? {
        Some(held) => judge(remote, tag, &held, claimant),
        // Somebody has let go of it just now, and may have been given it first.
        None => Err(ClaimError::Store(StoreError {
            operation: "take",
            subject: format!(":{tag}"),
            kind: StoreErrorKind::NotFound,
        })),
    }
}

/// Lets go of a checkpoint that somebody has taken and that does not run there. Returns whether it was
/// theirs.
pub async fn release(
    store: &Store,
    index: &Descriptor,
    claimant: &Claimant,
) -> Result<bool, ClaimError> {
    let Store::Registry(remote) = store else { return Ok(false) };
    match held(remote, &tag_of(index)?).await? {
        Some(held) if held.annotations == claimant.annotations() => {
            // By what it says, and the tag with it: another's in its place says something else.
            let own = Digest::of(&claimant.manifest(index)?);
            remote.delete_manifest(&own).await?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

fn judge(
    remote: &Remote,
    tag: Tag,
    held: &Manifest,
    claimant: &Claimant,
) -> Result<(), ClaimError> {
    if held.annotations == claimant.annotations() {
        return Ok(());
    }
    let said = |key| held.annotations.get(key).map_or("?", String::as_str);
    let by = format!(
        "container {:?} of {} in namespace {:?} on node {:?}",
        said(annotation::CLAIM_CONTAINER),
        said(annotation::CLAIM_OWNER),
        said(annotation::CLAIM_NAMESPACE),
        said(annotation::CLAIM_NODE),
    );
    let repository = format!("{}/{}", remote.registry(), remote.repository());
    Err(ClaimError::Taken { by, tag, repository })
}

/// Returns the tag that says who has a checkpoint.
fn tag_of(index: &Descriptor) -> Result<Tag, TagError> {
    format!("{}.claim", fallback_tag(&index.digest)).parse()
}

/// Returns who has it, if anybody.
async fn held(remote: &Remote, tag: &Tag) -> Result<Option<Manifest>, ClaimError> {
    match remote.resolve(Some(tag)).await {
        Ok(stored) => serde_json::from_slice(&stored.content).map(Some).map_err(ClaimError::Json),
        Err(StoreError { kind: StoreErrorKind::NotFound, .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
