//! Whether blobs are there, and linking them from elsewhere.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kybernate_spec::{Digest, RepositoryName};
use reqwest::Url;

use super::Remote;
use super::documents::Mount;
use crate::store::StoreErrorKind;

/// Uploads that are remembered: more blobs than an artifact has on its way at a time.
const BEGUN_MAX: usize = 64;

/// Uploads that a registry has begun where it was to link a blob. The blob goes up with that one: a
/// registry counts those that are begun, and keeps for days what nobody ends.
#[derive(Default)]
pub(super) struct Begun(
    // Held for a look-up only, never across an `.await`.
    Mutex<HashMap<Digest, Url>>,
);

impl Begun {
    fn keep(&self, digest: &Digest, url: Url) {
        let mut begun = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if begun.len() < BEGUN_MAX {
            begun.insert(digest.clone(), url);
        }
    }

    /// Returns where the upload of a blob goes on that nobody else goes on with.
    pub(super) fn take(&self, digest: &Digest) -> Option<Url> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(digest)
    }
}

impl Remote {
    pub(super) async fn find_blob(&self, digest: &Digest) -> Result<bool, StoreErrorKind> {
        self.shared.documents.exists(&format!("blobs/{digest}")).await
    }

    pub(super) async fn link_blob(
        &self,
        digest: &Digest,
        from: &RepositoryName,
    ) -> Result<bool, StoreErrorKind> {
        match self.shared.documents.mount(&digest.to_string(), from).await {
            Ok(Mount::Linked) => Ok(true),
            // The registry does not know the blob, or does not mount.
            Ok(Mount::Upload(begun)) => {
                if let Some(url) = begun {
                    self.shared.begun.keep(digest, url);
                }
                Ok(false)
            }
            Err(
                StoreErrorKind::NotFound
                | StoreErrorKind::Unauthorized(_)
                | StoreErrorKind::Denied(_),
            ) => Ok(false),
            Err(kind) => Err(kind),
        }
    }
}
