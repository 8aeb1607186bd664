//! Whether blobs are there, and linking them from elsewhere.

use kybernate_spec::{Digest, RepositoryName};

use super::Remote;
use crate::store::StoreErrorKind;

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
            // Accepted as an upload instead: the registry does not know the blob, or does not mount.
            Ok(linked) => Ok(linked),
            Err(
                StoreErrorKind::NotFound
                | StoreErrorKind::Unauthorized(_)
                | StoreErrorKind::Denied(_),
            ) => Ok(false),
            Err(kind) => Err(kind),
        }
    }
}
