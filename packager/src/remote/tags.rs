//! Lists of tags, and the end of tags and manifests (distribution specification, "Listing Tags"
//! and "Deleting").

use bytes::Bytes;
use kybernate_spec::{Digest, Tag};
use serde::Deserialize;

use super::Remote;
use super::referrers::fallback_tag;
use crate::checked::length;
use crate::store::{StoreError, StoreErrorKind};

/// Largest page of a list that is read: ten thousand tags of the greatest length.
const PAGE_BYTES_MAX: u64 = 2 << 20;

/// Pages read of one list.
const PAGES_MAX: usize = 1000;

/// Bytes read of one list: some hundred thousand tags.
const LIST_BYTES_MAX: u64 = 32 << 20;

#[derive(Deserialize)]
struct List {
    /// `null` where there is none.
    tags: Option<Vec<String>>,
}

impl Remote {
    /// Lists the repository's tags in the registry's order; those that stand for a list of
    /// referrers are left out.
    pub async fn tags(&self) -> Result<Vec<Tag>, StoreError> {
        self.list_tags().await.map_err(|kind| self.error("list the tags of", "", kind))
    }

    /// Stores a manifest under a tag or digest that is to be new. Returns whether the registry took it:
    /// it may have one, and a registry that does not keep the condition takes it all the same.
    pub(crate) async fn put_new(
        &self,
        name: &str,
        media_type: &str,
        content: Bytes,
    ) -> Result<bool, StoreError> {
        let path = format!("manifests/{name}");
        let put = self.shared.documents.put_new(&path, media_type, content).await;
        put.map_err(|kind| self.error("store as new", name, kind))
    }

    /// Removes a tag, and nothing else.
    pub async fn delete_tag(&self, tag: &Tag) -> Result<(), StoreError> {
        self.shared
            .documents
            .delete(&format!("manifests/{tag}"))
            .await
            .map_err(|kind| self.error("delete tag", &format!(":{tag}"), kind))
    }

    /// Removes a manifest, and every tag that names it.
    pub async fn delete_manifest(&self, digest: &Digest) -> Result<(), StoreError> {
        self.shared
            .documents
            .delete(&format!("manifests/{digest}"))
            .await
            .map_err(|kind| self.error("delete manifest", &format!("@{digest}"), kind))
    }

    /// Removes the list of referrers that a registry without such lists keeps under a tag.
    pub async fn delete_fallback_list(&self, digest: &Digest) -> Result<(), StoreError> {
        let failed =
            |kind| self.error("delete the list of referrers of", &format!("@{digest}"), kind);
        let tag = fallback_tag(digest);
        match self.fetch_manifest(&tag, None).await {
            Err(StoreErrorKind::NotFound) => Ok(()),
            Err(kind) => Err(failed(kind)),
            Ok(list) => self.delete_manifest(&list.descriptor.digest).await,
        }
    }

    async fn list_tags(&self) -> Result<Vec<Tag>, StoreErrorKind> {
        let documents = &self.shared.documents;
        let mut page = documents.address("tags/list")?;
        let (mut tags, mut bytes) = (Vec::new(), 0);
        for _ in 0..PAGES_MAX {
            let document = documents.get_url(&page, "application/json", PAGE_BYTES_MAX).await?;
            bytes += length(&document.content);
            if bytes > LIST_BYTES_MAX {
                return Err(StoreErrorKind::TooLarge { size: bytes, limit: LIST_BYTES_MAX });
            }
            let list: List =
                serde_json::from_slice(&document.content).map_err(StoreErrorKind::Malformed)?;
            // What is no tag by the specification cannot be asked for.
            let names = list.tags.into_iter().flatten().filter(|name| !is_fallback(name));
            tags.extend(names.filter_map(|name| name.parse::<Tag>().ok()));
            match document.next {
                Some(next) => page = next,
                None => break,
            }
        }
        Ok(tags)
    }
}

/// Whether a tag stands for a list of referrers.
fn is_fallback(tag: &str) -> bool {
    tag.split_once('-').is_some_and(|(algorithm, digits)| {
        matches!(algorithm, "sha256" | "sha512")
            && digits.len() == 64
            && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}
