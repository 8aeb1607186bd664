//! Lists of referrers: the registry's own, or the fallback tag (distribution specification,
//! "Listing Referrers" and "Unavailable Referrers API").

use bytes::Bytes;
use kybernate_spec::{Descriptor, Digest, Index, MANIFEST_BYTES_MAX, media_type};

use super::{MANIFEST_TYPES, Remote};
use crate::checked::length;
use crate::outline::may_be;
use crate::store::StoreErrorKind;

/// Pages read of one list. 100 entries a page is the custom.
const PAGES_MAX: usize = 100;

/// Bytes read of one list: thousands of entries, where a checkpoint has a handful.
const LIST_BYTES_MAX: u64 = 16 << 20;

impl Remote {
    pub(super) async fn list_referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, StoreErrorKind> {
        let documents = &self.shared.documents;
        let mut page = documents.address(&format!("referrers/{digest}"))?;
        if let Some(artifact_type) = artifact_type {
            page.query_pairs_mut().append_pair("artifactType", artifact_type);
        }
        let (mut found, mut bytes) = (Vec::new(), 0);
        for _ in 0..PAGES_MAX {
            let got = documents.get_url(&page, media_type::OCI_INDEX, MANIFEST_BYTES_MAX).await;
            let document = match got {
                // The registry has no such list; it may have the fallback tag.
                Err(StoreErrorKind::NotFound) => {
                    let mut listed = self.fallback_list(digest).await?.manifests;
                    listed.retain(|entry| may_be(entry, artifact_type));
                    return Ok(listed);
                }
                other => other?,
            };
            bytes += length(&document.content);
            if bytes > LIST_BYTES_MAX {
                return Err(StoreErrorKind::TooLarge { size: bytes, limit: LIST_BYTES_MAX });
            }
            let index: Index =
                serde_json::from_slice(&document.content).map_err(StoreErrorKind::Malformed)?;
            let filter = artifact_type.filter(|_| !document.filtered);
            found.extend(index.manifests.into_iter().filter(|entry| may_be(entry, filter)));
            match document.next {
                Some(next) => page = next,
                None => return Ok(found),
            }
        }
        Ok(found)
    }

    /// Adds a referrer to the list under the fallback tag. Two writers can still overwrite each
    /// other, as with every client: the specification offers no compare-and-set.
    pub(super) async fn list_under_fallback_tag(
        &self,
        subject: &Digest,
        referrer: Descriptor,
    ) -> Result<(), StoreErrorKind> {
        let mut index = self.fallback_list(subject).await?;
        if index.manifests.iter().any(|entry| entry.digest == referrer.digest) {
            return Ok(());
        }
        index.manifests.push(referrer);
        let content = serde_json::to_vec(&index).map_err(StoreErrorKind::Malformed)?;
        let path = format!("manifests/{}", fallback_tag(subject));
        let documents = &self.shared.documents;
        documents.put(&path, media_type::OCI_INDEX, Bytes::from(content)).await?;
        Ok(())
    }

    async fn fallback_list(&self, subject: &Digest) -> Result<Index, StoreErrorKind> {
        let path = format!("manifests/{}", fallback_tag(subject));
        match self.shared.documents.get(&path, MANIFEST_TYPES, MANIFEST_BYTES_MAX).await {
            Ok(document) => {
                serde_json::from_slice(&document.content).map_err(StoreErrorKind::Malformed)
            }
            Err(StoreErrorKind::NotFound) => Ok(Index {
                schema_version: 2,
                media_type: Some(media_type::OCI_INDEX.to_owned()),
                artifact_type: None,
                manifests: Vec::new(),
                subject: None,
                annotations: kybernate_spec::Annotations::new(),
            }),
            Err(kind) => Err(kind),
        }
    }
}

/// `<algorithm>-<digits>`, cut to the length a tag may have.
pub(crate) fn fallback_tag(subject: &Digest) -> String {
    let digits: String = subject.hex().chars().take(64).collect();
    format!("{}-{digits}", subject.algorithm())
}
