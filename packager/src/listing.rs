//! The checkpoints of a repository, and the chain that one stands in.

use std::collections::BTreeMap;

use futures::stream::{self, StreamExt as _};
use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::{Digest, Location, Tag, media_type};
use schemars::JsonSchema;
use serde::Serialize;

use crate::artifact::{ArtifactError, Checkpoint};
use crate::key::PublicKey;
use crate::policy::{Policy, PolicyError, Verdict};
use crate::store::{Store, StoreError, StoreErrorKind, StoredManifest};
use crate::verify::{VerifyError, verify_signature};

/// Requests under way at once.
const PARALLEL: usize = 8;

/// Longest chain followed. Generations end at eight; what is written anew names its base too.
const CHAIN_MAX: usize = 256;

/// Why something could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// It could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A checkpoint could not be opened.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The signatures of one could not be read.
    #[error(transparent)]
    Signatures(#[from] VerifyError),
    /// Whether the policy lets one in could not be found out.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Nothing was named that could be removed.
    #[error("a tag or a digest must be named")]
    Unnamed,
    /// A tag and a digest were named that do not belong together.
    #[error("the tag {tag} names {named}, not this digest: say only which of the two is to go")]
    Disagree {
        /// The tag.
        tag: Tag,
        /// What it names.
        named: String,
    },
}

/// What a repository holds.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listing {
    /// Checkpoints with a tag, the newest first.
    pub checkpoints: Vec<Listed>,
    /// Tags that name something else.
    pub other_tags: Vec<String>,
    /// Tags that name something that cannot be read as a checkpoint, and why.
    pub unreadable: Vec<Unreadable>,
}

/// A tag that names something that cannot be read as a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Unreadable {
    /// The tag.
    pub tag: String,
    /// What is wrong.
    pub message: String,
}

/// One checkpoint. Claims, but for the signature where keys or a policy were given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Its tags.
    pub tags: Vec<String>,
    /// Its digest.
    pub digest: Digest,
    /// When it was taken, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// The container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The container's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The container image that it was started from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// 0 when every page was stored anew.
    pub generation: u32,
    /// The checkpoint it was compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// Bytes of its config and layers, the runnable image aside.
    pub bytes: u64,
    /// Who signed it.
    pub signed: Signed,
}

/// Who signed a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Signed {
    /// Nobody.
    No,
    /// Somebody; nothing is proven. The keys are what the signatures call them.
    Unverified {
        /// The keys.
        keys: Vec<String>,
    },
    /// The key of this name, which was asked for, and it is proven.
    Verified {
        /// The key.
        key: String,
        /// The rule of the policy whose key it is.
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<String>,
    },
    /// Not as the policy wants it, and this rule only warns.
    Tolerated {
        /// The rule.
        rule: String,
        /// What it objects to.
        message: String,
    },
    /// This rule of the policy does not look at signatures.
    NotLooked {
        /// The rule.
        rule: String,
    },
    /// The policy refuses it.
    Refused {
        /// The word for why: `no-rule`, `not-signed`, `other-key`, `expired`.
        objection: String,
        /// Why.
        message: String,
    },
}

/// Who decides whose signatures count.
#[derive(Clone, Copy, Debug)]
pub enum Judge<'a> {
    /// One of these keys must have signed. Without keys nothing is verified.
    Keys(&'a [PublicKey]),
    /// A policy, of checkpoints in this repository that go into this namespace: their own, without
    /// one.
    Policy(&'a Policy, &'a Location, Option<&'a str>),
}

/// A checkpoint and what it was compared with, and so on.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Chain {
    /// The checkpoint asked for, then its base, then that one's.
    pub links: Vec<Link>,
    /// The base of the last one, when it is not in the repository: it has been removed, or is
    /// elsewhere. Each checkpoint stands alone, so nothing is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<Digest>,
}

/// One checkpoint of a chain.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// The checkpoint.
    #[serde(flatten)]
    pub checkpoint: Listed,
    /// Bytes of its page shards that its base has not.
    pub added_page_bytes: u64,
    /// Bytes of its page shards that its base has, too.
    pub shared_page_bytes: u64,
}

/// A checkpoint that was looked at, however that ended.
type Opened = Result<Listed, ListError>;

