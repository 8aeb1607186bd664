//! Whether blobs are there, and linking them from elsewhere.

use kybernate_spec::{Digest, RepositoryName};
use oci_client::errors::OciDistributionError;

use super::patience::{persist, within_stall};
use super::{Remote, image};
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
        let target = self.image("latest");
        let source = image(&self.shared.registry, from, "latest");
        let digest = digest.to_string();
        let linked =
            persist(|| within_stall(self.shared.client.mount_blob(&target, &source, &digest)))
                .await;
        match linked {
            Ok(()) => Ok(true),
            // Accepted as an upload instead: the registry does not know the blob, or does not mount.
            Err(
                StoreErrorKind::Registry(OciDistributionError::SpecViolationError(_))
                | StoreErrorKind::NotFound
                | StoreErrorKind::Unauthorized,
            ) => Ok(false),
            Err(kind) => Err(kind),
        }
    }
}