/// Lists the checkpoints of a repository or layout by their tags.
pub async fn list(store: &Store, judge: Judge<'_>) -> Result<Listing, ListError> {
    let tags = store.tags().await?;
    let resolved: Vec<(Tag, Result<StoredManifest, StoreError>)> = stream::iter(tags)
        .map(|tag| async move {
            let found = store.resolve_tag(&tag).await;
            (tag, found)
        })
        .buffered(PARALLEL)
        .collect()
        .await;
    let mut listing =
        Listing { checkpoints: Vec::new(), other_tags: Vec::new(), unreadable: Vec::new() };
    let mut named: BTreeMap<Digest, (StoredManifest, Vec<String>)> = BTreeMap::new();
    for (tag, found) in resolved {
        match found {
            Ok(found) => {
                let digest = found.descriptor.digest.clone();
                let (_, tags) = named.entry(digest).or_insert_with(|| (found, Vec::new()));
                tags.push(tag.to_string());
            }
            // Somebody has removed it since the list was made.
            Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => {}
            Err(error) if error.kind.is_about_content() => {
                listing.unreadable.push(unreadable(tag.to_string(), &error));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let opened: Vec<(Vec<String>, Opened)> = stream::iter(named.into_values())
        .map(|(stored, tags)| async move {
            let listed = open(store, stored, &tags, judge).await;
            (tags, listed)
        })
        .buffered(PARALLEL)
        .collect()
        .await;
    for (tags, listed) in opened {
        match listed {
            Ok(listed) => listing.checkpoints.push(listed),
            Err(ListError::Artifact(ArtifactError::NotACheckpoint(..))) => {
                listing.other_tags.extend(tags);
            }
            Err(ListError::Artifact(error)) if error.reason().is_some() => {
                listing.unreadable.extend(tags.into_iter().map(|tag| unreadable(tag, &error)));
            }
            Err(error) => return Err(error),
        }
    }
    // RFC 3339 in one time zone sorts as text; what has no time comes last.
    listing.checkpoints.sort_by(|one, other| {
        (&other.created, &one.tags, &one.digest).cmp(&(&one.created, &other.tags, &other.digest))
    });
    listing.other_tags.sort();
    Ok(listing)
}

/// Follows the bases of a checkpoint within its repository.
pub async fn chain(
    store: &Store,
    location: &Location,
    judge: Judge<'_>,
) -> Result<Chain, ListError> {
    let mut next = Checkpoint::open(store, location).await?;
    let mut chain = Chain { links: Vec::new(), missing: None };
    while chain.links.len() < CHAIN_MAX {
        let tags = location.tag().filter(|_| chain.links.is_empty() && location.digest().is_none());
        let tags: Vec<String> = tags.map(ToString::to_string).into_iter().collect();
        let listed = listed(store, &next, tags, judge).await?;
        let base = match &next.config.lineage.base {
            None => None,
            Some(digest) => match store.manifest(digest).await {
                Ok(stored) => Some(Checkpoint::of(store, stored, &digest.to_string()).await?),
                Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => {
                    chain.missing = Some(digest.clone());
                    None
                }
                Err(error) => return Err(error.into()),
            },
        };
        let known = |shard: &&kybernate_spec::Descriptor| {
            let mut shards = base.iter().flat_map(|base| &base.shards);
            shards.any(|other| other.digest == shard.digest)
        };
        let (shared, added): (Vec<_>, Vec<_>) = next.shards.iter().partition(known);
        let sum = |shards: Vec<&kybernate_spec::Descriptor>| {
            shards.iter().fold(0, |sum: u64, shard| sum.saturating_add(shard.size))
        };
        chain.links.push(Link {
            checkpoint: listed,
            added_page_bytes: sum(added),
            shared_page_bytes: sum(shared),
        });
        match base {
            Some(base) => next = base,
            None => break,
        }
    }
    Ok(chain)
}

async fn open(
    store: &Store,
    stored: StoredManifest,
    tags: &[String],
    judge: Judge<'_>,
) -> Result<Listed, ListError> {
    let name = tags.first().cloned().unwrap_or_default();
    let checkpoint = Checkpoint::of(store, stored, &name).await?;
    listed(store, &checkpoint, tags.to_vec(), judge).await
}

async fn listed(
    store: &Store,
    checkpoint: &Checkpoint,
    tags: Vec<String>,
    judge: Judge<'_>,
) -> Result<Listed, ListError> {
    let digest = checkpoint.stored.descriptor.digest.clone();
    let signed = judge.of(store, checkpoint).await?;
    let layers = checkpoint.manifest.layers.iter().chain([&checkpoint.manifest.config]);
    let bytes = layers.fold(0, |sum: u64, layer| sum.saturating_add(layer.size));
    let CheckpointConfig { created, source, lineage, .. } = checkpoint.config.clone();
    Ok(Listed {
        tags,
        digest,
        created,
        container: source.container,
        namespace: source.namespace,
        image: source.image,
        generation: lineage.generation,
        base: lineage.base,
        bytes,
        signed,
    })
}

impl Judge<'_> {
    async fn of(self, store: &Store, checkpoint: &Checkpoint) -> Result<Signed, ListError> {
        match self {
            Self::Keys(keys) => {
                let digest = &checkpoint.stored.descriptor.digest;
                match verify_signature(store, digest, keys).await {
                    Ok(verified) => Ok(Signed::Verified { key: verified.key, rule: None }),
                    Err(VerifyError::NotSigned { .. }) => Ok(Signed::No),
                    Err(VerifyError::OtherKeys { keys, .. }) => Ok(Signed::Unverified { keys }),
                    Err(error) => Err(error.into()),
                }
            }
            Self::Policy(policy, location, target) => {
                match policy.judge(store, checkpoint, location, target).await {
                    Ok(verdict) => Ok(verdict.into()),
                    Err(error) => match error.objection() {
                        Some(objection) => Ok(Signed::Refused {
                            objection: objection.name().to_owned(),
                            message: kybernate_spec::chain(&error).to_string(),
                        }),
                        None => Err(error.into()),
                    },
                }
            }
        }
    }
}

impl From<Verdict> for Signed {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Signed { rule, by } => Self::Verified { key: by.key, rule: Some(rule) },
            Verdict::Tolerated { rule, why } => {
                Self::Tolerated { rule, message: kybernate_spec::chain(&why).to_string() }
            }
            Verdict::NotLooked { rule } => Self::NotLooked { rule },
        }
    }
}

fn unreadable(tag: String, error: &(dyn std::error::Error + 'static)) -> Unreadable {
    Unreadable { tag, message: kybernate_spec::chain(error).to_string() }
}

/// What was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Removed {
    /// The tag that was removed, when only that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// What the tag names, or what was removed.
    pub digest: Digest,
    /// Its signatures and other referrers: removed with it, or there still when only a tag was.
    pub referrers: Vec<Digest>,
    /// Which of them are signatures.
    pub signatures: Vec<Digest>,
}

/// Removes a tag; or, when `location` names a digest, that checkpoint with its tags and referrers.
/// What an earlier run has not finished is. Anything else than a checkpoint is refused: what hangs
/// under an image are checkpoints.
pub async fn remove(store: &Store, location: &Location) -> Result<Removed, ListError> {
    if let (None, Some(tag)) = (location.digest(), location.tag()) {
        let digest = store.resolve(location).await?.descriptor.digest;
        let (referrers, signatures) = referrers(store, &digest).await?;
        store.delete_tag(tag).await?;
        return Ok(Removed { tag: Some(tag.to_string()), digest, referrers, signatures });
    }
    let digest = location.digest().ok_or(ListError::Unnamed)?;
    if let Some(tag) = location.tag() {
        agrees(store, location, tag, digest).await?;
    }
    match store.manifest(digest).await {
        // An earlier run has removed it, and perhaps not all of its referrers.
        Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => {}
        Ok(stored) if !is_checkpoint(&stored) => {
            let StoredManifest { descriptor, .. } = stored;
            let what = descriptor.artifact_type.unwrap_or(descriptor.media_type);
            return Err(ArtifactError::NotACheckpoint(location.to_string(), what).into());
        }
        other => drop(other?),
    }
    let (referrers, signatures) = referrers(store, digest).await?;
    store.delete_manifest(digest, &referrers).await?;
    Ok(Removed { tag: None, digest: digest.clone(), referrers, signatures })
}

/// Makes sure that a tag names what it is removed with: one of the two may be a slip.
async fn agrees(
    store: &Store,
    location: &Location,
    tag: &Tag,
    digest: &Digest,
) -> Result<(), ListError> {
    let mut by_tag = location.clone();
    match &mut by_tag {
        Location::Registry(reference) => reference.digest = None,
        Location::Layout(layout) => layout.digest = None,
    }
    let named = store.resolve(&by_tag).await.map(|stored| stored.descriptor.digest);
    let named = match named {
        Ok(named) if named == *digest => return Ok(()),
        Ok(named) => named.to_string(),
        Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => "nothing".to_owned(),
        Err(error) => return Err(error.into()),
    };
    Err(ListError::Disagree { tag: tag.clone(), named })
}

/// Returns what belongs to a checkpoint by referring to it, and which of that is a signature; other
/// checkpoints do not belong to it.
async fn referrers(
    store: &Store,
    digest: &Digest,
) -> Result<(Vec<Digest>, Vec<Digest>), StoreError> {
    let (mut found, mut signatures) = (Vec::new(), Vec::new());
    for referrer in store.referrers(digest, None).await? {
        // Lists under fallback tags say of cosign's signatures nothing, or something else.
        let kind = match store.manifest(&referrer.digest).await {
            Ok(stored) if is_checkpoint(&stored) => continue,
            Ok(stored) => stored.descriptor.artifact_type,
            // One that cannot be read is no checkpoint either.
            Err(error) if error.kind.is_about_content() => referrer.artifact_type,
            Err(error) => return Err(error),
        };
        if kind.as_deref() == Some(media_type::SIGSTORE_BUNDLE) {
            signatures.push(referrer.digest.clone());
        }
        found.push(referrer.digest);
    }
    Ok((found, signatures))
}

fn is_checkpoint(stored: &StoredManifest) -> bool {
    stored.descriptor.artifact_type.as_deref() == Some(media_type::CHECKPOINT)
}
